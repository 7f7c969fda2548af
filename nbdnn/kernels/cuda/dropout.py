"""Dropout on a GPU, by Philox4x32-10, and its gradient.

    word[i] = word i % 4 of block offset + i // 4, seed as key      kept: word >= threshold
    y[i] = x[i] * scale where kept, else 0                           dx[i] = dy[i] * scale where kept, else 0

    thread  a run of 8 elements: two blocks of the generator, a byte of the mask, 16 or 32 bytes of data; then the run
            that the whole grid is further on

Its quads are neighbours; of float32 the first ones of a warp are side by side, and the second ones: a warp's load is of
512 bytes in a row. Then two threads have half of two bytes of the mask each.

The state is read by every thread, and advanced when all have: of few elements by the kernel itself, whose blocks are
one cluster then, else by a second kernel, whose block is there by then.
Traffic: x and y once, an eighth of a byte an element of mask. Source: J. Salmon et al., Parallel random numbers: as
easy as 1, 2, 3 (SC11).
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from nbdnn.candidate import YES, NoConfig, Support
from nbdnn.device import Gpu
from nbdnn.kernels.cuda.compile import Source
from nbdnn.kernels.cuda.launch import Launch, LaunchedCandidate
from nbdnn.kernels.cuda.peaks import copy_bytes_per_s
from nbdnn.kernels.cuda.quads import QUAD
from nbdnn.problem import DEFAULT_COMPUTE, ITEMSIZE
from nbdnn.problem_dropout import BLOCK_ELEMS, DropoutProblem

_THREADS, _FEW_THREADS = 256, 64  # of a block; where there are fewer blocks than multiprocessors
# Of a multiprocessor, of blocks whose threads take one run, and several: f16, 2^27 elements 149 us, 160 with four.
_MIN_BLOCKS, _MIN_BLOCKS_OF_MANY = 4, 6
# Blocks of a cluster that takes one run a thread, and threads of a block of it. With larger ones few multiprocessors
# would move all of it (65,536 elements of float32, H200: 4.4 us, by two kernels 3.2).
_CLUSTER, _CLUSTER_THREADS = 8, (256, 512)
_RUN = 8  # elements of a byte of the mask
# Of blocks that a multiprocessor holds: beyond these a thread that draws takes several runs, whose rounds have the same
# keys; one that only reads a mask takes one run, in the order of memory (float32, 2^25 elements, H200: 68 us, not 70).
_WAVES = 8
_VECTOR_BYTES, _BLOCK_BITS = 16, 2
_LAUNCH_US = 2.5
_MOST_ELEMENTS = 2**31 - _RUN * _THREADS * 4096  # a run beyond the last is still an int32


class _Variant(NamedTuple):
    """What a kernel is compiled for. vectors: every run but the last is loaded and stored as two quads. threads: of a
    block. advances: the grid is a cluster, or a block, that advances the state. many: a thread draws for several runs.
    """

    dtype: str
    forward: bool
    vectors: bool
    threads: int
    advances: bool = False
    many: bool = False


class _Fields(NamedTuple):
    """elements, runs of 8 of them, and runs from one of a thread to its next."""

    elements: int
    runs: int
    step: int


def _kernel(*specialised_on):
    from nbdnn.kernels.cuda import ptx, ptx_cluster, ptx_philox

    variant = _Variant(*specialised_on)
    integer, word, wide = ptx.INTEGER[32], ptx.WORD, ptx.WIDE
    dtype, threads, advances = variant.dtype, variant.threads, variant.advances
    real, widen, narrow = ptx.REAL[DEFAULT_COMPUTE[dtype]], ptx.WIDEN[dtype], ptx.NARROW[dtype]
    by_vectors, drawn, conditions_of = variant.vectors, ptx_philox.drawn, ptx_philox.conditions_of
    keys_of = ptx_philox.keys(variant.many)
    load, store = _run(dtype) if by_vectors else (None, None)
    by_quads = by_vectors and ITEMSIZE[dtype] * QUAD == _VECTOR_BYTES

    @ptx.inline
    def placed(run, f):
        """The first elements of a thread's two quads, and how many elements there are from the first on, if these are
        fewer than a run."""
        at = integer(run * _RUN)
        if by_quads and integer((run | 31) * _RUN + _RUN) <= f.elements:
            first = integer(integer(run & ~31) * _RUN + integer(run & 31) * QUAD)
            return first, integer(first + 32 * QUAD), integer(_RUN)
        return at, integer(at + QUAD), integer(f.elements - at)

    @ptx.inline
    def store_halves(mask, at, after, bits):
        """Of two neighbours in a warp each has half of two bytes: the first stores the lower one."""
        odd = integer(at >> 2) & 1
        other = integer(ptx.shuffle_xor(integer(bits & 15 if odd else bits >> 4), integer(1)))
        if odd:
            mask[integer(after >> 3)] = integer(bits & 0xF0) | other
        else:
            mask[integer(at >> 3)] = integer(bits & 15) | (other << 4)

    @ptx.inline
    def load_halves(mask, at, after):
        if not by_quads:
            return integer(ptx.load_constant(mask, integer(at >> 3)))
        first, second = ptx.load_constant(mask, integer(at >> 3)), ptx.load_constant(mask, integer(after >> 3))
        low = integer(first) >> (integer(at) & 4)
        return integer((low & 15) | integer(integer(second) >> (integer(after) & 4) & 15) << 4)

    @ptx.inline
    def finish_one_by_one(source, target, at, bits, scale, f):
        place = integer(0)
        while place < _RUN and at + place < f.elements:
            value = widen(ptx.load_constant(source, integer(at + place)))
            target[integer(at + place)] = narrow(value * scale if (bits >> place) & 1 else real(0.0))
            place = integer(place + 1)

    def forward(x, y, mask, state, threshold, scale, f):
        run = integer(ptx.block_x() * threads + ptx.thread_x())
        first, keys = wide(state[1]), keys_of(wide(state[0]))
        # A threshold has 33 bits: what is not below it is larger than one less.
        least, factor = wide(threshold), real(scale)
        keeps_all, limit = least == 0, word(least - wide(1))
        if advances:
            ptx_cluster.arrive()
        while run < f.runs:
            at, after, left = placed(run, f)
            whole = by_vectors and left >= _RUN
            if by_vectors:
                values = load(x, at, after, whole)
            begin, second = wide(first + wide(at >> 2)), wide(first + wide(after >> 2))
            kept = drawn(begin, second, keys, limit, keeps_all)
            bits = ptx_philox.byte_of(kept)
            if left < _RUN:
                bits = integer(bits & ((1 << left) - 1))
            if at + QUAD == after:
                mask[run] = bits
            else:
                store_halves(mask, at, after, bits)
            if by_vectors:
                store(y, at, after, whole, ptx_philox.scaled(values, kept, factor))
            if not whole:
                finish_one_by_one(x, y, at, bits, factor, f)
            run = integer(run + f.step)
        if advances:
            ptx_cluster.wait()
            if ptx.block_x() == 0 and ptx.thread_x() == 0:
                state[1] = first + wide(integer(f.elements + BLOCK_ELEMS - 1) >> _BLOCK_BITS)

    def backward(dy, mask, dx, threshold, scale, f):
        run = integer(ptx.block_x() * threads + ptx.thread_x())
        factor = real(scale)
        while run < f.runs:
            at, after, left = placed(run, f)
            whole, bits = by_vectors and left >= _RUN, load_halves(mask, at, after)
            if by_vectors:
                values = load(dy, at, after, whole)
                store(dx, at, after, whole, ptx_philox.scaled(values, conditions_of(bits), factor))
            if not whole:
                finish_one_by_one(dy, dx, at, bits, factor, f)
            run = integer(run + f.step)

    data, of_mask, of_state, scalar = ptx.pointer(dtype), ptx.pointer("u8"), ptx.pointer("i64"), ptx.REAL["f64"]
    fields = ptx.record(_Fields, 32)
    if variant.forward:
        return forward, (data, data, of_mask, of_state, scalar, scalar, fields)
    return backward, (data, of_mask, data, scalar, scalar, fields)


def _run(dtype: str):
    """Device functions (source, at, after, wanted) -> eight float32, and (target, at, after, wanted, these): two quads,
    of 16-bit data side by side, 16 bytes at a time. They are on their way while the generator draws."""
    from nbdnn.kernels.cuda import ptx, ptx_pool_vector

    lanes = _VECTOR_BYTES // ITEMSIZE[dtype]
    load, store = ptx_pool_vector.load(dtype, lanes, constant=False), ptx_pool_vector.store(dtype, lanes)

    @ptx.inline
    def load_one(source, at, after, wanted):
        return load(source, at, wanted)

    @ptx.inline
    def store_one(target, at, after, wanted, values):
        store(target, at, wanted, values)

    @ptx.inline
    def load_two(source, at, after, wanted):
        return load(source, at, wanted) + load(source, after, wanted)

    @ptx.inline
    def store_two(target, at, after, wanted, values):
        store(target, at, wanted, values[:lanes])
        store(target, after, wanted, values[lanes:])

    return (load_one, store_one) if lanes == _RUN else (load_two, store_two)


class _Advance(NamedTuple):
    blocks: int


def _advance_kernel():
    from nbdnn.kernels.cuda import ptx

    def advance(state, f):
        if ptx.thread_x() == 0:
            state[1] += f.blocks

    return advance, (ptx.pointer("i64"), ptx.record(_Advance, 32))


class Philox(LaunchedCandidate[NoConfig]):
    """Supports every dropout of less than 2^31 elements."""

    algorithm = "philox"

    def __init__(self, op: str) -> None:
        self.op = op

    def supports(self, problem: DropoutProblem, device: Gpu) -> Support:
        if problem.elements > _MOST_ELEMENTS:
            return Support(False, f"{problem.elements} elements, at most {_MOST_ELEMENTS} have an int32 index")
        return YES

    def estimate(self, problem: DropoutProblem, config: NoConfig, device: Gpu) -> float:
        return _LAUNCH_US + problem.min_bytes / copy_bytes_per_s(device) * 1e6

    def launches(self, problem: DropoutProblem, config: NoConfig, device: Gpu) -> list[Launch]:
        forward, dtype = self.op == "dropout_fwd", problem.dtype
        runs, advances = ceil(problem.elements / _RUN), False
        threads = _THREADS if runs >= _THREADS * device.sms else _FEW_THREADS
        enough = (each for each in _CLUSTER_THREADS if runs <= _CLUSTER * each)
        if forward and device.capability >= (9, 0) and (found := next(enough, 0)):
            threads, advances = found, True
        blocks = ceil(runs / threads)
        many = forward and blocks > _WAVES * _MIN_BLOCKS_OF_MANY * device.sms
        min_blocks = _MIN_BLOCKS_OF_MANY if many else _MIN_BLOCKS
        if many:
            blocks = _WAVES * min_blocks * device.sms
        vectors = dtype != "f64" and problem.align % _VECTOR_BYTES == 0
        variant = _Variant(dtype, forward, vectors, threads, advances, many)
        main = Launch(
            source=Source(_kernel, variant, threads, min_blocks * _THREADS // max(threads, _THREADS)),
            grid=(blocks, 1, 1),
            pointers=(0, 1, 2, 3) if forward else (0, 1, 2),
            scalars="f64",
            integers=_Fields(problem.elements, runs, blocks * threads),
            cluster=blocks if advances else 1,
        )
        if advances or not forward:
            return [main]
        source, integers = Source(_advance_kernel, (), 32), _Advance(problem.blocks)
        return [main, Launch(source, (1, 1, 1), (3,), "", integers)]


assert BLOCK_ELEMS * 2 == _RUN and BLOCK_ELEMS == 1 << _BLOCK_BITS
FWD, BWD = Philox("dropout_fwd"), Philox("dropout_bwd")
