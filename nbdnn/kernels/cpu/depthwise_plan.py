"""How a depthwise convolution is cut into bands and tiles, and the parameters its kernels read."""

from __future__ import annotations

from math import ceil, prod

import numpy as np

from nbdnn.device import Cpu
from nbdnn.kernels.cpu.cost import kernel_us
from nbdnn.kernels.cpu.depthwise_vector import PLANAR_BLOCK
from nbdnn.kernels.cpu.epilogue import is_finished, store_kind
from nbdnn.kernels.cpu.geometry import (
    GATHER_FIELDS,
    Axis,
    Gather,
    Geometry,
    column_table,
    gather_values,
    tap_table,
)
from nbdnn.kernels.cpu.launch import FEW_ELEMS
from nbdnn.kernels.cpu.scratch import own_pages
from nbdnn.kernels.cpu.vector import filled, record
from nbdnn.problem import DEFAULT_COMPUTE, ITEMSIZE
from nbdnn.problem_conv import ConvProblem

# Rows finished before they are stored, one column of vectors after another: more would read the plane against its
# order and leave the hardware's prefetcher behind.
_TILE_ROWS, _PLANE_BYTES = 2 * PLANAR_BLOCK, 2 << 10
TILE_PIXELS, _TILE_BYTES = 64, 8 << 10  # interleaved pixels finished before they are stored
PIXELS = 4  # of an interleaved tile: with 2 or 3 vectors they hide the latency of multiply-add
EDGE_VECTORS = 4  # of a single pixel, for the same reason
_TASKS_PER_THREAD = 8
_NS_PER_BYTE = 0.02  # of the operands, one thread
# What does not lie in second-level cache is asked for this far ahead in its row: from memory up to 1.3 times as fast.
# The next row, which the hardware does not foresee either, would push the present one out of first-level cache.
AHEAD_BYTES = 4 << 10

MOST_CHANNELS = 8  # of a group
# Weights of a row of taps that are unrolled, vectors for each group's channel: more are met one by one. 128 taps of 8
# channels took 40 s to compile, and twice as long as `channel_gemm`.
_MOST_UNROLLED = 64

PARAMS = record(
    *GATHER_FIELDS,
    "channels",
    *("bands", "band_rows", "tile_rows", "width_pitch"),
    # column_table: the table of that name, then each column tap's place in the filter.
    *("depth_table", "row_table", "column_table", "filter_h", "filter_w"),
    # interleaved: how many gathers there are, their largest counts, taps of a row that are read together, their weights
    *("gathers", "most_d", "most_h", "joint_taps", "tap_bytes", "rows_ahead", "new_rows"),
    *("copy_bytes", "weights_bytes", "entries_bytes", "worker_offset", "worker_bytes"),
    # planar: columns of a row; of the tiles that are put together pitch and size, of what they become the size
    *("width", "part_pitch", "part_bytes", "tile_bytes"),
    *("row_offsets", "lane_offsets", "contiguous", "finished", "streams"),
)


def refused_channels(problem: ConvProblem, device: Cpu) -> str:
    """Why these groups are not one channel each, or channels-last some that lie within a vector; empty if they are."""
    c, k, groups = problem.c, problem.k, problem.groups
    if not problem.channels_last:
        return "" if groups == c == k else f"channels {c}, {k} and groups {groups} are not all equal"
    if c != k:
        return f"channels {c} and {k} are not equal"
    most = min(MOST_CHANNELS, device.lanes(DEFAULT_COMPUTE[problem.dtype]))
    if (group := c // groups) > most or group & (group - 1):
        return f"{group} channels a group, this kernel takes powers of 2 up to {most}"
    return ""


def sizes_of(problem: ConvProblem, device: Cpu) -> dict[str, int]:
    """Bytes of the workspace's parts: a filter or each worker's copy, then each worker's taps, weights and tile."""
    acc_bytes = ITEMSIZE[DEFAULT_COMPUTE[problem.dtype]]
    taps, vl = prod(problem.filter), device.vector_bytes // acc_bytes
    width = problem.spatial[-1] if problem.op == "conv_bwd_data" else problem.out_spatial[-1]
    entries = 2 * ceil(taps * 16 / 64) * 64  # of a row, and of a pixel at its edge
    columns = joint_columns(problem)
    if problem.channels_last:
        pitch, group = ceil(problem.c / vl) * vl, problem.c // problem.groups
        tile_rows = min(TILE_PIXELS, max(PIXELS, _TILE_BYTES // (pitch * acc_bytes)))
        weights, shared, tile = 0, ceil(taps * group * pitch * acc_bytes / 64) * 64, tile_rows * pitch * acc_bytes
        part_pitch, part = pitch, 0
    else:
        pitch = ceil(width / vl) * vl
        tile_rows = max(_TILE_ROWS, _PLANE_BYTES // (pitch * acc_bytes) // PLANAR_BLOCK * PLANAR_BLOCK)
        weights, shared, tile = ceil(taps * acc_bytes / 64) * 64, 0, tile_rows * pitch * acc_bytes
        part_pitch = ceil(ceil(width / columns) / vl) * vl
        part = tile_rows * part_pitch * acc_bytes
    worker = own_pages(entries + columns * weights + tile + (columns * part if columns > 1 else 0))
    copy = shared if shared < FEW_ELEMS * acc_bytes else 0
    shared = own_pages(max(shared, device.threads * copy))
    return {
        "entries": entries,
        "weights": weights,
        "pitch": pitch,
        "tile_rows": tile_rows,
        "tile": tile,
        "part_pitch": part_pitch,
        "part": part,
        "worker": worker,
        "copy": copy,
        "shared": shared,
        "total": shared + device.threads * worker,
    }


def parameters(problem: ConvProblem, geo: Geometry, gather: Gather, device: Cpu) -> tuple[np.ndarray, list[np.ndarray]]:
    """(ctx of one gather, the arrays that it needs alive)."""
    sizes, acc_bytes = sizes_of(problem, device), ITEMSIZE[DEFAULT_COMPUTE[problem.dtype]]
    most_d, most_h = (max(axis.count for axis in axes) for axes in list(zip(*geo.gathers, strict=True))[:2])
    depth, height = (most_d, most_h) if problem.channels_last else (gather.d.count, gather.h.count)
    wanted = ceil(device.threads * _TASKS_PER_THREAD / (geo.n * depth * (1 if problem.channels_last else geo.groups)))
    band_rows = ceil(height / min(height, wanted))
    weights_bytes = geo.c_in * sizes["pitch"] * acc_bytes if problem.channels_last else sizes["weights"]
    depth_table, row_table = tap_table(gather.d), tap_table(gather.h)
    columns = np.concatenate([column_table(gather.w).reshape(-1), tap_table(gather.w)[:, 0]])
    rows = np.arange(sizes["tile_rows"], dtype=np.int64) * gather.h.out_step * geo.out_strides[4]
    is_joint = joint_columns(problem) > 1
    width = problem.spatial[-1] if is_joint else gather.w.count
    if problem.channels_last:
        lanes = np.arange(problem.c, dtype=np.int64) * geo.out_strides[2]
    else:
        first, step = (0, 1) if is_joint else (gather.w.out_start, gather.w.out_step)
        lanes = (first + np.arange(width, dtype=np.int64) * step) * geo.out_strides[5]
    kind = store_kind(problem, bool((np.diff(lanes) == 1).all()))
    ctx = filled(
        PARAMS,
        **gather_values(problem, geo, gather),
        channels=problem.c,
        bands=ceil(height / band_rows),
        band_rows=band_rows,
        tile_rows=sizes["tile_rows"],
        width_pitch=sizes["pitch"],
        depth_table=depth_table.ctypes.data,
        row_table=row_table.ctypes.data,
        column_table=columns.ctypes.data,
        width=width,
        part_pitch=sizes["part_pitch"],
        part_bytes=sizes["part"],
        tile_bytes=sizes["tile"],
        copy_bytes=sizes["copy"],
        filter_h=problem.filter[-2],
        filter_w=problem.filter[-1],
        gathers=len(geo.gathers),
        most_d=most_d,
        most_h=most_h,
        joint_taps=joint_taps(geo)[gather.w],
        tap_bytes=(gather.w.taps[1][0] - gather.w.taps[0][0]) * weights_bytes if len(gather.w.taps) > 1 else 0,
        weights_bytes=weights_bytes,
        new_rows=gather.h.low + gather.h.span + 1 - gather.h.in_step,
        rows_ahead=gather.h.in_step if problem.operands[geo.in_pointer].size_bytes > device.l2_bytes else 0,
        entries_bytes=sizes["entries"],
        worker_offset=sizes["shared"],
        worker_bytes=sizes["worker"],
        row_offsets=rows.ctypes.data,
        lane_offsets=lanes.ctypes.data,
        contiguous=kind,
        streams=int(kind == 2),
        finished=int(
            problem.channels_last
            and is_finished(problem, of_sums=("bias", "relu"))
            and kind > 0
            and problem.c % device.lanes(DEFAULT_COMPUTE[problem.dtype]) == 0
        ),
    )
    return ctx, [depth_table, row_table, columns, rows, lanes]


def tile_vectors(channels: int, vl: int) -> int:
    """Vectors of channels in an interleaved tile: 3, or 2 where that leaves fewer over to be done one by one.

    With more, a pixel's channels are read in longer runs: 96 channels of stride 2 from memory 1.2 times as fast.
    """
    vectors = ceil(channels / vl)
    return 2 if vectors % 2 < vectors % 3 else 3


def adjacent(axis: Axis) -> bool:
    """Whether the taps, in their order, read neighbouring inputs."""
    return [offset for _, offset in axis.taps] == list(range(axis.low, axis.low + len(axis.taps)))


def unrolls(axis: Axis, group: int) -> bool:
    """Whether a row of taps of groups of so many channels is taken together."""
    return len(axis.taps) * group <= _MOST_UNROLLED


def depthwise_us(problem: ConvProblem, device: Cpu) -> float:
    """The guess: groups keep the multiply-adds busy, as long as a row of their taps is unrolled."""
    vectors = problem.flops / 2 / device.lanes(DEFAULT_COMPUTE[problem.dtype])
    group = problem.c // problem.groups
    efficiency = 0.6 if group == 1 or problem.filter[-1] * group <= _MOST_UNROLLED else 0.12
    if not problem.channels_last and (problem.out_spatial if problem.op == "conv_fwd" else problem.spatial)[-2] == 1:
        efficiency = 0.3  # no rows share what is loaded
    return kernel_us(device, vectors, problem.min_bytes * _NS_PER_BYTE, device.threads, efficiency=efficiency)


def shares_loads(columns: Axis, vl: int) -> bool:
    """Whether the taps of a row of a plane are shifts of the same vectors."""
    return adjacent(columns) and 0 < len(columns.taps) <= vl * columns.in_step


def joint_columns(problem: ConvProblem) -> int:
    """How many gathers in a row, those of even and of odd columns, are written together: row by row in their order."""
    is_every_other = problem.op == "conv_bwd_data" and not problem.channels_last and problem.stride[-1] == 2
    return 2 if is_every_other and problem.spatial[-1] > 1 else 1


def joint_taps(geo: Geometry) -> dict[Axis, int]:
    """Taps of a row that share the inputs they read, for the columns of each gather; two numbers at most.

    Such taps are equally spaced in the filter. There are three numbers only where some gathers have no tap at all.
    """
    columns = [gather.in_image_order().w for gather in geo.gathers]
    counts = {axis: max(1, len(axis.taps)) if adjacent(axis) and unrolls(axis, geo.c_in) else 1 for axis in columns}
    kept = {max(counts.values()), min(counts.values())}
    return {axis: count if count in kept else 1 for axis, count in counts.items()}
