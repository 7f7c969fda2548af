"""What a GPU's stopwatch puts into its graphs, by stand-ins for the device."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from nbdnn.dispatch import timing_gpu
from nbdnn.dispatch.timing_gpu import GpuStopwatch


@pytest.mark.parametrize(
    ("kernels", "once_us", "calls"),
    [(1, 10.0, 150), (3, 0.3, 4100), (2, 1e4, 10), (1000, 1e3, 10), (6144, 1e4, 2), (100_000, 1e5, 1), (0, 10.0, 150)],
)
def test_a_replay_has_each_copy_equally_often_unless_a_call_is_thousands_of_kernels(
    kernels: int, once_us: float, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[tuple[int, ...]] = []

    class Graph:
        def __init__(self, stream: int, record: Callable[[int], None]) -> None:
            launched.clear()
            record(stream)
            self.nodes, self.recorded = kernels * len(launched), list(launched)

        def replay(self) -> None: ...

    monkeypatch.setattr(timing_gpu.driver, "Graph", Graph)
    monkeypatch.setattr(GpuStopwatch, "_timed", lambda self, enqueue: (enqueue(), 2 * once_us)[1])
    copies = [(i,) for i in range(10)]
    operands = SimpleNamespace(pointers=copies, stream=7, workspace=lambda size_bytes: 0)
    watch = GpuStopwatch(lambda pointers, *_: launched.append(pointers), operands, (), 0)  # type: ignore[arg-type]
    watch.sample()
    graph = watch._graph
    assert isinstance(graph, Graph) and len(graph.recorded) == calls
    assert graph.recorded == [copies[i % 10] for i in range(calls)]
    assert watch.samples_us == [2 * once_us / calls]
