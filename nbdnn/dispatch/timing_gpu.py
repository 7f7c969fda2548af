"""Timing on a GPU: captured graphs of calls, replayed, on operands that the second-level cache has forgotten.

A sample is the time between two events around one replay. A graph has no gaps between kernels for the host to fill: a
kernel of 20 us that is launched alone is seen as 40. Calls of ten thousand kernels are launched all the same: there is
an engine of cuDNN that makes them of depthwise layers, and the driver takes minutes for the graph of a few. Every copy
has its own output: what a call writes back would otherwise be in the cache for the next one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import cycle, islice
from math import ceil
from time import perf_counter
from typing import Any

import numpy as np

from nbdnn import driver
from nbdnn.array import at
from nbdnn.cached import cached_property
from nbdnn.candidate import Runner
from nbdnn.device import Gpu
from nbdnn.dispatch import tapes
from nbdnn.dispatch.timing import Given, Samples, derive, displacement, random_values
from nbdnn.problem import Problem
from nbdnn.problem_rnn import OwnTape, RnnProblem

# A replay takes about this long: events resolve 0.5 us, and the first kernel's launch is in it.
_REPLAY_US, _MAX_CALLS = 1500.0, 4096
# Of the host's time for all launches of a graph, of which there are then some thousands: 2 us each within a library.
_GRAPH_S = 20e-3
# Operands start on lines of this size, and as far beyond as the caller's do.
_LINE_BYTES = 256


class GpuOperands:
    """Copies of a problem's operands in one block of device memory, with the first copy's values on the host.

    Inputs are copies of the given ones, else random numbers; an output is not initialised, unless it is read.
    """

    def __init__(self, problem: Problem, device: Gpu, copies: int, given: Given | None = None, seed: int = 0) -> None:
        addresses = given.addresses if given else [displacement(problem, operand) for operand in problem.operands]
        starts, end = [], 0
        for operand, address in zip(problem.operands, addresses, strict=True):
            offset = address % _LINE_BYTES
            starts.append(end + offset)
            end = -(-(end + offset + operand.size_bytes) // _LINE_BYTES) * _LINE_BYTES
        self._problem, self._device, self._starts = problem, device, starts
        self._memory = driver.Memory(device.index, copies * end + _LINE_BYTES)
        self._host = np.empty(end + _LINE_BYTES, np.uint8)
        base = -(-self._memory.address // _LINE_BYTES) * _LINE_BYTES
        self.pointers = [tuple(base + copy * end + start for start in starts) for copy in range(copies)]
        self._scratch: driver.Memory | None = None
        with driver.Current(device.index):
            driver.call("cuCtxSynchronize")  # the given operands may still be on their way, on any stream
            self._fill(given, seed)
            for copy in range(1, copies):
                driver.call("cuMemcpyDtoDAsync", base + copy * end, base, end, self.stream)
            driver.call("cuStreamSynchronize", self.stream)

    def _fill(self, given: Given | None, seed: int) -> None:
        rng = np.random.default_rng(seed)
        for i, (operand, array) in enumerate(zip(self._problem.operands, self.arrays(), strict=True)):
            if not operand.size_bytes or not operand.is_read:
                continue
            if given and given.addresses[i]:
                driver.call(
                    "cuMemcpyDtoDAsync", self.pointers[0][i], given.addresses[i], operand.size_bytes, self.stream
                )
            else:
                array[...] = 0 if given else random_values(operand, rng)
                driver.upload(self.pointers[0][i], self._bytes(i), self.stream)
        for i in [] if given else derive(self._problem, self.arrays()):
            driver.upload(self.pointers[0][i], self._bytes(i), self.stream)
        if not given and self._own_tape:
            self._write_tape()

    @property
    def _own_tape(self) -> OwnTape | None:
        """What a gradient reads that only a forward can write."""
        problem = self._problem
        return problem.tape if isinstance(problem, RnnProblem) and problem.op == "rnn_bwd" else None

    def _write_tape(self) -> None:
        assert isinstance(self._problem, RnnProblem)
        tapes.write(self._problem, self._device, self.pointers[0], int(self.stream))

    @cached_property
    def stream(self) -> Any:
        return _stream(self._device.index)

    def arrays(self) -> list[np.ndarray]:
        """The first copy's values in host memory: those that were drawn, and the output after `run`."""
        base = self._host.ctypes.data
        return [
            at(base + start, operand.shape, operand.strides, operand.dtype)
            for start, operand in zip(self._starts, self._problem.operands, strict=True)
        ]

    def _bytes(self, i: int) -> np.ndarray:
        return self._host[self._starts[i] : self._starts[i] + self._problem.operands[i].size_bytes]

    def stopwatch(self, runner: Runner, scalars: tuple[float, ...], workspace_bytes: int) -> GpuStopwatch:
        return GpuStopwatch(runner, self, scalars, workspace_bytes)

    def run(self, runner: Runner, scalars: tuple[float, ...], workspace_bytes: int) -> None:
        """Run once on the first copy, whose outputs come to the host: before, they go there from it where they are
        read, and are NaN where they are not."""
        operands = self._problem.operands
        outs = [i for i, operand in enumerate(operands) if operand.role == "out" and operand.size_bytes]
        with driver.Current(self._device.index):
            if self._own_tape and self._own_tape.consumed:
                self._write_tape()
            for i in outs:
                if operands[i].is_read:
                    driver.upload(self.pointers[0][i], self._bytes(i), self.stream)
                else:
                    driver.call("cuMemsetD8Async", self.pointers[0][i], 0xFF, operands[i].size_bytes, self.stream)
            runner(self.pointers[0], scalars, self.workspace(workspace_bytes), int(self.stream))
            for i in outs:
                driver.download(self._bytes(i), self.pointers[0][i], self.stream)

    def workspace(self, size_bytes: int) -> int:
        """Address of scratch memory that all runners share; MemoryError where there is none left."""
        if not size_bytes:
            return 0
        if self._scratch is None or self._scratch.size_bytes < size_bytes:
            self._scratch = None  # the old one goes before the new one comes
            self._scratch = driver.Memory(self._device.index, size_bytes)
        return self._scratch.address


class GpuStopwatch(Samples):
    """The samples of a runner on a GPU."""

    def __init__(
        self, runner: Runner, operands: GpuOperands, scalars: tuple[float, ...], workspace_bytes: int
    ) -> None:  # fmt: skip
        super().__init__()
        self._runner, self._operands = runner, operands
        self._scalars, self._workspace_bytes = scalars, workspace_bytes
        self._copies = cycle(operands.pointers)
        self._replay: Callable[[], None] | None = None
        self._calls, self._workspace = 0, 0

    def sample(self) -> None:
        address = self._operands.workspace(self._workspace_bytes)
        if self._replay is None or address != self._workspace:
            self._workspace = address
            self._calls, self._replay = self._prepared()
        elapsed_us = self._timed(self._replay)
        self.samples_us.append(elapsed_us / self._calls)
        self.disturbed.append(False)
        self.total_s += elapsed_us * 1e-6

    def _prepared(self) -> tuple[int, Callable[[], None]]:
        """(calls of a replay, what replays them) once warm: every copy equally often, where a graph has room for it; or
        one call after the other, where it has none for one."""
        copies, stream = len(self._operands.pointers), self._operands.stream
        most = int(_GRAPH_S / min(self._launching_s() for _ in range(3)))
        if not most:
            return 1, lambda: self._enqueue(1)
        once_us = self._timed(lambda: self._enqueue(2)) / 2
        turns = max(1, ceil(min(_REPLAY_US / once_us, _MAX_CALLS) / copies))
        calls = min(turns * copies, most)
        graph = driver.Graph(stream, lambda _: self._enqueue(calls))
        self._timed(graph.replay)
        return calls, graph.replay

    def _launching_s(self) -> float:
        """Seconds of the host's for one call."""
        begun = perf_counter()
        self._enqueue(1)
        return max(perf_counter() - begun, 1e-6)

    def _enqueue(self, calls: int) -> None:
        stream = int(self._operands.stream)
        for pointers in islice(self._copies, calls):
            self._runner(pointers, self._scalars, self._workspace, stream)

    def _timed(self, enqueue: Any) -> float:
        """Microseconds of device time between events around what `enqueue` puts on the stream."""
        begin, end = _events(self._operands.stream)
        driver.call("cuEventRecord", begin, self._operands.stream)
        enqueue()
        driver.call("cuEventRecord", end, self._operands.stream)
        driver.call("cuEventSynchronize", end)
        return driver.call("cuEventElapsedTime", begin, end) * 1e3


@cache
def _stream(index: int) -> Any:
    """The stream on which this process measures on a GPU."""
    with driver.Current(index):
        return driver.call("cuStreamCreate", driver.bindings().CUstream_flags.CU_STREAM_NON_BLOCKING)


@cache
def _events(stream: Any) -> tuple[Any, Any]:
    return driver.call("cuEventCreate", 0), driver.call("cuEventCreate", 0)
