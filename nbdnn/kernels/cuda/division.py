"""What the host works out for `ptx.split`: divisors that are multiplied by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

RecordT = TypeVar("RecordT", bound=tuple)


def reciprocals(record: type[RecordT], divisors: Mapping[str, int]) -> RecordT:
    """A record whose fields are, of each divisor, `name` and `name_shift`, by those names."""
    fields: Any = record
    return fields(*(number for name in fields._fields[::2] for number in reciprocal(divisors[name])))


def reciprocal(divisor: int) -> tuple[int, int]:
    """(multiplier, shift), both as int32: n // divisor is the high word of 2n * multiplier, shifted right, for every n
    below 2^31. Of divisor 1 to 2^31 (Granlund, Montgomery 1994)."""
    shift = (divisor - 1).bit_length()
    multiplier = -(-(1 << 31 + shift) // divisor)
    return multiplier - (1 << 32), shift
