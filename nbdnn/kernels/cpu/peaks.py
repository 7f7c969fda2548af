"""What this CPU can do at most: fused multiply-adds from registers, or matrix units from the first-level cache, and a
copy through memory.

Their floor of a problem is what a kernel's time is compared with. A method that needs fewer multiplications than the
definition (Winograd, FFT) may go below it.
"""

from __future__ import annotations

from functools import cache
from time import perf_counter
from typing import NamedTuple

import numpy as np

from nbdnn.device import Cpu
from nbdnn.kernels.cpu.amx import (
    LINE,
    TILE,
    TILE_BYTES,
    block_product,
    configure,
    products,
    refused,
    release,
    tile_shapes,
)
from nbdnn.kernels.cpu.compile import compile_task
from nbdnn.kernels.cpu.launch import Phase, Program
from nbdnn.kernels.cpu.micro_kernel import PAIRS, micro_kernel
from nbdnn.kernels.cpu.pack_pairs import VL
from nbdnn.kernels.cpu.rows import convert_row
from nbdnn.kernels.cpu.vector import pointer, stack
from nbdnn.problem import ITEMSIZE, Problem

_MR, _NV, _STEPS = 6, 2, 20_000  # 12 independent accumulators: more than latency x ports of any core
_TILE_STEPS, _TILE_BLOCKS, _TILE_ALIGN = 8, 200, 4096  # 18 KiB of operands
_COPY_BYTES, _CACHES = 1 << 20, 2
_TASKS_A_THREAD, _REPEATS = 32, 12


class Peaks(NamedTuple):
    """Floating-point operations a second in the compute type, and bytes a second of a copy, read plus written."""

    flops_per_s: float
    bytes_per_s: float


def floor_us(problem: Problem, device: Cpu) -> float:
    """Microseconds below which no kernel that does every multiplication and touches every byte can go."""
    pairs = problem.dtype == "bf16" and device.multiplies_bf16 and device.lanes("f32") == VL
    peaks = measured(device, "f64" if problem.compute == "f64" else "f32", pairs)
    flops_per_s = peaks.flops_per_s
    if not refused(problem.dtype, device):
        flops_per_s = max(flops_per_s, tile_flops_per_s(device) / products(problem.dtype))
    return max(problem.flops / flops_per_s, problem.min_bytes / peaks.bytes_per_s) * 1e6


@cache
def tile_flops_per_s(device: Cpu) -> float:
    """Of bfloat16 on matrix units, all threads."""
    tasks = device.threads * _TASKS_A_THREAD
    operands = np.zeros((2 + 2 * _TILE_STEPS) * TILE_BYTES + _TILE_ALIGN, np.uint8)
    sums = np.zeros(device.threads * 4 * TILE_BYTES + _TILE_ALIGN, np.uint8)
    shapes = tile_shapes(LINE)
    offsets = np.array([*[0] * _TILE_STEPS, 0, TILE_BYTES], np.int64)  # of each step of A; of the two tiles of B
    pointers = *(-(-each.ctypes.data // _TILE_ALIGN) * _TILE_ALIGN for each in (operands, sums)), shapes.ctypes.data
    burn = Program([Phase(_tiles_task(), tasks, offsets)])
    return 2.0 * (2 * TILE) ** 2 * LINE * _TILE_STEPS * _TILE_BLOCKS * tasks / _best(burn, pointers)


@cache
def _tiles_task():
    """Two by two tiles, multiplied over and over."""
    product, i64 = block_product(1, 2, 2), pointer("i64")

    def burn_tiles(args, ctx, index, worker):
        operands, sums, shapes = i64(args)[0], i64(args)[1] + worker * 4 * TILE_BYTES, i64(args)[2]
        configure(shapes)
        for _ in range(_TILE_BLOCKS):
            b = operands + 2 * TILE_BYTES
            product(
                2, operands, 2 * LINE, 0, ctx, _TILE_STEPS, b, 2 * TILE_BYTES, ctx + 8 * _TILE_STEPS, 0,
                sums, 8 * TILE, 4 * TILE,
            )  # fmt: skip
        release()

    return compile_task(burn_tiles, ())


@cache
def measured(device: Cpu, compute: str, pairs: bool = False) -> Peaks:
    """The best of several short runs on all threads of the device; pairs: of bfloat16 are multiplied at once."""
    tasks = device.threads * _TASKS_A_THREAD
    vl = device.lanes(compute)
    flops = 2.0 * (1 + pairs) * _MR * _NV * vl * _STEPS * tasks
    factors = np.zeros(_NV * device.vector_bytes, np.uint8)
    burn = Program([Phase(_burn_task(compute, vl, pairs), tasks, np.zeros(1, np.int64))])
    burn_s = _best(burn, (factors.ctypes.data,))

    chunks = max(tasks, -(-_CACHES * device.llc_bytes // _COPY_BYTES))
    source, target = np.ones(chunks * _COPY_BYTES, np.uint8), np.ones(chunks * _COPY_BYTES, np.uint8)
    copy = Program([Phase(_copy_task(device.lanes("f32")), chunks, np.zeros(1, np.int64))])
    copy_s = _best(copy, (source.ctypes.data, target.ctypes.data))
    return Peaks(flops / burn_s, 2.0 * chunks * _COPY_BYTES / copy_s)


def _best(program: Program, pointers: tuple[int, ...]) -> float:
    seconds = []
    for _ in range(_REPEATS):
        start = perf_counter()
        program(pointers, (1.0, 0.0))
        seconds.append(perf_counter() - start)
    return min(seconds)


@cache
def _burn_task(compute: str, vl: int, pairs: bool):
    """One register tile, multiplied by the same two vectors over and over."""
    micro = micro_kernel(compute, _MR, _NV, vl, 0, 0, False, PAIRS if pairs else compute)
    pitch = _NV * vl * ITEMSIZE[compute]
    i64, rows_of, tile_of = pointer("i64"), stack(8 * _MR), stack(_MR * pitch)

    def burn(args, ctx, index, worker):
        rows, factors = rows_of(), i64(args)[0]
        for row in range(_MR):
            i64(rows)[row] = factors
        micro(rows, 0, factors, 0, _STEPS, tile_of(), pitch)

    return compile_task(burn, (compute, vl, pairs))


@cache
def _copy_task(vl: int):
    """One piece of a long copy."""
    copy_row = convert_row("f32", "f32", vl)
    i64 = pointer("i64")

    def copy(args, ctx, index, worker):
        start = index * _COPY_BYTES
        copy_row(i64(args)[1] + start, i64(args)[0] + start, _COPY_BYTES // 4)

    return compile_task(copy, vl)
