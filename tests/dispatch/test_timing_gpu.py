"""What a GPU's stopwatch runs, by stand-ins for the device."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from nbdnn.dispatch import timing_gpu
from nbdnn.dispatch.timing_gpu import GpuStopwatch

COPIES = [(i,) for i in range(10)]


@pytest.mark.parametrize(
    ("once_us", "first_us", "host_us", "calls"),
    [
        (10, 5, 5, 150),
        (0.3, 5, 4, 4100),
        (0.3, 10, 10, 2000),  # the graph is full
        (1e3, 5, 5, 10),
        (2e3, 1999, 1999, 10),
        (2e3, 9000, 9000, 2),
        (2e4, 20001, 20001, 1),  # is launched
        (10, 1e5, 5, 150),
    ],
)
def test_samples_are_replayed_graphs_but_of_calls_with_many_launches(
    once_us: float, first_us: float, host_us: float, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph has each copy equally often, if the host launches so many calls in 20 ms; calls that are launched follow
    each other from copy to copy. One that took the host long, as while it collects garbage, does not count."""
    ends_us: list[float] = []
    launched: list[tuple[int, ...]] = []
    captured: list[list[tuple[int, ...]]] = []

    class Graph:
        def __init__(self, stream: int, record: Callable[[int], None]) -> None:
            launched.clear()
            record(stream)
            captured.append(list(launched))

        def replay(self) -> None:
            launched.extend(captured[-1])

    def timed(watch: GpuStopwatch, enqueue: Callable[[], None]) -> float:
        launched.clear()
        enqueue()
        return once_us * len(launched)

    monkeypatch.setattr(timing_gpu.driver, "Graph", Graph)
    monkeypatch.setattr(GpuStopwatch, "_timed", timed)
    operands = SimpleNamespace(pointers=COPIES, stream=7, workspace=lambda size_bytes: 0)

    def run(pointers: tuple[int, ...], *_: object) -> None:
        launched.append(pointers)
        ends_us.append(ends_us[-1] + host_us if ends_us else first_us)

    monkeypatch.setattr(timing_gpu, "perf_counter", lambda: ends_us[-1] * 1e-6 if ends_us else 0.0)
    watch = GpuStopwatch(run, operands, (), 0)  # type: ignore[arg-type]
    sampled = []
    for _ in range(3):
        watch.sample()
        sampled.append(list(launched))
    assert watch.samples_us == pytest.approx([once_us] * 3)
    if calls == 1:
        assert not captured and sampled == [[copy] for copy in COPIES[3:6]]  # three warmed up
    else:
        assert len(captured) == 1 and sampled == captured * 3 and len(captured[0]) == calls
        assert {captured[0].count(copy) for copy in COPIES} <= {calls // 10, -(-calls // 10)}
