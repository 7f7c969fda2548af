"""Gradients of a layer's parameters, from those of its gates: products over all steps and images.

    dW = da^T x      dR = db^T h'      dbW = sum of da,  dbR = sum of db          h': the state that each step began
    with

    gates (steps * batch, directions * gradients * H) --turn--> rows of one gate's unit, steps side by side
    x, h' --copy--> panels of columns                           then rows by panels, as in `rnn_product.py`

Some steps at a time, so that a panel stays in the second-level cache; from the second time on products go to a block
beside dw, and are added. Sums in float32 (float64), in the order of the steps. Source: own.
"""

from __future__ import annotations

from functools import cache
from math import ceil, prod

import numpy as np
from numba import njit

from nbdnn.device import Cpu
from nbdnn.kernels.cpu.compile import DEVICE, FASTMATH, compile_task
from nbdnn.kernels.cpu.launch import FEW_ELEMS, Phase
from nbdnn.kernels.cpu.rnn_gates import slots
from nbdnn.kernels.cpu.rnn_memory import BackwardSequences
from nbdnn.kernels.cpu.rnn_product import Rows, Tile, block_rows, copied, multiplied, tile_of_columns
from nbdnn.kernels.cpu.rnn_program import Place, address_of, place_fields, place_values
from nbdnn.kernels.cpu.turns import transpose
from nbdnn.kernels.cpu.vector import NUMBA_FLOAT, filled, pointer, record, struct
from nbdnn.problem import ITEMSIZE
from nbdnn.problem_rnn import RnnProblem
from nbdnn.rnn_parameters import GATES

_ROWS_A_TIME = 1024  # steps times batch: a panel of 4 vectors of 16 floats has 256 KiB
_PAD = 16  # elements between turned rows, which else would lie a page apart
_TURN_COLUMNS = 64  # of a task
_TURN_ROWS = 64  # whose pages are still known when the next vector of columns is turned
_ADD_ELEMS_A_TASK = 1 << 15
_TURN = record(
    *place_fields("gates", "to", "dw"),
    *("first", "rows", "columns", "pitch", "to_pitch", "hidden", "table", "adds"),
)
_ADD = record(*place_fields("source", "to"), "elements")


@cache
def _turn_task(compute: str, vl: int):
    """Some columns of the gates as rows, and the sums of these: what they are to each bias.

    table: of each of a direction's gradients, the offsets in dw of the biases that its sum is for, or -1.
    """
    at, find, i64, values = struct(_TURN), address_of(), pointer("i64"), pointer(compute)
    turn, acc, zero = transpose(compute, compute, vl), ITEMSIZE[compute], NUMBA_FLOAT[compute](0)

    @njit(**DEVICE, fastmath=FASTMATH | {"reassoc"})
    def total(address, n):
        row, found = values(address), zero
        for i in range(n):
            found += row[i]
        return found

    def turn_columns(args, ctx, index, worker):
        f = at(ctx)
        first, count = index * _TURN_COLUMNS, min(_TURN_COLUMNS, f.columns - index * _TURN_COLUMNS)
        source = find(args, f.gates_operand, f.gates_offset) + (f.first * f.pitch + first) * acc
        to = find(args, f.to_operand, f.to_offset) + first * f.to_pitch * acc
        for row in range(0, f.rows, _TURN_ROWS):
            rows = min(_TURN_ROWS, f.rows - row)
            turn(to + row * acc, f.to_pitch * acc, source + row * f.pitch * acc, f.pitch * acc, rows, count)
        dw = values(find(args, f.dw_operand, f.dw_offset))
        for row in range(count):
            found = total(to + row * f.to_pitch * acc, f.rows)
            gradient, unit = (first + row) // f.hidden, (first + row) % f.hidden
            for which in range(2):
                bias = i64(f.table)[2 * gradient + which]
                if bias >= 0:
                    dw[bias + unit] = dw[bias + unit] + found if f.adds else found

    return compile_task(turn_columns, (compute, vl))


@cache
def _add_task(compute: str):
    """A run of elements, added to what is there."""
    at, find, values, acc = struct(_ADD), address_of(), pointer(compute), ITEMSIZE[compute]

    def add(args, ctx, index, worker):
        f = at(ctx)
        start = index * _ADD_ELEMS_A_TASK
        to = values(find(args, f.to_operand, f.to_offset) + start * acc)
        source = values(find(args, f.source_operand, f.source_offset) + start * acc)
        for i in range(min(_ADD_ELEMS_A_TASK, f.elements - start)):
            to[i] += source[i]

    return compile_task(add, (compute,))


class ParameterGradients:
    """The phases of every layer; takes its part of the workspace when it is made."""

    def __init__(
        self, problem: RnnProblem, sequences: BackwardSequences, gates: Place, gates_pitch: int, device: Cpu
    ) -> None:  # fmt: skip
        self._problem, self._sequences, self._device = problem, sequences, device
        self._gates, self._gates_pitch = gates, gates_pitch
        self._slots, take = slots(problem.mode), sequences.workspace.take
        times = ceil(problem.steps * problem.batch / _ROWS_A_TIME)
        self._steps = ceil(problem.steps / times)
        rows = self._steps * problem.batch
        self._pitch = rows + _PAD
        self._columns = problem.directions * self._slots.total * problem.hidden
        self._turned = take(self._columns * self._pitch)
        layers = range(problem.layers)
        widths = [problem.hidden, *(problem.parameters.inputs_of(layer) for layer in layers)]
        # Panels are at most as wide as four vectors, of which the last may be empty but for a column.
        self._panels = take(rows * (max(widths) + 4 * device.lanes(problem.compute)))
        several = self._steps < problem.steps
        self._part = take(max(end - start for start, end in map(self._span, layers)) if several else 0)
        self.keep: list[np.ndarray] = []

    def phases(self, layer: int) -> list[Phase]:
        """Of one layer, whose gates' gradients are there."""
        found = []
        for first in range(0, self._problem.steps, self._steps):
            end = min(self._problem.steps, first + self._steps)
            found += [self._turn(layer, first, end)]
            found += self._products(layer, first, end)
            if first:
                found.append(self._add(layer))
        return found

    def _span(self, layer: int) -> tuple[int, int]:
        """Where the matrices of a layer begin and end in the block."""
        parameters, directions = self._problem.parameters, self._problem.directions
        every = [parameters.matrices(layer * directions + direction) for direction in range(directions)]
        parts = [part for row in every for part in row if part is not None]
        return parts[0].offset, parts[-1].offset + prod(parts[-1].shape)

    def _kept(self, table: list) -> np.ndarray:
        self.keep.append(np.array(table, np.int64))
        return self.keep[-1]

    def _turn(self, layer: int, first: int, end: int) -> Phase:
        problem, gates = self._problem, len(GATES[self._problem.mode])
        table = []
        for direction in range(problem.directions):
            biases = problem.parameters.biases(layer * problem.directions + direction)
            for slot in range(self._slots.total):
                of = [gate for gate, at in enumerate(self._slots.of_inputs) if at == slot]
                of += [gates + gate for gate, at in enumerate(self._slots.of_recurrences) if at == slot]
                table.append([*(biases[number].offset for number in of), -1][:2])
        rows = (end - first) * problem.batch
        ctx = filled(
            _TURN,
            **place_values(gates=self._gates, to=self._turned, dw=self._sequences.dw),
            first=first * problem.batch,
            rows=rows,
            columns=self._columns,
            pitch=self._gates_pitch,
            to_pitch=self._pitch,
            hidden=problem.hidden,
            table=self._kept(table).ctypes.data,
            adds=int(first > 0),
        )
        task = _turn_task(problem.compute, self._device.lanes(problem.compute))
        return Phase(task, ceil(self._columns / _TURN_COLUMNS), ctx, alone=rows * self._columns < FEW_ELEMS)

    def _products(self, layer: int, first: int, end: int) -> list[Phase]:
        """dW and dR of every direction."""
        problem, sequences, gates = self._problem, self._sequences, len(GATES[self._problem.mode])
        batch, hidden, width = problem.batch, problem.hidden, problem.parameters.inputs_of(layer)
        phases = []
        if layer or not problem.skip:
            tile = self._tile(width)
            offsets = self._kept([[first * batch * width]])
            x = Rows(sequences.inputs(layer), offsets, (end - first) * batch, width, width)
            phases.append(copied(x, self._panels, ceil(width / tile.columns), tile))
            for direction in range(problem.directions):
                parts = problem.parameters.matrices(layer * problem.directions + direction)[:gates]
                phases += self._multiplied(layer, direction, first, end, width, parts, self._slots.of_inputs)
        tile = self._tile(hidden)
        for direction in range(problem.directions):
            parts = problem.parameters.matrices(layer * problem.directions + direction)[gates:]
            phases += self._states(layer, direction, tile, first, end)
            phases += self._multiplied(layer, direction, first, end, hidden, parts, self._slots.of_recurrences)
        return phases

    def _tile(self, columns: int, rows: int = 1) -> Tile:
        """Panels are the same for any number of rows."""
        return tile_of_columns(columns, block_rows(rows, self._device), self._problem.compute, self._device)

    def _states(self, layer: int, direction: int, tile: Tile, first: int, end: int) -> list[Phase]:
        """Panels of the states that steps began with: outputs of the step before, and hx."""
        problem, sequences = self._problem, self._sequences
        batch, hidden, width = problem.batch, problem.hidden, problem.directions * problem.hidden
        panels, k_len = ceil(hidden / tile.columns), (end - first) * batch
        begins = problem.steps - 1 if direction else 0
        low, high = (first, min(end, begins)) if direction else (max(first, 1), end)
        phases = []
        if low < high:
            earlier = low + 1 if direction else low - 1
            offsets = self._kept([[earlier * batch * width + direction * hidden]])
            rows = Rows(sequences.of_tape(layer)[0], offsets, (high - low) * batch, hidden, width)
            phases.append(copied(rows, self._panels, panels, tile, (low - first) * batch, k_len))
        if first <= begins < end:
            offsets = self._kept([[(layer * problem.directions + direction) * batch * hidden]])
            rows = Rows(sequences.hx, offsets, batch, hidden, hidden)
            phases.append(copied(rows, self._panels, panels, tile, (begins - first) * batch, k_len))
        return phases

    def _multiplied(
        self, layer: int, direction: int, first: int, end: int, width: int, parts: tuple, which: tuple[int, ...]
    ) -> list[Phase]:
        """The turned gradients `which` by the panels, each to its matrix; neighbours together."""
        problem, hidden = self._problem, self._problem.hidden
        start, _ = self._span(layer)
        runs: list[list[int]] = []  # first gate, its gradient, gates
        for gate, slot in enumerate(which):
            if runs and slot == runs[-1][1] + runs[-1][2]:
                runs[-1][2] += 1
            else:
                runs.append([gate, slot, 1])
        phases, k_len = [], (end - first) * problem.batch
        for gate, slot, gates in runs:
            offset = parts[gate].offset
            to = self._part.beyond(offset - start) if first else self._sequences.dw.beyond(offset)
            x = self._turned.beyond((direction * self._slots.total + slot) * hidden * self._pitch)
            tile, pitches = self._tile(width, gates * hidden), (self._pitch, width)
            phases.append(multiplied(x, self._panels, to, tile, gates * hidden, k_len, width, pitches, self._device))
        return phases

    def _add(self, layer: int) -> Phase:
        start, end = self._span(layer)
        to = self._sequences.dw.beyond(start)
        ctx = filled(_ADD, **place_values(source=self._part, to=to), elements=end - start)
        return Phase(_add_task(self._problem.compute), ceil((end - start) / _ADD_ELEMS_A_TASK), ctx)
