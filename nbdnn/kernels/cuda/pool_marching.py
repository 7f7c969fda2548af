"""The gradient of maxima of overlapping windows, channels-last: a window is searched by one thread, which tells others.

    tap[p] = the first element of window p that is its maximum; where there are NaNs the last of them
    dx[i] = sum of dy[p] over the windows p that cover i and whose tap[p] is i

    block     marches from plane to plane, of two axes down the rows of several images
    thread    1. of the window that ends with this step, and a vector of channels: the maximum and its tap, which joins
                 what a plane has to what windows that begin there will have; tap and dy go to shared memory
              2. a cell, as many elements of dx as windows are apart: dy of the windows that cover it and have chosen
                 one of them, from there

An element may be in eight windows of 3x3x3 two apart, and a tile in registers (`pool_window`) searches all that reach
into it: 324 comparisons for 8 elements. Here it is 18 and 3, and those of windows at the edge of a block's tile, rows
and columns. 16-bit elements are compared two at once.

Traffic: x and dy once from memory, and again from cache where windows, tiles and segments of planes overlap; dx once; y
is not read. Sums in float32, in a fixed order, rounded once. Source: own.
"""

from __future__ import annotations

from math import ceil, prod

from nbdnn.candidate import YES, Support
from nbdnn.device import Gpu
from nbdnn.kernels.cuda.compile import Source
from nbdnn.kernels.cuda.division import reciprocals
from nbdnn.kernels.cuda.launch import Launch, LaunchedCandidate
from nbdnn.kernels.cuda.peaks import copy_bytes_per_s
from nbdnn.kernels.cuda.pool_marching_plan import (
    MOST_TAPS,
    Fields,
    Tile,
    Variant,
    cells_of,
    fields,
    takes,
    tiles,
    variant,
    widest,
)
from nbdnn.kernels.cuda.pool_rolling_plan import SECTOR_BYTES, WARP, Reciprocals
from nbdnn.kernels.cuda.pool_tiles import axes_of
from nbdnn.problem import ITEMSIZE
from nbdnn.problem_pool import PoolProblem

_INT32_END = 2**31 - 2**20
_CONFIGS, _ALIKE = 6, 3
_LAUNCH_US = 1.4
# As seen on an H200: instructions of a step; those a multiprocessor's scheduler issues in a clock; clocks that a step
# waits; times the bytes, and bytes that a pixel's channels are as good as longer.
_FIXED, _OF_TAP, _OF_ELEMENT, _PER_CLOCK, _WAITS = 60, 6, 8, 0.8, 900
_OVER_COPY, _NARROW_BYTES = 1.05, 8


def _kernel(*specialised_on):
    from nbdnn.kernels.cuda import ptx, ptx_pool_cells, ptx_pool_marching, ptx_tile

    v = Variant(*specialised_on)
    integer, word, split, divided = ptx.INTEGER[32], ptx.WORD, ptx.split, ptx.divided
    (_, stride_d, pad_d), (taps_h, stride_h, pad_h), (taps_w, stride_w, pad_w) = v.axes
    cells_d, cells_h, cells_w = (cells_of(axis) for axis in v.axes)
    windows_w, windows, vectors, lanes = v.windows_w, v.windows_h * v.windows_w, v.vectors, v.lanes
    rows, columns, vector_bytes = v.rows, v.columns, 4 * v.words
    first_window, last_window, earlier = cells_d.first, cells_d.first + cells_d.windows - 1, v.held
    window_h, window_w = cells_h.first, cells_w.first
    taps_inside = ptx_pool_marching.bits_inside(taps_h, taps_w)
    elements_inside = ptx_pool_marching.bits_inside(stride_h, stride_w)
    first_tap, load_dy = ptx_pool_marching.first_tap(v.dtype), ptx_pool_marching.load_vector(v)
    load_ahead = ptx_pool_marching.load_planes(v, 0, v.ahead)
    load_others = ptx_pool_marching.load_planes(v, v.ahead, len(v.planes_met))
    find_step = ptx_pool_marching.find_step(v)
    put, give, store_cell = ptx_pool_cells.put(v), ptx_pool_cells.give(v), ptx_pool_cells.store_cell(v)
    no_windows, slots_from = ptx_pool_marching.no_windows(v), ptx_pool_cells.slots(v)

    def march(x, dy, dx, f, r):
        place, vector = divided(integer(ptx.thread_x()), integer(vectors))
        h, w = divided(place, integer(windows_w))
        rest, slab = split(integer(ptx.block_x()), f.slabs, r.slabs, r.slabs_shift)
        rest, tile_w = split(rest, f.tiles_w, r.tiles_w, r.tiles_w_shift)
        rest, tile_h = split(rest, f.tiles_h, r.tiles_h, r.tiles_h_shift)
        image, tile_d = split(rest, f.tiles_d, r.tiles_d, r.tiles_d_shift)
        channel = integer((slab * vectors + vector) * lanes)
        is_here = place < windows and channel < f.channels
        # 1. The thread's window, and its cell.
        cell_h, cell_w = integer(tile_h * rows + h), integer(tile_w * columns + w)
        p, q = integer(cell_h + window_h), integer(cell_w + window_w)
        has_window = is_here and ptx.inside(p, f.out_h) == 1 and ptx.inside(q, f.out_w) == 1
        has_cell = is_here and h < rows and w < columns
        first_h, first_w = integer(p * stride_h - pad_h), integer(q * stride_w - pad_w)
        row, column = integer(cell_h * stride_h), integer(cell_w * stride_w)
        taps = taps_inside(first_h, f.in_h if has_window else integer(0), first_w, f.in_w)
        elements = elements_inside(row, f.in_h if has_cell else integer(0), column, f.in_w)
        first = first_tap(taps)
        x_at = integer(image * f.x_image + channel + first_h * f.x_h + first_w * f.x_w)
        dy_at = integer(image * f.y_image + channel + p * f.y_h + q * f.y_w)
        dx_at = integer(image * f.x_image + channel + row * f.x_h + column * f.x_w)
        # 2. From the planes that the first window needs to the last one's.
        cell = integer(tile_d * f.cells)
        end = integer(cell + f.cells)
        end = integer((end if end < f.cells_d else f.cells_d) + last_window)
        o = integer(cell + first_window)
        least = integer(o * stride_d - pad_d)
        least = least if least > 0 else integer(0)
        o = integer(o - earlier)
        slots, here = slots_from(word(ptx_tile.dynamic_shared())), word(integer(ptx.thread_x()) * vector_bytes)
        held = no_windows()
        plane = integer(o * stride_d - pad_d)
        at = integer(x_at + plane * f.x_d)
        ahead = load_ahead(x, at, plane, least, f.in_d, taps, f.x_d, f.x_h, f.x_w)
        gradients = load_dy(dy, integer(dy_at + o * f.y_d), has_window and ptx.inside(o, f.out_d) == 1)
        while o < end:
            others = load_others(x, at, plane, least, f.in_d, taps, f.x_d, f.x_h, f.x_w)
            numbers, held = find_step(ahead, others, held, first, plane)
            if place < windows:
                put(word(slots[-1] + here), numbers, gradients, has_window and ptx.inside(o, f.out_d) == 1)
            to_cell = integer(o - last_window)
            # What comes with the next step is asked for when there are registers for it.
            o, plane = integer(o + 1), integer(plane + stride_d)
            at = integer(x_at + plane * f.x_d)
            ahead = load_ahead(x, at, plane, least, f.in_d, taps, f.x_d, f.x_h, f.x_w)
            gradients = load_dy(dy, integer(dy_at + o * f.y_d), has_window and ptx.inside(o, f.out_d) == 1)
            ptx.cuda.syncthreads()
            if to_cell >= cell and has_cell:
                to_plane = integer(to_cell * stride_d)
                to = integer(dx_at + to_plane * f.x_d)
                store_cell(dx, to, to_plane, f.in_d, elements, f.x_d, f.x_h, f.x_w, give(slots[1:], here))
            slots = slots[1:] + slots[:1]

    data = ptx.pointer(v.dtype)
    return march, (data, data, data, ptx.record(Fields, 32), ptx.record(Reciprocals, 32))


class Marching(LaunchedCandidate[Tile]):
    """Maxima of windows that overlap, each searched once."""

    op, algorithm = "pool_bwd", "marching"

    def supports(self, problem: PoolProblem, device: Gpu) -> Support:
        if not problem.is_max or problem.dtype == "f64" or not problem.channels_last:
            return Support(
                False, f"{problem.mode} of {problem.dtype} in {problem.layout}, this kernel takes maxima channels-last"
            )
        if problem.dtype == "bf16" and device.capability < (9, 0):
            return Support(False, "bfloat16 is compared two at once since compute capability 9.0")
        if all(r <= u for r, u in zip(problem.window, problem.stride, strict=True)):
            return Support(False, f"windows {problem.window}, {problem.stride} apart, share nothing")
        if prod(problem.stride) == 1:
            return Support(False, "windows are one apart on all axes, which is left to rolling and window")
        if not takes(axes_of(problem)):
            return Support(
                False, f"windows of {problem.window} have more taps than this kernel holds, up to {MOST_TAPS}"
            )
        if widest(problem) * ITEMSIZE[problem.dtype] < 4:
            return Support(False, f"{problem.c} channels of {problem.dtype} are no vectors of 4 bytes and more")
        largest = max(problem.operands, key=lambda operand: operand.size_elems)
        if largest.size_elems >= _INT32_END:
            return Support(False, f"{largest.name} has {largest.size_elems} elements, more than {_INT32_END}")
        if not tiles(problem):
            return Support(False, f"no tile of windows {problem.window}, {problem.stride} apart, fits a block")
        return YES

    def configs(self, problem: PoolProblem, device: Gpu) -> tuple[Tile, ...]:
        """The best by the guess, of each length only so many."""
        found: list[Tile] = []
        for tile in sorted(tiles(problem), key=lambda tile: self.estimate(problem, tile, device)):
            if sum(each.planes == tile.planes for each in found) < _ALIKE:
                found.append(tile)
        return tuple(found[:_CONFIGS])

    def estimate(self, problem: PoolProblem, config: Tile, device: Gpu) -> float:
        """Of the multiprocessor with the most blocks: few warps wait more often."""
        v, f = variant(problem, config), fields(problem, config)
        resident, warps = v.resident, v.threads / WARP
        searched, given = len(v.planes_met) * v.taps_of_plane, prod(axis.taps for axis in v.axes)
        of_step = (
            _FIXED + v.words * (3 * searched + 2.2 * given) + _OF_TAP * searched + _OF_ELEMENT * prod(problem.stride)
        )
        steps = f.cells + cells_of(v.axes[0]).windows - 1 + v.held
        whole, rest = divmod(ceil(f.images * f.slabs * f.tiles_d * f.tiles_h * f.tiles_w / device.sms), resident)
        issued = (n * warps * of_step / 4 / _PER_CLOCK for n in [resident] * whole + [rest] * (rest > 0))
        issue_s = sum(steps * (clocks + _WAITS) for clocks in issued) / device.clock_hz
        of_pixel = config.vectors * config.lanes * ITEMSIZE[problem.dtype]
        narrow = 1 + (_NARROW_BYTES + (SECTOR_BYTES if of_pixel % SECTOR_BYTES else 0)) / of_pixel
        again = (steps - f.cells) / f.cells / 4  # planes that segments read twice, most of them from cache
        _, y, *_ = problem.operands
        move_s = _OVER_COPY * narrow * (1 + again) * (problem.min_bytes - y.size_bytes) / copy_bytes_per_s(device)
        return _LAUNCH_US + (max(issue_s, move_s) + 0.15 * min(issue_s, move_s)) * narrow * 1e6

    def launches(self, problem: PoolProblem, config: Tile, device: Gpu) -> list[Launch]:
        v, f = variant(problem, config), fields(problem, config)
        return [
            Launch(
                source=Source(_kernel, v, v.threads, v.resident),
                grid=(f.images * f.slabs * f.tiles_d * f.tiles_h * f.tiles_w, 1, 1),
                pointers=(0, 2, 3),
                scalars="",
                integers=(*f, *reciprocals(Reciprocals, f._asdict())),
                dynamic_shared_bytes=v.shared_bytes,
            )
        ]


BWD = Marching()
