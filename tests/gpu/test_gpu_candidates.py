"""The matrix on a GPU: every candidate of its providers on every edge case that it supports."""

from __future__ import annotations

import pytest
from cells import check
from edge_cases import edges
from gpus import DEVICE

from nbdnn.candidate import Candidate
from nbdnn.dispatch import registry
from nbdnn.problem import OPS, Problem

pytestmark = pytest.mark.gpu


def _listed(op: str) -> list[Candidate]:
    every = [c for hint in ("", "bprop weights", "bprop inputs") for c in registry.candidates(op, hint, "cuda")]
    return [candidate for candidate in dict.fromkeys(every) if candidate.op == op]


CELLS = [
    pytest.param(candidate, problem, id=f"{candidate.id}-{problem}")
    for op in OPS
    for problem in edges(op)  # the candidates of a problem follow each other: they share its reference
    for candidate in _listed(op)
]


@pytest.mark.parametrize(("candidate", "problem"), CELLS)
def test_cell(candidate: Candidate, problem: Problem) -> None:
    """Every config of a candidate; what it does not support is counted by the coverage table, not here."""
    if candidate.supports(problem, DEVICE).ok:
        for config in candidate.configs(problem, DEVICE):
            check(candidate, problem, config, DEVICE)
