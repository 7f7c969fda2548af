"""How a choice is made: the four selection policies, and choices by name.

guess_on_shape_change  the fastest measured; nothing measured: the cost model's first. Never measures.
guess_once             so at the layer's first call, then the same for every shape that it fits. Kept in the process.
time_on_shape_change   measure what has no valid row, then the fastest.
time_once              complete measurements of this very problem, else the layer's choice in the database, else measure
                       this shape and record the winner for the layer.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import NamedTuple

from nbdnn import config
from nbdnn.cached import cached_property
from nbdnn.device import Device
from nbdnn.dispatch import events, tuner
from nbdnn.dispatch.database import Database, LayerChoice
from nbdnn.dispatch.measurement import is_current, utc_now
from nbdnn.dispatch.selection import (
    Filters,
    Option,
    Refused,
    Rows,
    fastest,
    fastest_of_all,
    ranked,
    survey,
    unsupported,
    valid_rows,
    working,
)
from nbdnn.dispatch.timing import Given
from nbdnn.errors import warn
from nbdnn.problem import OPS, Problem


class OpLayer(str):
    """The layer that an op object is: a name that equals no other. The database, which outlives it, has it as a layer
    without a name."""

    __eq__, __hash__ = object.__eq__, object.__hash__


class Request(NamedTuple):
    """What a caller asks for. layer: the name that separates equal layers."""

    policy: str = "guess_on_shape_change"
    filters: Filters = Filters()
    layer: str | None = None


def policy_of_flag(op: str) -> str:
    """What dnn.policy says of an op: a policy or the id of a candidate, which is that of its own op alone."""
    policy = config.current()["dnn.policy"]
    return "guess_on_shape_change" if policy.partition("/")[0] in {*OPS} - {op} else policy


class Choice(NamedTuple):
    """What runs, and where that comes from: 'measured', 'cost model', 'layer' or 'named'."""

    option: Option
    source: str


def choose(
    problem: Problem, device: Device, database: Database, request: Request, given: Given | None = None
) -> Choice:
    """What runs `problem`; the timing policies measure on the `given` operands.

    Raises
    ------
    UnsupportedProblem
        Where nobody may run it; every candidate's reason, one a line.
    """
    filters = request.filters
    if filters.by_name:
        if named := _named(problem, device, database, filters):
            return named
        choice = choose(problem, device, database, request._replace(filters=filters.unnamed()), given)
        _tell_fallback(problem, device, filters, choice.option)
        return choice
    return _Choosing(problem, device, database, request, given).by_policy()


def would_choose(problem: Problem, device: Device, database: Database, request: Request) -> Choice:
    """What `choose` would run if it did not measure."""
    if request.filters.by_name and (named := _named(problem, device, database, request.filters)):
        return named
    unnamed = request._replace(filters=request.filters.unnamed())
    return _Choosing(problem, device, database, unnamed, None).without_measuring()


def guess(problem: Problem, device: Device, filters: Filters = Filters()) -> Option:  # noqa: B008
    """What guess_on_shape_change picks on an empty database."""
    options, refused = survey(problem, device, filters)
    if not options:
        raise unsupported(problem, refused)
    return ranked(options, problem, device)[0]


def forget_once() -> None:
    """Forget what the *_once policies remember in this process."""
    _remembered.clear()


_remembered: dict[tuple, tuple[str, str]] = {}  # (device, layer, policy, name or op object, database) -> key
# Budgets that were spent on a problem: time_on_shape_change goes on in the next process, not at the next call.
_spent: set[tuple] = set()
_warned: set[tuple[str, str]] = set()
_lock = threading.Lock()


class _Choosing:
    """One choice by policy, with what every step of it looks at."""

    def __init__(
        self, problem: Problem, device: Device, database: Database, request: Request, given: Given | None
    ) -> None:
        self._problem, self._device, self._database = problem, device, database
        self._request, self._given = request, given

    @cached_property
    def _surveyed(self) -> tuple[list[Option], list[Refused]]:
        """What may run, which is not nothing, and what may not."""
        options, refused = survey(self._problem, self._device, self._request.filters)
        if not options:
            raise unsupported(self._problem, refused)
        return options, refused

    @property
    def _options(self) -> list[Option]:
        return self._surveyed[0]

    def by_policy(self) -> Choice:
        match self._request.policy:
            case "guess_on_shape_change":
                return self._best(self._rows())
            case "guess_once":
                return self._guessed_once()
            case "time_on_shape_change":
                return self._timed()
            case "time_once":
                return self._timed_once()
        raise ValueError(f"policy {self._request.policy!r} is not one of {', '.join(config.POLICIES)}")

    def without_measuring(self) -> Choice:
        rows, once = self._rows(), self._request.policy
        if once == "guess_once" or (once == "time_once" and not self._is_complete(rows)):
            return self._remembered_choice() or self._best(rows)
        return self._best(rows)

    def _rows(self) -> Rows:
        return valid_rows(self._problem, self._device, self._database)

    def _best(self, rows: Rows) -> Choice:
        if option := fastest_of_all(self._problem, self._device, self._request.filters, rows):
            return Choice(option, "measured")
        if working_options := working(self._options, rows):
            return Choice(ranked(working_options, self._problem, self._device)[0], "cost model")
        failed = [Refused(o.candidate, f"failed when tried: {rows[o.key].reason}") for o in self._options]
        raise unsupported(self._problem, [*self._surveyed[1], *failed])

    def _is_complete(self, rows: Rows) -> bool:
        return all(option.key in rows for option in self._options)

    def _timed(self) -> Choice:
        rows = self._rows()
        budget_s = config.current()["tune.budget_s"]
        spent = (self._database.path, self._device, str(self._problem), self._request.filters, budget_s)
        if not self._is_complete(rows) and spent not in _spent:
            try:
                rows = tuner.tune(
                    self._problem,
                    self._device,
                    self._database,
                    filters=self._request.filters,
                    given=self._given,
                    budget_s=budget_s,
                ).rows
            except MemoryError as error:
                events.emit("failed", self._problem, "", f"not measured: {error}")
            _spent.add(spent)
        return self._best(rows)

    def _guessed_once(self) -> Choice:
        return self._remembered_choice() or self._remember_first(self._best(self._rows()))

    def _timed_once(self) -> Choice:
        rows = self._rows()
        if not self._is_complete(rows) and (remembered := self._remembered_choice()):
            return remembered
        return self._remember_first(self._timed())

    def _remember_first(self, choice: Choice) -> Choice:
        """The choice, of the layer if it has none: what fits this caller alone replaces nobody's."""
        return choice if self._is_remembered() else self._remember(choice)

    # The memory of *_once: op objects and guess_once in this process, time_once also in the database.

    @property
    def _key(self) -> tuple:
        policy, _, layer = self._request
        return self._device.fingerprint, self._problem.layer, policy, layer, self._database.path

    @property
    def _layer(self) -> str:
        layer = self._request.layer
        unnamed = layer is None or isinstance(layer, OpLayer)
        return self._problem.layer if unnamed else f"{self._problem.layer}@{layer}"

    def _recall(self) -> tuple[str, str] | None:
        if found := _remembered.get(self._key):
            return found
        if self._request.policy == "time_once":
            stored = self._database.layer_choice(self._device.fingerprint, self._layer)
            if stored and is_current(stored):
                return stored.candidate, stored.config
            if stored:
                events.emit("rejected", self._problem, stored.candidate, f"layer choice of {stored.candidate_version}")
        return None

    def _is_remembered(self) -> bool:
        """Whether the layer has a choice that this problem could run, be it not permitted to this caller."""
        if (recalled := self._recall()) is None:
            return False
        anyone = self._request.filters._replace(deterministic=False, allow_tf32=True, workspace_limit=None)
        options, _ = survey(self._problem, self._device, anyone)
        return any(option.key == recalled for option in options)

    def _remembered_choice(self) -> Choice | None:
        if (recalled := self._recall()) is None:
            return None
        rows = self._rows()
        for option in working(self._options, rows):
            if option.key == recalled:
                return Choice(option, "layer")
        reason = next(
            (r.reason for r in self._surveyed[1] if r.candidate.id == recalled[0]), "this config does not apply"
        )
        events.emit("replaced", self._problem, recalled[0], reason)
        return None

    def _remember(self, choice: Choice) -> Choice:
        candidate = choice.option.candidate
        if self._request.policy == "time_once":
            self._database.remember(
                LayerChoice(
                    self._device.fingerprint,
                    self._layer,
                    *choice.option.key,
                    candidate.version,
                    str(self._problem),
                    utc_now(),
                )
            )
        if self._request.policy == "guess_once" or isinstance(self._request.layer, OpLayer):
            _remembered[self._key] = choice.option.key
        return choice


def _named(problem: Problem, device: Device, database: Database, filters: Filters) -> Choice | None:
    """The candidate or method asked for; None where another may take its place."""
    options, refused = survey(problem, device, filters)
    rows = valid_rows(problem, device, database)
    usable = working(options, rows)
    if usable:
        usable = [option for option in usable if option.candidate.provider == "cudnn"] or usable
        return Choice(fastest(usable, rows) or ranked(usable, problem, device)[0], "named")
    failed = [Refused(o.candidate, f"failed when tried: {rows[o.key].reason}") for o in options]
    if filters.candidate or config.current()["dnn.fallback"] == "raise":
        raise unsupported(problem, [*_of_method(refused), *failed] or refused)
    return None


def _of_method(refused: Iterable[Refused]) -> list[Refused]:
    """Those that were not refused for their method."""
    return [one for one in refused if not one.reason.startswith("its method is")]


def _tell_fallback(problem: Problem, device: Device, filters: Filters, instead: Option) -> None:
    """An event a plan, and a warning once a problem and process."""
    _, refused = survey(problem, device, filters)
    why = "; ".join(f"{r.candidate.id}: {r.reason}" for r in _of_method(refused)) or "nobody implements it here"
    detail = f"algo={filters.method!r} cannot run ({why}); {instead} runs instead"
    events.emit("fallback", problem, instead.candidate.id, detail)
    with _lock:
        first = (str(problem), filters.method) not in _warned
        _warned.add((str(problem), filters.method))
    if first:
        warn(f"{problem}: {detail}")
