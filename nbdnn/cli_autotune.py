"""`nbdnn autotune`: measure every candidate of every problem of the targets, and show what was won."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from nbdnn.cli import INTERRUPTED
from nbdnn.cli_output import duration, print_table
from nbdnn.cli_targets import add_place, add_targets, layers, place
from nbdnn.cli_tuning import LeftOut, add_budget, tuned
from nbdnn.workloads import Layer

if TYPE_CHECKING:
    from nbdnn.dispatch.database import Database
    from nbdnn.dispatch.tuner import TuneResult


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "autotune", help="measure all candidates, keep the results", description="Measure and remember."
    )
    add_targets(parser)
    add_place(parser)
    add_budget(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(func=run)


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
    device, database = place(args, writing=True)
    results: list[Tuned] = []
    left_out, interrupted = LeftOut(), False
    try:
        for layer, result in tuned(wanted, device, database, args.budget, left_out):
            results.append(_tuned(layer, result))
    except KeyboardInterrupt:
        interrupted = True
    if args.json:
        print(json.dumps([_as_json(result) for result in results], indent=2))
    elif results:
        print_results(f"{' '.join(args.target)} on {args.device}", results)
    if interrupted:
        fate = f"kept in {database.path}, the same command goes on from there"
        if database.why_unsaved:
            fate = f"lost: {database.why_unsaved}"
        print(
            f"nbdnn: interrupted after {len(results)} of {len(wanted)} problems; what was measured is {fate}",
            file=sys.stderr,
        )
        left_out.tell()
        return INTERRUPTED
    if results and not args.json:
        print(_summary(results, database))
    left_out.raise_any()
    return 0


def _tuned(layer: Layer, result: TuneResult) -> Tuned:
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


def print_results(title: str, results: Sequence[Tuned]) -> None:
    """The final table, with the sums of all layers, each as often as it occurs, below."""
    columns = ("layer", "problem", "count", "chosen", "time", "default's time", "speed-up")
    rows = [
        (
            result.layer.name,
            str(result.layer.problem),
            str(result.layer.count),
            result.chosen.removeprefix(f"{result.layer.problem.op}/"),
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


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _summary(results: Sequence[Tuned], database: Database) -> str:
    measured = sum(result.measured for result in results)
    unfinished = sum(not result.complete for result in results)
    if not measured:
        return f"Nothing was measured: {database.path} already has all of it."
    measurements = f"{_counted(measured, 'measurement')} of {_counted(len(results), 'problem')}"
    if database.why_unsaved:
        return f"{measurements}, lost with the end of this command: {database.why_unsaved}."
    text = f"{measurements}, kept in {database.path}."
    if unfinished:
        text += f" The budget, in which kernels are compiled, ended {unfinished} early: the same command goes on."
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
