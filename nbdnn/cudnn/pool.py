"""Pooling by cuDNN: the legacy API, its only one for pooling.

    y = alpha * pool(x),   dx = alpha * (gradient of pool at x, y, dy)

A sum is the average with the padding, times the size of the window. The gradient of an average looks at neither x nor
y, and dx and dy, which have their shapes, stand for them. Both maxima are the deterministic one: its gradient goes to
the first of equal ones, as it must (and to the first NaN, where the other candidates take the last). It was 2 to 500
times slower than the kernels of Numba (an H200, cuDNN 9.19).
"""

from __future__ import annotations

import ctypes
from ctypes import c_int
from functools import lru_cache
from math import ceil, prod

from nbdnn.candidate import YES, Candidate, NoConfig, Runner, Support
from nbdnn.cudnn.api import call, failure, function, naming
from nbdnn.cudnn.descriptors import Legacy, ints, tensor
from nbdnn.cudnn.enums import NanPropagation, PoolingMode
from nbdnn.cudnn.handle import handle
from nbdnn.cudnn.library import loaded_version
from nbdnn.device import Gpu
from nbdnn.errors import CudaError, CudnnError
from nbdnn.kernels.cuda.peaks import copy_bytes_per_s
from nbdnn.problem_pool import PoolProblem

_MODE = {
    "max": PoolingMode.MAX_DETERMINISTIC,
    "max_deterministic": PoolingMode.MAX_DETERMINISTIC,
    "average_inc_pad": PoolingMode.AVERAGE_COUNT_INCLUDE_PADDING,
    "average_exc_pad": PoolingMode.AVERAGE_COUNT_EXCLUDE_PADDING,
    "sum": PoolingMode.AVERAGE_COUNT_INCLUDE_PADDING,
}
# Extents, and the elements of a tensor, are int32 in this API.
_MOST_ELEMS = 2**31 - 1
_ALIGN_BYTES = 16
_KNOWN = 4096
_LAUNCH_US = 4.0
# Times the floor, at its best on an H200: priors for the guess.
_SLOWER = {"pool_fwd": 4.0, "pool_bwd": 8.0}
_TAPS_PER_CLOCK_AND_SM = 6.4
_TAP_CLOCKS, _SEARCHED_CLOCKS = 60, 46  # of one thread's, of a window; of all windows that an element is in


def _descriptor(problem: PoolProblem) -> Legacy:
    made = Legacy("Pooling")
    axes = (ints(problem.window), ints(problem.pad), ints(problem.stride))
    mode, nan = _MODE[problem.mode], NanPropagation.PROPAGATE_NAN
    call("cudnnSetPoolingNdDescriptor", made.address, mode, nan, len(problem.spatial), *axes)
    return made


@lru_cache(_KNOWN)
def _refusal(problem: PoolProblem) -> str:
    """Why cuDNN does not know such a pooling, or ''."""
    for pad, taps in zip(problem.pad, problem.window, strict=True):
        if pad >= taps:
            return f"a pad of {pad} with windows of {taps}: cuDNN has no window wholly in the padding"
    if problem.op == "pool_bwd" and problem.mode.startswith("max") and len(problem.window) == 3:
        return "3 axes: ties of a maximum do not go to the first"
    if problem.align < _ALIGN_BYTES:
        return f"pointers are multiples of {problem.align} bytes only, not of {_ALIGN_BYTES}"
    for operand in problem.operands:
        if not 0 < operand.size_elems <= _MOST_ELEMS:
            return f"{operand.name} has {operand.size_elems} elements, the legacy API takes 1 to {_MOST_ELEMS}"
    image = next(operand for operand in problem.operands if operand.shape == problem.x_shape)
    rank = len(image.shape)
    found = (c_int * rank)()
    try:
        pooling, described = _descriptor(problem), tensor(image)
        call("cudnnGetPoolingNdForwardOutputDim", pooling.address, described.address, rank, found)
    except (CudnnError, CudaError) as error:
        return str(error).partition("\n")[0]
    return "" if tuple(found) == problem.y_shape else f"its y has shape {tuple(found)}, not {problem.y_shape}"


class _Run:
    """One prepared call. Its arguments stay where they are."""

    __slots__ = ("_device", "_function", "_handle", "_keep", "_name", "_one", "_pool", "_problem", "_zero")

    def __init__(self, problem: PoolProblem, device: Gpu) -> None:
        self._problem, self._handle = problem, handle(device)
        self._name = "cudnnPoolingForward" if problem.op == "pool_fwd" else "cudnnPoolingBackward"
        self._function = function(self._name)
        number = ctypes.c_double if problem.dtype == "f64" else ctypes.c_float
        scalars = number(prod(problem.window) if problem.mode == "sum" else 1), number(0)
        tensors = [tensor(operand) for operand in problem.operands]
        pooling = _descriptor(problem)
        self._keep = scalars, tensors, pooling
        self._one, self._zero = (ctypes.addressof(scalar) for scalar in scalars)
        self._pool = pooling.address

    def __call__(
        self, pointers: tuple[int, ...], scalars: tuple[float, ...], workspace: int, stream: int, /
    ) -> None:  # fmt: skip
        self._handle.use(stream)
        start = self._handle.address, self._pool, self._one
        described = [each.address for each in self._keep[1]]
        if len(pointers) == 2 and self._name == "cudnnPoolingForward":
            (x, y), (x_at, y_at) = described, pointers
            status = self._function(*start, x, x_at, self._zero, y, y_at)
        else:
            if len(pointers) == 2:
                (dy, dx), (dy_at, dx_at) = described, pointers
                x, y, x_at, y_at = dx, dy, dx_at, dy_at
            else:
                (x, y, dy, dx), (x_at, y_at, dy_at, dx_at) = described, pointers
            status = self._function(*start, y, y_at, dy, dy_at, x, x_at, self._zero, dx, dx_at)
        if status:
            with naming(self._problem):
                raise failure(self._name, status)


class Pooling(Candidate[NoConfig, Gpu]):
    """cuDNN's pooling in one direction."""

    provider, algorithm = "cudnn", "pooling"

    def __init__(self, op: str) -> None:
        self.op = op

    @property
    def cudnn_version(self) -> int:
        return loaded_version()

    def supports(self, problem: PoolProblem, device: Gpu) -> Support:
        reason = _refusal(problem)
        return Support(False, reason) if reason else YES

    def estimate(self, problem: PoolProblem, config: NoConfig, device: Gpu) -> float:
        moved_us = _SLOWER[self.op] * problem.min_bytes / copy_bytes_per_s(device) * 1e6
        taps, one_by_one = problem.flops / (_TAPS_PER_CLOCK_AND_SM * device.sms), prod(problem.window) * _TAP_CLOCKS
        if self.op == "pool_bwd" and problem.is_max:
            met = prod(ceil(w / u) for w, u in zip(problem.window, problem.stride, strict=True))
            one_by_one = met * prod(problem.window) * _SEARCHED_CLOCKS
        return _LAUNCH_US + max(moved_us, max(taps, one_by_one) / device.clock_hz * 1e6)

    def prepare(self, problem: PoolProblem, config: NoConfig, device: Gpu) -> Runner:
        with naming(problem):
            return _Run(problem, device)


FWD, BWD = Pooling("pool_fwd"), Pooling("pool_bwd")
