"""The first layer of a network by windows of raw image rows: forward and filter gradient of up to four channels.

`rows_plan.py` has the idea and the tiling, `rows_forward.py` and `rows_filter.py` the kernels, their traffic and their
order of summation. Where rows of the image are no multiple of 4 bytes, or taps are dilated, `conv_stem.py` has the
layer.
"""

from __future__ import annotations

from nbdnn.candidate import YES, Support
from nbdnn.device import Gpu
from nbdnn.kernels.cuda import rows_filter, rows_forward, rows_sums
from nbdnn.kernels.cuda.compile import Source
from nbdnn.kernels.cuda.geometry import index_bits
from nbdnn.kernels.cuda.launch import WORKSPACE, Launch, LaunchedCandidate, gather_pointers
from nbdnn.kernels.cuda.peaks import blocks_at_once, copy_bytes_per_s, fma_flops_per_s, tensor_flops_per_s
from nbdnn.kernels.cuda.rows_launch import (
    CONFIGS,
    SMALLEST,
    Config,
    Forwarded,
    Gradients,
    forward,
    gradients,
    warps_at_once,
)
from nbdnn.kernels.cuda.rows_plan import refusal
from nbdnn.problem import ITEMSIZE
from nbdnn.problem_conv import ConvProblem

_MOST_CHANNELS = 4
_MOST_RUN = 64  # elements of a segment: a loop over them is written out
_LAUNCH_US = 3.0
# Priors for the guess: parts of the units' rates, and of a copy's.
_FMA_SHARE, _TENSOR_SHARE, _COPY_SHARE = 0.65, 0.35, 0.65


def _plan(problem: ConvProblem, math: str, config: Config, device: Gpu) -> Forwarded | Gradients:
    return (gradients if problem.op == "conv_bwd_filter" else forward)(problem, math, config, device)


def fits(problem: ConvProblem, math: str, config: Config, device: Gpu) -> Support:
    """Whether a config's blocks find room, and int32 holds every index."""
    planned = _plan(problem, math, config, device)
    needed = planned.shared_bytes
    if (room := blocks_at_once(needed, device)) < config.blocks:
        return Support(False, f"{config.blocks} blocks of {needed} bytes, a multiprocessor has room for {room}")
    if max(planned.grid[1:]) > 65535:
        return Support(False, f"a grid of {planned.grid} blocks, of which 65535 are possible on two axes")
    if (bits := index_bits(problem, planned.integers)) > 32:
        return Support(False, f"indices take {bits} bits, this kernel has 32")
    return YES


class ByRows(LaunchedCandidate[Config]):
    """A convolution by raw rows. math: 'fma', or 'tf32'; 16-bit data take matrix units in any case."""

    algorithm = "rows"

    def __init__(self, op: str, math: str = "fma") -> None:
        self.op, self.math = op, math
        if math == "tf32":
            self.algorithm = f"{self.algorithm}_tf32"

    def units_math(self, problem: ConvProblem) -> str:
        return "mma" if problem.dtype in ("f16", "bf16") else self.math

    def refused(self, problem: ConvProblem) -> str:
        """Why no tile can be right, or ''."""
        if problem.ndim != 2:
            return f"the image has {problem.ndim} spatial axes, this kernel takes 2"
        if problem.groups > 1 or not 1 <= problem.c <= _MOST_CHANNELS:
            return f"{problem.c} channels in {problem.groups} groups, this kernel takes 1 to {_MOST_CHANNELS} in one"
        if problem.k < 1:
            return f"there are {problem.k} filters"
        if problem.dtype == "f64" or (self.math == "tf32" and problem.dtype != "f32"):
            return f"the data are {problem.dtype}"
        run = problem.filter[1] * (problem.c if problem.channels_last else 1)
        if run > _MOST_RUN:
            return f"{run} neighbours of a window, this kernel takes {_MOST_RUN}"
        if self.op == "conv_bwd_filter":
            bytes_ = problem.k * ITEMSIZE[problem.dtype]
            if not problem.y_channels_last or bytes_ % 16 or problem.align % 16:
                return f"{problem.k} filters of dy in {problem.y_layout}, this kernel copies 16 bytes of neighbours"
        return refusal(problem, self.units_math(problem))

    def supports(self, problem: ConvProblem, device: Gpu) -> Support:
        if reason := self.refused(problem):
            return Support(False, reason)
        return fits(problem, self.units_math(problem), SMALLEST[-1], device)

    def configs(self, problem: ConvProblem, device: Gpu) -> tuple[Config, ...]:
        """Those that fit, and are not another by a different name; else the smallest."""
        math = self.units_math(problem)
        different: dict[Forwarded | Gradients, Config] = {}
        for config in CONFIGS[self.op][math == "fma"]:
            planned = _plan(problem, math, config, device)
            warps = planned.threads // 32 * planned.min_blocks
            if warps <= warps_at_once(planned.variant.registers) and fits(problem, math, config, device).ok:
                different.setdefault(planned, config)
        return tuple(different.values()) or SMALLEST

    def workspace_bytes(self, problem: ConvProblem, config: Config, device: Gpu) -> int:
        if self.op != "conv_bwd_filter":
            return 0
        return gradients(problem, self.units_math(problem), config, device).workspace_bytes

    def estimate(self, problem: ConvProblem, config: Config, device: Gpu) -> float:
        math = self.units_math(problem)
        if math == "fma":
            flops_per_s = _FMA_SHARE * fma_flops_per_s(device, "f32")
        else:
            flops_per_s = _TENSOR_SHARE * tensor_flops_per_s(device, problem.dtype, math == "tf32")
        moved_us = problem.min_bytes / (_COPY_SHARE * copy_bytes_per_s(device)) * 1e6
        launches = 2 if self.op == "conv_bwd_filter" else 1
        return launches * _LAUNCH_US + max(problem.flops / flops_per_s * 1e6, moved_us)

    def launches(self, problem: ConvProblem, config: Config, device: Gpu) -> list[Launch]:
        math = self.units_math(problem)
        if self.op == "conv_bwd_filter":
            return _gradient_launches(problem, gradients(problem, math, config, device))
        return [_forward_launch(problem, forward(problem, math, config, device))]


def _forward_launch(problem: ConvProblem, planned: Forwarded) -> Launch:
    builder = rows_forward.fma_kernel if planned.variant.lines.math == "fma" else rows_forward.mma_kernel
    return Launch(
        source=Source(builder, planned.variant, planned.threads, planned.min_blocks),
        grid=planned.grid,
        pointers=gather_pointers(problem),
        scalars="f32",
        integers=planned.integers,
        dynamic_shared_bytes=planned.shared_bytes,
    )


def _gradient_launches(problem: ConvProblem, planned: Gradients) -> list[Launch]:
    builder = rows_filter.fma_kernel if planned.variant.lines.math == "fma" else rows_filter.mma_kernel
    parts = Launch(
        source=Source(builder, planned.variant, planned.threads, planned.min_blocks),
        grid=planned.grid,
        pointers=(0, 1, WORKSPACE),
        scalars="",
        integers=planned.integers,
        dynamic_shared_bytes=planned.shared_bytes,
    )
    total = Launch(
        source=Source(rows_sums.sum_kernel, (problem.dtype, problem.epilogue), rows_sums.SUM_THREADS),
        grid=(planned.sums.elements // rows_sums.SUM_ELEMENTS, 1, 1),
        pointers=(WORKSPACE, 2),
        scalars="f32",
        integers=planned.sums,
    )
    return [parts, total]


FWD, FWD_TF32 = ByRows("conv_fwd"), ByRows("conv_fwd", "tf32")
BWD_FILTER, BWD_FILTER_TF32 = ByRows("conv_bwd_filter"), ByRows("conv_bwd_filter", "tf32")
