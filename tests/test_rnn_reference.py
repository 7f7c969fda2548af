"""The reference of recurrent networks, beside loops over the definition and differences of it; and the parameters."""

from __future__ import annotations

from math import exp, tanh

import numpy as np
import pytest

from nbdnn import reference, reference_rnn
from nbdnn.errors import InvalidProblem, InvalidType
from nbdnn.problem import parse
from nbdnn.problem_rnn import RnnProblem
from nbdnn.rnn_parameters import GATES, Parameters

KINDS = [(mode, direction, kind) for mode in GATES for direction in ("uni", "bi") for kind in ("linear", "skip")]


def posed(text: str) -> RnnProblem:
    problem = parse(text)
    assert isinstance(problem, RnnProblem)
    return problem


def filled(problem: RnnProblem, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {o.name: rng.standard_normal(o.shape) * o.scale for o in problem.operands if o.role == "in"}


def sigmoid(x: float) -> float:
    return 1 / (1 + exp(-x))


def unit(mode: str, a: list[float], b: list[float], h: float, c: float) -> tuple[float, float]:
    """h' and c' of one unit."""
    if mode == "lstm":
        i, f, o = (sigmoid(a[gate] + b[gate]) for gate in (0, 1, 3))
        c = f * c + i * tanh(a[2] + b[2])
        return o * tanh(c), c
    if mode == "gru":
        r, u = sigmoid(a[0] + b[0]), sigmoid(a[1] + b[1])
        return (1 - u) * tanh(a[2] + r * b[2]) + u * h, 0.0
    return (tanh(a[0] + b[0]) if mode == "rnn_tanh" else max(a[0] + b[0], 0.0)), 0.0


def by_definition(problem: RnnProblem, given: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """y, hy and cy, one unit after the other; weights are found by counting through the block."""
    gates, hidden = len(GATES[problem.mode]), problem.hidden
    w, at = given["w"], 0
    found: dict[int, tuple[list, list]] = {}
    for p in range(problem.layers * problem.directions):
        layer = p // problem.directions
        width = problem.input if layer == 0 else hidden * problem.directions
        matrices: list = []
        for number in range(2 * gates):
            extent = width if number < gates else hidden
            if number < gates and layer == 0 and problem.skip:
                matrices.append(np.eye(hidden))
                continue
            matrices.append(w[at : at + hidden * extent].reshape(hidden, extent))
            at += hidden * extent
        found[p] = matrices, []
    for p in found:
        for _ in range(2 * gates):
            found[p][1].append(w[at : at + hidden])
            at += hidden
    assert at == len(w)
    below = given["x"]
    hy = np.empty(problem.state_shape)
    cy = np.empty(problem.state_shape)
    for layer in range(problem.layers):
        y = np.empty(problem.y_shape)
        for direction in range(problem.directions):
            p = layer * problem.directions + direction
            matrices, biases = found[p]
            h = given["hx"][p].copy()
            c = given["cx"][p].copy() if problem.mode == "lstm" else np.zeros_like(h)
            for step in range(problem.steps):
                t = problem.steps - 1 - step if direction else step
                before = h.copy()
                for image in range(problem.batch):
                    for j in range(hidden):
                        a = [matrices[g][j] @ below[t, image] + biases[g][j] for g in range(gates)]
                        b = [
                            matrices[gates + g][j] @ before[image] + biases[gates + g][j] for g in range(gates)
                        ]  # fmt: skip
                        h[image, j], c[image, j] = unit(problem.mode, a, b, before[image, j], c[image, j])
                y[t, :, direction * hidden : (direction + 1) * hidden] = h
            hy[p], cy[p] = h, c
        below = y
    return {"y": below, "hy": hy, "cy": cy}


@pytest.mark.parametrize("mode, direction, kind", KINDS)
def test_the_forward_is_the_definition(mode: str, direction: str, kind: str) -> None:
    problem = posed(f"rnn_fwd:f64:t4b2i3h3l2:{mode}:{direction}:{kind}")
    given = filled(problem)
    found, wanted = reference_rnn.forward(problem, given), by_definition(problem, given)
    for out in problem.operands:
        if out.role == "out":
            np.testing.assert_allclose(found[out.name].value, wanted[out.name], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("mode, direction, kind", KINDS)
def test_the_gradient_is_a_quotient_of_differences(mode: str, direction: str, kind: str) -> None:
    """Of <y, dy> + <hy, dhy> + <cy, dcy> by each input along a random direction."""
    problem = posed(f"rnn_bwd:f64:t4b2i3h3l2:{mode}:{direction}:{kind}")
    given = filled(problem)
    given |= reference.derived(problem, given)
    gradient = reference_rnn.backward(problem, given)
    rng = np.random.default_rng(1)

    def loss(moved: dict[str, np.ndarray]) -> float:
        found = reference_rnn.forward(problem, moved)
        return sum(float((found[name].value * given[f"d{name}"]).sum()) for name in ("y", "hy", "cy") if name in found)

    for name in ("x", "hx", "w", *(["cx"] if problem.has_cell else [])):
        along, step = rng.standard_normal(given[name].shape), 1e-6
        ahead, back = (loss(given | {name: given[name] + sign * step * along}) for sign in (1, -1))
        slope = float((gradient[f"d{name}"].value * along).sum())
        assert (ahead - back) / (2 * step) == pytest.approx(slope, rel=1e-6, abs=1e-8), name


def test_the_tape_is_what_it_says() -> None:
    problem = posed("rnn_fwd:f64:t3b2i4h5l2:lstm:bi:linear:train")
    given = filled(problem)
    found = reference_rnn.forward(problem, given)
    tape = found["tape"].value
    assert tape.shape == (problem.operands[-1].size_elems,) == (2 * 3 * 2 * 2 * 5 * 6,)
    last = tape[problem.layer_tape_elems :]
    assert np.array_equal(last[: 3 * 2 * 10].reshape(3, 2, 10), found["y"].value)
    i, f, g, o, c = np.moveaxis(last[3 * 2 * 10 :].reshape(3, 2, 2, 5, 5), 3, 0)
    h = found["y"].value.reshape(3, 2, 2, 5)
    np.testing.assert_allclose(o * np.tanh(c), h, rtol=1e-14)
    np.testing.assert_allclose(f[1:, :, 0] * c[:-1, :, 0] + (i * g)[1:, :, 0], c[1:, :, 0], rtol=1e-13)
    np.testing.assert_allclose(c[0, :, 1], found["cy"].value[3], rtol=1e-14)


def test_sizes_that_theano_had() -> None:
    assert Parameters(32, 16, 3, 1, "gru", False).size_elems == 5664
    assert Parameters(32, 16, 3, 2, "gru", False).size_elems == 14400
    assert Parameters(32, 16, 3, 1, "lstm", False).size_elems == 7552
    assert Parameters(16, 16, 1, 1, "rnn_tanh", True).size_elems == 16 * 16 + 2 * 16


@pytest.mark.parametrize("mode", GATES)
@pytest.mark.parametrize("directions", [1, 2])
@pytest.mark.parametrize("skip", [False, True])
def test_every_element_of_the_block_is_one_parameter(mode: str, directions: int, skip: bool) -> None:
    """Matrices of all pseudo-layers in order, then the biases, without a gap."""
    parameters = Parameters(6, 6, 3, directions, mode, skip)
    layers = range(parameters.pseudo_layers)
    parts = [part for p in layers for part in parameters.matrices(p) if part is not None]
    parts += [part for p in layers for part in parameters.biases(p)]
    end = 0
    for part in parts:
        assert part.offset == end
        end += int(np.prod(part.shape))
    assert end == parameters.size_elems
    assert [part is None for part in parameters.matrices(0)].count(True) == (len(GATES[mode]) if skip else 0)


@pytest.mark.parametrize(
    "text",
    [
        "rnn_fwd:f32:t50b32i128h256l2:lstm:uni:linear",
        "rnn_fwd:bf16:t1b1i16h16l1:gru:bi:skip:train:a2",
        "rnn_bwd:f64:t7b0i3h5l4:rnn_relu:bi:linear",
    ],
)
def test_texts_are_read_back(text: str) -> None:
    assert str(parse(text)) == text


def test_a_layer_has_neither_steps_nor_batch() -> None:
    layers = {posed(f"rnn_fwd:f32:t{t}b{b}i8h16l2:gru:bi:linear").layer for t, b in ((3, 4), (50, 1))}
    assert layers == {"rnn_fwd:f32:i8h16l2:gru:bi:linear"}


@pytest.mark.parametrize(
    "text, named",
    [
        ("rnn_fwd:f32:t5b3i8h16l0:gru:uni:linear", "layers is 0"),
        ("rnn_fwd:f32:t5b3i8h16l1:gru:uni:skip", "inputs as hidden units: 8 and 16"),
        ("rnn_fwd:f32:t5b3i8h16l1:gru:both:linear", "expected uni or bi"),
        ("rnn_fwd:f32:t5b3i8h16l1:elman:uni:linear", "'elman' is not one of rnn_relu"),
        ("rnn_bwd:f32:t5b3i8h16l1:gru:uni:linear:train", "writes no tape"),
        ("rnn_fwd:f32:n5c3h8w8:gru:uni:linear", "dims such as t50b32i128h256l2"),
    ],
)
def test_what_is_no_problem_is_refused(text: str, named: str) -> None:
    with pytest.raises(InvalidProblem, match=named):
        parse(text)


def test_an_unknown_dtype_is_a_type_error() -> None:
    with pytest.raises(InvalidType, match="f8"):
        parse("rnn_fwd:f8:t5b3i8h16l1:gru:uni:linear")


def relu_dx(given: dict[str, np.ndarray], w: np.ndarray, r: np.ndarray, slopes: np.ndarray) -> np.ndarray:
    """The gradient of x for one layer of rnn_relu, whose slopes are given."""
    dh, found = given["dhy"][0], []
    for t in reversed(range(len(slopes))):
        da = (dh + given["dy"][t]) * slopes[t]
        found.append(da @ w)
        dh = da @ r
    return np.stack(found[::-1])


def test_a_sum_near_zero_may_have_either_slope_and_no_other() -> None:
    """16-bit roundings decide the sign of such a sum, and the slope of relu with it: what follows for all gradients of
    the steps before is permitted. The other slope of a sum that is clearly of one sign is an error."""
    problem = posed("rnn_bwd:f16:t3b6i16h32l1:rnn_relu:uni:linear:tape9/cudnn/rnn/standard")
    doubtful, clear = [], []
    for seed in range(60):
        given = filled(problem, seed)
        w_part, r_part = problem.parameters.matrices(0)
        assert w_part and r_part
        w, r = (given["w"][each.offset :][: np.prod(each.shape)].reshape(each.shape) for each in (w_part, r_part))
        bias = sum(given["w"][each.offset :][:32] for each in problem.parameters.biases(0))
        h, sums = given["hx"][0], []
        for t in range(3):
            sums.append(given["x"][t] @ w.T + h @ r.T + bias)
            h = np.maximum(sums[-1], 0)

        found = reference_rnn.backward(problem, given, 2.0**13)["dx"]
        slopes = (np.array(sums) > 0).astype(float)
        np.testing.assert_allclose(found.value, relu_dx(given, w, r, slopes), rtol=1e-9, atol=1e-9)
        near, far = np.abs(sums) < 5e-4, np.abs(sums) > 0.1
        for place, shares in (*((place, doubtful) for place in np.argwhere(near)), (np.argwhere(far)[seed], clear)):
            flipped = slopes.copy()
            flipped[tuple(place)] = 1 - flipped[tuple(place)]
            shares.append((abs(relu_dx(given, w, r, flipped) - found.value) / (2.0**-23 * found.slack)).max())
    assert len(doubtful) >= 5 and max(doubtful) < 1
    assert np.mean(np.array(clear) > 1) > 0.9
