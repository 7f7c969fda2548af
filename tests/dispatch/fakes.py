"""Candidates made for the tests: right or wrong, slow or fast, big or small, on demand."""

from __future__ import annotations

import ctypes
import signal
from collections.abc import Hashable, Mapping
from time import perf_counter

import pytest

from nbdnn.array import at
from nbdnn.candidate import YES, Candidate, Runner, Support
from nbdnn.device import Cpu
from nbdnn.dispatch import registry
from nbdnn.dispatch.workspace import _allocate as allocate
from nbdnn.errors import RefusedOperands
from nbdnn.kernels.cpu import conv_direct
from nbdnn.problem import Problem, parse

# Small enough that computing it takes microseconds; TALL is another shape of the same layer.
SMALL = parse("conv_fwd:f32:n1c2h6w6:k2r3s3:p1x1:u1x1:d1x1:g1:cross:nchw")
TALL = parse("conv_fwd:f32:n1c2h9w6:k2r3s3:p1x1:u1x1:d1x1:g1:cross:nchw")
_SCRATCH_BYTES = 1 << 16


class Fake(Candidate):
    """Computes with the direct kernel, then idles until `us` microseconds are over: a time, or one for each config.

    behaviour: 'right', 'wrong' (one output is off), 'lazy' (one is not written), 'raises', 'refuses', 'interrupts', 'is
    timed out' (a signal, SIGALRM), or 'interrupts unheard': Ctrl-C comes in a callback of C, as it may while code is
    compiled, which then fails.
    """

    op, provider = "conv_fwd", "cpu"

    def __init__(
        self,
        algorithm: str,
        us: float | Mapping[str, float] = 50.0,
        *,
        estimate: float | Mapping[str, float] = 1.0,
        workspace_bytes: int = 0,
        behaviour: str = "right",
        refuses_height: int = -1,
        **fields: object,
    ) -> None:
        self.algorithm, self.us, self.behaviour = algorithm, us if isinstance(us, Mapping) else {"": us}, behaviour
        self.estimated, self.needs, self.refuses_height = estimate, workspace_bytes, refuses_height
        self.version = "1"
        self.prepared: list[str] = []
        for name, value in fields.items():
            setattr(self, name, value)

    def supports(self, problem: Problem, device: Cpu) -> Support:
        height = problem.spatial[-2]
        return Support(False, f"height is {height}") if height == self.refuses_height else YES

    def configs(self, problem: Problem, device: Cpu) -> tuple[Hashable, ...]:
        return tuple(self.us)

    def workspace_bytes(self, problem: Problem, config: Hashable, device: Cpu) -> int:
        return self.needs

    def estimate(self, problem: Problem, config: Hashable, device: Cpu) -> float:
        return self.estimated[str(config)] if isinstance(self.estimated, Mapping) else self.estimated

    def prepare(self, problem: Problem, config: Hashable, device: Cpu) -> Runner:
        self.prepared.append(str(config))
        if self.behaviour == "interrupts":
            raise KeyboardInterrupt
        if self.behaviour == "is timed out":
            signal.raise_signal(signal.SIGALRM)
        if self.behaviour == "interrupts unheard":
            ctypes.CFUNCTYPE(None)(lambda: signal.raise_signal(signal.SIGINT))()
            raise RuntimeError("no machine code came back")
        direct = conv_direct.FWD
        (only,) = direct.configs(problem, device)
        assert direct.workspace_bytes(problem, only, device) <= _SCRATCH_BYTES
        run = direct.prepare(problem, only, device)
        scratch = allocate(_SCRATCH_BYTES)
        seconds = self.us[str(config)] * 1e-6

        def runner(pointers: tuple[int, ...], scalars: tuple[float, ...], memory: int, stream: int) -> None:
            end = perf_counter() + seconds
            if self.behaviour == "raises":
                raise RuntimeError("out of luck")
            if self.behaviour == "refuses":
                raise RefusedOperands("not a multiple of 16")
            first = at(pointers[2], (1,), (1,), "f32")
            before = first[0]
            run(pointers, scalars, scratch.address, stream)
            if self.behaviour in ("wrong", "lazy"):
                first[0] = before if self.behaviour == "lazy" else first[0] + 1
            while perf_counter() < end:
                pass

        return runner


def register(monkeypatch: pytest.MonkeyPatch, *candidates: Candidate) -> None:
    """Make `candidates` the whole list of their op; whatever their provider, they run on the CPU."""
    monkeypatch.setattr(registry, "kind_of", lambda candidate: "cpu")
    monkeypatch.setattr(registry, "_KINDS", {})
    table = registry.table("cpu", candidates[0].op.partition("_")[0])
    monkeypatch.setitem(table.lists, candidates[0].op, candidates)
    for candidate in candidates:
        monkeypatch.setitem(table.by_id, candidate.id, candidate)


def ids(log: list, kind: str) -> list[str]:
    """The algorithms of the events of one kind, in order."""
    return [event.candidate.rpartition("/")[2] for event in log if event.kind == kind]
