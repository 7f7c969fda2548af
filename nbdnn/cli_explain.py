"""`nbdnn explain`: who may compute a problem, who may not and why, and who is chosen now."""

from __future__ import annotations

import argparse
import json
from typing import Any

from nbdnn.cli_targets import add_place, add_targets, layers, place


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

    explanations = [explain(layer.problem, device=device) for layer in wanted]
    if args.json:
        rows = [
            {"problem": str(layer.problem), **row._asdict()}
            for layer, explanation in zip(wanted, explanations, strict=True)
            for row in explanation.rows
        ]
        print(json.dumps(rows, indent=2))
    else:
        print("\n\n".join(map(str, explanations)))
    return 0
