"""What depthwise kernels on tensor cores know when they are compiled: tiles, planes in shared memory, what is refused.

One instruction takes 16 rows of 16 columns of a plane times a band: 8 columns of outputs see 8 + taps - 1 columns, so a
filter row of up to 9 taps is one instruction, and 16 taps more another one. Tiles begin at multiples of 8 outputs.
Planar, rows are copied in runs of up to 8 elements, which begin at multiples of their own length: a tile's columns then
begin `shift` before the first one that its taps reach, as far as the band has room for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil
from typing import NamedTuple

from nbdnn.device import Gpu
from nbdnn.kernels.cpu.geometry import tensor_strides
from nbdnn.kernels.cuda.depthwise_plan import unit_stride_refusal
from nbdnn.kernels.cuda.peaks import copy_bytes_per_s
from nbdnn.problem_conv import ConvProblem

VECTOR = 8  # channels or columns in 16 bytes
CHUNK_BYTES = 16
MOST_TAPS = 15  # rows of a filter, or taps of a row: what they are multiplied with stays in registers
SHARED_BYTES = 96 << 10  # of a block, at most: the smallest multiprocessors have 99 KiB
_LEAST_COPY_BYTES = 4  # that go to shared memory asynchronously
_STEP = 16  # columns that one instruction multiplies
_BANKS_BYTES = 128
_REGISTERS = 65536
_LAUNCH_US = 3.0
_TURN_INSTRUCTIONS = 60  # for eight channels of two pixels
_SCHEDULERS = 4  # of a multiprocessor
_WAITING = 1.5  # times what issuing takes: a block fills its planes, then multiplies, then empties them


class Tile(NamedTuple):
    """Outputs of a block: rows in multiples of 16, columns and channels in multiples of 8."""

    rows: int
    columns: int
    channels: int

    def __str__(self) -> str:
        return f"{self.rows}x{self.columns}x{self.channels}"

    @property
    def high(self) -> int:
        """Instructions over its rows."""
        return self.rows // 16

    @property
    def wide(self) -> int:
        """Instructions over its columns."""
        return self.columns // VECTOR


class Planes(NamedTuple):
    """An image's planes in shared memory: `rows` rows of `chunks` 16-byte chunks, and behind them one of zeros.

    The plane of channel 8 * v + e of a block is the (e * vectors + v)-th: channels-last, a warp fills or empties
    planes that follow each other, which lie so that it meets every bank once. A row has an odd number of chunks, for
    the same reason: matrices are loaded by 8 rows.
    """

    rows: int
    chunks: int
    vectors: int

    @property
    def row_bytes(self) -> int:
        return CHUNK_BYTES * (self.chunks | 1)

    @property
    def zeros_at(self) -> int:
        return self.rows * self.row_bytes

    @property
    def plane_bytes(self) -> int:
        least = (self.rows + 1) * self.row_bytes
        wanted = _BANKS_BYTES // self.vectors % _BANKS_BYTES
        return least + (wanted - least) % _BANKS_BYTES

    @property
    def channels(self) -> int:
        return VECTOR * self.vectors

    @property
    def shared_bytes(self) -> int:
        return self.channels * self.plane_bytes


class Copied(NamedTuple):
    """How an image comes into its planes: channels-last or in runs of so many columns, and by how many threads."""

    planes: Planes
    last: bool
    run: int
    threads: int


class Side(NamedTuple):
    """Where an image lies: strides by axis, and its extents."""

    n: int
    c: int
    h: int
    w: int
    rows: int
    columns: int


def side(prefix: str, shape: tuple[int, ...], channels_last: bool) -> dict[str, int]:
    """The fields of a side by name: <prefix>_n and so on."""
    n, c, _, h, w = tensor_strides(shape, channels_last)
    return {f"{prefix}_{field}": value for field, value in Side(n, c, h, w, *shape[2:])._asdict().items()}


def steps(taps: int, shift: int = 0) -> int:
    """Instructions for a filter row and 8 columns of outputs."""
    return ceil((VECTOR - 1 + taps + shift) / _STEP)


def run_of(problem: ConvProblem, columns: int, pad: int, taps: int) -> tuple[int, int]:
    """(elements of a run, shift) of a planar image whose rows begin at multiples of the run."""
    room = VECTOR
    while room > 1 and (columns % room or 2 * room > problem.align or steps(taps, -pad % room) > steps(taps)):
        room //= 2
    return room, -pad % room


def refusal(problem: ConvProblem, most_taps: int = MOST_TAPS) -> str:
    """Why no kernel of planes is correct here, or ''."""
    if refused := unit_stride_refusal(problem, ("f16", "bf16"), most_taps):
        return refused
    last = problem.channels_last or problem.y_channels_last
    if last and problem.c % VECTOR:
        return f"{problem.c} channels are not a multiple of {VECTOR}"
    if problem.align < (least := CHUNK_BYTES if last else _LEAST_COPY_BYTES):
        return f"alignment of {problem.align} bytes is below {least}"
    return ""


def min_blocks(threads: int, registers: int, shared_bytes: int) -> int:
    """Blocks of a multiprocessor that threads of so many registers leave room for."""
    return max(1, min(_REGISTERS // (threads * registers), 2 * SHARED_BYTES // shared_bytes, 2048 // threads))


def turning(planes: Planes, rows: int) -> float:
    """Instructions of all warps that turn so many rows of pixels into planes, or back."""
    return rows * planes.chunks * 4 * planes.vectors / 32 * _TURN_INSTRUCTIONS


def kernel_us(problem: ConvProblem, device: Gpu, blocks: int, resident: int, instructions: float) -> float:
    """Microseconds of a kernel whose blocks have so many instructions of a warp each, `resident` of them at once on a
    multiprocessor."""
    waves = ceil(blocks / (resident * device.sms)) * resident * device.sms / blocks
    issue_s = _WAITING * blocks * min(waves, 2.0) * instructions / (_SCHEDULERS * device.sms * device.clock_hz)
    return _LAUNCH_US + (issue_s + problem.min_bytes / copy_bytes_per_s(device)) * 1e6


def covering(outputs: tuple[int, ...], tiles: Iterable[Tile]) -> list[Tile]:
    """Those that such outputs fill to half on each axis, and the smallest."""

    def fits(tile: Tile) -> bool:
        pairs = zip(tile[:2], outputs, (16, VECTOR), strict=True)
        return all(extent == least or 2 * output > extent for extent, output, least in pairs)

    return [tile for tile in tiles if fits(tile)]
