"""What `autotune` and `bench` share: the budget, the loop over the problems, its progress bar and its Ctrl-C."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from nbdnn import config
from nbdnn.cli import one_line
from nbdnn.cli_output import console
from nbdnn.device import Device
from nbdnn.errors import UnsupportedProblem
from nbdnn.workloads import Layer

if TYPE_CHECKING:
    from nbdnn.dispatch.database import Database
    from nbdnn.dispatch.tuner import TuneResult


# What says nothing of the next problem: that this one is too large or has no work, or that a candidate has a mistake.
_OF_ONE_PROBLEM = (
    *(MemoryError, UnsupportedProblem),
    *(ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError),
)


def add_budget(parser: argparse.ArgumentParser) -> None:
    """--budget."""
    parser.add_argument(
        "--budget", type=seconds, metavar="SECONDS", help="for one problem (default: the flag tune.budget_s)"
    )


def seconds(text: str) -> float:
    """An argument that must be a number of seconds."""
    try:
        if 0 <= float(text) < float("inf"):
            return float(text)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")


class LeftOut:
    """Problems that cannot be measured here, and why. They do not keep others from it."""

    def __init__(self) -> None:
        self._reasons: list[str] = []

    def add(self, layer: Layer, error: Exception) -> None:
        self._reasons.append(f"{layer.problem}: {one_line(error)}")

    def raise_any(self) -> None:
        """Once the others are done and shown."""
        if self._reasons:
            raise UnsupportedProblem("; ".join(f"not measured: {reason}" for reason in self._reasons))

    def tell(self) -> None:
        """Where there is another end to the command."""
        for reason in self._reasons:
            print(f"nbdnn: not measured: {one_line(reason)}", file=sys.stderr)


def tuned(
    wanted: Sequence[Layer],
    device: Device,
    database: Database,
    budget_s: float | None,
    left_out: LeftOut,
    again: bool = False,
) -> Iterator[tuple[Layer, TuneResult]]:
    """Tune each layer in turn under a progress bar, while other processes compile the kernels of the next ones. Ctrl-C
    raises KeyboardInterrupt; what was measured is kept."""
    from nbdnn.dispatch.ahead import Ahead
    from nbdnn.dispatch.tuner import tune
    from nbdnn.interrupt import interruptible

    budget_s = config.current()["tune.budget_s"] if budget_s is None else budget_s
    problems = [layer.problem for layer in wanted]
    with interruptible() as check, progress_bar() as bar, Ahead(problems, device, database, again=again) as ahead:
        task = bar.add_task("", total=len(wanted))
        for index, layer in enumerate(wanted):
            what = layer.name or str(layer.problem)

            def progress(taken: int, expected: int, what: str, index: int = index) -> None:
                check()
                bar.update(task, completed=index + min(taken / max(expected, 1), 1.0))

            try:
                bar.update(task, description=f"{what}: compiling kernels")
                ahead.await_kernels(layer.problem, check)
                bar.update(task, description=what)
                result = tune(layer.problem, device, database, budget_s=budget_s, again=again, progress=progress)
            except _OF_ONE_PROBLEM as error:
                left_out.add(layer, error)
            else:
                bar.update(task, completed=index + 1)
                yield layer, result
            check()


def progress_bar() -> Progress:
    """A bar with the time left, on stderr, if that is a terminal."""
    to = console(sys.stderr)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
    )
    return Progress(*columns, console=to, transient=True, disable=not to.is_terminal)
