"""Which candidates may run a problem, what is known about them, and which of them is best: no measuring, no memory.

`policy.py` decides when to use what is here; `tuner.py` measures; `explain.py` shows it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from math import inf
from typing import NamedTuple

from nbdnn import config
from nbdnn.candidate import Candidate
from nbdnn.device import Device, Gpu
from nbdnn.dispatch import events, registry, workspace
from nbdnn.dispatch.database import Database
from nbdnn.dispatch.measurement import Measurement, is_current
from nbdnn.errors import InvalidProblem, UnsupportedProblem
from nbdnn.problem import Problem

# bwd_data 'small' is the fastest with a workspace of at most this: what one core keeps in its L2 cache anyway.
SMALL_WORKSPACE_BYTES = 1 << 20
# Times this close are one time: the noise of a quiet machine, and the most that the measured spread may add to it.
_TIE, _LARGEST_TIE = 0.01, 0.05
# What the kernels of 'numba' are written for: GPUs before Ampere's do not know the PTX of many; none is tested there.
_LEAST_CAPABILITY = 8, 0


class Filters(NamedTuple):
    """What a caller permits; never part of a problem's key.

    method: Theano's name of the method wanted, or ''. candidate: the id of the one wanted, or ''. hint: a direction
    hint that applies, or ''.
    """

    deterministic: bool = False
    allow_tf32: bool = False
    workspace_limit: int | None = None
    method: str = ""
    candidate: str = ""
    hint: str = ""

    @property
    def by_name(self) -> str:
        return self.candidate or self.method

    def unnamed(self) -> Filters:
        """The same without the wish for a method or candidate; who wished for 'deterministic' still gets it."""
        deterministic = self.deterministic or self.method == "deterministic"
        return self._replace(method="", candidate="", deterministic=deterministic)


class Option(NamedTuple):
    """A candidate with one of its configs, and the workspace they need."""

    candidate: Candidate
    config: Hashable
    workspace_bytes: int

    @property
    def key(self) -> tuple[str, str]:
        return self.candidate.id, str(self.config)

    def __str__(self) -> str:
        return " ".join(filter(None, self.key))


class Refused(NamedTuple):
    """A candidate that may not run, and why."""

    candidate: Candidate
    reason: str


def survey(problem: Problem, device: Device, filters: Filters) -> tuple[list[Option], list[Refused]]:
    """Everything that may run, in registry order and each candidate's default config first; and what may not.

    InvalidProblem where there is nothing to run. CudnnError where the flag dnn.enabled demands cuDNN on a GPU and it is
    not there.
    """
    if empty := [operand for operand in problem.operands if not operand.size_elems]:
        raise InvalidProblem(f"{problem} has no work for anybody: {empty[0].name} has shape {empty[0].shape}")
    _demand_cudnn(device)
    if filters.candidate:
        candidates: Iterable[Candidate] = (registry.candidate(filters.candidate),)
    else:
        candidates = registry.candidates(problem.op, filters.hint, device.kind)
    allowed_bytes = workspace.available_bytes(device, filters.workspace_limit)
    options: list[Option] = []
    refused: list[Refused] = []
    for candidate in candidates:
        permitted, reason = _permitted(candidate, problem, device, filters, allowed_bytes)
        options += permitted
        if reason:
            refused.append(Refused(candidate, reason))
    return options, refused


def _demand_cudnn(device: Device) -> None:
    if device.kind == "cuda" and config.current()["dnn.enabled"] is True:
        from nbdnn.cudnn.library import library

        library()


def _permitted(
    candidate: Candidate, problem: Problem, device: Device, filters: Filters, allowed_bytes: int
) -> tuple[list[Option], str]:
    """The options of one candidate, or why it has none."""
    if reason := refusal(candidate, problem, device, filters):
        return [], reason
    needs = [Option(candidate, c, _needs(candidate, problem, c, device)) for c in candidate.configs(problem, device)]
    limit = _workspace_limit(candidate, problem, filters, allowed_bytes)
    if fitting := [option for option in needs if option.workspace_bytes <= limit]:
        return fitting, ""
    return [], f"workspace of {min(option.workspace_bytes for option in needs)} bytes exceeds {limit}"


def _needs(candidate: Candidate, problem: Problem, config: Hashable, device: Device) -> int:
    return candidate.workspace_bytes(problem, config, device)


def _elsewhere(candidate: Candidate, problem: Problem, device: Device) -> str:
    """Why a candidate is for other ops or devices, of whatever shapes."""
    if candidate.op != problem.op:
        return f"computes {candidate.op}, not {problem.op}"
    if (kind := registry.kind_of(candidate)) != device.kind:
        return f"runs on {kind} devices, the problem is on a {device.kind} device"
    return ""


def check_named(problem: Problem, device: Device, filters: Filters) -> None:
    """UnsupportedProblem where a candidate of another op or device is asked for; of problems that nobody runs."""
    if filters.candidate:
        candidate = registry.candidate(filters.candidate)
        if reason := _elsewhere(candidate, problem, device):
            raise unsupported(problem, [Refused(candidate, reason)])


def refusal(candidate: Candidate, problem: Problem, device: Device, filters: Filters) -> str:
    if reason := _elsewhere(candidate, problem, device):
        return reason
    if problem.only and candidate.id != f"{candidate.op}/{problem.only}":
        return f"the operands are {problem.only}'s own"
    if candidate.provider == "cudnn" and config.current()["dnn.enabled"] is False:
        return "dnn.enabled is False"
    if candidate.provider == "numba" and isinstance(device, Gpu) and device.capability < _LEAST_CAPABILITY:
        (major, minor), least = device.capability, ".".join(map(str, _LEAST_CAPABILITY))
        return f"compute capability {major}.{minor}, its kernels are for {least} and above"
    if filters.method and not _is_method(candidate, problem, filters.method):
        return f"its method is {candidate.algo or candidate.algorithm}, not {filters.method}"
    if candidate.by_name_only and not filters.by_name:
        return "less accurate than a default choice must be: only by name"
    if filters.deterministic and not candidate.deterministic:
        return "not deterministic"
    if candidate.math == "tf32" and not filters.allow_tf32:
        return "TF32 is not allowed"
    support = candidate.supports(problem, device)
    return "" if support.ok else support.reason


def _is_method(candidate: Candidate, problem: Problem, method: str) -> bool:
    if method == "deterministic":
        return candidate.deterministic
    return candidate.algo == method or (problem.op, method) == ("conv_bwd_data", "small")


def _workspace_limit(candidate: Candidate, problem: Problem, filters: Filters, allowed_bytes: int) -> int:
    by_workspace = (problem.op, filters.method) == ("conv_bwd_data", "small") and candidate.algo != "small"
    return min(allowed_bytes, SMALL_WORKSPACE_BYTES) if by_workspace else allowed_bytes


def unsupported(problem: Problem, refused: Iterable[Refused]) -> UnsupportedProblem:
    """The error for a problem that nobody may run, a line a candidate; of those that were asked for by name."""
    lines = [f"  {candidate.id}: {reason}" for candidate, reason in refused]
    if len(lines) == 1:
        return UnsupportedProblem(f"{problem} may not be run by{lines[0][1:]}")
    return UnsupportedProblem("\n".join([f"no implementation may run {problem}:", *lines]))


Rows = dict[tuple[str, str], Measurement]


def valid_rows(problem: Problem, device: Device, database: Database) -> Rows:
    """The stored measurements of `problem` that still count, by candidate id and config."""
    rows: Rows = {}
    for row in database.rows(device.fingerprint, str(problem)):
        if is_current(row):
            rows[row.candidate, row.config] = row
        else:
            events.emit("rejected", problem, row.candidate, f"version {row.candidate_version} is not the present one")
    return rows


def fastest(options: Iterable[Option], rows: Rows) -> Option | None:
    """The fastest measured option; near ties go to less workspace, then to the earlier one in the registry."""
    timed = [(option, *_time(rows[option.key])) for option in options if option.key in rows]
    if not timed:
        return None
    _, best_us, best_spread = min(timed, key=lambda entry: entry[1])

    def ties(median_us: float, spread: float) -> bool:
        return median_us <= best_us * (1 + min(max(_TIE, best_spread, spread), _LARGEST_TIE))

    tied = [option for option, median_us, spread in timed if ties(median_us, spread)]
    return min(tied, key=lambda option: option.workspace_bytes) if best_us < inf else None


def fastest_of_all(problem: Problem, device: Device, filters: Filters, rows: Rows) -> Option | None:
    """The `fastest` of everything that may run, of which only those are asked that were measured as fast: a process
    whose database is warm does not wait for what cuDNN would propose."""
    _demand_cudnn(device)
    listed = registry.candidates(problem.op, filters.hint, device.kind)
    least_us: dict[str, float] = {}
    for row in rows.values():
        least_us[row.candidate] = min(least_us.get(row.candidate, inf), _time(row)[0])
    by_time = sorted((least_us[each.id], place) for place, each in enumerate(listed) if each.id in least_us)
    allowed_bytes = workspace.available_bytes(device, filters.workspace_limit)
    permitted: dict[int, list[Option]] = {}
    best: Option | None = None
    for us, place in by_time:
        if best and us > (1 + _LARGEST_TIE) * _time(rows[best.key])[0]:
            break
        permitted[place] = _permitted(listed[place], problem, device, filters, allowed_bytes)[0]
        best = fastest((option for place in sorted(permitted) for option in permitted[place]), rows)
    return best


def _time(row: Measurement) -> tuple[float, float]:
    """(median in us, relative spread); infinite where the candidate failed."""
    if row.status == "failed" or row.median_us is None:
        return inf, 0.0
    return row.median_us, row.spread or 0.0


def ranked(options: Iterable[Option], problem: Problem, device: Device) -> list[Option]:
    """The options in the order of the cost model: the guess comes first."""
    return sorted(options, key=lambda option: option.candidate.estimate(problem, option.config, device))


def working(options: Iterable[Option], rows: Rows) -> list[Option]:
    """The options that have not been measured as failed."""
    return [option for option in options if option.key not in rows or rows[option.key].status != "failed"]
