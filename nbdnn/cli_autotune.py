"""`nbdnn autotune`: measure every candidate of every problem of the targets, and show what was won."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from nbdnn import config
from nbdnn.cli_output import console, duration, print_table
from nbdnn.cli_targets import add_place, add_targets, layers, place
from nbdnn.workloads import Layer

INTERRUPTED = 130


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "autotune", help="measure all candidates, keep the results", description="Measure and remember."
    )
    add_targets(parser)
    add_place(parser)
    add_budget(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(func=run)


def add_budget(parser: argparse.ArgumentParser) -> None:
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


class Tuned(NamedTuple):
    """What is known of a layer after tuning: the choice, and what guess_on_shape_change takes on an empty database."""

    layer: Layer
    chosen: str
    time_us: float | None
    default: str
    default_us: float | None
    noisy: bool
    measured: int
    complete: bool

    @property
    def speedup(self) -> float | None:
        return self.default_us / self.time_us if self.default_us and self.time_us else None


def run(args: argparse.Namespace) -> int:
    wanted = layers(args)
    device, database = place(args)
    budget_s = config.current()["tune.budget_s"] if args.budget is None else args.budget
    results: list[Tuned] = []
    try:
        tune_all(wanted, device, database, budget_s, results.append)
    except KeyboardInterrupt:
        _report(results, wanted, args, database.path)
        print(
            f"nbdnn: interrupted after {len(results)} of {len(wanted)} problems; what was measured is kept, "
            "the same command goes on from there",
            file=sys.stderr,
        )
        return INTERRUPTED
    _report(results, wanted, args, database.path)
    return 0


def tune_all(
    wanted: Sequence[Layer], device: Any, database: Any, budget_s: float, done: Callable[[Tuned], None], **options: Any
) -> None:
    """Tune each layer in turn under a progress bar; `done` gets each result as it comes."""
    from nbdnn.dispatch.tuner import tune

    with progress_bar() as bar:
        task = bar.add_task("", total=len(wanted))
        for index, layer in enumerate(wanted):
            bar.update(task, description=layer.name or str(layer.problem))

            def progress(taken: int, expected: int, what: str, index: int = index) -> None:
                bar.update(task, completed=index + min(taken / max(expected, 1), 1.0))

            result = tune(layer.problem, device, database, budget_s=budget_s, progress=progress, **options)
            done(_tuned(layer, result))
            bar.update(task, completed=index + 1)


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


def _tuned(layer: Layer, result: Any) -> Tuned:
    best = result.rows.get(result.best.key) if result.best else None
    default = result.rows.get(result.guess.key) if result.guess else None
    return Tuned(
        layer,
        chosen=str(result.best or ""),
        time_us=best.median_us if best else None,
        default=str(result.guess or ""),
        default_us=default.median_us if default and default.status != "failed" else None,
        noisy=bool(best and best.status == "noisy"),
        measured=result.measured,
        complete=result.complete,
    )


def _report(results: Sequence[Tuned], wanted: Sequence[Layer], args: argparse.Namespace, path: Any) -> None:
    if args.json:
        print(json.dumps([_as_json(result) for result in results], indent=2))
        return
    if results:
        print_results(f"{' '.join(args.target)} on {args.device}", results)
    print(_summary(results, wanted, path))


def print_results(title: str, results: Sequence[Tuned]) -> None:
    """The final table, with the sums of all layers, each as often as it occurs, below."""
    columns = ("layer", "problem", "count", "chosen", "time", "default's time", "speed-up")
    rows = [
        (
            result.layer.name,
            str(result.layer.problem),
            str(result.layer.count),
            result.chosen,
            duration(result.time_us) + (" ~" if result.noisy else ""),
            duration(result.default_us),
            _factor(result.speedup),
        )
        for result in results
    ]
    if len(results) > 1:
        time_us, default_us = total_us(results)
        speedup = default_us / time_us if time_us and default_us else None
        count = sum(result.layer.count for result in results)
        rows.append(("all", "", str(count), "", duration(time_us), duration(default_us), _factor(speedup)))
    print_table(title, columns, rows, right=("count", *columns[4:]), footer=len(results) > 1)
    if any(result.noisy for result in results):
        print("~ the machine was busy: this time stayed uncertain")


def total_us(results: Sequence[Tuned]) -> tuple[float | None, float | None]:
    """(tuned, default) time of all layers, each as often as it occurs; None where one is unknown."""

    def total(times: list[tuple[float | None, int]]) -> float | None:
        return None if any(us is None for us, _ in times) else sum((us or 0.0) * count for us, count in times)

    return (
        total([(result.time_us, result.layer.count) for result in results]),
        total([(result.default_us, result.layer.count) for result in results]),
    )


def _factor(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def _summary(results: Sequence[Tuned], wanted: Sequence[Layer], path: Any) -> str:
    measured = sum(result.measured for result in results)
    unfinished = sum(not result.complete for result in results)
    if len(results) == len(wanted) and not measured:
        return f"Nothing was measured: {path} already has all of it."
    text = f"{measured} measurements of {len(results)} problems are kept in {path}."
    if unfinished:
        text += f" The budget ended {unfinished} early: the same command goes on with them."
    return text


def _as_json(result: Tuned) -> dict[str, Any]:
    return {
        "layer": result.layer.name,
        "problem": str(result.layer.problem),
        "count": result.layer.count,
        "chosen": result.chosen,
        "time_us": result.time_us,
        "default": result.default,
        "default_us": result.default_us,
        "speedup": result.speedup,
        "noisy": result.noisy,
        "measured": result.measured,
        "complete": result.complete,
    }
