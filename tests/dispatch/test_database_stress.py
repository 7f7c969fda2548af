"""The tuning database among processes that race, die and find rotten bytes. Rows may be missed, never wrong or lost."""

from __future__ import annotations

import os
import random
import signal
import time
import warnings
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path

import pytest
from database_records import DEVICE, PROBLEM, finish, measurement, sql, start, used_before

from nbdnn.dispatch import database
from nbdnn.dispatch.database import Database
from nbdnn.errors import NbdnnWarning

HERE = Path(__file__).parent


def rows(path: Path, mode: database.Mode = "read-write") -> list[database.Measurement]:
    db = Database(path, mode, shipped=None)
    try:
        return db.rows(DEVICE, PROBLEM)
    finally:
        db.close()


def sound(path: Path) -> bool:
    return sql(path, "PRAGMA integrity_check") == [("ok",)]


WRITER = """
import sys
from database_records import *
from nbdnn.dispatch.database import Database
path, name, times = sys.argv[1], sys.argv[2], int(sys.argv[3])
db = Database(path, shipped=None)
print("ready", flush=True)
sys.stdin.readline()
for number in range(times):
    db.store([measurement(f"{name}.{number}.{n}") for n in range(4)])
    db.remember(layer_choice(f"layer {name}.{number}"))
    assert len(db.rows(DEVICE, PROBLEM)) >= 4 * (number + 1)
    if number % 10 == 9:
        db.close()  # the last to close removes the -wal, while others open
assert not db._unsaved
"""


@pytest.mark.parametrize("before", ["nothing", "empty file", "damaged file", "database"])
def test_eight_processes_write_at_once(tmp_path: Path, before: str) -> None:
    path, processes, times = tmp_path / "tuning.db", 8, 20
    if before == "empty file":
        path.touch()
    elif before == "damaged file":
        path.write_bytes(b"rubbish " * 5000)
        used_before(path)
    elif before == "database":
        Database(path, shipped=None).store([measurement("first")])
    # Warnings are errors in the writers unless the file is damaged, where only one of them may give one.
    flags = {"stderr": -1} if before == "damaged file" else {}
    writers = [start(WRITER, path, name, times, cwd=HERE, **flags) for name in range(processes)]
    for writer in writers:
        assert writer.stdout and writer.stdout.readline() == "ready\n"
    for writer in writers:
        assert writer.stdin
        writer.stdin.write("go\n")
        writer.stdin.flush()
    complaints = ""
    for writer in writers:
        _, errors = writer.communicate(timeout=60)
        complaints += errors or ""
        assert writer.returncode == 0, errors
    expected = {f"{name}.{number}.{n}" for name in range(processes) for number in range(times) for n in range(4)}
    assert {row.config for row in rows(path)} - {"first"} == expected
    assert sql(path, "SELECT count(*) FROM layer_choice") == [(processes * times,)]
    assert sound(path)
    aside = [name for name in os.listdir(tmp_path) if ".damaged-" in name]
    assert len(aside) == (1 if before == "damaged file" else 0)
    assert complaints.count("NbdnnWarning:") == len(aside)


def forked(work: Callable[[], object]) -> int:
    """A child that does `work`, and is killed when it has."""
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    return child


def lasts_s(work: Callable[[], object]) -> float:
    """Seconds that `work` takes in a child, as busy as the machine is."""
    start_s = time.perf_counter()
    os.waitpid(forked(work), 0)
    return time.perf_counter() - start_s


def killed(work: Callable[[], object], after_s: float, after: Callable[[], object] = lambda: None) -> None:
    """Run `work` in a child; kill it, as kill -9 does, so many seconds after `after` has returned."""
    child = forked(work)
    after()
    time.sleep(after_s)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def test_kill_9_while_writing_loses_no_row_that_was_stored(tmp_path: Path) -> None:
    path, rng = tmp_path / "tuning.db", random.Random(1)
    acknowledged: set[str] = set()
    for life in range(40):
        reader, writer = os.pipe()
        stores = rng.randrange(12)

        def work(life: int = life, writer: int = writer) -> None:
            db = Database(path, shipped=None)
            for number in range(10_000):
                db.store([measurement(f"{life}.{number}.{n}", reason="x" * 500) for n in range(8)])
                os.write(writer, f"{life}.{number}\n".encode())

        with open(reader) as stored:
            killed(work, rng.uniform(0.0, 0.006), partial(acknowledged.update, islice(stored, stores)))
            os.close(writer)
            acknowledged.update(stored)
        found = {row.config for row in rows(path, rng.choice(["read-write", "read-only"]))}
        assert {f"{each.strip()}.{n}" for each in acknowledged for n in range(8)} <= found
        assert len(found) % 8 == 0, "a store is kept as a whole or not at all"
        if life % 8 == 0:
            assert path.exists() and sound(path)
    assert len(acknowledged) > 100
    assert sound(path)
    assert not [name for name in os.listdir(tmp_path) if ".damaged-" in name]


def test_kill_9_while_creating(tmp_path: Path) -> None:
    def create(path: Path) -> None:
        Database(path, shipped=None).store([measurement("a")])

    rng, outcomes = random.Random(2), set()
    longest_s = 1.5 * lasts_s(partial(create, tmp_path / "whole" / "tuning.db"))
    for number in range(60):
        path = tmp_path / str(number) / "tuning.db"
        killed(partial(create, path), rng.uniform(0.0, longest_s))
        before = rows(path)
        outcomes.add(len(before) if path.exists() else None)
        Database(path, shipped=None).store([measurement("b")])
        assert rows(path) == [*before, measurement("b")]
        assert sound(path)
        assert [name for name in os.listdir(path.parent) if ".damaged-" in name] == []
    assert len(outcomes) > 1, "the kills came at different moments"


def test_kill_9_while_setting_aside(tmp_path: Path) -> None:
    def spoil(path: Path) -> Path:
        path.parent.mkdir()
        path.write_bytes(b"rubbish " * 1000)
        used_before(path)
        Path(f"{path}-wal").write_bytes(b"rubbish " * 1000)
        return path

    def mend(path: Path) -> None:
        warnings.simplefilter("ignore")
        Database(path, shipped=None).store([measurement("a")])

    rng = random.Random(3)
    longest_s = 1.5 * lasts_s(partial(mend, spoil(tmp_path / "whole" / "tuning.db")))
    for number in range(40):
        path = spoil(tmp_path / str(number) / "tuning.db")
        killed(partial(mend, path), rng.uniform(0.0, longest_s))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NbdnnWarning)
            Database(path, shipped=None).store([measurement("b")])
        assert measurement("b") in rows(path)
        assert sound(path)
        (aside,) = (name for name in os.listdir(path.parent) if ".damaged-" in name and "-wal" not in name)
        assert (path.parent / aside).read_bytes() == b"rubbish " * 1000


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, dict[str, database.Measurement]]:
    """A file of some sixty pages, and its rows by config."""
    path = tmp_path_factory.mktemp("original") / "tuning.db"
    db = Database(path, shipped=None)
    stored = [measurement(f"{n:04}", 1.0 + n, reason="r" * (n % 300)) for n in range(600)]
    db.store(stored)
    db.close()
    return path.read_bytes(), {row.config: row for row in stored}


def _overwrite_pages(content: bytearray, rng: random.Random) -> None:
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(0, len(content), 4096)
        content[at : at + 4096] = rng.randbytes(4096) if rng.random() < 0.5 else bytes(4096)


def _flip_bits(content: bytearray, rng: random.Random) -> None:
    for _ in range(rng.choice([1, 10, 1000])):
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)


def _swap_pages(content: bytearray, rng: random.Random) -> None:
    one, two = rng.sample(range(0, len(content), 4096), 2)
    content[one : one + 4096], content[two : two + 4096] = content[two : two + 4096], content[one : one + 4096]


def _truncate(content: bytearray, rng: random.Random) -> None:
    del content[rng.randrange(len(content)) :]


@pytest.mark.parametrize("harm", [_overwrite_pages, _flip_bits, _swap_pages, _truncate])
@pytest.mark.filterwarnings("ignore::nbdnn.errors.NbdnnWarning")
def test_rotten_bytes_never_become_a_time(
    tmp_path: Path,
    original: tuple[bytes, dict[str, database.Measurement]],
    harm: Callable[[bytearray, random.Random], None],
) -> None:
    content, stored = original
    rng = random.Random(harm.__name__)
    kept = set_aside = untouched = 0
    for number in range(40):
        path = tmp_path / str(number) / "tuning.db"
        path.parent.mkdir()
        rotten = bytearray(content)
        harm(rotten, rng)
        path.write_bytes(rotten)
        used_before(path)
        db = Database(path, shipped=None)
        found = db.rows(DEVICE, PROBLEM)
        assert all(row == stored[row.config] for row in found)
        new = [measurement("new", 0.5, reason="n" * 100), stored["0300"]._replace(median_us=0.25)]
        db.store(new)
        again = {row.config: row for row in db.rows(DEVICE, PROBLEM)}
        assert all(again[row.config] == row for row in new)
        assert all(row == stored[name] for name, row in again.items() if name not in ("new", "0300"))
        db.close()
        aside = [
            name for name in os.listdir(path.parent) if ".damaged-" in name and not name.endswith(("-wal", "-shm"))
        ]
        set_aside += bool(aside)
        untouched += bool(db._unsaved)
        kept += len(found)
        if aside and not db._unsaved:
            assert sound(path), "the new file has nothing of the damaged one"
    assert set_aside > 5, (kept, set_aside, untouched)
    assert untouched < 10, "only a header of another schema or program keeps a file from being used"


def test_a_reader_sees_whole_stores_of_living_writers(tmp_path: Path) -> None:
    path = tmp_path / "tuning.db"
    writers = [start(WRITER, path, name, 30, cwd=HERE) for name in range(2)]
    for writer in writers:
        assert writer.stdout and writer.stdin and writer.stdout.readline() == "ready\n"
        writer.stdin.write("go\n")
        writer.stdin.flush()
    db, looks = Database(path, "read-only", shipped=None), 0
    while any(writer.poll() is None for writer in writers):
        found = db.rows(DEVICE, PROBLEM)
        stores: dict[str, int] = {}
        for row in found:
            stores[row.config.rpartition(".")[0]] = stores.get(row.config.rpartition(".")[0], 0) + 1
        assert set(stores.values()) <= {4}
        looks += 1
    for writer in writers:
        finish(writer)
    assert looks > 10
    assert len(db.rows(DEVICE, PROBLEM)) == 2 * 30 * 4
