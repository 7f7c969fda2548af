"""Ctrl-C that cannot get lost.

Python raises KeyboardInterrupt between two lines of whatever runs. Where those are a callback of the compiler, as of
any C library, it is printed and forgotten; the compilation then fails for a reason of its own, and Ctrl-C would be
taken for a fault of the kernel.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def interruptible() -> Iterator[Callable[[], None]]:
    """A check that raises again what the program's handler of Ctrl-C raised within the block and before the check."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield lambda: None
        return
    raised: list[BaseException] = []

    def note(number: int, frame: Any) -> None:
        try:
            handler(number, frame)
        except BaseException as error:
            raised.append(error)
            raise

    def lost(unraisable: Any) -> None:
        if unraisable.exc_value not in raised:
            hook(unraisable)

    def check() -> None:
        if raised:
            raise raised[0] from None

    hook = sys.unraisablehook
    signal.signal(signal.SIGINT, note)
    sys.unraisablehook = lost
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, handler)
        sys.unraisablehook = hook


@contextmanager
def never_lost() -> Iterator[None]:
    """Ctrl-C within the block raises at its end at the latest, instead of what became of it there."""
    with interruptible() as check:
        try:
            yield
        finally:
            check()
