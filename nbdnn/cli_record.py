"""`nbdnn record`: run a program and write the problems that it computes, to be tuned before it runs again."""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from nbdnn import config
from nbdnn.cli_targets import problems
from nbdnn.errors import InvalidProblem


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "record",
        usage="nbdnn record [-h] [-o FILE] -- COMMAND [ARGUMENT ...]",
        help="run a program and write the problems that it computes",
        description="Run a program and write the problems that it and the processes it starts compute, one a line, for "
        "`nbdnn autotune FILE`. The exit code is the program's.",
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        default="problems.txt",
        help="where to (default problems.txt); problems that it has already stay, and are not written again",
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND", help="such as: python train.py")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    command, path = args.command[args.command[:1] == ["--"] :], Path(args.output)
    if not command:
        raise InvalidProblem("no program to run (see nbdnn record --help)")
    is_new = not path.exists()
    known = set() if is_new else set(map(str, problems(path)))
    with path.open("a", encoding="utf-8", errors="backslashreplace") as file, _folder() as folder:
        noted = Path(folder) / "problems"
        noted.touch()
        try:
            code = _ended(subprocess.Popen(command, env=config.recording_to(noted)))
        except OSError:
            if is_new:
                path.unlink()
            raise
        found = dict.fromkeys(noted.read_text(encoding="utf-8").splitlines())
        new = [text for text in found if text not in known]
        if new:
            about = " ".join(shlex.join(command).splitlines())
            file.writelines(f"{line}\n" for line in (f"# {about}", *new))
    print(f"nbdnn: problems: {len(found)}, new in {path}: {len(new)}", file=sys.stderr)
    return code


def _folder() -> TemporaryDirectory[str]:
    return TemporaryDirectory(prefix="nbdnn-record-")


def _ended(program: subprocess.Popen[bytes]) -> int:
    """The program's exit code, a shell's for a signal. Ctrl-C is the program's: it may have something to tidy up."""
    while True:
        try:
            code = program.wait()
        except KeyboardInterrupt:
            continue
        return code if code >= 0 else 128 - code
