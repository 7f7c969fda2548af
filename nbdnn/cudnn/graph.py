"""Graphs of operations, the engines that cuDNN proposes for them, and plans that run: the backend API.

    operations -> graph -> heuristics -> engine configs -> plan --(handle, variant pack of pointers)--> execute

An engine config is the pair (global engine index, knobs), never a place in a list, which shifts between versions.
Proposals need no handle, only the properties of a GPU; plans that run are made with a handle, in its thread. A
finished variant pack cannot be changed, and making one costs 15 us: packs are kept by pointers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from nbdnn.cudnn.api import StatusError
from nbdnn.cudnn.descriptors import Backend
from nbdnn.cudnn.enums import Attribute, AttributeType, BehaviorNote, DescriptorType, HeurMode, Status
from nbdnn.cudnn.handle import Handle

# Room for lists whose length cuDNN does not tell beforehand: no engine has had more than a dozen knobs.
_MOST_NOTES, _MOST_KNOBS = 32, 32
# Packs kept by a plan: a tuner rotates some tens of copies of the operands, a program through its own buffers.
_MOST_PACKS = 256


class EngineConfig(NamedTuple):
    """An engine by its global index, and its knobs as (knob type, value) pairs in cuDNN's order."""

    engine: int
    knobs: tuple[tuple[int, int], ...] = ()

    def __str__(self) -> str:
        """Such as 'e62:2=5,13=1'."""
        knobs = ",".join(f"{kind}={value}" for kind, value in self.knobs)
        return f"e{self.engine}:{knobs}" if knobs else f"e{self.engine}"


class Proposal(NamedTuple):
    """An engine config that cuDNN proposes for a graph, and what it says of it.

    compiled_at_run_time: making the plan takes 0.3 to 1 s, as its kernel is compiled then.
    """

    config: EngineConfig
    notes: frozenset[int]
    compiled_at_run_time: bool
    workspace_bytes: int


def operation_graph(operations: Sequence[Backend], handle: Handle | None = None) -> Backend:
    """A graph of operations; with a handle, one whose plans run."""
    graph = Backend(DescriptorType.OPERATIONGRAPH)
    if handle:
        graph.set(Attribute.OPERATIONGRAPH_HANDLE, [handle.address], AttributeType.HANDLE)
    return graph.link(Attribute.OPERATIONGRAPH_OPS, *operations).finalize()


def proposals(graph: Backend, properties: Backend) -> list[Proposal]:
    """Every distinct engine config for a graph: cuDNN's ranking, then what it falls back on."""
    found: dict[EngineConfig, Proposal] = {}
    for mode in (HeurMode.A, HeurMode.FALLBACK):
        heuristics = Backend(DescriptorType.ENGINEHEUR)
        heuristics.link(Attribute.ENGINEHEUR_OPERATION_GRAPH, graph)
        heuristics.link(Attribute.ENGINEHEUR_DEVICEPROP, properties)
        heuristics.set(Attribute.ENGINEHEUR_MODE, [mode], AttributeType.HEUR_MODE)
        try:
            results = heuristics.finalize().get_parts(Attribute.ENGINEHEUR_RESULTS, DescriptorType.ENGINECFG)
        except StatusError as error:
            if error.kind != Status.NOT_SUPPORTED:
                raise
            continue  # of a graph that no engine runs, one mode says so and the other is empty
        for result in results:
            proposal = _described(result)
            # What cuDNN only falls back on is not worth a compilation beside an engine that it falls back on as well.
            if mode == HeurMode.A or not proposal.compiled_at_run_time:
                found.setdefault(proposal.config, proposal)
    return list(found.values())


def defaults(graph: Backend, properties: Backend) -> list[Proposal]:
    """Every engine that takes a graph, with the knobs that it has where nobody turns them; in the order of indices.

    Not those that are compiled at run time: where cuDNN did not propose them, they took no notice of alpha, left sums
    out, or did not compile (an H200, cuDNN 9.19).
    """
    (count,) = graph.get(Attribute.OPERATIONGRAPH_ENGINE_GLOBAL_COUNT, AttributeType.INT64)
    found = []
    for index in range(count):
        engine = Backend(DescriptorType.ENGINE).link(Attribute.ENGINE_OPERATION_GRAPH, graph)
        engine.link(Attribute.ENGINE_DEVICEPROP, properties).set(Attribute.ENGINE_GLOBAL_INDEX, [index])
        made = Backend(DescriptorType.ENGINECFG)
        try:
            found.append(_described(made.link(Attribute.ENGINECFG_ENGINE, engine.finalize()).finalize()))
        except StatusError as error:
            if error.kind not in (Status.NOT_SUPPORTED, Status.BAD_PARAM):
                raise
    return [proposal for proposal in found if not proposal.compiled_at_run_time]


def _described(config: Backend) -> Proposal:
    (engine,) = config.get_parts(Attribute.ENGINECFG_ENGINE, DescriptorType.ENGINE)
    (index,) = engine.get(Attribute.ENGINE_GLOBAL_INDEX, AttributeType.INT64)
    knobs = []
    for choice in config.get_parts(Attribute.ENGINECFG_KNOB_CHOICES, DescriptorType.KNOB_CHOICE, _MOST_KNOBS):
        (kind,) = choice.get(Attribute.KNOB_CHOICE_KNOB_TYPE, AttributeType.KNOB_TYPE)
        (value,) = choice.get(Attribute.KNOB_CHOICE_KNOB_VALUE, AttributeType.INT64)
        knobs.append((kind, value))
    notes = engine.get(Attribute.ENGINE_NUMERICAL_NOTE, AttributeType.NUMERICAL_NOTE, _MOST_NOTES)
    behaviour = engine.get(Attribute.ENGINE_BEHAVIOR_NOTE, AttributeType.BEHAVIOR_NOTE, _MOST_NOTES)
    (workspace_bytes,) = config.get(Attribute.ENGINECFG_WORKSPACE_SIZE, AttributeType.INT64)
    compiled = BehaviorNote.RUNTIME_COMPILATION in behaviour
    return Proposal(EngineConfig(index, tuple(knobs)), frozenset(notes), compiled, workspace_bytes)


class Plan:
    """A finished plan. It runs where it was made with a handle; with the properties of a GPU it can be looked at."""

    def __init__(self, where: Handle | Backend, source: Backend | bytes) -> None:
        """`source` is an engine config, or the `text` of an equal plan."""
        self.descriptor = Backend(DescriptorType.EXECUTION_PLAN)
        if isinstance(where, Handle):
            self.descriptor.set(Attribute.EXECUTION_PLAN_HANDLE, [where.address], AttributeType.HANDLE)
        else:
            self.descriptor.link(Attribute.EXECUTION_PLAN_DEVICEPROP, where)
        if isinstance(source, Backend):
            self.descriptor.link(Attribute.EXECUTION_PLAN_ENGINE_CONFIG, source)
        else:
            self.descriptor.set(Attribute.EXECUTION_PLAN_JSON_REPRESENTATION, source, AttributeType.CHAR)
        self.descriptor.finalize()

    @property
    def workspace_bytes(self) -> int:
        return self.descriptor.get(Attribute.EXECUTION_PLAN_WORKSPACE_SIZE, AttributeType.INT64)[0]

    def text(self) -> bytes:
        """The plan as JSON, with the kernel where that was compiled for it."""
        return self.descriptor.get_text(Attribute.EXECUTION_PLAN_JSON_REPRESENTATION)


def plan(where: Handle | Backend, graph: Backend, config: EngineConfig) -> Plan:
    """Plan a graph with an engine; StatusError where this cuDNN has no such engine or knob for it."""
    engine = Backend(DescriptorType.ENGINE).link(Attribute.ENGINE_OPERATION_GRAPH, graph)
    if not isinstance(where, Handle):
        engine.link(Attribute.ENGINE_DEVICEPROP, where)
    engine.set(Attribute.ENGINE_GLOBAL_INDEX, [config.engine]).finalize()
    choices = []
    for kind, value in config.knobs:
        choice = Backend(DescriptorType.KNOB_CHOICE)
        choice.set(Attribute.KNOB_CHOICE_KNOB_TYPE, [kind], AttributeType.KNOB_TYPE)
        choices.append(choice.set(Attribute.KNOB_CHOICE_KNOB_VALUE, [value]).finalize())
    made = Backend(DescriptorType.ENGINECFG).link(Attribute.ENGINECFG_ENGINE, engine)
    if choices:
        made.link(Attribute.ENGINECFG_KNOB_CHOICES, *choices)
    return Plan(where, made.finalize())


class Packs:
    """The last used variant packs: for tensors with the given unique ids, at places among the pointers of a call.

    `own` are pointers that every call has, behind those that it is given.
    """

    def __init__(self, tensors: Sequence[tuple[int, int]], own: tuple[int, ...] = ()) -> None:
        self._ids, self._places = zip(*tensors, strict=True)
        self._own = own
        self._packs: dict[tuple[tuple[int, ...], int], Backend] = {}

    def __call__(self, pointers: tuple[int, ...], workspace: int) -> Backend:
        """The pack for these addresses."""
        key = pointers, workspace
        pack = self._packs.pop(key, None)
        if pack is None:
            if len(self._packs) >= _MOST_PACKS:
                del self._packs[next(iter(self._packs))]
            pack = self._made(pointers, workspace)
        self._packs[key] = pack  # the last in order is the last used
        return pack

    def _made(self, pointers: tuple[int, ...], workspace: int) -> Backend:
        pack = Backend(DescriptorType.VARIANT_PACK)
        every = (*pointers, *self._own)
        picked = [every[place] for place in self._places]
        pack.set(Attribute.VARIANT_PACK_DATA_POINTERS, picked, AttributeType.VOID_PTR)
        pack.set(Attribute.VARIANT_PACK_UNIQUE_IDS, self._ids)
        pack.set(Attribute.VARIANT_PACK_WORKSPACE, [workspace], AttributeType.VOID_PTR)
        return pack.finalize()
