"""dnn_softmax and dnn_softmax_grad as a user meets them: values, shapes, dtypes, layouts, out=, errors, gradients."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from types import ModuleType
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from cells import check
from gpus import DEVICE
from layouts import channels_last

from nbdnn import InvalidProblem, InvalidType, dnn_softmax, dnn_softmax_grad, events, ops
from nbdnn.array import view
from nbdnn.candidate import NoConfig
from nbdnn.device import Cpu
from nbdnn.dispatch import registry
from nbdnn.problem import FAMILIES, parse

pytestmark = pytest.mark.usefixtures("no_plans")

RNG = np.random.default_rng(0)
ALGORITHMS, MODES = ("fast", "accurate", "log"), ("channel", "instance")
OPS = FAMILIES["softmax"]
INF, NAN = np.inf, np.nan


def plain(x: np.ndarray, algo: str, mode: str) -> np.ndarray:
    """The formula, in float64."""
    axes = 1 if mode == "channel" else tuple(range(1, x.ndim))
    powers = np.exp(x.astype(np.float64))
    y = powers / powers.sum(axis=axes, keepdims=True)
    return np.log(y) if algo == "log" else y


SHAPES = ((3, 5), (2, 5, 7), (2, 5, 3, 4), (2, 3, 2, 3, 4))


@pytest.mark.parametrize(("algo", "mode"), [*product(ALGORITHMS, MODES)])
@pytest.mark.parametrize("shape", SHAPES, ids=len)
def test_values_are_the_formula_in_every_rank_and_layout(shape: tuple[int, ...], algo: str, mode: str) -> None:
    x = RNG.standard_normal(shape)
    for given in (x, channels_last(x)):
        y = dnn_softmax(given, algo, mode)
        assert (y.shape, y.dtype) == (shape, np.float64)
        assert view(y, "y").layout == view(given, "x").layout
        np.testing.assert_allclose(y, plain(x, algo, mode), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("algo", "mode"), [*product(ALGORITHMS, MODES)])
@pytest.mark.parametrize("last", [False, True])
def test_gradients_are_finite_differences(algo: str, mode: str, last: bool) -> None:
    """<dy, (softmax(x + h*v) - softmax(x - h*v)) / 2h> = <dx, v>."""
    x, dy, v = (RNG.standard_normal((2, 4, 3, 2)) for _ in range(3))
    if last:
        x, dy = channels_last(x), channels_last(dy)
    dx = dnn_softmax_grad(dy, dnn_softmax(x, algo, mode), algo, mode)
    step = 1e-5
    slope = (dnn_softmax(x + step * v, algo, mode) - dnn_softmax(x - step * v, algo, mode)) / (2 * step)
    assert abs((dx * v).sum()) > 1e-3
    np.testing.assert_allclose((dx * v).sum(), (dy * slope).sum(), rtol=1e-7)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_results_have_the_dtype_of_the_input(dtype: Any) -> None:
    x = RNG.standard_normal((4, 9, 2, 2)).astype(dtype)
    y = dnn_softmax(x)
    dx = dnn_softmax_grad(x, y)
    assert y.dtype == dx.dtype == np.dtype(dtype)
    eps = float(ml_dtypes.finfo(dtype).eps)
    np.testing.assert_allclose(y.astype(np.float64), plain(x, "accurate", "channel"), rtol=4 * eps, atol=eps)


def test_operands_of_two_dtypes_meet_in_the_wider() -> None:
    dy, y = RNG.standard_normal((2, 3)).astype(np.float32), dnn_softmax(RNG.standard_normal((2, 3)))
    assert dnn_softmax_grad(dy, y).dtype == np.float64


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shape", [(1, 3), (1, 3, 5, 7)], ids=len)
def test_infinities_and_nan(dtype: Any, shape: tuple[int, ...]) -> None:
    """One finite entry among -inf is exact; -inf alone, +inf or a NaN make the row NaN, and no other."""
    rows = np.array([[-INF, 5, -INF], [-INF, -INF, -INF], [1, NAN, 2], [INF, 0, 0], [-1e4, 0, -INF]], dtype)
    expected = np.array([[0, 1, 0], [NAN] * 3, [NAN] * 3, [NAN] * 3, [0, 1, 0]], dtype)
    with np.errstate(divide="ignore"):
        logarithm = np.log(expected)
    logarithm[4, 0] = -1e4
    for row, value, log in zip(rows, expected, logarithm, strict=True):
        x = np.broadcast_to(row.reshape(1, 3, *[1] * (len(shape) - 2)), shape).copy()
        of = (0, slice(None), *[-1] * (len(shape) - 2))
        np.testing.assert_array_equal(dnn_softmax(x)[of], value)
        np.testing.assert_array_equal(dnn_softmax(x, "log")[of], log)


def test_large_values_overflow_in_fast_alone() -> None:
    for shape in ((1, 2), (1, 2, 3, 3)):
        x = np.full(shape, 1000.0, np.float32)
        np.testing.assert_array_equal(dnn_softmax(x), np.full(shape, 0.5))
        np.testing.assert_allclose(dnn_softmax(x, "log"), np.full(shape, np.log(0.5)), rtol=1e-6)
        assert np.isnan(dnn_softmax(x, "fast")).all()


def test_out_and_odd_strides() -> None:
    x, y = RNG.standard_normal((4, 6, 8)).astype("f"), np.zeros((4, 6, 4), "f")
    expected = plain(x[:, :, ::2], "accurate", "channel")
    assert dnn_softmax(x[:, :, ::2], out=y) is y
    np.testing.assert_allclose(y, expected, rtol=1e-5)
    wide = np.full((4, 12, 4), 7.0, "f")
    dnn_softmax(x[:, :, ::2], out=wide[:, ::2])
    np.testing.assert_allclose(wide[:, ::2], expected, rtol=1e-5)
    assert (wide[:, 1::2] == 7).all()
    dx = np.zeros_like(y)
    assert dnn_softmax_grad(x[:, :, ::2], y, out=dx) is dx
    np.testing.assert_allclose(dx, dnn_softmax_grad(x[:, :, ::2].copy(), y), rtol=1e-6)


@pytest.mark.parametrize("shape", [(0, 3), (2, 0, 4, 4)])
def test_nothing_to_do(shape: tuple[int, ...]) -> None:
    x = np.zeros(shape, "f")
    assert dnn_softmax(x).shape == dnn_softmax_grad(x, x).shape == shape


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda x: dnn_softmax(x[0, 0, 0]), InvalidType, "x has 1 axes, expected 2 to 5"),
        (lambda x: dnn_softmax(np.zeros((1,) * 6, "f")), InvalidType, "x has 6 axes, expected 2 to 5"),
        (lambda x: dnn_softmax(x.astype(np.int32)), InvalidType, "int32"),
        (lambda x: dnn_softmax(x, "slow"), InvalidProblem, "algo 'slow' is not one of fast, accurate, log"),
        (lambda x: dnn_softmax(x, mode="row"), InvalidProblem, "'row' is not one of instance, channel"),
        (lambda x: dnn_softmax_grad(x, x[:, :2]), InvalidProblem, r"\(2, 2, 4, 5\)"),
        (lambda x: dnn_softmax(x, out=np.zeros((2, 3, 4, 4), "f")), InvalidProblem, r"\(2, 3, 4, 4\)"),
        (lambda x: dnn_softmax(x, out=x), InvalidProblem, "overlap"),
        (lambda x: dnn_softmax(x, policy="softmax_fwd/cpu/none"), InvalidProblem, "softmax_fwd/cpu/rows"),
    ],
)
def test_errors_name_what_is_wrong(call: Any, error: type, match: str) -> None:
    with pytest.raises(error, match=match):
        call(np.zeros((2, 3, 4, 5), "f"))


def test_a_call_poses_one_problem_and_runs_who_was_asked() -> None:
    x = RNG.standard_normal((2, 3, 4, 5)).astype("f")
    with events() as log:
        dnn_softmax(x, "log", "instance", policy="softmax_fwd/cpu/columns")
    assert {event.problem for event in log} == {"softmax_fwd:f32:n2c3h4w5:log:instance:nchw"}
    assert any("softmax_fwd/cpu/columns" in str(event) for event in log)


def test_torch_in_torch_out(torch: ModuleType) -> None:
    x = torch.randn(2, 3, 4, 5, dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last)
    y = dnn_softmax(x)
    assert y.dtype == torch.bfloat16 and y.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(y, torch.softmax(x, 1), rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize(("algo", "mode"), [*product(ALGORITHMS, MODES)])
def test_op_objects_are_the_functions(algo: str, mode: str) -> None:
    x, dy = RNG.standard_normal((2, 3, 4, 5)), RNG.standard_normal((2, 3, 4, 5))
    op = ops.GpuDnnSoftmax(algo, mode)
    y = op(x)
    np.testing.assert_array_equal(y, dnn_softmax(x, algo, mode))
    dx = dnn_softmax_grad(dy, y, algo, mode)
    np.testing.assert_array_equal(ops.GpuDnnSoftmaxGrad(algo, mode)(dy, y), dx)
    np.testing.assert_array_equal(op.grad((x,), (dy,)), [dx])
    assert repr(op) == f"GpuDnnSoftmax(algo={algo!r}, mode={mode!r})"


# ---- what each candidate must support --------------------------------------------------------------------------------


class Covers(NamedTuple):
    """Space-separated dtypes, geometries with algorithm and mode, and ends of the text."""

    dtypes: str
    shapes: str
    ends: str = ""


_ROWS = (
    "n8192c1000h1w1:accurate:channel:nchw n4c21h9w7:log:channel:nhwc n4c21h9w7:fast:instance:nchw "
    "n2c5d3h4w5:accurate:channel:ndhwc n2c5d3h4w5:log:instance:ncdhw n4096c32000h1w1:accurate:channel:nchw"
)
_COLUMNS = "n32c1000h28w28:accurate:channel:nchw n4c21h9w7:log:channel:nchw n2c5d3h4w5:fast:channel:ncdhw"
_EVERY, _OF_GPU = "f16 bf16 f32 f64", "f16 bf16 f32"

COVERAGE: dict[str, Covers] = {
    "cpu/rows": Covers(_EVERY, _ROWS, "a8"),
    "cpu/short_rows": Covers(_EVERY, "n65536c16h1w1:accurate:channel:nchw n4c21h9w7:log:channel:nhwc", "a8"),
    "cpu/columns": Covers(_EVERY, f"{_ROWS} {_COLUMNS}", "a8"),
    "numba/rows": Covers(_OF_GPU, f"{_ROWS} n512c131072h1w1:accurate:channel:nchw", "a4"),
    "numba/columns": Covers(_OF_GPU, _COLUMNS, "a4"),
    "numba/parts": Covers(_EVERY, "n512c131072h1w1:accurate:channel:nchw n1c3000000000h1w1:log:channel:nchw", "a8"),
    "numba/direct": Covers(_EVERY, f"{_ROWS} {_COLUMNS} n1c3000000000h1w1:log:channel:nchw", "a8"),
}


@pytest.mark.parametrize(("op", "id"), [*product(OPS, COVERAGE)])
def test_supports_what_it_must(op: str, id: str, device: Cpu) -> None:
    candidate, covers = registry.candidate(f"{op}/{id}"), COVERAGE[id]
    on = device if registry.kind_of(candidate) == "cpu" else DEVICE
    for dtype, shape in product(covers.dtypes.split(), covers.shapes.split()):
        for end in ("", *covers.ends.split()):
            problem = parse(":".join(filter(None, (op, dtype, shape, end))))
            support = candidate.supports(problem, on)
            assert support.ok, f"{problem}: {support.reason}"


def test_a_result_without_elements_needs_no_memory() -> None:
    x = np.empty((0, 3, 4), np.float32)
    out = np.empty_like(x)
    assert dnn_softmax(x, out=out) is out


@pytest.mark.parametrize("vector_bytes", [32, 16])
@pytest.mark.parametrize("op", OPS)
def test_rows_by_narrower_vectors(op: str, vector_bytes: int, device: Cpu) -> None:
    """Rows at once and by themselves, whose sums lie in parts of a vector that differ."""
    narrower = replace(device, vector_bytes=min(vector_bytes, device.vector_bytes))
    for dtype, length in (("f32", 9), ("f32", 70), ("f64", 5), ("bf16", 33)):
        for algorithm in ("accurate", "log"):
            problem = parse(f"{op}:{dtype}:n11c{length}h1w1:{algorithm}:channel:nchw")
            check(registry.candidate(f"{op}/cpu/rows"), problem, NoConfig(), narrower)


@pytest.mark.parametrize("candidate", ["columns", "rows"])
@pytest.mark.parametrize("op", OPS)
def test_sums_of_millions_keep_their_digits(op: str, candidate: str, device: Cpu) -> None:
    problem = parse(f"{op}:f32:n1c5000003h1w1:log:channel:nchw")
    check(registry.candidate(f"{op}/cpu/{candidate}"), problem, NoConfig(), device)
