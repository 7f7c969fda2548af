"""Convolutions of few or odd channels by a method that takes many: folded, computed, and unfolded.

    fwd: y = fwd(fold x, fold w)    bwd_data: dx = unfold bwd_data(fold w, dy)    bwd_filter: dw = unfold (fold x, dy)

`fold_axes.py` says which problem the base is posed, of taps that became channels and of channels filled up with zeros,
and `fold_copy.py` makes its operands, in the workspace behind the base's own. An operand that is right as it lies is
not copied: then the base reads, or writes, the caller's. Patches (a filter as large as its stride) are a product of
matrices, whose one factor is the filter as it is.

beta of an output that is copied is added as it is copied, so that results of 16 bits are rounded twice; an epilogue is
done after that. Traffic: the copies, written and read, and that of the base. Source: own.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

from nbdnn.candidate import YES, Support
from nbdnn.device import Gpu
from nbdnn.kernels.cuda import (
    conv_fma_gemm,
    conv_fma_gemm_filter,
    conv_mma_gemm,
    conv_mma_gemm_filter,
    conv_wgmma,
    conv_wgmma_filter,
    fold_copy,
)
from nbdnn.kernels.cuda.fold_axes import FEW, PLACES, Costs, Folded, folded, output_place
from nbdnn.kernels.cuda.fold_copy import Tensor, copy_bytes
from nbdnn.kernels.cuda.geometry import filter_strides
from nbdnn.kernels.cuda.launch import Launch, LaunchedCandidate, in_workspace
from nbdnn.kernels.cuda.peaks import copy_bytes_per_s
from nbdnn.kernels.cuda.turn_channels import ALIGN_BYTES, is_planar
from nbdnn.kernels.cuda.unfused import finish_launch
from nbdnn.kernels.spatial import tensor_strides
from nbdnn.problem import ITEMSIZE
from nbdnn.problem_conv import ConvProblem

_INT32_END = 2**31 - 2**16  # what an index reaches: the last block counts on beyond the last element
_LAUNCH_US = 2.0
# Copies are of elements that lie apart: times what their bytes take in order (first layers of 32 images, an H200).
_APART, _NARROW_APART = 1.3, 2.0
_MOST_CONFIGS = 3


class _Base(NamedTuple):
    """grains: of a forward, bwd_data and bwd_filter, how many channels of a tap it multiplies at once, be they zeros.
    products: in the time in which an element is copied. least: folded channels that are worth a stage of it.
    any_number: whether channels need not come in whole chunks."""

    grains: tuple[int, int, int]
    products: int
    least: int = 0
    any_number: bool = False


_BASES = {
    "mma_gemm": _Base((32, 32, 8), 200),
    "mma_gemm_tf32": _Base((16, 32, 4), 200),
    "wgmma_gemm": _Base((64, 64, 64), 300, 64),
    "wgmma_gemm_tf32": _Base((32, 64, 64), 300, 32),
    "fma_gemm": _Base((8, 64, 4), 50, any_number=True),
}


class FoldedGemm(LaunchedCandidate[Hashable]):
    """A method behind copies."""

    def __init__(self, base: LaunchedCandidate[Any]) -> None:
        self.base, self._wants = base, _BASES[base.algorithm]
        self.op, self.algorithm, self.math = base.op, f"folded_{base.algorithm}", base.math
        grain = self._wants.grains[list(PLACES).index(base.op)]
        self._costs = Costs(grain, self._wants.products, self._wants.any_number)

    def folded(self, problem: ConvProblem) -> Folded:
        return folded(problem, self._costs)

    def roundings(self, problem: ConvProblem, device: Gpu) -> int:
        copied = output_place(problem) in self.folded(problem).copies
        after = "beta" in problem.epilogue, bool(_tokens(problem))
        return self.base.roundings(self.folded(problem).posed, device) + (sum(after) if copied else 0)

    def supports(self, problem: ConvProblem, device: Gpu) -> Support:
        if problem.groups != 1:
            return Support(False, f"{problem.groups} groups, one is folded")
        posed, copies = self.folded(problem)
        if not copies:
            reason = f"{problem.c} and {problem.k} channels are whole"
            return Support(False, reason if problem.c >= FEW else f"{reason}, taps that are folded are no cheaper")
        if posed.c < self._wants.least:
            return Support(False, f"{posed.c} channels when folded, {self._wants.least} are worth a stage")
        if (largest := max(operand.size_elems for operand in problem.operands)) >= _INT32_END:
            return Support(False, f"{largest} elements are more than int32 counts")
        support = self.base.supports(posed, device)
        return YES if support.ok else Support(False, f"when folded: {support.reason}")

    def configs(self, problem: ConvProblem, device: Gpu) -> tuple[Hashable, ...]:
        return self.base.configs(self.folded(problem).posed, device)[:_MOST_CONFIGS]

    def workspace_bytes(self, problem: ConvProblem, config: Hashable, device: Gpu) -> int:
        start_bytes = self._start_bytes(problem, config, device)
        tensors = _tensors(problem, self.folded(problem))
        return start_bytes + sum(_room_bytes(copy_bytes(tensor, problem.dtype)) for tensor in tensors.values())

    def estimate(self, problem: ConvProblem, config: Hashable, device: Gpu) -> float:
        found = self.folded(problem)
        us = self.base.estimate(found.posed, config, device)
        moved_bytes = 0
        for place, tensor in _tensors(problem, found).items():
            moved_bytes += copy_bytes(tensor, problem.dtype) + problem.operands[place].size_bytes
        out = output_place(problem)
        launches = any(place != out for place in found.copies) + (out in found.copies)
        if out in found.copies and _tokens(problem):
            moved_bytes += 2 * problem.operands[out].size_bytes
            launches += 1
        apart = _APART if problem.dtype == "f32" else _NARROW_APART
        return us + _LAUNCH_US * launches + apart * moved_bytes / copy_bytes_per_s(device) * 1e6

    def launches(self, problem: ConvProblem, config: Hashable, device: Gpu) -> list[Launch]:
        found, out = self.folded(problem), output_place(problem)
        tensors, at_bytes, places = _tensors(problem, found), self._start_bytes(problem, config, device), {}
        for place, tensor in tensors.items():
            places[place] = in_workspace(at_bytes)
            at_bytes += _room_bytes(copy_bytes(tensor, problem.dtype))
        inputs = [place for place in tensors if place != out]
        pointers = [pointer for place in inputs for pointer in (place, places[place])]
        made = [_moved(launch, places) for launch in self.base.launches(found.posed, config, device)]
        if inputs:
            made.insert(0, fold_copy.fold([tensors[place] for place in inputs], pointers, problem.dtype, device))
        if out in tensors:
            adds = "beta" in problem.epilogue
            made.append(fold_copy.unfold(tensors[out], (out, places[out]), problem.dtype, adds, device))
            made += [finish_launch(problem)] if _tokens(problem) else []
        return made

    def _start_bytes(self, problem: ConvProblem, config: Hashable, device: Gpu) -> int:
        """Of the copies: they lie behind the base's workspace."""
        return _room_bytes(self.base.workspace_bytes(self.folded(problem).posed, config, device))


def _tokens(problem: ConvProblem) -> tuple[str, ...]:
    """What is done to an output after beta."""
    return tuple(token for token in problem.epilogue if token != "beta")


def _room_bytes(size_bytes: int) -> int:
    return -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES


def _moved(launch: Launch, places: dict[int, int]) -> Launch:
    """A launch of the base with its operands where the copies are."""
    return launch._replace(
        pointers=tuple(places.get(place, place) for place in launch.pointers),
        maps=tuple(each._replace(place=places.get(each.place, each.place)) for each in launch.maps),
    )


def _tensors(problem: ConvProblem, found: Folded) -> dict[int, Tensor]:
    """By place among the operands, in their order, those that are copied."""
    of_x, of_w, of_y = PLACES[problem.op]
    tensors = {}
    for place in sorted(found.copies):
        operand, axes = problem.operands[place], found.copies[place]
        ordered_as = operand if all(axis.factor == 1 for axis in axes) else problem.operands[of_x]
        strides: tuple[int, ...] = (0, *tensor_strides(operand.shape, not is_planar(operand)))
        if place == of_w:
            strides = filter_strides(problem)
        tensors[place] = Tensor(
            operand.shape,
            strides[1:],
            strides[0],
            axes,
            images=found.posed.k if place == of_w else problem.n,
            channels=found.posed.k if place == of_y else found.posed.c,
            planar=is_planar(ordered_as),
            align=problem.align // ITEMSIZE[problem.dtype],
        )
    return tensors


FWD = tuple(FoldedGemm(base) for base in (*conv_wgmma.FWD, *conv_mma_gemm.FWD, conv_fma_gemm.FWD))
BWD_DATA = tuple(FoldedGemm(base) for base in (*conv_wgmma.BWD_DATA, *conv_mma_gemm.BWD_DATA, conv_fma_gemm.BWD_DATA))
BWD_FILTER = tuple(
    FoldedGemm(base)
    for base in (conv_wgmma_filter.BWD_FILTER, *conv_mma_gemm_filter.BWD_FILTER, conv_fma_gemm_filter.BWD_FILTER)
)
