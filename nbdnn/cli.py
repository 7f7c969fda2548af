"""The `nbdnn` command: the parser, and what every subcommand shares when it ends well, badly or early.

Exit codes: 0; 2 after an error, which is one line on stderr; 130 after Ctrl-C. A subcommand lives in ``cli_<name>.py``:
its ``add_parser(subparsers)`` sets ``func``, which takes the parsed arguments and returns an exit code or None.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from typing import NoReturn

import nbdnn
from nbdnn.errors import InvalidProblem

INTERRUPTED = 130


class UsageError(Exception):
    """The command line is wrong; the message says where."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")


def parser() -> argparse.ArgumentParser:
    """The whole command line. Imported here, so that Ctrl-C is quiet from the first moment."""
    from nbdnn import cli_autotune, cli_bench, cli_db, cli_explain, cli_info, cli_record, cli_report

    top = _Parser(prog="nbdnn", description="Measure, explain and remember which implementation of an op is fastest.")
    top.add_argument("--version", action="version", version=f"nbdnn {nbdnn.__version__}")
    subparsers = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in (cli_autotune, cli_record, cli_bench, cli_explain, cli_report, cli_info, cli_db):
        command.add_parser(subparsers)
    return top


def main(argv: list[str] | None = None) -> int:
    """Run one command line; the exit code."""
    warnings.showwarning = _show_warning
    if sys.stdout is None:  # closed by the caller: nobody reads, which is no error
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    try:
        args = parser().parse_args(argv)
        code = args.func(args)
        sys.stdout.flush()
        return code or 0
    except KeyboardInterrupt:
        print("nbdnn: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # `nbdnn ... | head`: nobody reads on, which is no error
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        print(f"nbdnn: error: {one_line(error)}", file=sys.stderr)
        return 2


def _show_warning(message: Warning | str, *where: object, **more: object) -> None:
    print(f"nbdnn: warning: {one_line(message)}", file=sys.stderr)


def one_line(error: BaseException | Warning | str) -> str:
    """What is wrong, in one line; the type too where a message alone says little."""
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}"
    text = "; ".join(line.strip() for line in str(error).splitlines() if line.strip())
    is_bare = isinstance(error, KeyError | AttributeError | TypeError | IndexError | AssertionError)
    if (is_bare and not isinstance(error, InvalidProblem)) or not text:
        return f"{type(error).__name__}: {text}".rstrip(": ")
    return text
