"""Prepared launches: everything a call of the driver needs lies packed in memory but the pointers, scalars and stream.

A kernel's parameters are, in this order: its tensor maps, as one; pointers; alpha and beta, if it takes them, both of
its compute type; its integers, a NamedTuple of int32 or int64. A call packs all but the last into their places and
gives the driver addresses.
"""

from __future__ import annotations

import ctypes
import re
import struct
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

from nbdnn import driver
from nbdnn.candidate import Candidate, ConfigT
from nbdnn.device import Gpu
from nbdnn.kernels.cuda.compile import OVERLAPS_FROM, Kernel, Source, compile_kernel
from nbdnn.kernels.cuda.tensor_map import MAP_BYTES, TensorMap, encoded
from nbdnn.problem import Problem

# Places of a kernel's pointers beyond the problem's operands; below WORKSPACE those of `in_workspace`.
WORKSPACE, NULL = -2, -1

_STATIC_SHARED_BYTES = 48 << 10  # a kernel may have more than this only after it has said so
_OVERLAPS_IN_GRAPHS = 12.3  # the first release of CUDA whose graphs can hold launches that overlap
_SCALAR = {"f32": "f", "f64": "d", "": ""}
_INTEGER = {32: "i", 64: "q"}

_functions: dict[tuple[int, str], Any] = {}
_permitted_bytes: dict[tuple[int, str], int] = {}  # of dynamic shared memory; never less than some launch needs
_lock = threading.Lock()


class Launch(NamedTuple):
    """One kernel on one grid, each of whose blocks has all the threads that its source allows.

    pointers: where each comes from: a position among the problem's operands, `in_workspace`, WORKSPACE or NULL.
    scalars: the type of alpha and beta, 'f32' or 'f64'; '' where the kernel does not take them.
    cluster: blocks, neighbours in the grid, that run at once and reach each other's shared memory. maps: of the tensors
    that the kernel copies by TMA. cooperative: all blocks run at once, or the launch fails: they may wait for each
    other.
    """

    source: Source
    grid: tuple[int, int, int]
    pointers: tuple[int, ...]
    scalars: str
    integers: tuple[int, ...]
    integer_bits: int = 32
    dynamic_shared_bytes: int = 0
    cluster: int = 1
    maps: tuple[TensorMap, ...] = ()
    cooperative: bool = False


def filled(launches: Iterable[Launch]) -> list[Launch]:
    """What a program runs of launches that follow each other: those that have blocks."""
    return [launch for launch in launches if min(launch.grid) > 0]


def overlaps(device: Gpu) -> bool:
    """Whether launches overlap with the end of what is before them on the stream: then all do, and their blocks are
    ready when that has ended. On an H200 0.2 to 0.6 us less, of 350 kernels; none lost more than 0.7 %. Blocks that may
    come while those of the launch before still run gained 0.1 to 0.3 more in short kernels, but went where there was
    room, which is no way to spread a few long ones over all multiprocessors: up to half as much time again."""
    return device.capability >= OVERLAPS_FROM and float(device.driver) >= _OVERLAPS_IN_GRAPHS


def in_workspace(offset_bytes: int) -> int:
    """The place of a pointer to so many bytes behind the workspace's beginning."""
    return WORKSPACE - offset_bytes


def output_pointers(problem: Problem) -> tuple[int, int, int]:
    """Places of a convolution's output, bias and residual; NULL of what it does not have."""
    names = [operand.name for operand in problem.operands]
    bias, residual = (names.index(name) if name in names else NULL for name in ("bias", "residual"))
    return 2, bias, residual


def gather_pointers(problem: Problem) -> tuple[int, ...]:
    """Places of what a forward or bwd_data gathers, of its filter, and of `output_pointers`."""
    image, w = (1, 0) if problem.op == "conv_bwd_data" else (0, 1)
    return image, w, *output_pointers(problem)


class Program:
    """A runner of this provider: launches that follow each other on the stream. It belongs to one thread.

    To be made where the device's context is current, in which the kernels are loaded, and run there.
    """

    def __init__(self, launches: Sequence[Launch], device: Gpu) -> None:
        overlapping = overlaps(device)
        self._prepared = [_prepared(launch, device.arch, overlapping) for launch in filled(launches)]
        self._steps = [(prepared.start, prepared.fail) for prepared in self._prepared]
        self._stream = -1
        self._packed: tuple[tuple[int, ...], tuple[float, ...], int] | None = None

    def __call__(
        self, pointers: tuple[int, ...], scalars: tuple[float, ...], workspace: int = 0, stream: int = 0
    ) -> None:
        if stream != self._stream:
            handle, self._stream = driver.bindings().CUstream(stream), -1  # of none, should this be interrupted
            for prepared in self._prepared:
                prepared.config.hStream = handle
            self._stream = stream
        if self._packed != (wanted := (pointers, scalars, workspace)):
            given, self._packed = (*pointers, workspace, 0), None
            for prepared in self._prepared:
                prepared.pack(given, scalars)
            self._packed = wanted
        for start, fail in self._steps:
            if start():
                fail()


class LaunchedCandidate(Candidate[ConfigT, Gpu]):
    """A candidate of this provider: `launches` says, without a GPU, what `prepare` compiles, loads and runs."""

    provider = "numba"

    @abstractmethod
    def launches(self, problem: Any, config: ConfigT, device: Gpu) -> list[Launch]:
        """The kernels in the order in which they run."""

    def prepare(self, problem: Any, config: ConfigT, device: Gpu) -> Program:
        return Program(self.launches(problem, config, device), device)


class _Prepared(NamedTuple):
    """pack: puts the addresses `given` (operands, workspace, 0), alpha and beta to the integers. config: how the driver
    is to run the kernel, and on which stream. start: runs it with what was packed last; anything but 0 is an error,
    which `fail`, in another try, raises with its name."""

    pack: Callable[[tuple[int, ...], tuple[float, ...]], None]
    config: Any
    start: Callable[[], int]
    fail: Callable[[], None]


def _prepared(launch: Launch, arch: str, overlapping: bool) -> _Prepared:
    function = load(compile_kernel(launch.source, arch), launch.dynamic_shared_bytes)
    maps_format = f"{MAP_BYTES * len(launch.maps)}s" if launch.maps else ""
    call_format = "=" + maps_format + "Q" * len(launch.pointers) + 2 * _SCALAR[launch.scalars]
    whole_format = call_format + _INTEGER[launch.integer_bits] * len(launch.integers)
    arguments = bytearray(struct.calcsize(whole_format))
    integers_at = struct.calcsize(call_format)
    struct.pack_into("=" + whole_format[len(call_format) :], arguments, integers_at, *launch.integers)
    # The driver takes an array of the addresses of the arguments, and copies what they point to at every launch.
    start = ctypes.addressof(ctypes.c_char.from_buffer(arguments))
    parts = re.findall(r"\d*\w", whole_format)
    offsets = [struct.calcsize("=" + "".join(parts[:i])) for i in range(len(parts))]
    addresses = (ctypes.c_void_p * len(offsets))(*(start + offset for offset in offsets))
    pack_into, select = struct.Struct(call_format).pack_into, _mapped(launch.maps, _selection(launch.pointers))
    taken = 2 if launch.scalars else 0

    def pack(given: tuple[int, ...], scalars: tuple[float, ...], _alive: object = addresses) -> None:
        pack_into(arguments, 0, *select(given), *scalars[:taken])

    config, at = _described(launch, overlapping), ctypes.addressof(addresses)
    fail = partial(driver.call, "cuLaunchKernelEx", config, function, at, 0)
    return _Prepared(pack, config, driver.launcher(config, function, at), fail)


def _described(launch: Launch, overlapping: bool) -> Any:
    """The driver's description of a launch but for the stream, which calls set."""
    bindings, config = driver.bindings(), driver.bindings().CUlaunchConfig()
    names, attributes = bindings.CUlaunchAttributeID, []

    def attribute(name: str) -> Any:
        attributes.append(bindings.CUlaunchAttribute())
        attributes[-1].id = getattr(names, f"CU_LAUNCH_ATTRIBUTE_{name}")
        return attributes[-1].value

    if launch.cooperative:
        attribute("COOPERATIVE").cooperative = 1
    if launch.cluster > 1:
        dimension = attribute("CLUSTER_DIMENSION").clusterDim
        dimension.x, dimension.y, dimension.z = launch.cluster, 1, 1
    if overlapping:
        attribute("PROGRAMMATIC_STREAM_SERIALIZATION").programmaticStreamSerializationAllowed = 1
    config.gridDimX, config.gridDimY, config.gridDimZ = launch.grid
    config.blockDimX, config.blockDimY, config.blockDimZ = launch.source.threads, 1, 1
    config.sharedMemBytes = launch.dynamic_shared_bytes
    config.attrs, config.numAttrs = attributes, len(attributes)
    return config


def _selection(places: tuple[int, ...]) -> Callable[[tuple[int, ...]], tuple[int, ...]]:
    """What is at these places among (operands, workspace, 0), as a tuple also where there is one."""
    if min(places) < WORKSPACE:
        return lambda given: tuple(
            given[place] if place >= WORKSPACE else given[WORKSPACE] + WORKSPACE - place for place in places
        )
    if len(places) == 1:
        return lambda given: (given[places[0]],)
    return itemgetter(*places)


def _mapped(maps: tuple[TensorMap, ...], select: Callable[[tuple[int, ...]], tuple]) -> Callable[..., tuple]:
    """Before what is selected, the maps of the tensors at their addresses."""
    if not maps:
        return select
    places = _selection(tuple(tensor.place for tensor in maps))
    return lambda given: (b"".join(map(encoded, maps, places(given))), *select(given))


def load(kernel: Kernel, dynamic_shared_bytes: int = 0) -> Any:
    """The kernel's function in the context that is current, in which it is loaded once."""
    key = int(driver.call("cuCtxGetCurrent")), kernel.digest
    with _lock:
        if key not in _functions:
            module = driver.call("cuModuleLoadData", kernel.cubin)
            _functions[key] = driver.call("cuModuleGetFunction", module, kernel.entry.encode())
            static = driver.bindings().CUfunction_attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES
            _permitted_bytes[key] = _STATIC_SHARED_BYTES - driver.call("cuFuncGetAttribute", static, _functions[key])
        function = _functions[key]
        if dynamic_shared_bytes > _permitted_bytes[key]:
            attribute = driver.bindings().CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            driver.call("cuFuncSetAttribute", function, attribute, dynamic_shared_bytes)
            _permitted_bytes[key] = dynamic_shared_bytes
    return function
