"""The spatial transformer by cuDNN: the legacy API, its only one for it.

    grid = theta @ (u, v, 1),  y = sampler(x, grid)
    dx, dgrid = the sampler's gradient at x, grid, dy,  dtheta = sum of dgrid^T (u, v, 1)

A grid and a sampler are a function each; the whole is both, with the grid (and dgrid) in the workspace. Gradients, of
the sampler and of theta, add up in any order. Images are NCHW; a grid of 16 bits would miss positions by more than a
rounding of the result, and an output of one row or column divides by 0.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache, partial
from typing import NamedTuple

from nbdnn.candidate import YES, Candidate, NoConfig, Runner, Support
from nbdnn.cudnn.api import call, failure, function, naming
from nbdnn.cudnn.descriptors import DATA_TYPE, Legacy, ints, tensor
from nbdnn.cudnn.enums import SamplerType
from nbdnn.cudnn.handle import handle
from nbdnn.cudnn.library import loaded_version
from nbdnn.device import Gpu
from nbdnn.errors import CudaError, CudnnError
from nbdnn.kernels.cuda.peaks import copy_bytes_per_s
from nbdnn.kernels.cuda.spatialtf_position import adding_us
from nbdnn.problem import FAMILIES, ITEMSIZE
from nbdnn.problem_spatialtf import SpatialtfProblem

# Extents, and the elements of a tensor, are int32 in this API.
_MOST_ELEMS, _MOST_CHANNELS = 2**31 - 1, 1024
_ALIGN_BYTES = 16
_KNOWN = 4096
_LAUNCH_US = 4.0
_SLOWER = 4.0  # times the floor: a prior for the guess, of no measurement


def _descriptor(problem: SpatialtfProblem) -> Legacy:
    made = Legacy("SpatialTransformer")
    shape = ints((problem.n, max(problem.c, 1), *problem.out_spatial))
    described = SamplerType.BILINEAR, DATA_TYPE[problem.dtype], 4, shape
    call("cudnnSetSpatialTransformerNdDescriptor", made.address, *described)
    return made


@lru_cache(_KNOWN)
def _refusal(problem: SpatialtfProblem) -> str:
    """Why cuDNN does not know such a transformer, or ''."""
    if ITEMSIZE[problem.dtype] == 2:
        return f"{problem.dtype}: its positions have {8 * ITEMSIZE[problem.dtype]} bits"
    if problem.channels_last:
        return "layout nhwc: cuDNN samples planes"
    if problem.align < _ALIGN_BYTES:
        return f"pointers are multiples of {problem.align} bytes only, not of {_ALIGN_BYTES}"
    if problem.c > _MOST_CHANNELS:
        return f"{problem.c} channels, at most {_MOST_CHANNELS} are known"
    for name, extent in zip(("rows", "columns"), problem.out_spatial, strict=True):
        if extent == 1:
            return f"1 output along the {name}: cuDNN puts it at the edge, not in the middle"
    for operand in problem.operands:
        if not 0 < operand.size_elems <= _MOST_ELEMS:
            return f"{operand.name} has {operand.size_elems} elements, the legacy API takes 1 to {_MOST_ELEMS}"
    try:
        _descriptor(problem)
    except (CudnnError, CudaError) as error:
        return str(error).partition("\n")[0]
    return ""


class _Step(NamedTuple):
    """A function's name, and what it takes behind handle and transformer, of (operands' addresses, workspace)."""

    name: str
    arguments: tuple[Callable[[tuple[int, ...]], int], ...]


class _Run:
    """Prepared calls. Their arguments stay where they are."""

    __slots__ = ("_handle", "_keep", "_problem", "_steps", "_transformer")

    def __init__(self, problem: SpatialtfProblem, device: Gpu) -> None:
        self._problem, self._handle = problem, handle(device)
        number = ctypes.c_double if problem.dtype == "f64" else ctypes.c_float
        scalars, transformer = (number(1), number(0)), _descriptor(problem)
        tensors = {o.name: tensor(o) for o in problem.operands if o.name in ("x", "y", "dx", "dy")}
        self._keep, self._transformer = (scalars, tensors, transformer), transformer.address
        one, zero = (_fixed(ctypes.addressof(scalar)) for scalar in scalars)
        described = {name: _fixed(each.address) for name, each in tensors.items()}
        at = _places(problem)
        steps = []
        if "theta" in at:
            steps.append(_Step("cudnnSpatialTfGridGeneratorForward", (at["theta"], at["grid"])))
        if "y" in at:
            arguments = one, described["x"], at["x"], at["grid"], zero, described["y"], at["y"]
            steps.append(_Step("cudnnSpatialTfSamplerForward", arguments))
        if "dx" in at:
            to_image = one, described["x"], at["x"], zero, described["dx"], at["dx"]
            to_grid = one, described["dy"], at["dy"], at["grid"], zero, at["dgrid"]
            steps.append(_Step("cudnnSpatialTfSamplerBackward", (*to_image, *to_grid)))
        if "dtheta" in at:
            steps.append(_Step("cudnnSpatialTfGridGeneratorBackward", (at["dgrid"], at["dtheta"])))
        self._steps = [(function(step.name), *step) for step in steps]

    def __call__(
        self, pointers: tuple[int, ...], scalars: tuple[float, ...], workspace: int, stream: int, /
    ) -> None:  # fmt: skip
        self._handle.use(stream)
        given = (*pointers, workspace)
        for run, name, arguments in self._steps:
            status = run(self._handle.address, self._transformer, *(argument(given) for argument in arguments))
            if status:
                with naming(self._problem):
                    raise failure(name, status)


def _fixed(address: int) -> Callable[[tuple[int, ...]], int]:
    return lambda given: address


def _given(place: int, offset_bytes: int, given: tuple[int, ...]) -> int:
    return given[place] + offset_bytes


def _places(problem: SpatialtfProblem) -> dict[str, Callable[[tuple[int, ...]], int]]:
    """Where each array is among the pointers and the workspace, which has the grid and dgrid of a whole."""
    found = {name: partial(_given, place, 0) for name, place in problem.places.items()}
    if problem.has_image and problem.is_affine:
        found["grid"] = partial(_given, -1, 0)
        found["dgrid"] = partial(_given, -1, _grid_bytes(problem))
    return found  # type: ignore[return-value]


def _grid_bytes(problem: SpatialtfProblem) -> int:
    """Of one in the workspace, up to where the next may begin."""
    size_bytes = problem.n * problem.positions * 2 * ITEMSIZE[problem.dtype]
    return -(-size_bytes // 256) * 256


class Transformer(Candidate[NoConfig, Gpu]):
    """cuDNN's spatial transformer, or a step of it, in one direction."""

    provider, algorithm = "cudnn", "legacy"

    def __init__(self, op: str) -> None:
        self.op = op
        self.deterministic = not op.endswith("_bwd")

    @property
    def cudnn_version(self) -> int:
        return loaded_version()

    def supports(self, problem: SpatialtfProblem, device: Gpu) -> Support:
        reason = _refusal(problem)
        return Support(False, reason) if reason else YES

    def estimate(self, problem: SpatialtfProblem, config: NoConfig, device: Gpu) -> float:
        adds = problem.has_image and self.op.endswith("bwd")
        added_us = adding_us(problem, side_by_side=False) if adds else 0.0
        return _LAUNCH_US + _SLOWER * problem.min_bytes / copy_bytes_per_s(device) * 1e6 + added_us

    def workspace_bytes(self, problem: SpatialtfProblem, config: NoConfig, device: Gpu) -> int:
        grids = {"spatialtf_fwd": 1, "spatialtf_bwd": 2}.get(self.op, 0)
        return grids * _grid_bytes(problem)

    def prepare(self, problem: SpatialtfProblem, config: NoConfig, device: Gpu) -> Runner:
        with naming(problem):
            return _Run(problem, device)


ALL = {op: Transformer(op) for op in FAMILIES["spatialtf"]}
