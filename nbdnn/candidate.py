"""How a problem may be computed: the contract that every implementation fulfils.

A candidate is stateless and knows nothing about who calls it, about measurements or about policies. Adding one
touches two places: its own file, and one line in ``dispatch/registry.py``.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Hashable
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from nbdnn.cached import cached_property
from nbdnn.device import Cpu, Gpu
from nbdnn.source import transitive_hash


class Support(NamedTuple):
    """Whether a candidate is *correct* on a problem (never whether it is fast), and the number that says no."""

    ok: bool
    reason: str = ""


YES = Support(True)


class Runner(Protocol):
    """The prepared launch: all slow work is done, it only starts the computation.

    pointers: one address for each of ``problem.operands``, in that order.
    scalars: as many as ``problem.scalars``: (alpha, beta) for convolutions.
    workspace: address of at least ``workspace_bytes`` bytes, aligned to 64 (0 where none is needed).
    stream: CUDA stream handle; 0 on the CPU, where the call returns when the work is done.
    A runner belongs to one thread.
    """

    def __call__(
        self, pointers: tuple[int, ...], scalars: tuple[float, ...], workspace: int, stream: int, /
    ) -> None: ...


class NoConfig(NamedTuple):
    """The one config of a candidate that has nothing to tune.

    Every config is hashable, and its ``str()`` is unique among the candidate's ``configs()``: it is what is stored.
    """

    def __str__(self) -> str:
        return ""


ConfigT = TypeVar("ConfigT", bound=Hashable)
DeviceT = TypeVar("DeviceT", Cpu, Gpu)


class Candidate(ABC, Generic[ConfigT, DeviceT]):
    """One implementation of one op; every `problem` it is given is of the class that this op's problems have.

    op, provider, algorithm make up the id, such as ``conv_fwd/cpu/direct``; provider is 'cpu', or 'numba' or 'cudnn'
    for GPUs. ``algo`` is Theano's name for the method (None where it had none). ``math`` names the arithmetic: 'fma' is
    IEEE multiply-add in the compute type; 'tf32' may only be used where TF32 is allowed. ``by_name_only``: misses the
    accuracy every default choice owes. ``foreign_threads``: runs on another library's threads, which may spin on after
    it: the tuner waits for them.
    """

    op: str
    provider: str
    algorithm: str
    algo: str | None = None
    deterministic: bool = True
    math: str = "fma"
    by_name_only: bool = False
    foreign_threads: bool = False

    @property
    def cudnn_version(self) -> int:
        """Of the cuDNN that it calls: measurements with another count no more. 0 where it calls none."""
        return 0

    @cached_property
    def id(self) -> str:
        return f"{self.op}/{self.provider}/{self.algorithm}"

    def __str__(self) -> str:
        return self.id

    @cached_property
    def version(self) -> str:
        """Hash of the parsed source of this candidate's module and of the nbdnn kernel modules it imports."""
        return transitive_hash(sys.modules[type(self).__module__])

    @abstractmethod
    def supports(self, problem: Any, device: DeviceT) -> Support:
        """Whether the result is correct here; a refusal carries the number that failed."""

    def configs(self, problem: Any, device: DeviceT) -> tuple[ConfigT, ...]:
        """Every config worth measuring, the default first."""
        return (NoConfig(),)  # type: ignore[return-value]

    def roundings(self, problem: Any, device: DeviceT) -> int:
        """How often a result of 16 bits is rounded to that type: once more for each step that is not fused."""
        return 1

    def workspace_bytes(self, problem: Any, config: ConfigT, device: DeviceT) -> int:
        return 0

    @abstractmethod
    def estimate(self, problem: Any, config: ConfigT, device: DeviceT) -> float:
        """Cost model: predicted time in microseconds, comparable across candidates and providers."""

    @abstractmethod
    def prepare(self, problem: Any, config: ConfigT, device: DeviceT) -> Runner:
        """Compile or load what is needed and return the runner. May take seconds."""

    def ready(self, problem: Any, config: ConfigT, device: DeviceT) -> Runner:
        """What `prepare` returns, for calls: one that would wake threads may first ask what they are worth."""
        runner = self.prepare(problem, config, device)
        if settle := getattr(runner, "settle", None):
            settle(device, lambda on: self.estimate(problem, config, on))
        return runner
