"""Convolution by cuDNN's named algorithms: the legacy API, one candidate for each algorithm and direction.

    y = alpha * conv(x, w) + beta * y,   and so for both gradients

These are the methods that Theano named. The API is deprecated since cuDNN 9.0 and complete; FFT_TILING, which the graph
API does not offer, is the fastest IEEE float32 method on many 3x3 and 5x5 layers. The Winograds are less accurate than
a default choice must be, and run by name only. Nothing but alpha and beta is fused, and an axis is padded equally at
both ends. float32 is IEEE (CUDNN_FMA_MATH): the graph API serves TF32. Which algorithm runs what is cuDNN's to say: it
is asked for the workspace.
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_int, c_size_t
from enum import IntEnum
from functools import lru_cache

from nbdnn import driver
from nbdnn.candidate import YES, Candidate, NoConfig, Runner, Support
from nbdnn.cudnn.api import StatusError, call, failure, function, naming
from nbdnn.cudnn.conv_operations import roundings_with_beta, splits_odd_channels
from nbdnn.cudnn.cost import method_us, spectra_us
from nbdnn.cudnn.descriptors import conv_descriptors
from nbdnn.cudnn.enums import BwdDataAlgo, BwdFilterAlgo, FwdAlgo, Status
from nbdnn.cudnn.handle import handle
from nbdnn.cudnn.library import loaded_version
from nbdnn.device import Gpu
from nbdnn.errors import CudaError, CudnnError
from nbdnn.problem_conv import ConvProblem

_DIRECTION = {"conv_fwd": "Forward", "conv_bwd_data": "BackwardData", "conv_bwd_filter": "BackwardFilter"}
# Extents, and the elements of a tensor, are int32 in this API.
_MOST_ELEMS = 2**31 - 1
# Kernels are chosen for pointers this well aligned; the API cannot be told of others.
_ALIGN_BYTES = 16
_KNOWN = 4096  # answers kept: a program with more shapes than that asks again
_WINOGRAD_TAPS = 3
# 16-bit backward in NHWC falls back to kernels that took up to 100 times as long as the graph's.
_SLOW_16_BIT_NHWC = 100.0
_WHOLE = ("implicit_gemm", "implicit_precomp_gemm", "gemm", "algo_1")  # that split no sum


class _Rank(ctypes.Structure):
    """cudnnConvolution*AlgoPerf_t, the same in the three directions. Times are -1 where nothing was measured."""

    _fields_ = (
        ("algo", c_int),
        ("status", c_int),
        ("time", ctypes.c_float),
        ("memory", c_size_t),
        ("determinism", c_int),
        ("math_type", c_int),
        ("reserved", c_int * 3),
    )


def _outside_of_the_api(problem: ConvProblem, name: str) -> str:
    """What the legacy API cannot express, or an algorithm of it was seen to compute wrongly; '' if nothing."""
    if fused := [token for token in problem.epilogue if token != "beta"]:
        return f"the epilogue e:{'+'.join(fused)} is not fused here"
    if uneven := [pair for pair in problem.pad if pair[0] != pair[1]]:
        return f"pads of {uneven[0][0]} before and {uneven[0][1]} after an axis: the legacy API takes one number"
    if problem.align < _ALIGN_BYTES:
        return f"pointers are multiples of {problem.align} bytes only, not of {_ALIGN_BYTES}"
    strided = problem.op == "conv_bwd_data" and max(problem.stride) > 1
    if problem.dtype in ("f16", "bf16") and (name == "ALGO_0" or (name == "ALGO_1" and strided)):
        return f"it adds the parts of a sum in {problem.dtype}"
    if problem.dtype in ("f16", "bf16") and problem.groups > 1 and (problem.op, name) == ("conv_bwd_filter", "ALGO_1"):
        return f"with groups it adds the parts of a sum in {problem.dtype}"
    if name == "ALGO_1" and splits_odd_channels(problem):
        return f"{problem.c} to {problem.k} channels last, 1x1: sums were off by up to 118 times what is permitted"
    if "WINOGRAD" in name and max(problem.filter) > _WINOGRAD_TAPS:
        return f"a filter extent of {max(problem.filter)}: sums were off by 0.4 of a small integer with 5"
    if "WINOGRAD" in name and problem.c == problem.groups:
        return "1 channel a group: its errors of a transform are too large beside so short a sum"
    for operand in problem.operands:
        if not 0 < operand.size_elems <= _MOST_ELEMS:
            return f"{operand.name} has {operand.size_elems} elements, the legacy API takes 1 to {_MOST_ELEMS}"
    return ""


@lru_cache(_KNOWN)
def _workspace(problem: ConvProblem, device: Gpu, algorithm: int) -> int | str:
    """The bytes of workspace that an algorithm needs, or why cuDNN refuses."""
    name = f"cudnnGetConvolution{_DIRECTION[problem.op]}WorkspaceSize"
    needed_bytes = c_size_t()
    with driver.Current(device.index):
        at = handle(device).address
        try:
            (first, second, third), convolution = conv_descriptors(problem)
            described = (first.address, second.address, convolution.address, third.address)
            call(name, at, *described, algorithm, byref(needed_bytes))
        except StatusError as error:
            if error.kind not in (Status.BAD_PARAM, Status.NOT_SUPPORTED):
                raise  # no answer to remember
            return str(error)
    return needed_bytes.value


@lru_cache(_KNOWN)
def _ranking(problem: ConvProblem, device: Gpu) -> tuple[int, ...]:
    """The algorithms that cuDNN would try, its first choice first; none where it has no opinion."""
    room, returned = (_Rank * 10)(), c_int()
    (first, second, third), convolution = conv_descriptors(problem)
    described = (first.address, second.address, convolution.address, third.address)
    name = f"cudnnGetConvolution{_DIRECTION[problem.op]}Algorithm_v7"
    with driver.Current(device.index):
        if function(name)(handle(device).address, *described, len(room), byref(returned), room):
            return ()
    return tuple(dict.fromkeys(rank.algo for rank in room[: returned.value] if rank.status == 0))


class _Run:
    """One prepared call. Its arguments stay where they are; alpha and beta are written before each call."""

    __slots__ = ("_alpha", "_arguments", "_beta", "_convolve", "_device", "_handle", "_keep", "_problem", "_reads_out")

    def __init__(self, problem: ConvProblem, device: Gpu, algorithm: int) -> None:
        self._problem = problem
        self._convolve = function(f"cudnnConvolution{_DIRECTION[problem.op]}")
        self._handle = handle(device)
        number = ctypes.c_double if problem.dtype == "f64" else ctypes.c_float
        self._alpha, self._beta = number(), number()
        self._reads_out = "beta" in problem.epilogue
        self._keep = described = conv_descriptors(problem)
        workspace_bytes = _workspace(problem, device, algorithm)
        assert isinstance(workspace_bytes, int), workspace_bytes
        operands = tuple(operand.address for operand in described.operands)
        self._arguments = (
            self._handle.address,
            ctypes.addressof(self._alpha),
            *operands,
            described.convolution.address,
            algorithm,
            workspace_bytes,
            ctypes.addressof(self._beta),
        )

    def __call__(
        self, pointers: tuple[int, ...], scalars: tuple[float, ...], workspace: int, stream: int, /
    ) -> None:  # fmt: skip
        handle_, alpha, first, second, third, convolution, algorithm, workspace_bytes, beta = self._arguments
        self._alpha.value = scalars[0]
        if self._reads_out:
            self._beta.value = scalars[1]
        self._handle.use(stream)
        p1, p2, p3 = pointers
        status = self._convolve(
            handle_, alpha, first, p1, second, p2, convolution, algorithm, workspace, workspace_bytes, beta, third, p3
        )  # fmt: skip
        if status:
            with naming(self._problem):
                raise failure(f"cudnnConvolution{_DIRECTION[self._problem.op]}", status)


class Legacy(Candidate[NoConfig, Gpu]):
    """One of cuDNN's named algorithms in one direction."""

    provider = "cudnn"

    def __init__(self, op: str, value: IntEnum, algo: str | None, deterministic: bool = True) -> None:
        self.op, self._value, self.algo, self.deterministic = op, int(value), algo, deterministic
        self._name = value.name
        name = value.name.lower()
        self.algorithm = name if name[-1].isdigit() else name.removeprefix("algo_")
        # Single outputs of 3x3 layers had 1.24 times the error that a default choice may have (an H200, cuDNN 9.19).
        self.by_name_only = "winograd" in name

    @property
    def cudnn_version(self) -> int:
        return loaded_version()

    def supports(self, problem: ConvProblem, device: Gpu) -> Support:
        if reason := _outside_of_the_api(problem, self._name):
            return Support(False, reason)
        try:
            needed = _workspace(problem, device, self._value)
        except (CudnnError, CudaError) as error:
            return Support(False, str(error).partition("\n")[0])
        return YES if isinstance(needed, int) else Support(False, needed)

    def roundings(self, problem: ConvProblem, device: Gpu) -> int:
        return roundings_with_beta(problem)

    def workspace_bytes(self, problem: ConvProblem, config: NoConfig, device: Gpu) -> int:
        needed = _workspace(problem, device, self._value)
        assert isinstance(needed, int), needed
        return needed

    def estimate(self, problem: ConvProblem, config: NoConfig, device: Gpu) -> float:
        ranking = _ranking(problem, device)
        place = ranking.index(self._value) if self._value in ranking else len(ranking)
        backward_16_bit = self.op != "conv_fwd" and problem.dtype in ("f16", "bf16")
        slow = backward_16_bit and problem.channels_last
        whole = self.algorithm in _WHOLE
        us = method_us(problem, device, place, slower=_SLOW_16_BIT_NHWC if slow else 1.0, whole=whole)
        if not self.algorithm.startswith("fft"):
            return us
        return max(us, spectra_us(problem, device, tiled=self.algorithm == "fft_tiling"))

    def prepare(self, problem: ConvProblem, config: NoConfig, device: Gpu) -> Runner:
        with naming(problem):
            return _Run(problem, device, self._value)


FWD = (
    Legacy("conv_fwd", FwdAlgo.IMPLICIT_PRECOMP_GEMM, "small"),
    Legacy("conv_fwd", FwdAlgo.FFT_TILING, "fft_tiling"),
    Legacy("conv_fwd", FwdAlgo.WINOGRAD_NONFUSED, "winograd_non_fused"),
    Legacy("conv_fwd", FwdAlgo.WINOGRAD, "winograd"),
    Legacy("conv_fwd", FwdAlgo.FFT, "fft"),
    Legacy("conv_fwd", FwdAlgo.IMPLICIT_GEMM, "none"),
    Legacy("conv_fwd", FwdAlgo.GEMM, "large"),
)
BWD_DATA = (
    Legacy("conv_bwd_data", BwdDataAlgo.ALGO_1, "deterministic"),
    Legacy("conv_bwd_data", BwdDataAlgo.ALGO_FFT_TILING, "fft_tiling"),
    Legacy("conv_bwd_data", BwdDataAlgo.ALGO_WINOGRAD_NONFUSED, "winograd_non_fused"),
    Legacy("conv_bwd_data", BwdDataAlgo.ALGO_WINOGRAD, "winograd"),
    Legacy("conv_bwd_data", BwdDataAlgo.ALGO_FFT, "fft"),
    Legacy("conv_bwd_data", BwdDataAlgo.ALGO_0, "none", deterministic=False),
)
BWD_FILTER = (
    Legacy("conv_bwd_filter", BwdFilterAlgo.ALGO_1, "deterministic"),
    Legacy("conv_bwd_filter", BwdFilterAlgo.ALGO_WINOGRAD_NONFUSED, "winograd_non_fused"),
    Legacy("conv_bwd_filter", BwdFilterAlgo.ALGO_FFT_TILING, "fft_tiling"),
    Legacy("conv_bwd_filter", BwdFilterAlgo.ALGO_FFT, "fft"),
    Legacy("conv_bwd_filter", BwdFilterAlgo.ALGO_0, "none", deterministic=False),
    Legacy("conv_bwd_filter", BwdFilterAlgo.ALGO_3, "small", deterministic=False),
)
