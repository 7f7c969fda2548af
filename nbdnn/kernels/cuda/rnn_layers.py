"""The launches of a recurrent network's layer that its steps do not wait for: before a forward, around a gradient.

    forward    sums of the inputs -> [the steps]
    gradient   records -> [the steps back] -> dx; parts of dW and dR -> dw

Sums over rows are split where the tiles of a parameter's gradient would leave multiprocessors idle.
"""

from __future__ import annotations

from math import ceil

from nbdnn.device import Gpu
from nbdnn.kernels.cuda import rnn_fma_product, rnn_parts, rnn_product, rnn_records
from nbdnn.kernels.cuda.compile import Source
from nbdnn.kernels.cuda.launch import NULL, Launch
from nbdnn.kernels.cuda.peaks import fma_flops_per_s, tensor_flops_per_s
from nbdnn.kernels.cuda.rnn_plan import (
    RECORD,
    ForwardMemory,
    GradientMemory,
    Place,
    index_bits,
    weights,
)
from nbdnn.kernels.cuda.rnn_product import Fields, Kind
from nbdnn.kernels.cuda.rnn_product_tile import RUN, STAGE_K, THREADS, TILE
from nbdnn.problem import ITEMSIZE
from nbdnn.problem_rnn import RnnProblem

LAUNCH_US = 3.0
_BLOCKS_OF_SM = 3  # of a product, that shall be there at least where its sums can be split
_LEAST_STAGES = 8  # of a part
_MOST_PART_BYTES = 256 << 20  # of all parts, but for the first
_SHARE_OF_FMA = 0.5  # of the FMA units' rate, that products reach
_SHARE_OF_MATRIX = 0.11  # of the matrix units' rate in TF32: a guess, 60 TFLOP/s on an H200
_FIRST_CAPABILITY = (8, 0)  # whose matrix units know TF32, and which copies to shared memory by itself
_QUAD = 4  # elements that are loaded at once
_NO_FIELDS = Fields(*[0] * len(Fields._fields))


def on_matrix_units(problem: RnnProblem, device: Gpu) -> bool:
    """Whether products are of TF32: their 16-bit factors are exact in it, and nobody else may have it."""
    return ITEMSIZE[problem.dtype] == 2 and device.capability >= _FIRST_CAPABILITY


def roundings(problem: RnnProblem, device: Gpu) -> int:
    """Factors that are neither operands nor what they were multiplied to are rounded on their way: to 10 bits, which
    is what float16 has, and 3 more than bfloat16."""
    between = problem.op == "rnn_bwd" or problem.layers > 1
    return 2 if between and on_matrix_units(problem, device) else 1


def sums(problem: RnnProblem, memory: ForwardMemory, layer: int, device: Gpu) -> Launch:
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
    kind = _kind(problem, device, "sums", (x.dtype, problem.dtype, problem.compute))._replace(skip=skip)
    pointers = (x.pointer, memory.operand("w").pointer, NULL, memory.sums.pointer)
    return _product(problem, device, kind, fields, pointers, problem.directions)


def gradient_memory(problem: RnnProblem, device: Gpu) -> GradientMemory:
    return GradientMemory(problem, _parts_of(problem, device), _part_elems(problem))


def after_steps_back(problem: RnnProblem, memory: GradientMemory, layer: int, device: Gpu) -> list[Launch]:
    """What follows from the gradients of a layer's gates: those of its inputs and its parameters."""
    return [_inputs(problem, memory, layer, device), *_parameters(problem, memory, layer, device)]


def _inputs(problem: RnnProblem, memory: GradientMemory, layer: int, device: Gpu) -> Launch:
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
    kind = _kind(problem, device, "inputs", (problem.compute, problem.dtype, dx.dtype))
    pointers = (memory.records.pointer, memory.operand("w").pointer, NULL, dx.pointer)
    return _product(problem, device, kind, fields, pointers, 1)


def _parameters(problem: RnnProblem, memory: GradientMemory, layer: int, device: Gpu) -> list[Launch]:
    """The gradients of W, R and their biases."""
    parts = _parts_of(problem, device)
    w, x, hidden = weights(problem, layer), memory.inputs(layer), problem.hidden
    width, directions = problem.parameters.inputs_of(layer), problem.directions
    inputs_columns = 0 if w.input < 0 else width
    of_x = {"b_first": x.first, "b_k": width}
    out = memory.outputs_on_tape(layer)
    state = memory.state("hx", layer)
    of_h = {"b_first": out.first, "b_direction": hidden, "b_k": directions * hidden}
    kind, found = _kind(problem, device, "parameters", (problem.compute, "", problem.compute)), []
    for columns, b, where, states in ((inputs_columns, x, of_x, False), (hidden, out, of_h, True)):
        matrix, bias = (w.recurrent, w.recurrent_bias) if states else (max(w.input, 0), w.input_bias)
        of_b = kind._replace(b_dtype=b.dtype, states=states)
        pointers = (memory.records.pointer, b.pointer, state.pointer if states else NULL, memory.parts.pointer)
        fields = _part_fields(problem, memory, columns, where, state if states else None, parts)
        found.append(_product(problem, device, of_b, fields, pointers, problem.directions, parts))
        found.append(_added(problem, memory, columns, parts, (matrix, w.next_matrices, bias, w.next_biases)))
    return found


def _part_fields(
    problem: RnnProblem,
    memory: GradientMemory,
    columns: int,
    where: dict[str, int],
    state: Place | None,
    parts: int,
) -> Fields:
    """Of parts of the sums over rows of a gate's gradient times b, or times the states that steps began with."""
    hidden, gates = problem.hidden, problem.parameters.gates
    m, record = gates * hidden, RECORD[problem.mode] * hidden
    part = m * (columns + 1)
    return _NO_FIELDS._replace(
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
    rows = TILE * (2 if problem.dtype == "f32" else 1)  # of a tile that reaches the rate of its units
    tiles = problem.directions * ceil(problem.parameters.gates * problem.hidden / rows) * ceil(problem.hidden / TILE)
    stages = ceil(problem.steps * problem.batch / STAGE_K)
    most = _MOST_PART_BYTES // (_part_elems(problem) * ITEMSIZE[problem.compute])
    parts = max(1, min(_BLOCKS_OF_SM * device.sms // tiles, stages // _LEAST_STAGES, most))
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
    if on_matrix_units(problem, device):
        flops_per_s = _SHARE_OF_MATRIX * tensor_flops_per_s(device, "f32", tf32=True)
    else:
        flops_per_s = _SHARE_OF_FMA * fma_flops_per_s(device, problem.compute)
    return launches * LAUNCH_US + flops / flops_per_s * 1e6


def _kind(problem: RnnProblem, device: Gpu, form: str, dtypes: tuple[str, str, str]) -> Kind:
    """dtypes: of A, B and C. Elements are loaded and stored one by one."""
    bits, matrix = index_bits(problem), on_matrix_units(problem, device)
    return Kind(form, *dtypes, problem.dtype, False, False, matrix, 1, 1, 1, bits)


def _product(
    problem: RnnProblem,
    device: Gpu,
    kind: Kind,
    fields: Fields,
    pointers: tuple[int, ...],
    directions: int,
    parts: int = 1,
) -> Launch:
    dtypes = {kind.a_dtype, kind.b_dtype, kind.state_dtype, kind.out_dtype}
    by_tiles = dtypes == {"f32"} and kind.bits == 32 and device.capability >= _FIRST_CAPABILITY
    kind = _at_once(problem, kind, fields, pointers, by_tiles or kind.matrix)
    if by_tiles:
        return _fma_product(device, kind, fields, pointers, directions, parts)
    fields = fields._replace(tiles_n=max(1, ceil(fields.n / TILE)))
    source = Source(rnn_product.product_kernel, kind, THREADS)
    grid = (ceil(fields.m / TILE) * fields.tiles_n, directions, parts)
    return Launch(source, grid, pointers, "", fields, kind.bits)


def _fma_product(
    device: Gpu, kind: Kind, fields: Fields, pointers: tuple[int, ...], directions: int, parts: int
) -> Launch:
    """In float32, by tiles that are copied to shared memory while others are multiplied."""
    tile = rnn_fma_product.tile_of(fields.m, fields.n, directions * parts, device)
    v = rnn_fma_product.variant(kind.form, kind.skip, kind.states, tile, kind.a_lanes, kind.b_lanes, kind.words)
    tiles_n, stages = max(1, ceil(fields.n / tile.n)), fields.stages * STAGE_K // rnn_fma_product.DEPTH
    source = Source(rnn_fma_product.product_kernel, v, tile.threads, tile.min_blocks)
    grid = (ceil(fields.m / tile.m) * tiles_n, directions, parts)
    return Launch(source, grid, pointers, "", fields._replace(tiles_n=tiles_n, stages=stages), 32)


def _at_once(problem: RnnProblem, kind: Kind, f: Fields, pointers: tuple[int, ...], loads: bool) -> Kind:
    """With neighbours stored at once, and if `loads` loaded at once, where all begin at multiples of that."""

    def fits(count: int, extent: int, dtypes: dict[int, str], *places: int) -> bool:
        """dtypes: of the memory behind each pointer. The workspace is aligned to more than anybody asks for."""
        of_operands = [ITEMSIZE[dtype] for pointer, dtype in dtypes.items() if pointer >= 0]
        aligned = all(problem.align % (count * size_bytes) == 0 for size_bytes in of_operands)
        return aligned and extent > 0 and not any(each % count for each in (extent, *places))

    a, b, state, out = pointers
    run, of_c = RUN[kind.matrix], (f.out_first, f.out_direction, f.out_part, f.out_m)
    if (kind.matrix or kind.out_dtype == "f32") and fits(run, f.n, {out: kind.out_dtype}, *of_c):
        kind = kind._replace(words=run)
    if not loads:
        return kind
    extent, step = (f.k, f.a_m) if kind.a.along_k else (f.m, f.a_k)
    of_a = (f.a_first, f.a_direction, f.a_segment, step, f.jump_at, f.a_jump)
    if fits(_QUAD, extent, {a: kind.a_dtype}, *of_a):
        kind = kind._replace(a_lanes=_QUAD)
    extent, step = (f.k, f.b_n) if kind.b.along_k else (f.n, f.b_k)
    of_b = (f.b_first, f.b_direction, f.b_segment, step)
    of_state = (f.hidden, f.state_first, f.state_direction) if kind.states else ()
    if fits(_QUAD, extent, {b: kind.b_dtype, state: kind.state_dtype}, *of_b, *of_state):
        kind = kind._replace(b_lanes=_QUAD)
    return kind
