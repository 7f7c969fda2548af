"""The forward computed by a gradient's candidate, on transposed operands.

With stride 1, dilation 1 and one group, in mode 'cross':

    border 'valid':  y[n, k, p] = sum over c, r of x[n, c, p + r] * w[k, c, r]
                     is the filter gradient of an image (c, n) and a dy (c, k): its dw is (k, n, p).
    border 'full':   y[n, k, p] = sum over c, r of x[n, c, p - r] * w[k, c, R-1-r]
                     is the data gradient of dy = x under the filter (c, k), flipped: its dx is y.

The first is for filters nearly as big as the image: what it sums over is long and its result small. Both copy what
they transpose into the workspace inside the runner, so that the copies are part of the measured time: x, w and y for
'valid', only w for 'full'. Source: Theano's dnn_conv, whose direction_hint chose them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace

import numpy as np

from nbdnn.array import at
from nbdnn.cached import cached_property
from nbdnn.candidate import Candidate, Runner, Support
from nbdnn.device import Cpu
from nbdnn.kernels.cpu.scratch import whole_lines
from nbdnn.problem import Operand
from nbdnn.problem_conv import ConvProblem

_COPY_BYTES_PER_US = 2e3  # NumPy transposing a float32 array, one thread: a prior for the guess


class _Lowered(Candidate):
    """`inner`, a candidate of a gradient, as one of the forward."""

    op, provider = "conv_fwd", "cpu"
    border: Callable[[int], int]

    def __init__(self, inner: Candidate) -> None:
        self.inner = inner
        self.algorithm = f"{inner.op.removeprefix('conv_')}_{inner.algorithm}"
        self.deterministic, self.math, self.by_name_only = inner.deterministic, inner.math, inner.by_name_only

    @cached_property
    def version(self) -> str:
        return f"{super().version}-{self.inner.version}"

    def supports(self, problem: ConvProblem, device: Cpu) -> Support:
        if device.kind != "cpu":
            return Support(False, f"transposes on the CPU, not on {device.kind}")
        if problem.epilogue:
            return Support(False, f"no epilogue, not {'+'.join(problem.epilogue)}")
        if {*problem.stride, *problem.dilation, problem.groups} != {1}:
            return Support(
                False, f"stride, dilation, groups are {problem.stride}, {problem.dilation}, {problem.groups}"
            )
        wanted = tuple((self.border(extent),) * 2 for extent in problem.filter)
        if problem.pad != wanted:
            return Support(False, f"pad is {problem.pad}, not {wanted}")
        return self.inner.supports(self.lowered(problem), device)

    def configs(self, problem: ConvProblem, device: Cpu) -> tuple[Hashable, ...]:
        return self.inner.configs(self.lowered(problem), device)

    def workspace_bytes(self, problem: ConvProblem, config: Hashable, device: Cpu) -> int:
        copies = sum(whole_lines(operand.size_bytes) for operand in self.copied(problem))
        return copies + self.inner.workspace_bytes(self.lowered(problem), config, device)

    def estimate(self, problem: ConvProblem, config: Hashable, device: Cpu) -> float:
        copied_bytes = sum(operand.size_bytes for operand in self.copied(problem))
        return self.inner.estimate(self.lowered(problem), config, device) + copied_bytes / _COPY_BYTES_PER_US

    def lowered(self, problem: ConvProblem) -> ConvProblem:
        """The gradient's problem."""
        raise NotImplementedError

    def copied(self, problem: ConvProblem) -> tuple[Operand, ...]:
        """The operands of the gradient's problem that live in the workspace."""
        raise NotImplementedError


class AsBwdFilter(_Lowered):
    """'bprop weights': border 'valid'."""

    border = staticmethod(lambda extent: 0)

    def lowered(self, problem: ConvProblem) -> ConvProblem:
        return replace(
            problem, op="conv_bwd_filter", n=problem.c, c=problem.n, filter=problem.out_spatial, mode="cross",
            layout="nchw" if problem.ndim == 2 else "ncdhw", w_layout="", y_layout="", align=16,
        )  # fmt: skip

    def copied(self, problem: ConvProblem) -> tuple[Operand, ...]:
        return self.lowered(problem).operands

    def prepare(self, problem: ConvProblem, config: Hashable, device: Cpu) -> Runner:
        run = self.inner.prepare(self.lowered(problem), config, device)
        x, w, y = problem.operands
        x_copy, w_copy, y_copy = self.copied(problem)
        w_at = whole_lines(x_copy.size_bytes)
        y_at = w_at + whole_lines(w_copy.size_bytes)
        rest_at = y_at + whole_lines(y_copy.size_bytes)
        flip = problem.mode == "conv"

        def runner(pointers: tuple[int, ...], scalars: tuple[float, ...], workspace: int, stream: int) -> None:
            inside = workspace, workspace + w_at, workspace + y_at
            _view(inside[0], x_copy)[...] = _view(pointers[0], x).swapaxes(0, 1)
            w_array = _view(pointers[1], w)
            flipped = np.flip(w_array, tuple(range(2, w_array.ndim))) if flip else w_array
            _view(inside[1], w_copy)[...] = flipped.swapaxes(0, 1)
            run(inside, scalars, workspace + rest_at, stream)
            _view(pointers[2], y)[...] = _view(inside[2], y_copy).swapaxes(0, 1)

        return runner


class AsBwdData(_Lowered):
    """'bprop inputs': border 'full'."""

    border = staticmethod(lambda extent: extent - 1)

    def lowered(self, problem: ConvProblem) -> ConvProblem:
        return replace(
            problem, op="conv_bwd_data", c=problem.k, k=problem.c, spatial=problem.out_spatial,
            pad=((0, 0),) * problem.ndim, mode="cross" if problem.mode == "conv" else "conv",
        )  # fmt: skip

    def copied(self, problem: ConvProblem) -> tuple[Operand, ...]:
        return self.lowered(problem).operands[:1]

    def prepare(self, problem: ConvProblem, config: Hashable, device: Cpu) -> Runner:
        run = self.inner.prepare(self.lowered(problem), config, device)
        w = problem.operands[1]
        (w_copy,) = self.copied(problem)
        rest_at = whole_lines(w_copy.size_bytes)

        def runner(pointers: tuple[int, ...], scalars: tuple[float, ...], workspace: int, stream: int) -> None:
            x_pointer, w_pointer, y_pointer = pointers
            _view(workspace, w_copy)[...] = _view(w_pointer, w).swapaxes(0, 1)
            run((workspace, x_pointer, y_pointer), scalars, workspace + rest_at, stream)

        return runner


def _view(pointer: int, operand: Operand) -> np.ndarray:
    return at(pointer, operand.shape, operand.strides, operand.dtype)
