"""Every op in plain float64 NumPy: the specification that runs. Each family of ops has a module of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from nbdnn import (
    reference_bn,
    reference_conv,
    reference_dropout,
    reference_pool,
    reference_rnn,
    reference_softmax,
    reference_spatialtf,
)
from nbdnn.expected import Sample
from nbdnn.problem import Problem
from nbdnn.problem_bn import BnProblem
from nbdnn.problem_conv import ConvProblem
from nbdnn.problem_dropout import DropoutProblem
from nbdnn.problem_pool import PoolProblem
from nbdnn.problem_rnn import RnnProblem
from nbdnn.problem_softmax import SoftmaxProblem
from nbdnn.problem_spatialtf import SpatialtfProblem

_FAMILIES: dict[type[Problem], Callable[..., Mapping[str, Sample]]] = {
    ConvProblem: reference_conv.samples,
    PoolProblem: reference_pool.samples,
    SoftmaxProblem: reference_softmax.samples,
    BnProblem: reference_bn.samples,
    DropoutProblem: reference_dropout.samples,
    RnnProblem: reference_rnn.samples,
    SpatialtfProblem: reference_spatialtf.samples,
}
_DERIVED: dict[type[Problem], Callable[..., dict[str, np.ndarray]]] = {
    PoolProblem: reference_pool.derived,
    RnnProblem: reference_rnn.derived,
    SpatialtfProblem: reference_spatialtf.derived,
}


def samples(
    problem: Problem, operands: Mapping[str, np.ndarray], scalars: tuple[float, ...], count: int | None = 10_000
) -> Mapping[str, Sample]:
    """What each output must be, by its name: at least `count` of its elements, with borders and both ends of every axis
    among them; all where `count` is None.

    operands: an array of logical shape (any strides) for each operand that is read. scalars: as a runner takes them.
    """
    return _FAMILIES[type(problem)](problem, operands, scalars, count)


def derived(problem: Problem, operands: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Operands, by name, that cannot be anything: made of what all have, which may be random."""
    made = _DERIVED.get(type(problem))
    return made(problem, operands) if made else {}
