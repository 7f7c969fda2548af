"""Strips of a lowered image, some rows of one depth of one group of one image: how many rows, and which an index is."""

from __future__ import annotations

from functools import cache, lru_cache
from heapq import heapreplace
from math import ceil

import numpy as np
from numba import njit

from nbdnn.kernels.cpu.compile import DEVICE
from nbdnn.kernels.cpu.vector import struct

_MOST_IDLE = 0.15  # of the workers' time
_MOST_STRIPS_PER_THREAD = 12
TASKS_PER_THREAD = 4


@lru_cache(maxsize=1024)
def own_rows(height: int, width: int, outer: int, most_rows: int, tile_pixels: int, threads: int) -> int:
    """Rows of a strip such that workers that lower their own strips end together; 0 where no number of rows does that.

    outer: images (times groups and depths) of `height` rows of `width` pixels. Strips that are lowered once and read by
    all go from one core's cache to another's: between far ones 512 channels of 28x28 took 165 us, as long as half of
    their product.
    """
    best_rows, best_tiles = 0, (1 + _MOST_IDLE) * outer * height * width / tile_pixels / threads
    for wanted in range(ceil(height / most_rows), min(height, _MOST_STRIPS_PER_THREAD * threads // outer) + 1):
        rows = ceil(height / wanted)
        strips = ceil(height / rows)
        tiles = [ceil(rows * width / tile_pixels), ceil((height - (strips - 1) * rows) * width / tile_pixels)]
        busy = [0] * threads
        for index in range(outer * strips):
            heapreplace(busy, busy[0] + tiles[index % strips == strips - 1])
        if max(busy) < 0.97 * best_tiles:  # a few per cent are not worth more strips, whose edges overlap
            best_rows, best_tiles = rows, max(busy)
    return best_rows


def shared_rows(
    height: int, width: int, outer: int, most_rows: int, least_pixels: int, most_chunks: int, threads: int
) -> tuple[int, int]:
    """(rows of a strip, chunks of the output channels) for some tasks a thread, where workers may share lowered strips.

    As many strips as leave each `least_pixels`; where they are too few, each is multiplied chunk by chunk.
    """
    wanted, strips = threads * TASKS_PER_THREAD, ceil(height / most_rows)
    while outer * strips < wanted and ceil(height / (strips + 1)) * width >= least_pixels:
        strips += 1
    rows = ceil(height / strips)
    return rows, min(ceil(wanted / (outer * ceil(height / rows))), most_chunks)


@cache
def strip_address(parameters: np.dtype):
    """Compiled-in function: (image, group, depth, first row, rows, address of the lowered strip) of a strip."""
    params_at = struct(parameters)

    @njit(**DEVICE)
    def locate(ctx, index, workspace, worker):
        f = params_at(ctx)
        first_row = index % f.strips * f.strip_rows
        rest = index // f.strips
        depth, rest = rest % f.count_d, rest // f.count_d
        low = workspace + f.strip_offset + (index if f.shared else worker) * f.strip_bytes
        return rest // f.groups, rest % f.groups, depth, first_row, min(f.strip_rows, f.count_h - first_row), low

    return locate
