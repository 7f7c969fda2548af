"""`nbdnn bench`: every candidate's time on every problem of the targets, beside what the machine could do at most."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from nbdnn import config
from nbdnn.cli import one_line
from nbdnn.cli_output import duration, print_table, size
from nbdnn.cli_targets import add_place, add_targets, layers, place
from nbdnn.cli_tuning import LeftOut, add_budget, tuned
from nbdnn.device import Device, Gpu
from nbdnn.workloads import Layer

if TYPE_CHECKING:
    from nbdnn.dispatch.tuner import TuneResult


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "bench",
        help="time every candidate",
        description="Time every candidate. What the database has is not measured again, unless --again says so.",
    )
    add_targets(parser)
    add_place(parser)
    add_budget(parser)
    parser.add_argument("--again", action="store_true", help="measure also what the database has")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    wanted = layers(args)
    device, database = place(args, writing=True)
    everything, left_out = [], LeftOut()
    for layer, result in tuned(wanted, device, database, args.budget, left_out, args.again):
        rows = _rows(layer, result, device)
        everything += rows
        if not args.json:
            _print(layer, rows, device)
            if not result.complete:
                print("The budget ended before every candidate was measured: the same command goes on with the others.")
    if args.json:
        print(json.dumps(everything, indent=2))
    left_out.raise_any()
    return 0


def _rows(layer: Layer, result: TuneResult, device: Device) -> list[dict[str, Any]]:
    """One record a measured candidate and config, the fastest first and what failed last."""
    floor = _floor_us(layer, device)
    chosen = result.best.key if result.best else None
    rows = sorted(result.rows.values(), key=lambda row: (row.status == "failed", row.median_us or 0.0))
    return [
        {
            "layer": layer.name,
            "problem": row.problem,
            "candidate": row.candidate,
            "config": row.config,
            "chosen": (row.candidate, row.config) == chosen,
            "status": row.status,
            "reason": row.reason,
            "time_us": row.median_us,
            "spread": row.spread,
            "gflops": layer.problem.flops / row.median_us / 1e3 if row.median_us else None,
            "share_of_floor": floor / row.median_us if row.median_us else None,
            "workspace_bytes": row.workspace_bytes,
            "error": row.error,
        }
        for row in rows
    ]


def _floor_us(layer: Layer, device: Device) -> float:
    """What the machine needs at least; kernels that compute with fewer products (Winograd, FFT) may go below it."""
    if isinstance(device, Gpu):
        from nbdnn.kernels.cuda import peaks

        return peaks.floor_us(layer.problem, device, config.current()["dnn.allow_tf32"])
    from nbdnn.kernels.cpu.peaks import floor_us

    return floor_us(layer.problem, device)


def _print(layer: Layer, rows: list[dict[str, Any]], device: Device) -> None:
    columns = ("", "candidate", "config", "time", "spread", "GFLOP/s", "of floor", "workspace", "error", "status")
    cells = [
        (
            "*" if row["chosen"] else "",
            row["candidate"],
            row["config"],
            duration(row["time_us"]),
            _number(row["spread"], "{:.1%}"),
            _number(row["gflops"], "{:.1f}"),
            _number(row["share_of_floor"], "{:.0%}"),
            size(row["workspace_bytes"]),
            _number(row["error"], "{:.3f}"),
            row["status"],
        )
        for row in rows
    ]
    name = f"{layer.name}, " if layer.name else ""
    title = f"{name}{layer.problem}: floor {duration(_floor_us(layer, device))}"
    print_table(title, columns, cells, right=columns[3:9])
    for row in rows:
        if row["reason"]:
            print(f"{' '.join(filter(None, (row['candidate'], row['config'])))}: {one_line(row['reason'])}")


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
