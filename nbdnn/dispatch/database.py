"""The tuning database as a call sees it: always there, never an error.

Three layers, each over the one before: the shipped measurements (read-only, part of the package), the user's file, and
the rows of this process that could not be written. Where the user's file cannot be used (unwritable, locked for long,
of a newer schema, another program's), one NbdnnWarning names it and the rest goes on; a damaged file is set aside and
a new one begun. What is only kept in memory is written with the next ``store`` that succeeds.

Rows are returned as they were measured: whether they still count (candidate and cuDNN version) is for the policy.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

from nbdnn.config import database_path as default_path
from nbdnn.dispatch.measurement import AnyRecord, LayerChoice, Measurement, checked, key, utc_now
from nbdnn.dispatch.sqlite_file import Action, DamagedFile, SqliteFile
from nbdnn.dispatch.tables import select, upsert_and_look
from nbdnn.errors import DatabaseError, warn_once

__all__ = ["SHIPPED", "Database", "LayerChoice", "Measurement", "default_path", "utc_now"]

SHIPPED = Path(__file__).with_name("data") / "shipped.db"
Mode = Literal["read-write", "read-only", "off"]
T = TypeVar("T")


class Database:
    """The measurements and layer choices of this machine.

    path: the user's file (None: ``default_path()``); created, with its folder, by the first ``store``.
    mode: 'read-only' never touches the user's file; 'off' reads no file at all. Both keep what is stored in memory.
    shipped: file under the user's (None: none).
    generation: changes with every ``store`` and ``remember`` of this object, so that memos know when to look again.
    """

    def __init__(
        self, path: str | os.PathLike[str] | None = None, mode: Mode = "read-write", shipped: Path | None = SHIPPED
    ) -> None:
        self._file = SqliteFile(default_path() if path is None else path, writable=mode == "read-write")
        self.path = self._file.path
        self.mode = mode
        layers = [] if mode == "off" else [self._file]
        if layers and shipped is not None and shipped.exists():
            layers.insert(0, SqliteFile(shipped, writable=False))
        self._layers = layers
        self._unsaved: dict[tuple[str, ...], AnyRecord] = {}
        self._generations = itertools.count(1)
        self.generation = 0

    def rows(self, device: str, problem: str) -> list[Measurement]:
        """Every sound measurement of a problem, in the order of candidate and config."""
        unsaved = list(self._unsaved.values())  # before the file: another thread may be moving them there
        query = partial(select, kind=Measurement, where="device = ? AND problem = ?", parameters=(device, problem))
        found: dict[tuple[str, ...], Measurement] = {}
        for layer in self._layers:
            found.update((key(row), row) for row in self._read(layer, query))
        found.update(
            (key(row), row) for row in unsaved if isinstance(row, Measurement) and row[:2] == (device, problem)
        )
        return [found[each] for each in sorted(found)]

    def store(self, rows: Iterable[Measurement]) -> None:
        """Keep rows, each instead of one with its key. ValueError names a field that no measurement can have."""
        self._keep([checked(row) for row in rows])

    def layer_choice(self, device: str, layer: str) -> LayerChoice | None:
        """What the layer settled on, or None."""
        if isinstance(unsaved := self._unsaved.get((device, layer)), LayerChoice):
            return unsaved
        query = partial(select, kind=LayerChoice, where="device = ? AND layer = ?", parameters=(device, layer))
        for file in reversed(self._layers):
            if found := self._read(file, query):
                return found[0]
        return None

    def remember(self, choice: LayerChoice) -> None:
        """Keep a layer's choice, instead of the one it had."""
        self._keep([checked(choice)])

    @property
    def why_unsaved(self) -> str:
        """Why what is stored would be lost with this process; '' where all of it is in the file."""
        if not self._unsaved:
            return ""
        return f"{self.path} cannot be written" if self.mode == "read-write" else f"tune.mode is {self.mode}"

    def check(self, writing: bool) -> None:
        """DatabaseError of a file of which `rows`, or writing `store`, would only warn, and go on without it."""
        self._file.check(writing)

    def close(self) -> None:
        """Close the calling thread's connection. The next use opens it again."""
        self._file.close()

    def _keep(self, records: Sequence[AnyRecord]) -> None:
        """Put records in memory, then write all that is there; where that cannot be done, it stays there."""
        if not records:
            return
        self._unsaved.update((key(record), record) for record in records)
        self.generation = next(self._generations)
        if self.mode != "read-write":
            return
        pending = dict(self._unsaved)

        def save() -> bool:
            self._file.write(partial(upsert_and_look, records=pending.values()))
            return True

        if self._attempt(self._file, save, default=False):
            for each, record in pending.items():
                if self._unsaved.get(each) is record:
                    del self._unsaved[each]

    def _read(self, file: SqliteFile, query: Action[list[T]]) -> list[T]:
        return self._attempt(file, lambda: file.find(query), default=[])

    def _attempt(self, file: SqliteFile, use: Callable[[], T], default: T) -> T:
        """`use` the file: a damaged one is set aside and a new one used; `default` where it cannot be used at all."""
        try:
            try:
                return use()
            except DamagedFile as error:
                if not file.writable:
                    raise
                damage, aside = error, file.set_aside(error.identity)
            if aside is not None:
                warn_once(file.path, f"{damage}; it is kept as {aside}, and a new one is begun")
            return use()
        except DatabaseError as error:
            warn_once(file.path, f"{error}; going on without it, what is measured is kept in memory only")
            return default
