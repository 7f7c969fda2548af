"""Launches: what lies at the addresses that the driver is handed. A stand-in for the driver reads it there."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from types import SimpleNamespace
from typing import NamedTuple

import pytest
from gpus import H200

from nbdnn import driver
from nbdnn.errors import CudaError
from nbdnn.kernels.cuda import launch as cuda_launch
from nbdnn.kernels.cuda.compile import Kernel, Source
from nbdnn.kernels.cuda.launch import NULL, WORKSPACE, Launch, Program, in_workspace, load

X, W, Y, SCRATCH = 0x7F0000000100, 0x7F0000000200, 0x7F0000000300, 0x7F0000000400


class Started(NamedTuple):
    function: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    stream: int
    arguments: tuple


class Config(SimpleNamespace):
    """What the driver is told of a launch."""


class StandIn:
    """The driver as far as a launch needs it. `types` are those of the arguments it reads, as ctypes has them."""

    def __init__(self, types: tuple[type, ...]) -> None:
        self.types = types
        self.context, self.failure, self.static_bytes = 1, 0, 0
        self.started: list[Started] = []
        self.clusters: list[tuple[int, int, int]] = []
        self.cooperative: list[int] = []
        self.overlapping: list[int] = []
        self.loaded: list[bytes] = []
        self.permitted: list[int] = []

    def bindings(self) -> SimpleNamespace:
        attributes = SimpleNamespace(
            CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES="static", CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES="dynamic"
        )
        return SimpleNamespace(
            CUstream=int,
            CUfunction_attribute=attributes,
            CUlaunchConfig=Config,
            CUlaunchAttribute=lambda: SimpleNamespace(value=SimpleNamespace(clusterDim=SimpleNamespace())),
            CUlaunchAttributeID=SimpleNamespace(
                CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION="cluster",
                CU_LAUNCH_ATTRIBUTE_COOPERATIVE="cooperative",
                CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION="overlapping",
            ),
        )

    def call(self, name: str, *arguments):
        match name:
            case "cuCtxGetCurrent":
                return self.context
            case "cuModuleLoadData":
                self.loaded.append(arguments[0])
                return arguments[0]
            case "cuModuleGetFunction":
                return f"{arguments[1].decode()} of {arguments[0].decode()} in {self.context}"
            case "cuFuncGetAttribute":
                assert arguments[0] == "static"
                return self.static_bytes
            case "cuFuncSetAttribute":
                assert arguments[1] == "dynamic"
                self.permitted.append(arguments[2])
                return None
            case "cuLaunchKernelEx":
                raise CudaError(f"{name}: {self.failure}")
        raise AssertionError(name)

    def launcher(self, config, function, parameters):
        def start() -> int:
            for attribute in config.attrs[: config.numAttrs]:
                self.see(attribute)
            grid = config.gridDimX, config.gridDimY, config.gridDimZ
            block = config.blockDimX, config.blockDimY, config.blockDimZ
            addresses = (ctypes.c_void_p * len(self.types)).from_address(parameters)
            arguments = tuple(t.from_address(at).value for t, at in zip(self.types, addresses, strict=True))
            given = config.sharedMemBytes, config.hStream, arguments
            self.started.append(Started(function, grid, block, *given))
            return self.failure

        return start

    def see(self, attribute) -> None:
        dimension = attribute.value.clusterDim
        if attribute.id == "cluster":
            self.clusters.append((dimension.x, dimension.y, dimension.z))
        elif attribute.id == "overlapping":
            self.overlapping.append(attribute.value.programmaticStreamSerializationAllowed)
        else:
            assert attribute.id == "cooperative"
            self.cooperative.append(attribute.value.cooperative)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """A driver for kernels of three pointers, two float32 and three int32."""
    stand_in = StandIn((*[ctypes.c_void_p] * 3, *[ctypes.c_float] * 2, *[ctypes.c_int32] * 3))
    monkeypatch.setattr(driver, "bindings", stand_in.bindings)
    monkeypatch.setattr(driver, "call", stand_in.call)
    monkeypatch.setattr(driver, "launcher", stand_in.launcher)
    monkeypatch.setattr(cuda_launch, "_functions", {})
    monkeypatch.setattr(cuda_launch, "_permitted_bytes", {})
    monkeypatch.setattr(cuda_launch, "compile_kernel", lambda source, arch: kernel(arch.encode()))
    return stand_in


def kernel(cubin: bytes) -> Kernel:
    return Kernel(cubin, "entry", 32, 0, 0, 0)


def launch(**different) -> Launch:
    given = {"pointers": (2, 0, NULL), "scalars": "f32", "integers": (-7, 8, 2**31 - 1), **different}
    return Launch(Source(launch, (), 128), (3, 2, 1), **given)


def test_arguments_are_where_the_driver_looks(stand_in: StandIn) -> None:
    run = Program([launch()], H200)
    run((X, W, Y), (0.5, -2.0), SCRATCH, 17)
    run((Y, X, W), (1.0, 0.0), SCRATCH, 0)
    function = "entry of sm_90a in 1"
    assert stand_in.started == [
        Started(function, (3, 2, 1), (128, 1, 1), 0, 17, (Y, X, None, 0.5, -2.0, -7, 8, 2**31 - 1)),
        Started(function, (3, 2, 1), (128, 1, 1), 0, 0, (W, Y, None, 1.0, 0.0, -7, 8, 2**31 - 1)),
    ]


def test_an_interrupted_change_of_stream_is_made_by_the_next_call(
    stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Program([launch(), launch()], H200)
    run((X, W, Y), (0.5, -2.0), SCRATCH, 11)
    second = run._prepared[1].config
    with monkeypatch.context() as patched:
        patched.setattr(Config, "__setattr__", interrupted_at(second))
        with pytest.raises(KeyboardInterrupt):
            run((X, W, Y), (0.5, -2.0), SCRATCH, 22)
    run((X, W, Y), (0.5, -2.0), SCRATCH, 22)
    assert [started.stream for started in stand_in.started] == [11, 11, 22, 22]


def interrupted_at(config):
    def set_attribute(self, name: str, value: object) -> None:
        if self is config:
            raise KeyboardInterrupt
        object.__setattr__(self, name, value)

    return set_attribute


def test_a_call_packs_what_differs_from_the_last_one(stand_in: StandIn) -> None:
    run = Program([launch(), launch(pointers=(0, WORKSPACE, NULL))], H200)
    forward, backward = (X, W, Y), (Y, W, X)
    calls = (
        *((forward, (1.0, 0.0), SCRATCH), (forward, (1.0, 0.0), X)),
        *((forward, (1.0, 2.0), X), (backward, (1.0, 2.0), X)),
    )
    for pointers, scalars, workspace in (call for call in calls for _ in range(2)):
        run(pointers, scalars, workspace, 17)
        (x, _, y), first, second = pointers, *stand_in.started[-2:]
        assert first.arguments[:5] == (y, x, None, *scalars)
        assert second.arguments[:5] == (x, workspace, None, *scalars)
    assert len(stand_in.started) == 16


def test_clusters_are_launched_as_such(stand_in: StandIn) -> None:
    run = Program([launch(cluster=3, dynamic_shared_bytes=64), launch()], H200)
    run((X, W, Y), (0.5, -2.0), SCRATCH, 17)
    arguments = Y, X, None, 0.5, -2.0, -7, 8, 2**31 - 1
    function = "entry of sm_90a in 1"
    assert stand_in.started == [
        Started(function, (3, 2, 1), (128, 1, 1), 64, 17, arguments),
        Started(function, (3, 2, 1), (128, 1, 1), 0, 17, arguments),
    ]
    assert stand_in.clusters == [(3, 1, 1)]
    stand_in.failure = 719
    with pytest.raises(CudaError, match="cuLaunchKernelEx: 719"):
        run((X, W, Y), (0.5, -2.0), SCRATCH, 18)


def test_blocks_that_wait_for_each_other_are_launched_as_such(stand_in: StandIn) -> None:
    run = Program([launch(cooperative=True), launch()], H200)
    run((X, W, Y), (0.5, -2.0), SCRATCH, 17)
    assert (len(stand_in.started), stand_in.cooperative, stand_in.clusters) == (2, [1], [])


def test_launches_overlap_where_the_device_knows_how(stand_in: StandIn) -> None:
    every = [launch(), launch(cooperative=True), launch()]
    Program(every, H200)((X, W, Y), (0.5, -2.0), SCRATCH, 17)
    assert (len(stand_in.started), stand_in.overlapping, stand_in.cooperative) == (3, [1, 1, 1], [1])
    for unable in (replace(H200, capability=(8, 9)), replace(H200, driver="12.2")):
        Program(every, unable)((X, W, Y), (0.5, -2.0), SCRATCH, 17)
    assert (len(stand_in.started), stand_in.overlapping) == (9, [1, 1, 1])


def test_wide_arguments(stand_in: StandIn) -> None:
    stand_in.types = (*[ctypes.c_void_p] * 3, *[ctypes.c_double] * 2, *[ctypes.c_int64] * 2)
    Program([launch(pointers=(WORKSPACE, 1, 2), scalars="f64", integers=(2**40, -1), integer_bits=64)], H200)(
        (X, W, Y), (0.1, 0.2), SCRATCH, 0
    )
    assert stand_in.started[0].arguments == (SCRATCH, W, Y, 0.1, 0.2, 2**40, -1)


def test_a_kernel_of_one_pointer_and_no_scalars(stand_in: StandIn) -> None:
    stand_in.types = (ctypes.c_void_p, ctypes.c_int32)
    Program([launch(pointers=(1,), scalars="", integers=(5,))], H200)((X, W, Y), (1.0, 0.0))
    assert stand_in.started[0].arguments == (W, 5)


def test_pointers_into_the_workspace(stand_in: StandIn) -> None:
    given = (in_workspace(256), 2, in_workspace(0))
    Program([launch(pointers=given), launch(pointers=(NULL, WORKSPACE, in_workspace(4)))], H200)(
        (X, W, Y), (1.0, 0.0), SCRATCH
    )
    first, second = (started.arguments[:3] for started in stand_in.started)
    assert first == (SCRATCH + 256, Y, SCRATCH)
    assert second == (None, SCRATCH, SCRATCH + 4)


def test_launches_follow_each_other_and_empty_grids_are_left_out(stand_in: StandIn) -> None:
    empty = launch()._replace(grid=(0, 1, 1))
    second = launch(pointers=(0, 1, WORKSPACE))
    Program([launch(), empty, second], H200)((X, W, Y), (1.0, 0.0), SCRATCH)
    assert [started.arguments[:3] for started in stand_in.started] == [(Y, X, None), (X, W, SCRATCH)]
    Program([empty], H200)((X, W, Y), (1.0, 0.0))
    assert len(stand_in.started) == 2


def test_a_failure_is_an_error(stand_in: StandIn) -> None:
    run = Program([launch()], H200)
    stand_in.failure = 701
    with pytest.raises(CudaError, match="cuLaunchKernelEx: 701"):
        run((X, W, Y), (1.0, 0.0))


def test_code_is_loaded_once_a_context(stand_in: StandIn) -> None:
    first = load(kernel(b"a"))
    assert load(kernel(b"a")) == first
    assert load(kernel(b"b")) != first
    stand_in.context = 2
    assert load(kernel(b"a")) != first
    assert stand_in.loaded == [b"a", b"b", b"a"]


def test_more_shared_memory_than_usual_is_asked_for_and_never_taken_back(stand_in: StandIn) -> None:
    stand_in.static_bytes = 8 << 10
    for dynamic_bytes in (40 << 10, 41 << 10, 100 << 10, 60 << 10, 0):
        load(kernel(b"a"), dynamic_bytes)
    assert stand_in.permitted == [41 << 10, 100 << 10]
