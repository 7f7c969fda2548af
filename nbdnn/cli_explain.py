"""`nbdnn explain`: who may compute a problem, who may not and why, and who is chosen now."""

from __future__ import annotations

import argparse
import json
from typing import Any

from nbdnn.cli_targets import add_place, add_targets, layers, place
from nbdnn.errors import InvalidProblem


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "explain", help="say who may compute a problem, and who is chosen", description="Explain. Nothing is measured."
    )
    add_targets(parser)
    add_place(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    wanted = layers(args)
    device, _ = place(args)
    from nbdnn.dispatch.explain import explain

    explained, wrong = [], []
    for layer in wanted:
        try:
            explained.append((layer, explain(layer.problem, device=device)))
        except InvalidProblem as error:
            wrong.append(str(error))
    if args.json:
        rows = [{"problem": str(layer.problem), **row._asdict()} for layer, found in explained for row in found.rows]
        print(json.dumps(rows, indent=2))
    elif explained:
        print("\n\n".join(str(found) for _, found in explained))
    if wrong:
        raise InvalidProblem("; ".join(wrong))
    return 0
