"""Kernels compiled for any architecture, without a GPU or its driver, and cached on disk under an honest key.

A kernel is written in a *builder*: a function of a module that takes what the kernel is specialised on (strings,
numbers, NamedTuples of these: their repr is part of the key) and returns the kernel, a Python function over pointers
and scalars, with its argument types. Numba makes LTO-IR of it, and nvJitLink machine code: in link-time optimisation
alone are all instructions of an architecture accepted.

The key hashes everything the machine code depends on: the parsed source of the builder's module and of every kernel
module it imports, what it is specialised on, the architecture and the versions of the compilers. They are read without
importing them, so a process that finds its kernels on disk imports neither Numba nor NVVM: builders import what they
need themselves.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
import re
import sys
import threading
from collections.abc import Callable, Hashable
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from nbdnn import config
from nbdnn.errors import CudaError
from nbdnn.kept import keep
from nbdnn.kernels.cuda.inlining import inlined_once
from nbdnn.source import changed_since_start, transitive_hash

Builder = Callable[..., tuple[Callable[..., None], tuple]]

# Distributions of either CUDA release; where a toolkit was installed by other means, its compilers have no version.
_COMPILERS = (
    *("numba", "llvmlite", "numba-cuda", "cuda-bindings"),
    *("nvidia-nvvm", "nvidia-nvjitlink", "nvidia-cuda-nvcc-cu12", "nvidia-nvjitlink-cu12"),
)
_USAGE = {
    "registers": r"Used (\d+) registers",
    "stack_bytes": r"(\d+) bytes stack frame",
    "spill_bytes": r"(\d+) bytes spill stores",
    "shared_bytes": r"(\d+) bytes smem",
}

# A kernel begins with this where the architecture knows it: its blocks may be there before what is before them on the
# stream has ended (`launch.py`), and wait for that.
OVERLAPS_FROM = 9, 0
_WAIT = "griddepcontrol.wait;"

_log = logging.getLogger("nbdnn")
_kernels: dict[tuple, Kernel] = {}
_lock = threading.Lock()


class Kernel(NamedTuple):
    """Machine code of one kernel, the name it has there, and what a thread (registers, stack) or a block needs.

    The needs are None where the linker does not tell: the one of CUDA 13.0 often does not.
    """

    cubin: bytes
    entry: str
    registers: int | None
    stack_bytes: int | None
    spill_bytes: int | None
    shared_bytes: int | None

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.cubin).hexdigest()


class Source(NamedTuple):
    """What a kernel is compiled from.

    threads: of a block, at most. min_blocks: that shall fit on a multiprocessor at once, which bounds the registers.
    """

    builder: Builder
    specialised_on: tuple[Hashable, ...]
    threads: int
    min_blocks: int = 1

    @property
    def label(self) -> str:
        return f"{self.builder.__module__.rpartition('.')[2]}-{self.builder.__name__.strip('_')}"


def cache_dir() -> Path:
    """Where the compiled kernels of this provider are kept."""
    return config.cache_dir() / "cuda"


def compile_kernel(source: Source, arch: str) -> Kernel:
    """The kernel for an architecture such as 'sm_90a': from this process, the disk or the compilers.

    CudaError carries the compilers' text.
    """
    with _lock:
        known = _kernels.get((source, arch))
        if known is None:
            path = _path(source, arch)
            known = _load(path)
            if known is None:
                known = _compiled(source, arch)
                _save(path, known, source)
            _kernels[source, arch] = known
        return known


def is_kept(source: Source, arch: str) -> bool:
    """Whether the kernel is on disk."""
    return _path(source, arch).exists()


def ptx_text(source: Source, arch: str) -> str:
    """The PTX that the machine code is made of: for reading, and for tests of what it must not contain."""
    ptx, _ = _link(_ltoir(source, arch), source, arch, "-ptx")
    return ptx.decode()


def _path(source: Source, arch: str) -> Path:
    builder = source.builder
    facts = (
        transitive_hash(sys.modules[builder.__module__]),
        builder.__qualname__,
        *source[1:],
        _WAIT if _waits(arch) else "",
        arch,
        _compilers(),
        sys.version_info[:2],
    )
    digest = hashlib.sha256(repr(facts).encode()).hexdigest()[:32]
    return cache_dir() / f"{source.label}-{arch}-{digest}.kernel"


@cache
def _compilers() -> tuple[tuple[str, str], ...]:
    """(distribution, version) of what compiles a kernel, as far as installed."""
    return tuple((name, _version(name)) for name in _COMPILERS)


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


# A file: one line of JSON (the fields of Kernel but its code, and the digest of that), then the machine code.


def _load(path: Path) -> Kernel | None:
    try:
        head, _, cubin = path.read_bytes().partition(b"\n")
        facts = json.loads(head)
        digest = facts.pop("digest")
        kernel = Kernel(cubin, **facts)
        if kernel.digest != digest:
            raise ValueError(f"its code has digest {kernel.digest}, not {digest}")
        return kernel
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        _log.warning("compiled kernel %s could not be read (%s): compiling again", path, error)
        return None


def _save(path: Path, kernel: Kernel, source: Source) -> None:
    if changed_since_start(sys.modules[source.builder.__module__]):
        _log.warning("%s is not kept on disk: its source has changed since it was loaded", source.label)
        return
    facts = {**kernel._asdict(), "digest": kernel.digest}
    del facts["cubin"]
    keep(path, json.dumps(facts).encode() + b"\n" + kernel.cubin)


def _compiled(source: Source, arch: str) -> Kernel:
    cubin, log = _link(_ltoir(source, arch), source, arch, "-verbose", "-Xptxas=-v")
    entries = set(re.findall(rb"\0\.text\.([^\0]+)", cubin))  # sections of the ELF file: one a function
    if len(entries) != 1:
        raise CudaError(f"{source.label} for {arch}: {len(entries)} functions instead of one kernel:\n{log}")
    told = "Compiling entry function" in log
    usage = {name: int(found[1]) if (found := re.search(text, log)) else 0 for name, text in _USAGE.items()}
    return Kernel(cubin, entries.pop().decode(), **(usage if told else dict.fromkeys(_USAGE)))


@lru_cache(maxsize=1)
def _ltoir(source: Source, arch: str) -> bytes:
    """Kept for who wants both machine code and PTX: Numba takes most of the time of either."""
    from numba import cuda

    function, types = source.builder(*source.specialised_on)
    if _waits(arch):
        function = _waiting(function, len(types))
    options: dict[str, Any] = {"device": False, "abi": "numba", "output": "ltoir"}
    try:
        with inlined_once():
            code, _ = cuda.compile(
                function,
                cuda.types.void(*types),
                cc=_capability(arch),
                launch_bounds=(source.threads, source.min_blocks),
                **options,
            )
    except Exception as error:  # Numba's and NVVM's errors have no other base
        raise CudaError(f"{source.label} does not compile for {arch}: {error}") from error
    return code


def _capability(arch: str) -> tuple[int, int] | tuple[int, int, str]:
    """(major, minor) and what follows them, as numba-cuda has an architecture."""
    major, minor, suffix = re.fullmatch(r"sm_(\d+)(\d)(a?)", arch).groups()  # type: ignore[union-attr]
    return (int(major), int(minor), suffix) if suffix else (int(major), int(minor))


def _waits(arch: str) -> bool:
    return _capability(arch)[:2] >= OVERLAPS_FROM


def _waiting(kernel: Callable[..., None], count: int) -> Callable[..., None]:
    """The kernel, of so many arguments, with `_WAIT` before its first statement."""
    from nbdnn.kernels.cuda import ptx, ptx_tile

    arguments, name = ", ".join(f"argument_{i}" for i in range(count)), kernel.__name__
    names = {"__name__": kernel.__module__, "wait": ptx_tile.effect(_WAIT), "inlined": ptx.inline(kernel)}
    exec(f"def {name}({arguments}):\n    wait()\n    inlined({arguments})\n", names)
    return names[name]


def _link(ltoir: bytes, source: Source, arch: str, *options: str) -> tuple[bytes, str]:
    """(cubin, or PTX with the option -ptx; log) of LTO-IR."""
    from cuda.bindings import nvjitlink

    every = [f"-arch={arch}", "-lto", "-O3", *options]
    handle = nvjitlink.create(len(every), every)
    try:
        nvjitlink.add_data(handle, nvjitlink.InputType.LTOIR, ltoir, len(ltoir), source.label)
        nvjitlink.complete(handle)
        product = "ptx" if "-ptx" in options else "cubin"
        return _text(handle, f"linked_{product}"), _text(handle, "info_log").decode(errors="replace")
    except nvjitlink.nvJitLinkError as error:
        log = _text(handle, "error_log").decode(errors="replace")
        raise CudaError(f"nvJitLink: {source.label} for {arch}: {error}\n{log}") from error
    finally:
        nvjitlink.destroy(handle)


def _text(handle: int, name: str) -> bytes:
    """What nvJitLink's get_<name> fills a buffer with, without the zero at its end."""
    from cuda.bindings import nvjitlink

    size = getattr(nvjitlink, f"get_{name}_size")(handle)
    buffer = bytearray(size)
    if size:
        getattr(nvjitlink, f"get_{name}")(handle, buffer)
    return bytes(buffer) if name == "linked_cubin" else bytes(buffer).rstrip(b"\0")
