"""Convolution by cuDNN's engines: the graph API, whose configs are engines with their knobs.

    y = activation(alpha * conv(x, w) + beta * y + residual + bias)       without swish: conv_operations.py

One candidate for each thing that a caller may forbid, as each engine says of itself: `graph` are the engines that are
deterministic and compute in IEEE arithmetic (16-bit products are summed in float32), `graph_nondeterministic` those
that add in any order, `graph_tf32` those that round float32 to TF32. Engines that convert their inputs to a narrower
type, sum in one, or transform the image belong to none of them; the Winograd ones of the filter gradient, which are too
coarse for IEEE float32, are `graph_winograd_tf32`. Configs come in the order of cuDNN's heuristics; of TF32, for which
these know little, engines with their own knobs follow. NCHW in 16 bits and TF32 contains hidden transposes, which are
in the workspace and in the measured time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from nbdnn import driver
from nbdnn.candidate import YES, Candidate, Runner, Support
from nbdnn.cudnn.api import failure, naming, prepared
from nbdnn.cudnn.conv_operations import (
    Scalars,
    operations,
    outside_of_the_pattern,
    roundings_with_beta,
    splits_odd_channels,
    zero_bias_bytes,
)
from nbdnn.cudnn.cost import method_us
from nbdnn.cudnn.descriptors import Backend
from nbdnn.cudnn.enums import NumericalNote, Status
from nbdnn.cudnn.graph import EngineConfig, Packs, Plan, Proposal, defaults, operation_graph, plan, proposals
from nbdnn.cudnn.handle import Handle, handle, planner, property_descriptor
from nbdnn.cudnn.library import loaded_version
from nbdnn.cudnn.plan_file import stored_plan
from nbdnn.device import Gpu
from nbdnn.errors import CudaError, CudnnError, RefusedOperands
from nbdnn.problem_conv import ConvProblem

_KNOWN = 4096  # problems whose engines are remembered
# Worth measuring, in all and of one engine: the heuristics give up to 45 configs, most of them tiles of one or two
# engines. A filter gradient's differ in how they split the sum as well, and the ranking does not see that: the 31st was
# the fastest, 116 us beside the 125 of the best before it (an H200, 128x64x27x27, 192 filters 5x5, bf16, NHWC).
_MOST = {"conv_fwd": (12, 6), "conv_bwd_data": (12, 6), "conv_bwd_filter": (40, 36)}
# Each of these takes 0.3 to 1 s to make.
_MOST_COMPILED = 2
# What the filter gradient's engines take for granted, whatever they are told: with less, one of them killed the
# process's context (misaligned address; an H200, cuDNN 9.19).
_FILTER_ALIGN_BYTES = 16
# Pairs of alpha and beta that a runner keeps plans for.
_MOST_SCALARS = 8
_WINOGRAD = frozenset(
    (
        NumericalNote.WINOGRAD,
        NumericalNote.WINOGRAD_TILE_4x4,
        NumericalNote.WINOGRAD_TILE_6x6,
        NumericalNote.WINOGRAD_TILE_13x13,
    )
)
# An engine of the filter gradient that does not say it: 5x5 sums were off by 0.1 in float32 (an H200, cuDNN 9.19).
_UNSAID_WINOGRAD = 17


@lru_cache(_KNOWN)
def _proposals(problem: ConvProblem, device: Gpu, scalars: Scalars) -> tuple[Proposal, ...]:
    """What cuDNN proposes for a problem with these factors, in its order."""
    with naming(problem):
        graph = operation_graph(operations(problem, scalars).operations)
        return tuple(proposals(graph, property_descriptor(device)))


@lru_cache(_KNOWN)
def _defaults(problem: ConvProblem, device: Gpu, scalars: Scalars) -> tuple[Proposal, ...]:
    """What cuDNN has for them beside its proposals."""
    with naming(problem):
        graph = operation_graph(operations(problem, scalars).operations)
        return tuple(defaults(graph, property_descriptor(device)))


def _usual(problem: ConvProblem) -> Scalars:
    """The factors that a runner is prepared for."""
    return Scalars(1.0, 1.0 if "beta" in problem.epilogue else 0.0)


def _unusual(problem: ConvProblem) -> Scalars:
    """Factors that stand for all others: the engines that take these take any."""
    return Scalars(0.75, 0.5 if "beta" in problem.epilogue else 0.0)


def _is_wrong(engine: int, problem: ConvProblem) -> bool:
    """Engines of the gradients that gave wrong sums on an H200 with cuDNN 9.19, whatever their notes say, or wrote
    behind dw: those that take groups of four channels two by two, where the last one is by itself."""
    narrow, grouped = problem.dtype in ("f16", "bf16"), problem.groups > 1
    if problem.op == "conv_bwd_data":
        return engine == 2 and narrow and (grouped or max(problem.stride) > 1)  # parts of a sum are rounded to 16 bits
    if problem.op == "conv_bwd_filter":
        uneven = any(before != after for before, after in problem.pad)
        of_four = problem.c == problem.k == 4 * problem.groups
        return (
            (engine in (1, 20) and uneven)  # as if the padding were even
            or (engine == 16 and _reaches_past_the_image(problem))  # NaN
            or (engine in (47, 61) and narrow)  # parts of a sum are rounded to 16 bits
            or (engine == 62 and splits_odd_channels(problem))
            or (engine in (9, 10, 23, 30) and of_four and problem.groups % 2 == 1 and grouped)
        )
    return False


def _reaches_past_the_image(problem: ConvProblem) -> bool:
    """Whether some outputs see nothing but padding."""
    spans = ((taps - 1) * dilation + 1 for taps, dilation in zip(problem.filter, problem.dilation, strict=True))
    return any(max(pad) >= span for pad, span in zip(problem.pad, spans, strict=True))


class _Ready(NamedTuple):
    """A plan for one pair of factors."""

    plan: Plan
    packs: Packs


class _Run:
    """The plans of one problem in one thread: one engine for the usual factors, one for all others."""

    def __init__(self, problem: ConvProblem, usual: Proposal, other: Proposal, device: Gpu) -> None:
        self._problem, self._usual, self._other, self._device = problem, usual, other, device
        self._handle = handle(device)
        self._zeros = _zeros(zero_bias_bytes(problem), device)
        self._ready: dict[Scalars, _Ready] = {}
        # What was given last, what executes that, and what has the addresses in it.
        self._latest: tuple[tuple, Callable[[], int], tuple[Plan, Backend]] | None = None
        self._ready_for(_usual(problem))

    def __call__(
        self, pointers: tuple[int, ...], scalars: tuple[float, ...], workspace: int, stream: int, /
    ) -> None:  # fmt: skip
        given, latest = (pointers, scalars, workspace), self._latest
        if latest is None or latest[0] != given:
            latest = self._latest = given, *self._executing(pointers, scalars, workspace)
        if stream != self._handle.stream:
            self._handle.use(stream)
        if status := latest[1]():
            error = failure("cudnnBackendExecute", status)
            if error.kind in (Status.BAD_PARAM, Status.NOT_SUPPORTED):
                raise RefusedOperands(f"{error}; {self._problem}")
            with naming(self._problem):
                raise error

    def _executing(
        self, pointers: tuple[int, ...], scalars: tuple[float, ...], workspace: int
    ) -> tuple[Callable[[], int], tuple[Plan, Backend]]:
        """What runs the plan for these factors on what is at these addresses, and returns cuDNN's status, as long as
        the second lives."""
        ready = self._ready_for(scalars)
        pack = ready.packs(pointers, workspace)
        execute = prepared("cudnnBackendExecute", self._handle.address, ready.plan.descriptor.address, pack.address)
        return execute, (ready.plan, pack)

    def _ready_for(self, scalars: tuple[float, ...]) -> _Ready:
        alpha, beta = scalars
        wanted = Scalars(alpha, beta if "beta" in self._problem.epilogue else 0.0)
        if wanted not in self._ready:
            with naming(self._problem):
                self._ready[wanted] = self._made(wanted)
            if len(self._ready) > _MOST_SCALARS:
                del self._ready[next(iter(self._ready))]
        return self._ready[wanted]

    def _made(self, scalars: Scalars) -> _Ready:
        proposal = self._usual if scalars == _usual(self._problem) else self._other
        posed = operations(self._problem, scalars)

        def make() -> Plan:
            return plan(self._handle, operation_graph(posed.operations, self._handle), proposal.config)

        if proposal.compiled_at_run_time:
            key = (str(self._problem), str(tuple(scalars)), str(proposal.config))
            made = stored_plan(key, self._device, self._handle, make)
        else:
            made = make()
        promised = max(self._usual.workspace_bytes, self._other.workspace_bytes)
        if made.workspace_bytes > promised:
            raise CudnnError(
                f"{proposal.config} takes {made.workspace_bytes} bytes of workspace for {tuple(scalars)} as alpha and "
                f"beta, {promised} were promised; {self._problem}"
            )
        own = (self._zeros.address,) if self._zeros else ()
        return _Ready(made, Packs(posed.tensors, own))


def _zeros(size_bytes: int, device: Gpu) -> driver.Memory | None:
    """So many zero bytes of the GPU."""
    if not size_bytes:
        return None
    memory = driver.Memory(device.index, size_bytes)
    driver.upload(memory.address, np.zeros(size_bytes, np.uint8))
    return memory


class Graph(Candidate[EngineConfig, Gpu]):
    """The engines of one kind, for one direction."""

    provider = "cudnn"

    def __init__(self, op: str, deterministic: bool = True, math: str = "fma", winograd: bool = False) -> None:
        self.op, self.deterministic, self.math, self.winograd = op, deterministic, math, winograd
        kinds = {"nondeterministic": not deterministic, "winograd": winograd, "tf32": math == "tf32"}
        self.algorithm = "_".join(("graph", *(kind for kind, is_so in kinds.items() if is_so)))

    @property
    def cudnn_version(self) -> int:
        return loaded_version()

    def supports(self, problem: ConvProblem, device: Gpu) -> Support:
        if self.math == "tf32" and problem.dtype != "f32":
            return Support(False, f"TF32 is an arithmetic of f32 data, not of {problem.dtype}")
        if empty := next((o.name for o in problem.operands if not o.size_elems), None):
            return Support(False, f"{empty} has 0 elements")
        if problem.op == "conv_bwd_filter" and problem.align < _FILTER_ALIGN_BYTES:
            return Support(False, f"pointers are multiples of {problem.align} bytes only: an engine read past that")
        if reason := outside_of_the_pattern(problem):
            return Support(False, reason)
        try:
            proposed = _proposals(problem, device, _usual(problem))
            if _chosen(self, problem, device):
                return YES
        except (CudnnError, CudaError) as error:
            return Support(False, str(error).partition("\n")[0])
        return Support(False, f"of the {len(proposed)} engine configs that cuDNN proposes, none is of this kind")

    def allows(self, proposal: Proposal, problem: ConvProblem) -> bool:
        """Whether an engine keeps what this candidate promises."""
        notes = proposal.notes
        if NumericalNote.FFT in notes or NumericalNote.DOWN_CONVERT_INPUTS in notes:
            return False
        if _is_winograd(proposal, problem) and not self.winograd:
            return False
        if NumericalNote.REDUCED_PRECISION_REDUCTION in notes and problem.compute != "f16":
            return False
        if NumericalNote.NONDETERMINISTIC in notes and self.deterministic:
            return False
        return self.math == "tf32" or not _is_tf32(proposal, problem)

    def lists(self, proposal: Proposal, problem: ConvProblem) -> bool:
        """Whether no other candidate lists the engine."""
        return (
            self.allows(proposal, problem)
            and (NumericalNote.NONDETERMINISTIC in proposal.notes) != self.deterministic
            and _is_winograd(proposal, problem) == self.winograd
            and (self.winograd or _is_tf32(proposal, problem) == (self.math == "tf32"))
        )

    def roundings(self, problem: ConvProblem, device: Gpu) -> int:
        return roundings_with_beta(problem)

    def configs(self, problem: ConvProblem, device: Gpu) -> tuple[EngineConfig, ...]:
        return tuple(_chosen(self, problem, device))

    def workspace_bytes(self, problem: ConvProblem, config: EngineConfig, device: Gpu) -> int:
        return max(proposal.workspace_bytes for proposal in _chosen(self, problem, device)[config])

    def estimate(self, problem: ConvProblem, config: EngineConfig, device: Gpu) -> float:
        place = list(_chosen(self, problem, device)).index(config)
        return method_us(problem, device, place, tf32=self.math == "tf32", whole=self.deterministic)

    def prepare(self, problem: ConvProblem, config: EngineConfig, device: Gpu) -> Runner:
        return _Run(problem, *_chosen(self, problem, device)[config], device)


@lru_cache(_KNOWN)
def _chosen(kind: Graph, problem: ConvProblem, device: Gpu) -> dict[EngineConfig, tuple[Proposal, Proposal]]:
    """The configs of a candidate that are worth measuring: what runs with the usual factors, and what with others."""
    usual, unusual = _proposals(problem, device, _usual(problem)), _proposals(problem, device, _unusual(problem))
    beside = _defaults(problem, device, _usual(problem)) if kind.math == "tf32" else ()
    if beside:
        unusual += _defaults(problem, device, _unusual(problem))
    able = [other for other in unusual if kind.allows(other, problem) and not _is_wrong(other.config.engine, problem)]
    chosen: dict[EngineConfig, tuple[Proposal, Proposal]] = {}
    siblings: Counter[int] = Counter()
    (most_configs, most_of_an_engine), compiled = _MOST[problem.op], 0
    for place, proposal in enumerate((*usual, *beside)):
        engine, other = proposal.config.engine, _for_other_factors(proposal, able)
        if _is_wrong(engine, problem) or not kind.lists(proposal, problem) or not other:
            continue
        if place < len(usual) and (len(chosen) == most_configs or siblings[engine] == most_of_an_engine):
            continue
        if proposal.compiled_at_run_time and compiled == _MOST_COMPILED:
            continue
        chosen[proposal.config] = (
            _planned(proposal, problem, device, _usual(problem)),
            _planned(other, problem, device, _unusual(problem)),
        )
        siblings[engine] += 1
        compiled += proposal.compiled_at_run_time
    return chosen


def _planned(proposal: Proposal, problem: ConvProblem, device: Gpu, scalars: Scalars) -> Proposal:
    """The proposal with the workspace of its plan: in TF32 that was up to ten times what the proposal says.

    Where the plan is compiled at run time, what the proposal says must do.
    """
    if proposal.compiled_at_run_time:
        return proposal
    where = planner(device)
    posed = operations(problem, scalars).operations
    made = plan(where, operation_graph(posed, where if isinstance(where, Handle) else None), proposal.config)
    return proposal._replace(workspace_bytes=made.workspace_bytes)


def _for_other_factors(proposal: Proposal, able: list[Proposal]) -> Proposal | None:
    """The same engine where it takes any alpha and beta, else the first that does, in the same workspace.

    Most engines that are compiled at run time know alpha = 1 and beta = 0 only.
    """
    fitting = [other for other in able if other.workspace_bytes <= proposal.workspace_bytes]
    same = [other for other in fitting if other.config == proposal.config]
    return next(iter(same + fitting), None)


def _is_tf32(proposal: Proposal, problem: ConvProblem) -> bool:
    """Whether an engine rounds float32 operands to TF32. Tensor cores multiply 16-bit numbers and float64 exactly."""
    return problem.dtype == "f32" and NumericalNote.TENSOR_CORE in proposal.notes


def _is_winograd(proposal: Proposal, problem: ConvProblem) -> bool:
    unsaid = problem.op == "conv_bwd_filter" and proposal.config.engine == _UNSAID_WINOGRAD
    return unsaid or bool(proposal.notes & _WINOGRAD)


def _of(op: str) -> tuple[Graph, ...]:
    return Graph(op), Graph(op, deterministic=False), Graph(op, math="tf32")


FWD, BWD_DATA = _of("conv_fwd"), _of("conv_bwd_data")
BWD_FILTER = (*_of("conv_bwd_filter"), Graph("conv_bwd_filter", math="tf32", winograd=True))
