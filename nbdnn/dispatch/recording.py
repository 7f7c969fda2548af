"""The problems that a program computes, one a line: what `nbdnn record` collects.

Every process of the program appends to one file, each problem once; what is written to the end of a file in one piece
stays in one piece. Where that cannot be done, as in a process that outlives the recording, the program goes on.
"""

from __future__ import annotations

from pathlib import Path

from nbdnn import config
from nbdnn.errors import warn_once

_noted: set[str] = set()


def note(problem: object) -> None:
    """Append the problem's text, if anybody records."""
    if (path := config.record_file()) and (text := str(problem)) not in _noted:
        try:
            with open(path, "ab", buffering=0) as file:
                file.write(f"{text}\n".encode())
        except OSError as error:
            warn_once(Path(path), f"{path}: {error.strerror}; problems are not recorded")
        else:
            _noted.add(text)
