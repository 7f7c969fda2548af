"""The tables of the tuning database in SQL: one for each kind of record, each row with a checksum.

user_version is the schema; application_id tells a tuning database from any other SQLite file.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterable

from nbdnn.dispatch.measurement import KEY_FIELDS, AnyRecord, LayerChoice, Measurement, Record, checksum, key

SCHEMA = 1
APPLICATION_ID = 0x6E62646E  # 'nbdn'
_TABLES: dict[type, str] = {Measurement: "measurement", LayerChoice: "layer_choice"}
_REAL = ("median_us", "spread", "error")
_INTEGER = ("samples", "workspace_bytes", "deterministic", "cudnn_version")
_DETERMINISTIC = Measurement._fields.index("deterministic")


class OutOfOrder(sqlite3.DatabaseError):
    """A table's rows are not where their keys say."""


def create_tables(connection: sqlite3.Connection) -> None:
    """The two tables, one b-tree each, so that no index can disagree with its table."""
    connection.execute("BEGIN IMMEDIATE")
    for kind, table in _TABLES.items():
        columns = "".join(f"{field} {_sql_type(field)}, " for field in _fields(kind))
        connection.execute(
            f"CREATE TABLE {table} ({columns}checksum INTEGER NOT NULL, PRIMARY KEY ({_key(kind)})) WITHOUT ROWID"
        )
    connection.execute(f"PRAGMA application_id={APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version={SCHEMA}")
    connection.execute("COMMIT")


def select(
    connection: sqlite3.Connection, kind: type[Record], where: str = "1", parameters: Iterable[object] = ()
) -> list[Record]:
    """The sound records of a kind, in the order of their keys. One whose checksum does not match is left out."""
    columns = ", ".join((*_fields(kind), "checksum"))
    query = f"SELECT {columns} FROM {_TABLES[kind]} WHERE {where} ORDER BY {_key(kind)}"
    records = []
    for *values, stored in connection.execute(query, tuple(parameters)):
        if kind is Measurement:
            values[_DETERMINISTIC] = bool(values[_DETERMINISTIC])
        record = kind(*values)
        if checksum(record) == stored:
            records.append(record)
    return records


def count(connection: sqlite3.Connection, kind: type[Record]) -> int:
    """How many rows there are, sound or not."""
    return connection.execute(f"SELECT count(*) FROM {_TABLES[kind]}").fetchone()[0]


def count_damaged(connection: sqlite3.Connection) -> int:
    """How many rows `select` leaves out."""
    sound = len(select(connection, Measurement)) + len(select(connection, LayerChoice))
    return sum(count(connection, kind) for kind in _TABLES) - sound


def upsert(connection: sqlite3.Connection, records: Iterable[AnyRecord]) -> None:
    """Write records, each instead of one with its key."""
    for record in records:
        marks = ", ".join("?" * (len(record) + 1))
        connection.execute(f"REPLACE INTO {_TABLES[type(record)]} VALUES ({marks})", (*record, checksum(record)))


def upsert_and_look(connection: sqlite3.Connection, records: Collection[AnyRecord]) -> None:
    """`upsert`, and OutOfOrder where a look-up by device and problem does not find what has just been written.

    A key that has rotted ends such a look-up too soon, without an error; the rows behind it would be measured, stored
    and missed again for ever.
    """
    upsert(connection, records)
    rows = [record for record in records if isinstance(record, Measurement)]
    found: dict[tuple[str, ...], Measurement] = {}
    for each in {row[:2] for row in rows}:
        found.update((key(row), row) for row in select(connection, Measurement, "device = ? AND problem = ?", each))
    if any(found.get(key(row)) != row for row in rows):
        raise OutOfOrder("rows just written are not found")


def delete(
    connection: sqlite3.Connection, kind: type[Record], where: str = "1", parameters: Iterable[object] = ()
) -> int:
    return connection.execute(f"DELETE FROM {_TABLES[kind]} WHERE {where}", tuple(parameters)).rowcount


def _key(kind: type[Record]) -> str:
    return ", ".join(_fields(kind)[: KEY_FIELDS[kind]])


def _fields(kind: type[Record]) -> tuple[str, ...]:
    return kind._fields


def _sql_type(field: str) -> str:
    return "REAL" if field in _REAL else "INTEGER NOT NULL" if field in _INTEGER else "TEXT NOT NULL"
