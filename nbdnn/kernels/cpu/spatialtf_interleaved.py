"""The spatial transformer's forward on the CPU for few channels side by side: lanes are outputs, with all channels.

    a pixel and its right neighbour are 2 * channels elements in a row, which are gathered as words of two or four

An image of three channels takes three gathers of 64 bits for both pixels, where `planar` takes six of 32. Outputs are
put side by side in registers and stored whole. 8x3x224x224 by a grid, two threads of an Emerald Rapids, milliseconds:

                   float32   bfloat16
    interleaved    1.37      1.29
    planar         2.01      3.92
    pixels         1.96      2.43

A task is a run of outputs of one image, planned once. Traffic: as `spatialtf_forward`. Source: own.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from llvmlite import ir
from numba import types
from numba.core.typing import signature
from numba.extending import intrinsic

from nbdnn.candidate import YES, NoConfig, Support
from nbdnn.device import Cpu
from nbdnn.kernels.cpu.compile import compile_task
from nbdnn.kernels.cpu.cost import kernel_us
from nbdnn.kernels.cpu.launch import Program
from nbdnn.kernels.cpu.spatialtf_forward import NOT_LAST, Forward, counts_pixels
from nbdnn.kernels.cpu.spatialtf_plan import PLAN_VECTORS, at_block, for_blocks, store_lanes, weights_of
from nbdnn.kernels.cpu.spatialtf_planes import gathered, if_weighted, pixel_offsets
from nbdnn.kernels.cpu.spatialtf_tasks import FIELDS, plan_run
from nbdnn.kernels.cpu.vector import (
    FLOAT,
    I32,
    I64,
    constant,
    convert,
    lanes_between,
    pointer,
    row_types,
    splat,
    struct,
)
from nbdnn.problem import DEFAULT_COMPUTE, ITEMSIZE
from nbdnn.problem_spatialtf import SpatialtfProblem

_MERGE = ("contract",)
_MOST_CHANNELS = 4
# One thread, nanoseconds an output: priors for the guess.
_CHANNEL_NS, _OUTPUT_NS = 0.75, 0.2


def _pick(builder: Any, one: Any, other: Any, places: Sequence[int]) -> Any:
    """Lanes of two vectors in a row, by their places."""
    return builder.shuffle_vector(one, other, ir.Constant(ir.VectorType(I32, len(places)), list(places)))


def _pixels(builder: Any, dtype: str, channels: int, starts: Any) -> list[list[Any]]:
    """[left, right], each a vector a channel in the compute type, of the pixels at a vector of addresses."""
    vl, compute, size_bytes = starts.type.count, DEFAULT_COMPUTE[dtype], ITEMSIZE[dtype]
    read, _, _, _ = row_types(dtype, compute, vl)
    word_bytes = 8 if 2 * channels * size_bytes % 8 == 0 else 4
    words = ir.VectorType(ir.IntType(8 * word_bytes), vl)
    per = word_bytes // size_bytes
    elements = ir.VectorType(ir.IntType(8 * size_bytes), vl * per)
    found = []
    for word in range(2 * channels // per):
        addresses = builder.add(starts, constant(starts.type, word * word_bytes))
        raw = builder.bitcast(gathered(builder, addresses, words, size_bytes), elements)
        for part in range(per):
            chosen = builder.bitcast(_pick(builder, raw, raw, range(part, vl * per, per)), read)
            found.append(convert(builder, chosen, dtype, compute, vl))
    return [found[:channels], found[channels:]]


def _side_by_side(builder: Any, vectors: Sequence[Any]) -> list[Any]:
    """The same elements as many vectors: lane 0 of each, then lane 1 of each."""
    count, vl = len(vectors), vectors[0].type.count
    turned = []
    for k in range(count):
        origins = [divmod(k * vl + lane, count) for lane in range(vl)]  # (lane, vector)
        merged = vectors[0]
        for j in range(1, count):
            places = [
                vl + lane if source == j else (lane if j == 1 else at) for at, (lane, source) in enumerate(origins)
            ]
            merged = _pick(builder, merged, vectors[j], places)
        turned.append(merged)
    return turned


@cache
def _sample_run(dtype: str, channels: int, vl: int):
    """Intrinsic (to, plan, source, n, pixel_bytes, down): n outputs with all their channels. down: bytes to the pixel
    below, 0 where there is none."""
    compute = DEFAULT_COMPUTE[dtype]
    vector = ir.VectorType(FLOAT[compute], vl)

    def codegen(context, builder, sig, args):
        to, plan, source, n, pixel_bytes, down = args

        def emit(i, mask):
            block = at_block(builder, plan, i, vector, PLAN_VECTORS)
            offsets = pixel_offsets(builder, block, vector, pixel_bytes)
            weights, totals = weights_of(builder, block, vector), [constant(vector, 0.0)] * channels
            for row, start in enumerate((source, builder.add(source, down))):
                pair = _pixels(builder, dtype, channels, builder.add(splat(builder, start, offsets.type), offsets))
                for weight, pixels in zip(weights[2 * row : 2 * row + 2], pair, strict=True):
                    for c, pixel in enumerate(pixels):
                        term = builder.fmul(weight, if_weighted(builder, weight, pixel), flags=_MERGE)
                        totals[c] = builder.fadd(totals[c], term, flags=_MERGE)
            left = builder.mul(builder.sub(n, i), I64(channels))
            for k, value in enumerate(_side_by_side(builder, totals)):
                first = builder.add(builder.mul(i, I64(channels)), I64(k * vl))
                wanted = None if mask is None else lanes_between(builder, vl, k * vl, None, left)
                address = builder.add(to, builder.mul(first, I64(ITEMSIZE[dtype])))
                store_lanes(builder, value, address, compute, dtype, vl, wanted)

        for_blocks(builder, n, vl, emit)
        return context.get_dummy_value()

    @intrinsic
    def sample(typingctx, to, plan, source, n, pixel_bytes, down):
        return signature(types.none, *[types.int64] * 6), codegen

    return sample


@cache
def _task(affine: bool, dtype: str, param_dtype: str, channels: int, vl: int):
    i64, at = pointer("i64"), struct(FIELDS)
    plan_outputs, sample = plan_run(affine, param_dtype, DEFAULT_COMPUTE[dtype], vl), _sample_run(dtype, channels, vl)

    def sample_pixels(args, ctx, index, worker):
        pointers, f = i64(args), at(ctx)
        plan = f.scratch + worker * f.scratch_bytes
        image, first = index // f.runs, index % f.runs * f.run
        n = min(f.run, f.outputs - first)
        plan_outputs(plan, pointers[1], image, first, n, f)
        y = pointers[2] + image * f.y_image + first * f.pixel_bytes
        sample(y, plan, pointers[0] + image * f.x_image, n, f.pixel_bytes, f.down)

    return compile_task(sample_pixels, (affine, dtype, param_dtype, channels, vl))


class Interleaved(Forward):
    """All channels of vectors of outputs."""

    algorithm = "interleaved"

    def supports(self, problem: SpatialtfProblem, device: Cpu) -> Support:
        if not (counted := counts_pixels(problem)).ok:
            return counted
        if not problem.channels_last:
            return NOT_LAST
        if not 2 <= problem.c <= _MOST_CHANNELS:
            return Support(False, f"{problem.c} channels, takes 2 to {_MOST_CHANNELS}")
        if problem.spatial[1] < 2:
            return Support(False, "rows of one pixel, which have no neighbours to gather with them")
        if problem.dtype == "f64":
            return Support(False, "two elements of float64 are more than a word")
        return YES

    def estimate(self, problem: SpatialtfProblem, config: NoConfig, device: Cpu) -> float:
        each_ns = problem.c * _CHANNEL_NS + _OUTPUT_NS
        return kernel_us(device, 0.0, problem.n * problem.positions * each_ns, device.threads)

    def prepare(self, problem: SpatialtfProblem, config: NoConfig, device: Cpu) -> Program:
        how = problem.is_affine, problem.dtype, problem.param_dtype
        return self.program(problem, device, _task(*how, problem.c, device.lanes(problem.compute)))


FWD, SAMPLER_FWD = Interleaved("spatialtf_fwd"), Interleaved("spatialtf_sampler_fwd")
