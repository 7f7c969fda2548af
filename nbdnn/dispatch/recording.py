"""The problems that a program computes, one a line: what `nbdnn record` collects.

Every process of the program appends to one file, each problem once; what is written to the end of a file in one piece
stays in one piece.
"""

from __future__ import annotations

from nbdnn import config

_noted: set[str] = set()


def note(problem: object) -> None:
    """Append the problem's text, if anybody records."""
    if (path := config.record_file()) and (text := str(problem)) not in _noted:
        _noted.add(text)
        with open(path, "ab", buffering=0) as file:
            file.write(f"{text}\n".encode())
