"""Records as lines of JSON, and how records from elsewhere join a database.

One record a line, its fields in their order, lines sorted by key: two exports can be read and compared with diff, and
merged in any order with the same result, because of two records with one key the newest valid one wins.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import NoReturn

from nbdnn.dispatch.measurement import AnyRecord, LayerChoice, Measurement, checked, is_current, key
from nbdnn.dispatch.sqlite_file import MAGIC, SqliteFile
from nbdnn.dispatch.tables import create_tables, select, upsert
from nbdnn.errors import DatabaseError
from nbdnn.problem import parse


def to_line(record: AnyRecord) -> str:
    """The record as one line of ASCII, without its end."""
    return json.dumps(record._asdict(), allow_nan=False)


def from_line(line: bytes | str) -> AnyRecord:
    """The record of one line; ValueError says what is wrong with it. One of a candidate unknown here is stale."""
    try:
        pairs = json.loads(line, object_pairs_hook=_Object, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise ValueError(f"no JSON: {error.msg} at character {error.pos + 1}") from None
    if not isinstance(pairs, _Object):
        raise ValueError("expected an object in braces")
    kind = LayerChoice if any(name == "layer" for name, _ in pairs) else Measurement
    names = [name for name, _ in pairs]
    for fault, found in (
        ("lacks", [field for field in kind._fields if field not in names]),
        ("has unknown", [name for name in names if name not in kind._fields]),
        ("repeats", [name for name in kind._fields if names.count(name) > 1]),
    ):
        if found:
            raise ValueError(f"the record {fault} {', '.join(found)}")
    record = checked(kind(**dict(pairs)))
    problem = parse(record.problem)
    if record.candidate.split("/")[:-2] != [problem.op]:
        raise ValueError(f"candidate {record.candidate!r} is none of {problem.op}, as {problem.op}/cpu/direct would be")
    return record._replace(problem=str(problem))


class _Object(list):
    """The (name, value) pairs of a JSON object: a dict would hide repeated names."""


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a number that can be compared")


def read_lines(lines: Iterable[bytes], name: str) -> list[AnyRecord]:
    """The records of an export; ValueError gives the number of the first bad line. Empty lines are passed over."""
    records = []
    for number, line in enumerate(lines, 1):
        if number == 1 and line.startswith(MAGIC):
            raise ValueError(f"{name} is a database: import takes what export wrote, merge takes databases")
        try:
            if line.strip():
                records.append(from_line(line))
        except RecursionError:
            raise ValueError(f"{name}, line {number}: nested too deeply") from None
        except ValueError as error:
            raise ValueError(f"{name}, line {number}: {error}") from None
    return records


def read_all(connection: sqlite3.Connection) -> list[AnyRecord]:
    """The sound records of a database, measurements first, in the order of their keys."""
    return [*select(connection, Measurement), *select(connection, LayerChoice)]


def read_file(path: str | os.PathLike[str]) -> list[AnyRecord]:
    """The records of a database or of an export, whichever lies there."""
    with open(path, "rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            file.seek(0)
            return read_lines(file, str(path))
    return SqliteFile(path, writable=False).find(read_all)


def merge(file: SqliteFile, records: Iterable[AnyRecord]) -> int:
    """Add records to a database in one transaction; how many were new or won over one with the same key."""
    records = list(records)

    def action(connection: sqlite3.Connection) -> int:
        held = {key(record): record for record in read_all(connection)}
        won: dict[tuple[str, ...], AnyRecord] = {}
        for record in records:
            rival = won.get(key(record)) or held.get(key(record))
            if rival is None or (record != rival and _rank(record) > _rank(rival)):
                won[key(record)] = record
        upsert(connection, won.values())
        return len(won)

    return file.write(action)


def _rank(record: AnyRecord) -> tuple[bool, str, str]:
    when = record.measured_at if isinstance(record, Measurement) else record.chosen_at
    return is_current(record), when[: len("2025-01-31T12:00:00")], to_line(record)


def difference(ours: Iterable[AnyRecord], theirs: Iterable[AnyRecord]) -> Iterator[str]:
    """Lines of an export that only one side has, '-' ours and '+' theirs, in the order of their keys."""
    mine, other = ({(type(record).__name__, *key(record)): record for record in side} for side in (ours, theirs))
    for each in sorted({*mine, *other}, key=lambda each: (each[0] != "Measurement", each)):
        if mine.get(each) != other.get(each):
            yield from (f"{sign} {to_line(side[each])}" for sign, side in (("-", mine), ("+", other)) if each in side)


def write_shipped(path: Path, records: Iterable[AnyRecord]) -> None:
    """A database to be shipped: one compact file that is opened immutable, with no WAL to write beside it."""
    draft = path.with_name(f"{path.name}.draft")
    draft.unlink(missing_ok=True)
    try:
        with closing(sqlite3.connect(draft, isolation_level=None)) as connection:
            create_tables(connection)
            connection.execute("BEGIN")
            upsert(connection, records)
            connection.execute("COMMIT")
            connection.execute("VACUUM")
        draft.replace(path)
    except sqlite3.Error as error:
        raise DatabaseError(f"{path}: {error}") from None
    finally:
        draft.unlink(missing_ok=True)
