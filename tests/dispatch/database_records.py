"""Records for the database tests, what lies in a folder, and processes that die."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

import nbdnn
from nbdnn.dispatch.database import Database, LayerChoice, Measurement, Mode
from nbdnn.errors import NbdnnWarning

DEVICE = "cpu/AMD EPYC  9654 25-17/avx512/8t"
PROBLEM = "conv_fwd:f32:n32c64h56w56:k64r3s3:p1x1:u1x1:d1x1:g1:cross:nchw"


def measurement(config: str = "", median_us: float | None = 12.5, **fields: object) -> Measurement:
    row = Measurement(
        device=DEVICE,
        problem=PROBLEM,
        candidate="conv_fwd/cpu/direct",
        config=config,
        median_us=median_us,
        spread=0.013,
        samples=9,
        workspace_bytes=4096,
        deterministic=True,
        math="fma",
        error=0.25,
        status="ok",
        reason="",
        candidate_version="0123456789abcdef",
        cudnn_version=0,
        driver="",
        measured_at="2025-01-31T12:00:00Z",
    )
    return row._replace(**fields)


def layer_choice(layer: str = "conv_fwd:f32:c64:k64r3s3", **fields: object) -> LayerChoice:
    choice = LayerChoice(
        device=DEVICE,
        layer=layer,
        candidate="conv_fwd/cpu/direct",
        config="8x6",
        candidate_version="0123456789abcdef",
        problem=PROBLEM,
        chosen_at="2025-01-31T12:00:00Z",
    )
    return choice._replace(**fields)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder, byte by byte."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def sql(path: Path, *statements: str) -> list[tuple]:
    """Run statements on a file behind nbdnn's back; the rows of the last one."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        rows = [connection.execute(statement).fetchall() for statement in statements]
    return rows[-1]


def start(script: str, *arguments: object, **options: object) -> subprocess.Popen[str]:
    """Another Python process, with nbdnn importable; its output is a pipe of text."""
    root = str(Path(nbdnn.__file__).parents[1])
    return subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": root},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        **options,  # type: ignore[call-overload]
    )


def finish(process: subprocess.Popen[str]) -> str:
    """What the process printed; it must have ended well."""
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    return output


def opened(path: Path, mode: Mode = "read-write", shipped: Path | None = None) -> Database:
    return Database(path, mode, shipped)


def rows(db: Database) -> list[Measurement]:
    return db.rows(DEVICE, PROBLEM)


@contextmanager
def one_warning(path: Path, *words: str) -> Iterator[None]:
    with pytest.warns(NbdnnWarning) as caught:
        yield
    (warning,) = caught
    for word in (str(path), *words):
        assert word in str(warning.message)


def used_before(path: Path) -> None:
    """Leave what every use of a database does: without it a file that begins as none is left alone."""
    Path(f"{path}.lock").touch()


def crashed(work: Callable[[], object]) -> None:
    """Run `work` in a child that dies at once, its connections open."""
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
