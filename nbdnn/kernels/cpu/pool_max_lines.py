"""The gradient of a maximum by indices (`pool_indices.py`) where neighbours are of one plane.

Lines of vectors (`pool_lines.py`). A task is a run of planes: all that its windows have chosen, a byte each in the
workspace, then its dx. Where planes are few, all windows of all planes are first, in runs of lines; then all of dx.
"""

from __future__ import annotations

from functools import cache
from itertools import product
from math import ceil, prod
from typing import NamedTuple

from numba import njit

from nbdnn.device import Cpu
from nbdnn.kernels.cpu.compile import DEVICE, compile_task
from nbdnn.kernels.cpu.cost import streams
from nbdnn.kernels.cpu.launch import ARGS, Phase, Program
from nbdnn.kernels.cpu.pool_axes import Axes
from nbdnn.kernels.cpu.pool_lines import AHEAD_BYTES, CAREFUL, SAFE, WHOLE, Row
from nbdnn.kernels.cpu.pool_lines_find import find_lines, found_bytes
from nbdnn.kernels.cpu.pool_lines_give import give_lines
from nbdnn.kernels.cpu.scratch import own_pages, whole_lines
from nbdnn.kernels.cpu.vector import filled, pointer, record, struct
from nbdnn.problem import ITEMSIZE
from nbdnn.problem_pool import PoolProblem

_TASKS_PER_THREAD = 16
_LINE_BYTES = 64
_LEAST_LANES = 4
_MOST_KNOWN = 27  # taps of a window that are met without a loop
_BLOCK_BYTES = 8192  # of x or dx: lines that one column goes down before the next
_NOBODYS = -(1 << 62)  # for the number of a line of windows
GUARD = 8  # bytes on each side of a line of what is chosen; as many as taps

_FIELDS = record(
    *("planes", "planes_a_task", "find_lines", "give_lines", "pitch", "chosen_bytes", "found_at", "found_bytes"),
    *("in_d", "in_h", "in_w", "out_d", "out_h", "out_w", "taps_d", "taps_h", "taps_w", "step_d", "step_h", "step_w"),
    *("pad_d", "pad_h", "pad_w"),
)


class Windows(NamedTuple):
    """Of depth and rows."""

    taps: tuple[int, ...]
    step: tuple[int, ...]


@cache
def find_windows(row: Row, windows: Windows, remembers: bool):
    """Compiled-in function (f, pointers, chosen, found, first, end): what lines of windows have chosen. remembers:
    `found` is memory for what they found in planes that the next ones share, `found_bytes` of it."""
    taps, i64, itemsize = row.taps, pointer("i64"), ITEMSIZE[row.dtype]
    known_d, known_h = known = windows.taps if prod(windows.taps) * taps <= _MOST_KNOWN else (0, 0)
    shared_d, shared_h = (max(0, n - step) for n, step in zip(known, windows.step, strict=True))
    shared = shared_d if remembers else 0, shared_h
    find_some, shares = find_lines(row, known if known_d else (1, 1), shared), shared[0] > 0
    before, behind = -(-row.pad // row.step) * row.step * itemsize, (row.step * row.vl + taps) * itemsize

    @njit(**DEVICE)
    def find(f, pointers, chosen, found, plane, d, p, count):
        """Of `count` lines of windows from (plane, d, p) on, if several all inside of the image."""
        line_bytes, out_bytes = f.in_w * itemsize, f.out_w * itemsize
        plane_bytes = f.in_h * line_bytes
        first_d, first_h = d * f.step_d - f.pad_d, p * f.step_h - f.pad_h
        low_d, end_d = max(0, -first_d), min(f.taps_d, f.in_d - first_d)
        low_h, end_h = max(0, -first_h), min(f.taps_h, f.in_h - first_h)
        planes, lines = max(0, end_d - low_d), max(0, end_h - low_h)
        x_begin, y_begin = pointers[0], pointers[1]
        x = x_begin + (plane * f.in_d + first_d) * plane_bytes + first_h * line_bytes
        x_low = x + low_d * plane_bytes + low_h * line_bytes
        x_end = x_low + max(0, planes - 1) * plane_bytes + (lines + (count - 1) * f.step_h) * line_bytes
        window = (plane * f.out_d + d) * f.out_h + p
        y, y_end = y_begin + window * out_bytes, y_begin + (window + count) * out_bytes
        is_found, slots, numbers = 0, found + (f.out_h * 8 + p * f.found_bytes), i64(found)
        if shares and lines == known_h and end_d == known_d and (low_d == 0 or low_d == shared_d):
            # Whose windows they were, line by line; behind these numbers, what was found.
            is_found = 1
            for i in range(p, p + count):
                if numbers[i] != window - p + i - f.out_h:
                    is_found = 0
        how = WHOLE if known_d > 0 and (planes == known_d or is_found) and lines == known_h else SAFE
        ends_x, ends_y = f.planes * f.in_d * plane_bytes, f.planes * f.out_d * f.out_h * out_bytes
        if x_low - before < x_begin or x_end + behind > x_begin + ends_x or y_end + behind > y_begin + ends_y:
            how = CAREFUL
        if shares and how == WHOLE:
            for i in range(p, p + count):
                numbers[i] = window - p + i
        ahead_bytes = f.step_d * plane_bytes if row.is_deep else AHEAD_BYTES
        find_some(how, count, x, f.step_h * line_bytes, y, out_bytes, chosen + window * f.pitch, f.pitch, f.in_w,
                  f.out_w, low_d, planes, low_h, lines, plane_bytes, line_bytes, f.taps_h * taps, slots, f.found_bytes,
                  is_found, ahead_bytes)  # fmt: skip

    @njit(**DEVICE)
    def find_run(f, pointers, chosen, found, line, end):
        if shares:
            for i in range(f.out_h):
                i64(found)[i] = _NOBODYS
        first, line_bytes = line, f.in_w * itemsize
        few = max(1, _BLOCK_BYTES // (f.step_h * line_bytes))
        first_whole = -(-f.pad_h // f.step_h)
        end_whole = min(f.out_h, (f.in_h + f.pad_h - f.taps_h) // f.step_h + 1)
        while line < end:
            p, rest = line % f.out_h, line // f.out_h
            d, plane = rest % f.out_d, rest // f.out_d
            if shares and d == 0 and p == 0:
                for i in range(f.out_h):
                    i64(found)[i] = line + i - f.out_h if f.pad_d == shared_d else _NOBODYS
                # Before an image there is nothing: NaNs, which nothing is equal to.
                for i in range(f.out_h, f.out_h + f.out_h * f.found_bytes // 8):
                    i64(found)[i] = -1
            end_p = min(f.out_h, p + end - line)
            line += end_p - p
            while p < end_p:
                next_p = min(end_p, end_whole, p + few) if first_whole <= p < end_whole else p + 1
                find(f, pointers, chosen, found, plane, d, p, next_p - p)
                p = next_p
        for i in range(first, end):  # vectors go beyond a line's end
            i64(chosen + i * f.pitch - GUARD)[0] = -1
            i64(chosen + i * f.pitch + f.out_w)[0] = -1

    return find_run


@cache
def _give(row: Row, windows: tuple[int, int], past_caches: bool):
    """Compiled-in function (f, pointers, chosen, first, end): lines of dx. windows: the most planes and lines of them
    that cover one. past_caches: whether dx is written past the caches, where its lines begin on one of theirs."""
    taps, itemsize = row.taps, ITEMSIZE[row.dtype]
    most_d, most_h = windows if prod(windows) * taps <= _MOST_KNOWN else (1, 1)
    counts = [(n, n - 1) if n > 1 else (n,) for n in (most_d, most_h)]
    n_d, n_h = map(len, counts)
    give_some = give_lines(row, tuple(product(*counts)), past_caches)
    slack = (2 * taps + row.vl) * itemsize

    @njit(**DEVICE)
    def give(f, pointers, chosen, plane, depth, h, count):
        """`count` lines of dx from (plane, depth, h) on, step_h apart, if several all covered by as many windows."""
        line_bytes, out_bytes = f.in_w * itemsize, f.out_w * itemsize
        dx = pointers[3] + ((plane * f.in_d + depth) * f.in_h + h) * line_bytes
        depth, h = depth + f.pad_d, h + f.pad_h
        from_d, to_d = max(0, (depth - f.taps_d) // f.step_d + 1), min(f.out_d, depth // f.step_d + 1)
        from_p, to_p = max(0, (h - f.taps_h) // f.step_h + 1), min(f.out_h, h // f.step_h + 1)
        planes, lines = max(0, to_d - from_d), max(0, to_p - from_p)
        window = (plane * f.out_d + from_d) * f.out_h + from_p
        dy = pointers[2] + window * out_bytes
        dy_end = dy + (max(0, planes - 1) * f.out_h + lines + count - 1) * out_bytes
        number = ((depth - from_d * f.step_d) * f.taps_h + h - from_p * f.step_h) * taps
        how, less_d, less_h = SAFE, most_d - planes, most_h - lines
        if 0 <= less_d < n_d and 0 <= less_h < n_h:
            how = WHOLE + less_d * n_h + less_h
            if past_caches and (pointers[3] | line_bytes) % _LINE_BYTES == 0:
                how += n_d * n_h
        if dy - slack < pointers[2] or dy_end + slack > pointers[2] + f.planes * f.out_d * f.out_h * out_bytes:
            how = CAREFUL
        give_some(how, count, dx, f.step_h * line_bytes, dy, out_bytes, f.out_h * out_bytes, chosen + window * f.pitch,
                  f.pitch, f.out_h * f.pitch, f.in_w, planes, lines, number, f.step_d * f.taps_h * taps,
                  f.step_h * taps)  # fmt: skip

    @njit(**DEVICE)
    def give_run(f, pointers, chosen, line, end):
        line_bytes = f.in_w * itemsize
        few = max(1, _BLOCK_BYTES // (f.step_h * line_bytes)) * f.step_h
        while line < end:
            first_h, rest = line % f.in_h, line // f.in_h
            depth, plane = rest % f.in_d, rest // f.in_d
            end_h = min(f.in_h, first_h + end - line, first_h + few)
            line += end_h - first_h
            for phase in range(f.step_h):
                h = first_h + phase
                reach = (f.taps_h - 1 - (h + f.pad_h) % f.step_h) // f.step_h  # windows before the last that cover h
                while h < end_h:
                    last, count = (h + f.pad_h) // f.step_h, 1
                    if reach <= last < f.out_h:
                        count = min((end_h - h + f.step_h - 1) // f.step_h, f.out_h - last)
                    give(f, pointers, chosen, plane, depth, h, count)
                    h += count * f.step_h

    return give_run


@cache
def _whole_task(row: Row, windows: Windows, covering: tuple[int, int], past_caches: bool):
    """A run of planes. covering: the most planes and lines of windows that cover a line of dx."""
    i64, at, args_at = pointer("i64"), struct(_FIELDS), struct(ARGS)
    find, give = find_windows(row, windows, True), _give(row, covering, past_caches)

    def max_of_planes(args, ctx, index, worker):
        pointers, f = i64(args), at(ctx)
        out, lines = f.out_d * f.out_h, f.in_d * f.in_h
        memory = args_at(args).workspace + worker * f.chosen_bytes
        for plane in range(index * f.planes_a_task, min(f.planes, (index + 1) * f.planes_a_task)):
            chosen = memory + GUARD - plane * out * f.pitch
            find(f, pointers, chosen, memory + f.found_at, plane * out, (plane + 1) * out)
            give(f, pointers, chosen, plane * lines, (plane + 1) * lines)

    return compile_task(max_of_planes, (row, windows, covering, past_caches))


@cache
def _find_task(row: Row, windows: Windows):
    """A run of lines of windows."""
    i64, at, args_at, find = pointer("i64"), struct(_FIELDS), struct(ARGS), find_windows(row, windows, False)

    def find_maxima(args, ctx, index, worker):
        f = at(ctx)
        first, end = index * f.find_lines, min(f.planes * f.out_d * f.out_h, (index + 1) * f.find_lines)
        find(f, i64(args), args_at(args).workspace + GUARD, 0, first, end)

    return compile_task(find_maxima, (row, windows))


@cache
def _give_task(row: Row, windows: tuple[int, int], past_caches: bool):
    """A run of lines of dx."""
    i64, at, args_at, give = pointer("i64"), struct(_FIELDS), struct(ARGS), _give(row, windows, past_caches)

    def give_gradient(args, ctx, index, worker):
        f = at(ctx)
        first, end = index * f.give_lines, min(f.planes * f.in_d * f.in_h, (index + 1) * f.give_lines)
        give(f, i64(args), args_at(args).workspace + GUARD, first, end)

    return compile_task(give_gradient, (row, windows, past_caches))


def row_of(problem: PoolProblem, axes: Axes, device: Cpu) -> Row:
    """With vectors of which a line fills more than half of one."""
    vl, widest = device.lanes(problem.compute), max(axes.out[2], ceil(axes.extent[2] / axes.step[2]))
    while vl > _LEAST_LANES and widest <= vl // 2:
        vl //= 2
    return Row(problem.dtype, vl, axes.taps[2], axes.step[2], axes.pad[2], axes.is_deep)


def kept_pitch(axes: Axes) -> int:
    """Bytes of a line of what is chosen; vectors go beyond its end."""
    return -(-axes.out[2] // 16) * 16 + 2 * GUARD


def _has_many(problem: PoolProblem, device: Cpu) -> bool:
    return problem.n * problem.c >= 4 * device.threads


def chosen_bytes(problem: PoolProblem, axes: Axes, device: Cpu) -> int:
    """The workspace."""
    planes = device.threads if _has_many(problem, device) else problem.n * problem.c
    return planes * kept(problem, axes, device).chosen_bytes


class Kept(NamedTuple):
    """Bytes of what the windows of a plane have chosen, and have found in planes that they share: of both, where the
    latter begins, and of it a line of windows."""

    chosen_bytes: int
    found_at: int
    found_bytes: int


def kept(problem: PoolProblem, axes: Axes, device: Cpu) -> Kept:
    found_at = whole_lines(axes.out[0] * axes.out[1] * kept_pitch(axes) + 64)
    of_line = found_bytes(row_of(problem, axes, device), max(0, axes.taps[0] - axes.step[0]), axes.out[2])
    return Kept(own_pages(found_at + axes.out[1] * (8 + of_line)), found_at, of_line)


def windows_of(axes: Axes) -> Windows:
    return Windows(axes.taps[:2], axes.step[:2])


def max_of_lines(problem: PoolProblem, axes: Axes, device: Cpu) -> Program:
    """The runner of a gradient of planes whose windows are short."""
    planes, wanted = problem.n * problem.c, device.threads * _TASKS_PER_THREAD
    row = row_of(problem, axes, device)
    past_caches = streams(problem, device) and row.step * row.vl * ITEMSIZE[problem.dtype] % _LINE_BYTES == 0
    most_d, most_h = ((taps - 1) // step + 1 for taps, step in zip(axes.taps[:2], axes.step[:2], strict=True))
    windows, lines = planes * axes.out[0] * axes.out[1], planes * axes.extent[0] * axes.extent[1]
    planes_a_task, find_lines, give_lines = (ceil(n / wanted) for n in (planes, windows, lines))
    ctx = filled(
        _FIELDS,
        **axes.fields(),
        planes=planes,
        planes_a_task=planes_a_task,
        find_lines=find_lines,
        give_lines=give_lines,
        pitch=kept_pitch(axes),
        **kept(problem, axes, device)._asdict(),
    )
    if _has_many(problem, device):
        task = _whole_task(row, windows_of(axes), (most_d, most_h), past_caches)
        return Program([Phase(task, ceil(planes / planes_a_task), ctx)])
    find = Phase(_find_task(row, windows_of(axes)), ceil(windows / find_lines), ctx)
    return Program([find, Phase(_give_task(row, (most_d, most_h), past_caches), ceil(lines / give_lines), ctx)])
