"""The tuning database: what it keeps, which file answers, and what damage costs."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from database_records import (
    DEVICE,
    PROBLEM,
    contents,
    crashed,
    layer_choice,
    measurement,
    one_warning,
    opened,
    rows,
    sql,
)

from nbdnn import config
from nbdnn.dispatch import database
from nbdnn.dispatch.database import Database
from nbdnn.dispatch.exchange import write_shipped
from nbdnn.dispatch.measurement import checked, utc_now

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


@pytest.mark.parametrize("mode", ["read-only", "read-write"])
def test_what_never_was_a_database_stays_as_it_is(path: Path, mode: str) -> None:
    path.parent.mkdir()
    path.write_text("some notes\n" * 50)
    before = contents(path.parent)
    db = opened(path, mode)
    with one_warning(path, "is not a database; going on without it"):
        assert rows(db) == []
        db.store([measurement()])
        assert rows(db) == [measurement()]
    assert contents(path.parent) == before


def test_a_file_of_zeros_is_damaged(path: Path) -> None:
    """As file systems leave one after a power cut."""
    path.parent.mkdir()
    path.write_bytes(bytes(8192))
    db = opened(path)
    with one_warning(path, ".damaged-"):
        db.store([measurement()])
    assert rows(opened(path)) == [measurement()]


def test_an_empty_file_is_a_new_database(path: Path) -> None:
    path.parent.mkdir()
    path.touch()
    assert rows(opened(path, "read-only")) == []
    db = opened(path)
    assert rows(db) == []
    db.store([measurement()])
    assert rows(opened(path)) == [measurement()]
