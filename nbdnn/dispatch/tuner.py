"""Measure candidates: check each against float64, time them side by side, store every result.

1. Enter: compile, run on generated zero-mean data and compare with the reference (what errs or is wrong is stored as
   failed), then take a first sample on the caller's operands. It is stored at once: an interruption loses nothing.
2. Rounds: the contenders are sampled in turn until each has enough. Who is several times slower than the best after
   its first sample is none, so that a long list of candidates costs little more than its good ones.
3. Contenders whose samples disagree are sampled again; what stays noisy is stored as such.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median_low
from time import perf_counter
from typing import NamedTuple

from nbdnn import config
from nbdnn.cached import cached_property
from nbdnn.candidate import Candidate
from nbdnn.device import Cpu, Device, Gpu
from nbdnn.dispatch import events, workspace
from nbdnn.dispatch.benchmark import rotating
from nbdnn.dispatch.check import Check, Verdict
from nbdnn.dispatch.database import Database
from nbdnn.dispatch.measurement import Measurement, utc_now
from nbdnn.dispatch.selection import Filters, Option, Rows, fastest, ranked, survey, unsupported, valid_rows
from nbdnn.dispatch.timing import Given, Operands, Samples, settle
from nbdnn.dispatch.timing_gpu import GpuOperands
from nbdnn.interrupt import never_lost
from nbdnn.locks import reentrant_lock
from nbdnn.problem import Problem

# Who takes this many times the best is not sampled again: after the first sample, and after the third.
_HOPELESS, _BEATEN = 3.0, 1.3
# The guess's first so many are not given up for one sample, in which somebody else may have had the machine: of a 3x3
# layer the guess took 13.7 ms once, and 1.2 when it was asked again. Nor are those that should be as fast as the best,
# by their guess and what the candidate's other configs took of theirs: three of 2000 first samples on a GPU were five
# to ten times too long.
_GUESSED = 3
# Enough is this many samples, or three that took this long together, or one that took a second.
_SAMPLES, _LONG_S, _VERY_LONG_S = 7, 0.3, 1.0
# Above this relative spread the machine was busy: so many samples more.
_NOISY, _MORE_SAMPLES = 0.1, 8
# Part of the budget in which candidates enter, which means compiling; what is left is for the rounds.
_ENTRY_SHARE = 0.9
# Who was disturbed by other programs in its first sample gets up to so many before it is judged.
_FIRST_SAMPLES = 3

# Two measurements at once would measure each other.
_one_at_a_time = reentrant_lock()

Progress = Callable[[int, int, str], None]


class TuneResult(NamedTuple):
    """What is known after tuning a problem.

    rows: the valid rows by (candidate id, config). best: the fastest option, None where all failed. guess: what
    guess_on_shape_change picks on an empty database. complete: whether every option has a row. measured: how many rows
    this run added.
    """

    problem: Problem
    rows: Rows
    best: Option | None
    guess: Option
    complete: bool
    measured: int
    seconds: float


def tune(
    problem: Problem,
    device: Device,
    database: Database,
    *,
    filters: Filters = Filters(),  # noqa: B008
    given: Given | None = None,
    budget_s: float | None = None,
    again: bool = False,
    progress: Progress | None = None,
) -> TuneResult:
    """Measure everything that may run `problem` and has no valid row yet, the guess first, and store the rows.

    Parameters
    ----------
    given
        The operands to time on: they are copied, never written. Random ones where None.
    budget_s
        Seconds after which nothing new is begun (flag tune.budget_s where None). One option is always measured.
    again
        Measure also what has a valid row.
    progress
        Called as each option begins, with (options done, options to measure, option).

    Raises
    ------
    UnsupportedProblem
        Where nobody may run the problem.
    MemoryError
        Where a second set of operands does not fit into memory.
    KeyboardInterrupt
        When interrupted; what was measured is stored, and the next call goes on from there.
    """
    begun = perf_counter()
    with _one_at_a_time:
        options, refused = survey(problem, device, filters)
        if not options:
            raise unsupported(problem, refused)
        by_guess = ranked(options, problem, device)
        rows = valid_rows(problem, device, database)
        missing = [option for option in by_guess if again or option.key not in rows]
        if missing:
            budget_s = config.current()["tune.budget_s"] if budget_s is None else budget_s
            race = _Race(problem, device, database, given, (begun + _ENTRY_SHARE * budget_s, begun + budget_s))
            rows |= race.run(missing, {} if again else rows, progress)
    return TuneResult(
        problem,
        rows,
        best=fastest(options, rows),
        guess=by_guess[0],
        complete=all(option.key in rows for option in options),
        measured=len([option for option in missing if option.key in rows]),
        seconds=perf_counter() - begun,
    )


@dataclass
class _Entrant:
    """An option that works, its check, and its time so far."""

    option: Option
    verdict: Verdict
    watch: Samples

    @property
    def status(self) -> str:
        return "noisy" if self.is_noisy else "ok"

    @property
    def has_enough(self) -> bool:
        taken, seconds = len(self.watch.samples_us), self.watch.total_s
        return taken >= _SAMPLES or (taken >= 3 and seconds >= _LONG_S) or seconds >= _VERY_LONG_S

    @property
    def is_noisy(self) -> bool:
        return self.watch.is_disturbed or (self.watch.spread or 0.0) > _NOISY


class _Race:
    """One run over options of a problem."""

    def __init__(
        self, problem: Problem, device: Device, database: Database, given: Given | None, deadlines: tuple[float, float]
    ) -> None:
        """deadlines: when nobody may enter any more, and when nobody is sampled any more."""
        self._problem, self._device, self._database = problem, device, database
        self._given, (self._last_entry, self._last_sample) = given, deadlines
        self._entrants: list[_Entrant] = []
        self._rows: Rows = {}
        self._restless = isinstance(device, Cpu)  # the caller's libraries, and NumPy's BLAS after the check's reference

    @cached_property
    def _operands(self) -> Operands | GpuOperands:
        allowed_bytes = workspace.available_bytes(self._device, None) // 2
        return rotating(self._problem, self._device, allowed_bytes, self._given)

    @cached_property
    def _check(self) -> Check:
        return Check(self._problem, self._device)

    def run(self, options: Sequence[Option], known: Rows, progress: Progress | None) -> Rows:
        """The rows of `options`, as far as time allows; `known` ones of others say who is hopeless."""
        self._known_us = min((row.median_us for row in known.values() if row.median_us is not None), default=None)
        try:
            for done, option in enumerate(options):
                if self._rows and perf_counter() >= self._last_entry:
                    break
                if progress:
                    progress(done, len(options), str(option))
                self._enter(option)
            expected_us = self._expected_us()
            doubted = [
                entrant
                for entrant, us in zip(self._entrants, expected_us, strict=True)
                if self._seems_hopeless(entrant) and us <= _BEATEN * self._best_us()
            ]
            self._sample(doubted)
            while contenders := [entrant for entrant in self._entrants if self._goes_on(entrant)]:
                if not self._sample(contenders):
                    break
            noisy = [entrant for entrant in self._entrants if entrant.is_noisy and self._is_near(entrant, _BEATEN)]
            for _ in range(_MORE_SAMPLES if noisy else 0):
                self._sample(noisy)
        finally:
            for entrant in self._entrants:
                self._conclude(entrant)
        return self._rows

    def _enter(self, option: Option) -> None:
        """Prepare, check, take the first sample; store it, or why there is none."""
        candidate, config_, workspace_bytes = option
        operands, check = self._operands, self._check
        with never_lost():  # around the handlers below, which would take it for the candidate's failure
            try:
                runner = candidate.ready(self._problem, config_, self._device)
                verdict = check.run(runner, candidate, workspace_bytes)
                if not verdict.reason:
                    scalars = self._given.scalars if self._given else self._problem.scalars
                    watch = operands.stopwatch(runner, scalars, workspace_bytes)
                    self._take(watch, candidate)
                    while watch.is_disturbed and len(watch.samples_us) < _FIRST_SAMPLES:
                        self._take(watch, candidate)
            except MemoryError:  # of this moment, not of the candidate: not stored
                reason = f"no memory for {option}, workspace {workspace_bytes}"
                events.emit("failed", self._problem, candidate.id, reason)
                return
            except Exception as error:
                verdict = Verdict(None, f"{type(error).__name__}: {error}")
        if verdict.reason:
            events.emit("failed", self._problem, candidate.id, verdict.reason)
            self._store(option, verdict, None)
        else:
            entrant = _Entrant(option, verdict, watch)
            self._entrants.append(entrant)
            self._store(option, verdict, watch, entrant.status)

    def _best_us(self) -> float:
        times = [min(entrant.watch.samples_us) for entrant in self._entrants]
        return min(times if self._known_us is None else [*times, self._known_us])

    def _expected_us(self) -> Iterator[float]:
        """Of each entrant: its guess, times what the candidate's configs took of theirs; 0 of the guess's first."""
        guesses_us, taken = [], defaultdict[str, list[float]](list)
        for entrant in self._entrants:
            candidate, config_, _ = entrant.option
            guesses_us.append(candidate.estimate(self._problem, config_, self._device))
            taken[candidate.id].append(min(entrant.watch.samples_us) / guesses_us[-1])
        for place, (entrant, guess_us) in enumerate(zip(self._entrants, guesses_us, strict=True)):
            yield 0.0 if place < _GUESSED else guess_us * median_low(taken[entrant.option.candidate.id])

    def _is_near(self, entrant: _Entrant, factor: float) -> bool:
        return min(entrant.watch.samples_us) <= factor * self._best_us()

    def _seems_hopeless(self, entrant: _Entrant) -> bool:
        return not entrant.has_enough and not self._is_near(entrant, _HOPELESS)

    def _goes_on(self, entrant: _Entrant) -> bool:
        factor = _HOPELESS if len(entrant.watch.samples_us) < 3 else _BEATEN
        return not entrant.has_enough and self._is_near(entrant, factor)

    def _sample(self, entrants: Sequence[_Entrant]) -> bool:
        """One more sample of each; False where time ran out."""
        for entrant in entrants:
            if perf_counter() >= self._last_sample:
                return False
            self._take(entrant.watch, entrant.option.candidate)
        return True

    def _take(self, watch: Samples, candidate: Candidate) -> None:
        """One sample, when the threads of whoever came before are at rest."""
        if self._restless:
            settle()
        watch.sample()
        self._restless = candidate.foreign_threads

    def _conclude(self, entrant: _Entrant) -> None:
        """Store the samples that came after the first, and tell what was measured."""
        option, watch = entrant.option, entrant.watch
        self._store(option, entrant.verdict, watch, entrant.status)
        detail = f"{watch.median_us:.2f} us of {len(watch.samples_us)} samples"
        events.emit("measured", self._problem, option.candidate.id, f"{detail} {option.config}".rstrip())
        if entrant.is_noisy:
            events.emit("noisy", self._problem, option.candidate.id, f"{detail}, spread {watch.spread or 0:.0%}")

    def _store(self, option: Option, verdict: Verdict, watch: Samples | None, status: str = "ok") -> None:
        row = _row(self._problem, self._device, option, verdict, watch, status)
        self._rows[option.key] = row
        self._database.store([row])


def store_failure(problem: Problem, device: Device, database: Database, option: Option, reason: str) -> None:
    """Keep that a guess could not run, so that nobody takes it again."""
    events.emit("failed", problem, option.candidate.id, reason)
    database.store([_row(problem, device, option, Verdict(None, reason), None)])


def _row(
    problem: Problem, device: Device, option: Option, verdict: Verdict, watch: Samples | None, status: str = "ok"
) -> Measurement:
    candidate = option.candidate
    return Measurement(
        device=device.fingerprint,
        problem=str(problem),
        candidate=candidate.id,
        config=str(option.config),
        median_us=watch.median_us if watch else None,
        spread=watch.spread if watch else None,
        samples=len(watch.samples_us) if watch else 0,
        workspace_bytes=option.workspace_bytes,
        deterministic=candidate.deterministic,
        math=candidate.math,
        error=verdict.error,
        status="failed" if verdict.reason else status,
        reason=verdict.reason,
        candidate_version=candidate.version,
        cudnn_version=candidate.cudnn_version,
        driver=device.driver if isinstance(device, Gpu) else "",
        measured_at=utc_now(),
    )
