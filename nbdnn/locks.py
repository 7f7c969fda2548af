"""Locks that outlive what interrupts a program."""

from __future__ import annotations

import os
import threading


def reentrant_lock() -> threading.RLock:
    """A lock that its holder may take again, as a handler of signals does, and that is free in a forked child, in which
    the thread that held it does not exist."""
    lock = threading.RLock()
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=lock._at_fork_reinit)  # type: ignore[attr-defined]
    return lock
