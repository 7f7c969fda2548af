"""Facts about the device that a choice depends on."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from nbdnn import config, driver
from nbdnn.errors import CudaError, InvalidProblem
from nbdnn.problem import ITEMSIZE


class _ControlGroup(NamedTuple):
    """Where a control group says how much memory it may use, how much it does, and what of that (a line of
    memory.stat) is cached files, which go when memory is wanted: a program that has read its data set has it full."""

    folder: str
    limit: str
    usage: str
    cached: str

    def free_bytes(self) -> int | None:
        """None where there is no limit."""
        folder = Path(self.folder)
        try:
            limit, usage = (folder / self.limit).read_text().strip(), int((folder / self.usage).read_text())
            facts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except OSError:
            return None
        return max(0, int(limit) - usage + int(facts.get(self.cached, 0))) if limit.isdigit() else None


_CONTROL_GROUPS = (
    _ControlGroup("/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    _ControlGroup("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


@dataclass(frozen=True)
class Cpu:
    """A CPU, as its measurements are filed.

    ``isa`` is the widest vector extension LLVM will use ('avx512', 'avx2', 'neon', 'generic'), ``vector_bytes`` its
    register width, ``threads`` what Numba runs a parallel region on, ``l2_bytes`` a core's, ``llc_bytes`` the chip's;
    ``multiplies_bf16`` says that vectors of 64 bytes of bfloat16 can be multiplied and summed in float32 (AVX512_BF16),
    ``multiplies_tiles`` that matrix units do so (AMX-BF16), and that this process may use them.
    """

    kind: str
    name: str
    isa: str
    vector_bytes: int
    threads: int
    l2_bytes: int
    llc_bytes: int
    multiplies_bf16: bool = False
    multiplies_tiles: bool = False

    @property
    def fingerprint(self) -> str:
        """The database key of this device: rows measured under another fingerprint are not used."""
        return f"{self.kind}/{self.name}/{self.isa}/{self.threads}t"

    def lanes(self, compute: str) -> int:
        """Elements of a compute type ('f32', 'f64') in one vector register."""
        return self.vector_bytes // ITEMSIZE[compute]

    def free_memory_bytes(self) -> int:
        """Memory that can still be taken: the kernel's MemAvailable, less where a control group allows less."""
        allowed = (group.free_bytes() for group in _CONTROL_GROUPS)
        return min([_meminfo_available_bytes(), *(each for each in allowed if each is not None)])


@dataclass(frozen=True)
class Gpu:
    """An NVIDIA GPU, as its measurements are filed.

    ``capability`` is (major, minor), ``sms`` the number of multiprocessors, ``driver`` the version of CUDA that the
    driver has ('13.0'), ``clock_hz`` the highest of the multiprocessors, ``bytes_per_s`` what the memory could move.
    """

    index: int
    name: str
    capability: tuple[int, int]
    sms: int
    memory_bytes: int
    l2_bytes: int
    driver: str
    clock_hz: float
    bytes_per_s: float

    kind = "cuda"

    @property
    def fingerprint(self) -> str:
        """The database key of this device: equal for GPUs of one kind, whichever of them measured."""
        major, minor = self.capability
        return f"{self.kind}/{self.name}/{major}.{minor}/{self.sms}sm/{round(self.memory_bytes / 2**30)}GiB"

    @property
    def arch(self) -> str:
        """The architecture kernels are compiled for; with its special instructions where it has some ('sm_90a')."""
        major, minor = self.capability
        return f"sm_{major}{minor}" + ("a" if self.capability in ((9, 0), (10, 0)) else "")

    def free_memory_bytes(self) -> int:
        """Memory that can still be taken: what the driver has left, and what array libraries keep and do not use."""
        with driver.Current(self.index):
            free, _ = driver.call("cuMemGetInfo")
        torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
        if torch is not None and torch.cuda.is_initialized():
            free += torch.cuda.memory_reserved(self.index) - torch.cuda.memory_allocated(self.index)
        if cupy is not None:
            with cupy.cuda.Device(self.index):
                free += cupy.get_default_memory_pool().free_bytes()
        return free


Device = Cpu | Gpu


@cache
def gpu(index: int) -> Gpu:
    """The GPU of that index. CudaError where there is none."""
    name = driver.call("cuDeviceGetName", 128, driver.call("cuDeviceGet", index)).split(b"\0")[0].decode()
    version = driver.call("cuDriverGetVersion")
    return Gpu(
        index,
        name,
        (driver.attribute(index, "COMPUTE_CAPABILITY_MAJOR"), driver.attribute(index, "COMPUTE_CAPABILITY_MINOR")),
        driver.attribute(index, "MULTIPROCESSOR_COUNT"),
        int(driver.call("cuDeviceTotalMem", driver.call("cuDeviceGet", index))),
        driver.attribute(index, "L2_CACHE_SIZE"),
        f"{version // 1000}.{version % 1000 // 10}",
        driver.attribute(index, "CLOCK_RATE") * 1e3,
        # Two transfers a clock.
        2 * driver.attribute(index, "MEMORY_CLOCK_RATE") * 1e3 * driver.attribute(index, "GLOBAL_MEMORY_BUS_WIDTH") / 8,
    )


def named(text: str) -> Device:
    """The device of a name: 'cpu', 'cuda' (the first GPU) or 'cuda:1'.

    InvalidProblem where that is no such name; CudaError says why a GPU is not there.
    """
    kind, _, number = text.partition(":")
    if text == "cpu":
        return cpu_device()
    if kind != "cuda" or not (text == "cuda" or number.isdecimal()):
        raise InvalidProblem(f"device {text!r} is not cpu, cuda or cuda:N")
    index, count = int(number or 0), driver.call("cuDeviceGetCount")
    if index >= count:
        raise CudaError(f"there is no GPU {index}: this machine has {count}")
    driver.use(index)
    return gpu(index)


def cpu_device() -> Cpu:
    """The CPU this process runs on, with the number of threads Numba uses now."""
    return _cpu(thread_count())


@cache
def _cpu(threads: int) -> Cpu:
    flags = _cpuinfo()
    isa, vector_bytes = "generic", 16
    if "avx512f" in flags["features"]:
        isa, vector_bytes = "avx512", 64
    elif {"avx2", "fma"} <= flags["features"]:
        isa, vector_bytes = "avx2", 32
    elif platform.machine() in ("aarch64", "arm64"):
        isa, vector_bytes = "neon", 16
    l2, llc = _cache_bytes()
    multiplies_bf16 = isa == "avx512" and "avx512_bf16" in flags["features"]
    multiplies_tiles = multiplies_bf16 and {"amx_tile", "amx_bf16"} <= flags["features"] and _may_use_tiles()
    return Cpu("cpu", flags["model"], isa, vector_bytes, threads, l2, llc, multiplies_bf16, multiplies_tiles)


@cache
def _may_use_tiles() -> bool:
    """Whether Linux lets this process, all its threads and its children use matrix units.

    It wants to be asked, and from then on refuses stacks of signal handlers (`sigaltstack`) that are too small for
    what it saves of a thread: some 11 KiB.
    """
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    return ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0


# What numba.get_num_threads() returns, without its two locks: 1 us of each call.
_ask_numba: Callable[[], int] | None = None


def thread_count() -> int:
    """How many threads a parallel region runs on now. On the path of every call.

    Numba is only asked once its threads run: the question would start them, before the layer they are of is settled.
    """
    global _ask_numba
    if _ask_numba is not None:
        return _ask_numba()
    parallel = sys.modules.get("numba.np.ufunc.parallel")
    if parallel is not None and getattr(parallel, "_is_initialized", False):
        _ask_numba = parallel._get_num_threads
        return _ask_numba()
    # Another thread may be importing Numba, so that its modules are there and not yet what they hold.
    known = getattr(sys.modules.get("numba.core.config"), "NUMBA_NUM_THREADS", None)
    return known or config.numba_threads() or processors()


def processors() -> int:
    """How many processors this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@cache
def _cpuinfo() -> dict:
    """{'model': marketing name with family and model numbers, 'features': set of flags} of the first core."""
    fields: dict[str, str] = {}
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if not key.strip():
                break
            fields[key.strip()] = value.strip()
    except OSError:
        pass
    numbers = "-".join(fields[k] for k in ("cpu family", "model") if k in fields)
    name = fields.get("model name") or platform.processor() or platform.machine()
    features = set(fields.get("flags", fields.get("Features", "")).split())
    return {"model": f"{name} {numbers}".strip().replace("/", "_"), "features": features}


@cache
def _cache_bytes() -> tuple[int, int]:
    """(L2 of a core, last level) in bytes; 1 MiB and 32 MiB where the system does not say."""
    sizes: dict[int, int] = {}
    for index in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"):
        try:
            level, text = int((index / "level").read_text()), (index / "size").read_text().strip()
        except (OSError, ValueError):
            continue
        sizes[level] = int(text[:-1]) * {"K": 1 << 10, "M": 1 << 20}.get(text[-1], 1)
    return sizes.get(2, 1 << 20), sizes[max(sizes)] if sizes else 32 << 20


def _meminfo_available_bytes() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 4 << 30
