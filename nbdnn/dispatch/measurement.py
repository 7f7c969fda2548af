"""What the tuning database holds: rows of measurements, and the candidates that layers settled on."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from datetime import UTC, datetime
from numbers import Real
from operator import index
from typing import Any, NamedTuple, TypeVar

STATUSES = ("ok", "failed", "noisy")


class Measurement(NamedTuple):
    """How one candidate with one config did on one problem and device; those four are the key.

    median_us, spread: time of a call in microseconds and its relative spread (None where nothing could be timed).
    error: largest deviation from float64, in units of what the candidate owes (None where it is unknown or not finite).
    status: 'ok', 'noisy' (the machine was busy throughout) or 'failed' (`reason` says how; never selected).
    candidate_version: ``Candidate.version`` when measured; a row of another version is stale.
    cudnn_version: 0 for candidates that do not use cuDNN. driver: of the GPU, '' on a CPU.
    measured_at: ``utc_now()`` at the time.
    """

    device: str
    problem: str
    candidate: str
    config: str
    median_us: float | None
    spread: float | None
    samples: int
    workspace_bytes: int
    deterministic: bool
    math: str
    error: float | None
    status: str
    reason: str
    candidate_version: str
    cudnn_version: int
    driver: str
    measured_at: str


class LayerChoice(NamedTuple):
    """The candidate that a layer settled on, and the problem on which it was measured; (device, layer) is the key."""

    device: str
    layer: str
    candidate: str
    config: str
    candidate_version: str
    problem: str
    chosen_at: str


AnyRecord = Measurement | LayerChoice
Record = TypeVar("Record", bound=AnyRecord)
# The leading fields of each kind of record that tell two of them apart.
KEY_FIELDS: dict[type, int] = {Measurement: 4, LayerChoice: 2}


def key(record: AnyRecord) -> tuple[str, ...]:
    return tuple(map(str, record[: KEY_FIELDS[type(record)]]))


def utc_now() -> str:
    """The time now as records carry it: UTC, to the second, sorting as text."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def checked(record: Record) -> Record:
    """`record` in plain Python values; ValueError names the field that cannot be stored."""
    values: dict[str, Any] = {}
    for field, value in zip(record._fields, record, strict=True):
        read, expected = _FIELDS.get(field, _TEXT)
        try:
            values[field] = read(value)
        except (ValueError, TypeError, OverflowError):
            raise ValueError(f"{field} is {value!r}, expected {expected}") from None
    if isinstance(record, Measurement) and values["status"] != "failed" and values["median_us"] is None:
        raise ValueError(f"median_us is None although status is {values['status']!r}")
    return type(record)(**values)


def checksum(record: AnyRecord) -> int:
    """Kept beside each row, so that one whose bytes have rotted is a miss instead of a wrong time."""
    return zlib.crc32("\0".join(map(str, record)).encode())


def is_current(record: AnyRecord) -> bool:
    """Whether the registry still has the candidate in the version that was measured, and with the same cuDNN."""
    from nbdnn.dispatch import registry

    try:
        candidate = registry.candidate(record.candidate)
    except (KeyError, ValueError):
        return False
    same_cudnn = not isinstance(record, Measurement) or record.cudnn_version == candidate.cudnn_version
    return candidate.version == record.candidate_version and same_cudnn


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value.encode("utf-8", "replace").decode()


def _name(value: Any) -> str:
    if not value:
        raise ValueError
    return _text(value)


def _status(value: Any) -> str:
    if value not in STATUSES:
        raise ValueError
    return _text(value)


def _when(value: Any) -> str:
    moment = datetime.fromisoformat(value)
    if moment.tzinfo is None or moment.utcoffset() or moment.isoformat(timespec="seconds")[:19] != value[:19]:
        raise ValueError
    return value


def _count(value: Any) -> int:
    number = index(value)
    if isinstance(value, bool) or not 0 <= number < 1 << 63:
        raise ValueError
    return number


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError
    return value


def _amount(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= (number := float(value)) < math.inf:
        raise ValueError
    return number


def _time(value: Any) -> float | None:
    if value == 0:
        raise ValueError
    return _amount(value)


def _error(value: Any) -> float | None:
    return None if isinstance(value, Real) and not math.isfinite(value) else _amount(value)


_TEXT: tuple[Callable[[Any], Any], str] = (_text, "a text")
_NAME: tuple[Callable[[Any], Any], str] = (_name, "a text that is not empty")
_COUNT: tuple[Callable[[Any], Any], str] = (_count, "a count")
_WHEN: tuple[Callable[[Any], Any], str] = (_when, "a time such as 2025-01-31T12:00:00Z")
_FIELDS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "device": _NAME,
    "problem": _NAME,
    "candidate": _NAME,
    "layer": _NAME,
    "median_us": (_time, "a positive finite number or None"),
    "spread": (_amount, "a finite number, not negative, or None"),
    "samples": _COUNT,
    "workspace_bytes": _COUNT,
    "deterministic": (_flag, "True or False"),
    "error": (_error, "a number, not negative, or None"),
    "status": (_status, f"one of {', '.join(STATUSES)}"),
    "cudnn_version": _COUNT,
    "measured_at": _WHEN,
    "chosen_at": _WHEN,
}
