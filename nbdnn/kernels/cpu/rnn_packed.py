"""Recurrent networks with packed weights: one product over all steps, then a small one and the gates at every step.

    a = x W^T      for all steps and images at once            [steps * batch, in] by [in, gates * H]
    b = h R^T      at each step                                [batch, H] by [H, gates * H], then the gates of its units

Columns are [direction][chunk of units][gate][unit]: the gates of a chunk of units lie together, so that whoever has
their sums goes on to h without waiting. The chains of a layer, its directions, run side by side; so do

    batch   groups of images, each a chain of its own: every core reads all of R at every step
    units   the chunks of units of a chain, which meet after every step (`crew.py`): a core keeps its part of R
    none    nothing else

Traffic: W and R once to be packed; R once a step, from the nearest cache that holds it; a written and read once. Sums
in float32 (float64), the gates in the same. Source: own.
"""

from __future__ import annotations

from functools import cache, lru_cache

import numpy as np
from numba import njit

from nbdnn.candidate import YES, Candidate, Support
from nbdnn.device import Cpu
from nbdnn.kernels.cpu.compile import DEVICE, compile_task
from nbdnn.kernels.cpu.cost import PACK_NS, kernel_us
from nbdnn.kernels.cpu.launch import Phase
from nbdnn.kernels.cpu.rnn_chain import CHAIN, CHAIN_FIELDS, Chains, along_chain
from nbdnn.kernels.cpu.rnn_gates import bias_rows, forward_step
from nbdnn.kernels.cpu.rnn_memory import ForwardSequences
from nbdnn.kernels.cpu.rnn_product import PRODUCT, Tile, block_rows, multiplied, tile_for, turned
from nbdnn.kernels.cpu.rnn_program import NOWHERE, Place, SequenceProgram, address_of, place_fields, place_values
from nbdnn.kernels.cpu.rnn_split import Split, Splits, gate_ns, splits, step_us
from nbdnn.kernels.cpu.vector import call_task, filled, record, stack, struct
from nbdnn.problem import ITEMSIZE
from nbdnn.problem_rnn import SAVED, RnnProblem
from nbdnn.rnn_parameters import GATES

_STEPS = record(
    *CHAIN_FIELDS,
    *place_fields("a", "r", "biases", "hx", "cx", "out", "saved", "sums"),
    *("steps", "directions", "hidden", "a_pitch", "a_direction", "a_part", "a_gate"),
    *("part_columns", "part_bytes", "sums_pitch", "sums_bytes", "product"),
)


@cache
def _part(mode: str, training: bool, compute: str, vl: int):
    """Compiled-in function (step, part, chain): one step of a chunk of units, for the images of a chain."""
    at, find, chain_at = struct(_STEPS), address_of(), struct(CHAIN)
    product, room, gates = struct(PRODUCT), stack(PRODUCT.itemsize), forward_step(mode, training, compute, vl)
    acc, saved_rows, biased, is_lstm = ITEMSIZE[compute], SAVED[mode], len(bias_rows(mode)), mode == "lstm"

    @njit(**DEVICE)
    def part_of_step(step, part, chain):
        c = chain_at(chain)
        f, args, direction = at(c.ctx), c.args, c.direction
        row_bytes, first_unit = f.hidden * acc, part * f.part_units
        t = f.steps - 1 - step if direction else step
        earlier = t + 1 if direction else t - 1
        outputs, out_pitch = find(args, f.out_operand, f.out_offset), f.directions * row_bytes
        if step:
            before, pitch = outputs + (earlier * f.batch + c.first) * out_pitch + direction * row_bytes, out_pitch
        else:
            before = find(args, f.hx_operand, f.hx_offset) + (direction * f.batch + c.first) * row_bytes
            pitch = row_bytes
        address = room()
        p = product(address)
        p.x, p.x_step, p.k_len, p.rows = before, pitch, f.hidden, c.end - c.first
        p.w = find(args, f.r_operand, f.r_offset) + (direction * f.parts + part) * f.part_bytes
        sums = find(args, f.sums_operand, f.sums_offset) + (c.number * f.parts + part) * f.sums_bytes
        p.y, p.y_step, p.columns = sums, f.sums_pitch, f.part_columns
        call_task(f.product, address, 0, 0, 0)
        n, unit_bytes = min(f.part_units, f.hidden - first_unit), first_unit * acc
        biases = find(args, f.biases_operand, f.biases_offset) + direction * biased * row_bytes + unit_bytes
        cells, saved = find(args, f.cx_operand, f.cx_offset), 0
        a = find(args, f.a_operand, f.a_offset) + direction * f.a_direction + part * f.a_part
        for image in range(c.first, c.end):
            place = (t * f.batch + image) * f.directions + direction
            last = (earlier * f.batch + image) * f.directions + direction
            cell = cells + (direction * f.batch + image) * row_bytes + unit_bytes if is_lstm else 0
            state = cell if is_lstm else before + (image - c.first) * pitch + unit_bytes
            if training:
                saved = find(args, f.saved_operand, f.saved_offset) + place * saved_rows * row_bytes + unit_bytes
                if is_lstm:
                    if step:
                        state = saved + ((last - place) * saved_rows + saved_rows - 1) * row_bytes
                    cell = saved + (saved_rows - 1) * row_bytes
            gates(
                n, a + (t * f.batch + image) * f.a_pitch, f.a_gate, p.y + (image - c.first) * p.y_step,
                f.part_units * acc, biases, row_bytes, state, outputs + place * row_bytes + unit_bytes, cell, saved,
                row_bytes,
            )  # fmt: skip

    return part_of_step


@cache
def _steps_task(mode: str, training: bool, compute: str, vl: int):
    """All steps of a chain, or of a thread's part of it."""
    along = along_chain(_part(mode, training, compute, vl))

    def run(args, ctx, index, worker):
        along(args, ctx, index)

    return compile_task(run, (mode, training, compute, vl))


class _Forward:
    """The phases of a forward, layer by layer: pack W, multiply, pack R, take the steps."""

    def __init__(self, problem: RnnProblem, split: Split, device: Cpu) -> None:
        self._problem, self._device, self._sequences = problem, device, ForwardSequences(problem, device)
        compute, workspace = problem.compute, self._sequences.workspace
        self._gates, self._chains = len(GATES[problem.mode]), Chains(problem, split, workspace, device)
        vectors, rows = self._gates * self._chains.unit_vectors, problem.steps * problem.batch
        self._tile = tile_for(vectors, self._chains.images, compute, device)
        self._wide_tile = tile_for(vectors, block_rows(rows, device), compute, device)
        self._part_columns = vectors * device.lanes(compute)
        self._columns = problem.directions * self._chains.parts * self._part_columns
        widths = [problem.parameters.inputs_of(layer) for layer in range(problem.layers) if layer or not problem.skip]
        self._w = workspace.take(max(widths, default=0) * self._columns)
        # A vector more: rows whole pages apart displace each other in the nearest cache, and the product over all steps
        # took a tenth longer (512 units, batch 32, Zen 5).
        self._a_pitch, self._sums_pitch = (n + device.lanes(compute) for n in (self._columns, self._part_columns))
        self._a = workspace.take(rows * self._a_pitch if widths else 0)
        self._r = workspace.take(problem.hidden * self._columns)
        self._sums_elems = self._chains.images * self._sums_pitch
        self._sums = workspace.take(self._chains.tasks * self._sums_elems)
        self.workspace_bytes = workspace.size_bytes

    def program(self) -> SequenceProgram:
        problem, sequences = self._problem, self._sequences
        phases, keep = list(sequences.before), list(sequences.keep)
        for layer in range(problem.layers):
            of_inputs, recurrent = self._offsets(layer)
            keep += [of_inputs, recurrent]
            if layer or not problem.skip:
                phases += self._inputs(layer, of_inputs)
            phases.append(self._packed(recurrent, self._r, problem.hidden, self._tile))
            phases += [*self._chains.before(), self._steps(layer), *sequences.after(layer)]
        return SequenceProgram(problem, phases, keep)

    def _offsets(self, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """Of W (none: 0) and R of each direction and gate, in the block of parameters."""
        problem = self._problem
        first = layer * problem.directions
        parts = [problem.parameters.matrices(first + direction) for direction in range(problem.directions)]
        every = np.array([[part.offset if part else 0 for part in row] for row in parts], np.int64)
        return np.ascontiguousarray(every[:, : self._gates]), np.ascontiguousarray(every[:, self._gates :])

    def _packed(self, offsets: np.ndarray, to: Place, k_len: int, tile: Tile) -> Phase:
        hidden, chains = self._problem.hidden, self._chains
        return turned(self._sequences.w, to, offsets, k_len, hidden, chains.parts, chains.unit_vectors, tile)

    def _inputs(self, layer: int, offsets: np.ndarray) -> list[Phase]:
        problem, x, tile, columns = self._problem, self._sequences.inputs(layer), self._wide_tile, self._columns
        width, rows = problem.parameters.inputs_of(layer), problem.steps * problem.batch
        pitches = width, self._a_pitch
        product = multiplied(x, self._w, self._a, tile, rows, width, columns, pitches, self._device)
        return [self._packed(offsets, self._w, width, tile), product]

    def _steps(self, layer: int) -> Phase:
        problem, sequences, chains = self._problem, self._sequences, self._chains
        state, item = layer * problem.directions * problem.batch * problem.hidden, ITEMSIZE[problem.compute]
        skips = problem.skip and layer == 0  # then the input is a of every gate itself, as it lies
        ctx = filled(
            _STEPS,
            **chains.values(problem.steps),
            **place_values(
                a=sequences.x if skips else self._a,
                r=self._r,
                biases=sequences.biases(layer),
                hx=sequences.hx.beyond(state),
                cx=sequences.cx.beyond(state),
                out=sequences.outputs(layer),
                saved=sequences.of_tape(layer)[1] if problem.training else NOWHERE,
                sums=self._sums,
            ),
            steps=problem.steps,
            directions=problem.directions,
            hidden=problem.hidden,
            a_pitch=(problem.hidden if skips else self._a_pitch) * item,
            a_direction=0 if skips else chains.parts * self._part_columns * item,
            a_part=(chains.part_units if skips else self._part_columns) * item,
            a_gate=0 if skips else chains.part_units * item,
            part_columns=self._part_columns,
            part_bytes=self._part_columns * problem.hidden * item,
            sums_pitch=self._sums_pitch * item,
            sums_bytes=self._sums_elems * item,
            product=self._tile.address(),
        )
        task = _steps_task(problem.mode, problem.training, problem.compute, self._tile.vl)
        return Phase(task, chains.tasks, ctx)


@lru_cache(maxsize=256)
def _workspace_bytes(problem: RnnProblem, split: Split, device: Cpu) -> int:
    return _Forward(problem, split, device).workspace_bytes


class Packed(Candidate[Split, Cpu]):
    """Weights packed once for all steps."""

    op, provider, algorithm = "rnn_fwd", "cpu", "packed"

    def supports(self, problem: RnnProblem, device: Cpu) -> Support:
        return YES

    def configs(self, problem: RnnProblem, device: Cpu) -> Splits:
        return splits(problem, device)

    def workspace_bytes(self, problem: RnnProblem, config: Split, device: Cpu) -> int:
        return _workspace_bytes(problem, config, device)

    def estimate(self, problem: RnnProblem, config: Split, device: Cpu) -> float:
        fmas = problem.flops / 4 / device.lanes(problem.compute)
        packed_ns = problem.parameters.size_elems * PACK_NS
        products = kernel_us(device, fmas, packed_ns + gate_ns(problem), device.threads, 4 * problem.layers)
        return products + step_us(problem, config, fmas, device)

    def prepare(self, problem: RnnProblem, config: Split, device: Cpu) -> SequenceProgram:
        return _Forward(problem, config, device).program()


FWD = Packed()
