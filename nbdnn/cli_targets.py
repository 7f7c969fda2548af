"""What a command works on: workloads, models, problem texts and files of them, and the flags that arguments set."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

from nbdnn import config, workload_onnx
from nbdnn.device import Device, named
from nbdnn.errors import InvalidProblem
from nbdnn.problem import FAMILIES, ITEMSIZE, OPS, Problem, parse
from nbdnn.workloads import WORKLOADS, Layer, merged, workload

if TYPE_CHECKING:
    from nbdnn.dispatch.database import Database


def add_targets(parser: argparse.ArgumentParser) -> None:
    """TARGET... and the options that choose among and shape them."""
    parser.add_argument(
        "target",
        nargs="+",
        metavar="TARGET",
        help=f"a workload ({', '.join(WORKLOADS)}), a model (.onnx), a problem text, or a file of them, one a line, "
        "# for comments, - for standard input",
    )
    of_workloads = parser.add_argument_group("workloads and models")
    of_workloads.add_argument(
        "--batch", type=positive, metavar="N", help="images in a batch (default: the model's, else 1)"
    )
    of_workloads.add_argument(
        "--dtype",
        choices=tuple(ITEMSIZE),
        help="of every operand (default: the model's; f32 for a workload)",
    )
    of_workloads.add_argument("--layout", choices=("nchw", "nhwc"), help="channels first or last (default nchw)")
    of_workloads.add_argument("--train", action="store_true", help="the gradients as well")
    parser.add_argument(
        "--only",
        metavar="TEXT,...",
        help=f"only problems of a family ({', '.join(FAMILIES)}) or op, or with this in their text or layer name; "
        "* and ? as in file names",
    )


def add_place(parser: argparse.ArgumentParser) -> None:
    """--device and --db."""
    parser.add_argument("--device", default="cpu", metavar="cpu|cuda[:N]", help="where to run (default cpu)")
    parser.add_argument("--db", metavar="FILE", help="the tuning database (default: NBDNN_DB, or the user's)")


def positive(text: str) -> int:
    """An argument that must be a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def place(args: argparse.Namespace, *, writing: bool = False) -> tuple[Device, Database]:
    """The device and the database that the arguments name: DatabaseError where the latter cannot be used."""
    from nbdnn.dispatch import dispatcher

    if args.db:
        config.set_flags(tune__db=args.db)
    device, database = named(args.device), dispatcher.database()
    if args.db:
        database.check(writing)
    return device, database


def layers(args: argparse.Namespace) -> list[Layer]:
    """The problems that the arguments name, equal ones once."""
    if not any(target in WORKLOADS or target.endswith(workload_onnx.SUFFIX) for target in args.target):
        for option in ("batch", "dtype", "layout", "train"):
            if getattr(args, option):
                raise InvalidProblem(f"--{option} is of workloads and models: a problem's text says it itself")
    found = merged([layer for target in args.target for layer in _resolve(target, args)])
    if args.only:
        chosen = [
            layer for layer in found if any(_matches(layer, wanted) for wanted in filter(None, args.only.split(",")))
        ]
        if not chosen:
            raise InvalidProblem(f"none of {len(found)} problems matches --only {args.only!r}")
        return chosen
    return found


def op_name(text: str) -> str:
    """The name of an op, as an argument of the command line."""
    if text not in OPS:
        raise argparse.ArgumentTypeError(f"{text!r} is no op; there are {', '.join(OPS)}")
    return text


def _matches(layer: Layer, wanted: str) -> bool:
    """Whether a layer is of a family or op, or else has a text, or matches a pattern."""
    if wanted in (*FAMILIES, *OPS):
        return layer.problem.op in FAMILIES.get(wanted, (wanted,))
    pattern = wanted if set("*?[") & set(wanted) else f"*{wanted}*"
    return fnmatchcase(str(layer.problem), pattern) or fnmatchcase(layer.name, pattern)


def _resolve(target: str, args: argparse.Namespace) -> list[Layer]:
    if target in WORKLOADS:
        return workload(target, args.batch or 1, args.dtype or "f32", args.layout or "nchw", train=args.train)
    if target.partition(":")[0] in OPS:
        return [Layer(parse(target), "", 1)]
    path = Path("/dev/stdin" if target == "-" else target)
    if path.exists() and not path.is_dir():  # a pipe too
        return _model(path, args) if target.endswith(workload_onnx.SUFFIX) else _read(path)
    if ":" in target:
        return [Layer(parse(target), "", 1)]  # which says what is wrong with it
    if path.is_dir():
        raise InvalidProblem(f"{target} is not a file, but a folder")
    if path.suffix or os.sep in target:
        raise InvalidProblem(f"there is no file {target}")
    raise InvalidProblem(f"{target!r} is not a workload ({', '.join(WORKLOADS)}), a problem text or a file")


def _model(path: Path, args: argparse.Namespace) -> list[Layer]:
    """The layers of an ONNX model; a line on stderr says what of it is none."""
    found, skipped = workload_onnx.read(path, args.batch, args.dtype, args.layout or "nchw", train=args.train)
    if skipped:
        nodes = f"{skipped.total()} node{'s' * (skipped.total() > 1)}"
        print(f"nbdnn: {path}: {nodes} skipped: {workload_onnx.listed(skipped)}", file=sys.stderr)
    return found


def problems(path: Path) -> Iterator[Problem]:
    """Those of a file of texts. InvalidProblem names the file and the line of what is none."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError:
        raise InvalidProblem(f"{path} is not a text file") from None
    for number, line in enumerate(lines, start=1):
        if text := line.partition("#")[0].strip():
            try:
                yield parse(text)
            except InvalidProblem as error:
                raise InvalidProblem(f"{path}, line {number}: {error}") from None


def _read(path: Path) -> list[Layer]:
    found = [Layer(problem, "", 1) for problem in problems(path)]
    if not found:
        raise InvalidProblem(f"{path} holds no problem")
    return found
