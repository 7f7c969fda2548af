"""The specification, checked by loops that nobody can get wrong, and the error model that judges everything else."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from guarded import values

from nbdnn import reference_conv, tolerance
from nbdnn.candidate import YES, Candidate
from nbdnn.expected import BoundedSample
from nbdnn.problem import parse
from nbdnn.problem_conv import CONV_OPS, ConvProblem

SHAPES = (
    "n2c6h5w6:k4r3s2:ba1.2x0.3:u2x1:d1x2:g2:conv:nchw",
    "n1c2d3h4w4:k4t2r3s1:ba1.0x0.1x1.1:u1x2x3:d2x1x1:g2:cross:ncdhw",
    "n2c3h6w7:k6r3s3:p1x1:u2x2:d1x1:g3:cross:nhwc",
)


def products(problem: ConvProblem):
    """Every (x index, w index, y index) that the convolution multiplies, straight from its definition."""
    c_group, k_group = problem.c // problem.groups, problem.k // problem.groups
    for n, k, c, *rest in product(
        range(problem.n),
        range(problem.k),
        range(c_group),
        *(range(p) for p in problem.out_spatial),
        *(range(r) for r in problem.filter),
    ):
        out, tap = rest[: problem.ndim], rest[problem.ndim :]
        at = [
            p * u + r * d - before
            for p, r, u, d, (before, _) in zip(out, tap, problem.stride, problem.dilation, problem.pad, strict=True)
        ]
        if all(0 <= i < extent for i, extent in zip(at, problem.spatial, strict=True)):
            flipped = [extent - 1 - r for r, extent in zip(tap, problem.filter, strict=True)]
            stored = flipped if problem.mode == "conv" else tap
            yield (n, k // k_group * c_group + c, *at), (k, c, *stored), (n, k, *out)


def by_loops(problem: ConvProblem, operands: dict[str, np.ndarray]) -> np.ndarray:
    (out,) = (o for o in problem.operands if o.role == "out")
    result = np.zeros(out.shape)
    for x, w, y in products(problem):
        match problem.op:
            case "conv_fwd":
                result[y] += float(operands["x"][x]) * float(operands["w"][w])
            case "conv_bwd_data":
                result[x] += float(operands["w"][w]) * float(operands["dy"][y])
            case "conv_bwd_filter":
                result[w] += float(operands["x"][x]) * float(operands["dy"][y])
    return result


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("op", CONV_OPS)
def test_three_forms_agree_with_the_definition(op: str, shape: str) -> None:
    problem = parse(f"{op}:f32:{shape}")
    operands = values(problem, "integers")
    expected = by_loops(problem, operands)
    assert np.array_equal(reference_conv.compute(problem, operands), expected)
    everything = reference_conv.whole(problem, operands)
    assert np.array_equal(everything.value, expected.ravel())
    for count in (10_000, 60):
        sample = reference_conv.sample(problem, operands, count=count)
        place = np.ravel_multi_index(sample.index, expected.shape)
        assert len(np.unique(place)) >= min(count, expected.size) / 2
        for field in ("value", "rss", "sum_abs", "peak"):
            np.testing.assert_allclose(getattr(sample, field), getattr(everything, field)[place], rtol=1e-12)


def test_magnitudes_are_those_of_the_products() -> None:
    problem = parse(f"conv_fwd:f32:{SHAPES[0]}:e:bias+res+beta")
    operands = values(problem, "normal")
    squares, sums = np.zeros(problem.y_shape), np.zeros(problem.y_shape)
    for x, w, y in products(problem):
        term = 2.0 * float(operands["x"][x]) * float(operands["w"][w])
        squares[y] += term**2
        sums[y] += abs(term)
    bias, residual, out = (operands[name].astype(float) for name in ("bias", "residual", "y"))
    terms = (bias[:, None, None], residual, -0.5 * out)
    result = reference_conv.whole(problem, operands, (2.0, -0.5))
    np.testing.assert_allclose(result.rss**2, (squares + sum(t * t for t in terms)).ravel())
    np.testing.assert_allclose(result.sum_abs, (sums + sum(abs(t) for t in terms)).ravel())


@pytest.mark.parametrize(
    ("activation", "formula"),
    [
        ("relu", lambda v: np.maximum(v, 0)),
        ("sigmoid", lambda v: 1 / (1 + np.exp(-v))),
        ("swish", lambda v: v / (1 + np.exp(-v))),
        ("tanh", np.tanh),
    ],
)
def test_epilogue(activation: str, formula) -> None:
    plain = parse(f"conv_fwd:f64:{SHAPES[2]}")
    problem = parse(f"{plain}:e:bias+{activation}+res+beta")
    operands = values(problem, "normal")
    before = 1.5 * reference_conv.compute(plain, operands) + 0.25 * operands["y"] + operands["residual"]
    expected = formula(before + operands["bias"][:, None, None])
    np.testing.assert_allclose(reference_conv.compute(problem, operands, (1.5, 0.25)), expected, rtol=1e-13, atol=1e-15)


@pytest.mark.filterwarnings("error")
def test_what_an_activation_makes_of_infinity_is_no_warning() -> None:
    assert np.isnan(reference_conv.activate("swish", np.array([-np.inf]))).all()


@pytest.mark.parametrize("op", CONV_OPS)
@pytest.mark.parametrize("shape", ["n0c2h5w5:k3r3s3", "n2c0h5w5:k3r3s3", "n2c3h5w5:k0r3s3"])
def test_nothing_to_sum_gives_zeros(op: str, shape: str) -> None:
    problem = parse(f"{op}:f32:{shape}:p1x1:u1x1:d1x1:g1:conv:nchw")
    operands = values(problem, "normal")
    assert not reference_conv.compute(problem, operands).any()
    assert not reference_conv.sample(problem, operands).value.any()


@pytest.mark.parametrize("op", CONV_OPS)
def test_sample_of_a_big_problem_has_its_corners_borders_and_ends(op: str) -> None:
    problem = parse(f"{op}:f32:n2c96h61w67:k130r3s3:p1x1:u1x1:d1x1:g1:cross:nchw")
    operands = values(problem, "normal")
    sample = reference_conv.sample(problem, operands)
    assert len(sample.value) >= 10_000
    (out,) = (o.shape for o in problem.operands if o.role == "out")
    for axis, extent in zip(sample.index, out, strict=True):
        assert {0, extent - 1} <= set(axis.tolist())
        assert axis.max() < extent


class Direct(Candidate):
    op, provider, algorithm = "conv_fwd", "test", "direct"

    def supports(self, problem, device):
        return YES

    def estimate(self, problem, config, device):
        return 1.0

    def prepare(self, problem, config, device):
        raise AssertionError("never run")


class Winograd(Direct):
    algorithm = "winograd"


@pytest.mark.parametrize("dtype", ["f64", "f32", "f16", "bf16"])
def test_error_model_takes_the_nearest_result_and_refuses_one_product_too_few(dtype: str) -> None:
    problem = parse(f"conv_fwd:{dtype}:n1c64h8w9:k8r3s3:p1x1:u1x1:d1x1:g1:cross:nchw")
    operands = values(problem, "normal")
    sample = reference_conv.whole(problem, operands)
    nearest = reference_conv.compute(problem, operands).astype(operands["x"].dtype)
    assert not tolerance.fault(problem, Direct(), nearest, sample)
    assert not tolerance.fault(problem, Winograd(), nearest, sample)

    lost = dict(operands, w=operands["w"].copy())
    lost["w"][3, 60:, 1, 1] = 0
    wrong = reference_conv.compute(problem, lost).astype(nearest.dtype)
    assert "times the permitted error" in tolerance.fault(problem, Direct(), wrong, sample)
    wrong = nearest.copy()
    wrong[0, 1, 2, 3] = np.nan
    assert "(0, 1, 2, 3): nan instead of" in tolerance.fault(problem, Direct(), wrong, sample)


def test_error_model_grows_with_each_rounding_and_with_a_mean() -> None:
    problem = parse("conv_fwd:f16:n1c16h5w5:k4r3s3:p1x1:u1x1:d1x1:g1:cross:nchw:e:bias+tanh")
    sample = reference_conv.whole(problem, values(problem, "normal"))
    once, twice = (tolerance.allowed(problem, Direct(), sample, roundings=n) for n in (1, 2))
    assert (twice > once).all()
    any_data = tolerance.allowed(problem, Direct(), sample, any_data=True)
    assert (any_data > tolerance.allowed(problem, Direct(), sample)).all()
    assert (tolerance.allowed(problem, Winograd(), sample) >= once).all()


@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32"])
def test_what_16_bits_cannot_hold_is_infinite(dtype: str) -> None:
    """An infinity stands for what is rounded to one, with its sign, and for nothing else."""
    problem = parse(f"softmax_fwd:{dtype}:n5c1h1w1:accurate:channel:nchw")
    largest = {"f16": 65504.0, "bf16": 2.0**128 - 2.0**120, "f32": 2.0**128 - 2.0**104}[dtype]
    exact = np.array([2.0, -2.0, 1.001, 0.9, 0.0]) * largest
    index = (np.arange(5),)
    sample = BoundedSample(index, exact, np.zeros(5), dtype)
    if dtype == "f32":
        assert "5 of 5" in tolerance.fault(problem, Direct(), np.full(5, np.inf), sample)
        return
    right = np.array([np.inf, -np.inf, np.inf, exact[3], 0.0])
    assert not tolerance.fault(problem, Direct(), right, sample)
    for place, wrong in ((0, -np.inf), (1, np.inf), (0, largest), (3, np.inf), (4, np.inf)):
        got = right.copy()
        got[place] = wrong
        assert f"the worst at ({place})" in tolerance.fault(problem, Direct(), got, sample)
