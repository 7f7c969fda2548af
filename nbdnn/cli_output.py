"""How the command line prints: tables, times, sizes."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TextIO

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

# No table is as wide: where nobody looks at a screen, no cell is cut or wrapped.
_UNBOUNDED = 10_000


def console(file: TextIO | None = None) -> Console:
    """A console on stdout: colours and the screen's width on a terminal, plain text of any width elsewhere."""
    file = file or sys.stdout
    if file.isatty():
        return Console(file=file, highlight=False)
    return Console(file=file, highlight=False, width=_UNBOUNDED, color_system=None, force_terminal=False)


def print_table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    right: Sequence[str] = (),
    footer: bool = False,
) -> None:
    """Print a table; the columns named in `right` are aligned there, and the last row is a `footer` if there is one."""
    table = Table(title=Text(title), title_justify="left", box=box.SIMPLE, show_footer=footer)
    cells = [[Text(cell) for cell in row] for row in rows]
    last = cells.pop() if footer else [Text("") for _ in columns]
    for name, below in zip(columns, last, strict=True):
        table.add_column(Text(name), below, justify="right" if name in right else "left", overflow="fold")
    for row in cells:
        table.add_row(*row)
    console().print(table)


def duration(microseconds: float | None) -> str:
    """A time as people read it: three digits and a unit; '-' where there is none."""
    if microseconds is None:
        return "-"
    for size, unit in ((1e6, "s"), (1e3, "ms")):
        if microseconds >= size * 0.9995:
            return f"{_three_digits(microseconds / size)} {unit}"
    return f"{_three_digits(microseconds)} us"


def _three_digits(value: float) -> str:
    return f"{value:.{0 if value >= 99.95 else 1 if value >= 9.995 else 2}f}"


def size(bytes_: int) -> str:
    """A number of bytes as people read it."""
    amount = float(bytes_)
    for unit in ("B", "KiB", "MiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} GiB"


def write_file(path: str, text: str) -> None:
    """A file with that text; an error names it also where it comes when all is written, as of a disk that is full."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from None
