"""Which threads run a program's phases."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from nbdnn.candidate import Runner
from nbdnn.device import Cpu
from nbdnn.dispatch import registry
from nbdnn.kernels.cpu.compile import compile_task
from nbdnn.kernels.cpu.launch import Phase, Program
from nbdnn.kernels.cpu.vector import pointer
from nbdnn.problem import parse

_TASKS = 1000
_SHARED, _ALONE, _FEW = 0, 1, 3
_seen = pointer("i64")


def _who(args, ctx, index, worker):
    _seen(ctx)[index] = worker


@pytest.mark.parametrize(
    ("guessed_us", "how"), [(1.0, _ALONE), (9.9, _ALONE), (10.1, _FEW), (23.9, _FEW), (24.1, _SHARED)]
)
def test_what_is_soon_done_wakes_nobody(device: Cpu, guessed_us: float, how: int) -> None:
    """Two phases for all threads may each take 5 us of one, guessed for that one, and 12 while the others sleep."""
    task, seen = compile_task(_who, "who"), np.full((2, _TASKS), -1)
    program = Program([Phase(task, _TASKS, row) for row in seen])
    program.settle(replace(device, threads=4), lambda on: guessed_us / on.threads)
    program((), ())
    assert (seen >= 0).all()
    assert (seen == 0).all() or how != _ALONE
    assert _how(program) == {how}


def test_a_small_problem_is_the_callers_and_a_large_one_is_shared(device: Cpu) -> None:
    candidate = registry.candidate("softmax_fwd/cpu/rows")
    for rows, how in ((8, _ALONE), (80_000, _SHARED)):
        problem = parse(f"softmax_fwd:f32:n{rows}c64h1w1:accurate:channel:nchw")
        runner = candidate.ready(problem, candidate.configs(problem, device)[0], replace(device, threads=2))
        assert _how(runner) == {how}


def _how(runner: Runner) -> set[int]:
    assert isinstance(runner, Program)
    return {how for *_, how in runner._table.tolist()}
