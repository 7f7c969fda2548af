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
from math import ceil

import numpy as np
from numba import njit

from nbdnn.candidate import YES, Candidate, Support
from nbdnn.device import Cpu
from nbdnn.kernels.cpu.compile import DEVICE, compile_task
from nbdnn.kernels.cpu.cost import PACK_NS, kernel_us
from nbdnn.kernels.cpu.crew import crew_bytes, first_patience, take_step
from nbdnn.kernels.cpu.launch import Phase
from nbdnn.kernels.cpu.rnn_gates import bias_rows, forward_step
from nbdnn.kernels.cpu.rnn_memory import ForwardSequences
from nbdnn.kernels.cpu.rnn_product import PRODUCT, block_rows, chunks_of, multiplied, tile_for, turned
from nbdnn.kernels.cpu.rnn_program import (
    NOWHERE,
    Place,
    SequenceProgram,
    address_of,
    converted,
    place_fields,
    place_values,
)
from nbdnn.kernels.cpu.rnn_split import Split, Splits, gate_ns, splits, step_us
from nbdnn.kernels.cpu.vector import call_task, filled, record, stack, struct
from nbdnn.problem import ITEMSIZE
from nbdnn.problem_rnn import SAVED, RnnProblem
from nbdnn.rnn_parameters import GATES

_STEPS = record(
    *place_fields("a", "r", "biases", "hx", "cx", "out", "saved", "sums", "crews"),
    *("steps", "batch", "directions", "hidden", "groups", "parts", "chunk_units", "a_pitch", "a_direction", "a_chunk"),
    *("a_gate", "chunk_columns", "chunk_bytes", "sums_bytes", "crew_bytes", "product"),
)
_CHAIN = record("args", "ctx", "direction", "first", "end", "sums")


@cache
def _part(mode: str, training: bool, compute: str, vl: int):
    """Compiled-in function (step, part, chain): one step of a chunk of units, for the images of a chain."""
    at, find, chain_at = struct(_STEPS), address_of(), struct(_CHAIN)
    product, room, gates = struct(PRODUCT), stack(PRODUCT.itemsize), forward_step(mode, training, compute, vl)
    acc, saved_rows, biased, is_lstm = ITEMSIZE[compute], SAVED[mode], len(bias_rows(mode)), mode == "lstm"

    @njit(**DEVICE)
    def part_of_step(step, part, chain):
        c = chain_at(chain)
        f, args, direction = at(c.ctx), c.args, c.direction
        row_bytes, first_unit = f.hidden * acc, part * f.chunk_units
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
        p.w = find(args, f.r_operand, f.r_offset) + (direction * f.parts + part) * f.chunk_bytes
        p.y, p.y_step, p.columns = c.sums + part * f.sums_bytes, f.chunk_columns * acc, f.chunk_columns
        call_task(f.product, address, 0, 0, 0)
        n, unit_bytes = min(f.chunk_units, f.hidden - first_unit), first_unit * acc
        biases = find(args, f.biases_operand, f.biases_offset) + direction * biased * row_bytes + unit_bytes
        cells, saved = find(args, f.cx_operand, f.cx_offset), 0
        a = find(args, f.a_operand, f.a_offset) + direction * f.a_direction + part * f.a_chunk
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
                f.chunk_units * acc, biases, row_bytes, state, outputs + place * row_bytes + unit_bytes, cell, saved,
                row_bytes,
            )  # fmt: skip

    return part_of_step


@cache
def _steps_task(mode: str, training: bool, compute: str, vl: int):
    """All steps of a chain, or of a thread's part of it: index counts directions, groups of images, and parts."""
    at, find, chain_at, room = struct(_STEPS), address_of(), struct(_CHAIN), stack(_CHAIN.itemsize)
    part_of_step = _part(mode, training, compute, vl)
    take = take_step(part_of_step)

    def run(args, ctx, index, worker):
        f, address = at(ctx), room()
        chain, mine = index // f.parts, index % f.parts
        c, group = chain_at(address), chain % f.groups
        c.args, c.ctx, c.direction = args, ctx, chain // f.groups
        c.first, c.end = group * f.batch // f.groups, (group + 1) * f.batch // f.groups
        c.sums = find(args, f.sums_operand, f.sums_offset) + chain * f.parts * f.sums_bytes
        crew, patience = find(args, f.crews_operand, f.crews_offset) + chain * f.crew_bytes, first_patience()
        for step in range(f.steps):
            if f.parts == 1:
                part_of_step(step, 0, address)
            else:
                patience = take(crew, f.parts, mine, step, patience, address)

    return compile_task(run, (mode, training, compute, vl))


class _Forward:
    """The phases of a forward, layer by layer: pack W, multiply, pack R, take the steps."""

    def __init__(self, problem: RnnProblem, split: Split, device: Cpu) -> None:
        self._problem, self._device, self._sequences = problem, device, ForwardSequences(problem, device)
        compute, take = problem.compute, self._sequences.workspace.take
        vl, self._gates, self._split = device.lanes(compute), len(GATES[problem.mode]), split
        self._chunks = chunks_of(problem.hidden, split.parts, vl)
        vectors, rows = self._gates * self._chunks.unit_vectors, problem.steps * problem.batch
        self._tile = tile_for(vectors, ceil(problem.batch / split.groups), compute, device)
        self._wide_tile = tile_for(vectors, block_rows(rows), compute, device)
        self._chunk_columns = vectors * vl
        self._columns = problem.directions * self._chunks.count * self._chunk_columns
        widths = [problem.parameters.inputs_of(layer) for layer in range(problem.layers) if layer or not problem.skip]
        self._w = take(max(widths, default=0) * self._columns)
        self._a = take(rows * self._columns if widths else 0)
        self._r = take(problem.hidden * self._columns)
        self._chains = problem.directions * split.groups
        self._sums_elems = ceil(problem.batch / split.groups) * self._chunk_columns
        self._sums = take(self._chains * self._chunks.count * self._sums_elems)
        self._crew_elems = crew_bytes(self._chunks.count) // ITEMSIZE[compute]
        self._crews = take(self._chains * self._crew_elems)
        self.workspace_bytes = self._sequences.workspace.size_bytes

    def program(self) -> SequenceProgram:
        problem, sequences = self._problem, self._sequences
        phases, keep = list(sequences.before), list(sequences.keep)
        for layer in range(problem.layers):
            tables = self._offsets(layer)
            keep += tables
            if layer or not problem.skip:
                phases += self._inputs(layer, tables[0])
            phases.append(self._packed(tables[1], self._r, problem.hidden, self._tile))
            if self._chunks.count > 1:
                zeros = NOWHERE._replace(dtype=problem.compute)
                phases.append(converted(zeros, self._crews, self._chains, self._crew_elems, self._device))
            phases += [self._steps(layer), *sequences.after(layer)]
        return SequenceProgram(problem, phases, keep)

    def _offsets(self, layer: int) -> list[np.ndarray]:
        """Of W (none: 0) and R of each direction and gate, in the block of parameters."""
        problem = self._problem
        first = layer * problem.directions
        parts = [problem.parameters.matrices(first + direction) for direction in range(problem.directions)]
        every = np.array([[part.offset if part else 0 for part in row] for row in parts], np.int64)
        return [np.ascontiguousarray(half) for half in (every[:, : self._gates], every[:, self._gates :])]

    def _packed(self, offsets: np.ndarray, to: Place, k_len: int, tile) -> Phase:
        problem = self._problem
        return turned(problem.dtype, self._sequences.w, to, offsets, k_len, problem.hidden, self._chunks, tile)

    def _inputs(self, layer: int, offsets: np.ndarray) -> list[Phase]:
        problem, x = self._problem, self._sequences.inputs(layer)
        width, rows = problem.parameters.inputs_of(layer), problem.steps * problem.batch
        pitches = width, self._columns
        product = multiplied(
            x, self._w, self._a, self._wide_tile, rows, width, self._columns, pitches, self._device
        )  # fmt: skip
        return [self._packed(offsets, self._w, width, self._wide_tile), product]

    def _steps(self, layer: int) -> Phase:
        problem, sequences, item = self._problem, self._sequences, ITEMSIZE[self._problem.compute]
        state = layer * problem.directions * problem.batch * problem.hidden
        units = self._chunks.units(self._tile.vl)
        skips = problem.skip and layer == 0
        ctx = filled(
            _STEPS,
            **place_values(
                a=sequences.x if skips else self._a,
                r=self._r,
                biases=sequences.biases(layer),
                hx=sequences.hx.beyond(state),
                cx=sequences.cx.beyond(state),
                out=sequences.outputs(layer),
                saved=sequences.of_tape(layer)[1] if problem.training else NOWHERE,
                sums=self._sums,
                crews=self._crews,
            ),
            steps=problem.steps,
            batch=problem.batch,
            directions=problem.directions,
            hidden=problem.hidden,
            groups=self._split.groups,
            parts=self._chunks.count,
            chunk_units=units,
            # Skip input is a of every gate itself, as it lies.
            a_pitch=(problem.hidden if skips else self._columns) * item,
            a_direction=0 if skips else self._chunks.count * self._chunk_columns * item,
            a_chunk=(units if skips else self._chunk_columns) * item,
            a_gate=0 if skips else units * item,
            chunk_columns=self._chunk_columns,
            chunk_bytes=self._chunk_columns * problem.hidden * item,
            sums_bytes=self._sums_elems * item,
            crew_bytes=self._crew_elems * item,
            product=self._tile.task().address,
        )
        task = _steps_task(problem.mode, problem.training, problem.compute, self._tile.vl)
        return Phase(task, self._chains * self._chunks.count, ctx)


@lru_cache(maxsize=256)
def _forward(problem: RnnProblem, split: Split, device: Cpu) -> _Forward:
    return _Forward(problem, split, device)


class Packed(Candidate[Split, Cpu]):
    """Weights packed once for all steps."""

    op, provider, algorithm = "rnn_fwd", "cpu", "packed"

    def supports(self, problem: RnnProblem, device: Cpu) -> Support:
        return YES

    def configs(self, problem: RnnProblem, device: Cpu) -> Splits:
        return splits(problem, device)

    def workspace_bytes(self, problem: RnnProblem, config: Split, device: Cpu) -> int:
        return _forward(problem, config, device).workspace_bytes

    def estimate(self, problem: RnnProblem, config: Split, device: Cpu) -> float:
        fmas = problem.flops / 4 / device.lanes(problem.compute)
        packed_ns = problem.parameters.size_elems * PACK_NS
        products = kernel_us(device, fmas, packed_ns + gate_ns(problem), device.threads, 4 * problem.layers)
        return products + step_us(problem, config, fmas, device)

    def prepare(self, problem: RnnProblem, config: Split, device: Cpu) -> SequenceProgram:
        return _forward(problem, config, device).program()


FWD = Packed()
