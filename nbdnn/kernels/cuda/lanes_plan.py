"""What depthwise kernels with a channel a lane know when they are compiled: tiles, shared memory, what is refused.

Channels-last, 32 neighbouring channels of a pixel are 128 bytes: a warp loads, multiplies and stores them together, and
shared memory is met without conflicts whatever pixel it is. So the tile of a thread may have any extents.
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from nbdnn.device import Gpu
from nbdnn.kernels.cuda.depthwise_plan import unit_stride_refusal
from nbdnn.kernels.cuda.peaks import copy_bytes_per_s
from nbdnn.problem_conv import ConvProblem

LANES = 32  # channels of a block
PIXEL_BYTES = 4 * LANES
TAP_BYTES = PIXEL_BYTES + 4  # of a filter: taps are written one channel at a time, and so meet different banks
CHUNK_BYTES = 16
SHARED_BYTES = 96 << 10  # of a block, at most: the smallest multiprocessors have 99 KiB
MOST_TAPS = 9  # rows, and taps of a row: larger filters are too much code
_LAUNCH_US = 3.0
_REGISTERS, _MOST_SHARED_BYTES = 65536, 224 << 10  # of a multiprocessor
_ISSUES = 128  # lanes a clock and multiprocessor


class Tile(NamedTuple):
    """Rows and columns of a thread, and threads of a block that follow each other on either axis."""

    rows: int
    columns: int
    threads_h: int
    threads_w: int

    def __str__(self) -> str:
        return f"{self.rows}x{self.columns}:{self.threads_h}x{self.threads_w}"

    @property
    def threads(self) -> int:
        return LANES * self.threads_h * self.threads_w

    @property
    def block_rows(self) -> int:
        return self.rows * self.threads_h

    @property
    def block_columns(self) -> int:
        return self.columns * self.threads_w


class Held(NamedTuple):
    """Pixels in shared memory."""

    rows: int
    columns: int

    @property
    def row_bytes(self) -> int:
        return self.columns * PIXEL_BYTES

    @property
    def shared_bytes(self) -> int:
        return self.rows * self.row_bytes


def tiles(outputs: tuple[int, ...]) -> list[Tile]:
    """Two rows a thread, and columns that such outputs fill best; as many threads as a block has use for."""
    rows, columns = outputs
    found = []
    for tile_columns in (14, 16, 8, 7):
        threads_w = min(2, ceil(columns / tile_columns))
        threads_h = min(8 // threads_w, ceil(rows / 2))
        # Blocks of equal height, where several share an image.
        threads_h = ceil(ceil(rows / 2) / ceil(ceil(rows / 2) / threads_h))
        found.append(Tile(2, tile_columns, threads_h, threads_w))
        if threads_w == 2:
            found.append(Tile(2, tile_columns, min(8, ceil(rows / 2)), 1))
    return found


def refusal(problem: ConvProblem) -> str:
    """Why no kernel with a channel a lane is correct here, or ''."""
    if refused := unit_stride_refusal(problem, ("f32",), MOST_TAPS):
        return refused
    if not (problem.channels_last and problem.y_channels_last):
        return f"layouts {problem.layout} and {problem.y_layout} are not both channels-last"
    if problem.c % (chunk := CHUNK_BYTES // 4):
        return f"{problem.c} channels are not a multiple of {chunk}"
    if problem.align < CHUNK_BYTES:
        return f"alignment of {problem.align} bytes is below {CHUNK_BYTES}"
    return ""


def min_blocks(threads: int, registers: int, shared_bytes: int) -> int:
    """Blocks of a multiprocessor that threads of so many registers leave room for."""
    return max(1, min(_REGISTERS // (threads * registers), _MOST_SHARED_BYTES // shared_bytes))


def kernel_us(problem: ConvProblem, device: Gpu, threads: int, instructions: int) -> float:
    """Microseconds of a kernel of so many threads of so many instructions, half of whose bytes move meanwhile."""
    issue_s = threads * instructions / (_ISSUES * device.sms * device.clock_hz)
    return _LAUNCH_US + (issue_s + 0.5 * problem.min_bytes / copy_bytes_per_s(device)) * 1e6
