"""Dropout on the CPU, by Philox4x32-10, and its gradient.

    word[i] = word i % 4 of block offset + i // 4, seed as key      kept: word >= threshold
    y[i] = x[i] * scale where kept, else 0                           dx[i] = dy[i] * scale where kept, else 0

A task takes a run of elements, in pieces of 256: 64 blocks of the generator side by side, a lane each, their words put
in the order of the elements, then a bit and a product an element. The state advances when all is done. Traffic: x and y
once, and an eighth of a byte an element of mask. Source: J. Salmon et al., Parallel random numbers: as easy as 1, 2, 3.
"""

from __future__ import annotations

from functools import cache
from math import ceil

from llvmlite import ir
from numba import int64, njit, types, uint8, uint64
from numba.core.typing import signature
from numba.extending import intrinsic

from nbdnn.candidate import YES, Candidate, NoConfig, Support
from nbdnn.device import Cpu
from nbdnn.kernels.cpu.compile import DEVICE, compile_task
from nbdnn.kernels.cpu.cost import kernel_us
from nbdnn.kernels.cpu.launch import ARGS, Phase, Program
from nbdnn.kernels.cpu.vector import (
    I8,
    I32,
    I64,
    NARROW,
    NUMBA_FLOAT,
    WIDEN,
    convert,
    filled,
    pointer,
    record,
    row_types,
    splat,
    stack,
    struct,
    vector_at,
)
from nbdnn.problem import DEFAULT_COMPUTE, ITEMSIZE
from nbdnn.problem_dropout import BLOCK_ELEMS, DropoutProblem

_PIECE_BLOCKS = 64  # side by side: whole vectors of 64-bit products on every machine
_PIECE_ELEMS = BLOCK_ELEMS * _PIECE_BLOCKS
_TASKS_PER_THREAD, _LEAST_PIECES = 8, 16
# A gradient of fewer is done before another thread has woken up: 65,536 took 9 us alone and 25 with two threads, and
# 262,144 took 41 and 39 (Zen 3, AVX2).
_FEW_ELEMS = 1 << 17
_ROUNDS = 10
_NS_PER_ELEM = {"dropout_fwd": 1.0, "dropout_bwd": 0.4}  # one thread: priors for the guess

_FIELDS = record("elements", "elements_a_task")


@cache
def _words():
    """Compiled-in function: words of `_PIECE_BLOCKS` blocks from `block` on, at `to`, in the order of the elements."""
    lanes_of, words32, i64 = stack(6 * 8 * _PIECE_BLOCKS), pointer("i32"), pointer("i64")

    @njit(**DEVICE)
    def words(to, block, seed):
        lanes, low = i64(lanes_of()), uint64(0xFFFFFFFF)
        n = _PIECE_BLOCKS
        for j in range(n):
            counter = uint64(block + j)
            lanes[j], lanes[n + j] = int64(counter & low), int64(counter >> uint64(32))
            lanes[2 * n + j], lanes[3 * n + j] = 0, 0
        key0, key1 = uint64(seed) & low, (uint64(seed) >> uint64(32)) & low
        for _ in range(_ROUNDS):
            for j in range(n):
                first = uint64(lanes[j]) * uint64(0xD2511F53)
                second = uint64(lanes[2 * n + j]) * uint64(0xCD9E8D57)
                lanes[j] = int64((second >> uint64(32)) ^ uint64(lanes[n + j]) ^ key0)
                lanes[n + j] = int64(second & low)
                lanes[2 * n + j] = int64((first >> uint64(32)) ^ uint64(lanes[3 * n + j]) ^ key1)
                lanes[3 * n + j] = int64(first & low)
            key0, key1 = (key0 + uint64(0x9E3779B9)) & low, (key1 + uint64(0xBB67AE85)) & low
        found = words32(to)
        for j in range(n):
            for word in range(4):
                found[4 * j + word] = lanes[word * n + j]

    return words


@intrinsic
def _bits_of(typingctx, words, threshold):
    """A byte that says which of the 8 words at an address are, unsigned, at least `threshold` (of 33 bits)."""

    def codegen(context, builder, sig, args):
        narrow, wide = ir.VectorType(I32, 8), ir.VectorType(I64, 8)
        given = builder.load(vector_at(builder, args[0], narrow), align=4)
        kept = builder.icmp_unsigned(">=", builder.zext(given, wide), splat(builder, args[1], wide))
        return builder.bitcast(kept, I8)

    return signature(types.uint8, types.int64, types.int64), codegen


@cache
def _masked_product(dtype: str, lanes: int):
    """Intrinsic (to, source, bits, scale): 8 or 16 elements times scale where their bit is set, 0 elsewhere."""
    compute, itemsize = DEFAULT_COMPUTE[dtype], ITEMSIZE[dtype]
    stored, wide, *_ = row_types(dtype, compute, lanes)
    word = {8: types.uint8, 16: types.uint16}[lanes]

    @intrinsic
    def product(typingctx, to, source, bits, scale):
        def codegen(context, builder, sig, args):
            given = builder.load(vector_at(builder, args[1], stored), align=itemsize)
            scaled = builder.fmul(convert(builder, given, dtype, compute, lanes), splat(builder, args[3], wide))
            kept = builder.bitcast(args[2], ir.VectorType(ir.IntType(1), lanes))
            chosen = convert(builder, builder.select(kept, scaled, ir.Constant(wide, None)), compute, dtype, lanes)
            builder.store(chosen, vector_at(builder, args[0], stored), align=itemsize)
            return context.get_dummy_value()

        return signature(types.none, types.int64, types.int64, word, NUMBA_FLOAT[compute]), codegen

    return product


@cache
def _finish(dtype: str, lanes: int):
    """Compiled-in functions: bits of words against a threshold; elements by their bits."""
    data, bytes_, real = pointer(dtype), pointer("u8"), NUMBA_FLOAT[DEFAULT_COMPUTE[dtype]]
    masked_product, itemsize = _masked_product(dtype, lanes), ITEMSIZE[dtype]
    widen, narrow, words_of = WIDEN[dtype], NARROW[dtype], pointer("u8" if lanes == 8 else "f16")

    @njit(**DEVICE)
    def bits(mask, words, threshold, count):
        found = bytes_(mask)
        for byte in range((count + 7) // 8):
            found[byte] = _bits_of(words + 32 * byte, threshold)
        if count % 8:
            found[count // 8] &= uint8((1 << count % 8) - 1)

    @njit(**DEVICE)
    def product(to, source, mask, scale, count):
        given = bytes_(mask)
        for word in range(count // lanes):
            at = lanes * word * itemsize
            masked_product(to + at, source + at, words_of(mask)[word], scale)
        y, x = data(to), data(source)
        for i in range(count // lanes * lanes, count):
            y[i] = narrow(widen(x[i]) * scale if (given[i >> 3] >> (i & 7)) & 1 else real(0.0))

    return bits, product


@cache
def _task(dtype: str, forward: bool, lanes: int):
    """A run of elements: x, y, mask, state; or dy, mask, dx."""
    i64, at, args_at, real = pointer("i64"), struct(_FIELDS), struct(ARGS), NUMBA_FLOAT[DEFAULT_COMPUTE[dtype]]
    words_of, words, itemsize = stack(4 * _PIECE_ELEMS), _words(), ITEMSIZE[dtype]
    bits, product = _finish(dtype, lanes)

    def drop_out(args, ctx, index, worker):
        a, pointers, f = args_at(args), i64(args), at(ctx)
        if forward:
            source, target, mask, state = pointers[0], pointers[1], pointers[2], i64(pointers[3])
        else:
            source, mask, target, state = pointers[0], pointers[1], pointers[2], i64(pointers[0])
        threshold, scale = int64(a.alpha), real(a.beta)
        drawn = words_of()
        first = index * f.elements_a_task
        end = min(f.elements, first + f.elements_a_task)
        while first < end:
            count = min(_PIECE_ELEMS, end - first) if forward else end - first
            if forward:
                words(drawn, state[1] + first // BLOCK_ELEMS, state[0])
                bits(mask + first // 8, drawn, threshold, count)
            product(target + first * itemsize, source + first * itemsize, mask + first // 8, scale, count)
            first += count

    return compile_task(drop_out, (dtype, forward, lanes))


@cache
def _advance_task():
    """The state of the generator, once every element has its word."""
    i64, at = pointer("i64"), struct(_FIELDS)

    def advance(args, ctx, index, worker):
        i64(i64(args)[3])[1] += (at(ctx).elements + BLOCK_ELEMS - 1) // BLOCK_ELEMS

    return compile_task(advance, ())


class Philox(Candidate[NoConfig, Cpu]):
    """Supports every dropout."""

    provider, algorithm = "cpu", "philox"

    def __init__(self, op: str) -> None:
        self.op = op

    def supports(self, problem: DropoutProblem, device: Cpu) -> Support:
        return YES

    def estimate(self, problem: DropoutProblem, config: NoConfig, device: Cpu) -> float:
        return kernel_us(device, 0.0, problem.elements * _NS_PER_ELEM[self.op], device.threads)

    def prepare(self, problem: DropoutProblem, config: NoConfig, device: Cpu) -> Program:
        forward = self.op == "dropout_fwd"
        pieces = ceil(problem.elements / _PIECE_ELEMS)
        pieces_a_task = max(_LEAST_PIECES, ceil(pieces / (device.threads * _TASKS_PER_THREAD)))
        ctx = filled(_FIELDS, elements=problem.elements, elements_a_task=pieces_a_task * _PIECE_ELEMS)
        lanes = max(8, device.lanes(DEFAULT_COMPUTE[problem.dtype]))
        task = _task(problem.dtype, forward, lanes)
        few = not forward and problem.elements <= _FEW_ELEMS
        phases = [Phase(task, ceil(pieces / pieces_a_task), ctx, few=few)]
        return Program([*phases, Phase(_advance_task(), 1, ctx)] if forward else phases)


FWD, BWD = Philox("dropout_fwd"), Philox("dropout_bwd")
