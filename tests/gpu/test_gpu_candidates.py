"""The matrix on a GPU: every candidate of its providers on every edge case that it supports."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cells import check
from edge_cases import edges
from gpus import DEVICE

from nbdnn.candidate import Candidate, NoConfig
from nbdnn.cudnn import rnn
from nbdnn.dispatch import registry
from nbdnn.edges_rnn import edges as rnn_edges
from nbdnn.problem import OPS, Problem, parse
from nbdnn.problem_rnn import RnnProblem

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


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_dropout_whose_threads_draw_several_times(dtype: str) -> None:
    """Half of them once more than the others, and the last of them for fewer elements than a byte has bits."""
    candidate = registry.candidate("dropout_fwd/numba/philox")
    most, _ = candidate.launches(parse(f"dropout_fwd:{dtype}:m{1 << 30}"), NoConfig(), DEVICE)
    runs = most.grid[0] * most.source.threads * 3 // 2
    problem = parse(f"dropout_fwd:{dtype}:m{8 * runs + 5}")
    main, _ = candidate.launches(problem, NoConfig(), DEVICE)
    assert main.source.specialised_on.many and main.grid == most.grid
    check(candidate, problem, NoConfig(), DEVICE)


@pytest.mark.parametrize("problem", [each for each in rnn_edges("rnn_fwd") if each.training], ids=str)
def test_cells_of_cudnns_own_tapes(problem: RnnProblem) -> None:
    """Whose size is known on the device only."""
    assert rnn.FWD.tapes(problem, DEVICE)
    for forward, backward in ((rnn.FWD, rnn.BWD), (rnn.FWD_TF32, rnn.BWD_TF32)):
        inference = replace(problem, training=False)
        for tape in forward.tapes(problem, DEVICE) if forward.supports(inference, DEVICE).ok else ():
            written = replace(problem, tape=tape)
            read = replace(written, op="rnn_bwd", training=False)
            consumed = replace(read, tape=tape._replace(consumed=True))
            for candidate, each in ((forward, written), (backward, read), (backward, consumed)):
                assert candidate.supports(each, DEVICE).ok
                (config,) = candidate.configs(each, DEVICE)
                check(candidate, each, config, DEVICE)
