"""What the implicit GEMMs of filter gradients share: padded images, offsets of taps and pixels, the sums' way out."""

from __future__ import annotations

from functools import cache
from math import ceil
from typing import NamedTuple

import numpy as np
from numba import njit

from nbdnn.device import Cpu
from nbdnn.kernels.cpu.compile import DEVICE, FASTMATH, compile_task
from nbdnn.kernels.cpu.epilogue import tile_store
from nbdnn.kernels.cpu.geometry import Gather, spatial3, tensor_strides
from nbdnn.kernels.cpu.launch import ARGS, Phase
from nbdnn.kernels.cpu.micro_kernel import Config
from nbdnn.kernels.cpu.rows import convert_row, convert_rows, zero_fill
from nbdnn.kernels.cpu.scratch import own_pages
from nbdnn.kernels.cpu.turns import transpose
from nbdnn.kernels.cpu.vector import filled, pointer, record, stack, struct
from nbdnn.problem import DEFAULT_COMPUTE, ITEMSIZE
from nbdnn.problem_conv import ConvProblem

# What `pad_plane` reads of a record. run: channels side by side, all where they are interleaved, else 1. pitch: from a
# pixel of the copy to the next one, elements. step_w: from a pixel to the one that the next pixel of dy meets.
PAD_FIELDS = (
    *("channels", "run", "pitch", "x_n", "x_c", "x_d", "x_h", "x_w", "extent_d", "extent_h", "extent_w", "padded_w"),
    "step_w",
)
# Pixels that are multiples of so many bytes apart share few sets of the first-level cache, where they do not stay until
# the next tile (Zen 5: 8x128x32x32 to 256, 4x4 of stride 2, took 6.2 ms, and 4.3 with so many elements between them).
_FEW_SETS_BYTES, _GAP_ELEMS = 1024, 16
_SUMS = record(
    *("k_group", "panels", "m_rows", "blocks", "block_rows", "splits", "sums_offset", "block_bytes", "split_bytes"),
    *("w_k", "m_offsets", "read_out", "worker_offset", "worker_bytes"),
)


@njit(**DEVICE)
def inside(f, low_h, low_w, height):
    """(first, end, start, stop): rows and columns of a padded plane that lie inside of the image."""
    first, end = min(max(0, -low_h), height), max(0, min(height, f.extent_h - low_h))
    return first, end, min(max(0, -low_w), f.padded_w), max(0, min(f.padded_w, f.extent_w - low_w))


@cache
def pad_plane(dtype: str, vl: int):
    """Compiled-in function (f, to, image, d, low_h, low_w, height): `height` rows of padded_w pixels of an image, from
    row low_h and column low_w of depth d on, widened, with zeros for those outside."""
    compute = DEFAULT_COMPUTE[dtype]
    itemsize, acc_bytes = ITEMSIZE[dtype], ITEMSIZE[compute]
    widen_row, widen_rows, clear = (
        convert_row(dtype, compute, vl), convert_rows(dtype, compute, vl, 1), zero_fill(compute),
    )  # fmt: skip

    @njit(**DEVICE)
    def pad(f, to, image, d, low_h, low_w, height):
        line = f.padded_w * f.pitch
        if d < 0 or d >= f.extent_d:
            clear(to, height * line)
            return
        first, end, start, stop = inside(f, low_h, low_w, height)
        clear(to, first * line)
        clear(to + end * line * acc_bytes, (height - end) * line)
        source = image + (d * f.x_d + (first + low_h) * f.x_h + low_w * f.x_w) * itemsize
        to += first * line * acc_bytes
        if f.run == 1:
            widen_rows(to, line * acc_bytes, source, f.x_h * itemsize, end - first, f.padded_w, start, stop)
            return
        for h in range(end - first):
            row = to + h * line * acc_bytes
            clear(row, start * f.pitch)
            clear(row + stop * f.pitch * acc_bytes, (f.padded_w - stop) * f.pitch)
            at = source + (h * f.x_h + start * f.x_w) * itemsize
            row += start * f.pitch * acc_bytes
            if f.pitch == f.run:
                widen_row(row, at, (stop - start) * f.run)
                continue
            for w in range(stop - start):
                widen_row(row + w * f.pitch * acc_bytes, at + w * f.x_w * itemsize, f.run)

    return pad


@cache
def pack_pixels(dtype: str, vl: int, lanes: int):
    """Compiled-in function (f, to, at, used, rows, columns): `used` channels of rows of pixels of dy, one behind the
    other, strides y_k and y_w, widened, to [pixel][lanes]."""
    compute = DEFAULT_COMPUTE[dtype]
    itemsize, acc_bytes = ITEMSIZE[dtype], ITEMSIZE[compute]
    widen_row, turn = convert_row(dtype, compute, vl), transpose(dtype, compute, vl)

    @njit(**DEVICE)
    def pack(f, to, at, used, rows, columns):
        count = rows * columns
        if f.y_k == 1:
            for w in range(count):
                widen_row(to + w * lanes * acc_bytes, at + w * f.y_w * itemsize, used)
        else:
            # Lines of no more channels at once than a vector has lanes: of 8x64x224x224 each channel's lie on the same
            # lines of the caches, and all at once took 5.6 ms instead of 2.7 (Zen 5, two threads).
            for k in range(0, used, vl):
                start = at + k * f.y_k * itemsize
                turn(to + k * acc_bytes, lanes * acc_bytes, start, f.y_k * itemsize, min(vl, used - k), count)

    return pack


@cache
def _store_task(dtype: str, vl: int, lanes: int):
    """The sums of all splits of one block, added, turned to [k][m] and stored: index = (g*panels + panel)*blocks."""
    compute = DEFAULT_COMPUTE[dtype]
    itemsize, acc_bytes = ITEMSIZE[dtype], ITEMSIZE[compute]
    i64, acc_of, args_at, sums_at = pointer("i64"), pointer(compute), struct(ARGS), struct(_SUMS)
    store, turn, row_slots = tile_store(dtype, compute, vl), transpose(compute, compute, vl), stack(8 * lanes)

    def store_block(args, ctx, index, worker):
        a, f, rows = args_at(args), sums_at(ctx), row_slots()
        block, gp = index % f.blocks, index // f.blocks
        g, panel = gp // f.panels, gp % f.panels
        first = block * f.block_rows
        count, used = min(f.block_rows, f.m_rows - first), min(lanes, f.k_group - panel * lanes)
        sums = a.workspace + f.sums_offset + index * f.block_bytes
        total = acc_of(sums)
        for split in range(1, f.splits):
            part = acc_of(sums + split * f.split_bytes)
            for i in range(count * lanes):
                total[i] += part[i]
        tile = a.workspace + f.worker_offset + worker * f.worker_bytes
        turn(tile, f.block_rows * acc_bytes, sums, lanes * acc_bytes, count, used)
        for k in range(used):
            i64(rows)[k] = (g * f.k_group + panel * lanes + k) * f.w_k
        flags = (0, 0, 0, 0, 0, f.read_out)
        out = a.p2 + first * itemsize
        store(tile, f.block_rows, used, count, out, rows, f.m_offsets, True, flags, a.alpha, a.beta)

    return compile_task(store_block, (dtype, vl, lanes), fastmath=FASTMATH)


class Sums(NamedTuple):
    """Where the sums lie in the workspace: of each group and panel of `lanes` output channels blocks of block_rows m,
    block_bytes apart, split_bytes from one split of the pixels to the next. worker_offset: behind all that is used
    before them."""

    lanes: int
    panels: int
    m_rows: int
    blocks: int
    block_rows: int
    splits: int
    sums_offset: int
    block_bytes: int
    split_bytes: int
    worker_offset: int

    def worker_bytes(self, problem: ConvProblem) -> int:
        """What a worker takes to turn a block."""
        return own_pages(self.block_rows * self.lanes * ITEMSIZE[DEFAULT_COMPUTE[problem.dtype]])

    def phase(self, problem: ConvProblem, device: Cpu) -> tuple[Phase, list[np.ndarray]]:
        """(what adds, turns and stores them, what it needs)."""
        m_offsets = np.zeros(1, np.int64)
        named = self._asdict()
        ctx = filled(
            _SUMS,
            **{name: named[name] for name in _SUMS.names or () if name in named},
            k_group=problem.k // problem.groups,
            w_k=problem.operands[2].strides[0],
            m_offsets=m_offsets.ctypes.data,
            read_out=int("beta" in problem.epilogue),
            worker_bytes=self.worker_bytes(problem),
        )
        task = _store_task(problem.dtype, device.lanes(DEFAULT_COMPUTE[problem.dtype]), self.lanes)
        return Phase(task, problem.groups * self.panels * self.blocks, ctx), [m_offsets]


def gap_elems(problem: ConvProblem, gather: Gather) -> int:
    """What is to lie between the pixels of a copy of x, so that not all are in few sets of a cache."""
    step_bytes = gather.w.in_step * problem.c * ITEMSIZE[DEFAULT_COMPUTE[problem.dtype]]
    return _GAP_ELEMS if problem.channels_last and step_bytes % _FEW_SETS_BYTES == 0 else 0


def pad_values(problem: ConvProblem, gather: Gather, padded_w: int, gap: int) -> dict[str, int]:
    """The value of each of PAD_FIELDS."""
    n, c, d, h, w = tensor_strides((problem.n, problem.c, *spatial3(problem.spatial)), problem.channels_last)
    extents = {f"extent_{name}": axis.in_extent for name, axis in zip("dhw", gather, strict=True)}
    run = problem.c if problem.channels_last else 1
    strides = {"x_n": n, "x_c": c, "x_d": d, "x_h": h, "x_w": w}
    fixed = {"channels": problem.c, "run": run, "pitch": run + gap, "padded_w": padded_w, "step_w": gather.w.in_step}
    return fixed | strides | extents


def m_table(problem: ConvProblem, gather: Gather, strides: tuple[int, ...], lowest: tuple[int, ...]) -> np.ndarray:
    """Of each m the elements from an image's first to the one that pixel 0 meets; strides of c, d, h, w, and which tap
    offset is at the first element, by axis."""
    c, d, h, w = strides
    t, r, s = (
        np.array([offset - low for _, offset in sorted(axis.taps)], np.int64)
        for axis, low in zip(gather, lowest, strict=True)
    )
    taps = t[:, None, None] * d + r[:, None] * h + s * w
    channels = np.arange(problem.c // problem.groups) * c
    table = taps[..., None] + channels if problem.w_channels_last else channels[:, None, None, None] + taps
    return table.reshape(-1).astype(np.int64)


def tiles_of(problem: ConvProblem, device: Cpu) -> tuple[Config, ...]:
    """Register tiles no wider than a group's output channels. An address register a row: six fit beside the rest."""
    vectors = ceil(problem.k / problem.groups / device.lanes(DEFAULT_COMPUTE[problem.dtype]))
    tiles = ((6, 4),) if device.isa == "avx512" else ((6, 2), (4, 3))
    return tuple(dict.fromkeys(Config(mr, min(nv, vectors)) for mr, nv in tiles))
