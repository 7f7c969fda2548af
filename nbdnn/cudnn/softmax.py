"""Softmax and its gradient by cuDNN: cudnnSoftmaxForward and cudnnSoftmaxBackward.

The array is described as (outer, length, inner, 1), whatever its axes are: mode INSTANCE where the elements of a row
are neighbours, which has the faster kernels, else CHANNEL.
"""

from __future__ import annotations

import ctypes

from nbdnn.candidate import YES, Candidate, NoConfig, Runner, Support
from nbdnn.cudnn.api import failure, function, naming
from nbdnn.cudnn.descriptors import tensor
from nbdnn.cudnn.enums import SoftmaxAlgorithm, SoftmaxMode
from nbdnn.cudnn.handle import handle
from nbdnn.cudnn.library import library, loaded_version
from nbdnn.device import Gpu
from nbdnn.errors import CudnnError
from nbdnn.kernels.cuda.peaks import copy_bytes_per_s
from nbdnn.problem import Operand
from nbdnn.problem_softmax import SoftmaxProblem

_FUNCTION = {"softmax_fwd": "cudnnSoftmaxForward", "softmax_bwd": "cudnnSoftmaxBackward"}
# Extents, and the elements of a tensor, are int32 in this API.
_MOST_ELEMS = 2**31 - 1
# Its kernels are chosen for pointers this well aligned; the API cannot be told of others.
_ALIGN_BYTES = 16
_LAUNCH_US = 4.0
# Times what a copy takes; CHANNEL took 26 times that forward and up to 90 backward, on an H200.
_ELEMENT_NS = 1.5  # of a row of neighbours, however few there are
_SLOWER = {"softmax_fwd": (1.5, 26.0), "softmax_bwd": (1.5, 60.0)}


class _Run:
    """One prepared call."""

    def __init__(self, problem: SoftmaxProblem, device: Gpu) -> None:
        outer, length, inner = problem.rows
        self._problem, self._name = problem, _FUNCTION[problem.op]
        self._compute, self._handle = function(self._name), handle(device)
        number = ctypes.c_double if problem.dtype == "f64" else ctypes.c_float
        self._one, self._zero = number(1.0), number(0.0)
        self._algorithm = SoftmaxAlgorithm[problem.algorithm.upper()]
        self._mode = SoftmaxMode.INSTANCE if inner == 1 else SoftmaxMode.CHANNEL
        self._array = tensor(Operand("array", (outer, length, inner, 1), (length * inner, inner, 1, 1), problem.dtype))

    def __call__(self, pointers: tuple[int, ...], scalars: tuple[float, ...], workspace: int, stream: int, /) -> None:
        self._handle.use(stream)
        array, (*inputs, out) = self._array.address, pointers
        given = [argument for pointer in inputs for argument in (array, pointer)]
        one, zero = ctypes.addressof(self._one), ctypes.addressof(self._zero)
        if self._problem.op == "softmax_bwd":
            given = [array, pointers[1], array, pointers[0]]  # y before dy
        status = self._compute(self._handle.address, self._algorithm, self._mode, one, *given, zero, array, out)
        if status:
            with naming(self._problem):
                raise failure(self._name, status)


class Softmax(Candidate[NoConfig, Gpu]):
    """cuDNN's, in one direction."""

    provider, algorithm = "cudnn", "legacy"

    def __init__(self, op: str) -> None:
        self.op = op

    @property
    def cudnn_version(self) -> int:
        return loaded_version()

    def supports(self, problem: SoftmaxProblem, device: Gpu) -> Support:
        elements = problem.operands[0].size_elems
        if not 0 < elements <= _MOST_ELEMS:
            return Support(False, f"{elements} elements, the legacy API takes 1 to {_MOST_ELEMS}")
        if problem.align < _ALIGN_BYTES:
            return Support(False, f"pointers are multiples of {problem.align} bytes only, not of {_ALIGN_BYTES}")
        try:
            library()
        except CudnnError as error:
            return Support(False, str(error).partition("\n")[0])
        return YES

    def estimate(self, problem: SoftmaxProblem, config: NoConfig, device: Gpu) -> float:
        slower = _SLOWER[self.op][problem.rows[2] > 1]
        moved_us = slower * problem.min_bytes / copy_bytes_per_s(device) * 1e6
        _, length, inner = problem.rows
        return _LAUNCH_US + max(moved_us, length * _ELEMENT_NS / 1e3 if inner == 1 else 0.0)

    def prepare(self, problem: SoftmaxProblem, config: NoConfig, device: Gpu) -> Runner:
        with naming(problem):
            return _Run(problem, device)


FWD, BWD = Softmax("softmax_fwd"), Softmax("softmax_bwd")
