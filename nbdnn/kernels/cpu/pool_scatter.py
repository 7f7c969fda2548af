"""The gradient of a maximum by scattering: each window gives its dy to the tap that it has chosen.

    dx = 0;  dx[p*u + r - pad] += dy[p] of every window p, where r is the first with x[p*u + r - pad] = y[p]; where y[p]
    is NaN the last with x NaN

So a window's taps are met once, where `indices` and `rows` meet them once to search and once more to gather: better
where windows have many. Planes search by vectors of windows, as `indices` does, and scatter one by one
(`pool_scatter_lines.py`); vectors of channels do both at once (`pool_scatter_pixels.py`). Sums are made in dx, so that
16-bit data would be rounded at each window.

Traffic: x, y, dy and dx once from memory. Error: that of the sums. Source: own.
"""

from __future__ import annotations

from math import prod

from nbdnn.candidate import Candidate, NoConfig, Support
from nbdnn.device import Cpu
from nbdnn.kernels.cpu import pool_scatter_lines, pool_scatter_pixels
from nbdnn.kernels.cpu.cost import fitted, kernel_us
from nbdnn.kernels.cpu.launch import Program
from nbdnn.kernels.cpu.pool_axes import axes_of
from nbdnn.kernels.cpu.pool_indices import BWD as INDICES
from nbdnn.problem import DEFAULT_COMPUTE
from nbdnn.problem_pool import PoolProblem

# One thread, nanoseconds an element, a tap and a window, by whether channels are last: priors for the guess.
_WIDE_NS = {False: (0.2, 0.05, 1.0), True: (0.2, 0.05, 0.0)}
_NARROW_NS = {False: (0.2, 0.17, 2.0), True: (0.2, 0.9, 0.0)}


class Scatter(Candidate[NoConfig, Cpu]):
    """Windows give to what they have chosen; float32 and float64."""

    op, provider, algorithm = "pool_bwd", "cpu", "scatter"

    def supports(self, problem: PoolProblem, device: Cpu) -> Support:
        if DEFAULT_COMPUTE[problem.dtype] != problem.dtype:
            return Support(False, f"{problem.dtype}: sums in dx would be rounded at each window")
        return INDICES.supports(problem, device)

    def workspace_bytes(self, problem: PoolProblem, config: NoConfig, device: Cpu) -> int:
        return 0 if problem.channels_last else pool_scatter_lines.chosen_bytes(problem, axes_of(problem), device)

    def estimate(self, problem: PoolProblem, config: NoConfig, device: Cpu) -> float:
        x, y, *_ = problem.operands
        tasks = device.threads if problem.channels_last else problem.n * problem.c
        elem_ns, tap_ns, window_ns = fitted(device, _WIDE_NS, _NARROW_NS)[problem.channels_last]
        side_ns = 2 * x.size_elems * elem_ns + y.size_elems * (prod(problem.window) * tap_ns + window_ns)
        return kernel_us(device, 0.0, side_ns, tasks, phases=2 if problem.channels_last else 1)

    def prepare(self, problem: PoolProblem, config: NoConfig, device: Cpu) -> Program:
        scatter = pool_scatter_pixels.scatter_pixels if problem.channels_last else pool_scatter_lines.scatter_lines
        return scatter(problem, axes_of(problem), device)


BWD = Scatter()
