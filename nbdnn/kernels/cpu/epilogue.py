"""What happens to a tile of accumulators before it is stored: activation(alpha*acc + beta*out + bias + residual).

Every kernel hands its accumulators, in the compute type, to the store of this module, so each method fuses the whole
epilogue, rounds to 16 bits exactly once, and writes any layout. Source: own.
"""

from __future__ import annotations

from functools import cache

from numba import float32, float64, njit

from nbdnn.kernels.cpu.compile import DEVICE
from nbdnn.kernels.cpu.cost import COPY_NS, GATHER_NS
from nbdnn.kernels.cpu.exponential import SIGMOID, TANH
from nbdnn.kernels.cpu.rows import convert_row, spread_row
from nbdnn.kernels.cpu.vector import NARROW, WIDEN, pointer
from nbdnn.problem import DEFAULT_COMPUTE, ITEMSIZE
from nbdnn.problem_conv import ConvProblem

# Where the operands together are larger than this, they do not stay in a last-level cache of 32 MiB: the output is
# written past the caches, which saves reading each line before it is overwritten.
_STREAM_BYTES = 20 << 20
_LINE_BYTES = 64  # what goes past the caches in smaller pieces is a write to memory for each: ten times as slow
_READ_FIRST_NS = 0.5  # one thread, an element of an output in memory whose lines are read before they are written
_PAST_CACHES = 2


def store_kind(problem: ConvProblem, adjacent: bool) -> int:
    """How a tile's lanes are stored: 0 one by one, 1 as vectors of adjacent elements, 2 past the caches."""
    streams = problem.min_bytes > _STREAM_BYTES and "beta" not in problem.epilogue
    return (_PAST_CACHES if streams else 1) if adjacent else 0


def stored_ns(problem: ConvProblem, adjacent: bool, lanes: int) -> float:
    """Nanoseconds of one thread to store an element, of tiles with rows of so many lanes: a prior for the guess."""
    if not adjacent:
        return GATHER_NS
    reads_first = store_kind(problem, adjacent) == _PAST_CACHES and lanes * ITEMSIZE[problem.dtype] % _LINE_BYTES > 0
    return COPY_NS + (_READ_FIRST_NS if reads_first else 0.0)


def is_finished(problem: ConvProblem) -> bool:
    """Whether sums are the output as they are, so that whole vectors may be stored by the inner loop itself."""
    return not problem.epilogue and problem.dtype == DEFAULT_COMPUTE[problem.dtype]


@cache
def tile_store(dtype: str, compute: str, vl: int, step: int = 1):
    """Compiled-in function that finishes and stores one tile; see the parameters of `store`.

    step: lanes that are stored as vectors are so many elements apart.
    """
    data, tile_of, index = pointer(dtype), pointer(compute), pointer("i64")
    widen, narrow = WIDEN[dtype], NARROW[dtype]
    narrow_row = convert_row(compute, dtype, vl) if step == 1 else spread_row(compute, dtype, vl, step)
    stream_row = convert_row(compute, dtype, vl, past_caches=True)
    itemsize, acc_bytes = ITEMSIZE[dtype], ITEMSIZE[compute]
    real = float32 if compute == "f32" else float64
    sigmoid, tanh = SIGMOID[compute], TANH[compute]

    @njit(**DEVICE, fastmath={"contract", "arcp", "nsz"})
    def activate(tile, first, end, code):
        if code == 1:
            for i in range(first, end):
                tile[i] = real(0.0) if tile[i] < real(0.0) else tile[i]
        elif code == 2:
            for i in range(first, end):
                tile[i] = tile[i] * sigmoid(tile[i])
        elif code == 3:
            for i in range(first, end):
                tile[i] = sigmoid(tile[i])
        elif code == 4:
            for i in range(first, end):
                tile[i] = tanh(tile[i])

    @njit(**DEVICE, fastmath={"contract", "nsz"})
    def add_tensor(tile, pitch, rows, lanes, source, row_offsets, lane_offsets, contiguous, factor):
        for m in range(rows):
            line = m * pitch
            start = row_offsets[m]
            if contiguous:
                start += lane_offsets[0]
                for j in range(lanes):
                    tile[line + j] += factor * widen(source[start + j * step])
            else:
                for j in range(lanes):
                    tile[line + j] += factor * widen(source[start + lane_offsets[j]])

    @njit(**DEVICE, fastmath={"contract", "nsz"})
    def store(tile, pitch, rows, lanes, out, row_offsets, lane_offsets, contiguous, flags, alpha, beta):
        """Element (m, j) of the tile goes to out[row_offsets[m] + lane_offsets[j]].

        tile, out, row_offsets, lane_offsets are addresses; offsets are int64 elements; `contiguous` is what
        `store_kind` says of the lanes. flags = (activation: 0 or 1 + its place in problem.ACTIVATIONS,
        bias address or 0, its steps in elements from row to row and from lane to lane, residual address or 0, whether
        beta reads out).
        """
        acc, y = tile_of(tile), data(out)
        row_off, lane_off = index(row_offsets), index(lane_offsets)
        activation, bias, bias_row_step, bias_lane_step, residual, read_out = flags
        if alpha != 1.0:
            for m in range(rows):
                for i in range(m * pitch, m * pitch + lanes):
                    acc[i] *= real(alpha)
        if read_out:
            add_tensor(acc, pitch, rows, lanes, y, row_off, lane_off, contiguous, real(beta))
        if bias:
            b = data(bias)
            for m in range(rows):
                line = m * pitch
                if bias_lane_step == 0:
                    value = widen(b[m * bias_row_step])
                    for j in range(lanes):
                        acc[line + j] += value
                else:
                    for j in range(lanes):
                        acc[line + j] += widen(b[m * bias_row_step + j * bias_lane_step])
        if residual:
            add_tensor(acc, pitch, rows, lanes, data(residual), row_off, lane_off, contiguous, real(1.0))
        if activation:
            for m in range(rows):
                activate(acc, m * pitch, m * pitch + lanes, activation)
        for m in range(rows):
            line = m * pitch
            start = row_off[m]
            if contiguous:
                to = out + (start + lane_off[0]) * itemsize
                if step == 1 and contiguous == _PAST_CACHES and (to | lanes * itemsize) % _LINE_BYTES == 0:
                    stream_row(to, tile + line * acc_bytes, lanes)
                else:
                    narrow_row(to, tile + line * acc_bytes, lanes)
            else:
                for j in range(lanes):
                    y[start + lane_off[j]] = narrow(acc[line + j])

    return store
