"""The launches of a recurrent network's layer that its steps do not wait for: before a forward, around a gradient.

    forward    sums of the inputs -> [the steps]
    gradient   records -> [the steps back] -> dx; parts of dW and dR -> dw

Sums over rows are split where the tiles of a parameter's gradient would leave multiprocessors idle.
"""

from __future__ import annotations

from math import ceil

from nbdnn.device import Gpu
from nbdnn.kernels.cuda import rnn_parts, rnn_product, rnn_records
from nbdnn.kernels.cuda.compile import Source
from nbdnn.kernels.cuda.launch import NULL, Launch
from nbdnn.kernels.cuda.peaks import fma_flops_per_s
from nbdnn.kernels.cuda.rnn_plan import (
    RECORD,
    ForwardMemory,
    GradientMemory,
    Place,
    index_bits,
    weights,
)
from nbdnn.kernels.cuda.rnn_product import STAGE_K, TILE, Fields, Kind
from nbdnn.problem_rnn import RnnProblem

LAUNCH_US = 3.0
_BLOCKS_OF_SM = 3  # of a product, that shall be there at least where its sums can be split
_LEAST_STAGES = 8  # of a part
_SHARE_OF_FMA = 0.4  # of the FMA units' rate, that products reach
_NO_FIELDS = Fields(*[0] * len(Fields._fields))


def sums(problem: RnnProblem, memory: ForwardMemory, layer: int) -> Launch:
    """W x of every step and gate, with the biases."""
    w, x, gates = weights(problem, layer), memory.inputs(layer), problem.parameters.gates
    width, n, skip = problem.parameters.inputs_of(layer), gates * problem.hidden, w.input < 0
    fields = _NO_FIELDS._replace(
        m=memory.rows,
        n=n,
        k=width,
        segments=1,
        stages=0 if skip else ceil(width / STAGE_K),
        a_first=x.first,
        a_m=width,
        a_k=1,
        b_first=max(w.input, 0),
        b_direction=w.next_matrices,
        b_n=width,
        b_k=1,
        out_direction=n,
        out_m=problem.directions * n,
        bias=w.input_bias,
        bias_direction=w.next_biases,
        both=2 * problem.hidden if problem.mode == "gru" else n,
        hidden=problem.hidden,
    )
    kind = _kind(problem, "sums", x.dtype, problem.dtype, problem.compute, skip=skip)
    pointers = (x.pointer, memory.operand("w").pointer, NULL, memory.sums.pointer)
    return _product(problem, kind, fields, pointers, problem.directions)


def gradient_memory(problem: RnnProblem, device: Gpu) -> GradientMemory:
    return GradientMemory(problem, _parts_of(problem, device), _part_elems(problem))


def after_steps_back(problem: RnnProblem, memory: GradientMemory, layer: int, device: Gpu) -> list[Launch]:
    """What follows from the gradients of a layer's gates: those of its inputs and its parameters."""
    return [_inputs(problem, memory, layer), *_parameters(problem, memory, layer, _parts_of(problem, device))]


def _inputs(problem: RnnProblem, memory: GradientMemory, layer: int) -> Launch:
    """The gradient of a layer's inputs, of both directions."""
    w, dx, gates = weights(problem, layer), memory.of_inputs(layer), problem.parameters.gates
    width, record = problem.parameters.inputs_of(layer), RECORD[problem.mode] * problem.hidden
    if w.input < 0:
        elements, bits = memory.rows * width, index_bits(problem)
        plain = rnn_parts.InputFields(elements, width, problem.directions, record)
        source = Source(rnn_parts.inputs_kernel, (gates, problem.dtype, bits), rnn_parts.THREADS)
        grid = (ceil(elements / rnn_parts.THREADS), 1, 1)
        return Launch(source, grid, (memory.records.pointer, dx.pointer), "", plain, bits)
    fields = _NO_FIELDS._replace(
        m=memory.rows,
        n=width,
        k=gates * problem.hidden,
        segments=problem.directions,
        stages=ceil(gates * problem.hidden / STAGE_K),
        a_segment=record,
        a_m=problem.directions * record,
        a_k=1,
        b_first=w.input,
        b_segment=w.next_matrices,
        b_n=1,
        b_k=width,
        out_first=dx.first,
        out_m=width,
    )
    kind = _kind(problem, "inputs", problem.compute, problem.dtype, dx.dtype)
    pointers = (memory.records.pointer, memory.operand("w").pointer, NULL, dx.pointer)
    return _product(problem, kind, fields, pointers, 1)


def _parameters(problem: RnnProblem, memory: GradientMemory, layer: int, parts: int) -> list[Launch]:
    """The gradients of W, R and their biases."""
    w, x, hidden = weights(problem, layer), memory.inputs(layer), problem.hidden
    width, directions = problem.parameters.inputs_of(layer), problem.directions
    inputs_columns = 0 if w.input < 0 else width
    of_x = {"b_first": x.first, "b_k": width}
    out = memory.outputs_on_tape(layer)
    state = memory.state("hx", layer)
    of_h = {"b_first": out.first, "b_direction": hidden, "b_k": directions * hidden}
    found = []
    for columns, b, where, states in ((inputs_columns, x, of_x, False), (hidden, out, of_h, True)):
        matrix, bias = (w.recurrent, w.recurrent_bias) if states else (max(w.input, 0), w.input_bias)
        found.append(_parts(problem, memory, b, columns, where, state if states else None, parts))
        found.append(_added(problem, memory, columns, parts, (matrix, w.next_matrices, bias, w.next_biases)))
    return found


def _parts(
    problem: RnnProblem,
    memory: GradientMemory,
    b: Place,
    columns: int,
    where: dict[str, int],
    state: Place | None,
    parts: int,
) -> Launch:
    """Parts of the sums over rows of a gate's gradient times b, or times the states that steps began with."""
    hidden, gates = problem.hidden, problem.parameters.gates
    m, record = gates * hidden, RECORD[problem.mode] * hidden
    part = m * (columns + 1)
    fields = _NO_FIELDS._replace(
        m=m,
        n=columns,
        k=memory.rows,
        segments=1,
        stages=ceil(ceil(memory.rows / STAGE_K) / parts),
        a_direction=record,
        a_m=1,
        a_k=problem.directions * record,
        # The gradient of n's b, of a GRU, is behind that of n's a.
        jump_at=2 * hidden if problem.mode == "gru" and state else m,
        a_jump=hidden,
        b_n=1,
        out_direction=parts * part,
        out_part=part,
        out_m=columns,
        hidden=hidden,
        batch=problem.batch,
        state_first=state.first if state else 0,
        state_direction=problem.batch * hidden,
        **where,
    )
    kind = _kind(problem, "parameters", problem.compute, b.dtype, problem.compute, states=state is not None)
    pointers = (memory.records.pointer, b.pointer, state.pointer if state else NULL, memory.parts.pointer)
    return _product(problem, kind, fields, pointers, problem.directions, parts)


def _added(
    problem: RnnProblem, memory: GradientMemory, columns: int, parts: int, to: tuple[int, int, int, int]
) -> Launch:
    m = problem.parameters.gates * problem.hidden
    part, bits = m * (columns + 1), index_bits(problem)
    fields = rnn_parts.Fields(m * columns, m, 0, parts, part, parts * part, *to)
    source = Source(rnn_parts.parts_kernel, (problem.dtype, bits), rnn_parts.THREADS)
    grid = (ceil(part / rnn_parts.THREADS), problem.directions, 1)
    return Launch(source, grid, (memory.parts.pointer, memory.operand("dw").pointer), "", fields, bits)


def records(problem: RnnProblem, memory: GradientMemory, layer: int) -> Launch:
    out, saved, dy = memory.outputs_on_tape(layer), memory.saved_on_tape(layer), memory.of_outputs(layer)
    state = memory.state("cx" if problem.has_cell else "hx", layer)
    width, bits = problem.directions * problem.hidden, index_bits(problem)
    fields = rnn_records.Fields(
        elements=memory.hidden,
        rows=memory.rows,
        batch=problem.batch,
        hidden=problem.hidden,
        width=width,
        directions=problem.directions,
        out=out.first,
        saved=saved.first,
        state=state.first,
    )
    source = Source(
        rnn_records.records_kernel, (problem.mode, problem.dtype, dy.dtype, bits), rnn_records.THREADS
    )  # fmt: skip
    pointers = (out.pointer, saved.pointer, state.pointer, dy.pointer, memory.records.pointer)
    return Launch(source, (ceil(memory.hidden / rnn_records.THREADS), 1, 1), pointers, "", fields, bits)


def _parts_of(problem: RnnProblem, device: Gpu) -> int:
    """How many parts the sums of parameters' gradients are made of."""
    tiles = problem.directions * ceil(problem.parameters.gates * problem.hidden / TILE) * ceil(problem.hidden / TILE)
    stages = ceil(problem.steps * problem.batch / STAGE_K)
    parts = max(1, min(_BLOCKS_OF_SM * device.sms // tiles, stages // _LEAST_STAGES))
    return ceil(stages / ceil(stages / parts))


def _part_elems(problem: RnnProblem) -> int:
    """Of all directions, of the largest layer's W or R and their biases."""
    layers = range(problem.layers)
    widest = max(problem.hidden, *(problem.parameters.inputs_of(layer) for layer in layers))
    return problem.directions * problem.parameters.gates * problem.hidden * (widest + 1)


def products_us(problem: RnnProblem, device: Gpu) -> float:
    """A guess at the time of everything but the steps."""
    parameters, forward = problem.parameters, problem.op == "rnn_fwd"
    widths = sum(parameters.inputs_of(layer) for layer in range(problem.layers))
    columns = widths if forward else 2 * widths + problem.layers * problem.hidden
    flops = 2 * problem.steps * problem.batch * problem.directions * parameters.gates * problem.hidden * columns
    launches = problem.layers * (1 if forward else 6)
    return launches * LAUNCH_US + flops / (_SHARE_OF_FMA * fma_flops_per_s(device, problem.compute)) * 1e6


def _kind(
    problem: RnnProblem, form: str, a: str, b: str, out: str, *, skip: bool = False, states: bool = False
) -> Kind:  # fmt: skip
    return Kind(form, a, b, out, problem.dtype, skip, states, 1, index_bits(problem))


def _product(
    problem: RnnProblem, kind: Kind, fields: Fields, pointers: tuple[int, ...], directions: int, parts: int = 1
) -> Launch:
    """Four elements are stored at once where everything in C is a multiple of that."""
    tiles_n = max(1, ceil(fields.n / TILE))
    multiples = (fields.n, fields.out_first, fields.out_direction, fields.out_part, fields.out_m)
    aligned = problem.align % 16 == 0 or pointers[3] < NULL
    if kind.out_dtype == "f32" and aligned and fields.n and not any(each % 4 for each in multiples):
        kind = kind._replace(words=4)
    fields = fields._replace(tiles_n=tiles_n)
    source = Source(rnn_product.product_kernel, kind, rnn_product.THREADS)
    grid = (ceil(fields.m / TILE) * tiles_n, directions, parts)
    return Launch(source, grid, pointers, "", fields, kind.bits)
