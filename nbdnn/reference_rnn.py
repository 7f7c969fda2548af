"""Recurrent networks and their gradient in plain float64 NumPy, step by step; every unit of every image alike.

    a_g = W_g x + bW_g        b_g = R_g h + bR_g                          h, c: of the step before
    rnn_relu, rnn_tanh   h' = relu(a + b)   or   tanh(a + b)
    lstm                 i, f, o = sigmoid(a + b);  g = tanh(a + b);  c' = f * c + i * g;  h' = o * tanh(c')
    gru                  r, u = sigmoid(a + b);  n = tanh(a_n + r * b_n);  h' = (1 - u) * n + u * h

The input of a layer is the output of the one below, both directions side by side. The gradient is the exact adjoint, of
what x, hx, cx, w and the tape say: y is not read, nor a tape that only its writer understands.

Of 16-bit data there are two bounds of the error: where everything between the operands and the results is of the
compute type, and where what one step or product leaves to another lies in memory in 16 bits, or is rounded as if
it did.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from nbdnn.expected import BoundedSample, Sample, positions
from nbdnn.problem_rnn import SAVED, RnnProblem
from nbdnn.reference_inexact import LARGEST_EPS, Inexact, exact, joined, relu, sigmoid, stacked, tanh

Arrays = Mapping[str, np.ndarray]
_Found = dict[str, Inexact]
# What a stay in 16 bits may add to an error, in units of eps of float32: an ulp. It is half of one at most, but the
# errors of a product's factors are added as squares.
_STAY = {"f16": 2.0**-10 / 2.0**-23, "bf16": 2.0**-7 / 2.0**-23}
# The other slope of relu is off by 1, and the steps before spread what that adds over sums of either sign, of which the
# root of the squares is the standard deviation: this many of them are permitted.
_FLIPS = 4.0


def samples(problem: RnnProblem, operands: Arrays, scalars: tuple[float, ...], count: int | None) -> dict[str, Sample]:
    """Of each output, by its name: `count` of its elements or all."""
    compute = forward if problem.op == "rnn_fwd" else backward
    with np.errstate(all="ignore"):
        found = compute(problem, operands)
        narrow = compute(problem, operands, _STAY[problem.dtype]) if problem.dtype in _STAY else None
    rng = np.random.default_rng(0)
    expected: dict[str, Sample] = {}
    for out in (o for o in problem.operands if o.role == "out"):
        wanted = 0 if out.name == "tape" and problem.tape else out.size_elems if count is None else count
        index = positions(out.shape, wanted, rng)
        of_out, wider = found[out.name], narrow[out.name].slack[index] if narrow else None
        expected[out.name] = BoundedSample(index, of_out.value[index], of_out.slack[index], out.dtype, wider)
    return expected


def derived(problem: RnnProblem, operands: Arrays) -> dict[str, np.ndarray]:
    """What y and the tape are, where a gradient is given them; not a writer's own, which is made by that writer."""
    if problem.op == "rnn_fwd" or problem.tape:
        return {}
    found = forward(problem, operands)
    return {name: found[name].value for name in ("y", "tape")}


class _Weights:
    """The matrices (None where there are none) and biases of one pseudo-layer in float64, as many as gates. stay: of a
    product in memory."""

    def __init__(self, problem: RnnProblem, w: np.ndarray, pseudo_layer: int, stay: float) -> None:
        self._stay = stay
        parameters, gates = problem.parameters, problem.parameters.gates

        def part(offset: int, shape: tuple[int, ...]) -> np.ndarray:
            return w[offset : offset + int(np.prod(shape))].reshape(shape).astype(np.float64)

        matrices = [part(*each) if each else None for each in parameters.matrices(pseudo_layer)]
        biases = [part(*each) for each in parameters.biases(pseudo_layer)]
        self.of_input, self.recurrent = matrices[:gates], [each for each in matrices[gates:] if each is not None]
        self.input_bias, self.recurrent_bias = biases[:gates], biases[gates:]

    def inputs(self, x: Inexact) -> list[Inexact]:
        """a of each gate, for rows of inputs."""
        products = [x if matrix is None else x.times(matrix.T) for matrix in self.of_input]
        return self._sums(products, self.input_bias)

    def recurrences(self, h: Inexact) -> list[Inexact]:
        """b of each gate, for rows of states."""
        return self._sums([h.times(matrix.T) for matrix in self.recurrent], self.recurrent_bias)

    def _sums(self, products: list[Inexact], biases: list[np.ndarray]) -> list[Inexact]:
        """With the biases; both the products and the sums may have been in memory."""
        stay, pairs = self._stay, zip(products, biases, strict=True)
        return [(product.stored(stay) + exact(bias)).stored(stay) for product, bias in pairs]


def _order(problem: RnnProblem, direction: int) -> Iterator[int]:
    """The steps as this direction takes them."""
    return iter(range(problem.steps) if direction == 0 else reversed(range(problem.steps)))


def forward(problem: RnnProblem, operands: Arrays, stay: float = 0.0) -> _Found:
    """y, hy, cy and tape. stay: what is between steps and products lies in memory, with such roundings."""
    below, tape, states, cells = exact(operands["x"]), [], [], []
    for layer in range(problem.layers):
        outputs, saved = [], []
        for direction in range(problem.directions):
            p = layer * problem.directions + direction
            h, c, kept = exact(operands["hx"][p]), None, {}
            if problem.has_cell:
                c = exact(operands["cx"][p])
            weights = _Weights(problem, operands["w"], p, stay)
            arriving = weights.inputs(_rows(below))
            inputs = [_unrows(each, problem) for each in arriving]
            for t in _order(problem, direction):
                h, c, values = _step(problem.mode, [a[t] for a in inputs], weights.recurrences(h), h, c)
                h, c = h.stored(stay), c.stored(stay) if c else None
                kept[t] = h, [each.stored(stay) for each in values]
            outputs.append(stacked([kept[t][0] for t in range(problem.steps)]))
            if SAVED[problem.mode]:
                saved.append(stacked([stacked(kept[t][1], axis=1) for t in range(problem.steps)]))
            states.append(h)
            cells.append(c)
        below = joined(outputs)
        tape += [_flat(below), *([_flat(stacked(saved, axis=2))] if saved else [])]
    found = {"y": below, "hy": stacked(states), "tape": joined(tape)}
    return found | ({"cy": stacked([c for c in cells if c is not None])} if problem.has_cell else {})


def _step(
    mode: str, a: list[Inexact], b: list[Inexact], h: Inexact, c: Inexact | None
) -> tuple[Inexact, Inexact | None, list[Inexact]]:
    """h', c' and what the tape keeps."""
    if mode == "lstm":
        assert c is not None
        i, f, g, o = (
            gate(x + y) for gate, x, y in zip((sigmoid, sigmoid, tanh, sigmoid), a, b, strict=True)
        )  # fmt: skip
        c = f * c + i * g
        return o * tanh(c), c, [i, f, g, o, c]
    if mode == "gru":
        r, u = sigmoid(a[0] + b[0]), sigmoid(a[1] + b[1])
        n = tanh(a[2] + r * b[2])
        return (exact(1.0) - u) * n + u * h, None, [r, u, n, b[2]]
    return (relu if mode == "rnn_relu" else tanh)(a[0] + b[0]), None, []


def backward(problem: RnnProblem, operands: Arrays, stay: float = 0.0) -> _Found:
    """dx, dhx, dcx and dw. stay: as in a forward."""
    tape = forward(problem, operands, stay)["tape"] if problem.tape else exact(operands["tape"]).stored(stay)
    dw = exact(np.zeros(problem.parameters.size_elems))
    states: dict[int, Inexact] = {}
    cells: dict[int, Inexact] = {}
    above = exact(operands["dy"])
    for layer in reversed(range(problem.layers)):
        h, saved = _of_tape(problem, tape, layer)
        below = _of_tape(problem, tape, layer - 1)[0] if layer else exact(operands["x"])
        arriving = exact(np.zeros(below.value.shape))
        for direction in range(problem.directions):
            p = layer * problem.directions + direction
            columns = slice(direction * problem.hidden, (direction + 1) * problem.hidden)
            weights = _Weights(problem, operands["w"], p, stay)
            taken = _Taken(problem, operands, p, h[..., columns], saved[:, :, direction] if saved else None)
            of_inputs, of_recurrences, states[p], cells[p] = taken.back(above[..., columns], weights, stay)
            arriving = (arriving + _by_inputs(of_inputs, weights, below.value.shape)).stored(stay)
            _put_gradients(problem, dw, p, of_inputs, of_recurrences, below, taken.before)
        above = arriving
    found = {"dx": above, "dw": dw, "dhx": stacked([states[p] for p in sorted(states)])}
    return found | ({"dcx": stacked([cells[p] for p in sorted(cells)])} if problem.has_cell else {})


class _Taken:
    """The steps of one direction of a layer, as the tape has them: (t, b, h) outputs and (t, b, saved, h) values.

    before: of each step, the state that it began with.
    """

    def __init__(
        self, problem: RnnProblem, operands: Arrays, p: int, h: Inexact, saved: Inexact | None
    ) -> None:  # fmt: skip
        self._problem, self._h, self._saved = problem, h, saved
        self._order = list(_order(problem, p % problem.directions))
        self._dhy = exact(operands["dhy"][p])
        self._dcy = exact(operands["dcy"][p]) if problem.has_cell else exact(np.zeros(self._dhy.value.shape))
        self.before = self._shifted(h, operands["hx"][p])
        if problem.has_cell:
            assert saved is not None
            self._cells_before = self._shifted(saved[:, :, 4], operands["cx"][p])

    def _shifted(self, values: Inexact, first: np.ndarray) -> Inexact:
        """What was there before each step."""
        before = {
            t: exact(first) if last is None else values[last]
            for t, last in zip(self._order, [None, *self._order], strict=False)
        }
        return stacked([before[t] for t in range(len(self._order))])

    def back(
        self, dy: Inexact, weights: _Weights, stay: float
    ) -> tuple[list[Inexact], list[Inexact], Inexact, Inexact]:  # fmt: skip
        """Gradients of a and of b, each gate (t, b, h), and of hx and cx."""
        dh, dc = self._dhy, self._dcy
        found: dict[int, tuple[list[Inexact], list[Inexact]]] = {}
        for t in reversed(self._order):
            da, db, carried, dc = self._step_back(t, dh + dy[t], dc)
            da, db = ([each.stored(stay) for each in gradients] for gradients in (da, db))
            found[t], dc = (da, db), dc.stored(stay)
            dh = carried
            for gradient, matrix in zip(db, weights.recurrent, strict=True):
                dh = dh + gradient.times(matrix)
            dh = dh.stored(stay)
        gates, steps = range(len(weights.recurrent)), range(self._problem.steps)
        of_inputs, of_recurrences = ([stacked([found[t][which][g] for t in steps]) for g in gates] for which in (0, 1))
        return of_inputs, of_recurrences, dh, dc

    def _step_back(self, t: int, dh: Inexact, dc: Inexact) -> tuple[list[Inexact], list[Inexact], Inexact, Inexact]:
        """Gradients of a, of b, of h but through b, and of c."""
        one, none = exact(1.0), exact(np.zeros(dh.value.shape))
        if self._saved is None:
            h, h_slack = self._h.value[t], self._h.slack[t]
            if self._problem.mode == "rnn_relu":  # a sum that may be of either sign has either slope
                slope, either = (h > 0).astype(float), (h_slack > 0) & (h <= LARGEST_EPS * h_slack)
                slack = np.where(either, _FLIPS / LARGEST_EPS, 0.0)
            else:
                slope, slack = 1 - h * h, 1 + h * h + 2 * abs(h) * h_slack
            gradient = [dh * Inexact(slope, slack)]
            return gradient, gradient, none, dc
        values = [self._saved[t, :, which] for which in range(SAVED[self._problem.mode])]
        if self._problem.mode == "lstm":
            i, f, g, o, c = values
            of_cell = tanh(c)
            dc = dc + dh * o * (one - of_cell * of_cell)
            gradient = [
                dc * g * i * (one - i),
                dc * self._cells_before[t] * f * (one - f),
                dc * i * (one - g * g),
                dh * of_cell * o * (one - o),
            ]
            return gradient, gradient, none, dc * f
        r, u, n, q = values
        dn = dh * (one - u) * (one - n * n)
        du = dh * (self.before[t] - n) * u * (one - u)
        dr = dn * q * r * (one - r)
        return [dr, du, dn], [dr, du, dn * r], dh * u, dc


def _of_tape(problem: RnnProblem, tape: Inexact, layer: int) -> tuple[Inexact, Inexact | None]:
    """A layer's outputs (t, b, directions * h), and what its mode saves (t, b, directions, saved, h)."""
    start, saved = layer * problem.layer_tape_elems, SAVED[problem.mode]
    middle = start + int(np.prod(problem.y_shape))
    outputs = tape[start:middle].reshape(*problem.y_shape)
    if not saved:
        return outputs, None
    shape = (problem.steps, problem.batch, problem.directions, saved, problem.hidden)
    return outputs, tape[middle : start + problem.layer_tape_elems].reshape(*shape)


def _by_inputs(gradients: list[Inexact], weights: _Weights, shape: tuple[int, ...]) -> Inexact:
    """What the gradients of a are to the input."""
    total = exact(np.zeros(shape))
    for gradient, matrix in zip(gradients, weights.of_input, strict=True):
        product = gradient if matrix is None else _rows(gradient).times(matrix)
        total = total + Inexact(product.value.reshape(shape), product.slack.reshape(shape))
    return total


def _put_gradients(
    problem: RnnProblem,
    dw: Inexact,
    pseudo_layer: int,
    of_inputs: list[Inexact],
    of_recurrences: list[Inexact],
    below: Inexact,
    before: Inexact,
) -> None:
    """Write the gradients of one pseudo-layer's parameters into dw."""
    parameters = problem.parameters
    gradients = [*of_inputs, *of_recurrences]
    factors = [below] * len(of_inputs) + [before] * len(of_recurrences)
    for gradient, factor, matrix, bias in zip(
        gradients, factors, parameters.matrices(pseudo_layer), parameters.biases(pseudo_layer), strict=True
    ):
        rows = _rows(gradient)
        ones = np.ones((len(rows.value), 1))
        for part, other in ((matrix, _rows(factor)), (bias, ones)):
            if part is not None:
                product, span = rows.T.times(other), slice(part.offset, part.offset + int(np.prod(part.shape)))
                dw.value[span], dw.slack[span] = product.value.reshape(-1), product.slack.reshape(-1)


def _rows(sequence: Inexact) -> Inexact:
    """(t, b, n) as (t * b, n)."""
    return Inexact(*(each.reshape(-1, each.shape[-1]) for each in (sequence.value, sequence.slack)))


def _unrows(rows: Inexact, problem: RnnProblem) -> Inexact:
    shape = (problem.steps, problem.batch, -1)
    return Inexact(rows.value.reshape(shape), rows.slack.reshape(shape))


def _flat(sequence: Inexact) -> Inexact:
    return Inexact(sequence.value.reshape(-1), sequence.slack.reshape(-1))
