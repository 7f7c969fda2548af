"""The tuning database: what it keeps, what it refuses to touch, and that no place makes a call fail."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from database_records import DEVICE, PROBLEM, contents, finish, layer_choice, measurement, sql, start

from nbdnn import config, errors
from nbdnn.dispatch import connections, database, sqlite_file
from nbdnn.dispatch.database import Database
from nbdnn.dispatch.exchange import write_shipped
from nbdnn.dispatch.measurement import checked, utc_now
from nbdnn.dispatch.sqlite_file import SqliteFile
from nbdnn.dispatch.tables import select, upsert
from nbdnn.errors import NbdnnWarning


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file of its own in a folder of its own, neither of which is there yet."""
    return tmp_path / "folder" / "tuning.db"


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_file, "PATIENCE_S", 0.2)


def opened(path: Path, mode: database.Mode = "read-write", shipped: Path | None = None) -> Database:
    return Database(path, mode, shipped)


def rows(db: Database) -> list[database.Measurement]:
    return db.rows(DEVICE, PROBLEM)


@contextmanager
def one_warning(path: Path, *words: str) -> Iterator[None]:
    with pytest.warns(NbdnnWarning) as caught:
        yield
    (warning,) = caught
    for word in (str(path), *words):
        assert word in str(warning.message)


# What is kept


def test_rows_come_back_exactly(path: Path) -> None:
    stored = [
        measurement("8x6", 1 / 3),
        measurement("", None, spread=None, error=None, status="failed", reason="wrong:\n'élan' 値 \0 \"x\""),
        measurement("4x8", 5e-324, status="noisy", workspace_bytes=(1 << 63) - 1, deterministic=False),
    ]
    opened(path).store(stored)
    found = opened(path).rows(DEVICE, PROBLEM)
    assert found == sorted(stored)
    assert [list(map(type, row)) for row in found] == [list(map(type, row)) for row in sorted(stored)]


def test_rows_are_those_of_the_device_and_problem(path: Path) -> None:
    db = opened(path)
    db.store([measurement(), measurement(device="cpu/other"), measurement(problem="other")])
    assert rows(db) == [measurement()]
    assert db.rows("nobody", PROBLEM) == []


def test_a_row_replaces_the_one_with_its_key(path: Path) -> None:
    db = opened(path)
    db.store([measurement("a", 1.0), measurement("b", 2.0)])
    db.store([measurement("a", 3.0, status="noisy")])
    assert rows(db) == [measurement("a", 3.0, status="noisy"), measurement("b", 2.0)]


def test_layer_choices(path: Path) -> None:
    db = opened(path)
    assert db.layer_choice(DEVICE, layer_choice().layer) is None
    db.remember(layer_choice())
    db.remember(layer_choice(config="4x8"))
    db.remember(layer_choice("another"))
    assert opened(path).layer_choice(DEVICE, layer_choice().layer) == layer_choice(config="4x8")
    assert db.layer_choice("other", layer_choice().layer) is None


def test_reading_creates_nothing(tmp_path: Path, path: Path) -> None:
    db = opened(path)
    assert rows(db) == [] and db.layer_choice(DEVICE, "layer") is None
    db.store([])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("mode", ["read-write", "read-only", "off"])
def test_the_generation_changes_with_every_write(path: Path, mode: database.Mode) -> None:
    db = opened(path, mode)
    seen = {db.generation}
    for _ in range(3):
        db.store([measurement()])
        seen.add(db.generation)
        db.remember(layer_choice())
        seen.add(db.generation)
    assert len(seen) == 7
    rows(db)
    assert db.generation in seen


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("device", ""),
        ("problem", None),
        ("candidate", 3),
        ("median_us", float("nan")),
        ("median_us", float("inf")),
        ("median_us", -1.0),
        ("median_us", 0),
        ("median_us", "1.0"),
        ("median_us", None),
        ("spread", -0.1),
        ("spread", True),
        ("samples", -1),
        ("samples", 1.0),
        ("workspace_bytes", 1 << 63),
        ("deterministic", 1),
        ("error", -1.0),
        ("status", "excellent"),
        ("cudnn_version", "9"),
        ("measured_at", "yesterday"),
        ("measured_at", "2025-01-31 12:00:00.5Z"),
        ("measured_at", "2025-01-31T12:00:00"),
        ("measured_at", "2025-01-31T12:00:00+02:00"),
    ],
)
def test_what_cannot_be_a_measurement_is_refused_by_field(path: Path, field: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"^{field} is "):
        opened(path).store([measurement("good"), measurement(**{field: value})])
    assert not path.exists()


def test_foreign_numbers_become_plain_ones() -> None:
    row = measurement(median_us=np.float32(2.5), samples=np.int64(3), error=float("inf"), reason="caf\udce9")
    assert checked(row) == measurement(median_us=2.5, samples=3, error=None, reason="caf?")
    assert [type(value) for value in checked(row)] == [
        type(value) for value in measurement(median_us=2.5, samples=3, error=None)
    ]


def test_now_is_a_time_that_rows_take() -> None:
    assert checked(measurement(measured_at=utc_now()))


def test_the_default_path_follows_the_flags(tmp_path: Path) -> None:
    with config.change(tune__db=str(tmp_path / "mine.db")):
        assert Database().path == tmp_path / "mine.db"
    assert opened(Path("~/some.db")).path == Path.home() / "some.db"


# Layers and modes


def test_the_users_rows_lie_over_the_shipped_ones(tmp_path: Path, path: Path) -> None:
    shipped = tmp_path / "shipped.db"
    write_shipped(shipped, [measurement("a", 1.0), measurement("b", 2.0), layer_choice(), layer_choice("shipped only")])
    before = contents(tmp_path)
    assert before["shipped.db"][18:20] == b"\1\1", "a shipped file is in rollback mode, never in WAL"
    db = opened(path, shipped=shipped)
    db.store([measurement("b", 3.0), measurement("c", 4.0)])
    db.remember(layer_choice(config="mine"))
    assert rows(db) == [measurement("a", 1.0), measurement("b", 3.0), measurement("c", 4.0)]
    assert db.layer_choice(DEVICE, layer_choice().layer) == layer_choice(config="mine")
    assert db.layer_choice(DEVICE, "shipped only") == layer_choice("shipped only")
    shutil.rmtree(path.parent)
    assert contents(tmp_path) == before


def test_a_broken_shipped_file_is_named_and_left(tmp_path: Path, path: Path) -> None:
    shipped = tmp_path / "shipped.db"
    shipped.write_bytes(b"garbage" * 1000)
    db = opened(path, shipped=shipped)
    db.store([measurement()])
    with one_warning(shipped):
        assert rows(db) == [measurement()]
    assert shipped.read_bytes() == b"garbage" * 1000


def test_off_reads_and_writes_no_file(tmp_path: Path, path: Path) -> None:
    shipped = tmp_path / "shipped.db"
    write_shipped(shipped, [measurement("shipped")])
    opened(path).store([measurement("users")])
    before = contents(tmp_path)
    db = opened(path, "off", shipped)
    assert rows(db) == []
    db.store([measurement("new")])
    db.remember(layer_choice())
    assert rows(db) == [measurement("new")]
    assert db.layer_choice(DEVICE, layer_choice().layer) == layer_choice()
    assert contents(tmp_path) == before


def test_read_only_leaves_a_clean_file_alone(path: Path) -> None:
    db = opened(path)
    db.store([measurement()])
    db.close()
    before = contents(path.parent)
    db = opened(path, "read-only")
    assert rows(db) == [measurement()]
    db.store([measurement("new")])
    db.remember(layer_choice())
    assert rows(db) == [measurement(), measurement("new")]
    db.close()
    assert contents(path.parent) == before


def test_read_only_creates_nothing(tmp_path: Path, path: Path) -> None:
    db = opened(path, "read-only")
    db.store([measurement()])
    assert rows(db) == [measurement()]
    assert list(tmp_path.iterdir()) == []


def crashed(work: Callable[[], object]) -> None:
    """Run `work` in a child that dies at once, its connections open."""
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)


@pytest.mark.parametrize("left", ["alive", "wal and shm", "wal only"])
def test_read_only_reads_what_is_only_in_the_wal(path: Path, left: str) -> None:
    db = opened(path)
    db.store([measurement("a")])
    if left == "alive":
        db.store([measurement("b")])
    else:
        db.close()
        crashed(lambda: db.store([measurement("b")]))
    if left == "wal only":
        Path(f"{path}-shm").unlink()
    assert Path(f"{path}-wal").stat().st_size > 0
    before = set(contents(path.parent))
    assert rows(opened(path, "read-only")) == [measurement("a"), measurement("b")]
    assert set(contents(path.parent)) == before


def test_read_only_sees_what_others_write_later(path: Path) -> None:
    db, reader = opened(path), opened(path, "read-only")
    for number in range(5):
        db.store([measurement(str(number))])
        if number % 2:
            db.close()
        assert len(rows(reader)) == number + 1


# Damage


@pytest.mark.parametrize(
    "change",
    [
        "median_us = 'soon'",
        "median_us = -1",
        "median_us = 9e999",
        "median_us = median_us / 2",
        "status = 'splendid'",
        "samples = NULL",
        "reason = CAST(x'ff00fe' AS TEXT)",
        "candidate_version = x'0102'",
        "checksum = checksum + 1",
        "measured_at = '2099'",
    ],
)
def test_a_damaged_row_is_a_miss_alone(tmp_path: Path, path: Path, change: str) -> None:
    shipped = tmp_path / "shipped.db"
    write_shipped(shipped, [measurement("a", 99.0)])
    db = opened(path, shipped=shipped)
    db.store([measurement("a"), measurement("b"), measurement("c")])
    db.close()
    sql(
        path,
        "PRAGMA ignore_check_constraints = ON",
        "PRAGMA writable_schema = ON",
        "UPDATE sqlite_master SET sql = replace(sql, ' NOT NULL', '')",
        "PRAGMA writable_schema = RESET",
    )
    sql(path, f"UPDATE measurement SET {change} WHERE config IN ('a', 'c')")
    assert rows(db) == [measurement("a", 99.0), measurement("b")]
    db.store([measurement("c", 7.0)])
    assert rows(db) == [measurement("a", 99.0), measurement("b"), measurement("c", 7.0)]


def test_a_damaged_choice_is_no_choice(path: Path) -> None:
    db = opened(path)
    db.remember(layer_choice())
    db.close()
    sql(path, "UPDATE layer_choice SET config = 'other'")
    assert db.layer_choice(DEVICE, layer_choice().layer) is None


def _garbage(path: Path) -> None:
    path.write_bytes(bytes(range(256)) * 64)


def _half(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2 + 100)


def _short(path: Path) -> None:
    path.write_bytes(b"SQLite format 3\0")


def _pages(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:100] + b"\xa5" * (len(content) - 100))


def _no_table(path: Path) -> None:
    sql(path, "DROP TABLE measurement")


@pytest.mark.parametrize("reading", [True, False])
@pytest.mark.parametrize("harm", [_garbage, _half, _short, _pages, _no_table])
def test_a_damaged_file_is_set_aside_with_its_companions(
    path: Path, harm: Callable[[Path], None], reading: bool
) -> None:
    db = opened(path)
    db.store([measurement(str(number)) for number in range(200)])
    db.close()
    harm(path)
    damaged = path.read_bytes()
    Path(f"{path}-wal").write_bytes(b"old wal")
    Path(f"{path}-shm").write_bytes(b"")
    with one_warning(path, ".damaged-"):
        if reading:
            assert rows(db) == []
        db.store([measurement("new")])
    assert rows(opened(path)) == [measurement("new")]
    aside = {
        name.partition(".damaged-")[2]: content for name, content in contents(path.parent).items() if "dam" in name
    }
    (name,) = (name for name in aside if not name.endswith(("-wal", "-shm")))
    if harm not in (_half, _pages, _no_table):  # SQLite itself has looked into these, and into their -wal
        assert aside == {name: damaged, f"{name}-wal": b"old wal", f"{name}-shm": b""}
    assert aside[name]


def test_read_only_does_not_set_aside(path: Path) -> None:
    path.parent.mkdir()
    _garbage(path)
    before = contents(path.parent)
    db = opened(path, "read-only")
    with one_warning(path):
        assert rows(db) == []
        db.store([measurement()])
        assert rows(db) == [measurement()]
    assert contents(path.parent) == before


def test_an_empty_file_is_a_new_database(path: Path) -> None:
    path.parent.mkdir()
    path.touch()
    assert rows(opened(path, "read-only")) == []
    db = opened(path)
    assert rows(db) == []
    db.store([measurement()])
    assert rows(opened(path)) == [measurement()]


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
    before = path.read_bytes()
    db = opened(path)
    with one_warning(path, "another program"):
        db.store([measurement()])
    assert rows(db) == [measurement()]
    assert path.read_bytes() == before


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


# Files that change under a running process


def test_a_deleted_file_is_begun_anew(path: Path) -> None:
    db = opened(path)
    db.store([measurement("a")])
    shutil.rmtree(path.parent)
    assert rows(db) == []
    db.store([measurement("b")])
    assert rows(opened(path)) == rows(db) == [measurement("b")]


def test_a_deleted_file_whose_wal_stays(path: Path) -> None:
    db = opened(path)
    db.store([measurement("a")])
    path.unlink()
    assert Path(f"{path}-wal").exists()
    db.store([measurement("b")])
    assert rows(opened(path)) == rows(db) == [measurement("b")]


def test_a_deleted_file_that_another_process_still_has_open(path: Path) -> None:
    """Its -wal and -shm are at the names that the new file will use."""
    db = opened(path)
    db.store([measurement("a")])
    db.close()
    with start(HOLDER, path) as holder:
        assert holder.stdout and holder.stdout.readline() == "open\n"
        path.unlink()
        assert Path(f"{path}-shm").exists()
        db.store([measurement("b")])
        assert rows(db) == [measurement("b")]
        finish(holder)
    assert Path(f"{path}-wal").exists(), "the other's last close is not ours"
    db.store([measurement("c")])
    assert rows(opened(path)) == rows(db) == [measurement("b"), measurement("c")]
    assert sql(path, "PRAGMA integrity_check") == [("ok",)]


HOLDER = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
for number in range(20):
    connection.execute("UPDATE measurement SET samples = samples + 1")
print("open", flush=True)
sys.stdin.read()
connection.execute("UPDATE measurement SET samples = samples + 1")
connection.close()
"""


def test_a_write_into_a_file_that_is_being_set_aside_is_repeated(path: Path) -> None:
    file, begun = SqliteFile(path, writable=True), []

    def action(connection: sqlite3.Connection) -> None:
        upsert(connection, [measurement("a")])
        if not begun:
            path.rename(path.with_name("aside"))
        begun.append(True)

    file.write(action)
    assert len(begun) == 2
    assert rows(opened(path)) == [measurement("a")]


def test_a_file_that_is_replaced_while_it_is_opened(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened(path).store([measurement("old")])
    opened(path.with_name("new.db")).store([measurement("new")])
    for handle in list(connections.handles):
        handle.close()
    connect = SqliteFile._connect

    def late(file: SqliteFile, *arguments: Any) -> sqlite3.Connection:
        connection = connect(file, *arguments)
        if path.with_name("new.db").exists():
            path.with_name("new.db").replace(path)
        return connection

    monkeypatch.setattr(SqliteFile, "_connect", late)
    assert rows(opened(path)) == [measurement("new")]


def test_a_read_only_look_at_a_file_that_changes_is_repeated(path: Path) -> None:
    writer, looks = opened(path), []
    writer.store([measurement("a")])
    writer.close()

    def query(connection: sqlite3.Connection) -> list[database.Measurement]:
        if not looks:
            crashed(lambda: (writer.store([measurement("b")]), writer.close()))
        looks.append(True)
        return select(connection, database.Measurement)

    assert len(SqliteFile(path, writable=False).find(query)) == 2
    assert len(looks) == 2


def test_only_the_file_that_was_seen_is_set_aside(path: Path) -> None:
    opened(path).store([measurement("a")])
    assert SqliteFile(path, writable=True).set_aside((0, 0)) is None
    assert rows(opened(path)) == [measurement("a")]


def test_a_second_connection_keeps_the_locks_of_the_first(path: Path) -> None:
    """Closing any descriptor of a file drops a process's locks on it; another's last close would take the -wal away."""
    db = opened(path)
    db.store([measurement("a")])
    thread = threading.Thread(target=lambda: opened(path).store([measurement("b")]))
    thread.start()
    thread.join()
    assert (
        finish(
            start(
                "import sys; from database_records import *; sql(Path(sys.argv[1]), 'SELECT 1 FROM measurement')",
                path,
                cwd=Path(__file__).parent,
            )
        )
        == ""
    )
    assert Path(f"{path}-wal").exists()
    db.store([measurement("c")])
    assert len(rows(opened(path))) == 3


def test_a_replaced_file_is_noticed(path: Path) -> None:
    other = path.with_name("other.db")
    for each, name in ((path, "a"), (other, "b")):
        db = opened(each)
        db.store([measurement(name)])
        db.close()
    db = opened(path)
    assert rows(db) == [measurement("a")]
    other.replace(path)
    assert rows(db) == [measurement("b")]


def test_the_last_close_does_not_take_the_new_wal_away(path: Path) -> None:
    """Closing a connection to a file that was renamed away must leave the new file's -wal where it is."""
    db, thread_stays, thread_ends = opened(path), threading.Event(), threading.Event()

    def hold() -> None:
        rows(db)
        thread_stays.set()
        thread_ends.wait()

    db.store([measurement("a")])
    thread = threading.Thread(target=hold)
    thread.start()
    thread_stays.wait()
    path.rename(path.with_name("elsewhere"))
    db.store([measurement("b")])
    thread_ends.set()
    thread.join()
    assert Path(f"{path}-wal").exists()
    assert rows(opened(path)) == rows(db) == [measurement("b")]


# Threads, forks, start


def test_threads_have_connections_of_their_own(path: Path) -> None:
    db = opened(path)
    errors: list[BaseException] = []

    def work(name: int) -> None:
        try:
            for number in range(20):
                db.store([measurement(f"{name}/{number}")])
                assert measurement(f"{name}/{number}") in rows(db)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(name,)) for name in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert len(rows(db)) == len(rows(opened(path))) == 160


def forked(work: Callable[[], object]) -> int:
    """The exit code of a child that runs `work` and ends like a program: with exit handlers and collection."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            connections.close_all()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_child_opens_its_own_connection(path: Path) -> None:
    db = opened(path)
    db.store([measurement("parent")])
    handle = db._file._thread.handle

    def child() -> None:
        nonlocal db
        assert rows(db) == [measurement("parent")]
        assert db._file._thread.handle is not handle
        db.store([measurement("child")])
        connections.close_all()
        assert handle.connection.total_changes == 1, "still open: closing it is for the parent alone"
        del db

    assert forked(child) == 0
    assert Path(f"{path}-wal").exists(), "the parent still has it open"
    db.store([measurement("parent again")])
    assert db._file._thread.handle is handle
    assert len(rows(db)) == len(rows(opened(path))) == 3


def test_a_fork_amid_other_threads_work(path: Path) -> None:
    """A child never finds SQLite's mutexes taken, and leaves the parent's transactions alone."""
    db, done = opened(path), threading.Event()
    stored = 0

    def work() -> None:
        nonlocal stored
        while not done.is_set():
            db.store([measurement(str(n), problem=f"{PROBLEM}:{stored}") for n in range(20)])
            stored += 1

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for number in range(30):
            assert forked(lambda number=number: db.store([measurement(f"child {number}")])) == 0
    finally:
        done.set()
        thread.join()
    assert sql(path, "SELECT count(*) FROM measurement") == [(30 + 20 * stored,)]
    assert sql(path, "PRAGMA integrity_check") == [("ok",)]


def test_importing_it_is_light() -> None:
    script = "import sys, nbdnn.dispatch.database; print(*({'numba', 'numpy', 'rich', 'torch'} & {*sys.modules}))"
    assert finish(start(script)) == "\n"
