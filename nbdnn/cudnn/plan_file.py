"""Plans whose kernels cuDNN compiled, kept on disk: 0.3 to 1 s to make, 0.3 ms to read.

A file is cuDNN's JSON of the plan with the kernel in it (40 to 180 KB), sealed: a damaged one costs a compilation and
never the program, for cuDNN only sees what was written.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from pathlib import Path

from nbdnn import config
from nbdnn.cudnn.api import StatusError
from nbdnn.cudnn.descriptors import Backend
from nbdnn.cudnn.graph import Plan
from nbdnn.cudnn.handle import Handle
from nbdnn.cudnn.library import library
from nbdnn.device import Gpu
from nbdnn.kept import keep, sealed, unsealed

_log = logging.getLogger("nbdnn")


def folder() -> Path:
    """Where compiled plans are kept."""
    return config.cache_dir() / "cudnn"


def stored_plan(key: tuple[str, ...], device: Gpu, where: Handle | Backend, make: Callable[[], Plan]) -> Plan:
    """The plan of that key from disk, else what `make` gives, which is kept.

    `key` says what is planned; versions and the kind of GPU belong to the file's name as well.
    """
    facts = (str(library().version), device.fingerprint, device.driver, *key)
    path = folder() / f"{hashlib.sha256(repr(facts).encode()).hexdigest()[:32]}.json"
    if (text := _read(path)) is not None:
        try:
            return Plan(where, text)
        except StatusError as error:
            _log.warning("stored plan %s is refused (%s): compiling again", path, error)
    made = make()
    _write(path, made.text())
    return made


def _read(path: Path) -> bytes | None:
    try:
        content = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        _log.warning("stored plan %s cannot be read (%s): compiling again", path, error)
        return None
    text = unsealed(content)
    if text is None:
        _log.warning("stored plan %s is damaged: compiling again", path)
    return text


def _write(path: Path, text: bytes) -> None:
    keep(path, sealed(text))
