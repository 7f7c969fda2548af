"""Edge cases of dropout for the tests, each with its reason."""

from __future__ import annotations

from nbdnn.problem_dropout import DropoutProblem

_ELEMENTS = (
    1,  # one bit of a byte
    4,  # a block of the generator
    7,  # a byte but one bit
    8,
    9,  # a bit of a second byte
    1000,
    4099,  # more than one task or block of threads, on no boundary of anything
    16_385,  # a cluster of larger blocks
    32_768,  # all its threads
    32_769,  # and one element more
    65536,
    100_001,
)


def edges(op: str) -> list[DropoutProblem]:
    """The edge cases of dropout_fwd or dropout_bwd."""
    problems = [DropoutProblem(op, dtype, m) for m in _ELEMENTS for dtype in ("f32", "f64", "f16", "bf16")]
    return [*problems, DropoutProblem(op, "f32", 4099, 4), DropoutProblem(op, "bf16", 4099, 2)]
