"""Files of the caches of compiled kernels and plans: written whole or not at all, and never in a program's way."""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from pathlib import Path

from nbdnn.errors import warn_once

_log = logging.getLogger("nbdnn")


def sealed(text: bytes) -> bytes:
    """What goes into a file so that `unsealed` notices damage: the hash of the text, a line break, and the text."""
    return hashlib.sha256(text).hexdigest().encode() + b"\n" + text


def unsealed(content: bytes) -> bytes | None:
    """The text of what `sealed` made; None where it is damaged."""
    _, _, text = content.partition(b"\n")
    return text if content == sealed(text) else None


def write_whole(path: Path, content: bytes) -> None:
    """Write the file, and its folder, where nobody sees less than all of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        try:
            file.write(content)
            file.flush()
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def keep(path: Path, content: bytes) -> None:
    """Write the file. Where that cannot be done the folder is named in one warning, and each process compiles anew."""
    try:
        write_whole(path, content)
    except OSError as error:
        warn_once(path.parent, f"what is compiled cannot be kept in {path.parent}: {error.strerror}")
    else:
        _log.info("compiled %s", path)  # who waits for a first call can see what for
