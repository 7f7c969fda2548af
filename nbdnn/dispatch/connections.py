"""Connections to SQLite files that are safe among threads and forks.

No thread is inside SQLite during a fork, and a child neither uses nor closes what it inherits: closing would roll the
parent's transaction back in the shared memory of the WAL.
"""

from __future__ import annotations

import atexit
import os
import sqlite3
import threading
from weakref import WeakSet

Identity = tuple[int, int]  # device and inode of a file

# Held during every use of SQLite, and by a fork: its mutexes must be free in the child.
gate = threading.RLock()


class Handle:
    """A connection, the process that may use it, and the file on which it was opened."""

    def __init__(self, connection: sqlite3.Connection, identity: Identity) -> None:
        self.connection = connection
        self.identity: Identity | None = identity
        self._pid = os.getpid()
        handles.add(self)

    def usable(self, identity: Identity | None) -> bool:
        return self.identity is not None and self.identity == identity and self._pid == os.getpid()

    def close(self) -> None:
        with gate:
            if self._pid == os.getpid():
                self.connection.close()
            elif self.identity is not None:
                self.abandon()
            self.identity = None

    def abandon(self) -> None:
        """Keep an inherited connection for good: collecting it would close it."""
        import ctypes

        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.connection))
        self.identity = None

    def __del__(self) -> None:
        if self.identity is not None:
            self.close()


handles: WeakSet[Handle] = WeakSet()


def _after_fork_in_child() -> None:
    for handle in list(handles):
        handle.abandon()
    gate.release()


@atexit.register
def close_all() -> None:
    with gate:
        for handle in list(handles):
            handle.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=gate.acquire, after_in_parent=gate.release, after_in_child=_after_fork_in_child)
