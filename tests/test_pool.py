"""dnn_pool and dnn_pool_grad as a user meets them: values, shapes, dtypes, layouts, out=, errors, gradients."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from itertools import product
from types import ModuleType
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from cells import check
from edge_cases import edges
from gpus import DEVICE
from layouts import channels_last

from nbdnn import InvalidProblem, InvalidType, UnsupportedProblem, dnn_pool, dnn_pool_grad, events, ops
from nbdnn.array import view
from nbdnn.candidate import NoConfig
from nbdnn.device import Cpu
from nbdnn.dispatch import registry
from nbdnn.kernels.cpu import pool_channels, pool_max_channels, pool_max_planes
from nbdnn.kernels.cpu.pool_axes import axes_of
from nbdnn.problem import FAMILIES, parse
from nbdnn.problem_pool import MODES

pytestmark = pytest.mark.usefixtures("no_plans")

RNG = np.random.default_rng(0)
OPS = FAMILIES["pool"]
INF, NAN = np.inf, np.nan


def by_loops(x: np.ndarray, ws: tuple, stride: tuple, mode: str, pad: tuple) -> np.ndarray:
    """Window by window."""
    spatial = x.shape[2:]
    out = tuple((i + 2 * p - k) // u + 1 for i, p, k, u in zip(spatial, pad, ws, stride, strict=True))
    y = np.empty((*x.shape[:2], *out))
    for at in np.ndindex(*out):
        low = [o * u - p for o, u, p in zip(at, stride, pad, strict=True)]
        part = x[(..., *(slice(max(a, 0), max(a + k, 0)) for a, k in zip(low, ws, strict=True)))]
        axes, inside = tuple(range(2, x.ndim)), np.prod(part.shape[2:])
        if mode.startswith("max"):
            y[(..., *at)] = part.max(axis=axes, initial=-INF)
            continue
        counts = {"average_inc_pad": np.prod(ws), "average_exc_pad": max(inside, 1), "sum": 1}
        y[(..., *at)] = part.sum(axis=axes) / counts[mode]
    return y


# img, ws, stride, pad
SHAPES = (
    ((2, 3, 7, 8), (3, 2), (2, 1), (1, 0)),
    ((1, 2, 5, 4), (2, 2), (2, 2), (2, 3)),  # windows wholly in the padding
    ((2, 3, 4, 5, 6), (2, 3, 2), (1, 2, 2), (0, 1, 1)),
)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("shape", "ws", "stride", "pad"), SHAPES)
def test_values_are_the_definition_in_every_layout(
    shape: tuple, ws: tuple, stride: tuple, pad: tuple, mode: str
) -> None:
    x = RNG.standard_normal(shape)
    for given in (x, channels_last(x)):
        y = dnn_pool(given, ws, stride, mode, pad)
        assert y.dtype == np.float64 and view(y, "y").layout == view(given, "x").layout
        np.testing.assert_allclose(y, by_loops(x, ws, stride, mode, pad), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("shape", "ws", "stride", "pad"), SHAPES)
@pytest.mark.parametrize("last", [False, True])
def test_gradients_are_finite_differences(
    shape: tuple, ws: tuple, stride: tuple, pad: tuple, mode: str, last: bool
) -> None:
    """<dy, (pool(x + h*v) - pool(x - h*v)) / 2h> = <dx, v>."""
    x, v = RNG.standard_normal(shape), RNG.standard_normal(shape)
    x = channels_last(x) if last else x
    y = dnn_pool(x, ws, stride, mode, pad)
    reached = np.isfinite(y)
    dy = RNG.standard_normal(y.shape)
    dx = dnn_pool_grad(x, y, dy, ws, stride, mode, pad)
    assert dx.shape == x.shape and view(dx, "dx").layout == view(x, "x").layout
    step = 1e-6
    with np.errstate(invalid="ignore"):
        above, below = (dnn_pool(x + sign * step * v, ws, stride, mode, pad) for sign in (1, -1))
        slope = np.where(reached, (above - below) / (2 * step), 0)
    assert abs((dx * v).sum()) > 1e-3
    np.testing.assert_allclose((dx * v).sum(), (dy * slope).sum(), rtol=1e-6, atol=1e-8)


def test_defaults_are_stride_1_no_pad_and_the_maximum() -> None:
    x = RNG.standard_normal((1, 2, 5, 6))
    np.testing.assert_array_equal(dnn_pool(x, 2), by_loops(x, (2, 2), (1, 1), "max", (0, 0)))
    np.testing.assert_array_equal(dnn_pool(x, 2, mode="average", pad=1), dnn_pool(x, 2, 1, "average_inc_pad", (1, 1)))


def test_what_equals_an_integer_is_one() -> None:
    """Else an error of a first call would be none of a later one: equal arguments are the same call."""
    x = RNG.standard_normal((1, 2, 6, 6))
    two, y = np.int64(2), dnn_pool(x, 2, 2, pad=1)
    np.testing.assert_array_equal(dnn_pool(x, (two, 2), two, pad=np.int32(1)), y)
    np.testing.assert_array_equal(dnn_pool(x[:, :, :5], 2.0, np.float32(2), pad=(1, 1.0)), y[:, :, :3])
    with pytest.raises(InvalidProblem, match=r"ws is 2\.5, expected an int"):
        dnn_pool(x, 2.5)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_results_have_the_dtype_of_the_input(dtype: Any) -> None:
    x = RNG.standard_normal((2, 9, 6, 6)).astype(dtype)
    y = dnn_pool(x, 3, 2, "average_exc_pad", 1)
    dx = dnn_pool_grad(x, y, y, 3, 2, "max", 1)
    assert y.dtype == dx.dtype == np.dtype(dtype)
    expected = by_loops(x.astype(np.float64), (3, 3), (2, 2), "average_exc_pad", (1, 1))
    np.testing.assert_allclose(y.astype(np.float64), expected, rtol=4 * float(ml_dtypes.finfo(dtype).eps), atol=1e-6)


@pytest.mark.parametrize("mode", ["max", "max_deterministic"])
@pytest.mark.parametrize("last", [False, True])
def test_a_tie_goes_to_the_first_and_nan_to_the_last(mode: str, last: bool) -> None:
    """Of each window in row-major order; where the padding comes first, -inf of the image comes before it."""
    row = {
        "equal": ([[1, 1], [1, 1]], 0),
        "later": ([[0, 1], [1, 1]], 1),
        "column": ([[0, 0], [2, 2]], 2),
        "nan": ([[NAN, 5], [NAN, 7]], 2),
        "-inf": ([[-INF, -INF], [-INF, -INF]], 0),
        "zeros": ([[-0.0, 0.0], [0.0, 0.0]], 0),
    }
    for values, winner in row.values():
        x = np.tile(np.array(values, "f"), (1, 3, 1, 1))
        x = channels_last(x) if last else x
        for ws, stride, pad in ((2, 2, 0), (4, 1, 1)):
            y = dnn_pool(x, ws, stride, mode, pad)
            dx = dnn_pool_grad(x, y, np.full_like(y, 3), ws, stride, mode, pad)
            expected = np.zeros(4)
            expected[winner] = 3
            np.testing.assert_array_equal(dx, np.tile(expected.reshape(2, 2), (1, 3, 1, 1)))
            assert np.isnan(y).all() == np.isnan(values).any()


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_equal_maxima_of_many_windows(dtype: Any) -> None:
    """Data after a ReLU, rounded to a few values, are full of ties."""
    x = np.maximum(RNG.integers(-2, 3, (2, 5, 9, 10)), 0).astype(dtype)
    y = dnn_pool(x, 3, 2, "max", 1)
    dy = RNG.integers(1, 4, y.shape).astype(dtype)
    expected = np.zeros((2, 5, 11, 12))
    padded = np.pad(x.astype(np.float64), [(0, 0), (0, 0), (1, 1), (1, 1)], constant_values=-INF)
    for n, c, p, q in np.ndindex(*y.shape):
        h, w = np.unravel_index(padded[n, c, 2 * p : 2 * p + 3, 2 * q : 2 * q + 3].argmax(), (3, 3))
        expected[n, c, 2 * p + h, 2 * q + w] += float(dy[n, c, p, q])
    for given in (x, channels_last(x)):
        dx = dnn_pool_grad(given, y, dy, 3, 2, "max", 1)
        np.testing.assert_array_equal(dx.astype(np.float64), expected[:, :, 1:-1, 1:-1])


@pytest.mark.parametrize(
    ("shape", "ws", "stride", "pad"),
    [
        ((2, 3, 9, 21), (3, 3), (1, 1), (1, 1)),
        ((2, 3, 9, 38), (3, 3), (2, 2), (1, 1)),
        ((2, 3, 8, 35), (2, 3), (3, 3), (0, 2)),
        ((2, 3, 8, 64), (2, 2), (2, 2), (0, 0)),  # side by side: whole vectors
        ((2, 3, 11, 43), (3, 2), (3, 2), (0, 0)),  # a row and a column that no window reaches
        ((1, 2, 5, 7, 36), (2, 2, 2), (2, 2, 2), (0, 0, 0)),
        ((1, 9, 7, 7), (7, 7), (1, 1), (0, 0)),  # a plane of more than one vector, and a part of one
        ((1, 2, 5, 6, 19), (3, 3, 3), (2, 2, 2), (1, 1, 1)),
        ((1, 2, 4, 5, 7), (2, 3, 4), (1, 1, 1), (1, 2, 3)),
        ((9, 2, 9, 7, 23), (3, 3, 3), (2, 2, 2), (1, 1, 1)),  # windows that share a plane with those a depth before
        ((9, 2, 6, 7, 19), (3, 2, 3), (1, 1, 1), (0, 1, 1)),  # and two planes
        ((9, 2, 6, 2, 22), (2, 2, 4), (1, 1, 1), (0, 0, 0)),  # the first of which share none with another image
        ((9, 2, 5, 7, 19), (2, 3, 3), (1, 1, 1), (1, 1, 1)),  # or one before the image
    ],
)
@pytest.mark.parametrize("last", [False, True])
def test_maxima_among_nans_ties_and_infinities(shape: tuple, ws: tuple, stride: tuple, pad: tuple, last: bool) -> None:
    """The last NaN of a window gets its gradient, without one the first maximum, though all of it is -inf."""
    x = RNG.choice(np.array([-INF, -INF, -1, 0, 1, INF, NAN], "f"), shape, p=[0.3, 0.2, 0.15, 0.15, 0.1, 0.05, 0.05])
    x[0, 0] = -INF
    x = channels_last(x) if last else x
    y = dnn_pool(x, ws, stride, "max", pad)
    dy = RNG.integers(1, 9, y.shape).astype("f")
    expected = np.zeros(shape)
    for n, c, *window in np.ndindex(*y.shape):
        best, winner = -INF, None
        for tap in np.ndindex(*ws):
            at = tuple(p * u + r - before for p, u, r, before in zip(window, stride, tap, pad, strict=True))
            if all(0 <= i < extent for i, extent in zip(at, shape[2:], strict=True)):
                value = x[(n, c, *at)]
                if winner is None or value > best or np.isnan(value):
                    best, winner = value, (n, c, *at)
        if winner:
            expected[winner] += dy[(n, c, *window)]
    assert (expected > 0).mean() > 0.005
    ran = []
    for each in (candidate for candidate in registry.candidates("pool_bwd") if candidate.provider == "cpu"):
        with suppress(UnsupportedProblem):
            dx = dnn_pool_grad(x, y, dy, ws, stride, "max", pad, policy=each.id)
            np.testing.assert_array_equal(dx, expected, err_msg=each.id)
            ran.append(each.algorithm)
    assert len(ran) > 1 or max(ws) > 4


def test_out_and_odd_strides() -> None:
    x, y = RNG.standard_normal((2, 3, 8, 12)).astype("f"), np.zeros((2, 3, 4, 3), "f")
    view_, expected = x[..., ::2], dnn_pool(x[..., ::2].copy(), 2, 2)
    assert dnn_pool(view_, 2, 2, out=y) is y
    np.testing.assert_array_equal(y, expected)
    wide = np.full((2, 6, 4, 3), 7.0, "f")
    dnn_pool(view_, 2, 2, out=wide[:, ::2])
    np.testing.assert_array_equal(wide[:, ::2], expected)
    assert (wide[:, 1::2] == 7).all()
    dx = np.zeros((2, 3, 8, 6), "f")
    assert dnn_pool_grad(view_, y, y, 2, 2, dx=dx) is dx
    np.testing.assert_array_equal(dx, dnn_pool_grad(view_.copy(), y, y, 2, 2))
    assert np.count_nonzero(dx) == y.size


@pytest.mark.parametrize("shape", [(0, 3, 5, 5), (2, 0, 5, 5)])
def test_nothing_to_do(shape: tuple[int, ...]) -> None:
    x = np.zeros(shape, "f")
    y = dnn_pool(x, 2)
    assert y.shape == (*shape[:2], 4, 4)
    assert dnn_pool_grad(x, y, y, 2).shape == shape


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda x: dnn_pool(x[0], 2), InvalidType, "img has 3 axes, expected 4 or 5"),
        (lambda x: dnn_pool(x.astype(np.int32), 2), InvalidType, "int32"),
        (lambda x: dnn_pool(x, 2, mode="median"), InvalidProblem, "'median' is not one of max, max_deterministic"),
        (lambda x: dnn_pool(x, (2, 2, 2)), InvalidProblem, "ws has length 3, img has 2 spatial axes"),
        (lambda x: dnn_pool(x, [2, 2]), InvalidProblem, r"ws is \[2, 2\], expected an int or a tuple"),
        (lambda x: dnn_pool(x, 0), InvalidProblem, "ws is 0, it must be at least 1"),
        (lambda x: dnn_pool(x, 2**31), InvalidProblem, f"ws is {2**31}, it must be at most 2147483647"),
        (lambda x: dnn_pool(x, 2, stride=(1, 0)), InvalidProblem, "stride is 0, it must be at least 1"),
        (lambda x: dnn_pool(x, 2, pad=-1), InvalidProblem, "pad is -1, it must be at least 0"),
        (lambda x: dnn_pool(x, 6), InvalidProblem, "the window spans 6, the padded image 4"),
        (lambda x: dnn_pool(x, 2, out=np.zeros((2, 3, 4, 4), "f")), InvalidProblem, r"expected \(2, 3, 3, 4\)"),
        (lambda x: dnn_pool(x, 1, out=x), InvalidProblem, "out overlaps img"),
        (lambda x: dnn_pool_grad(x, x, x, 2), InvalidProblem, r"out has shape .*, expected \(2, 3, 3, 4\)"),
        (lambda x: dnn_pool_grad(x, x, x, 1, dx=x), InvalidProblem, "dx overlaps img"),
        (lambda x: dnn_pool(x, 1, policy="pool_fwd/cpu/none"), InvalidProblem, "pool_fwd/cpu/rows"),
        (lambda x: dnn_pool(x, 1, 2**63), InvalidProblem, f"stride is {2**63}, it must be at most 2147483647"),
        (lambda x: dnn_pool(x, 1, mode=["max"]), InvalidProblem, r"mode \['max'\] is not one of max, "),
    ],
)
def test_errors_name_what_is_wrong(call: Any, error: type, match: str) -> None:
    with pytest.raises(error, match=match):
        call(np.zeros((2, 3, 4, 5), "f"))


def test_a_zero_extent_is_an_error() -> None:
    with pytest.raises(InvalidProblem, match="spatial extent is 0"):
        dnn_pool(np.zeros((2, 3, 0, 5), "f"), 1)


def test_a_call_poses_one_problem() -> None:
    """A sum's gradient has no use for img and out."""
    x = RNG.standard_normal((2, 3, 4, 5)).astype("f")
    with events() as log:
        y = dnn_pool(x, (2, 3), 2, "max", (1, 0))
        dnn_pool_grad(x[..., ::1], y, y, (2, 3), 2, "average", (1, 0))
    shape = "n2c3h4w5:r2s3:p1x0:u2x2"
    assert {event.problem for event in log} == {
        f"pool_fwd:f32:{shape}:max:nchw",
        f"pool_bwd:f32:{shape}:average_inc_pad:nchw",
    }
    assert [o.name for o in parse(log[-1].problem).operands] == ["dy", "dx"]


def test_op_objects() -> None:
    x, g = RNG.standard_normal((2, 3, 6, 6)), RNG.standard_normal((2, 3, 3, 3))
    op = ops.GpuDnnPool("max")
    y = op(x, (2, 2), (2, 2), (0, 0))
    np.testing.assert_array_equal(y, dnn_pool(x, 2, 2))
    dx, *rest = op.grad((x, (2, 2), (2, 2), (0, 0)), (g,))
    np.testing.assert_array_equal(dx, dnn_pool_grad(x, y, g, 2, 2))
    assert rest == [None, None, None]
    again = ops.GpuDnnPoolGrad("average_exc_pad")(x, y, g, (3, 3), (2, 2), (1, 1))
    np.testing.assert_array_equal(again, dnn_pool_grad(x, y, g, 3, 2, "average_exc_pad", 1))
    desc = ops.GpuDnnPoolDesc((2, 2), (2, 2), "max", (0, 0))
    assert (desc.ws, desc.stride, desc.mode, desc.pad) == ((2, 2), (2, 2), "max", (0, 0))


def test_torch_in_torch_out(torch: ModuleType) -> None:
    x = torch.randn(2, 3, 8, 9, dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last).requires_grad_()
    expected = torch.nn.functional.max_pool2d(x, 3, 2, 1)
    y = dnn_pool(x.detach(), 3, 2, "max", 1)
    assert y.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(y, expected.detach(), rtol=0, atol=0)
    expected.backward(torch.ones_like(y))
    dx = dnn_pool_grad(x.detach(), y, torch.ones_like(y), 3, 2, "max", 1)
    torch.testing.assert_close(dx, x.grad, rtol=0, atol=0)


# ---- what each candidate must support --------------------------------------------------------------------------------


class Covers(NamedTuple):
    """Space-separated dtypes, shapes of the table below, modes and ends of the text."""

    dtypes: str
    shapes: str
    modes: str = " ".join(MODES)
    ends: str = ""
    layouts: tuple[bool, ...] = (False, True)  # whether channels are last


_SHAPES = {
    "2x2/2": "n16c64h224w224:r2s2:p0x0:u2x2",
    "3x3/2": "n32c64h112w112:r3s3:p1x1:u2x2",
    "3x3": "n32c256h28w28:r3s3:p1x1:u1x1",
    "4x4": "n8c64h56w56:r4s4:p0x0:u1x1",
    "8x8/8": "n8c64h128w128:r8s8:p0x0:u8x8",
    "odd": "n3c5h13w11:r3s2:p1x0:u2x3",
    "padding": "n1c4h5w6:r2s2:p2x2:u2x2",
    "global": "n32c256h56w56:r56s56:p0x0:u1x1",
    "large": "n1c4h41w43:r17s19:p8x9:u3x2",
    "3x3x3": "n2c32d32h64w64:t3r3s3:p1x1x1:u1x1x1",
    "2x2x2/2": "n4c64d16h112w112:t2r2s2:p0x0x0:u2x2x2",
    "3x3x3/2": "n4c64d16h56w56:t3r3s3:p1x1x1:u2x2x2",
    "planes": "n32c288h35w35:r3s3:p0x0:u2x2",
    "huge": "n1c3h40000w40000:r2s2:p0x0:u2x2",
}
_EVERY, _OF_GPU, _MAX = "f16 bf16 f32 f64", "f16 bf16 f32", "max max_deterministic"
_ALL = " ".join(_SHAPES)
_SUMS = "average_inc_pad average_exc_pad sum"
_SMALL = "2x2/2 3x3/2 3x3 odd padding 2x2x2/2 3x3x3/2 huge"
_OF_PLANES = f"{_SMALL} 8x8/8"
_OF_CUDNN = "2x2/2 3x3/2 3x3 odd global large 2x2x2/2 3x3x3/2"

COVERAGE: dict[str, Covers] = {
    "pool_fwd/cpu/rows": Covers(_EVERY, _ALL, ends="a8"),
    "pool_bwd/cpu/rows": Covers(_EVERY, _ALL, ends="a8"),
    "pool_bwd/cpu/indices": Covers(_EVERY, _OF_PLANES, _MAX, ends="a8"),
    "pool_bwd/cpu/scatter": Covers("f32 f64", _OF_PLANES, _MAX, ends="a8"),
    "pool_fwd/cpu/windows": Covers(_EVERY, _ALL, ends="a8", layouts=(True,)),
    "pool_fwd/cpu/sliding": Covers(_EVERY, _OF_PLANES, ends="a8", layouts=(False,)),
    "pool_bwd/cpu/sliding": Covers(_EVERY, _OF_PLANES, _SUMS, ends="a8", layouts=(False,)),
    "pool_fwd/numba/direct": Covers(_EVERY, _ALL, ends="a8"),
    "pool_bwd/numba/direct": Covers(_EVERY, _ALL, ends="a8"),
    "pool_fwd/numba/window": Covers(_OF_GPU, _SMALL, ends="a4"),
    "pool_bwd/numba/window": Covers(_OF_GPU, _SMALL, ends="a4"),
    "pool_fwd/numba/separable": Covers(_EVERY, "global large 4x4 3x3x3/2", ends="a8"),
    "pool_bwd/numba/separable": Covers(_EVERY, "global large 4x4 3x3x3/2", ends="a8"),
    "pool_bwd/numba/rolling": Covers(_OF_GPU, "3x3 4x4 large 3x3x3", _MAX, ends="a4"),
    "pool_bwd/numba/marching": Covers(_OF_GPU, "3x3/2 3x3x3/2 planes", _MAX, ends="a4", layouts=(True,)),
    "pool_fwd/numba/plane": Covers(_OF_GPU, "global", ends="a4"),
    "pool_bwd/numba/plane": Covers(_OF_GPU, "global", _SUMS, ends="a4"),
    "pool_bwd/numba/spread": Covers(_OF_GPU, "2x2/2 2x2x2/2", _SUMS, ends="a4", layouts=(False,)),
    "pool_bwd/numba/staged": Covers(_OF_GPU, "planes 3x3", _MAX, layouts=(False,)),
}


@pytest.mark.parametrize("id", COVERAGE)
def test_supports_what_it_must(id: str, device: Cpu) -> None:
    candidate, covers = registry.candidate(id), COVERAGE[id]
    on = device if registry.kind_of(candidate) == "cpu" else DEVICE
    kinds = product(covers.dtypes.split(), covers.shapes.split(), covers.modes.split(), covers.layouts)
    for dtype, name, mode, last in kinds:
        layout = (("nchw", "nhwc"), ("ncdhw", "ndhwc"))["t" in _SHAPES[name]][last]
        for end in ("", *covers.ends.split()):
            problem = parse(":".join(filter(None, (candidate.op, dtype, _SHAPES[name], mode, layout, end))))
            support = candidate.supports(problem, on)
            assert support.ok, f"{problem}: {support.reason}"


@pytest.mark.parametrize("vector_bytes", [16, 32, 64])
def test_channels_in_vectors_of_every_width(vector_bytes: int, device: Cpu) -> None:
    """A compiler splits what the processor does not have."""
    for problem in edges("pool_fwd", "cpu"):
        if problem.channels_last and problem.dtype in ("f32", "bf16"):
            other = replace(device, vector_bytes=vector_bytes)
            for algorithm in ("windows", "rows"):
                check(registry.candidate(f"pool_fwd/cpu/{algorithm}"), problem, NoConfig(), other)


@pytest.mark.parametrize("mode", ["max", "sum", "average_inc_pad"])
@pytest.mark.parametrize(
    ("text", "at_once"),
    [
        ("f32:n3c131h5w4:r5s4:p0x0:u1x1:{}:nhwc", 1),
        ("f64:n2c511h3w6:r3s6:p0x0:u1x1:{}:nhwc", 4),
        ("f32:n1c1030h2w3:r2s3:p0x0:u1x1:{}:nhwc", 4),
        ("bf16:n1c4096h3w1:r3s1:p0x0:u1x1:{}:nhwc", 4),
        ("bf16:n2c2051h3w3:r3s3:p0x0:u1x1:{}:nhwc", 4),
        ("f32:n2c256d3h2w5:t3r2s5:p0x0x0:u1x1x1:{}:ndhwc", 4),
    ],
)
def test_whole_images_by_lines_of_channels(text: str, at_once: int, mode: str, device: Cpu) -> None:
    """Lines that are no whole vectors, and as long as they may be; blocks of channels; pixels left over, or too few."""
    problem = parse("pool_fwd:" + text.format(mode))
    at_once = 1 if problem.is_max and problem.c < 1024 else at_once
    for vector_bytes in (16, min(32, device.vector_bytes)):
        other = replace(device, vector_bytes=vector_bytes)
        assert pool_channels.lines_at_once(problem, axes_of(problem), other) == at_once
        check(registry.candidate("pool_fwd/cpu/windows"), problem, NoConfig(), other)


@pytest.mark.parametrize("narrow", [("avx512", 64), ("avx2", 32), ("neon", 16)], ids=lambda narrow: narrow[0])
def test_gradients_in_blocks_of_one_row(narrow: tuple[str, int], device: Cpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows reach into several blocks, and the last blocks have rows that no window reaches; whole images fit one."""
    isa, vector_bytes = narrow
    narrower = replace(device, isa=isa, vector_bytes=min(vector_bytes, device.vector_bytes))
    for module in (pool_max_channels, pool_max_planes):
        monkeypatch.setattr(module, "BLOCK_BYTES", 1)
    for problem in edges("pool_bwd", "cpu"):
        if problem.dtype == "f32" and problem.is_max:
            check(registry.candidate("pool_bwd/cpu/rows"), problem, NoConfig(), narrower)


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_a_stride_beyond_the_image_is_one_that_reaches_its_end(layout: str) -> None:
    """Of what is kept for a stride's phases there would be as much more."""
    far, near = (
        axes_of(parse(f"pool_bwd:f32:n1c1h8w8:r3s8:p1x0:{steps}:max:{layout}")) for steps in ("u4000x4000", "u8x8")
    )
    assert far == near


@pytest.mark.parametrize(("vector_bytes", "more_threads"), [(32, 1), (64, 64)], ids=["shorter vectors", "few planes"])
@pytest.mark.parametrize("algorithm", ["indices", "scatter"])
def test_maxima_of_windows(algorithm: str, vector_bytes: int, more_threads: int, device: Cpu) -> None:
    """Where planes are few, all windows of all are searched before any gradient is given, or channels are shared."""
    candidate = registry.candidate(f"pool_bwd/cpu/{algorithm}")
    vector_bytes, threads = min(vector_bytes, device.vector_bytes), more_threads * device.threads
    other = replace(device, vector_bytes=vector_bytes, threads=threads)
    for problem in edges("pool_bwd", "cpu"):
        if (problem.dtype, problem.mode) == ("f32", "max") and candidate.supports(problem, other).ok:
            check(candidate, problem, NoConfig(), other)


@pytest.mark.parametrize(
    ("id", "vector_bytes"), [("pool_bwd/cpu/rows", 16), ("pool_bwd/cpu/indices", 64)], ids=["rows", "indices"]
)
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_gradients_past_the_caches(id: str, vector_bytes: int, dtype: str, device: Cpu) -> None:
    """As of operands that are larger than the last-level cache, with vectors that operands are aligned to or not."""
    vector_bytes = min(vector_bytes, device.vector_bytes)
    candidate, small = registry.candidate(id), replace(device, llc_bytes=0, vector_bytes=vector_bytes)
    whole_lines = parse(f"pool_bwd:{dtype}:n2c3h8w96:r4s4:p0x0:u4x4:max:nchw")
    every = [p for p in edges("pool_bwd", "cpu") if (p.dtype, p.mode, p.align) == (dtype, "max", 16)]
    some = [p for p in every if candidate.supports(p, small).ok][:: 1 if dtype == "f32" else 2]
    for problem in (*some, whole_lines):
        check(candidate, problem, NoConfig(), small)


@pytest.mark.parametrize("extent", [512, 3000])
def test_averages_of_large_planes_keep_what_is_small_beside_a_sum(extent: int) -> None:
    x = np.full((1, 2, extent, extent), 0.1, np.float32)
    np.testing.assert_allclose(dnn_pool(x, extent, mode="average_inc_pad"), x[:, :, :1, :1], rtol=2e-5)
