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

_TASKS, _ALONE = 1000, 1
_seen = pointer("i64")


def _who(args, ctx, index, worker):
    _seen(ctx)[index] = worker


@pytest.mark.parametrize(("guessed_us", "is_alone"), [(1.0, True), (11.9, True), (12.1, False)])
def test_what_is_soon_done_wakes_nobody(device: Cpu, guessed_us: float, is_alone: bool) -> None:
    """Two phases for all threads may each take 6 us of one, guessed for that one."""
    task, seen = compile_task(_who, "who"), np.full((2, _TASKS), -1)
    program = Program([Phase(task, _TASKS, row) for row in seen])
    program.settle(replace(device, threads=4), lambda on: guessed_us / on.threads)
    program((), ())
    assert (seen >= 0).all()
    assert (seen == 0).all() or not is_alone
    assert _is_alone(program) == is_alone


def test_a_small_problem_is_the_callers_and_a_large_one_is_shared(device: Cpu) -> None:
    candidate = registry.candidate("softmax_fwd/cpu/rows")
    for rows, is_alone in ((8, True), (80_000, False)):
        problem = parse(f"softmax_fwd:f32:n{rows}c64h1w1:accurate:channel:nchw")
        runner = candidate.ready(problem, candidate.configs(problem, device)[0], replace(device, threads=2))
        assert _is_alone(runner) == is_alone


def _is_alone(runner: Runner) -> bool:
    assert isinstance(runner, Program)
    return all(how == _ALONE for *_, how in runner._table.tolist())
