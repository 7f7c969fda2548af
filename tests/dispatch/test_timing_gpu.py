"""What a GPU's stopwatch runs, by stand-ins for the device."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from nbdnn.dispatch import timing_gpu
from nbdnn.dispatch.timing_gpu import GpuStopwatch

COPIES = [(i,) for i in range(10)]


@pytest.mark.parametrize(("once_us", "calls"), [(10.0, 150), (0.3, 4100), (1e3, 10), (9e3, 10), (2e4, 1)])
def test_samples_are_replayed_graphs_but_of_long_calls(
    once_us: float, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph has each copy equally often; long calls follow each other from copy to copy."""
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
    watch = GpuStopwatch(lambda pointers, *_: launched.append(pointers), operands, (), 0)  # type: ignore[arg-type]
    sampled = []
    for _ in range(3):
        watch.sample()
        sampled.append(list(launched))
    assert watch.samples_us == pytest.approx([once_us] * 3)
    if calls == 1:
        assert not captured and sampled == [COPIES[3:4], COPIES[4:5], COPIES[5:6]]  # three went to warm up
    else:
        assert len(captured) == 1 and sampled == captured * 3 and len(captured[0]) == calls
        assert {captured[0].count(copy) for copy in COPIES} == {calls // 10}
