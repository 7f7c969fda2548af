"""What a thread of `softmax_rows` holds of its row: whole vectors and, where rows begin anywhere, one element more.

    row       0 1 2 | vector | vector | vector | vector | vector | 3 4        |: multiples of 16 bytes
    thread    0 1 2      0        1       ...       0        1     3 4

A row of 50257 elements of 16 bits begins anywhere: vectors that divide it have one element. Between two multiples of 16
bytes it is whole vectors, in all arrays at the same elements, since all arrays begin at such a multiple. The elements
before and behind them, less than a vector each, go to the first threads of the row one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

_WARP = 32
_SHORT_ROW_THREADS = 128  # of a block whose rows have a warp or less each


class Config(NamedTuple):
    """threads: of a block, that hold a row together; blocks: of a cluster that do; edges: vectors are of 16 bytes
    though rows begin anywhere."""

    threads: int
    blocks: int = 1
    edges: bool = False

    def __str__(self) -> str:
        return f"t{self.threads}b{self.blocks}" + "e" * self.edges


class Variant(NamedTuple):
    """What a kernel is compiled for."""

    dtype: str
    algorithm: str
    lanes: int
    vectors: int
    config: Config


class _Grid(NamedTuple):
    """The number of a thread's block in the cluster, its row, and its number among the threads of that."""

    rank: int
    row: int
    thread: int


def block_threads(config: Config) -> int:
    return config.threads if config.threads > _WARP else _SHORT_ROW_THREADS


@cache
def grid_of(config: Config):
    """Device function () -> _Grid."""
    from nbdnn.kernels.cuda import ptx

    integer, (threads, blocks, _) = ptx.INTEGER[32], config
    at_once = block_threads(config) // threads  # rows of a block
    side_bits, block_bits = threads.bit_length() - 1, blocks.bit_length() - 1

    @ptx.inline
    def grid():
        thread, block = integer(ptx.thread_x()), integer(ptx.block_x())
        first, lane = integer(thread >> side_bits), integer(thread & (threads - 1))
        rank = integer(block & (blocks - 1))
        return _Grid(rank, integer((block >> block_bits) * at_once + first), integer(rank * threads + lane))

    return grid


@cache
def _whole_vectors(v: Variant):
    """Device function (pointer, grid, fields) -> the place of a thread's vectors, of rows that are nothing else."""
    from nbdnn.kernels.cuda import ptx, ptx_tuples

    integer, place, lanes = ptx.INTEGER[32], ptx_tuples.Place, v.lanes
    step = lanes * v.config.threads * v.config.blocks

    @ptx.inline
    def placed(array, g, f):
        column = integer(g.thread * lanes)
        end = f.length if g.row < f.rows else integer(0)
        return place(array, g.row * f.length + column, step, column, integer(step), end)

    return placed


@cache
def _between_edges(v: Variant):
    """Device functions (pointer, grid, fields) -> the place of a thread's vectors, and of its element beside them."""
    from nbdnn.kernels.cuda import ptx, ptx_tuples

    integer, place, lanes = ptx.INTEGER[32], ptx_tuples.Place, v.lanes
    step, others = lanes * v.config.threads * v.config.blocks, lanes - 1

    @ptx.inline
    def before(g, f):
        """Elements of the row before the first vector."""
        return integer(-(g.row * f.length) & others)

    @ptx.inline
    def vectors(array, g, f):
        start = g.row * f.length + before(g, f)
        column = integer(g.thread * lanes)
        end = integer(f.length - before(g, f) - others) if g.row < f.rows else integer(0)
        return place(array, start + column, step, column, integer(step), end)

    @ptx.inline
    def element(array, g, f):
        first = before(g, f)
        whole = integer(integer(f.length - first) & -lanes)
        position = g.thread if g.thread < first else integer(g.thread + whole)
        end = f.length if g.row < f.rows else integer(0)
        return place(array, g.row * f.length + position, integer(0), position, integer(0), end)

    return vectors, element


class WholeVectors:
    """Builds device functions on what a thread holds of rows of whole vectors: the intrinsics of `ptx_tuples`, where a
    place is said by (pointer, grid, fields)."""

    def __init__(self, v: Variant) -> None:
        from nbdnn.kernels.cuda import ptx_tuples

        self._words, self._placed = ptx_tuples, _whole_vectors(v)
        self._held = ptx_tuples.Held(v.dtype, v.lanes, v.vectors)

    def load(self, fill: str) -> Callable:
        from nbdnn.kernels.cuda import ptx

        load_vectors, placed = self._words.load(self._held, fill), self._placed

        @ptx.inline
        def load(array, g, f):
            return load_vectors(placed(array, g, f))

        return load

    def store(self) -> Callable:
        from nbdnn.kernels.cuda import ptx

        store_vectors, placed = self._words.store(self._held), self._placed

        @ptx.inline
        def store(array, g, f, values):
            store_vectors(placed(array, g, f), values)

        return store

    def scatter(self, formula: Callable, inputs: int) -> Callable:
        from nbdnn.kernels.cuda import ptx

        scatter_vectors, placed = self._words.scatter(self._held, formula, inputs, 3 - inputs), self._placed

        @ptx.inline
        def scatter(array, g, f, a, b, c):
            scatter_vectors(placed(array, g, f), a, b, c)

        return scatter

    def widen(self) -> Callable:
        return self._words.widen(self._held)

    def hidden(self) -> Callable:
        return self._words.hidden(self._held)

    def gather(self, formula: Callable, combine: Callable, inputs: int) -> Callable:
        return self._words.gather(self._held, formula, combine, inputs)


class BetweenEdges:
    """The same of rows that begin anywhere: pairs of the vectors and the element beside them."""

    def __init__(self, v: Variant) -> None:
        from nbdnn.kernels.cuda import ptx_tuples

        self._words, self._placed = ptx_tuples, _between_edges(v)
        self._held = ptx_tuples.Held(v.dtype, v.lanes, v.vectors), ptx_tuples.Held(v.dtype, 1, 1)

    def load(self, fill: str) -> Callable:
        from nbdnn.kernels.cuda import ptx

        load_vectors, load_element = (self._words.load(held, fill) for held in self._held)
        vectors, element = self._placed

        @ptx.inline
        def load(array, g, f):
            return load_vectors(vectors(array, g, f)), load_element(element(array, g, f))

        return load

    def store(self) -> Callable:
        from nbdnn.kernels.cuda import ptx

        store_vectors, store_element = (self._words.store(held) for held in self._held)
        (vectors, element), count = self._placed, self._held[0].lanes * self._held[0].vectors

        @ptx.inline
        def store(array, g, f, values):
            store_vectors(vectors(array, g, f), values[:count])
            store_element(element(array, g, f), values[count:])

        return store

    def scatter(self, formula: Callable, inputs: int) -> Callable:
        from nbdnn.kernels.cuda import ptx

        scatter_vectors, scatter_element = (
            self._words.scatter(held, formula, inputs, 3 - inputs) for held in self._held
        )
        vectors, element = self._placed

        @ptx.inline
        def of_one(array, g, f, parts, a, b):
            scatter_vectors(vectors(array, g, f), parts[0], a, b)
            scatter_element(element(array, g, f), parts[1], a, b)

        @ptx.inline
        def of_two(array, g, f, parts, others, a):
            scatter_vectors(vectors(array, g, f), parts[0], others[0], a)
            scatter_element(element(array, g, f), parts[1], others[1], a)

        return (of_one, of_two)[inputs - 1]

    def widen(self) -> Callable:
        from nbdnn.kernels.cuda import ptx

        widen_vectors, widen_element = (self._words.widen(held) for held in self._held)

        @ptx.inline
        def widen(parts):
            return widen_vectors(parts[0]) + widen_element(parts[1])

        return widen

    def hidden(self) -> Callable:
        from nbdnn.kernels.cuda import ptx

        hide_vectors = self._words.hidden(self._held[0])

        @ptx.inline
        def hide(parts, nothing):
            return hide_vectors(parts[0], nothing), parts[1]

        return hide

    def gather(self, formula: Callable, combine: Callable, inputs: int) -> Callable:
        from nbdnn.kernels.cuda import ptx

        gather_vectors, gather_element = (self._words.gather(held, formula, combine, inputs) for held in self._held)
        both = self._words.each(combine, 2)

        @ptx.inline
        def of_one(parts, numbers):
            return both(gather_vectors(parts[0], numbers), gather_element(parts[1], numbers))

        @ptx.inline
        def of_two(parts, others, numbers):
            of_vectors = gather_vectors(parts[0], others[0], numbers)
            return both(of_vectors, gather_element(parts[1], others[1], numbers))

        return (of_one, of_two)[inputs - 1]


def held_by(v: Variant) -> WholeVectors | BetweenEdges:
    return BetweenEdges(v) if v.config.edges else WholeVectors(v)
