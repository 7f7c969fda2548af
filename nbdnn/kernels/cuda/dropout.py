"""Dropout on a GPU, by Philox4x32-10, and its gradient.

    word[i] = word i % 4 of block offset + i // 4, seed as key      kept: word >= threshold
    y[i] = x[i] * scale where kept, else 0                           dx[i] = dy[i] * scale where kept, else 0

    thread  a run of 8 neighbours: two blocks of the generator, a byte of the mask, two quads of data; then the run that
            the whole grid is further on

The state is read by every thread, and a second kernel advances it when all are done. Traffic: x and y once, an eighth
of a byte an element of mask. Source: J. Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (SC11).
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

_THREADS, _MIN_BLOCKS = 256, 4
_RUN = 8  # elements of a byte of the mask
_WAVES = 4  # of blocks that a multiprocessor holds; beyond these a thread takes several runs
_ROUNDS = 10
_LAUNCH_US = 2.5
_MOST_ELEMENTS = 2**31 - _RUN * _THREADS * 4096  # a run beyond the last is still an int32


class _Variant(NamedTuple):
    """What a kernel is compiled for. quads: every run but the last is loaded and stored as two quads."""

    dtype: str
    forward: bool
    quads: bool


class _Fields(NamedTuple):
    """elements, runs of 8 of them, and runs from one of a thread to its next."""

    elements: int
    runs: int
    step: int


def _generator():
    """Device function (block, seed, threshold) -> for each of the block's four words, whether it reaches the threshold;
    all three are of 64 bits."""
    from nbdnn.kernels.cuda import ptx

    wide = ptx.WIDE

    @ptx.inline
    def half_round(a, b, key, multiplier):
        product = wide(a * multiplier)
        return wide((product >> wide(32)) ^ b ^ key), wide(product & wide(0xFFFFFFFF))

    @ptx.inline
    def reaches(block, seed, threshold):
        low = wide(0xFFFFFFFF)
        a, b, c, d = wide(block & low), wide(block >> wide(32)), wide(0), wide(0)
        key_0, key_1 = wide(seed & low), wide(seed >> wide(32))
        for _ in range(_ROUNDS):
            a_next, b_next = half_round(c, b, key_0, wide(0xCD9E8D57))
            c, d = half_round(a, d, key_1, wide(0xD2511F53))
            a, b = a_next, b_next
            key_0, key_1 = wide((key_0 + wide(0x9E3779B9)) & low), wide((key_1 + wide(0xBB67AE85)) & low)
        return a >= threshold, b >= threshold, c >= threshold, d >= threshold

    return reaches


def _kernel(*specialised_on):
    from nbdnn.kernels.cuda import ptx, quads

    variant = _Variant(*specialised_on)
    integer, wide, dtype = ptx.INTEGER[32], ptx.WIDE, variant.dtype
    real, widen, narrow = ptx.REAL[DEFAULT_COMPUTE[dtype]], ptx.WIDEN[dtype], ptx.NARROW[dtype]
    reaches, by_quads = _generator(), variant.quads
    load, store = (quads.quad(dtype, True), quads.store_quad(dtype)) if by_quads else (None, None)

    @ptx.inline
    def drawn(block, state, threshold):
        """The byte of a run's mask, all of it."""
        first = reaches(block, wide(state[0]), threshold)
        second = reaches(wide(block + wide(1)), wide(state[0]), threshold)
        bits = integer(0)
        for i in range(4):
            bits = integer(bits | (integer(first[i]) << i) | (integer(second[i]) << (i + 4)))
        return bits

    @ptx.inline
    def scaled(value, bits, place, scale):
        return value * scale if (bits >> place) & 1 else real(0.0)

    @ptx.inline
    def finish_quad(source, target, at, bits, scale):
        v = load(source, at)
        store(
            target, at,
            (scaled(v[0], bits, 0, scale), scaled(v[1], bits, 1, scale), scaled(v[2], bits, 2, scale),
             scaled(v[3], bits, 3, scale)),
        )  # fmt: skip

    @ptx.inline
    def finish_run(source, target, run, bits, scale, f):
        at = integer(run * _RUN)
        if by_quads and at + _RUN <= f.elements:
            finish_quad(source, target, at, bits, scale)
            finish_quad(source, target, integer(at + QUAD), integer(bits >> QUAD), scale)
        else:
            place = integer(0)
            while place < _RUN and at + place < f.elements:
                value = widen(ptx.load_constant(source, integer(at + place)))
                target[integer(at + place)] = narrow(scaled(value, bits, place, scale))
                place = integer(place + 1)

    def forward(x, y, mask, state, threshold, scale, f):
        run = integer(ptx.block_x() * _THREADS + ptx.thread_x())
        while run < f.runs:
            bits = drawn(wide(wide(state[1]) + wide(2) * wide(run)), state, wide(threshold))
            left = integer(f.elements - run * _RUN)
            if left < _RUN:
                bits = integer(bits & ((1 << left) - 1))
            mask[run] = bits
            finish_run(x, y, run, bits, real(scale), f)
            run = integer(run + f.step)

    def backward(dy, mask, dx, threshold, scale, f):
        run = integer(ptx.block_x() * _THREADS + ptx.thread_x())
        while run < f.runs:
            finish_run(dy, dx, run, integer(ptx.load_constant(mask, run)), real(scale), f)
            run = integer(run + f.step)

    data, of_mask, of_state, scalar = ptx.pointer(dtype), ptx.pointer("u8"), ptx.pointer("i64"), ptx.REAL["f64"]
    fields = ptx.record(_Fields, 32)
    if variant.forward:
        return forward, (data, data, of_mask, of_state, scalar, scalar, fields)
    return backward, (data, of_mask, data, scalar, scalar, fields)


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
        runs = ceil(problem.elements / _RUN)
        blocks = min(ceil(runs / _THREADS), _WAVES * _MIN_BLOCKS * device.sms)
        quads = dtype != "f64" and problem.align % (QUAD * ITEMSIZE[dtype]) == 0
        main = Launch(
            source=Source(_kernel, _Variant(dtype, forward, quads), _THREADS, _MIN_BLOCKS),
            grid=(blocks, 1, 1),
            pointers=(0, 1, 2, 3) if forward else (0, 1, 2),
            scalars="f64",
            integers=_Fields(problem.elements, runs, blocks * _THREADS),
        )
        if not forward:
            return [main]
        advance = Launch(Source(_advance_kernel, (), 32), (1, 1, 1), (3,), "", _Advance(problem.blocks))
        return [main, advance]


assert BLOCK_ELEMS * 2 == _RUN
FWD, BWD = Philox("dropout_fwd"), Philox("dropout_bwd")
