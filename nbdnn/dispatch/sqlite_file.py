"""One SQLite file of records, shared by threads, by processes and with crashes. Every error is a DatabaseError.

* A writable file has a lock file beside it. Whoever opens a connection holds it shared; whoever creates the file,
  switches it to WAL or renames a damaged one away holds it alone, and looks again first: so nobody attaches the -wal
  of one file to another.
* A connection belongs to one process and thread, and to the file (inode) on which it was opened: before each use the
  inode at the path is compared, so that a file which was deleted or set aside is left, and after each write, so that
  nothing is written into a file that has just been set aside.
* Waiting for other processes is done here and not by SQLite's busy handler, which Ctrl-C cannot interrupt.
* A read-only file is opened for one action at a time and leaves nothing beside it.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import sqlite3
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

from nbdnn.dispatch.connections import Handle, Identity, gate, handles
from nbdnn.dispatch.tables import APPLICATION_ID, SCHEMA, OutOfOrder, create_tables
from nbdnn.errors import DatabaseError

try:
    import fcntl
except ImportError:  # Windows: SQLite's own locks order the writers, and an open file cannot be renamed away
    fcntl = None  # type: ignore[assignment]

MAGIC = b"SQLite format 3\0"  # what every such file begins with
PATIENCE_S = 5.0  # for other processes; a commit takes about 1 ms, a checkpoint tens
_SHORT_PATIENCE_S = 0.02  # once one wait has been in vain, until a write succeeds
_COMPANIONS = ("-wal", "-shm", "-journal")

T = TypeVar("T")
Action = Callable[[sqlite3.Connection], T]


class _Contents(NamedTuple):
    identity: Identity
    size_bytes: int
    mtime_ns: int
    wal: bool


class DamagedFile(DatabaseError):
    """The file is not, or no longer, a database. `identity` is the file that was seen."""

    def __init__(self, message: str, identity: Identity) -> None:
        super().__init__(message)
        self.identity = identity


class UnwritablePlace(DatabaseError):
    """The file, or the folder for it, cannot be written; it may be readable."""


class _Again(Exception):
    """Another process holds the file, or has just replaced it: worth another attempt."""


class SqliteFile:
    """The file at `path`. Actions are functions of a connection; they run again when another process interferes."""

    def __init__(self, path: str | os.PathLike[str], writable: bool) -> None:
        # The real path, so that two names of one file share the lock file, and a chdir changes nothing.
        self.path = Path(os.path.realpath(os.path.expanduser(path)))
        self.writable = writable
        self._lock_path = Path(f"{self.path}.lock")
        self._thread = threading.local()
        self._patience_s = PATIENCE_S

    def read(self, action: Action[T], default: T) -> T:
        """What `action` finds; `default` where there is no file. Never creates it."""
        return self._patiently(lambda: self._read_once(action, default))

    def find(self, query: Action[list[T]]) -> list[T]:
        """What `query` finds; nothing where there is no file."""
        return self.read(query, [])

    def write(self, action: Action[T]) -> T:
        """Run `action` in one transaction, in a file that is created where there is none."""
        result = self._patiently(lambda: self._write_once(action))
        self._patience_s = PATIENCE_S
        return result

    def check(self, writing: bool) -> None:
        """DatabaseError of what is no database of nbdnn's; writing: also of a place where none can be begun."""
        with suppress(DamagedFile, OSError):  # the first use tells, and goes on
            self._is_prepared()
            if writing and self.writable:
                self.write(lambda connection: None)

    def set_aside(self, seen: Identity) -> Path | None:
        """Rename the damaged file and its companions; the new name, or None where another process was faster."""

        def attempt() -> Path | None:
            with self._locked(alone=True):
                if self._identity() != seen:
                    return None
                aside = Path(f"{self.path}.damaged-{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{os.getpid()}")
                while aside.exists():
                    aside = Path(f"{aside}x")
                for suffix in ("", *_COMPANIONS):
                    with suppress(FileNotFoundError):
                        os.rename(f"{self.path}{suffix}", f"{aside}{suffix}")
                return aside

        return self._patiently(attempt)

    def close(self) -> None:
        """Close the calling thread's connection; those of other threads close when the threads end."""
        if handle := getattr(self._thread, "handle", None):
            handle.close()

    # Attempts

    def _patiently(self, attempt: Callable[[], T]) -> T:
        deadline = time.monotonic() + self._patience_s
        while True:
            try:
                with gate:
                    result = attempt()
            except _Again as reason:
                if time.monotonic() >= deadline:
                    self._patience_s = _SHORT_PATIENCE_S
                    raise DatabaseError(f"{self.path} {reason}") from None
            except OSError as error:
                raise DatabaseError(f"{self.path}: {error.strerror}") from None
            else:
                return result
            time.sleep(random.uniform(0.001, 0.01))

    def _read_once(self, action: Action[T], default: T) -> T:
        if self.writable:
            with suppress(UnwritablePlace):
                if (handle := self._handle(create=False)) is None:
                    return default
                with self._explained(handle.identity):
                    return self._run(action, handle.connection)
        return self._read_and_leave_nothing(action, default)

    def _write_once(self, action: Action[T]) -> T:
        handle = self._handle(create=True)
        assert handle is not None
        connection, identity = handle.connection, handle.identity
        with self._explained(identity):
            connection.execute("BEGIN IMMEDIATE")
            try:
                result = self._run(action, connection)
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise
        if self._identity() != identity:
            raise _Again("is being replaced all the time")
        return result

    def _run(self, action: Action[T], connection: sqlite3.Connection) -> T:
        self._refuse_newer(connection)  # each time: a newer nbdnn may have converted the file meanwhile
        return action(connection)

    def _read_and_leave_nothing(self, action: Action[T], default: T) -> T:
        before = self._contents()
        if before is None:
            return default
        try:
            with self._explained(before.identity), self._passing_connection(before.wal) as connection:
                result = action(connection)
        except (DatabaseError, OSError):
            if self._contents() == before:
                raise
            raise _Again("is being changed all the time") from None
        if self._contents() != before:
            raise _Again("is being changed all the time")
        return result

    @contextmanager
    def _passing_connection(self, wal: bool) -> Iterator[sqlite3.Connection]:
        path, mode = self.path, "ro" if wal else "ro&immutable=1"
        with ExitStack() as stack:
            if wal and not os.path.exists(f"{path}-shm"):  # SQLite would make one, and leave it: work on a copy
                folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="nbdnn-"))
                for suffix in ("", "-wal"):
                    shutil.copyfile(f"{path}{suffix}", f"{folder}/copy{suffix}")
                path, mode = Path(folder, "copy"), "rw"
            connection = stack.enter_context(closing(self._connect(path, mode)))
            self._refuse_foreign(connection)
            yield connection

    # Opening

    def _handle(self, create: bool) -> Handle | None:
        """The calling thread's connection to the file at the path now; None where there is none and none is wanted."""
        identity = self._identity()
        handle: Handle | None = getattr(self._thread, "handle", None)
        if handle is not None and handle.usable(identity):
            return handle
        if handle is not None:
            handle.close()
            self._thread.handle = None
        if identity is None and not create:
            return None
        if identity is None:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
            except FileExistsError:
                raise UnwritablePlace(f"{self.path} cannot be written: {self.path.parent} is no folder") from None
        elif not self._lock_path.exists():
            self._is_prepared()  # raises for what is no database of ours, before anything is written beside it
        with self._locked(alone=False):
            handle = self._open() if self._is_prepared() else None
        if handle is None:
            with self._locked(alone=True):
                self._prepare()
                handle = self._open()
        self._thread.handle = handle
        return handle

    def _open(self) -> Handle:
        identity = self._identity()
        with self._explained(identity):
            connection = self._connect(self.path, "rw")
        if identity is None or self._identity() != identity:
            connection.close()
            raise _Again("is being replaced all the time")
        return Handle(connection, identity)

    def _is_prepared(self) -> bool:
        """Whether the file needs nothing but opening, by its header; raises where it must not be touched.

        Not by SQLite: closing the last writable connection writes the -wal into a file that turned out to be newer.
        """
        identity = self._identity()
        if identity is None:
            return False
        if any(handle.usable(identity) for handle in handles):
            return True  # found so before; and closing a second descriptor would drop the locks of the first
        is_begun = os.path.exists(f"{self.path}-journal")  # being created, or whoever did so has died
        with open(self.path, "rb", buffering=0) as file:
            header = file.read(100)
        if not header:
            return False
        if not header.startswith(MAGIC) and header.strip(b"\0") and not self._lock_path.exists():
            raise DatabaseError(f"{self.path} is not a database")  # and never was one of nbdnn's
        if len(header) < 100 or not header.startswith(MAGIC):
            raise DamagedFile(f"{self.path} is not a database", identity)
        version, application = (int.from_bytes(header[at : at + 4], "big", signed=True) for at in (60, 68))
        self._judge_version(version)
        if application or not is_begun:
            self._judge_application(application)
        if (version, application, header[18:20]) != (SCHEMA, APPLICATION_ID, b"\2\2"):
            return False
        if os.path.exists(f"{self.path}-wal"):  # which may hold a newer header
            with self._explained(identity), self._passing_connection(wal=True):
                pass
        return True

    def _prepare(self) -> None:
        """Make the file one with the tables and in WAL mode; a crash at any point leaves one that can be prepared."""
        if self._is_prepared():
            return
        identity = self._identity()
        if identity is None:
            for suffix in _COMPANIONS:
                Path(f"{self.path}{suffix}").unlink(missing_ok=True)
        with self._explained(identity), closing(self._connect(self.path, "rwc")) as connection:
            if connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0:
                create_tables(connection)
            self._refuse_foreign(connection)
            connection.execute("PRAGMA journal_mode=WAL")  # stays as it was on file systems without shared memory

    def _connect(self, path: Path, mode: str) -> sqlite3.Connection:
        connection = sqlite3.connect(
            f"{path.as_uri()}?mode={mode}", uri=True, timeout=0, isolation_level=None, check_same_thread=False
        )
        try:
            self._refuse_newer(connection)
            connection.execute("PRAGMA synchronous=NORMAL")  # WAL: survives kill -9; a power cut loses the last rows
        except BaseException:
            connection.close()
            raise
        # Rotten text must not fail the whole query: its checksum drops that row.
        connection.text_factory = lambda text: text.decode(errors="replace")
        return connection

    @contextmanager
    def _locked(self, alone: bool) -> Iterator[None]:
        if fcntl is None:
            yield
            return
        try:
            descriptor = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise UnwritablePlace(f"{self.path} cannot be written: {error.strerror}") from None
        try:
            try:
                fcntl.flock(descriptor, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
            except BlockingIOError:
                raise _Again("is locked by another process") from None
            yield
        finally:
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # a child forked meanwhile holds the descriptor too
            os.close(descriptor)

    # Facts and errors

    def _identity(self) -> Identity | None:
        """(device, inode) of the file at the path now; None where there is none."""
        try:
            found = os.stat(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        if not stat.S_ISREG(found.st_mode):
            raise DatabaseError(f"{self.path} is not a file")
        return found.st_dev, found.st_ino

    def _contents(self) -> _Contents | None:
        """What changes when the file does; None where there is none, or an empty one."""
        if (identity := self._identity()) is None or (found := os.stat(self.path)).st_size == 0:
            return None
        return _Contents(identity, found.st_size, found.st_mtime_ns, os.path.exists(f"{self.path}-wal"))

    def _refuse_newer(self, connection: sqlite3.Connection) -> None:
        self._judge_version(connection.execute("PRAGMA user_version").fetchone()[0])

    def _judge_version(self, version: int) -> None:
        if version > SCHEMA:
            raise DatabaseError(f"{self.path} is of schema {version}, made by a newer nbdnn; this one knows {SCHEMA}")
        if version < 0:
            raise DatabaseError(f"{self.path} is of schema {version}, which no nbdnn makes")

    def _refuse_foreign(self, connection: sqlite3.Connection) -> None:
        self._judge_application(connection.execute("PRAGMA application_id").fetchone()[0])

    def _judge_application(self, application: int) -> None:
        if application != APPLICATION_ID:
            raise DatabaseError(f"{self.path} is a database of another program")

    @contextmanager
    def _explained(self, identity: Identity | None) -> Iterator[None]:
        """Turn what SQLite raises into what can be done about it."""
        try:
            yield
        except (sqlite3.Error, UnicodeDecodeError) as error:  # UnicodeDecodeError: a message that quotes rotten text
            code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
            if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL):
                raise _Again("is locked by another process") from None
            rotten = isinstance(error, OutOfOrder | UnicodeDecodeError) or code in (
                sqlite3.SQLITE_CORRUPT,
                sqlite3.SQLITE_NOTADB,
            )
            if (rotten or str(error).startswith("no such ")) and identity is not None:
                raise DamagedFile(f"{self.path} is damaged: {error}", identity) from None
            if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM):
                effective = os.access in os.supports_effective_ids
                if identity is not None and not os.access(self.path, os.R_OK, effective_ids=effective):
                    raise UnwritablePlace(f"{self.path} cannot be read: {os.strerror(errno.EACCES)}") from None
                raise UnwritablePlace(f"{self.path} cannot be written: {error}") from None
            raise DatabaseError(f"{self.path}: {error}") from None
