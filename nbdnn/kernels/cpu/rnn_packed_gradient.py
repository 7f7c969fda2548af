"""The gradient of recurrent networks with packed weights: a product and the gates at every step back, the rest at once.

    dh = db R      at each step back                           [batch, gates * H] by [gates * H, H], then the gates
    dx = da W      for all steps and images at once            [steps * batch, gates * H] by [gates * H, in]
    dW, dR         likewise: `rnn_parameter_gradients.py`

The gradients of the gates lie side by side, (steps, batch, directions, gradients, H), and those of a, of b, of both
directions are runs of one row. Splits and steps are those of `rnn_packed.py`: a step needs all units of the one after.
Traffic: R once a step, from the nearest cache that holds it; the gates' gradients written once and read three times.
Sums in float32 (float64). Source: own.
"""

from __future__ import annotations

from functools import cache, lru_cache
from math import ceil

import numpy as np
from numba import njit

from nbdnn.candidate import YES, Candidate, Support
from nbdnn.device import Cpu
from nbdnn.kernels.cpu.compile import DEVICE, compile_task
from nbdnn.kernels.cpu.cost import PACK_NS, kernel_us
from nbdnn.kernels.cpu.launch import Phase
from nbdnn.kernels.cpu.rnn_chain import CHAIN, CHAIN_FIELDS, Chains, along_chain
from nbdnn.kernels.cpu.rnn_gates import backward_step, slots
from nbdnn.kernels.cpu.rnn_memory import BackwardSequences
from nbdnn.kernels.cpu.rnn_parameter_gradients import ParameterGradients
from nbdnn.kernels.cpu.rnn_product import (
    PRODUCT,
    Rows,
    Tile,
    block_rows,
    copied,
    multiplied,
    tile_for,
    tile_of_columns,
)
from nbdnn.kernels.cpu.rnn_program import SequenceProgram, address_of, place_fields, place_values
from nbdnn.kernels.cpu.rnn_split import Split, Splits, gate_ns, splits, step_us
from nbdnn.kernels.cpu.rows import zero_fill
from nbdnn.kernels.cpu.vector import call_task, filled, pointer, record, stack, struct
from nbdnn.problem import ITEMSIZE
from nbdnn.problem_rnn import SAVED, RnnProblem
from nbdnn.rnn_parameters import GATES

_STEPS = record(
    *CHAIN_FIELDS,
    *place_fields("r", "hx", "cx", "out", "saved", "dy", "dh", "carried", "gates"),
    *("steps", "directions", "hidden", "gates_pitch", "part_bytes", "first_recurrence", "product"),
)
_SKIP = record(*place_fields("gates", "dx"), "hidden", "directions", "gates_pitch")


@cache
def _part(mode: str, compute: str, vl: int):
    """Compiled-in function (step, part, chain): one step back of a chunk of units, for the images of a chain; one more
    than there are steps leaves the gradient of hx."""
    at, find, chain_at, values = struct(_STEPS), address_of(), struct(CHAIN), pointer(compute)
    product, room, gates = struct(PRODUCT), stack(PRODUCT.itemsize), backward_step(mode, compute, vl)
    acc, saved_rows, total, recurrences = ITEMSIZE[compute], SAVED[mode], slots(mode).total, len(GATES[mode])
    is_lstm, is_gru = mode == "lstm", mode == "gru"

    @njit(**DEVICE)
    def part_of_step(step, part, chain):
        c = chain_at(chain)
        f, args, direction = at(c.ctx), c.args, c.direction
        row_bytes, first_unit = f.hidden * acc, part * f.part_units
        n, unit_bytes = min(f.part_units, f.hidden - first_unit), first_unit * acc
        gradients = find(args, f.gates_operand, f.gates_offset) + direction * total * row_bytes
        state = (direction * f.batch + c.first) * row_bytes + unit_bytes
        dh, carried = find(args, f.dh_operand, f.dh_offset) + state, 0
        if is_lstm or is_gru:
            carried = find(args, f.carried_operand, f.carried_offset) + state
        t = step if direction else f.steps - 1 - step
        earlier, later = (t + 1, t - 1) if direction else (t - 1, t + 1)
        if step:
            address = room()
            p = product(address)
            row = (later * f.batch + c.first) * f.gates_pitch + f.first_recurrence * row_bytes
            p.x, p.x_step, p.k_len, p.rows = gradients + row, f.gates_pitch, recurrences * f.hidden, c.end - c.first
            p.w = find(args, f.r_operand, f.r_offset) + (direction * f.parts + part) * f.part_bytes
            p.y, p.y_step, p.columns = dh, row_bytes, n
            call_task(f.product, address, 0, 0, 0)
        if step == f.steps:
            if is_gru:
                for image in range(c.end - c.first):
                    a, b = values(dh + image * row_bytes), values(carried + image * row_bytes)
                    for j in range(n):
                        a[j] += b[j]
            return
        for image in range(c.first, c.end):
            place = (t * f.batch + image) * f.directions + direction
            last = (earlier * f.batch + image) * f.directions + direction
            shift = (image - c.first) * row_bytes
            out = find(args, f.out_operand, f.out_offset) + unit_bytes
            saved = find(args, f.saved_operand, f.saved_offset) + place * saved_rows * row_bytes + unit_bytes
            if step == f.steps - 1:
                before = find(args, f.cx_operand, f.cx_offset) if is_lstm else find(args, f.hx_operand, f.hx_offset)
                before += state + shift
            elif is_lstm:
                before = saved + ((last - place) * saved_rows + saved_rows - 1) * row_bytes
            else:
                before = out + last * row_bytes
            gates(
                n, saved, row_bytes, out + place * row_bytes, before,
                find(args, f.dy_operand, f.dy_offset) + place * row_bytes + unit_bytes, dh + shift, carried + shift,
                gradients + (t * f.batch + image) * f.gates_pitch + unit_bytes, row_bytes,
            )  # fmt: skip

    return part_of_step


@cache
def _steps_task(mode: str, compute: str, vl: int):
    """All steps of a chain, or of a thread's part of it."""
    along = along_chain(_part(mode, compute, vl))

    def run(args, ctx, index, worker):
        along(args, ctx, index)

    return compile_task(run, (mode, compute, vl))


@cache
def _skip_task(mode: str, compute: str):
    """dx of one row where the input skips: the sum of da over the gates of both directions."""
    at, find, values, acc = struct(_SKIP), address_of(), pointer(compute), ITEMSIZE[compute]
    gates, total, fill = len(GATES[mode]), slots(mode).total, zero_fill(compute)

    def add_gates(args, ctx, index, worker):
        f = at(ctx)
        row = find(args, f.gates_operand, f.gates_offset) + index * f.gates_pitch
        dx = find(args, f.dx_operand, f.dx_offset) + index * f.hidden * acc
        fill(dx, f.hidden)
        for direction in range(f.directions):
            for gate in range(gates):
                da = values(row + (direction * total + gate) * f.hidden * acc)
                for j in range(f.hidden):
                    values(dx)[j] += da[j]

    return compile_task(add_gates, (mode, compute))


class _Backward:
    """The phases of a gradient, from the last layer to the first."""

    def __init__(self, problem: RnnProblem, split: Split, device: Cpu) -> None:
        self._problem, self._device = problem, device
        self._sequences = sequences = BackwardSequences(problem, device)
        compute, hidden, take = problem.compute, problem.hidden, sequences.workspace.take
        self._slots, self._recurrences = slots(problem.mode), len(GATES[problem.mode])
        self._chains = chains = Chains(problem, split, sequences.workspace, device)
        self._tile = tile_for(chains.unit_vectors, chains.images, compute, device)
        self._columns = problem.directions * self._slots.total * hidden
        self._gates_pitch = self._columns + device.lanes(compute)  # as in `rnn_packed.py`
        self._gates = take(problem.steps * problem.batch * self._gates_pitch)
        self._part_elems = self._recurrences * hidden * chains.part_units
        self._r = take(problem.directions * chains.parts * self._part_elems)
        # Of a GRU's gradients the last, of its recurrence alone, is none of a: the last direction's is left away.
        self._rows = self._columns - (self._slots.total - self._recurrences) * hidden
        widths = [problem.parameters.inputs_of(layer) for layer in range(problem.layers)]
        tiles = [self._wide_tile(width) for width in widths]
        panels = [ceil(width / tile.columns) * tile.columns for width, tile in zip(widths, tiles, strict=True)]
        self._w = take(max(panels) * self._rows)
        self._parameters = ParameterGradients(problem, sequences, self._gates, self._gates_pitch, device)
        self.workspace_bytes = sequences.workspace.size_bytes

    def _wide_tile(self, width: int) -> Tile:
        rows = block_rows(self._problem.steps * self._problem.batch, self._device)
        return tile_of_columns(width, rows, self._problem.compute, self._device)

    def program(self) -> SequenceProgram:
        problem, sequences = self._problem, self._sequences
        phases, keep = list(sequences.before), list[np.ndarray]()
        for layer in reversed(range(problem.layers)):
            packed, offsets = self._packed_r(layer)
            inputs, of_inputs = self._inputs(layer)
            phases += [packed, *self._chains.before(), self._steps(layer), *inputs, *self._parameters.phases(layer)]
            keep += [offsets, of_inputs]
        return SequenceProgram(problem, [*phases, *sequences.after()], [*keep, *self._parameters.keep])

    def _matrices(self, layer: int) -> list[tuple]:
        directions = self._problem.directions
        return [self._problem.parameters.matrices(layer * directions + direction) for direction in range(directions)]

    def _packed_r(self, layer: int) -> tuple[Phase, np.ndarray]:
        hidden = self._problem.hidden
        offsets = np.array([[part.offset for part in parts[self._recurrences :]] for parts in self._matrices(layer)])
        rows = Rows(self._sequences.w, np.ascontiguousarray(offsets, np.int64), hidden, hidden, hidden)
        panels = self._chains.parts * self._chains.unit_vectors // self._tile.nv
        return copied(rows, self._r, panels, self._tile), rows.offsets

    def _inputs(self, layer: int) -> tuple[list[Phase], np.ndarray]:
        """dx, or the gradient of the layer below."""
        problem, sequences, hidden = self._problem, self._sequences, self._problem.hidden
        rows, dx, width = problem.steps * problem.batch, sequences.of_inputs(layer), problem.parameters.inputs_of(layer)
        if problem.skip and layer == 0:
            ctx = filled(
                _SKIP,
                **place_values(gates=self._gates, dx=dx),
                hidden=hidden,
                directions=problem.directions,
                gates_pitch=self._gates_pitch * ITEMSIZE[problem.compute],
            )
            return [Phase(_skip_task(problem.mode, problem.compute), rows, ctx)], np.empty(0, np.int64)
        blocks = []
        for parts in self._matrices(layer):
            of_slot = dict(zip(self._slots.of_inputs, parts[: self._recurrences], strict=True))
            blocks += [of_slot[slot].offset if slot in of_slot else -1 for slot in range(self._slots.total)]
        offsets = np.array([blocks[: self._rows // hidden]], np.int64)
        tile = self._wide_tile(width)
        packed = copied(
            Rows(sequences.w, offsets, hidden, width, width), self._w, ceil(width / tile.columns), tile
        )  # fmt: skip
        pitches = self._gates_pitch, width
        product = multiplied(self._gates, self._w, dx, tile, rows, self._rows, width, pitches, self._device)
        return [packed, product], offsets

    def _steps(self, layer: int) -> Phase:
        problem, sequences, chains = self._problem, self._sequences, self._chains
        state = layer * problem.directions * problem.batch * problem.hidden
        outputs, saved = sequences.of_tape(layer)
        ctx = filled(
            _STEPS,
            **chains.values(problem.steps + 1),
            **place_values(
                r=self._r,
                hx=sequences.hx.beyond(state),
                cx=sequences.cx.beyond(state),
                out=outputs,
                saved=saved,
                dy=sequences.of_outputs(layer),
                dh=sequences.dh.beyond(state),
                carried=(sequences.dc if problem.has_cell else sequences.carried).beyond(state),
                gates=self._gates,
            ),
            steps=problem.steps,
            directions=problem.directions,
            hidden=problem.hidden,
            gates_pitch=self._gates_pitch * ITEMSIZE[problem.compute],
            part_bytes=self._part_elems * ITEMSIZE[problem.compute],
            first_recurrence=self._slots.of_recurrences[0],
            product=self._tile.address(),
        )
        task = _steps_task(problem.mode, problem.compute, self._tile.vl)
        return Phase(task, chains.tasks, ctx)


@lru_cache(maxsize=256)
def _workspace_bytes(problem: RnnProblem, split: Split, device: Cpu) -> int:
    return _Backward(problem, split, device).workspace_bytes


class PackedGradient(Candidate[Split, Cpu]):
    """Weights packed once for all steps."""

    op, provider, algorithm = "rnn_bwd", "cpu", "packed"

    def supports(self, problem: RnnProblem, device: Cpu) -> Support:
        return YES

    def configs(self, problem: RnnProblem, device: Cpu) -> Splits:
        return splits(problem, device)

    def workspace_bytes(self, problem: RnnProblem, config: Split, device: Cpu) -> int:
        return _workspace_bytes(problem, config, device)

    def estimate(self, problem: RnnProblem, config: Split, device: Cpu) -> float:
        fmas = problem.flops / 8 / device.lanes(problem.compute)
        packed_ns = 2 * problem.parameters.size_elems * PACK_NS
        products = kernel_us(device, 3 * fmas, packed_ns + gate_ns(problem), device.threads, 12 * problem.layers)
        return products + step_us(problem, config, fmas, device)

    def prepare(self, problem: RnnProblem, config: Split, device: Cpu) -> SequenceProgram:
        return _Backward(problem, config, device).program()


BWD = PackedGradient()
