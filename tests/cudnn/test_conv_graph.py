"""Which engines a candidate lists, planned for a GPU that need not be here. On a GPU the matrix runs them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from edge_cases import edges
from planned import DEVICE

from nbdnn.cudnn import conv_graph, conv_operations, graph, handle
from nbdnn.cudnn.api import StatusError
from nbdnn.cudnn.conv_graph import BWD_DATA, BWD_FILTER, FWD, Graph, _chosen, _defaults, _proposals, _unusual, _usual
from nbdnn.cudnn.conv_operations import Scalars, operations
from nbdnn.cudnn.descriptors import Backend
from nbdnn.cudnn.enums import NumericalNote
from nbdnn.cudnn.graph import EngineConfig, Packs, Proposal, operation_graph, plan
from nbdnn.cudnn.handle import property_descriptor
from nbdnn.dispatch import registry
from nbdnn.errors import RefusedOperands
from nbdnn.problem import DEFAULT_ALIGN, parse
from nbdnn.problem_conv import CONV_OPS, ConvProblem
from nbdnn.tolerance import transforms

*FILTER, WINOGRAD = BWD_FILTER
KINDS = {"conv_fwd": FWD, "conv_bwd_data": BWD_DATA, "conv_bwd_filter": FILTER}
LAYER = "n32c64h56w56:k64r3s3:p1x1:u1x1:d1x1:g1:cross"
# Dtypes, layouts, modes, directions, groups, strides, dilation, uneven pads, 3-D, alignment, epilogues.
_NOT_FUSED = {"bias+swish", "tanh", "res+beta", "bias+relu+res+beta"}
PROBLEMS = [
    parse(text)
    for text in (
        f"conv_fwd:f32:{LAYER}:nchw",
        f"conv_fwd:f32:{LAYER}:nhwc",
        f"conv_fwd:bf16:{LAYER}:nhwc",
        f"conv_fwd:f16:cf16:{LAYER}:nhwc",
        f"conv_fwd:f64:{LAYER}:nchw",
        "conv_fwd:bf16:n32c144h56w56:k144r3s3:p1x1:u1x1:d1x1:g144:conv:nhwc",
        "conv_fwd:f32:n32c144h56w56:k144r3s3:p1x1:u1x1:d1x1:g144:cross:nhwc",
        "conv_fwd:f32:n2c16h9w11:k24r3s2:ba1.2x0.3:u2x1:d1x2:g4:conv:nchw",
        "conv_fwd:f16:n2c16h9w11:k24r3s3:p1x1:u1x1:d1x1:g1:cross:nhwc:a4",
        "conv_fwd:bf16:n4c64d16h28w28:k64t3r3s3:p1x1x1:u1x1x1:d1x1x1:g1:cross:ndhwc",
        f"conv_fwd:f32:{LAYER}:nchw:e:bias+relu",
        f"conv_fwd:bf16:{LAYER}:nhwc:e:bias+relu+res",
        f"conv_fwd:f32:{LAYER}:nhwc:e:bias+sigmoid",
        f"conv_fwd:f64:{LAYER}:nchw:e:bias+sigmoid+beta",
        f"conv_fwd:f32:{LAYER}:nchw:e:relu",
        f"conv_fwd:bf16:{LAYER}:nchw:e:relu+res",
        f"conv_fwd:f16:{LAYER}:nhwc:e:res",
        f"conv_bwd_data:f32:{LAYER}:nchw",
        f"conv_bwd_data:bf16:{LAYER}:nhwc:e:beta",
        "conv_bwd_data:f32:n4c64d5h6w7:k64t3r3s3:p1x1x1:u2x2x2:d1x1x1:g1:conv:ncdhw",
        f"conv_bwd_filter:f32:{LAYER}:nchw:e:beta",
        f"conv_bwd_filter:bf16:{LAYER}:nhwc",
        f"conv_bwd_filter:f64:{LAYER}:nhwc",
    )
]
SUPPORTED = [
    pytest.param(candidate, problem, id=f"{candidate.id}-{problem}")
    for problem in PROBLEMS
    for candidate in KINDS[problem.op]
    if candidate.deterministic and (candidate.math == "fma" or problem.dtype == "f32")
]


@pytest.mark.parametrize(("candidate", "problem"), SUPPORTED)
def test_configs_make_plans_in_the_workspace_they_say(candidate: Graph, problem: ConvProblem) -> None:
    """With the usual factors and with others; plans whose kernel is compiled are made once a problem."""
    assert candidate.supports(problem, DEVICE).ok
    configs = candidate.configs(problem, DEVICE)
    beside = (
        {each.config for each in _defaults(problem, DEVICE, _usual(problem))} if candidate.math == "tf32" else set()
    )
    proposed = [config for config in configs if config not in beside]
    assert 1 <= len(configs) == len(set(map(str, configs)))
    assert len(proposed) <= (40 if problem.op == "conv_bwd_filter" else 12)
    where, compiled = property_descriptor(DEVICE), 0
    for config in configs:
        promised = candidate.workspace_bytes(problem, config, DEVICE)
        usual, other = _chosen(candidate, problem, DEVICE)[config]
        for proposal, scalars in ((usual, _usual(problem)), (other, _unusual(problem)), (other, Scalars(-2.5, 1.5))):
            compiled += proposal.compiled_at_run_time
            if proposal.compiled_at_run_time and compiled > 1:
                continue
            factors = scalars if "beta" in problem.epilogue else Scalars(scalars.alpha)
            graph = operation_graph(operations(problem, factors).operations)
            assert plan(where, graph, proposal.config).workspace_bytes <= promised


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_a_candidate_lists_only_what_it_may(problem: ConvProblem) -> None:
    plain, nondeterministic, tf32 = KINDS[problem.op]
    proposed, beside = (of(problem, DEVICE, _usual(problem)) for of in (_proposals, _defaults))
    notes = {proposal.config: proposal.notes for proposal in (*beside, *proposed)}
    for candidate in (plain, nondeterministic, tf32):
        listed = candidate.configs(problem, DEVICE) if candidate.supports(problem, DEVICE).ok else ()
        for config in listed:
            assert (NumericalNote.NONDETERMINISTIC in notes[config]) is (candidate is nondeterministic)
            rounds = problem.dtype == "f32" and NumericalNote.TENSOR_CORE in notes[config]
            assert rounds is (candidate is tf32)
            assert NumericalNote.DOWN_CONVERT_INPUTS not in notes[config]
            assert problem.compute == "f16" or NumericalNote.REDUCED_PRECISION_REDUCTION not in notes[config]
    if problem.dtype == "f32":
        assert set(plain.configs(problem, DEVICE)).isdisjoint(tf32.configs(problem, DEVICE))
        assert any(NumericalNote.TENSOR_CORE in each for each in notes.values())


def test_a_winograd_is_listed_by_its_own_candidate_alone() -> None:
    """Of cuDNN 9.19; 9.28 has none. With other factors any engine may stand for it that TF32 may use."""
    problem = parse("conv_bwd_filter:f32:n128c64h27w27:k192r5s5:p2x2:u1x1:d1x1:g1:cross:nchw")
    assert isinstance(problem, ConvProblem)
    said, unsaid = frozenset((NumericalNote.WINOGRAD_TILE_4x4,)), frozenset[int]()
    for proposal in (Proposal(EngineConfig(17), unsaid, False, 0), Proposal(EngineConfig(90), said, False, 0)):
        assert [kind.algorithm for kind in BWD_FILTER if kind.lists(proposal, problem)] == ["graph_winograd_tf32"]
        assert [kind.algorithm for kind in BWD_FILTER if kind.allows(proposal, problem)] == ["graph_winograd_tf32"]
    tf32 = Proposal(EngineConfig(68), frozenset((NumericalNote.TENSOR_CORE,)), False, 0)
    assert WINOGRAD.allows(tf32, problem) and not WINOGRAD.lists(tf32, problem)
    assert not any(kind.lists(Proposal(EngineConfig(17), said, False, 0), problem) for kind in FILTER)
    assert transforms(WINOGRAD) and WINOGRAD.math == "tf32"
    assert all(config.engine == 17 for config in _chosen(WINOGRAD, problem, DEVICE))


def test_the_engines_that_add_in_any_order() -> None:
    for op, engine in (("conv_bwd_data", 25), ("conv_bwd_filter", 20)):
        problem = parse(f"{op}:f32:n32c144h56w56:k144r3s3:p1x1:u1x1:d1x1:g144:cross:nhwc")
        _, nondeterministic, _ = KINDS[op]
        assert not nondeterministic.deterministic and nondeterministic.supports(problem, DEVICE).ok
        assert {config.engine for config in nondeterministic.configs(problem, DEVICE)} == {engine}


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (
            "e:bias+swish",
            "the epilogue e:bias+swish is not fused here: cuDNN has no swish after a convolution that is right",
        ),
        ("e:tanh", "the epilogue e:tanh is not fused here: cuDNN has no tanh after a convolution that is right"),
        (
            "e:bias+res+beta",
            "the epilogue e:bias+res+beta is not fused here: cuDNN adds one tensor besides the bias, not two",
        ),
    ],
)
def test_epilogues_outside_of_the_pattern(end: str, reason: str) -> None:
    assert FWD[0].supports(parse(f"conv_fwd:f32:{LAYER}:nchw:{end}"), DEVICE) == (False, reason)


def test_other_refusals() -> None:
    plain, _, tf32 = FWD
    assert tf32.supports(parse(f"conv_fwd:bf16:{LAYER}:nhwc"), DEVICE).reason == (
        "TF32 is an arithmetic of f32 data, not of bf16"
    )
    assert plain.supports(parse(f"conv_fwd:f32:{LAYER}:nchw".replace("n32", "n0")), DEVICE).reason == "x has 0 elements"
    without = parse(f"conv_fwd:f16:cf16:{LAYER}:nhwc:e:bias+relu".replace("cross", "conv"))
    assert plain.supports(without, DEVICE).reason.startswith("of the 0 engine configs that cuDNN proposes, none")


@pytest.mark.parametrize("op", CONV_OPS)
def test_every_edge_case_is_answered(op: str) -> None:
    """Every convolution has an engine, whatever its dtype, shape, mode and layouts; but for a few epilogues, and these
    are finished behind the engines of what is left."""
    plain = KINDS[op][0]
    posed = [p for p in edges(op) if min(p.n, p.c, p.k) and (op != "conv_bwd_filter" or p.align == DEFAULT_ALIGN)]
    refused = [p for p in posed if not plain.supports(p, DEVICE).ok]
    assert {"+".join(problem.epilogue) for problem in refused} == (_NOT_FUSED if op == "conv_fwd" else set())
    if op == "conv_fwd":
        listed = registry.candidate(plain.id)
        assert not [problem for problem in posed if not listed.supports(problem, DEVICE).ok]


def test_sums_of_odd_channels_are_not_split() -> None:
    """By engine 62, which cuDNN 9.19 proposes for them."""
    odd = "conv_bwd_filter:bf16:n4c52h14w14:k384r1s1:p0x0:u1x1:d1x1:g1:cross:nhwc"
    legacy = registry.candidate("conv_bwd_filter/cudnn/algo_1").supports(parse(odd), DEVICE)
    assert not legacy.ok and legacy.reason.startswith("52 to 384 channels last, 1x1: sums were off")
    assert conv_graph._is_wrong(62, parse(odd)) and not conv_graph._is_wrong(65, parse(odd))  # type: ignore[arg-type]
    for change in (("c52", "c56"), ("u1x1", "u2x2"), ("nhwc", "nchw"), ("bf16", "f32"), ("r1s1:p0x0", "r3s3:p1x1")):
        other = parse(odd.replace(*change))
        assert not conv_graph._is_wrong(62, other)  # type: ignore[arg-type]


def test_scalars_are_part_of_the_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """y stands for z where alpha needs the sum; a residual is z, with the factor 1."""
    seen: list[tuple[int, float, float]] = []
    real = conv_operations._pointwise

    def recording(problem: ConvProblem, stage: conv_operations._Stage, value: Backend, result: Backend) -> Backend:
        if stage.factors:
            seen.append((int(stage.mode), *stage.factors))
        return real(problem, stage, value, result)

    monkeypatch.setattr(conv_operations, "_pointwise", recording)
    plain, residual, beta = (parse(f"conv_fwd:f32:{LAYER}:nchw:e:bias+{end}") for end in ("relu", "relu+res", "beta"))
    assert operations(plain, Scalars()).tensors == [(1, 0), (2, 1), (3, 2), (4, 3)] and seen == []
    assert operations(plain, Scalars(0.5)).tensors[-1] == (9, 2) and seen.pop() == (0, 0.5, 0.0)
    assert operations(residual, Scalars(0.5)).tensors[-1] == (9, 4) and seen.pop() == (0, 0.5, 1.0)
    assert operations(beta, Scalars(0.5, 0.25)).tensors[-1] == (9, 2) and seen.pop() == (0, 0.5, 0.25)


def test_zeros_stand_for_a_bias() -> None:
    own, none, plain = (parse(f"conv_fwd:f16:{LAYER}:nhwc{end}") for end in (":e:bias+relu", ":e:relu+res", ""))
    assert [conv_operations.zero_bias_bytes(problem) for problem in (own, none, plain)] == [0, 64 * 2, 0]
    assert operations(none, Scalars()).tensors == [(1, 0), (2, 1), (3, 2), (4, 4), (9, 3)]


def test_the_default_guess_is_the_first_config() -> None:
    problem = PROBLEMS[2]
    configs = FWD[0].configs(problem, DEVICE)
    guesses_us = [FWD[0].estimate(problem, config, DEVICE) for config in configs]
    assert guesses_us == sorted(guesses_us) and 9 < guesses_us[0] < 90  # the floor is 9 us, PyTorch took 25


def test_what_is_remembered_is_bounded() -> None:
    assert conv_graph._proposals.cache_info().maxsize == conv_graph._chosen.cache_info().maxsize == 4096


def test_tf32_has_the_engines_that_cudnn_does_not_propose() -> None:
    """With their own knobs, behind what it does propose."""
    layer = parse("conv_bwd_data:f32:n8c256h33w33:k256r3s3:p12x12:u1x1:d12x12:g1:cross:nhwc")
    assert isinstance(layer, ConvProblem)
    plain, _, tf32 = KINDS[layer.op]
    proposed = {proposal.config for proposal in _proposals(layer, DEVICE, _usual(layer))}
    places = [config in proposed for config in tf32.configs(layer, DEVICE)]
    assert sorted(places, reverse=True) == places and not all(places)
    assert {config.engine for config in tf32.configs(layer, DEVICE)} > {config.engine for config in proposed} - {
        0,
        25,
        74,
    }
    assert proposed.issuperset(plain.configs(layer, DEVICE))


def test_what_was_executed_last_lives_until_another_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where making the plan that follows fails, and that of the last was the oldest."""
    alive: weakref.WeakSet[Backend] = weakref.WeakSet()

    class Descriptor(Backend):
        def __init__(self, *_: object) -> None:
            self.address = id(self)
            alive.add(self)

        def set(self, *_: object) -> Descriptor:
            return self

        def finalize(self) -> Descriptor:
            return self

    def made(self: conv_graph._Run, scalars: Scalars) -> conv_graph._Ready:
        if scalars.alpha == 9:
            raise KeyboardInterrupt
        return conv_graph._Ready(SimpleNamespace(descriptor=Descriptor()), Packs([(1, 0), (2, 1)]))  # type: ignore[arg-type]

    executed: list[bool] = []

    def prepared(name: str, handle: int, *addresses: int) -> Callable[[], int]:
        def execute() -> int:
            executed.append({*addresses} <= {each.address for each in alive})
            return 0

        return execute

    monkeypatch.setattr(graph, "Backend", Descriptor)
    monkeypatch.setattr(conv_graph, "handle", lambda device: SimpleNamespace(address=1, stream=0))
    monkeypatch.setattr(conv_graph, "prepared", prepared)
    monkeypatch.setattr(conv_graph._Run, "_made", made)
    nothing = Proposal(EngineConfig(0), frozenset(), False, 0)
    run = conv_graph._Run(parse(f"conv_fwd:f32:{LAYER}:nchw:e:beta"), nothing, nothing, DEVICE)  # type: ignore[arg-type]
    for alpha in (*range(1, conv_graph._MOST_SCALARS + 1), 1):
        run((16, 32), (float(alpha), 0.5), 0, 0)
    with pytest.raises(KeyboardInterrupt):
        run((16, 32), (9.0, 0.5), 0, 0)
    for address in range(16, 16 * (graph._MOST_PACKS + 2), 16):
        run._ready_for((1.0, 0.5)).packs((address,) * 2, 0)
    run((16, 32), (1.0, 0.5), 0, 0)
    assert len(executed) == conv_graph._MOST_SCALARS + 2 and all(executed)


@pytest.mark.parametrize(("status", "kind"), [(2003, RefusedOperands), (3000, RefusedOperands), (5000, StatusError)])
def test_what_is_refused_is_told_from_what_fails(
    status: int, kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = conv_graph._Ready(SimpleNamespace(descriptor=SimpleNamespace(address=2)), Packs([(1, 0)]))  # type: ignore[arg-type]
    monkeypatch.setattr(conv_graph, "handle", lambda device: SimpleNamespace(address=1, stream=0))
    monkeypatch.setattr(conv_graph, "prepared", lambda *_: lambda: status)
    monkeypatch.setattr(conv_graph._Run, "_made", lambda *_: made)
    nothing, problem = Proposal(EngineConfig(0), frozenset(), False, 0), parse(f"conv_fwd:f32:{LAYER}:nchw")
    run = conv_graph._Run(problem, nothing, nothing, DEVICE)  # type: ignore[arg-type]
    with pytest.raises(kind, match=rf"^cudnnBackendExecute -> CUDNN_STATUS_\w+ \({status}\).*; {problem}$"):
        run((16, 32), (1.0, 0.0), 0, 0)


def test_an_interrupted_change_of_stream_is_made_by_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    set_to: list[int] = []

    def call(name: str, address: int, stream: int) -> None:
        set_to.append(stream)
        if len(set_to) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(handle, "call", call)
    made = object.__new__(handle.Handle)
    made.address, made.stream = 1, 0
    with pytest.raises(KeyboardInterrupt):
        made.use(7)
    made.use(0)
    made.use(0)
    assert set_to == [7, 0]
