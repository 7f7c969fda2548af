"""What the host works out for `ptx.split`: divisors that are multiplied by."""

from __future__ import annotations


def reciprocal(divisor: int) -> tuple[int, int]:
    """(multiplier, shift), both as int32: n // divisor is the high word of 2n * multiplier, shifted right, for every n
    below 2^31. Of divisor 1 to 2^31 (Granlund, Montgomery 1994)."""
    shift = (divisor - 1).bit_length()
    multiplier = -(-(1 << 31 + shift) // divisor)
    return multiplier - (1 << 32), shift
