"""The gradient of a maximum by indices (`pool_indices.py`) where neighbours are channels.

Pixels in vectors of channels (`pool_pixels.py`). A task is a run of lines of windows, then of dx. What is chosen lies
as y does, a byte an element, in the workspace.
"""

from __future__ import annotations

from functools import cache
from itertools import product
from math import ceil, prod

from numba import njit

from nbdnn.device import Cpu
from nbdnn.kernels.cpu.compile import DEVICE, compile_task
from nbdnn.kernels.cpu.cost import streams
from nbdnn.kernels.cpu.launch import ARGS, Phase, Program
from nbdnn.kernels.cpu.pool_axes import Axes
from nbdnn.kernels.cpu.pool_pixels import find_pixels, give_pixels
from nbdnn.kernels.cpu.rows import ask_for
from nbdnn.kernels.cpu.scratch import whole_lines
from nbdnn.kernels.cpu.vector import filled, pointer, record, struct
from nbdnn.problem import ITEMSIZE
from nbdnn.problem_pool import PoolProblem

_TASKS_PER_THREAD = 16
_MOST_KNOWN = 27  # taps of a window, or windows that cover a pixel, that are met without a loop
# Of a pixel of dx that takes its vectors in an outer loop: 32x16x56x56 with windows of 3x3x3 took 0.24 ms of 0.38.
_FEW_VECTORS = 4
_AHEAD_BYTES = 2048  # of a row of x, while as much of the next windows' rows is asked for

_FIELDS = record(
    *("images", "channels", "find_lines", "give_lines", "few"),
    *("in_d", "in_h", "in_w", "out_d", "out_h", "out_w", "taps_d", "taps_h", "taps_w", "step_d", "step_h", "step_w"),
    *("pad_d", "pad_h", "pad_w"),
)


@cache
def _find_task(dtype: str, vl: int, taps: tuple[int, ...]):
    """A run of lines of windows."""
    i64, at, args_at, itemsize = pointer("i64"), struct(_FIELDS), struct(ARGS), ITEMSIZE[dtype]
    # Windows that are inside of the image but for a plane.
    known_d, known_h, known_w = taps if prod(taps) <= _MOST_KNOWN else (1, 1, 1)
    find = find_pixels(dtype, vl, tuple((d, known_h, known_w) for d in _most_and_less(known_d)))

    def find_maxima(args, ctx, index, worker):
        pointers, f = i64(args), at(ctx)
        pixel_bytes = f.channels * itemsize
        line_bytes = f.in_w * pixel_bytes
        first_whole = -(-f.pad_w // f.step_w)
        end_whole = min(f.out_w, (f.in_w + f.pad_w - f.taps_w) // f.step_w + 1)
        for line in range(index * f.find_lines, min(f.images * f.out_d * f.out_h, (index + 1) * f.find_lines)):
            p, rest = line % f.out_h, line // f.out_h
            d, image = rest % f.out_d, rest // f.out_d
            first_d, first_h = d * f.step_d - f.pad_d, p * f.step_h - f.pad_h
            low_d, end_d = max(first_d, 0), min(first_d + f.taps_d, f.in_d)
            low_h, end_h = max(first_h, 0), min(first_h + f.taps_h, f.in_h)
            planes, lines = max(0, end_d - low_d), max(0, end_h - low_h)
            x = pointers[0] + ((image * f.in_d + low_d) * f.in_h + low_h) * line_bytes
            y, chosen = (
                pointers[1] + line * f.out_w * pixel_bytes,
                args_at(args).workspace + line * f.out_w * f.channels,
            )
            q = 0
            while q < f.out_w:
                count = min(end_whole - q, f.few) if first_whole <= q < end_whole else 1
                first_w = q * f.step_w - f.pad_w
                low_w, end_w = max(first_w, 0), min(first_w + f.taps_w, f.in_w)
                number = ((low_d - first_d) * f.taps_h + low_h - first_h) * f.taps_w + low_w - first_w
                ahead = x + lines * line_bytes + low_w * pixel_bytes  # of the next line of windows
                for depth in range(planes):
                    for h in range(f.step_h):
                        ask_for(ahead + (depth * f.in_h + h) * line_bytes, count * f.step_w * pixel_bytes)
                how = 0
                if lines == known_h and end_w - low_w == known_w and 0 < planes <= known_d <= planes + 1:
                    how = 1 + known_d - planes
                find(how, count, f.channels, x + low_w * pixel_bytes, f.step_w * pixel_bytes,
                     y + q * pixel_bytes, chosen + q * f.channels, planes, lines, max(0, end_w - low_w),
                     f.in_h * line_bytes, line_bytes, number, f.taps_h * f.taps_w, f.taps_w)  # fmt: skip
                q += count

    return compile_task(find_maxima, (dtype, vl, taps))


@cache
def _give_task(dtype: str, vl: int, most: tuple[int, ...], by_pixel: bool, past_caches: bool):
    """A run of lines of dx. most: windows that cover a pixel, by axis."""
    i64, at, args_at, itemsize = pointer("i64"), struct(_FIELDS), struct(ARGS), ITEMSIZE[dtype]
    counts = [_most_and_less(n if prod(most) <= _MOST_KNOWN else 1) for n in most]
    most_d, most_h, most_w = (n for n, *_ in counts)
    n_d, n_h, n_w = map(len, counts)
    known = tuple(product(*counts))
    give_kept, give_past = (give_pixels(dtype, vl, known, by_pixel, past) for past in (False, past_caches))

    @njit(**DEVICE)
    def give(f, pointers, chosen, line, w, planes, lines, window, number):
        """Pixels of a line of dx from w on, step_w apart, that as many windows cover; how many these are."""
        pixel_bytes, reached = f.channels * itemsize, w + f.pad_w
        last, reach = reached // f.step_w, (f.taps_w - 1 - reached % f.step_w) // f.step_w
        count = 1
        if reach <= last < f.out_w:
            count = min((f.in_w - w + f.step_w - 1) // f.step_w, f.out_w - last)
        first, end = max(0, (reached - f.taps_w) // f.step_w + 1), min(f.out_w, last + 1)
        windows = max(0, end - first)
        how, less_d, less_h, less_w = 0, most_d - planes, most_h - lines, most_w - windows
        if 0 <= less_d < n_d and 0 <= less_h < n_h and 0 <= less_w < n_w:
            how = 1 + (less_d * n_h + less_h) * n_w + less_w
        at, dx = (window + first) * f.channels, pointers[3] + (line * f.in_w + w) * pixel_bytes
        number = number * f.taps_w + reached - first * f.step_w
        dy, out_plane = pointers[2] + at * itemsize, f.out_h * f.out_w
        plane_taps, line_taps = f.step_d * f.taps_h * f.taps_w, f.step_h * f.taps_w
        if past_caches and (pointers[3] | pixel_bytes) % 64 == 0:
            give_past(how, count, f.channels, dx, f.step_w * pixel_bytes, dy, chosen + at, f.out_w, out_plane, planes,
                      lines, windows, number, plane_taps, line_taps, f.step_w)  # fmt: skip
        else:
            give_kept(how, count, f.channels, dx, f.step_w * pixel_bytes, dy, chosen + at, f.out_w, out_plane, planes,
                      lines, windows, number, plane_taps, line_taps, f.step_w)  # fmt: skip
        return count

    def give_gradient(args, ctx, index, worker):
        pointers, f = i64(args), at(ctx)
        chosen = args_at(args).workspace
        for line in range(index * f.give_lines, min(f.images * f.in_d * f.in_h, (index + 1) * f.give_lines)):
            h, rest = line % f.in_h + f.pad_h, line // f.in_h
            depth, image = rest % f.in_d + f.pad_d, rest // f.in_d
            from_d, to_d = max(0, (depth - f.taps_d) // f.step_d + 1), min(f.out_d, depth // f.step_d + 1)
            from_p, to_p = max(0, (h - f.taps_h) // f.step_h + 1), min(f.out_h, h // f.step_h + 1)
            planes, lines = max(0, to_d - from_d), max(0, to_p - from_p)
            window = ((image * f.out_d + from_d) * f.out_h + from_p) * f.out_w
            number = (depth - from_d * f.step_d) * f.taps_h + h - from_p * f.step_h
            if not past_caches:
                ask_for(pointers[3] + (line + 1) * f.in_w * f.channels * itemsize, f.in_w * f.channels * itemsize)
            for phase in range(min(f.step_w, f.in_w)):
                w = phase
                while w < f.in_w:
                    w += f.step_w * give(f, pointers, chosen, line, w, planes, lines, window, number)

    return compile_task(give_gradient, (dtype, vl, most, by_pixel, past_caches))


def _most_and_less(n: int) -> tuple[int, ...]:
    """n and n - 1, but for 0."""
    return (n, n - 1) if n > 1 else (n,)


def chosen_bytes(problem: PoolProblem, axes: Axes, device: Cpu) -> int:
    """The workspace."""
    return whole_lines(problem.n * problem.c * prod(axes.out))


def max_of_pixels(problem: PoolProblem, axes: Axes, device: Cpu) -> Program:
    """The runner of a gradient of channels-last data."""
    vl = min(device.lanes(problem.compute), 1 << problem.c.bit_length() - 1)
    wanted = device.threads * _TASKS_PER_THREAD
    windows, lines = (problem.n * side[0] * side[1] for side in (axes.out, axes.extent))
    find_lines, give_lines = ceil(windows / wanted), ceil(lines / wanted)
    most = tuple((taps - 1) // step + 1 for taps, step in zip(axes.taps, axes.step, strict=True))
    by_pixel = problem.c <= _FEW_VECTORS * vl
    ctx = filled(
        _FIELDS,
        **axes.fields(),
        images=problem.n,
        channels=problem.c,
        find_lines=find_lines,
        give_lines=give_lines,
        few=max(1, _AHEAD_BYTES // (problem.c * axes.step[2] * ITEMSIZE[problem.dtype])),
    )
    find = _find_task(problem.dtype, vl, axes.taps)
    give = _give_task(problem.dtype, vl, most, by_pixel, streams(problem, device))
    return Program([Phase(find, ceil(windows / find_lines), ctx), Phase(give, ceil(lines / give_lines), ctx)])
