"""`nbdnn report`: what a tuning database has measured, as one HTML page that needs nothing else."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

from nbdnn.cli_output import write_file
from nbdnn.cli_targets import op_name
from nbdnn.errors import DatabaseError


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "report",
        help="write what was measured as an HTML page",
        description="Write what a database has measured as one HTML page: who is fastest where, and by how much.",
    )
    parser.add_argument("-o", "--output", metavar="FILE", default="report.html", help="where to (default report.html)")
    parser.add_argument("--db", metavar="FILE", help="the tuning database (default: NBDNN_DB, or the user's)")
    parser.add_argument("--op", metavar="OP", type=op_name, help="of this op alone, such as conv_fwd")
    parser.add_argument("--device", metavar="DEVICE", help="of this fingerprint, or its beginning, such as cpu")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> None:
    from nbdnn.cli_report_page import page
    from nbdnn.dispatch import upkeep
    from nbdnn.dispatch.database import default_path
    from nbdnn.dispatch.sqlite_file import SqliteFile

    file = SqliteFile(args.db or default_path(), writable=False)
    if not file.path.exists():
        raise DatabaseError(f"{file.path}: no database yet; `nbdnn autotune` writes one")
    rows = file.find(partial(upkeep.find, filter=upkeep.Filter(device=args.device, op=args.op)))
    if not rows:
        why = " of that kind" if args.op or args.device else ": nbdnn autotune makes them"
        raise DatabaseError(f"{file.path} holds no measurement{why}")
    write_file(args.output, page(rows, file.path))
    print(f"{args.output}: problems: {len({(row.device, row.problem) for row in rows})}")
