"""Where a recurrent network's parameters and intermediate results lie, as its GPU kernels see them.

    sums       (t, b, directions, gates, h)   of forward: a = W x + bW, with bR where the gates add it to a
    records    (t, b, directions, slots, h)   of a gradient: what each gate's gradient is of dh or dc, which becomes the
                                              gradient itself; then what else a step back needs

                 gates' slots                  then
        lstm     i f g o  (of dc; o of dh)     dc/dh, f, dy
        gru      r u, n of a, n of b           u, dy
        rnn_*    the only one                  dy

All in the compute type. Integers are elements; int32 where nothing reaches 2^31.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from nbdnn.kernels.cuda.launch import NULL, in_workspace
from nbdnn.problem import ITEMSIZE
from nbdnn.problem_rnn import RnnProblem
from nbdnn.rnn_parameters import GATES

_INT32_END = 2**31 - 2**20  # tiles count on beyond the last element
_ALIGN_BYTES = 256
RECORD = {"lstm": 7, "gru": 6, "rnn_relu": 2, "rnn_tanh": 2}
# Of the slots, how many are gradients.
GRADIENTS = {"lstm": 4, "gru": 4, "rnn_relu": 1, "rnn_tanh": 1}


def gates_of(mode: str) -> int:
    return len(GATES[mode])


class Weights(NamedTuple):
    """A layer's in the block: the first of W (-1 where there is none), of R, of their biases, in the first direction;
    what a second direction adds to the former two and to the latter two."""

    input: int
    recurrent: int
    input_bias: int
    recurrent_bias: int
    next_matrices: int
    next_biases: int


def weights(problem: RnnProblem, layer: int) -> Weights:
    parameters, first = problem.parameters, layer * problem.directions
    gates = parameters.gates

    def starts(p: int) -> tuple[int, int]:
        return parameters.matrices(p)[gates].offset, parameters.biases(p)[0].offset  # type: ignore[union-attr]

    recurrent, bias = starts(first)
    of_input = parameters.matrices(first)[0]
    later = starts(first + 1) if problem.directions == 2 else (recurrent, bias)
    return Weights(
        input=of_input.offset if of_input else -1,
        recurrent=recurrent,
        input_bias=bias,
        recurrent_bias=bias + gates * problem.hidden,
        next_matrices=later[0] - recurrent,
        next_biases=later[1] - bias,
    )


def of_steps(problem: RnnProblem, layer: int) -> dict[str, int]:
    """What the integers of every kernel of steps begin with; state: a layer's first element."""
    w = weights(problem, layer)
    return {
        "steps": problem.steps,
        "batch": problem.batch,
        "hidden": problem.hidden,
        "directions": problem.directions,
        "recurrent": w.recurrent,
        "next_matrices": w.next_matrices,
        "state": layer * problem.directions * problem.batch * problem.hidden,
    }


class Place(NamedTuple):
    """Elements of `dtype`: the place of a pointer, and the first of them behind it."""

    pointer: int
    dtype: str
    first: int = 0

    @property
    def is_somewhere(self) -> bool:
        return self.pointer != NULL


class Workspace:
    """Takes memory piece by piece."""

    def __init__(self) -> None:
        self.size_bytes = 0

    def take(self, elements: int, dtype: str) -> Place:
        place = Place(in_workspace(self.size_bytes), dtype)
        self.size_bytes += -(-elements * ITEMSIZE[dtype] // _ALIGN_BYTES) * _ALIGN_BYTES
        return place


class Memory:
    """What forward and gradient have in common: operands, the tape, and a workspace to take from."""

    def __init__(self, problem: RnnProblem) -> None:
        self.problem, self.workspace = problem, Workspace()
        self.rows = problem.steps * problem.batch
        self.hidden = self.rows * problem.directions * problem.hidden  # elements of a layer's outputs

    def operand(self, name: str) -> Place:
        place = self.problem.places[name]
        return Place(place, self.problem.operands[place].dtype)

    def state(self, name: str, layer: int) -> Place:
        """A layer's part of a state; of the dtype alone where the mode has none."""
        if name not in self.problem.places:
            return Place(NULL, self.problem.dtype)
        first = layer * self.problem.directions * self.problem.batch * self.problem.hidden
        return self.operand(name)._replace(first=first)

    def outputs_on_tape(self, layer: int) -> Place:
        return self.operand("tape")._replace(first=layer * self.problem.layer_tape_elems)

    def saved_on_tape(self, layer: int) -> Place:
        return self.operand("tape")._replace(first=layer * self.problem.layer_tape_elems + self.hidden)


class ForwardMemory(Memory):
    """sums: of one layer. cells: of one layer."""

    def __init__(self, problem: RnnProblem, keeps_last: bool) -> None:
        """keeps_last: the outputs of the last layer are wanted in the compute type, whatever y is."""
        super().__init__(problem)
        self._keeps_last, gates = keeps_last, problem.parameters.gates
        self.sums = self.workspace.take(gates * self.hidden, problem.compute)
        between = 0 if problem.training else min(2, problem.layers - 1 + (keeps_last and not self._y_is_wide))
        self._between = [self.workspace.take(self.hidden, problem.compute) for _ in range(between)]
        state = problem.directions * problem.batch * problem.hidden
        self.cells = self.workspace.take(state if problem.has_cell else 0, problem.compute)

    @property
    def _y_is_wide(self) -> bool:
        return self.problem.dtype == self.problem.compute

    def outputs(self, layer: int) -> Place:
        """A layer's, in the compute type; nowhere where only y is wanted."""
        problem, is_last = self.problem, layer == self.problem.layers - 1
        if problem.training:
            return self.outputs_on_tape(layer)
        if is_last and self._y_is_wide:
            return self.operand("y")
        if is_last and not self._keeps_last:
            return Place(NULL, problem.compute)
        return self._between[layer % 2]

    def y(self, layer: int) -> Place:
        """Where a layer writes y beside its outputs; nowhere where it does not."""
        is_last, y = layer == self.problem.layers - 1, self.operand("y")
        return y if is_last and self.outputs(layer).pointer != y.pointer else Place(NULL, y.dtype)

    def inputs(self, layer: int) -> Place:
        return self.outputs(layer - 1) if layer else self.operand("x")

    def saved(self, layer: int) -> Place:
        return self.saved_on_tape(layer) if self.problem.training else Place(NULL, self.problem.compute)


class GradientMemory(Memory):
    """records: of one layer. carried: what goes past R to the step before (dc of an LSTM)."""

    def __init__(self, problem: RnnProblem, parts: int, part_elems: int) -> None:
        super().__init__(problem)
        state = problem.directions * problem.batch * problem.hidden
        take, compute = self.workspace.take, problem.compute
        self.records = take(RECORD[problem.mode] * self.hidden, compute)
        self.carried = take(state, compute)
        self._between = [take(self.hidden, compute) for _ in range(min(2, problem.layers - 1))]
        self.parts = take(parts * part_elems, compute)

    def of_outputs(self, layer: int) -> Place:
        """The gradient of a layer's outputs."""
        return self.operand("dy") if layer == self.problem.layers - 1 else self._between[layer % 2]

    def of_inputs(self, layer: int) -> Place:
        return self.of_outputs(layer - 1) if layer else self.operand("dx")

    def inputs(self, layer: int) -> Place:
        return self.outputs_on_tape(layer - 1) if layer else self.operand("x")


def index_bits(problem: RnnProblem) -> int:
    """Of a kernel's integers: 32 where no operand and nothing in the workspace has 2^31 elements."""
    per_unit = max(problem.parameters.gates, RECORD[problem.mode])
    largest = max(per_unit * prod(problem.y_shape), *(operand.size_elems for operand in problem.operands))
    return 32 if largest < _INT32_END else 64
