"""What a call costs beside its kernel: the memo, a new plan, the database."""

from __future__ import annotations

import subprocess
import sys
from itertools import count

import numpy as np
import pytest

import nbdnn
from nbdnn import config
from nbdnn.device import cpu_device
from nbdnn.dispatch import policy
from nbdnn.dispatch.database import Database
from nbdnn.dispatch.measurement import Measurement, utc_now
from nbdnn.problem import parse

TINY = "conv_fwd:f32:n1c1h1w1:k1r1s1:p0x0:u1x1:d1x1:g1:cross:nchw"
TYPICAL = "conv_fwd:f32:n8c64h56w56:k64r3s3:p1x1:u1x1:d1x1:g1:cross:nchw"
ROWS_A_PROBLEM, PROBLEMS = 20, 1000


@pytest.fixture
def one_product():
    return np.ones((1, 1, 1, 1), np.float32), np.ones((1, 1, 1, 1), np.float32)


def bench_call_of_one_product(benchmark, one_product) -> None:
    benchmark(nbdnn.dnn_conv, *one_product, conv_mode="cross")


def bench_call_into_out(benchmark, one_product) -> None:
    out = np.empty((1, 1, 1, 1), np.float32)
    benchmark(nbdnn.dnn_conv, *one_product, conv_mode="cross", out=out)


def bench_runner_alone(benchmark, one_product) -> None:
    """The part of the two above that is no dispatch."""
    from nbdnn.dispatch import registry, workspace

    problem, device = parse(TINY), cpu_device()
    candidate = registry.candidates("conv_fwd")[-1]
    default = candidate.configs(problem, device)[0]
    memory = workspace.take(candidate.workspace_bytes(problem, default, device))
    out = np.empty((1, 1, 1, 1), np.float32)
    pointers = tuple(array.ctypes.data for array in (*one_product, out))
    benchmark(candidate.prepare(problem, default, device), pointers, (1.0, 0.0), memory.address, 0)


def bench_call_with_flags_changed(benchmark, one_product) -> None:
    def call() -> None:
        with config.change(dnn__deterministic=True):
            nbdnn.dnn_conv(*one_product, conv_mode="cross")

    benchmark(call)


def bench_guess(benchmark) -> None:
    problem, device = parse(TYPICAL), cpu_device()
    benchmark(policy.guess, problem, device)


def bench_text_of_a_problem(benchmark) -> None:
    benchmark(lambda: str(parse(TYPICAL)))


@pytest.fixture(scope="module")
def full_database(tmp_path_factory) -> Database:
    database = Database(tmp_path_factory.mktemp("db") / "full.db", shipped=None)
    database.store(_row(n, config_) for n in range(PROBLEMS) for config_ in range(ROWS_A_PROBLEM))
    return database


def bench_rows_of_a_problem(benchmark, full_database) -> None:
    texts = (str(parse(TYPICAL.replace("n8", f"n{i % PROBLEMS + 1}"))) for i in count())
    rows = benchmark(lambda: full_database.rows(cpu_device().fingerprint, next(texts)))
    assert len(rows) == ROWS_A_PROBLEM


def bench_rows_of_an_unknown_problem(benchmark, full_database) -> None:
    assert benchmark(full_database.rows, cpu_device().fingerprint, TYPICAL.replace("n8", "n0")) == []


class ChildClock:
    """Time as new processes measure it: what a process prints is the seconds of the part that counts."""

    seconds = 0.0

    def run(self, script: str, *arguments: str) -> None:
        self.seconds += float(subprocess.check_output([sys.executable, "-c", script, *arguments]))

    def __call__(self) -> float:
        return self.seconds


child = ChildClock()


@pytest.mark.benchmark(timer=child)
def bench_first_rows_of_a_process(benchmark, full_database) -> None:
    script = """
import sys, time
from nbdnn.dispatch.database import Database
begun = time.perf_counter()
rows = Database(sys.argv[1], shipped=None).rows(*sys.argv[2:])
print(time.perf_counter() - begun)
assert rows
"""
    arguments = str(full_database.path), cpu_device().fingerprint, TYPICAL
    benchmark.pedantic(child.run, (script, *arguments), rounds=20)


@pytest.mark.benchmark(timer=child)
def bench_import_after_numpy(benchmark) -> None:
    script = "import numpy, time; begun = time.perf_counter(); import nbdnn; print(time.perf_counter() - begun)"
    benchmark.pedantic(child.run, (script,), rounds=20)


def bench_store_one_row(benchmark, full_database) -> None:
    benchmark(full_database.store, [_row(0, 0)])


def _row(n: int, config_: int) -> Measurement:
    return Measurement(
        device=cpu_device().fingerprint,
        problem=TYPICAL.replace("n8", f"n{n + 1}"),
        candidate="conv_fwd/cpu/direct",
        config=str(config_),
        median_us=100.0 + config_,
        spread=0.01,
        samples=7,
        workspace_bytes=0,
        deterministic=True,
        math="fma",
        error=0.1,
        status="ok",
        reason="",
        candidate_version="0123456789abcdef",
        cudnn_version=0,
        driver="",
        measured_at=utc_now(),
    )
