"""Where the sequences of a recurrent network lie while it runs, and the phases before and after those of its layers.

Between layers everything is in the compute type: 16-bit operands are widened once, results rounded once. In training
the outputs of each layer are the tape's; in inference those of the last are y itself where y is of the compute type.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from nbdnn.device import Cpu
from nbdnn.kernels.cpu.compile import compile_task
from nbdnn.kernels.cpu.launch import Phase
from nbdnn.kernels.cpu.rnn_gates import bias_rows
from nbdnn.kernels.cpu.rnn_program import (
    NOWHERE,
    Place,
    Workspace,
    address_of,
    converted,
    place_fields,
    place_values,
)
from nbdnn.kernels.cpu.vector import WIDEN, filled, pointer, record, struct
from nbdnn.problem import DEFAULT_COMPUTE, ITEMSIZE
from nbdnn.problem_rnn import SAVED, RnnProblem

_BIASES = record(*place_fields("w", "to"), "hidden", "table")


class _Sequences:
    """What forward and backward share. before: phases that run first. workspace: what a method may take more of."""

    def __init__(self, problem: RnnProblem, device: Cpu) -> None:
        self.problem, self.device = problem, device
        self.workspace, self.before = Workspace(problem), list[Phase]()
        self._state_rows = problem.state_shape[0] * problem.batch
        self.x = self._widened("x", problem.steps * problem.batch, problem.input)
        self.hx = self._state("hx")

    def operand(self, name: str) -> Place:
        place = self.problem.places[name]
        return Place(place, 0, self.problem.operands[place].dtype)

    @property
    def w(self) -> Place:
        return self.operand("w")

    def _widened(self, name: str, rows: int, length: int) -> Place:
        """An operand in the compute type: where it is, or in the workspace."""
        given = self.operand(name)
        if given.dtype == self.problem.compute:
            return given
        place = self.workspace.take(rows * length)
        self.before.append(converted(given, place, rows, length, self.device))
        return place

    def _state(self, name: str) -> Place:
        """A copy of a state (layers * directions, b, h) in the workspace, zeros where there is no such operand."""
        given = self.operand(name) if name in self.problem.places else NOWHERE._replace(dtype=self.problem.compute)
        place = self.workspace.take(self._state_rows * self.problem.hidden)
        self.before.append(converted(given, place, self._state_rows, self.problem.hidden, self.device))
        return place

    def of_tape(self, layer: int) -> tuple[Place, Place]:
        """A layer's outputs, and what its mode saves."""
        outputs = self.operand("tape").beyond(layer * self.problem.layer_tape_elems)
        steps, batch, width = self.problem.y_shape
        return outputs, outputs.beyond(steps * batch * width)


@cache
def _bias_task(dtype: str):
    """One row of biases: index counts pseudo-layers, and the rows of each; its table has two offsets, or one and -1."""
    compute = DEFAULT_COMPUTE[dtype]
    i64, at, find, widen = pointer("i64"), struct(_BIASES), address_of(), WIDEN[dtype]
    weights, values, item, row_item = pointer(dtype), pointer(compute), ITEMSIZE[dtype], ITEMSIZE[compute]

    def add_biases(args, ctx, index, worker):
        f = at(ctx)
        w, first, second = find(args, f.w_operand, f.w_offset), i64(f.table)[2 * index], i64(f.table)[2 * index + 1]
        to = values(find(args, f.to_operand, f.to_offset) + index * f.hidden * row_item)
        for j in range(f.hidden):
            to[j] = widen(weights(w + first * item)[j])
        if second >= 0:
            for j in range(f.hidden):
                to[j] += widen(weights(w + second * item)[j])

    return compile_task(add_biases, (dtype,))


class ForwardSequences(_Sequences):
    """Of a forward. after: phases that round y, hy and cy, where they are not written yet. cx: the cells, which
    inference overwrites step by step. keep: arrays that the phases need alive."""

    def __init__(self, problem: RnnProblem, device: Cpu) -> None:
        super().__init__(problem, device)
        self.cx = self._state("cx") if problem.has_cell else NOWHERE
        elements = problem.steps * problem.batch * problem.directions * problem.hidden
        spare = 0 if problem.training else min(2, problem.layers - (problem.dtype == problem.compute))
        self._between = [self.workspace.take(elements) for _ in range(spare)]
        self._bias_rows = bias_rows(problem.mode)
        self._biases = self.workspace.take(problem.state_shape[0] * len(self._bias_rows) * problem.hidden)
        self.keep = [self._add_biases()]

    def biases(self, layer: int) -> Place:
        """Rows of biases of the gates, for each direction of a layer."""
        rows = self.problem.directions * len(self._bias_rows)
        return self._biases.beyond(layer * rows * self.problem.hidden)

    def _add_biases(self) -> np.ndarray:
        problem, table = self.problem, []
        for p in range(problem.parameters.pseudo_layers):
            offsets = [part.offset for part in problem.parameters.biases(p)]
            table += [[*(offsets[number] for number in row), -1][:2] for row in self._bias_rows]
        kept = np.array(table, np.int64)
        ctx = filled(
            _BIASES, **place_values(w=self.w, to=self._biases), hidden=problem.hidden, table=kept.ctypes.data
        )  # fmt: skip
        self.before.append(Phase(_bias_task(problem.dtype), len(table), ctx, alone=True))
        return kept

    def outputs(self, layer: int) -> Place:
        """Where a layer writes h (t, b, directions * h)."""
        problem = self.problem
        if problem.training:
            return self.of_tape(layer)[0]
        if layer == problem.layers - 1 and problem.dtype == problem.compute:
            return self.operand("y")
        return self._between[layer % 2]

    def inputs(self, layer: int) -> Place:
        return self.outputs(layer - 1) if layer else self.x

    def after(self, layer: int) -> list[Phase]:
        """What is left to do when a layer is done: its last states, and y after the last layer."""
        problem, outputs = self.problem, self.outputs(layer)
        steps, batch, width = problem.y_shape
        phases = []
        for direction in range(problem.directions):
            state = (layer * problem.directions + direction) * batch * problem.hidden
            last = 0 if direction else steps - 1
            h = outputs.beyond(last * batch * width + direction * problem.hidden)
            hy = self.operand("hy").beyond(state)
            phases.append(converted(h, hy, batch, problem.hidden, self.device, source_pitch=width))
            if problem.has_cell:
                cells, pitch = self.cx.beyond(state), problem.hidden
                if problem.training:
                    pitch = problem.directions * SAVED["lstm"] * problem.hidden
                    offset = last * batch * pitch + (direction * SAVED["lstm"] + SAVED["lstm"] - 1) * problem.hidden
                    cells = self.of_tape(layer)[1].beyond(offset)
                cy = self.operand("cy").beyond(state)
                phases.append(converted(cells, cy, batch, problem.hidden, self.device, source_pitch=pitch))
        if layer == problem.layers - 1 and outputs.operand != self.operand("y").operand:
            phases.append(converted(outputs, self.operand("y"), steps * batch, width, self.device))
        return phases


class BackwardSequences(_Sequences):
    """Of a gradient. dh, dc: gradients of the states (layers * directions, b, h), which begin as those of hy and cy and
    end as those of hx and cx; carried: what a GRU carries past R; before a layer begins it is zeros."""

    def __init__(self, problem: RnnProblem, device: Cpu) -> None:
        super().__init__(problem, device)
        steps, batch, width = problem.y_shape
        self.cx = self._state("cx") if problem.has_cell else NOWHERE
        self.dh = self._state("dhy")
        self.dc = self._state("dcy") if problem.has_cell else NOWHERE
        self.carried = self._state("nothing") if problem.mode == "gru" else NOWHERE
        self._dy = self._widened("dy", steps * batch, width)
        self._between = [self.workspace.take(steps * batch * width) for _ in range(min(2, problem.layers - 1))]
        self.is_wide = problem.dtype == problem.compute
        self.dx = self.operand("dx") if self.is_wide else self.workspace.take(steps * batch * problem.input)
        self.dw = self.operand("dw") if self.is_wide else self.workspace.take(problem.parameters.size_elems)

    def of_outputs(self, layer: int) -> Place:
        """The gradient of a layer's outputs."""
        return self._dy if layer == self.problem.layers - 1 else self._between[layer % 2]

    def of_inputs(self, layer: int) -> Place:
        return self.of_outputs(layer - 1) if layer else self.dx

    def inputs(self, layer: int) -> Place:
        return self.of_tape(layer - 1)[0] if layer else self.x

    def after(self) -> list[Phase]:
        """Rounding what is not written yet."""
        problem, hidden = self.problem, self.problem.hidden
        phases = [converted(self.dh, self.operand("dhx"), self._state_rows, hidden, self.device)]
        if problem.has_cell:
            phases.append(converted(self.dc, self.operand("dcx"), self._state_rows, hidden, self.device))
        if not self.is_wide:
            rows, size = problem.steps * problem.batch, problem.parameters.size_elems
            phases.append(converted(self.dx, self.operand("dx"), rows, problem.input, self.device))
            phases.append(converted(self.dw, self.operand("dw"), size // hidden, hidden, self.device))
        return phases
