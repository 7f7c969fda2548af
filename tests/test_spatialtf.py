"""The functions of the spatial transformer as a user meets them: values, shapes, dtypes, layouts, out=, errors."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product
from types import ModuleType
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from cells import check
from gpus import DEVICE, H200
from layouts import channels_last

from nbdnn import (
    InvalidProblem,
    InvalidType,
    dnn_spatialtf,
    dnn_spatialtf_grad,
    dnn_spatialtf_grid,
    dnn_spatialtf_grid_grad,
    dnn_spatialtf_sampler,
    dnn_spatialtf_sampler_grad,
    events,
    ops,
)
from nbdnn.array import view
from nbdnn.device import Cpu
from nbdnn.dispatch import registry
from nbdnn.problem import FAMILIES, parse

pytestmark = pytest.mark.usefixtures("no_plans")

RNG = np.random.default_rng(0)
OPS = FAMILIES["spatialtf"]
IDENTITY = np.eye(2, 3)
NAN, INF = np.nan, np.inf


def thetas(n: int) -> np.ndarray:
    """Turned, scaled and moved a little."""
    return IDENTITY + 0.25 * RNG.standard_normal((n, 2, 3))


def by_hand(img: np.ndarray, theta: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """Every output as a sum over all pixels."""
    n, c, height, width = img.shape
    u, v = (np.linspace(-1, 1, extent) if extent > 1 else np.zeros(1) for extent in (columns, rows))
    out = np.empty((n, c, rows, columns))
    for k, i, j in np.ndindex(n, rows, columns):
        x, y = theta[k] @ (u[j], v[i], 1)
        along = np.maximum(0, 1 - abs((x + 1) / 2 * (width - 1) - np.arange(width)))
        down = np.maximum(0, 1 - abs((y + 1) / 2 * (height - 1) - np.arange(height)))
        out[k, :, i, j] = (img[k] * down[:, None] * along).sum((1, 2))
    return out


@pytest.mark.parametrize("shape", [(2, 3, 5, 7), (1, 20, 6, 1), (3, 1, 1, 8)])
@pytest.mark.parametrize("scales", [(1, 1), (1.3, 0.55), (0.01, 2)])
def test_values_are_the_definition_in_every_layout(shape: tuple, scales: tuple) -> None:
    img, theta = RNG.standard_normal(shape), thetas(shape[0])
    size = int(np.ceil(shape[2] * scales[1])), int(np.ceil(shape[3] * scales[0]))
    for given in (img, channels_last(img)):
        out = dnn_spatialtf(given, theta, *scales)
        assert out.shape == (*shape[:2], *size) and out.dtype == np.float64
        assert view(out, "out").layout in (view(given, "img").layout, None)
        np.testing.assert_allclose(out, by_hand(img, theta, *size), rtol=1e-12, atol=1e-13)


def test_two_steps_are_the_whole() -> None:
    img, theta = RNG.standard_normal((2, 3, 6, 8)), thetas(2)
    grid = dnn_spatialtf_grid(theta, (2, 3, 9, 4))
    assert grid.shape == (2, 9, 4, 2)
    whole = dnn_spatialtf(img, theta, 0.5, 1.5)
    np.testing.assert_allclose(dnn_spatialtf_sampler(img, grid), whole, rtol=1e-12, atol=1e-13)
    top = RNG.standard_normal(whole.shape)
    dimg, dgrid = dnn_spatialtf_sampler_grad(img, grid, top)
    for got, expected in zip(
        dnn_spatialtf_grad(img, theta, top, 0.5, 1.5), (dimg, dnn_spatialtf_grid_grad(dgrid)), strict=True
    ):
        np.testing.assert_allclose(got, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
@pytest.mark.parametrize("last", [False, True])
def test_the_identity_is_exact(dtype: Any, last: bool) -> None:
    img = RNG.standard_normal((2, 5, 37, 50)).astype(dtype)
    given = channels_last(img) if last else img
    theta = np.tile(IDENTITY, (2, 1, 1)).astype(dtype)
    out = dnn_spatialtf(given, theta)
    assert out.dtype == dtype
    np.testing.assert_array_equal(out, img)
    dimg, dtheta = dnn_spatialtf_grad(given, theta, given)
    assert (dimg.dtype, dtheta.dtype, dtheta.shape) == (dtype, dtype, (2, 2, 3))
    np.testing.assert_array_equal(dimg, img)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("shape", [(2, 3, 6, 7), (3, 20, 5, 4)])
def test_gradients_are_finite_differences(shape: tuple, last: bool) -> None:
    img, theta = RNG.standard_normal(shape), thetas(shape[0])
    img = channels_last(img) if last else img
    top = RNG.standard_normal(dnn_spatialtf(img, theta, 1.7, 1.2).shape)
    dimg, dtheta = dnn_spatialtf_grad(img, theta, top, 1.7, 1.2)
    assert view(dimg, "dimg").layout == view(img, "img").layout
    step = 1e-7
    for wanted, moved in ((dimg, 0), (dtheta, 1)):
        direction = RNG.standard_normal(wanted.shape)
        above, below = (
            dnn_spatialtf(
                *(a + sign * step * direction if i == moved else a for i, a in enumerate((img, theta))), 1.7, 1.2
            )
            for sign in (1, -1)
        )
        slope = (top * (above - below)).sum() / (2 * step)
        assert abs(slope) > 1e-2
        np.testing.assert_allclose((wanted * direction).sum(), slope, rtol=2e-6)


@pytest.mark.parametrize("last", [False, True])
def test_steps_have_gradients_that_are_finite_differences(last: bool) -> None:
    img, grid = RNG.standard_normal((2, 18, 6, 7)), RNG.uniform(-1.2, 1.2, (2, 5, 4, 2))
    img = channels_last(img) if last else img
    top, step = RNG.standard_normal((2, 18, 5, 4)), 1e-7
    dimg, dgrid = dnn_spatialtf_sampler_grad(img, grid, top)
    direction = RNG.standard_normal(grid.shape)
    above, below = (dnn_spatialtf_sampler(img, grid + sign * step * direction) for sign in (1, -1))
    np.testing.assert_allclose((dgrid * direction).sum(), (top * (above - below)).sum() / (2 * step), rtol=2e-6)
    np.testing.assert_allclose((dimg * img).sum(), (top * dnn_spatialtf_sampler(img, grid)).sum(), rtol=1e-11)
    theta = thetas(2)
    dtheta = dnn_spatialtf_grid_grad(grid)
    np.testing.assert_allclose((dtheta * theta).sum(), (grid * dnn_spatialtf_grid(theta, (2, 1, 5, 4))).sum())


@pytest.mark.parametrize("last", [False, True])
def test_outside_is_zero_whatever_the_image_has(last: bool) -> None:
    """Positions a pixel or more from the image, and those that are no numbers; not even a NaN at the border is seen."""
    img = np.full((1, 20, 4, 5), NAN, "f")
    img[:, :, 1:3, 1:4] = 1
    img = channels_last(img) if last else img
    grid = np.array([[-9, 0], [0, 9], [NAN, 0], [0, INF], [-INF, -INF], [1.5, 0], [0, -1.75], [0, 0]], "f")
    out = dnn_spatialtf_sampler(img, grid[None, None])
    assert out[0, 0, 0].tolist() == [0] * 7 + [1]
    dimg, dgrid = dnn_spatialtf_sampler_grad(img, grid[None, None, :6], np.ones((1, 20, 1, 6), "f"))
    assert not dimg.any() and not dgrid[0, 0, [0, 1, 3, 4]].any()


def test_theta_of_16_bit_images_may_be_float32() -> None:
    img = RNG.standard_normal((2, 3, 40, 300)).astype(np.float16)
    theta = thetas(2).astype("f")
    with events() as log:
        out = dnn_spatialtf(img, theta)
    assert out.dtype == np.float16 and log[-1].problem == "spatialtf_fwd:f16:n2c3h40w300:o40x300:nchw:pf32"
    dimg, dtheta = dnn_spatialtf_grad(img, theta, img)
    assert (dimg.dtype, dtheta.dtype) == (np.float16, np.float32)
    expected = by_hand(img.astype("d"), theta.astype("d"), 40, 300)
    np.testing.assert_allclose(out.astype("d"), expected, atol=4e-3)
    assert abs(dnn_spatialtf(img, theta.astype(np.float16)).astype("d") - expected).max() > 0.02


def test_operands_are_cast_to_what_holds_them_all() -> None:
    img, theta = RNG.standard_normal((1, 2, 4, 4)), thetas(1)
    assert dnn_spatialtf(img.astype("f"), theta).dtype == np.float64
    assert dnn_spatialtf(img.astype(np.float16), theta).dtype == np.float64
    assert dnn_spatialtf(img.astype("f"), theta.astype(np.float16)).dtype == np.float32
    dimg, dtheta = dnn_spatialtf_grad(img.astype(np.float16), theta.astype(np.float16), img.astype("f"))
    assert dimg.dtype == dtheta.dtype == np.float32


def test_out_and_odd_strides() -> None:
    img, theta = RNG.standard_normal((2, 3, 8, 12)).astype("f")[..., ::2], thetas(2).astype("f")
    strange = np.asfortranarray(theta)
    expected = dnn_spatialtf(img.copy(), theta)
    out = np.zeros((2, 3, 8, 6), "f")
    assert dnn_spatialtf(img, strange, out=out) is out
    np.testing.assert_array_equal(out, expected)
    wide = np.full((2, 6, 8, 6), 7.0, "f")
    dnn_spatialtf(img, theta, out=wide[:, ::2])
    np.testing.assert_array_equal(wide[:, ::2], expected)
    assert (wide[:, 1::2] == 7).all()
    dimg, dtheta = np.zeros((2, 3, 8, 6), "f"), np.zeros((2, 2, 6), "f")[..., ::2]
    found = dnn_spatialtf_grad(img, theta, out, out=(dimg, dtheta))
    assert found[0] is dimg and found[1] is dtheta
    for got, wanted in zip(found, dnn_spatialtf_grad(img.copy(), theta, out), strict=True):
        np.testing.assert_array_equal(got, wanted)
    assert dnn_spatialtf_grad(img, theta, out, out=(dimg, None))[0] is dimg


@pytest.mark.parametrize("shape", [(0, 3, 5, 5), (2, 0, 5, 5)])
def test_nothing_to_do(shape: tuple[int, ...]) -> None:
    img, theta = np.zeros(shape, "f"), np.ones((shape[0], 2, 3), "f")
    out = dnn_spatialtf(img, theta, 2, 1)
    assert out.shape == (*shape[:2], 5, 10)
    dimg, dtheta = dnn_spatialtf_grad(img, theta, out, 2, 1, out=(None, np.full(theta.shape, NAN, "f")))
    assert dimg.shape == shape and not dtheta.any()
    grid = dnn_spatialtf_grid(theta, (shape[0], 3, 4, 6))
    assert grid.shape == (shape[0], 4, 6, 2)
    _, dgrid = dnn_spatialtf_sampler_grad(img, grid, np.zeros((*shape[:2], 4, 6), "f"), out=(None, grid.copy()))
    assert not dgrid.any() and dnn_spatialtf_grid_grad(dgrid).shape == theta.shape


@pytest.mark.parametrize("scale", [np.array(2.0), np.float32(2), np.int64(2)], ids=["array", "float32", "int64"])
def test_a_scale_is_a_number_of_any_library(scale: Any) -> None:
    assert dnn_spatialtf(IMG, THETA, scale, scale).shape == (2, 3, 8, 10)


def test_a_scale_counts_as_it_is_at_the_call(torch: ModuleType) -> None:
    img, theta, scale = torch.zeros(2, 3, 4, 5), torch.zeros(2, 2, 3), torch.tensor(2.0)
    assert dnn_spatialtf(img, theta, scale).shape == (2, 3, 4, 10)
    scale.fill_(3)
    assert dnn_spatialtf(img, theta, scale).shape == (2, 3, 4, 15)


IMG, THETA = np.zeros((2, 3, 4, 5), "f"), np.zeros((2, 2, 3), "f")
GRID = np.zeros((2, 6, 7, 2), "f")


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: dnn_spatialtf(IMG[0], THETA), InvalidType, "img has 3 axes, expected 4"),
        (lambda: dnn_spatialtf(IMG, THETA[0]), InvalidType, "theta has 2 axes, expected 3"),
        (lambda: dnn_spatialtf(IMG, THETA[:1]), InvalidProblem, "theta has shape (1, 2, 3), expected (2, 2, 3)"),
        (lambda: dnn_spatialtf(IMG, THETA[..., :2]), InvalidProblem, "theta has shape (2, 2, 2)"),
        (lambda: dnn_spatialtf(IMG.astype(int), THETA), InvalidType, "img: dtype int64"),
        (lambda: dnn_spatialtf(IMG, THETA, 0), InvalidProblem, "scale_width is 0.0, it must be positive"),
        (lambda: dnn_spatialtf(IMG, THETA, 1e308), InvalidProblem, "scale_width is 1e+308, which makes 5 more"),
        (lambda: dnn_spatialtf(IMG, THETA, 1, INF), InvalidProblem, "scale_height is inf"),
        (lambda: dnn_spatialtf(IMG, THETA, "1x"), InvalidType, "scale_width is '1x', expected a number"),
        (lambda: dnn_spatialtf(IMG, THETA, 1, 10**400), InvalidType, "00, expected a number"),
        (lambda: dnn_spatialtf(IMG[:, :, :0], THETA), InvalidProblem, "spatial extent is 0"),
        (lambda: dnn_spatialtf(IMG, THETA, out=IMG), InvalidProblem, "out overlaps img"),
        (lambda: dnn_spatialtf(IMG, THETA, 2, out=IMG), InvalidProblem, "expected (2, 3, 4, 10)"),
        (lambda: dnn_spatialtf(IMG, THETA, policy="none"), InvalidProblem, "'none' is unknown"),
        (lambda: dnn_spatialtf_grad(IMG, THETA, IMG, 2), InvalidProblem, "expected (2, 3, 4, 10)"),
        (lambda: dnn_spatialtf_grad(IMG, THETA, IMG, out=(None,)), InvalidProblem, "out has 1 arrays, expected 2"),
        (lambda: dnn_spatialtf_grid(THETA, (2, 3, 4)), InvalidProblem, "out_dims has 3 numbers"),
        (lambda: dnn_spatialtf_grid(THETA, (3, 3, 4, 5)), InvalidProblem, "shape (2, 2, 3), expected (3, 2, 3)"),
        (lambda: dnn_spatialtf_grid(THETA, (2, 3, 0, 5)), InvalidProblem, "output extent is 0"),
        (lambda: dnn_spatialtf_grid(THETA, (2, 3, 4.5, 5)), InvalidType, "expected four ints"),
        (lambda: dnn_spatialtf_grid(THETA, 4), InvalidType, "out_dims is 4"),
        (lambda: dnn_spatialtf_sampler(IMG, GRID[..., :1]), InvalidProblem, "expected (2, 6, 7, 2)"),
        (lambda: dnn_spatialtf_sampler(IMG, GRID[:1]), InvalidProblem, "expected (2, 6, 7, 2)"),
        (lambda: dnn_spatialtf_sampler(IMG, GRID[0]), InvalidType, "grid has 3 axes, expected 4"),
        (lambda: dnn_spatialtf_sampler_grad(IMG, GRID, IMG), InvalidProblem, "expected (2, 3, 6, 7)"),
        (lambda: dnn_spatialtf_grid_grad(GRID[..., :1]), InvalidProblem, "dgrid has shape (2, 6, 7, 1)"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(call: Any, error: type, message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        call()


def test_out_dims_may_be_any_sequence() -> None:
    for dims in ([2, 3, 4, 5], np.array([2, 3, 4, 5])):
        assert dnn_spatialtf_grid(THETA, dims).shape == (2, 4, 5, 2)  # type: ignore[arg-type]


def test_op_objects() -> None:
    img, theta = RNG.standard_normal((2, 3, 6, 6)), thetas(2)
    to_grid, sampler = ops.GpuDnnTransformerGrid(), ops.GpuDnnTransformerSampler()
    grid = to_grid(theta, (2, 3, 4, 5))
    out = sampler(img, grid)
    np.testing.assert_array_equal(out, dnn_spatialtf_sampler(img, dnn_spatialtf_grid(theta, (2, 3, 4, 5))))
    expected = dnn_spatialtf_sampler_grad(img, grid, out)
    for found in (sampler.grad((img, grid), (out,)), ops.GpuDnnTransformerGradI()(img, grid, out)):
        np.testing.assert_array_equal(found[0], expected[0])
        np.testing.assert_array_equal(found[1], expected[1])
    dtheta, of_dims = to_grid.grad((theta, (2, 3, 4, 5)), (expected[1],))
    np.testing.assert_array_equal(dtheta, dnn_spatialtf_grid_grad(expected[1]))
    assert of_dims is None
    np.testing.assert_array_equal(ops.GpuDnnTransformerGradT()(expected[1]), dtheta)


@pytest.mark.parametrize("last", [False, True])
def test_torch_in_torch_out(last: bool, torch: ModuleType) -> None:
    functional = torch.nn.functional
    img = torch.randn(2, 5, 9, 8, dtype=torch.float64)
    img = img.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format).requires_grad_()
    theta = torch.from_numpy(thetas(2)).requires_grad_()
    grid = functional.affine_grid(theta, (2, 5, 7, 12), align_corners=True)
    expected = functional.grid_sample(img, grid, align_corners=True)
    out = dnn_spatialtf(img.detach(), theta.detach(), 1.5, 7 / 9)
    assert out.is_contiguous(memory_format=torch.channels_last) == last
    torch.testing.assert_close(out, expected.detach())
    top = torch.randn_like(out)
    wanted = torch.autograd.grad(expected, (img, theta), top)
    found = dnn_spatialtf_grad(img.detach(), theta.detach(), top, 1.5, 7 / 9)
    for got, each in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, each)
    torch.testing.assert_close(dnn_spatialtf_grid(theta.detach(), (2, 5, 7, 12)), grid.detach())


def test_jax_in_jax_out(jax: ModuleType) -> None:
    img, theta = RNG.standard_normal((2, 3, 6, 7)).astype("f"), thetas(2).astype("f")
    out = dnn_spatialtf(jax.numpy.asarray(img), jax.numpy.asarray(theta))
    assert isinstance(out, jax.Array)
    np.testing.assert_array_equal(np.asarray(out), dnn_spatialtf(img, theta))


@pytest.mark.parametrize("narrow", [("avx2", 32), ("neon", 16)], ids=lambda narrow: narrow[0])
@pytest.mark.parametrize("op", [op for op in OPS if not op.startswith("spatialtf_grid")])
def test_kernels_for_narrower_vectors(op: str, narrow: tuple[str, int], device: Cpu) -> None:
    """A machine of wide vectors runs the code for narrower ones as well, with the tails it has there."""
    isa, vector_bytes = narrow
    narrower = replace(device, isa=isa, vector_bytes=min(vector_bytes, device.vector_bytes))
    for text in ("f32:n2c3h9w11:o10x13:nchw", "bf16:n1c33h12w7:o5x40:nhwc:pf32", "f64:n2c3h9w11:o10x13:nhwc"):
        problem = parse(f"{op}:{text}")
        for candidate in registry.candidates(op):
            if candidate.supports(problem, narrower).ok:
                check(candidate, problem, candidate.configs(problem, narrower)[0], narrower)


# ---- what each candidate must support --------------------------------------------------------------------------------


class Covers(NamedTuple):
    """Space-separated dtypes, shapes of the table below, layouts and ends of the text."""

    dtypes: str
    shapes: str
    layouts: str = "nchw nhwc"
    ends: str = "a8 pf32"


_SHAPES = {
    "mnist": "n64c1h28w28:o28x28",
    "photo": "n32c3h224w224:o224x224",
    "features": "n32c64h56w56:o56x56",
    "deep": "n8c2048h7w7:o7x7",
    "enlarged": "n2c5h7w6:o61x53",
    "pixel": "n1c1h1w1:o1x1",
    "line": "n2c4h1w9:o1x4",
    "one": "n1c3h512w700:o333x500",
}
_HUGE = {"huge": "n1c1h65537w65537:o4x5"}
_EVERY, _ALL = "f16 bf16 f32 f64", " ".join(_SHAPES)
_ON_GPU = f"{_ALL} huge"
_WITH_IMAGE = [op for op in OPS if not op.startswith("spatialtf_grid")]

COVERAGE: dict[str, Covers] = {
    **{f"{op}/cpu/planar": Covers(_EVERY, _ALL) for op in _WITH_IMAGE},
    **{f"{op}/cpu/channels": Covers(_EVERY, _ALL, "nhwc") for op in _WITH_IMAGE},
    **{f"{op}/cpu/pixels": Covers(_EVERY, _ALL) for op in _WITH_IMAGE},
    **{
        f"{op}/cpu/interleaved": Covers("f16 bf16 f32", "photo line one", "nhwc")
        for op in ("spatialtf_fwd", "spatialtf_sampler_fwd")
    },
    **{f"{op}/cpu/rows": Covers(_EVERY, _ALL, "", "a8") for op in ("spatialtf_grid_fwd", "spatialtf_grid_bwd")},
    "spatialtf_fwd/numba/direct": Covers(_EVERY, _ON_GPU),
    "spatialtf_sampler_fwd/numba/direct": Covers(_EVERY, _ON_GPU),
    "spatialtf_bwd/numba/held": Covers("f16 bf16 f32", "mnist enlarged pixel line"),
    "spatialtf_bwd/numba/staged": Covers("f16 bf16 f32", "mnist photo pixel line one"),
    "spatialtf_bwd/numba/atomic": Covers(_EVERY, _ON_GPU),
    "spatialtf_bwd/numba/gather": Covers(_EVERY, _ON_GPU),
    "spatialtf_sampler_bwd/numba/held": Covers("f16 bf16 f32", "mnist enlarged pixel line"),
    "spatialtf_sampler_bwd/numba/binned": Covers("f16 bf16 f32", "mnist features deep enlarged pixel line"),
    "spatialtf_sampler_bwd/numba/atomic": Covers(_EVERY, _ON_GPU),
    "spatialtf_sampler_bwd/numba/ordered": Covers(_EVERY, _ON_GPU),
    "spatialtf_sampler_bwd/numba/turned": Covers("f16 bf16 f32", _ON_GPU, "nchw"),
    "spatialtf_grid_fwd/numba/direct": Covers(_EVERY, _ON_GPU, "", "a8"),
    "spatialtf_grid_bwd/numba/sums": Covers(_EVERY, _ON_GPU, "", "a8"),
}


@pytest.mark.parametrize(("channels", "layout"), [(1, "nhwc"), (3, "nhwc"), (5, "nhwc"), (4, "nchw")])
def test_sums_in_whole_vectors_are_for_pixels_that_are_none(channels: int, layout: str) -> None:
    turned = registry.candidate("spatialtf_sampler_bwd/numba/turned")
    assert turned.supports(parse(f"spatialtf_sampler_bwd:f16:n2c{channels}h9w11:o10x13:{layout}"), H200).ok
    refused = turned.supports(parse("spatialtf_sampler_bwd:f16:n2c8h9w11:o10x13:nhwc"), H200)
    assert not refused.ok and "8 channels" in refused.reason


def texts(op: str, covers: Covers) -> list[str]:
    """The problems of a row of the table."""
    found = []
    for dtype, name, layout in product(covers.dtypes.split(), covers.shapes.split(), covers.layouts.split() or [""]):
        dims, out = (_SHAPES | _HUGE)[name].split(":")
        for end in ("", *covers.ends.split()):
            if end != "pf32" or dtype.endswith("16"):
                shape = (dims, out, layout) if layout else (dims.partition("c")[0], out)
                found.append(":".join(filter(None, (op, dtype, *shape, end))))
    return found


@pytest.mark.parametrize("id", COVERAGE)
def test_supports_what_it_must(id: str, device: Cpu) -> None:
    candidate = registry.candidate(id)
    on = device if registry.kind_of(candidate) == "cpu" else DEVICE
    for text in texts(candidate.op, COVERAGE[id]):
        support = candidate.supports(parse(text), on)
        assert support.ok, f"{text}: {support.reason}"


@pytest.mark.parametrize(
    ("dims", "named"), [("n2c1h3w4", "1 channels"), ("n2c5h3w4", "5 channels"), ("n2c3h4w1", "one pixel")]
)
def test_pairs_of_pixels_are_gathered_of_few_channels(dims: str, named: str, device: Cpu) -> None:
    interleaved = registry.candidate("spatialtf_sampler_fwd/cpu/interleaved")
    assert named in interleaved.supports(parse(f"spatialtf_sampler_fwd:f16:{dims}:o4x5:nhwc"), device).reason


def test_refusals_say_the_number(device: Cpu) -> None:
    channels = registry.candidate("spatialtf_fwd/cpu/channels")
    assert "nchw" in channels.supports(parse("spatialtf_fwd:f32:n2c3h4w5:o4x5:nchw"), device).reason
    huge = parse("spatialtf_fwd:f32:n1c1h65536w65536:o4x5:nhwc")
    wide = parse("spatialtf_fwd:f32:n1c3h1w16777217:o4x5:nhwc")
    for candidate in registry.candidates("spatialtf_fwd"):
        assert str(2**32) in candidate.supports(huge, device).reason
        assert str(2**24 + 1) in candidate.supports(wide, device).reason


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64])
def test_a_grid_has_the_dtype_of_its_theta(dtype: type) -> None:
    theta = RNG.standard_normal((2, 2, 3)).astype(dtype)
    grid = dnn_spatialtf_grid(theta, (2, 3, 4, 5))
    expected = dnn_spatialtf_grid(theta.astype(np.float64), (2, 3, 4, 5))
    assert grid.dtype == dtype
    np.testing.assert_allclose(grid.astype(np.float64), expected, atol=4 * float(ml_dtypes.finfo(dtype).eps))
    dtheta = dnn_spatialtf_grid_grad(grid)
    assert dtheta.dtype == dtype
