"""Handlers of signals around blocks that they must not leave halfway."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest

from nbdnn.interrupt import held_back


class Heard(Exception):
    """What the handlers here raise."""


@pytest.fixture
def heard() -> Iterator[list[int]]:
    """The signals that handlers were called for, of SIGINT and SIGTERM; each raises."""
    signals: list[int] = []

    def hear(number: int, frame: object) -> None:
        signals.append(number)
        raise Heard(number)

    before = {each: signal.signal(each, hear) for each in (signal.SIGINT, signal.SIGTERM)}
    yield signals
    for each, handler in before.items():
        signal.signal(each, handler)


def test_handlers_run_at_the_end(heard: list[int]) -> None:
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.raises(Heard), held_back():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT):
            signal.raise_signal(number)
        assert not heard
    assert sorted(heard) == [signal.SIGINT, signal.SIGTERM]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers


def test_an_error_of_the_block_is_not_lost(heard: list[int]) -> None:
    with pytest.raises(Heard) as raised, held_back():
        signal.raise_signal(signal.SIGINT)
        raise ValueError("of the block")
    assert str(raised.value.__context__) == "of the block"


def test_other_threads_have_no_handlers(heard: list[int]) -> None:
    """Python calls handlers in its main thread alone, whose they are."""
    handlers, seen = signal.getsignal(signal.SIGINT), []

    def run() -> None:
        with held_back():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [handlers]
