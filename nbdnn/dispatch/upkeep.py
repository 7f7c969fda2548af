"""Looking after a tuning database: what is in it, what no longer counts, what shall go."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import NamedTuple

from nbdnn.dispatch.database import Database
from nbdnn.dispatch.exchange import read_all
from nbdnn.dispatch.measurement import STATUSES, AnyRecord, LayerChoice, Measurement, is_current
from nbdnn.dispatch.sqlite_file import SqliteFile
from nbdnn.dispatch.tables import count, count_damaged, delete, select, upsert
from nbdnn.errors import DatabaseError, InvalidProblem
from nbdnn.problem import Problem, parse


class Health(NamedTuple):
    """What a database holds. stale: of a candidate that is gone or has changed; damaged: rows that cannot be read."""

    integrity: str
    statuses: dict[str, int]
    choices: int
    stale: int
    damaged: int

    @property
    def sound(self) -> bool:
        return self.integrity == "ok" and not self.stale and not self.damaged


class Filter(NamedTuple):
    """Conditions that all have to hold. device: a fingerprint, or its beginning up to a '/', such as 'cpu'."""

    problem: str | None = None
    device: str | None = None
    op: str | None = None
    cudnn: bool = False
    cudnn_version: int | None = None
    older_than_days: float | None = None

    def sql(self) -> tuple[str, list[object]]:
        """The condition on measurements, and its parameters."""
        conditions: list[tuple[str, tuple[object, ...]]] = []
        if self.problem is not None:
            conditions.append(("problem = ?", (self.problem,)))
        if self.device is not None:
            conditions.append(("(device = ? OR instr(device, ?) = 1)", (self.device, f"{self.device}/")))
        if self.op is not None:
            conditions.append(("instr(problem, ?) = 1", (f"{self.op}:",)))
        if self.cudnn or self.cudnn_version is not None:
            conditions.append(("instr(candidate, '/cudnn/') > 0", ()))
        if self.cudnn_version is not None:
            conditions.append(("cudnn_version = ?", (self.cudnn_version,)))
        if self.older_than_days is not None:
            moment = datetime.now(UTC) - timedelta(days=self.older_than_days)
            conditions.append(("substr(measured_at, 1, 19) < ?", (moment.strftime("%Y-%m-%dT%H:%M:%S"),)))
        where = " AND ".join(condition for condition, _ in conditions) or "1"
        return where, [parameter for _, parameters in conditions for parameter in parameters]


def find(connection: sqlite3.Connection, filter: Filter) -> list[Measurement]:
    return select(connection, Measurement, *filter.sql())


def inspect(file: SqliteFile) -> Health:
    """Integrity, and how many records of each sort there are."""

    def action(connection: sqlite3.Connection) -> tuple[str, list[AnyRecord], int]:
        problems = [line for (line,) in connection.execute("PRAGMA integrity_check(3)")]
        return "; ".join(problems), read_all(connection), count_damaged(connection)

    nothing: tuple[str, list[AnyRecord], int] = ("ok", [], 0)
    integrity, records, damaged = file.read(action, nothing)
    rows = [record for record in records if isinstance(record, Measurement)]
    return Health(
        integrity=integrity,
        statuses={status: sum(row.status == status for row in rows) for status in STATUSES},
        choices=len(records) - len(rows),
        stale=sum(not is_current(record) for record in records),
        damaged=damaged,
    )


class Drift(NamedTuple):
    """A stored measurement and what was measured now."""

    stored: Measurement
    now: Measurement

    @property
    def ratio(self) -> float | None:
        """Time now over time then; None where it failed now."""
        if self.now.median_us is None or self.stored.median_us is None:
            return None
        return self.now.median_us / self.stored.median_us


def sample(file: SqliteFile, amount: int) -> Iterator[Drift]:
    """Measure again up to `amount` of the valid rows of this machine, picked at random. Stores nothing."""
    from nbdnn import driver
    from nbdnn.device import Device, cpu_device, gpu
    from nbdnn.dispatch.selection import Filters
    from nbdnn.dispatch.tuner import tune

    rows = file.find(partial(find, filter=Filter()))
    valid = [row for row in rows if row.status != "failed" and is_current(row)]
    every: list[Device] = [cpu_device(), *map(gpu, range(driver.device_count()))]
    devices = {device.fingerprint: device for device in every}
    here = [(row, problem) for row in valid if row.device in devices and (problem := _problem(row))]
    in_memory = Database(file.path, mode="off")
    for row, problem in random.sample(here, min(amount, len(here))):
        filters = Filters(candidate=row.candidate)
        result = tune(problem, devices[row.device], in_memory, filters=filters, again=True)
        if now := result.rows.get((row.candidate, row.config)):
            yield Drift(row, now)


def _problem(row: Measurement) -> Problem | None:
    """The problem that was measured; None where its text is not understood."""
    try:
        return parse(row.problem)
    except InvalidProblem:
        return None


def prune(file: SqliteFile) -> int:
    """Remove what is stale or damaged; how many records."""
    # Before the transaction, because it imports every kernel.
    stale = {record for record in file.find(read_all) if not is_current(record)}

    def action(connection: sqlite3.Connection) -> int:
        keep = [record for record in read_all(connection) if record not in stale]
        removed = count(connection, Measurement) + count(connection, LayerChoice) - len(keep)
        if removed:
            delete(connection, Measurement)
            delete(connection, LayerChoice)
            upsert(connection, keep)
        return removed

    removed = file.write(action)
    _compact(file)
    return removed


def forget(file: SqliteFile, filter: Filter) -> int:
    """Remove the measurements that the filter finds and the choices that rest on them; how many measurements."""
    where, parameters = filter.sql()
    chosen = "device, problem, candidate, config"

    def action(connection: sqlite3.Connection) -> int:
        rests = f"({chosen}) IN (SELECT {chosen} FROM measurement WHERE {where})"
        delete(connection, LayerChoice, rests, parameters)
        return delete(connection, Measurement, where, parameters)

    removed = file.write(action)
    _compact(file)
    return removed


def _compact(file: SqliteFile) -> None:
    with suppress(DatabaseError):  # in use: the space is used again later
        file.read(lambda connection: connection.execute("VACUUM"), None)
