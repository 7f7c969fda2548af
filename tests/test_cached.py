"""A property that is worked out once, also in a child that is forked while another thread works it out."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass

from nbdnn.cached import cached_property


@dataclass(frozen=True)
class Worked:
    work: Callable[[], int]

    @cached_property
    def out(self) -> int:
        """What work says."""
        return self.work()


def test_it_is_worked_out_once_an_instance() -> None:
    counts = iter(range(9))
    first, second = Worked(lambda: next(counts)), Worked(lambda: next(counts))
    assert [first.out, first.out, second.out, first.out] == [0, 0, 1, 0]
    assert Worked.out.__doc__ == "What work says."


def test_a_class_adds_to_what_its_base_says() -> None:
    class Twice(Worked):
        @cached_property
        def out(self) -> int:
            return 2 * super().out

    twice = Twice(lambda: 3)
    assert (twice.out, twice.out) == (6, 6)


def test_a_child_does_not_wait_for_another_thread() -> None:
    begun, goes_on = threading.Event(), threading.Event()

    def slowly() -> int:
        begun.set()
        goes_on.wait(60)
        return 1

    slow = Worked(slowly)
    thread = threading.Thread(target=lambda: slow.out)
    thread.start()
    begun.wait(60)
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # ends a child that waits for ever
        os._exit(Worked(lambda: 7).out)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    goes_on.set()
    thread.join()
    assert code == 7
    assert slow.out == 1
