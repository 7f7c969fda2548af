"""Everything nbdnn raises or warns."""

from __future__ import annotations

import warnings
from pathlib import Path

_warned: set[Path] = set()


class InvalidProblem(ValueError):
    """Operands, shapes or arguments disagree. The message names the operand, the axis and both numbers."""


class InvalidType(InvalidProblem, TypeError):
    """A dtype or a rank that the function does not take."""


class UnsupportedProblem(NotImplementedError):
    """No implementation is correct here. The message gives every candidate's reason, one a line."""


class ConfigError(ValueError):
    """An unknown flag, or a value that the flag does not take. The message lists the valid ones."""


class CudaError(RuntimeError):
    """A call of the CUDA driver or compiler failed. The message names the call, the status and what CUDA says of it."""


class CudnnError(RuntimeError):
    """A call of cuDNN failed. The message names the function, the status and cuDNN's own last error text."""


class DatabaseError(RuntimeError):
    """A tuning database could not be read, written or understood. The message names the file."""


class NbdnnWarning(UserWarning):
    """Speed or persistence is degraded; results are right."""


def warn_once(path: Path, text: str) -> None:
    """An NbdnnWarning, once per process and file: a broken place would otherwise say so at every call."""
    if path not in _warned:
        _warned.add(path)
        warnings.warn(text, NbdnnWarning, stacklevel=3)
