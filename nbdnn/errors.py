"""Everything nbdnn raises or warns."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Collection
from pathlib import Path
from types import FrameType
from typing import Any

_warned: set[Path] = set()


class InvalidProblem(ValueError):
    """Operands, shapes or arguments disagree. The message names the operand, the axis and both numbers."""


class InvalidType(InvalidProblem, TypeError):
    """A dtype or a rank that the function does not take."""


class UnsupportedProblem(NotImplementedError):
    """No implementation is correct here. The message gives every candidate's reason, one a line."""


class ConfigError(ValueError):
    """An unknown flag, or a value that the flag does not take. The message lists the valid ones."""


class UnknownFlag(ConfigError, AttributeError):
    """A flag that there is not, read as an attribute."""


class CudaError(RuntimeError):
    """A call of the CUDA driver or compiler failed. The message names the call, the status and what CUDA says of it."""


class CudnnError(RuntimeError):
    """A call of cuDNN failed. The message names the function, the status and cuDNN's own last error text."""


class RefusedOperands(CudnnError):
    """cuDNN does not take operands as they lie, and has computed nothing."""


class DatabaseError(RuntimeError):
    """A tuning database could not be read, written or understood. The message names the file."""


class NbdnnWarning(UserWarning):
    """Speed or persistence is degraded; results are right."""


def is_one_of(value: Any, names: Collection[str | None]) -> bool:
    """Whether an argument is one of these names. Whatever is no name is none: arrays would compare by element."""
    return isinstance(value, str | None) and value in names


def check_one_of(name: str, value: Any, names: Collection[str | None]) -> None:
    """InvalidProblem where the argument `name` is none of these."""
    if not is_one_of(value, names):
        raise InvalidProblem(f"{name} {value!r} is not one of {', '.join(map(str, names))}")


def as_float(value: Any) -> float:
    """`value` as a float, of whatever is a number; TypeError, ValueError or OverflowError of what is none, as text is,
    which `float` would read."""
    if isinstance(value, str | bytes | bytearray):
        raise TypeError
    return float(value)


def warn(text: str) -> None:
    """An NbdnnWarning that shows the line which called nbdnn, however deep inside it the reason was found."""
    frame: FrameType | None = sys._getframe()
    level = depth = 1
    while frame:
        depth += 1
        if frame.f_globals.get("__name__", "").partition(".")[0] == "nbdnn":  # perhaps called by Numba, called by nbdnn
            level = depth
        frame = frame.f_back
    warnings.warn(text, NbdnnWarning, stacklevel=level)


def warn_once(path: Path, text: str) -> None:
    """The same, once per process and file: a broken place would otherwise say so at every call."""
    if path not in _warned:
        _warned.add(path)
        warn(text)
