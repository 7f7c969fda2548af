"""Every op in plain float64 NumPy: the specification that runs. Each family of ops has a module of its own."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from nbdnn import reference_conv
from nbdnn.expected import Sample
from nbdnn.problem import ConvProblem, Problem


def samples(
    problem: Problem, operands: Mapping[str, np.ndarray], scalars: tuple[float, ...], count: int | None = 10_000
) -> dict[str, Sample]:
    """What each output must be, by its name: at least `count` of its elements, with borders and both ends of every axis
    among them; all where `count` is None.

    operands: an array of logical shape (any strides) for each operand that is read. scalars: as a runner takes them.
    """
    assert isinstance(problem, ConvProblem)
    (out,) = (operand.name for operand in problem.operands if operand.role == "out")
    alpha, beta = scalars
    if count is None:
        return {out: reference_conv.whole(problem, operands, (alpha, beta))}
    return {out: reference_conv.sample(problem, operands, (alpha, beta), count)}
