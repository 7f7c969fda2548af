"""C libraries made for a test: a cuDNN with a fault, and a CUDA driver without a device.

cuDNN plans for a GPU that is described to it, but its engines are linked against the driver. The stand-in refuses every
question about devices, and pretends to load the kernels that engines compile.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

_FAKE_CUDNN = r"""
#include <stddef.h>
#include <string.h>
size_t cudnnGetVersion(void) { return VERSION; }
size_t cudnnGetCudartVersion(void) { return CUDART; }
int cudnnGraphVersionCheck(void) { return 0; }
int cudnnOpsVersionCheck(void) { return OPS_STATUS; }
int cudnnCnnVersionCheck(void) { return 0; }
void cudnnGetLastErrorString(char *text, size_t size) { strncpy(text, OPS_STATUS ? "ops is 9.14.0" : "", size); }
"""

_NO_DEVICE = 100
_FAKE_DRIVER = f"""
static char thing[64];
#define MADE(name) int name(void **out) {{ *out = thing; return 0; }}
#define DONE(name) int name(void) {{ return 0; }}
#define NO_DEVICE(name) int name(void) {{ return {_NO_DEVICE}; }}
MADE(cuLibraryLoadData) MADE(cuLibraryLoadFromFile) MADE(cuLibraryGetKernel) MADE(cuKernelGetFunction)
MADE(cuModuleLoadData) MADE(cuModuleGetFunction)
DONE(cuKernelSetAttribute) DONE(cuLibraryUnload) DONE(cuModuleUnload)
int cuKernelGetAttribute(int *value) {{ *value = 0; return 0; }}
int cuOccupancyMaxPotentialClusterSize(int *clusters) {{ *clusters = 16; return 0; }}
int cuDriverGetVersion(int *version) {{ *version = 13000; return 0; }}
NO_DEVICE(cuInit) NO_DEVICE(cuDeviceGet) NO_DEVICE(cuDeviceGetCount) NO_DEVICE(cuCtxGetCurrent)
NO_DEVICE(cuCtxGetLimit) NO_DEVICE(cuCtxPopCurrent) NO_DEVICE(cuCtxPushCurrent) NO_DEVICE(cuGetErrorName)
NO_DEVICE(cuGetErrorString) NO_DEVICE(cuLaunchCooperativeKernel) NO_DEVICE(cuLaunchKernel)
NO_DEVICE(cuLaunchKernelEx) NO_DEVICE(cuLinkAddData) NO_DEVICE(cuLinkComplete) NO_DEVICE(cuLinkCreate)
NO_DEVICE(cuLinkDestroy) NO_DEVICE(cuStreamGetCtx) NO_DEVICE(cuTensorMapEncodeIm2col)
NO_DEVICE(cuTensorMapEncodeTiled)
"""


def fake_cudnn(folder: Path, version: int = 92700, cudart: int = 13000, ops_status: int = 0) -> Path:
    """A cuDNN with all its parts by name, that says what it is told to."""
    path = folder / "libcudnn.so.9"
    values = {"VERSION": version, "CUDART": cudart, "OPS_STATUS": ops_status}
    _compile(_FAKE_CUDNN, path, *(f"-D{name}={value}" for name, value in values.items()))
    for part in ("graph", "ops", "cnn", "engines_precompiled", "engines_runtime_compiled", "heuristic"):
        shutil.copy(path, folder / f"libcudnn_{part}.so.9")
    return path


@cache
def stand_in_driver() -> ctypes.CDLL:
    """libcuda.so.1 for this process: the system's, or where there is none, one that has no device."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        path = Path(mkdtemp(prefix="nbdnn-driver-")) / "libcuda.so.1"
        _compile(_FAKE_DRIVER, path)
        return ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)


def _compile(source: str, path: Path, *arguments: str) -> None:
    # With a name of its own, a library that is asked for by that name is this one, wherever it lies.
    command = ["cc", "-shared", "-fPIC", "-x", "c", "-", f"-Wl,-soname,{path.name}", "-o", str(path), *arguments]
    subprocess.run(command, input=source, text=True, check=True)
