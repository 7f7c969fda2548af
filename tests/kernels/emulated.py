"""A GPU in plain Python, one block at a time, or all of them in turns where they wait for each other: kernels run as
they are written, with stand-ins for `ptx` and its like.

Threads take turns. Each runs until it meets a barrier, or an instruction that all lanes of its warp have to come to,
then the next: so the first is as far ahead of the last as it may be, and a barrier that is missing is seen as a read of
what was not written. Memory that nobody wrote is NaN; every address is checked, also its alignment. Sums of small
integers are exact, so what is computed here is what a GPU computes. What this cannot show is what the compiler makes
of a kernel. `emulated_ptx.py` has the words that a kernel is written in.
"""

from __future__ import annotations

import struct
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from itertools import islice, product
from math import nan
from typing import Any

import greenlet
import numpy as np
from guarded import NUMPY_DTYPE, values

from nbdnn import reference, reference_conv, tolerance
from nbdnn.device import Gpu
from nbdnn.kernels.cuda.launch import NULL, WORKSPACE, Launch, LaunchedCandidate
from nbdnn.problem import ANY_ITEMSIZE, Operand, Problem
from nbdnn.problem_conv import ConvProblem

# A word is what 32 bits of memory hold: an integer of so many bits, or the float that was stored there.
Word = int | float
SCALARS = (2.0, -1.0)  # alpha and beta

_SHARED_AT = 1024  # the first address of shared memory, so that 0 is none
_ALIGN_WORDS = 32


def float_of(word: Word) -> float:
    return word if type(word) is float else struct.unpack("=f", struct.pack("=I", word))[0]


class Memory:
    """Elements in the order of memory, smaller ones than words together; what is not in it can be neither read nor
    written.

    words: shared with whoever else sees them, of which the first is `first`. align: of that one, in bytes.
    """

    def __init__(self, dtype: str, words: list[Word], count: int, align: int, first: int = 0) -> None:
        self.dtype, self.words, self.count, self.first = dtype, words, count, first
        self.of_a_word = 4 // ANY_ITEMSIZE[dtype]
        self.bits, self.mask = 32 // self.of_a_word, (1 << 32 // self.of_a_word) - 1
        self.align_elems = max(1, align // ANY_ITEMSIZE[dtype])
        self.written: list[int] = []

    def __getitem__(self, index: int) -> Word:
        assert 0 <= index < self.count, f"read of element {index} of {self.count}"
        if self.of_a_word == 1:
            return self.words[self.first + index]
        at, of_word = divmod(index, self.of_a_word)
        return self.words[self.first + at] >> self.bits * of_word & self.mask  # type: ignore[operator]

    def __setitem__(self, index: int, value: Word) -> None:
        assert 0 <= index < self.count, f"write of element {index} of {self.count}"
        self.written.append(index)
        if self.of_a_word == 1:
            self.words[self.first + index] = value
            return
        at, of_word = divmod(index, self.of_a_word)
        before, shift = self.words[self.first + at], self.bits * of_word
        kept = 0xFFFFFFFF if type(before) is float else before
        self.words[self.first + at] = kept & ~(self.mask << shift) | value << shift  # type: ignore[operator]

    def load(self, index: int, count: int, aligned: int = 0) -> list[Word]:
        """So many words, of as many that are aligned, moved by one instruction."""
        at = self._place(index, count, aligned or count)
        return self.words[at : at + count]

    def store(self, index: int, words: Sequence[Word]) -> None:
        at = self._place(index, len(words), len(words))
        self.words[at : at + len(words)] = words
        self.written += range(index, index + len(words) * self.of_a_word)

    def _place(self, index: int, count: int, aligned: int) -> int:
        elements, step = count * self.of_a_word, aligned * self.of_a_word
        assert not count or 0 <= index <= self.count - elements, f"{elements} elements at {index} of {self.count}"
        assert index % step == 0 == self.align_elems % step, (
            f"{aligned} words at {index}, pointers to {self.align_elems}"
        )
        return self.first + index // self.of_a_word

    def view(self, dtype: str, offset_bytes: int) -> Memory:
        """The same memory from there on, as elements of another type."""
        assert offset_bytes % 256 == 0 and self.of_a_word == 1
        count = (self.count - offset_bytes // 4) * 4 // ANY_ITEMSIZE[dtype]
        return Memory(dtype, self.words, count, 256, offset_bytes // 4)

    def values(self) -> np.ndarray:
        """The elements, as float64."""
        words = self.words[self.first : self.first + -(-self.count // self.of_a_word)]
        if self.of_a_word == 1:
            return np.array([float_of(word) for word in words], np.float64)
        return np.array(words, np.uint32).view(NUMPY_DTYPE[self.dtype])[: self.count].astype(np.float64)


def memory(dtype: str, flat: np.ndarray, align: int = 256) -> Memory:
    """Of so many values."""
    stored = flat.astype(NUMPY_DTYPE[dtype])
    if dtype == "f32":
        return Memory(dtype, stored.tolist(), stored.size, align)
    even = np.resize(stored, stored.size + stored.size % 2) if stored.size else stored
    return Memory(dtype, even.view(np.uint32).tolist(), stored.size, align)


def operand_memory(operand: Operand, value: np.ndarray | None, align: int) -> Memory:
    """Of an operand's values, in the order of its memory; of NaN where there are none."""
    flat = np.full(operand.size_elems, nan)
    if value is not None:
        strides_bytes = tuple(flat.itemsize * stride for stride in operand.strides)
        np.lib.stride_tricks.as_strided(flat, operand.shape, strides_bytes)[...] = value
    return memory(operand.dtype, flat, align)


class Thread:
    """A thread of a block. waits_for: '' while it may run; 'block'; 'turn' where it looks at a barrier in memory again
    and again; the number of the block's first threads that have to meet; how many meet at a barrier of theirs; or the
    instruction that its warp comes to."""

    def __init__(self, number: int, body: Callable[[], None]) -> None:
        self.number, self.waits_for = number, ""
        self.brought: Any = None  # to that instruction, and what it makes of what all lanes bring
        self.answer: Any = None
        self.started: list[Callable[[], None]] = []  # copies, and those of each group that was committed
        self.groups: list[list[Callable[[], None]]] = []
        self.arrivals = 0  # at barriers of its cluster
        self.sees_writes = False  # of others, when it starts a bulk copy
        self.static_words = 0  # of shared memory, that its arrays took
        self._others = greenlet.getcurrent()
        self._own = greenlet.greenlet(body)

    @property
    def finished(self) -> bool:
        return self._own.dead

    def resume(self) -> None:
        """Runs it until it waits, or ends."""
        self.waits_for = ""
        self._own.switch()

    def wait(self, what: str, brought: Any = None) -> Any:
        """Called by the thread itself."""
        self.waits_for, self.brought = what, brought
        self._others.switch()
        return self.answer


class Block:
    """The threads and the shared memory of one block of a launch.

    early: asynchronous copies are done at once, else when they are waited for. A kernel that is right in both neither
    reads what may not have arrived nor overwrites what may still be read.
    """

    def __init__(self, early: bool = False) -> None:
        self.early = early
        self.place = (0, 0, 0)
        self.now: Thread
        self.collectives: dict[str, Callable[[list], Sequence]] = {}
        self.shared: list[Word] = []
        self.moved = False
        # Of a block's warp, places whose loads may be on their way, and lanes that have waited for theirs.
        self.reading: defaultdict[tuple, set[int]] = defaultdict(set)
        self.waited: defaultdict[tuple, set[int]] = defaultdict(set)
        self.together: list[tuple[tuple[int, int, int], list[Word], list[Thread]]] = []  # place, shared memory, threads
        self.arrivals = 0  # of all threads at barriers of clusters
        self._dynamic_words = 0

    def run(self, kernel: Callable, arguments: list, launch: Launch, places: Sequence[tuple[int, int, int]]) -> None:
        """The blocks at these places of the grid, in turns, from barrier to barrier."""
        self._dynamic_words = -(-launch.dynamic_shared_bytes // 4)
        numbers, body = range(launch.source.threads), lambda: kernel(*arguments)
        blocks = [(place, [nan] * self._dynamic_words, [Thread(i, body) for i in numbers]) for place in places]
        self.together, self.arrivals = blocks, 0
        self.reading.clear()
        while blocks:
            self.moved = False
            for self.place, self.shared, threads in blocks:
                for first in range(0, len(threads), 32):
                    self._run_warp(threads[first : first + 32])
                self._release(threads)
            assert self.moved, f"all wait: {Counter(each.waits_for for _, _, threads in blocks for each in threads)}"
            blocks = [block for block in blocks if not all(thread.finished for thread in block[2])]

    def _run_warp(self, warp: list[Thread]) -> None:
        """Until its lanes are at a barrier or at their end."""
        while True:
            for self.now in warp:
                if not self.now.finished and self.now.waits_for in ("", "turn"):
                    self.now.resume()
                    self.moved |= self.now.waits_for != "turn"
            waits = {thread.waits_for for thread in warp if not thread.finished}
            if "turn" in waits or waits <= {""}:
                return
            assert len(waits) == 1, f"one warp at {waits}"
            (what,) = waits
            if what not in self.collectives:
                return
            answers = self.collectives[what]([thread.brought for thread in warp])
            for thread, answer in zip(warp, answers, strict=True):
                thread.answer, thread.waits_for = answer, ""

    def _release(self, threads: list[Thread]) -> None:
        """Those that have all met."""
        waits = {thread.waits_for for thread in threads}
        for what in waits - {"", "turn", *self.collectives}:
            if " at " in what:
                party = [thread for thread in threads if thread.waits_for == what]
                count = int(what.split()[0])
                assert len(party) <= count, f"{len(party)} threads at a barrier of {count}"
                if len(party) < count:
                    continue
            else:
                party = threads if what == "block" else threads[: int(what)]
            together = all(thread.waits_for == what and not thread.finished for thread in party)
            assert together or not any(thread.finished for thread in party), "some threads left before a barrier"
            if together:
                self.moved = True
                for thread in party:
                    thread.waits_for = ""

    @property
    def warp(self) -> tuple:
        """The one that runs now."""
        return self.place, self.now.number // 32

    def dynamic_shared(self) -> int:
        return _SHARED_AT

    def static_shared(self, words: int) -> int:
        """The address of an array: the same to all threads, which ask in the same order."""
        before = -(-self._dynamic_words // _ALIGN_WORDS) * _ALIGN_WORDS
        start = before + -(-self.now.static_words // _ALIGN_WORDS) * _ALIGN_WORDS
        self.now.static_words = start + words - before
        self.shared += [nan] * (start + words - len(self.shared))
        return _SHARED_AT + 4 * start

    def place_of(self, address: int, count: int) -> int:
        """Of `count` words, moved by one instruction, among those of shared memory."""
        at = address - _SHARED_AT
        assert 0 <= at <= 4 * (len(self.shared) - count), f"shared address {at} of {4 * len(self.shared)}"
        assert at % (4 * count) == 0, f"{count} words at shared address {at}"
        return at >> 2


def run(block: Block, launch: Launch, operands: Sequence[Memory], workspace: Memory, scalars: tuple = SCALARS) -> None:
    """All blocks of a launch: cluster by cluster, or all at once where that is what it asks for."""
    kernel, types = launch.source.builder(*launch.source.specialised_on)
    records = [each for each in types if hasattr(each, "_make")]
    integers = iter(launch.integers)
    fields = [record._make(islice(integers, len(record._fields))) for record in records]

    def pointer(place: int, dtype: str) -> Memory | None:
        if place == NULL:
            return None
        return operands[place] if place >= 0 else workspace.view(dtype, WORKSPACE - place)

    maps = [tuple((tensor, pointer(tensor.place, tensor.dtype)) for tensor in launch.maps)] if launch.maps else []
    pointers = map(pointer, launch.pointers, types[len(maps) :])
    arguments = [*maps, *pointers, *(scalars if launch.scalars else ()), *fields]
    places = [(x, y, z) for z, y, x in product(*map(range, reversed(launch.grid)))]
    at_once = len(places) if launch.cooperative else launch.cluster  # blocks of a cluster are neighbours along x
    for first in range(0, len(places), at_once):
        block.run(kernel, arguments, launch, places[first : first + at_once])


def launched(
    candidate: LaunchedCandidate,
    problem: Problem,
    config: Any,
    given: dict[str, np.ndarray],
    device: Gpu,
    block: Block,
    scalars: tuple[float, ...] = SCALARS,
) -> list[Memory]:
    """The operands after all launches, with a workspace that was NaN."""
    operands = [operand_memory(operand, given.get(operand.name), problem.align) for operand in problem.operands]
    workspace = memory("f32", np.full(candidate.workspace_bytes(problem, config, device) // 4, nan))
    for launch in candidate.launches(problem, config, device):
        run(block, launch, operands, workspace, scalars)
    return operands


def result(
    candidate: LaunchedCandidate, problem: ConvProblem, config: Any, device: Gpu, block: Block
) -> tuple[list[float], list[float]]:
    """(the output's elements, those expected) of all launches on small integers, from a workspace of NaN.

    Every element of the output was written once, and nothing else but the workspace.
    """
    assert candidate.supports(problem, device).ok
    given = values(problem, "integers")
    operands = launched(candidate, problem, config, given, device, block)
    for operand, used in zip(problem.operands, operands, strict=True):
        assert sorted(used.written) == (list(range(used.count)) if operand.role == "out" else [])
    (place,) = (i for i, operand in enumerate(problem.operands) if operand.role == "out")
    expected = operand_memory(problem.operands[place], reference_conv.compute(problem, given, SCALARS), 4)
    return operands[place].values().tolist(), expected.values().tolist()


def assert_near(
    candidate: LaunchedCandidate,
    problem: Problem,
    config: Any,
    given: dict[str, np.ndarray],
    device: Gpu,
    block: Block,
    scalars: tuple[float, ...] = (),
) -> None:
    """All launches on operands and a workspace of NaN: the outputs are the reference's, and no input is written."""
    operands = launched(candidate, problem, config, given, device, block, scalars or SCALARS)
    expected = reference.samples(problem, given, scalars, None)
    for operand, used in zip(problem.operands, operands, strict=True):
        if operand.role == "in":
            assert not used.written
            continue
        elements = used.values()
        strides = tuple(elements.itemsize * stride for stride in operand.strides)
        found = np.lib.stride_tricks.as_strided(elements, operand.shape, strides)
        roundings = candidate.roundings(problem, device)
        fault = tolerance.fault(problem, candidate, found, expected[operand.name], roundings=roundings)
        assert not fault, f"{candidate.id}, {config}, {operand.name}: {fault}"
