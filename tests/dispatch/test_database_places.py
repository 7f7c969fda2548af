"""The tuning database in places that belong to others or cannot be used: no place makes a call fail."""

from __future__ import annotations

import os
import sqlite3
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from database_records import (
    DEVICE,
    contents,
    crashed,
    finish,
    layer_choice,
    measurement,
    one_warning,
    opened,
    rows,
    sql,
    start,
)

from nbdnn import errors
from nbdnn.dispatch import database, sqlite_file
from nbdnn.dispatch.exchange import read_all
from nbdnn.dispatch.sqlite_file import SqliteFile


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_file, "PATIENCE_S", 0.2)


# Files of others


@pytest.mark.parametrize("state", ["rollback", "wal", "crashed", "only in the wal"])
@pytest.mark.parametrize("mode", ["read-write", "read-only"])
def test_a_newer_schema_is_neither_read_nor_changed(path: Path, state: str, mode: database.Mode) -> None:
    db = opened(path)
    db.store([measurement()])
    db.close()
    if state == "only in the wal":
        crashed(lambda: _leak(path, "PRAGMA user_version = 7"))
    else:
        sql(path, "PRAGMA user_version = 7", f"PRAGMA journal_mode = {'DELETE' if state == 'rollback' else 'WAL'}")
    if state == "crashed":
        crashed(lambda: _leak(path, "UPDATE measurement SET samples = 3"))
    before = contents(path.parent)
    assert ("tuning.db-wal" in before) == (state in ("crashed", "only in the wal"))
    before.pop("tuning.db-shm", None)  # shared memory: readers leave their marks in it
    db = opened(path, mode)
    with one_warning(path, "schema 7", "newer"):
        assert rows(db) == []
        db.store([measurement("mine")])
        assert rows(db) == [measurement("mine")]
        assert db.layer_choice(DEVICE, "layer") is None
    db.close()
    after = contents(path.parent)
    after.pop("tuning.db-shm", None)
    assert after == before


def _leak(path: Path, statement: str) -> None:
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute(statement)
    _leaked.append(connection)


_leaked: list[sqlite3.Connection] = []


def test_a_schema_that_nobody_makes_is_neither_read_nor_changed(path: Path) -> None:
    db = opened(path)
    db.store([measurement()])
    db.close()
    sql(path, "PRAGMA user_version = -3")
    before = contents(path.parent)
    db = opened(path)
    with one_warning(path, "schema -3"):
        assert rows(db) == []
    db.close()
    assert contents(path.parent) == before


def test_a_file_that_a_newer_program_converts_meanwhile(path: Path) -> None:
    db = opened(path)
    db.store([measurement("before")])
    sql(path, "PRAGMA user_version = 2")
    with one_warning(path, "schema 2"):
        db.store([measurement("after")])
    assert rows(db) == [measurement("after")]
    assert sql(path, "SELECT config FROM measurement") == [("before",)]


def test_a_database_of_another_program_is_not_touched(path: Path) -> None:
    path.parent.mkdir()
    sql(path, "CREATE TABLE bookmarks (url)", "INSERT INTO bookmarks VALUES ('x')", "PRAGMA user_version = 1")
    before = contents(path.parent)
    db = opened(path)
    with one_warning(path, "another program"):
        db.store([measurement()])
    assert rows(db) == [measurement()]
    assert contents(path.parent) == before


# Places that cannot be used


@pytest.mark.parametrize("place", ["folder", "below a file", "device", "proc"])
def test_an_impossible_place(tmp_path: Path, place: str) -> None:
    path = {
        "folder": tmp_path,
        "below a file": tmp_path / "file" / "deeper" / "tuning.db",
        "device": Path("/dev/null"),
        "proc": Path("/proc/nbdnn/tuning.db"),
    }[place]
    (tmp_path / "file").touch()
    errors._warned.discard(path)
    before = contents(tmp_path)
    db = opened(path)
    with one_warning(path):
        assert rows(db) == []
        db.store([measurement()])
        db.store([measurement("b")])
        db.remember(layer_choice())
    assert rows(db) == [measurement(), measurement("b")]
    assert db.layer_choice(DEVICE, layer_choice().layer) == layer_choice()
    assert contents(tmp_path) == before


@contextmanager
def without_rights() -> Iterator[None]:
    """As somebody whom permissions bind: the superuser steps down for the block."""
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder that anyone may read; pytest's own folders are private."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield folder
        folder.chmod(0o755)


def test_an_unwritable_folder_is_still_read(public: Path) -> None:
    path = public / "tuning.db"
    db = opened(path)
    db.store([measurement("a")])
    db.close()
    path.chmod(0o444)
    Path(f"{path}.lock").unlink()
    public.chmod(0o555)
    before = contents(public)
    with without_rights():
        db = opened(path)
        assert rows(db) == [measurement("a")], "reading needs no warning"
        with one_warning(path):
            db.store([measurement("b")])
            db.store([measurement("c")])
        assert rows(db) == [measurement("a"), measurement("b"), measurement("c")]
    assert contents(public) == before


def test_an_unreadable_file(public: Path) -> None:
    path = public / "tuning.db"
    opened(path).store([measurement("a")])
    path.chmod(0)
    public.chmod(0o555)
    with without_rights():
        db = opened(path)
        with one_warning(path):
            assert rows(db) == []
            db.store([measurement("b")])
        assert rows(db) == [measurement("b")]
    path.chmod(stat.S_IRUSR | stat.S_IWUSR)
    assert sql(path, "SELECT config FROM measurement") == [("a",)]


def test_looking_into_an_unreadable_file(public: Path) -> None:
    path = public / "tuning.db"
    opened(path).store([measurement("a")])
    path.chmod(0)
    with without_rights(), pytest.raises(errors.DatabaseError, match=f"{path} cannot be read: Permission denied"):
        SqliteFile(path, writable=False).find(read_all)


FULL = """
import resource, sys, warnings
from database_records import *
from nbdnn.dispatch.database import Database
db = Database(sys.argv[1], shipped=None)
db.store([measurement(str(number)) for number in range(50)])
resource.setrlimit(resource.RLIMIT_FSIZE, (90_000, resource.RLIM_INFINITY))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for number in range(50, 800, 50):
        db.store([measurement(str(n)) for n in range(number, number + 50)])
assert len(caught) == 1 and sys.argv[1] in str(caught[0].message), caught
assert len(db.rows(DEVICE, PROBLEM)) == 800, "what does not fit is kept in memory"
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
db.store([measurement("800")])
"""


def test_a_full_disk_loses_nothing_that_memory_holds(path: Path) -> None:
    finish(start(FULL, path, cwd=Path(__file__).parent))
    assert len(rows(opened(path))) == 801, "written once there was room again"
    assert sql(path, "PRAGMA integrity_check") == [("ok",)]


LOCKER = """
import fcntl, sqlite3, sys
if sys.argv[2].startswith("LOCK_"):
    file = open(sys.argv[1] + ".lock", "w")
    fcntl.flock(file, getattr(fcntl, sys.argv[2]))
else:
    connection = sqlite3.connect(sys.argv[1], isolation_level=None)
    connection.execute(sys.argv[2])
    connection.execute("BEGIN IMMEDIATE")
    connection.execute("UPDATE measurement SET samples = samples")
print("locked", flush=True)
sys.stdin.read()
"""


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    "lock", ["SELECT 1", "PRAGMA locking_mode = EXCLUSIVE", "PRAGMA journal_mode = DELETE", "LOCK_EX"]
)
def test_a_place_locked_for_long(path: Path, lock: str) -> None:
    opened(path).store([measurement("a")])
    db = opened(path)
    with start(LOCKER, path, lock) as other:
        assert other.stdout and other.stdout.readline() == "locked\n"
        begun = time.monotonic()
        with one_warning(path, "locked"):
            db.store([measurement("b")])
            waited = time.monotonic() - begun
            for number in range(10):
                db.store([measurement(f"c{number}")])
        assert 0.2 <= waited < 1.0, "waits as long as it should"
        assert time.monotonic() - begun - waited < 1.0, "but not every time"
        assert len(rows(db)) == (12 if lock == "SELECT 1" else 11)
        finish(other)
    db.store([measurement("d")])
    assert len(rows(opened(path))) == 13, "what waited in memory is written with the next store"
    assert len(rows(db)) == 13


@pytest.mark.usefixtures("impatient")
def test_files_are_opened_together_and_created_alone(path: Path) -> None:
    opened(path).store([measurement("a")])
    with start(LOCKER, path, "LOCK_SH") as other:
        assert other.stdout and other.stdout.readline() == "locked\n"
        db = opened(path)
        db.store([measurement("b")])
        path.unlink()
        with one_warning(path, "locked"):
            db.store([measurement("c")])
        assert not path.exists()
        finish(other)
    db.store([measurement("d")])
    assert rows(opened(path)) == [measurement("c"), measurement("d")]


def test_waiting_for_a_short_lock_is_silent(path: Path) -> None:
    db = opened(path)
    db.store([measurement("a")])
    with start(LOCKER, path, "SELECT 1") as other:
        assert other.stdout and other.stdout.readline() == "locked\n"
        release = threading.Timer(0.3, lambda: other.stdin and other.stdin.close())
        release.start()
        db.store([measurement("b")])
        release.join()
        other.stdin = None
        finish(other)
    assert rows(opened(path)) == [measurement("a"), measurement("b")]


def test_only_one_warning_a_process_and_file(tmp_path: Path) -> None:
    path = tmp_path / "file" / "tuning.db"
    (tmp_path / "file").touch()
    with one_warning(path):
        for _ in range(3):
            opened(path).store([measurement()])
