"""Problems of the spatial transformer and their reference: the grammar, the definition by loops, derivatives."""

from __future__ import annotations

import re

import numpy as np
import pytest
from guarded import values

from nbdnn import reference_spatialtf
from nbdnn.errors import InvalidProblem, InvalidType
from nbdnn.problem import FAMILIES, parse
from nbdnn.problem_spatialtf import SpatialtfProblem

OPS = FAMILIES["spatialtf"]
EXAMPLE = "spatialtf_fwd:f32:n32c3h224w224:o112x168:nchw"
SHAPES = ("n2c3h5w7:o4x9:nchw", "n1c2h1w6:o1x5:nhwc", "n2c1h4w1:o3x1:nchw")


@pytest.mark.parametrize(
    "text",
    [
        EXAMPLE,
        EXAMPLE.replace("f32", "bf16").replace("nchw", "nhwc") + ":pf32:a2",
        "spatialtf_grid_fwd:f16:n4:o7x9",
        "spatialtf_grid_bwd:f64:n0:o1x1:a8",
        "spatialtf_sampler_bwd:f32:n0c3h2w2:o5x5:nhwc",
    ],
)
def test_text_is_canonical(text: str) -> None:
    assert str(parse(text)) == text


def test_a_layer_has_no_extents() -> None:
    assert parse(EXAMPLE).layer == "spatialtf_fwd:f32:c3:nchw"
    assert parse("spatialtf_grid_fwd:f16:n4:o7x9").layer == "spatialtf_grid_fwd:f16"


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        (EXAMPLE.replace("h224w224", "d4h224w224"), InvalidProblem, "expected dims such as n32c3h224w224"),
        (EXAMPLE.replace("o112x168", "o112"), InvalidProblem, "output has 1 spatial axes, expected 2"),
        (EXAMPLE.replace("o112", "o0"), InvalidProblem, "output extent is 0"),
        (EXAMPLE.replace("h224", "h0"), InvalidProblem, "spatial extent is 0"),
        (EXAMPLE.replace("nchw", "ncdhw"), InvalidProblem, "layout 'ncdhw' is not one of nchw, nhwc"),
        (EXAMPLE.replace("f32", "i8"), InvalidType, "dtype 'i8'"),
        (EXAMPLE.replace("f32", "f64") + ":pf32", InvalidType, "'f32' do not go with data of 'f64'"),
        (EXAMPLE.replace("_fwd", "_up"), InvalidProblem, "unknown op 'spatialtf_up'"),
        ("spatialtf_grid_fwd:f16:n4:o7x9:pf32", InvalidType, "'f32' do not go with data of 'f16'"),
        ("spatialtf_grid_fwd:f32:n4c3:o7x9", InvalidProblem, "expected a batch such as n32"),
        ("spatialtf_grid_fwd:i8:n4:o7x9", InvalidType, "dtype 'i8'"),
    ],
)
def test_what_is_wrong_is_named(text: str, error: type, message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        parse(text)


def by_loops(problem: SpatialtfProblem, given: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Position by position, pixel by pixel, as the formulas are written."""
    found = {operand.name: np.zeros(operand.shape) for operand in problem.operands if operand.role == "out"}
    rows, columns = problem.out_spatial
    for n, i, j in np.ndindex(problem.n, rows, columns):
        base = np.array([2 * j / (columns - 1) - 1 if columns > 1 else 0, 2 * i / (rows - 1) - 1 if rows > 1 else 0, 1])
        if "dgrid" in given:
            found["dtheta"][n] += np.outer(given["dgrid"][n, i, j], base)
            continue
        place = given["theta"][n] @ base if problem.is_affine else given["grid"][n, i, j]
        if not problem.has_image:
            found["grid"][n, i, j] = place
            continue
        slope = by_pixels(problem, given, found, (n, i, j), place)
        if "dgrid" in found:
            found["dgrid"][n, i, j] = slope
        if "dtheta" in found:
            found["dtheta"][n] += np.outer(slope, base)
    return found


def by_pixels(problem: SpatialtfProblem, given: dict, found: dict, at: tuple, place: np.ndarray) -> np.ndarray:
    """Add what one position does to y or dx; its share of dgrid."""
    (n, i, j), (height, width) = at, problem.spatial
    s, t = (place[0] + 1) / 2 * (width - 1), (place[1] + 1) / 2 * (height - 1)
    slope = np.zeros(2)
    for c, p, q in np.ndindex(problem.c, height, width):
        if max(abs(s - q), abs(t - p)) >= 1:
            continue
        weight = (1 - abs(s - q)) * (1 - abs(t - p))
        if "y" in found:
            found["y"][n, c, i, j] += weight * given["x"][n, c, p, q]
            continue
        top = given["dy"][n, c, i, j]
        found["dx"][n, c, p, q] += weight * top
        up = np.array([(1 if q > s else -1) * (1 - abs(t - p)), (1 if p > t else -1) * (1 - abs(s - q))])
        slope += top * given["x"][n, c, p, q] * up * [(width - 1) / 2, (height - 1) / 2]
    return slope


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("op", OPS)
def test_reference_is_the_definition(op: str, shape: str) -> None:
    dims, out, layout = shape.split(":")
    has_image = not op.startswith("spatialtf_grid")
    problem = parse(":".join([op, "f64", *([dims, out, layout] if has_image else [dims[:2], out])]))
    assert isinstance(problem, SpatialtfProblem)
    given = values(problem, "normal")
    found, expected = reference_spatialtf.compute(problem, given), by_loops(problem, given)
    assert list(found) == [operand.name for operand in problem.operands if operand.role == "out"]
    for name, value in found.items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-12, atol=1e-13, err_msg=name)


@pytest.mark.parametrize("op", OPS)
def test_a_sample_has_what_the_whole_has(op: str) -> None:
    dims = "n9" if op.startswith("spatialtf_grid") else "n9c4h21w32"
    problem = parse(":".join([op, "f32", dims, "o23x31", *(["nhwc"] if len(dims) > 2 else [])]))
    assert isinstance(problem, SpatialtfProblem)
    given = values(problem, "normal")
    whole = reference_spatialtf.compute(problem, given)
    for name, sample in reference_spatialtf.samples(problem, given, (), 500).items():
        assert 18 <= len(sample.value) <= whole[name].size
        np.testing.assert_array_equal(sample.value, whole[name][sample.index])
        assert (sample.slack >= 0).all() and np.isfinite(sample.slack).all()


def test_outside_of_the_image_is_zero_and_owes_nothing() -> None:
    problem = parse("spatialtf_sampler_fwd:f32:n1c1h4w4:o1x2:nchw")
    given = {"x": np.ones((1, 1, 4, 4)), "grid": np.array([[[[3.0, 0.0], [0.0, 0.0]]]])}
    (sample,) = reference_spatialtf.samples(problem, given, (), None).values()  # type: ignore[arg-type]
    assert sample.value.tolist() == [0.0, 1.0]
    assert sample.slack[0] == 0 < sample.slack[1]


def test_a_step_over_a_pixel_is_allowed_what_it_changes() -> None:
    """At a pixel, dgrid is the slope to its right or, a rounding away, that to its left."""
    problem = parse("spatialtf_sampler_bwd:f32:n1c1h1w5:o1x2:nchw")
    given = {"x": np.array([0.0, 0, 0, 8, 8]).reshape(1, 1, 1, 5), "dy": np.ones((1, 1, 1, 2))}
    given["grid"] = np.array([[[[0.5, 0.0], [0.25, 0.0]]]])
    dgrid = reference_spatialtf.samples(problem, given, (), None)["dgrid"]  # type: ignore[arg-type]
    assert dgrid.value.tolist() == [0.0, 0.0, 16.0, 0.0]
    assert dgrid.slack[0] * 2**-23 >= 16 > 1e-3 > dgrid.slack[2] * 2**-23  # type: ignore[attr-defined]
