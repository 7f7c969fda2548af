"""``nbdnn db``: look into the tuning database, exchange it, keep it clean.

Output can be piped: columns under a header line, tab-separated, aligned by spaces only on a terminal, never cut. Errors
are exceptions, which the command line prints as one line.
"""

from __future__ import annotations

import sys
from argparse import SUPPRESS, ArgumentTypeError, Namespace
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from typing import Any

from nbdnn import config
from nbdnn.cli_output import write_file
from nbdnn.cli_targets import op_name
from nbdnn.dispatch import exchange, upkeep
from nbdnn.dispatch.database import default_path
from nbdnn.dispatch.measurement import AnyRecord, LayerChoice, Measurement
from nbdnn.dispatch.sqlite_file import SqliteFile
from nbdnn.dispatch.tables import count_damaged, select
from nbdnn.errors import DatabaseError

_MOST_DAYS = 700_000  # before today: dates begin with the year 1
_LIST_COLUMNS = ("device", "problem", "candidate", "config", "median_us", "spread", "status", "measured_at")
_SHOW_COLUMNS = (
    "device",
    "candidate",
    "config",
    "median_us",
    "spread",
    "samples",
    "workspace_bytes",
    "deterministic",
    "math",
    "error",
    "status",
    "reason",
)
_CHOICE_COLUMNS = ("device", "layer", "candidate", "config", "chosen_at")
_DRIFT_COLUMNS = ("problem", "candidate", "config", "stored_us", "now_us", "ratio", "status")


def add_parser(subparsers: Any) -> None:
    """Register ``db`` and its subcommands; each sets ``func(arguments) -> exit code``."""
    db = subparsers.add_parser("db", help="look into, exchange and clean the tuning database")
    db.add_argument("--db", metavar="FILE", help="the database (default: NBDNN_DB, tune.db or the user data folder)")
    commands = db.add_subparsers(dest="db_command", metavar="COMMAND", required=True)

    def command(name: str, func: Callable[[Namespace], int], help: str, *positional: str, optional: str = "") -> Any:
        parser = commands.add_parser(name, help=help, description=help)
        parser.add_argument("--db", metavar="FILE", default=SUPPRESS, help=SUPPRESS)  # also after the command
        for argument in positional:
            parser.add_argument(argument.lower(), metavar=argument)
        if optional:
            parser.add_argument(optional.lower(), metavar=optional, nargs="?")
        parser.set_defaults(func=func)
        return parser

    command("path", _path, "print where the database is")
    listing = command("list", _list, "list measurements")
    command("show", _show, "every measurement of a problem, and the layers that chose on it", "PROBLEM")
    export = command("export", _export, "write measurements as JSON lines, to FILE or standard output", optional="FILE")
    command("import", _import, "add the JSON lines of FILE ('-': standard input): all or, if one is bad, none", "FILE")
    command("merge", _merge, "add what another database or export has; of two rows the newest valid one wins", "FILE")
    diff = command("diff", _diff, "compare with another database or export: exit 0 if equal, 1 if different", "FILE")
    verify = command("verify", _verify, "check the file and count what no longer counts: exit 1 if there is anything")
    command("prune", _prune, "remove rows that are stale or damaged")
    forget = command("forget", _forget, "remove the measurements that meet every condition", optional="PROBLEM")

    for parser in (listing, forget):
        parser.add_argument("--op", metavar="OP", type=op_name, help="of this op, such as conv_fwd")
        parser.add_argument("--device", metavar="DEVICE", help="of this fingerprint, or its beginning, such as cpu")
    listing.add_argument("--limit", metavar="N", type=_natural, help="at most N lines")
    for parser in (export, diff):
        parser.add_argument("--choices", action="store_true", help="also the layers' choices")
    verify.add_argument("--sample", metavar="N", type=_natural, default=0, help="measure N rows again and compare")
    forget.add_argument("--cudnn", metavar="VERSION", nargs="?", type=_natural, const=0, help="of cuDNN [that version]")
    forget.add_argument("--older-than", metavar="DAYS", type=_days, help="measured longer ago than this")


def _path(arguments: Namespace) -> int:
    print(_file(arguments).path)
    return 0


def _list(arguments: Namespace) -> int:
    filter = upkeep.Filter(device=arguments.device, op=arguments.op)
    rows = _existing(arguments).find(partial(upkeep.find, filter=filter))
    _print_records(_LIST_COLUMNS, rows[: arguments.limit])
    return 0


def _show(arguments: Namespace) -> int:
    file, problem = _existing(arguments), _problem_text(arguments.problem)
    rows = file.find(partial(upkeep.find, filter=upkeep.Filter(problem=problem)))
    if not rows:
        raise DatabaseError(f"{file.path} holds no measurement of {problem}")
    rows.sort(key=lambda row: (row.device, row.status == "failed", row.median_us or 0.0))
    _print_records(_SHOW_COLUMNS, rows)
    if choices := file.find(partial(select, kind=LayerChoice, where="problem = ?", parameters=(problem,))):
        print()
        _print_records(_CHOICE_COLUMNS, choices)
    return 0


def _export(arguments: Namespace) -> int:
    lines = [exchange.to_line(record) for record in _records(_existing(arguments), arguments.choices)]
    if arguments.file in (None, "-"):
        _print_lines(lines)
    else:
        write_file(arguments.file, "".join(f"{line}\n" for line in lines))
    return 0


def _import(arguments: Namespace) -> int:
    if arguments.file == "-":
        records = exchange.read_lines(sys.stdin.buffer, "standard input")
    else:
        with open(arguments.file, "rb") as lines:
            records = exchange.read_lines(lines, arguments.file)
    return _report_merge(exchange.merge(_file(arguments, writable=True), records), len(records))


def _merge(arguments: Namespace) -> int:
    records = exchange.read_file(arguments.file)
    return _report_merge(exchange.merge(_file(arguments, writable=True), records), len(records))


def _report_merge(won: int, offered: int) -> int:
    print(f"{won} of {offered} records added or replaced")
    return 0


def _diff(arguments: Namespace) -> int:
    theirs = [r for r in exchange.read_file(arguments.file) if arguments.choices or isinstance(r, Measurement)]
    lines = list(exchange.difference(_records(_existing(arguments), arguments.choices), theirs))
    _print_lines(lines)
    return 1 if lines else 0


def _verify(arguments: Namespace) -> int:
    file = _existing(arguments)
    health = upkeep.inspect(file)
    _print_lines(
        "\t".join(map(str, pair))
        for pair in (
            ("path", file.path),
            ("integrity", health.integrity),
            *health.statuses.items(),
            ("choices", health.choices),
            ("stale", health.stale),
            ("damaged", health.damaged),
        )
    )
    if arguments.sample:
        print()
        _print_table(_DRIFT_COLUMNS, map(_drift_cells, upkeep.sample(file, arguments.sample)))
    return 0 if health.sound else 1


def _drift_cells(drift: upkeep.Drift) -> list[str]:
    row, now = drift
    values = (row.problem, row.candidate, row.config, row.median_us, now.median_us, drift.ratio, now.status)
    return [_cell(value) for value in values]


def _prune(arguments: Namespace) -> int:
    print(f"{upkeep.prune(_existing(arguments, writable=True))} records removed")
    return 0


def _forget(arguments: Namespace) -> int:
    filter = upkeep.Filter(
        problem=arguments.problem and _problem_text(arguments.problem),
        device=arguments.device,
        op=arguments.op,
        cudnn=arguments.cudnn is not None,
        cudnn_version=arguments.cudnn or None,
        older_than_days=arguments.older_than,
    )
    if filter == upkeep.Filter():
        raise ValueError("forget needs a problem or one of --device, --op, --cudnn, --older-than")
    print(f"{upkeep.forget(_existing(arguments, writable=True), filter)} measurements removed")
    return 0


def _file(arguments: Namespace, writable: bool = False) -> SqliteFile:
    file = SqliteFile(arguments.db or default_path(), writable)
    if writable and (mode := config.current()["tune.mode"]) != "read-write":
        raise DatabaseError(f"{file.path} may not be changed: tune.mode is {mode}")
    return file


def _existing(arguments: Namespace, writable: bool = False) -> SqliteFile:
    file = _file(arguments, writable)
    if not file.path.exists():
        raise DatabaseError(f"{file.path}: no database yet; `nbdnn autotune` writes one")
    return file


def _records(file: SqliteFile, choices: bool) -> list[AnyRecord]:
    """The sound records; how many are not is said on standard error."""
    records = file.find(exchange.read_all)
    if damaged := file.read(count_damaged, 0):
        print(f"nbdnn: {file.path}: {damaged} damaged rows left out", file=sys.stderr)
    return [record for record in records if choices or isinstance(record, Measurement)]


def _problem_text(text: str) -> str:
    from nbdnn.problem import parse

    return str(parse(text))


def _natural(text: str) -> int:
    if not text.isdecimal():
        raise ArgumentTypeError(f"{text!r} is not a count")
    return int(text)


def _days(text: str) -> float:
    try:
        if 0 <= (days := float(text)) < _MOST_DAYS:
            return days
    except ValueError:
        pass
    raise ArgumentTypeError(f"{text!r} is not a number of days")


def _print_lines(lines: Iterable[str]) -> None:
    for line in lines:
        print(line)


def _print_records(columns: Sequence[str], records: Iterable[AnyRecord]) -> None:
    _print_table(columns, ([_cell(getattr(record, column)) for column in columns] for record in records))


def _print_table(columns: Sequence[str], lines: Iterable[Sequence[str]]) -> None:
    if not sys.stdout.isatty():
        _print_lines("\t".join(line) for line in chain([columns], lines))
        return
    table = [columns, *lines]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    _print_lines("  ".join(map(str.ljust, line, widths)).rstrip() for line in table)


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}"
    return "".join(character if character.isprintable() else " " for character in str(value))
