"""What the dispatcher did, for tests and logs.

========  ==============================================================================
selected  a plan was made (once a plan, not once a call): where the choice came from
measured  a candidate and config was measured: its time
failed    a candidate erred, was numerically wrong or got no workspace: the reason
fallback  the named method cannot run here: what runs instead, and why
replaced  a remembered choice does not fit this shape or these filters
copied    an operand was made dense or cast
rejected  a stored row is not valid any more: why
ignored   a hint that does not apply
noisy     a measurement stayed noisy when repeated
========  ==============================================================================
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

logger = logging.getLogger("nbdnn")


class Event(NamedTuple):
    """One thing that happened: its kind (see the module), problem text, candidate id, and one sentence."""

    kind: str
    problem: str
    candidate: str
    detail: str


class _Thread(threading.local):
    logs: tuple[list[Event], ...] = ()


_thread = _Thread()
_everywhere: tuple[list[Event], ...] = ()
_lock = threading.Lock()


@contextmanager
def events(all_threads: bool = False) -> Iterator[list[Event]]:
    """Collect what happens while the block runs: ``with nbdnn.events() as log: ...``.

    Kinds: selected (once a plan, not once a call), measured, failed, fallback, replaced, copied, rejected, ignored,
    noisy; ``nbdnn.dispatch.events`` says what each means.

    Parameters
    ----------
    all_threads
        Collect the events of every thread, not only of the calling one.

    Yields
    ------
    list of Event
        It grows while the block runs, and stays as it is afterwards.
    """
    global _everywhere
    log: list[Event] = []
    if all_threads:
        with _lock:
            _everywhere = (*_everywhere, log)
    else:
        _thread.logs = (*_thread.logs, log)
    try:
        yield log
    finally:
        if all_threads:
            with _lock:
                _everywhere = tuple(other for other in _everywhere if other is not log)
        else:
            _thread.logs = tuple(other for other in _thread.logs if other is not log)


def emit(kind: str, problem: object, candidate: str = "", detail: str = "") -> None:
    """Tell every listening log; a new plan is also a line of the logger, at INFO."""
    if kind == "selected":
        logger.info("%s: %s (%s)", problem, candidate, detail)
    for log in (*_thread.logs, *_everywhere):
        log.append(Event(kind, str(problem), candidate, detail))
