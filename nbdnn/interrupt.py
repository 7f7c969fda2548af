"""Ctrl-C that cannot get lost, nor any other exception that a signal's handler raises.

Python raises it between two lines of whatever runs. Where those are a callback of the compiler, as of any C library, it
is printed and forgotten; the compilation then fails for a reason of its own, and the signal would be taken for a fault
of the kernel. And what takes over memory from one object and lets go of it in another, as the compiler does with code,
frees it twice when it is left in between: there, handlers wait.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

# Those that programs have handlers for: to ask for the handlers of all 64 takes 150 us, and every plan asks.
_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGALRM", "SIGVTALRM", "SIGPROF", "SIGUSR1", "SIGUSR2", "SIGBREAK")
_SIGNALS = [getattr(signal, name) for name in _NAMES if hasattr(signal, name)]


@contextmanager
def interruptible() -> Iterator[Callable[[], None]]:
    """A check that raises again what a handler of signals raised within the block and before the check."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    handlers = _handlers()
    raised: list[BaseException] = []
    watching = True

    def note(number: int, frame: Any) -> None:
        try:
            handlers[number](number, frame)
        except BaseException as error:
            if watching:
                raised.append(error)
            raise

    def lost(unraisable: Any) -> None:
        if not watching or unraisable.exc_value not in raised:
            hook(unraisable)

    def check() -> None:
        if raised:
            raise raised[0] from None

    hook = sys.unraisablehook
    try:
        for each in handlers:
            signal.signal(each, note)
        sys.unraisablehook = lost
        yield check
    finally:
        watching = False
        for each, handler in handlers.items():
            signal.signal(each, handler)
        sys.unraisablehook = hook


@contextmanager
def never_lost() -> Iterator[None]:
    """What a handler raises within the block is raised at its end at the latest, instead of what became of it there."""
    with interruptible() as check:
        try:
            yield
        finally:
            check()


@contextmanager
def held_back() -> Iterator[None]:
    """Handlers of signals run at the block's end, not within."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = _handlers()
    came: dict[int, Any] = {}
    holding = True

    def note(number: int, frame: Any) -> None:
        if holding:
            came[number] = frame
        else:
            handlers[number](number, frame)

    try:
        for each in handlers:
            signal.signal(each, note)
        yield
    finally:
        holding = False
        back = [partial(signal.signal, each, handler) for each, handler in handlers.items()]
        _call_all(back + [partial(handlers[number], number, frame) for number, frame in came.items()])


def _handlers() -> dict[int, Any]:
    return {each: handler for each in _SIGNALS if callable(handler := signal.getsignal(each))}


def _call_all(functions: Sequence[Callable[[], object]]) -> None:
    """The next one also after one that raises."""
    if functions:
        try:
            functions[0]()
        finally:
            _call_all(functions[1:])
