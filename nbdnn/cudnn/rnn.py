"""Recurrent networks by cuDNN: the eighth version of its API, whose order of parameters is nbdnn's own.

Its algorithms are the configs of one candidate: ``standard`` multiplies matrices step by step, the persistent ones keep
R on the chip for all steps, where it fits. Which of them runs what is cuDNN's to say: it is asked for the workspace.
The dynamic one is compiled at run time for one batch, by NVRTC, each time that a run of it is prepared: where that is
not there, or the network has no such kernel, the preparation fails and says so.

What cuDNN keeps for a gradient is a secret of each algorithm: in training it serves problems with a tape of its own.
Its gradient writes into what was kept: unless it may consume the tape, it gets a copy.
"""

from __future__ import annotations

from ctypes import byref, c_size_t
from functools import lru_cache
from math import prod
from typing import NamedTuple

from nbdnn import driver
from nbdnn.candidate import YES, Candidate, Runner, Support
from nbdnn.cudnn.api import StatusError, call, failure, function, naming
from nbdnn.cudnn.descriptors import DATA_TYPE, MATH, Legacy, ints, tensor
from nbdnn.cudnn.enums import (
    DirectionMode,
    ForwardMode,
    MathType,
    RnnAlgo,
    RnnBiasMode,
    RnnDataLayout,
    RnnInputMode,
    RnnMode,
    Status,
    WgradMode,
)
from nbdnn.cudnn.handle import handle
from nbdnn.cudnn.library import loaded_version
from nbdnn.device import Gpu
from nbdnn.errors import CudaError, CudnnError
from nbdnn.kernels.cuda.peaks import tensor_flops_per_s
from nbdnn.problem import ITEMSIZE, Operand, dense_strides
from nbdnn.problem_rnn import OwnTape, RnnProblem

# Extents, and the elements of a tensor, are int32 in this API.
_MOST_ELEMS = 2**31 - 1
_ALIGN_BYTES = 16
_KNOWN = 4096  # answers kept: a program with more shapes than that asks again
_LAUNCH_US, _BACKWARD = 10.0, 1.4  # a gradient, of its forward: 1.2 to 1.9 on an H200
_DYNAMIC = 1.2  # of the slower of two others: the last rank, so that no guess has it compiled; not a measurement
# Hidden units that the gradient of persist_static_small_h takes; its forward takes more.
_MOST_SMALL = {"rnn_relu": 256, "rnn_tanh": 256, "lstm": 128, "gru": 128}
# Parts of the workspace begin at multiples of this. What cuDNN keeps begins at the first multiple in the memory for it.
_PART_BYTES = 256


class Algorithm(NamedTuple):
    """One of cuDNN's algorithms."""

    value: RnnAlgo

    def __str__(self) -> str:
        return self.value.name.lower()


STANDARD = Algorithm(RnnAlgo.STANDARD)
_PERSISTENT = (RnnAlgo.PERSIST_STATIC_SMALL_H, RnnAlgo.PERSIST_STATIC, RnnAlgo.PERSIST_DYNAMIC)
ALGORITHMS = (*map(Algorithm, _PERSISTENT), STANDARD)


class _Described(NamedTuple):
    """What a problem is for cuDNN: the network, its sequences, and a state."""

    network: Legacy
    x: Legacy
    y: Legacy
    state: Legacy


def _described(problem: RnnProblem, algorithm: RnnAlgo, math: MathType) -> _Described:
    """StatusError where cuDNN knows no such thing."""
    network = Legacy("RNN")
    kind = (
        algorithm,
        RnnMode[problem.mode.upper()],
        RnnBiasMode.DOUBLE_BIAS,
        DirectionMode.BIDIRECTIONAL if problem.bidirectional else DirectionMode.UNIDIRECTIONAL,
        RnnInputMode.SKIP_INPUT if problem.skip else RnnInputMode.LINEAR_INPUT,
    )
    arithmetic = DATA_TYPE[problem.dtype], DATA_TYPE[problem.compute], math
    # The hidden extent twice: nothing is projected. No dropout, no flags.
    extents = problem.input, problem.hidden, problem.hidden, problem.layers
    call("cudnnSetRNNDescriptor_v8", network.address, *kind, *arithmetic, *extents, None, 0)
    shape = problem.state_shape
    state = tensor(Operand("state", shape, dense_strides(shape, False), problem.dtype))
    return _Described(network, _sequences(problem, problem.x_shape), _sequences(problem, problem.y_shape), state)


def _sequences(problem: RnnProblem, shape: tuple[int, ...]) -> Legacy:
    made, (steps, batch, width) = Legacy("RNNData"), shape
    layout, lengths = RnnDataLayout.SEQ_MAJOR_PACKED, ints([steps] * batch)
    described = DATA_TYPE[problem.dtype], layout, steps, batch, width
    call("cudnnSetRNNDataDescriptor", made.address, *described, lengths, None)
    return made


class _Spaces(NamedTuple):
    """Bytes that cuDNN works in during inference, and in training; what it keeps for the gradient."""

    inference_bytes: int
    training_bytes: int
    kept_bytes: int


@lru_cache(_KNOWN)
def _spaces(problem: RnnProblem, device: Gpu, algorithm: RnnAlgo, math: MathType) -> _Spaces | str:
    """What an algorithm needs, or why cuDNN refuses."""
    working, kept, found = c_size_t(), c_size_t(), []
    with driver.Current(device.index):
        at = handle(device).address
        try:
            described = _described(problem, algorithm, math)
            asked = described.network.address, described.x.address
            for mode in ForwardMode:
                call("cudnnGetRNNTempSpaceSizes", at, asked[0], mode, asked[1], byref(working), byref(kept))
                found.append(working.value)
        except StatusError as error:
            if error.kind not in (Status.BAD_PARAM, Status.NOT_SUPPORTED):
                raise  # no answer to remember
            return str(error)
    inference_bytes, training_bytes = found
    return _Spaces(inference_bytes, training_bytes, kept.value)


def _refusal(problem: RnnProblem) -> str:
    """Why cuDNN has no such network, or ''."""
    if problem.tape is None and (problem.training or problem.op == "rnn_bwd"):
        return "what it keeps for its gradient is not the tape of nbdnn"
    for operand in problem.operands:
        if not 0 < operand.size_elems <= _MOST_ELEMS:
            return f"{operand.name} has {operand.size_elems} elements, cuDNN takes 1 to {_MOST_ELEMS}"
    return ""


class _Workspace(NamedTuple):
    """Where the parts of a workspace begin. What cuDNN works in is first, then there are zeros for states that are
    absent, room for a copy of the tape where its gradient may not write into it, and copies of operands that are not
    aligned as its kernels want them."""

    working_bytes: int
    zeros: int
    kept: int
    copies: dict[str, int]
    end: int


def _workspace(problem: RnnProblem, spaces: _Spaces) -> _Workspace:
    training = problem.tape is not None
    copied = problem.op == "rnn_bwd" and problem.tape is not None and not problem.tape.consumed
    working_bytes = spaces.training_bytes if training else spaces.inference_bytes
    zeros, copies = _rounded(working_bytes), {}
    kept = zeros + _rounded(_state_bytes(problem))
    end = kept + (_rounded(spaces.kept_bytes) + 2 * _PART_BYTES if copied else 0)
    for operand in problem.operands if problem.align < _ALIGN_BYTES else ():
        if operand.name != "tape":
            copies[operand.name] = end
            end += _rounded(operand.size_bytes)
    return _Workspace(working_bytes, zeros, kept, copies, end)


def _state_bytes(problem: RnnProblem) -> int:
    return prod(problem.state_shape) * ITEMSIZE[problem.dtype]


def _rounded(size_bytes: int) -> int:
    return -(-size_bytes // _PART_BYTES) * _PART_BYTES


class _Run:
    """Prepared calls of one direction."""

    def __init__(self, problem: RnnProblem, device: Gpu, algorithm: RnnAlgo, math: MathType) -> None:
        spaces = _spaces(problem, device, algorithm, math)
        assert isinstance(spaces, _Spaces), spaces
        self._problem, self._names = problem, tuple(problem.places)
        self._kept_bytes, self._parts = spaces.kept_bytes, _workspace(problem, spaces)
        self._handle, self._keep = handle(device), _described(problem, algorithm, math)
        self._network, self._x, self._y, self._state = (each.address for each in self._keep)
        if algorithm == RnnAlgo.PERSIST_DYNAMIC:
            call("cudnnBuildRNNDynamic", self._handle.address, self._network, problem.batch)
        self._weight_bytes = problem.parameters.size_elems * ITEMSIZE[problem.dtype]
        self._staged = [(operand, self._parts.copies.get(operand.name)) for operand in problem.operands]
        self._optional = [operand.name for operand in problem.operands if operand.optional]
        self._run = self._forward if problem.op == "rnn_fwd" else self._backward

    def __call__(
        self, pointers: tuple[int, ...], scalars: tuple[float, ...], workspace: int, stream: int, /
    ) -> None:  # fmt: skip
        self._handle.use(stream)
        at = dict(zip(self._names, pointers, strict=True))
        moved = [(o, workspace + offset, at[o.name]) for o, offset in self._staged if offset and at[o.name]]
        at |= {operand.name: copy for operand, copy, _ in moved}
        if absent := [name for name in self._optional if not at[name]]:
            zeros = workspace + self._parts.zeros
            driver.call("cuMemsetD8Async", zeros, 0, _state_bytes(self._problem), stream)
            at |= dict.fromkeys(absent, zeros)
        for operand, copy, own in moved:
            if operand.role == "in":
                driver.call("cuMemcpyDtoDAsync", copy, own, operand.size_bytes, stream)
        self._run(at, workspace, stream)
        for operand, copy, own in moved:
            if operand.role == "out":
                driver.call("cuMemcpyDtoDAsync", own, copy, operand.size_bytes, stream)

    def _call(self, name: str, *arguments: int | None) -> None:
        """A function of this network."""
        if status := function(name)(self._handle.address, self._network, *arguments):
            with naming(self._problem):
                raise failure(name, status)

    def _forward(self, at: dict[str, int], workspace: int, stream: int) -> None:
        mode = ForwardMode.TRAINING if self._problem.training else ForwardMode.INFERENCE
        sequences = self._x, at["x"], self._y, at["y"]
        states = self._state, at["hx"], at["hy"], self._state, at.get("cx"), at.get("cy")
        working = self._parts.working_bytes, workspace
        kept = (self._kept_bytes, at["tape"]) if self._problem.training else (0, None)
        self._call("cudnnRNNForward", mode, None, *sequences, *states, self._weight_bytes, at["w"], *working, *kept)

    def _backward(self, at: dict[str, int], workspace: int, stream: int) -> None:
        tape = self._problem.tape
        assert tape is not None
        begin = at["tape"]
        if not tape.consumed:
            begin = _rounded(workspace + self._parts.kept) + begin % _PART_BYTES  # so that it begins in the same place
            driver.call("cuMemcpyDtoDAsync", begin, at["tape"], self._kept_bytes, stream)
        working, kept = (self._parts.working_bytes, workspace), (self._kept_bytes, begin)
        sequences = self._y, at["y"], at["dy"], self._x, at["dx"]
        states = self._state, at["hx"], at["dhy"], at["dhx"]
        cells = self._state, at.get("cx"), at.get("dcy"), at.get("dcx")
        weights = self._weight_bytes, at["w"]
        self._call("cudnnRNNBackwardData_v8", None, *sequences, *states, *cells, *weights, *working, *kept)
        driver.call("cuMemsetD8Async", at["dw"], 0, self._weight_bytes, stream)  # cuDNN adds to it
        read = self._x, at["x"], self._state, at["hx"], self._y, at["y"]
        sums = self._weight_bytes, at["dw"]
        self._call("cudnnRNNBackwardWeights_v8", WgradMode.ADD, None, *read, *sums, *working, *kept)


def _step_us(problem: RnnProblem, algorithm: RnnAlgo, device: Gpu) -> float:
    """Of one direction of a layer going forward, by what an H200 took (November 2026, cuDNN 9.19)."""
    narrow, flops = ITEMSIZE[problem.dtype] == 2, 2 * problem.batch * problem.parameters.gates * problem.hidden**2
    if algorithm == RnnAlgo.PERSIST_STATIC_SMALL_H:
        return 0.45 + flops / 1.5e6
    if algorithm == RnnAlgo.PERSIST_STATIC:
        return 0.9 + 0.06 * problem.batch if narrow else 0.7 * problem.batch
    if algorithm == RnnAlgo.PERSIST_DYNAMIC:  # was never the fastest, and is compiled first
        others = RnnAlgo.PERSIST_STATIC, RnnAlgo.STANDARD
        return _DYNAMIC * max(_step_us(problem, each, device) for each in others)
    # In float32 R comes from the second-level cache anew: 1024 units of 32 images took 32 us, 512 of 16 took 10.2.
    reads_us = 0.0 if narrow else problem.parameters.gates * problem.hidden**2 * ITEMSIZE[problem.dtype] / 1.5e6
    return 4.2 + 2 * flops / (0.4 * tensor_flops_per_s(device, problem.dtype)) * 1e6 + reads_us


class Rnn(Candidate[Algorithm, Gpu]):
    """cuDNN's recurrent networks in one direction. tf32: those that round the factors of float32 products, and those
    that are good to 1e-5 only: the persistent kernels approximate exponentials and tangents."""

    provider = "cudnn"

    def __init__(self, op: str, tf32: bool = False) -> None:
        self.op, self.algorithm = op, "rnn_tf32" if tf32 else "rnn"
        self.math = "tf32" if tf32 else "fma"

    @property
    def cudnn_version(self) -> int:
        return loaded_version()

    def supports(self, problem: RnnProblem, device: Gpu) -> Support:
        if reason := _refusal(problem):
            return Support(False, reason)
        if self.math == "tf32" and problem.dtype != "f32":
            return Support(False, f"TF32 of dtype {problem.dtype}")
        if self.math == "tf32" and problem.mode == "rnn_relu":
            return Support(False, "rnn_relu: 10 bits would decide which sums are negative")
        try:
            asked = [self._spaces(problem, each, device) for each in self._algorithms(problem)]
            tapes = self.tapes(problem, device)
        except (CudnnError, CudaError) as error:
            return Support(False, str(error).partition("\n")[0])
        refusals = [each for each in asked if isinstance(each, str)]
        if len(refusals) == len(asked):
            return Support(False, refusals[-1])
        if problem.tape and problem.tape.retained not in tapes:
            return Support(False, f"{problem.tape} is none of its own here: {', '.join(map(str, tapes))}")
        return YES

    def tapes(self, problem: RnnProblem, device: Gpu) -> tuple[OwnTape, ...]:
        """The tapes of its own that a forward in training could write, and its gradient read."""
        found, itemsize = [], ITEMSIZE[problem.compute]
        for each in self._algorithms(problem):
            if isinstance(spaces := self._spaces(problem, each, device), _Spaces):
                size_elems = max(1, -(-spaces.kept_bytes // itemsize))
                found.append(OwnTape(size_elems, f"{self.provider}/{self.algorithm}/{each}"))
        return tuple(found)

    def configs(self, problem: RnnProblem, device: Gpu) -> tuple[Algorithm, ...]:
        """What cuDNN accepts; where there is a tape, who writes it."""
        known = self._algorithms(problem)
        accepted = [each for each in known if isinstance(self._spaces(problem, each, device), _Spaces)]
        writer = problem.tape.writer.rpartition("/")[2] if problem.tape else ""
        return tuple(each for each in accepted if writer in ("", str(each)))

    def roundings(self, problem: RnnProblem, device: Gpu) -> int:
        """Products and states lie in memory in the data's type, and are rounded once more at every step."""
        return 1 + problem.layers * problem.steps if ITEMSIZE[problem.dtype] == 2 else 1

    def workspace_bytes(self, problem: RnnProblem, config: Algorithm, device: Gpu) -> int:
        spaces = self._spaces(problem, config, device)
        assert isinstance(spaces, _Spaces), spaces
        return _workspace(problem, spaces).end

    def estimate(self, problem: RnnProblem, config: Algorithm, device: Gpu) -> float:
        steps = problem.steps * problem.layers * problem.directions
        forward_us = _LAUNCH_US + steps * _step_us(problem, config.value, device)
        return forward_us if self.op == "rnn_fwd" else _BACKWARD * forward_us

    def prepare(self, problem: RnnProblem, config: Algorithm, device: Gpu) -> Runner:
        with naming(problem):
            return _Run(problem, device, config.value, self._math(problem))

    def _math(self, problem: RnnProblem) -> MathType:
        return MathType.DEFAULT_MATH if self.math == "tf32" else MATH[problem.dtype]

    def _algorithms(self, problem: RnnProblem) -> tuple[Algorithm, ...]:
        """Those that are accurate enough; bfloat16 and float64 have the standard one alone, whichever is asked for."""
        approximates = problem.dtype == "f32" and problem.mode != "rnn_relu" and self.math != "tf32"
        if approximates or problem.dtype in ("bf16", "f64"):
            return (STANDARD,)
        refused = set()
        if (problem.training or problem.op == "rnn_bwd") and problem.hidden > _MOST_SMALL[problem.mode]:
            refused.add(RnnAlgo.PERSIST_STATIC_SMALL_H)
        if problem.dtype == "f16" and problem.mode == "rnn_relu":
            refused.add(RnnAlgo.PERSIST_DYNAMIC)  # its sums near 0 were of another sign (an H200)
        return tuple(each for each in ALGORITHMS if each.value not in refused)

    def _spaces(self, problem: RnnProblem, config: Algorithm, device: Gpu) -> _Spaces | str:
        return _spaces(problem, device, config.value, self._math(problem))


FWD, FWD_TF32 = Rnn("rnn_fwd"), Rnn("rnn_fwd", tf32=True)
BWD, BWD_TF32 = Rnn("rnn_bwd"), Rnn("rnn_bwd", tf32=True)
