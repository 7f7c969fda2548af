"""Kernels compiled by other processes before a problem is tuned: which, where they are, and when there are none."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from database_records import measurement
from gpus import H200

from nbdnn import config
from nbdnn.cli_tuning import LeftOut, tuned
from nbdnn.dispatch import ahead, registry, tuner
from nbdnn.dispatch.ahead import Ahead
from nbdnn.dispatch.database import Database
from nbdnn.kernels.cuda import compile as cuda_compile
from nbdnn.kernels.cuda.launch import LaunchedCandidate, filled
from nbdnn.problem import Problem, parse
from nbdnn.workloads import Layer

_SOFTMAX = parse("softmax_fwd:f32:n40c96h1w1:accurate:channel:nchw")
_DROPOUT = parse("dropout_fwd:f32:m4096")


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, of this process and of those that it starts."""
    monkeypatch.setenv("NBDNN_CACHE_DIR", str(tmp_path))
    monkeypatch.setitem(config._ENVIRONMENT, "NBDNN_CACHE_DIR", str(tmp_path))
    return tmp_path / "cuda"


@pytest.fixture
def database(tmp_path: Path) -> Database:
    return Database(tmp_path / "tuning.db", shipped=None)


def candidates(problem: Problem) -> list[LaunchedCandidate]:
    every = registry.candidates(problem.op, kind="cuda")
    return [each for each in every if isinstance(each, LaunchedCandidate) and each.supports(problem, H200).ok]


def sources(problem: Problem) -> set[cuda_compile.Source]:
    return {
        launch.source
        for candidate in candidates(problem)
        for each in candidate.configs(problem, H200)
        for launch in filled(candidate.launches(problem, each, H200))
    }


@pytest.mark.usefixtures("numba_cuda")
def test_what_a_problem_needs_is_on_disk_when_it_is_tuned(kernels: Path, database: Database) -> None:
    wanted = sources(_SOFTMAX) | sources(_DROPOUT)
    assert len(wanted) > 2 and not any(cuda_compile.is_kept(source, H200.arch) for source in wanted)
    checks: list[int] = []
    with Ahead([_SOFTMAX, _DROPOUT], H200, database, processes=2) as begun:
        begun.await_kernels(_SOFTMAX, lambda: checks.append(1))
        assert all(cuda_compile.is_kept(source, H200.arch) for source in sources(_SOFTMAX))
        begun.await_kernels(_DROPOUT, lambda: checks.append(1))
    assert checks and len(list(kernels.glob("*.kernel"))) == len(wanted)
    assert all(cuda_compile.is_kept(source, H200.arch) for source in wanted)
    with Ahead([_SOFTMAX, _DROPOUT], H200, database, processes=2) as begun:
        assert begun._pool is None, "nothing is missing any more"


def test_what_is_measured_or_alone_or_of_a_cpu_needs_no_process(kernels: Path, database: Database) -> None:
    for candidate in candidates(_SOFTMAX):
        rows = [
            measurement(
                device=H200.fingerprint,
                problem=str(_SOFTMAX),
                candidate=candidate.id,
                config=str(each),
                candidate_version=candidate.version,
                cudnn_version=candidate.cudnn_version,
            )
            for each in candidate.configs(_SOFTMAX, H200)
        ]
        database.store(rows)
    nothing = parse("softmax_fwd:f32:n0c96h1w1:accurate:channel:nchw")
    assert Ahead([_SOFTMAX, nothing], H200, database, processes=2)._pool is None
    assert Ahead([_DROPOUT], H200, database, processes=1)._pool is None
    assert not kernels.exists()


@pytest.mark.usefixtures("numba_cuda")
def test_the_command_line_tunes_with_what_was_compiled(
    kernels: Path, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    there: list[bool] = []

    def tune(problem: Problem, *given: object, **named: object) -> str:
        there.append(all(cuda_compile.is_kept(source, H200.arch) for source in sources(problem)))
        return str(problem)

    monkeypatch.setattr(tuner, "tune", tune)
    monkeypatch.setattr(ahead, "processors", lambda: 2)
    layers = [Layer(_DROPOUT, "first", 1), Layer(_SOFTMAX, "second", 1)]
    found = list(tuned(layers, H200, database, 1.0, LeftOut()))
    assert [result for _, result in found] == [str(_DROPOUT), str(_SOFTMAX)] and there == [True, True]


_PROGRAM = """
import os, sys, time
sys.path[:0] = {paths!r}
from gpus import H200
from nbdnn.dispatch.ahead import Ahead
from nbdnn.dispatch.database import Database
from nbdnn.problem import parse

if __name__ == "__main__":
    ahead = Ahead([parse({problem!r})], H200, Database({database!r}, shipped=None), processes=2)
    print(*ahead._pool._processes, flush=True)
    time.sleep(60)
"""


@pytest.mark.usefixtures("numba_cuda")
@pytest.mark.parametrize("delay_s", [0.0, 2.0])
def test_no_process_outlives_the_one_that_asked(delay_s: float, kernels: Path, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    paths, database = [str(Path(__file__).parents[1])], str(tmp_path / "tuning.db")
    text = textwrap.dedent(_PROGRAM).format(paths=paths, problem=str(_SOFTMAX), database=database)
    program.write_text(text)
    with subprocess.Popen([sys.executable, str(program)], stdout=subprocess.PIPE, text=True) as asking:
        assert asking.stdout is not None
        workers = [int(number) for number in asking.stdout.readline().split()]
        assert workers
        time.sleep(delay_s)  # they start
        asking.send_signal(signal.SIGKILL)
    for _ in range(300):
        alive = [worker for worker in workers if Path(f"/proc/{worker}").exists() and not _is_dead(worker)]
        if not alive:
            return
        time.sleep(0.1)
    for worker in alive:
        os.kill(worker, signal.SIGKILL)
    raise AssertionError(f"{alive} go on")


def _is_dead(process: int) -> bool:
    """Whether it has ended and nobody has asked how."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True
