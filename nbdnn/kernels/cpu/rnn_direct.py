"""Recurrent networks as they are written, one image at a time: every mode, direction, depth, input and dtype.

    forward    for each step: a_g = W_g x, b_g = R_g h by dot products of rows, then the gates
    backward   for each step back: the gates' gradients, then dh += R_g^T db_g and dx += W_g^T da_g row by row;
               then each row of dW_g, dR_g: the sum over steps and images of its gradient times x or h

Layers follow each other; within one a task is a direction of an image, in the backward both of an image, and then a
row of a matrix. Nothing is packed: the parameters are read where they lie, once a step and image. Sums in float32
(float64), in one order. This is the candidate that supports everything, and ends the lists. Source: own.
"""

from __future__ import annotations

from functools import cache, lru_cache

import numpy as np
from numba import njit

from nbdnn.candidate import YES, Candidate, NoConfig, Support
from nbdnn.device import Cpu
from nbdnn.kernels.cpu.compile import DEVICE, FASTMATH, compile_task
from nbdnn.kernels.cpu.cost import kernel_us
from nbdnn.kernels.cpu.launch import Phase
from nbdnn.kernels.cpu.rnn_gates import backward_step, bias_rows, forward_step, slots
from nbdnn.kernels.cpu.rnn_memory import BackwardSequences, ForwardSequences
from nbdnn.kernels.cpu.rnn_program import NOWHERE, Place, SequenceProgram, address_of, place_fields, place_values
from nbdnn.kernels.cpu.rows import zero_fill
from nbdnn.kernels.cpu.vector import NUMBA_FLOAT, WIDEN, filled, pointer, record, struct
from nbdnn.problem import DEFAULT_COMPUTE, ITEMSIZE
from nbdnn.problem_rnn import SAVED, RnnProblem
from nbdnn.rnn_parameters import GATES

_NS_PER_MAC = 0.2  # one thread, float32: a prior for the guess, not a measurement of this machine
_EXTENTS = ("steps", "batch", "directions", "width", "hidden", "table")
_FORWARD = record(*place_fields("x", "w", "biases", "hx", "cx", "out", "saved", "scratch"), *_EXTENTS)
_BACKWARD = record(*place_fields("w", "hx", "cx", "out", "saved", "dy", "dh", "dc", "dx", "gradients"), *_EXTENTS)
_PARAMETERS = record(*place_fields("x", "hx", "out", "gradients", "dw"), "matrices", "gradients", *_EXTENTS)


@cache
def _products(dtype: str):
    """Compiled-in functions of a row of w and one of the compute type: their dot product; and adding the former, times
    a number, to the latter."""
    compute = DEFAULT_COMPUTE[dtype]
    weights, values, widen = pointer(dtype), pointer(compute), WIDEN[dtype]
    zero = NUMBA_FLOAT[compute](0)

    @njit(**DEVICE, fastmath=FASTMATH | {"reassoc"})
    def dot(w, x, n):
        a, b, total = weights(w), values(x), zero
        for i in range(n):
            total += widen(a[i]) * b[i]
        return total

    @njit(**DEVICE, fastmath=FASTMATH)
    def add(to, w, factor, n):
        a, b = weights(w), values(to)
        for i in range(n):
            b[i] += widen(a[i]) * factor

    return dot, add


def _first_matrices(problem: RnnProblem, layer: int) -> np.ndarray:
    """(first W or -1, first R) of each direction, in elements of the block: the others of a kind follow."""
    found = []
    for direction in range(problem.directions):
        matrices = problem.parameters.matrices(layer * problem.directions + direction)
        inputs, recurrent = matrices[0], matrices[len(GATES[problem.mode])]
        found.append((inputs.offset if inputs else -1, recurrent.offset if recurrent else -1))
    return np.array(found, np.int64)


@cache
def _forward_task(dtype: str, mode: str, training: bool, vl: int):
    """All steps of one direction of one image: index = direction * batch + image."""
    compute, gates, biased = DEFAULT_COMPUTE[dtype], len(GATES[mode]), len(bias_rows(mode))
    i64, at, find, values = pointer("i64"), struct(_FORWARD), address_of(), pointer(compute)
    step_gates, (dot, _) = forward_step(mode, training, compute, vl), _products(dtype)
    item, acc, saved_rows, is_lstm = ITEMSIZE[dtype], ITEMSIZE[compute], SAVED[mode], mode == "lstm"

    def run(args, ctx, index, worker):
        f = at(ctx)
        direction, image, h, width = index // f.batch, index % f.batch, f.hidden, f.width
        row_bytes = h * acc
        w, first_w, first_r = (
            find(args, f.w_operand, f.w_offset),
            i64(f.table)[2 * direction],
            i64(f.table)[2 * direction + 1],
        )
        biases = find(args, f.biases_operand, f.biases_offset) + direction * biased * row_bytes
        a = find(args, f.scratch_operand, f.scratch_offset) + index * 2 * gates * row_bytes
        b, saved = a + gates * row_bytes, 0
        before = find(args, f.hx_operand, f.hx_offset) + index * row_bytes
        cell = find(args, f.cx_operand, f.cx_offset) + index * row_bytes
        for step in range(f.steps):
            t = f.steps - 1 - step if direction else step
            x = find(args, f.x_operand, f.x_offset) + (t * f.batch + image) * width * acc
            for row in range(gates * h):
                values(b)[row] = dot(w + (first_r + row * h) * item, before, h)
                values(a)[row] = (
                    values(x)[row % h] if first_w < 0 else dot(w + (first_w + row * width) * item, x, width)
                )
            place = (t * f.batch + image) * f.directions + direction
            state, out = cell if is_lstm else before, find(args, f.out_operand, f.out_offset) + place * row_bytes
            if training:
                saved = find(args, f.saved_operand, f.saved_offset) + place * saved_rows * row_bytes
                cell = saved + (saved_rows - 1) * row_bytes
            step_gates(h, a, row_bytes, b, row_bytes, biases, row_bytes, state, out, cell, saved, row_bytes)
            before = out

    return compile_task(run, (dtype, mode, training, vl), fastmath=FASTMATH)


@cache
def _backward_task(dtype: str, mode: str, vl: int):
    """All steps back of one image, in one direction after the other; adds both to dx."""
    compute, gates, of = DEFAULT_COMPUTE[dtype], len(GATES[mode]), slots(mode)
    i64, at, find, values = pointer("i64"), struct(_BACKWARD), address_of(), pointer(compute)
    step_gates, (_, add), fill = backward_step(mode, compute, vl), _products(dtype), zero_fill(compute)
    item, acc, saved_rows, is_lstm, is_gru = (
        ITEMSIZE[dtype],
        ITEMSIZE[compute],
        SAVED[mode],
        mode == "lstm",
        mode == "gru",
    )
    of_inputs, of_recurrences, count = of.of_inputs, of.of_recurrences, of.total

    def run(args, ctx, image, worker):
        f = at(ctx)
        h, width, row_bytes = f.hidden, f.width, f.hidden * acc
        w, outputs = find(args, f.w_operand, f.w_offset), find(args, f.out_operand, f.out_offset)
        saved_base, dy_base = find(args, f.saved_operand, f.saved_offset), find(args, f.dy_operand, f.dy_offset)
        dx_base, gradient_base = (
            find(args, f.dx_operand, f.dx_offset),
            find(args, f.gradients_operand, f.gradients_offset),
        )
        for t in range(f.steps):
            fill(dx_base + (t * f.batch + image) * width * acc, width)
        for direction in range(f.directions):
            first_w, first_r = i64(f.table)[2 * direction], i64(f.table)[2 * direction + 1]
            state = (direction * f.batch + image) * row_bytes
            dh, carried = find(args, f.dh_operand, f.dh_offset) + state, find(args, f.dc_operand, f.dc_offset) + state
            hx, cx = find(args, f.hx_operand, f.hx_offset) + state, find(args, f.cx_operand, f.cx_offset) + state
            for step in range(f.steps - 1, -1, -1):
                t, earlier = (f.steps - 1 - step, f.steps - step) if direction else (step, step - 1)
                place = (t * f.batch + image) * f.directions + direction
                last = (earlier * f.batch + image) * f.directions + direction
                saved = saved_base + place * saved_rows * row_bytes
                if is_lstm:
                    before = saved_base + (last * saved_rows + saved_rows - 1) * row_bytes if step else cx
                else:
                    before = outputs + last * row_bytes if step else hx
                gradients = gradient_base + place * count * row_bytes
                out, dy = outputs + place * row_bytes, dy_base + place * row_bytes
                step_gates(h, saved, row_bytes, out, before, dy, dh, carried, gradients, row_bytes)
                fill(dh, h)
                dx = dx_base + (t * f.batch + image) * width * acc
                for gate in range(gates):
                    db, da = (
                        values(gradients + of_recurrences[gate] * row_bytes),
                        values(gradients + of_inputs[gate] * row_bytes),
                    )
                    for j in range(h):
                        add(dh, w + (first_r + (gate * h + j) * h) * item, db[j], h)
                        if first_w < 0:
                            values(dx)[j] += da[j]
                        else:
                            add(dx, w + (first_w + (gate * h + j) * width) * item, da[j], width)
            if is_gru:
                for j in range(h):
                    values(dh)[j] += values(carried)[j]

    return compile_task(run, (dtype, mode, vl), fastmath=FASTMATH)


@cache
def _parameters_task(compute: str):
    """A row of a matrix, and its bias: index counts directions, the matrices of each (W, then R), and their rows.

    table: of each matrix, offset in dw (-1 where there is none), offset of its bias, and which gradient is its own.
    """
    i64, at, find, values = pointer("i64"), struct(_PARAMETERS), address_of(), pointer(compute)
    (_, add), fill, acc, zero = _products(compute), zero_fill(compute), ITEMSIZE[compute], NUMBA_FLOAT[compute](0)

    def run(args, ctx, index, worker):
        f = at(ctx)
        h, number, j = f.hidden, index // f.hidden, index % f.hidden
        direction, is_recurrent = number // f.matrices, number % f.matrices >= f.matrices // 2
        matrix, bias, slot = (i64(f.table)[3 * number], i64(f.table)[3 * number + 1], i64(f.table)[3 * number + 2])
        dw, width = find(args, f.dw_operand, f.dw_offset), h if is_recurrent else f.width
        outputs, hx = find(args, f.out_operand, f.out_offset), find(args, f.hx_operand, f.hx_offset)
        row, of_bias = dw + (matrix + j * width) * acc, values(dw + bias * acc)
        if matrix >= 0:
            fill(row, width)
        of_bias[j] = zero
        for t in range(f.steps):
            earlier = t + 1 if direction else t - 1
            for image in range(f.batch):
                place = (t * f.batch + image) * f.directions + direction
                gradients = find(args, f.gradients_operand, f.gradients_offset) + place * f.gradients * h * acc
                gradient = values(gradients + slot * h * acc)[j]
                of_bias[j] += gradient
                if matrix < 0:
                    continue
                if not is_recurrent:
                    factor = find(args, f.x_operand, f.x_offset) + (t * f.batch + image) * width * acc
                elif 0 <= earlier < f.steps:
                    factor = outputs + ((earlier * f.batch + image) * f.directions + direction) * h * acc
                else:
                    factor = hx + (direction * f.batch + image) * h * acc
                add(row, factor, gradient, width)

    return compile_task(run, (compute,), fastmath=FASTMATH)


def _layer_values(problem: RnnProblem, layer: int, table: np.ndarray) -> dict[str, int]:
    return {
        "steps": problem.steps,
        "batch": problem.batch,
        "directions": problem.directions,
        "width": problem.parameters.inputs_of(layer),
        "hidden": problem.hidden,
        "table": table.ctypes.data,
    }


class _Forward:
    """The phases of a forward; scratch: a and b of every direction of every image."""

    def __init__(self, problem: RnnProblem, device: Cpu) -> None:
        self._problem, self._device = problem, device
        self._sequences = ForwardSequences(problem, device)
        tasks, gates = problem.directions * problem.batch, len(GATES[problem.mode])
        self._scratch = self._sequences.workspace.take(tasks * 2 * gates * problem.hidden)
        self.workspace_bytes = self._sequences.workspace.size_bytes

    def program(self) -> SequenceProgram:
        problem, sequences = self._problem, self._sequences
        phases, keep = list(sequences.before), list(sequences.keep)
        task = _forward_task(problem.dtype, problem.mode, problem.training, self._device.lanes(problem.compute))
        of_layer = problem.directions * problem.batch * problem.hidden
        for layer in range(problem.layers):
            table = _first_matrices(problem, layer)
            ctx = filled(
                _FORWARD,
                **_layer_values(problem, layer, table),
                **place_values(
                    x=sequences.inputs(layer),
                    w=sequences.w,
                    biases=sequences.biases(layer),
                    hx=sequences.hx.beyond(layer * of_layer),
                    cx=sequences.cx.beyond(layer * of_layer),
                    out=sequences.outputs(layer),
                    saved=sequences.of_tape(layer)[1] if problem.training else NOWHERE,
                    scratch=self._scratch,
                ),
            )
            phases += [Phase(task, problem.directions * problem.batch, ctx), *sequences.after(layer)]
            keep.append(table)
        return SequenceProgram(problem, phases, keep)


class _Backward:
    """The phases of a gradient; gradients: of a and b, (t, b, directions, which, h)."""

    def __init__(self, problem: RnnProblem, device: Cpu) -> None:
        self._problem, self._device = problem, device
        self._sequences = BackwardSequences(problem, device)
        self._count = slots(problem.mode).total
        rows = problem.steps * problem.batch * problem.directions
        self._gradients = self._sequences.workspace.take(rows * self._count * problem.hidden)
        self.workspace_bytes = self._sequences.workspace.size_bytes

    def program(self) -> SequenceProgram:
        problem, sequences = self._problem, self._sequences
        phases, keep = list(sequences.before), list[np.ndarray]()
        for layer in reversed(range(problem.layers)):
            steps, steps_table = self._steps_phase(layer)
            parameters, parameters_table = self._parameters_phase(layer)
            phases += [steps, parameters]
            keep += [steps_table, parameters_table]
        return SequenceProgram(problem, [*phases, *sequences.after()], keep)

    def _places(self, layer: int) -> dict[str, Place]:
        problem, sequences = self._problem, self._sequences
        state = layer * problem.directions * problem.batch * problem.hidden
        outputs, _ = sequences.of_tape(layer)
        return {"hx": sequences.hx.beyond(state), "out": outputs, "gradients": self._gradients}

    def _steps_phase(self, layer: int) -> tuple[Phase, np.ndarray]:
        problem, sequences, table = self._problem, self._sequences, _first_matrices(self._problem, layer)
        state = layer * problem.directions * problem.batch * problem.hidden
        ctx = filled(
            _BACKWARD,
            **_layer_values(problem, layer, table),
            **place_values(
                **self._places(layer),
                w=sequences.w,
                cx=sequences.cx.beyond(state),
                saved=sequences.of_tape(layer)[1],
                dy=sequences.of_outputs(layer),
                dh=sequences.dh.beyond(state),
                dc=(sequences.dc if problem.has_cell else sequences.carried).beyond(state),
                dx=sequences.of_inputs(layer),
            ),
        )
        task = _backward_task(problem.dtype, problem.mode, self._device.lanes(problem.compute))
        return Phase(task, problem.batch, ctx), table

    def _parameters_phase(self, layer: int) -> tuple[Phase, np.ndarray]:
        problem, sequences, of = self._problem, self._sequences, slots(self._problem.mode)
        rows = []
        for p in range(layer * problem.directions, (layer + 1) * problem.directions):
            parts = zip(problem.parameters.matrices(p), problem.parameters.biases(p), strict=True)
            which = (*of.of_inputs, *of.of_recurrences)
            rows += [(m.offset if m else -1, b.offset, slot) for (m, b), slot in zip(parts, which, strict=True)]
        table = np.array(rows, np.int64)
        ctx = filled(
            _PARAMETERS,
            **_layer_values(problem, layer, table),
            **place_values(**self._places(layer), x=sequences.inputs(layer), dw=sequences.dw),
            matrices=len(rows) // problem.directions,
            gradients=of.total,
        )
        return Phase(_parameters_task(problem.compute), len(rows) * problem.hidden, ctx), table


def _method(problem: RnnProblem, device: Cpu) -> _Forward | _Backward:
    return (_Forward if problem.op == "rnn_fwd" else _Backward)(problem, device)


@lru_cache(maxsize=256)
def _workspace_bytes(problem: RnnProblem, device: Cpu) -> int:
    return _method(problem, device).workspace_bytes


class Direct(Candidate[NoConfig, Cpu]):
    """The sums as written; supports everything."""

    provider, algorithm = "cpu", "direct"

    def __init__(self, op: str) -> None:
        self.op = op

    def supports(self, problem: RnnProblem, device: Cpu) -> Support:
        return YES

    def workspace_bytes(self, problem: RnnProblem, config: NoConfig, device: Cpu) -> int:
        return _workspace_bytes(problem, device)

    def estimate(self, problem: RnnProblem, config: NoConfig, device: Cpu) -> float:
        images = problem.batch * (problem.directions if self.op == "rnn_fwd" else 1)
        threads = max(1, min(device.threads, images))
        return kernel_us(device, 0.0, problem.flops / 2 * _NS_PER_MAC * device.threads / threads, device.threads)

    def prepare(self, problem: RnnProblem, config: NoConfig, device: Cpu) -> SequenceProgram:
        return _method(problem, device).program()


FWD, BWD = Direct("rnn_fwd"), Direct("rnn_bwd")
