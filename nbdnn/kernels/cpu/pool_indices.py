"""The gradient of a maximum by indices: the tap that each window has chosen, a byte, then what each element gets.

    chosen[p] = the first r at which x[p*u + r - pad] = y[p]; where y[p] is NaN the last r at which x is; else NONE
    dx[i] = sum of dy[p] over the windows p that cover i and whose chosen[p] is i + pad - p*u

A vector of windows (`pool_max_lines.py`) or of channels (`pool_max_pixels.py`) looks for y, where `rows` searches an
axis at a time: better where windows share little, or lie in three axes. y must be what the maxima are.

Traffic: x, y, dy and dx once from memory. Error: that of the sums, in float32 (float64). Source: own.
"""

from __future__ import annotations

from math import prod

from nbdnn.candidate import YES, Candidate, NoConfig, Support
from nbdnn.device import Cpu
from nbdnn.kernels.cpu import pool_max_lines, pool_max_pixels
from nbdnn.kernels.cpu.cost import fitted, kernel_us
from nbdnn.kernels.cpu.launch import Program
from nbdnn.kernels.cpu.pool_axes import axes_of
from nbdnn.kernels.cpu.pool_lines import NONE
from nbdnn.problem_pool import PoolProblem

MOST_TAPS, MOST_STEP = 8, 8  # along a row of a plane, where all are met one after the other
# One thread, nanoseconds an element and a tap: priors for the guess, of 20 shapes each.
_WIDE_NS, _NARROW_NS = (0.27, 0.1), (0.35, 0.175)


class Indices(Candidate[NoConfig, Cpu]):
    """A byte a window says which tap is its maximum; windows of fewer than 255 taps, and of planes short ones."""

    op, provider, algorithm = "pool_bwd", "cpu", "indices"

    def supports(self, problem: PoolProblem, device: Cpu) -> Support:
        if not problem.is_max:
            return Support(False, f"mode is {problem.mode}, this kernel takes maxima")
        axes = axes_of(problem)
        if (taps := prod(axes.taps)) >= NONE:
            return Support(False, f"a window has {taps} taps, this kernel takes {NONE - 1}")
        if problem.channels_last:
            return YES
        if axes.taps[2] > MOST_TAPS:
            return Support(False, f"a window is {axes.taps[2]} wide, this kernel takes {MOST_TAPS} in planes")
        if axes.step[2] > MOST_STEP:
            return Support(False, f"windows are {axes.step[2]} apart in a row, this kernel takes {MOST_STEP} in planes")
        return YES

    def workspace_bytes(self, problem: PoolProblem, config: NoConfig, device: Cpu) -> int:
        way = pool_max_pixels if problem.channels_last else pool_max_lines
        return way.chosen_bytes(problem, axes_of(problem), device)

    def estimate(self, problem: PoolProblem, config: NoConfig, device: Cpu) -> float:
        elem_ns, tap_ns = fitted(device, _WIDE_NS, _NARROW_NS)
        elements = sum(operand.size_elems for operand in problem.operands)
        return kernel_us(device, 0.0, elements * elem_ns + problem.flops * tap_ns, device.threads, phases=2)

    def prepare(self, problem: PoolProblem, config: NoConfig, device: Cpu) -> Program:
        axes = axes_of(problem)
        if problem.channels_last:
            return pool_max_pixels.max_of_pixels(problem, axes, device)
        return pool_max_lines.max_of_lines(problem, axes, device)


BWD = Indices()
