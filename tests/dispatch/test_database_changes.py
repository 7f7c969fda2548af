"""The tuning database while its file changes under a running process, in threads and after forks."""

from __future__ import annotations

import os
import shutil
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from database_records import (
    PROBLEM,
    crashed,
    finish,
    measurement,
    opened,
    rows,
    sql,
    start,
)

from nbdnn.dispatch import connections, database
from nbdnn.dispatch.sqlite_file import SqliteFile
from nbdnn.dispatch.tables import select, upsert

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
