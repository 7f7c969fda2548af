"""Batch normalisation by cuDNN: the legacy API, one candidate for each of its modes and op.

The gradient of inference is not there. Parameters and statistics are float32 (float64 with float64 data). Where one
value has statistics of its own, neighbours in memory are neighbours for cuDNN whatever the layout: an image is a row
of channels. The persistent mode sums in integers, which overflow on data of large range, and runs by name only.
Running averages are updated in place: they are copied first.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from math import prod
from typing import NamedTuple

from nbdnn import driver
from nbdnn.candidate import YES, Candidate, NoConfig, Runner, Support
from nbdnn.cudnn.api import call, failure, function, naming
from nbdnn.cudnn.descriptors import Legacy, tensor
from nbdnn.cudnn.enums import BatchNormMode
from nbdnn.cudnn.handle import handle
from nbdnn.cudnn.library import loaded_version
from nbdnn.device import Gpu
from nbdnn.errors import CudaError, CudnnError
from nbdnn.kernels.cuda.peaks import copy_bytes_per_s
from nbdnn.problem import DEFAULT_COMPUTE, Operand, dense_strides
from nbdnn.problem_bn import BnProblem

_MOST_ELEMS = 2**31 - 1
_ALIGN_BYTES = 16
_MOST_SUMMED = 256  # by training in the mode per-activation, whose sums lose digits
_KNOWN = 1024
_FUNCTIONS = {
    "bn_train": "cudnnBatchNormalizationForwardTraining",
    "bn_infer": "cudnnBatchNormalizationForwardInference",
    "bn_bwd": "cudnnBatchNormalizationBackward",
}
_LAUNCH_US = 6.0
# Of the copy rate, seen on an H200: inference; sums of NCHW; of NHWC, and of channels that are one value wide.
_SHARE_INFER, _SHARE_PLANES, _SHARE_ROWS = 0.5, 0.4, 0.02
_SHARE_ACTIVATIONS, _ROW_US = 0.45, 0.6  # sums a thread an activation, image after image


class _Described(NamedTuple):
    """What a problem is for cuDNN: the data, and the parameters of a mode."""

    data: Legacy
    params: Legacy


@lru_cache(_KNOWN)
def _described(problem: BnProblem, mode: int) -> _Described:
    """StatusError where cuDNN knows no such thing."""
    x = problem.operands[0]
    if mode == BatchNormMode.PER_ACTIVATION:
        shape = (problem.n, prod(problem.shape[1:]), 1, 1)
        x = Operand("x", shape, dense_strides(shape, False), problem.dtype)
    data, params = tensor(x), Legacy("Tensor")
    call("cudnnDeriveBNTensorDescriptor", params.address, data.address, mode)
    return _Described(data, params)


class _Run:
    """One prepared call. Its arguments stay where they are."""

    __slots__ = ("_blend", "_copies", "_described", "_function", "_handle", "_mode", "_places", "_problem")

    def __init__(self, problem: BnProblem, device: Gpu, mode: int) -> None:
        number = ctypes.c_double if problem.compute == "f64" else ctypes.c_float
        self._problem, self._mode, self._places = problem, mode, problem.places
        self._function, self._handle = function(_FUNCTIONS[problem.op]), handle(device)
        self._described = _described(problem, mode)
        self._blend = number(1.0), number(0.0)
        pairs = (("running_mean", "new_running_mean"), ("running_var", "new_running_var"))
        self._copies = [
            (self._places[old], self._places[new], problem.operands[self._places[old]].size_bytes)
            for old, new in pairs
            if problem.running
        ]

    def __call__(
        self, pointers: tuple[int, ...], scalars: tuple[float, ...], workspace: int, stream: int, /
    ) -> None:  # fmt: skip
        self._handle.use(stream)
        for old, new, size_bytes in self._copies:
            driver.call("cuMemcpyDtoDAsync", pointers[new], pointers[old], size_bytes, stream)
        given = {name: pointers[place] for name, place in self._places.items()}
        status = self._function(self._handle.address, self._mode, *self._arguments(given, *scalars))
        if status:
            with naming(self._problem):
                raise failure(_FUNCTIONS[self._problem.op], status)

    def _arguments(self, given: dict[str, int], epsilon: float, factor: float) -> tuple:
        one, zero = (ctypes.addressof(number) for number in self._blend)
        data, params = self._described.data.address, self._described.params.address
        if self._problem.op == "bn_bwd":
            tensors = (data, given["x"], data, given["dy"], data, given["dx"], params)
            results = (given["gamma"], given["dgamma"], given["dbeta"])
            return (one, zero, one, zero, *tensors, *results, epsilon, given["mean"], given["invstd"])
        begin = (one, zero, data, given["x"], data, given["y"], params, given["gamma"], given["beta"])
        if self._problem.op == "bn_infer":
            return (*begin, given["mean"], given["var"], epsilon)
        running = (given.get("new_running_mean"), given.get("new_running_var"))
        return (*begin, factor, *running, epsilon, given["mean"], given["invstd"])


class BatchNorm(Candidate[NoConfig, Gpu]):
    """One of cuDNN's modes for one op."""

    provider = "cudnn"

    def __init__(self, op: str, mode: BatchNormMode) -> None:
        self.op, self._mode, self.algorithm = op, mode, mode.name.lower()
        self.by_name_only = mode == BatchNormMode.SPATIAL_PERSISTENT

    @property
    def cudnn_version(self) -> int:
        return loaded_version()

    def supports(self, problem: BnProblem, device: Gpu) -> Support:
        if (problem.mode == "per-activation") != (self._mode == BatchNormMode.PER_ACTIVATION):
            return Support(False, f"mode {problem.mode}")
        if problem.param_dtype != DEFAULT_COMPUTE[problem.dtype]:
            return Support(False, f"parameters of dtype {problem.param_dtype}, cuDNN's are {problem.compute}")
        if problem.align < _ALIGN_BYTES:
            return Support(False, f"pointers are multiples of {problem.align} bytes only, not of {_ALIGN_BYTES}")
        if self.op == "bn_train" and self._mode == BatchNormMode.PER_ACTIVATION and problem.m > _MOST_SUMMED:
            return Support(False, f"sums of {problem.m} elements: those of 4096 missed 3.3 times what is permitted")
        elements = problem.operands[0].size_elems
        if not 0 < elements <= _MOST_ELEMS:
            return Support(False, f"{elements} elements, the legacy API takes 1 to {_MOST_ELEMS}")
        try:
            _described(problem, self._mode)
        except (CudnnError, CudaError) as error:
            return Support(False, str(error).partition("\n")[0])
        return YES

    def estimate(self, problem: BnProblem, config: NoConfig, device: Gpu) -> float:
        share = _SHARE_PLANES if problem.planes[2] > 1 else _SHARE_ROWS
        one_by_one_us = 0.0
        if self.op == "bn_infer":
            share = _SHARE_INFER
        elif self._mode == BatchNormMode.PER_ACTIVATION:
            share, one_by_one_us = _SHARE_ACTIVATIONS, problem.m * _ROW_US
        moved_us = problem.min_bytes / (share * copy_bytes_per_s(device)) * 1e6
        return _LAUNCH_US + max(moved_us, one_by_one_us)

    def prepare(self, problem: BnProblem, config: NoConfig, device: Gpu) -> Runner:
        with naming(problem):
            return _Run(problem, device, self._mode)


TRAIN, BWD = (tuple(BatchNorm(op, mode) for mode in BatchNormMode) for op in ("bn_train", "bn_bwd"))
# Inference has nothing to sum: the persistent mode is the spatial one.
INFER = tuple(BatchNorm("bn_infer", mode) for mode in (BatchNormMode.PER_ACTIVATION, BatchNormMode.SPATIAL))
