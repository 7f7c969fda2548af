"""The kernels of the direct convolution as plain Python: what each thread reads, sums and writes, index by index.

Without a GPU this says that every index is the right one and lies inside its operand, and that 32 bits hold it. Threads
run one after the other, so nothing here says anything about how they work together.
"""

from __future__ import annotations

from math import prod
from types import SimpleNamespace

import numpy as np
import pytest
from edge_cases import edges
from guarded import values

import nbdnn.kernels.cuda
from nbdnn import reference_conv
from nbdnn.candidate import NoConfig
from nbdnn.kernels.cuda import conv_direct, epilogue, geometry
from nbdnn.kernels.cuda.launch import Launch
from nbdnn.problem import Operand, parse
from nbdnn.problem_conv import CONV_OPS, ConvProblem

_SCALARS = (1.0, -1.0)
_SOME = 150  # outputs, or positions of as many blocks, of a problem that has more


class Pointer:
    """The elements of an operand in the order of its memory; an index outside of them is an error."""

    def __init__(self, operand: Operand, value: np.ndarray | None) -> None:
        self.flat = np.full(operand.size_elems, np.nan)
        bytes_ = tuple(8 * stride for stride in operand.strides)
        self.array = np.lib.stride_tricks.as_strided(self.flat, operand.shape, bytes_)
        if value is not None:
            self.array[...] = value
        self.written: list[int] = []

    def __getitem__(self, index: int) -> float:
        assert 0 <= index < len(self.flat), f"read of element {index} of {len(self.flat)}"
        return float(self.flat[index])

    def __setitem__(self, index: int, value: float) -> None:
        assert 0 <= index < len(self.flat), f"write of element {index} of {len(self.flat)}"
        self.written.append(index)
        self.flat[index] = value


def _int32(value: int) -> int:
    assert -(2**31) <= value < 2**31
    return int(value)


def _same(value):
    return value


class Thread:
    """Stands in for `ptx`: the words of a kernel, for one thread of one block, on Python's numbers."""

    INTEGER, REAL = {32: _int32, 64: int}, {"f32": float, "f64": float}
    WIDEN = NARROW = dict.fromkeys(("f16", "bf16", "f32", "f64"), _same)
    divided, inline, pointer = staticmethod(divmod), staticmethod(_same), staticmethod(_same)

    def __init__(self) -> None:
        self.block = self.thread = 0
        shared: dict[int, list] = {}
        self.cuda = SimpleNamespace(
            local=SimpleNamespace(array=lambda count, _: [None] * count),
            shared=SimpleNamespace(array=lambda count, _: shared.setdefault(count, [None] * count)),
            syncthreads=lambda: None,
        )

    def block_x(self) -> int:
        return self.block

    def thread_x(self) -> int:
        return self.thread

    @staticmethod
    def record(fields, bits):
        return fields

    @staticmethod
    def load_constant(base: Pointer, index: int) -> float:
        return base[index]

    @staticmethod
    def fma(a: float, b: float, c: float) -> float:
        return a * b + c

    @staticmethod
    def shuffle_xor(value: float, lanes: int) -> float:
        return 0.0


@pytest.fixture
def ptx(monkeypatch: pytest.MonkeyPatch) -> Thread:
    thread = Thread()
    monkeypatch.setitem(nbdnn.kernels.cuda.__dict__, "ptx", thread)
    for module, name in (
        *((epilogue, name) for name in ("activate", "finish", "store")),
        *((conv_direct, name) for name in ("output_place", "input_reached")),
    ):
        monkeypatch.setattr(module, name, getattr(module, name).__wrapped__)
    return thread


def launched(problem: ConvProblem) -> tuple[Launch, dict[str, Pointer], list]:
    """(launch, operands by name, arguments of the kernel)."""
    candidates = {c.op: c for c in (conv_direct.FWD, conv_direct.BWD_DATA, conv_direct.BWD_FILTER)}
    (launch,) = candidates[problem.op].launches(problem, NoConfig(), None)
    given = values(problem, "integers")
    operands = {operand.name: Pointer(operand, given.get(operand.name)) for operand in problem.operands}
    pointers = [list(operands.values())[at] if at >= 0 else None for at in launch.pointers]
    return launch, operands, [*pointers, *_SCALARS, launch.integers]


def some(count: int, most: int) -> list[int]:
    """Numbers below `count`: all of them, or the first, the last and some between."""
    if count <= most:
        return list(range(count))
    between = np.random.default_rng(count).choice(np.arange(1, count - 1), most - 2, replace=False)
    return [0, *map(int, between), count - 1]


def assert_right(problem: ConvProblem, out: Pointer, written: set[int]) -> None:
    whole = reference_conv.compute(problem, values(problem, "integers"), _SCALARS)
    (operand,) = (o for o in problem.operands if o.role == "out")
    expected = Pointer(operand, whole)
    assert set(out.written) == written
    for index in written:
        assert out.flat[index] == pytest.approx(expected.flat[index], rel=1e-12, abs=1e-12), index


def _problems(*ops: str) -> list[ConvProblem]:
    return [problem for op in ops for problem in edges(op, "cpu") if problem.dtype == "f32"]


@pytest.mark.parametrize("problem", _problems("conv_fwd", "conv_bwd_data"), ids=str)
def test_every_output_sums_what_its_taps_reach(problem: ConvProblem, ptx: Thread) -> None:
    launch, operands, arguments = launched(problem)
    kernel, _ = launch.source.builder(*launch.source.specialised_on)
    threads = prod(launch.grid) * launch.source.threads
    outputs = launch.integers.outputs
    assert outputs <= threads < outputs + launch.source.threads
    # Fewer where a sum is long.
    chosen = some(outputs, max(5, min(_SOME, 30_000 // problem.reduction_length)))
    for element in [*chosen, *range(outputs, min(threads, outputs + 2))]:
        ptx.block, ptx.thread = divmod(element, launch.source.threads)
        kernel(*arguments)
    assert_right(problem, operands["y" if problem.op == "conv_fwd" else "dx"], set(chosen))


def run_blocks(problem: ConvProblem, ptx: Thread, monkeypatch: pytest.MonkeyPatch, most: int) -> Pointer:
    """dw, of which some blocks were computed: thread 0 sums all positions, and the others store what it has left."""
    monkeypatch.setattr(conv_direct, "_THREADS", 1)
    monkeypatch.setattr(conv_direct, "_WARPS", 1)
    launch, operands, arguments = launched(problem)
    kernel, _ = launch.source.builder(*launch.source.specialised_on)
    without_positions = launch.integers._replace(positions=0)
    for ptx.block in some(prod(launch.grid), most):
        for ptx.thread in range(launch.source.specialised_on.tile_k * launch.source.specialised_on.tile_c):
            kernel(*arguments[:-1], without_positions if ptx.thread else launch.integers)
    return operands["dw"]


@pytest.mark.parametrize("problem", _problems("conv_bwd_filter"), ids=str)
def test_every_tap_sums_its_positions(problem: ConvProblem, ptx: Thread, monkeypatch: pytest.MonkeyPatch) -> None:
    dw = run_blocks(problem, ptx, monkeypatch, max(2, _SOME // problem.reduction_length))
    assert len(set(dw.written)) == len(dw.written) > 0
    assert_right(problem, dw, set(dw.written))


def test_every_element_of_a_filter_is_written_once(ptx: Thread, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = parse("conv_bwd_filter:f32:n1c18d1h3w4:k10t1r2s3:p0x0x0:u1x1x1:d1x1x1:g2:conv:ncdhw")
    dw = run_blocks(problem, ptx, monkeypatch, 1000)
    assert sorted(dw.written) == list(range(prod(problem.w_shape)))
    assert_right(problem, dw, set(dw.written))


@pytest.mark.parametrize(
    ("shape", "bits"),
    [
        ("n3c1024h1000w600:k8r3s3:p1x1:u1x1:d1x1", 32),
        ("n3c1024h1000w800:k8r3s3:p1x1:u1x1:d1x1", 64),
        ("n1c1h4w4:k1r3s3:p1500000000x0:u1x1:d1x1", 64),
    ],
)
@pytest.mark.parametrize("op", CONV_OPS)
def test_indices_are_as_wide_as_they_must_be(op: str, shape: str, bits: int) -> None:
    problem = parse(f"{op}:f32:{shape}:g1:cross:nchw")
    integers = geometry.filter_gradient(problem, 4, 4) if op == "conv_bwd_filter" else geometry.gather(problem)
    assert geometry.index_bits(problem, integers) == bits
