"""How blocks that share the steps of some images pass vectors to each other, through global memory.

    counters   one for each group of blocks and each of its pieces, in lines of their own: how many blocks have told
    passed     (group, piece, 2, image, pitch)   what they told, of a step in the one and of the next in the other

Nobody who computes waits for memory: one warp of a block tells a piece when all that compute have written their part of
it (a barrier `done` of the block's), another waits until all blocks of the group have told it, and copies the whole to
shared memory (a barrier `full`). Those that compute wait for what they want to read alone, so that they are not all at
the same place of a step. Who tells what a step needs has copied what the step before needed, so two buffers are enough.
Blocks wait for each other: all are on the GPU at once. Source: own.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from nbdnn.kernels.cuda.launch import Launch
from nbdnn.kernels.cuda.rnn_plan import Place, Workspace
from nbdnn.kernels.cuda.zeros import zeros

_LINE_WORDS = 32
_CLEAR_THREADS = 128
HELPERS = 4  # warps of a block that compute nothing: as many as share out registers, of which two do something
BARRIER_BYTES = 8
_REGISTERS_OF_LANE, _MOST_REGISTERS, _HELPERS_REGISTERS = 512, 255, 40  # of a scheduler's lane; of a thread


class Passing(NamedTuple):
    """The memory of all groups: both together so many elements."""

    counters: Place
    passed: Place
    elements: int

    @classmethod
    def take(cls, workspace: Workspace, groups: int, pieces: int, piece_elems: int) -> Passing:
        """piece_elems: what a group passes of a piece."""
        count, before = groups * pieces, workspace.size_bytes
        counters = workspace.take(count * _LINE_WORDS, "f32")
        passed = workspace.take(2 * count * piece_elems, "f32")
        return cls(counters, passed, (workspace.size_bytes - before) // 4)

    def clear(self) -> Launch:
        """Sets the counters to 0, the bits of 0.0, and what lies behind a vector, which is copied with its end."""
        return zeros(self.counters.pointer, self.elements, "f32", 32, _CLEAR_THREADS, 4)


def registers_of(warps: int) -> tuple[int, int]:
    """Of a thread, as a kernel with so many computing warps and the helpers is compiled, and as it computes: what the
    helpers do not need is shared out among the others, by fours."""
    groups = (warps + HELPERS) / 4
    compiled = min(_MOST_REGISTERS, int(_REGISTERS_OF_LANE / groups) // 8 * 8)
    given = int((compiled * groups - _HELPERS_REGISTERS) / (warps / 4)) // 8 * 8
    return (compiled, given) if given < _MOST_REGISTERS else (compiled, compiled)


@cache
def registers(warps: int):
    """Device functions of a warp that computes, and of a helper: takes or gives registers."""
    from nbdnn.kernels.cuda import ptx, ptx_wgmma

    compiled, given = registers_of(warps)
    takes = given > compiled
    increase = ptx_wgmma.registers(given, True) if takes else None
    decrease = ptx_wgmma.registers(_HELPERS_REGISTERS, False)

    @ptx.inline
    def more():
        if takes:
            increase()

    @ptx.inline
    def fewer():
        if takes:
            decrease()

    return more, fewer


class Barriers(NamedTuple):
    """Of a block, a pair for each of its pieces: shared bytes before them, and how many warps compute."""

    at: int
    pieces: int
    warps: int

    @property
    def end(self) -> int:
        return self.at + 2 * BARRIER_BYTES * self.pieces


@cache
def helpers(barriers: Barriers, images: int, pitch: int):
    """Device functions: (shared), of one thread, initialises the barriers; and (helper, counters, passed, group, peers,
    shared, steps), of the helpers' threads from 0 on, tells what was written, and copies what was told to the beginning
    of shared memory. images: of a piece. pitch: of their elements, in both.
    """
    from nbdnn.kernels.cuda import ptx, ptx_grid, ptx_tma

    integer, u32, pieces, warps = ptx.INTEGER[32], ptx.WORD, barriers.pieces, barriers.warps
    piece_elems, piece_bytes = images * pitch, ptx.INTEGER[32](images * pitch * 4)
    full_at, done_at = barriers.at, barriers.at + BARRIER_BYTES * pieces

    @ptx.inline
    def prepare(shared):
        piece = integer(0)
        while piece < pieces:
            ptx_tma.initialise(u32(shared + u32(full_at + piece * BARRIER_BYTES)), integer(1))
            ptx_tma.initialise(u32(shared + u32(done_at + piece * BARRIER_BYTES)), integer(warps))
            piece = integer(piece + 1)
        ptx_tma.publish_barriers()

    @ptx.inline
    def tell(counters, group, shared, steps):
        step = integer(0)
        while step + 1 < steps:
            piece = integer(0)
            while piece < pieces:
                ptx_tma.wait(u32(shared + u32(done_at + piece * BARRIER_BYTES)), integer(step & 1))
                ptx_grid.arrive(counters, integer((group * pieces + piece) * _LINE_WORDS))
                piece = integer(piece + 1)
            step = integer(step + 1)

    @ptx.inline
    def fetch(counters, passed, group, peers, shared, steps):
        step = integer(1)
        while step < steps:
            piece = integer(0)
            while piece < pieces:
                number, full = integer(group * pieces + piece), u32(shared + u32(full_at + piece * BARRIER_BYTES))
                while ptx_grid.arrived(counters, integer(number * _LINE_WORDS)) < peers * step:
                    pass
                ptx_tma.writes_before_copies()
                ptx_tma.expect_bytes(full, piece_bytes)
                source = ptx.address(passed, integer((number * 2 + (step & 1)) * piece_elems))
                ptx_tma.copy_bytes(u32(shared + u32(piece * piece_bytes)), source, piece_bytes, full)
                piece = integer(piece + 1)
            step = integer(step + 1)

    @ptx.inline
    def help_others(helper, counters, passed, group, peers, shared, steps):
        if helper == 0:
            tell(counters, group, shared, steps)
        if helper == 32:
            fetch(counters, passed, group, peers, shared, steps)

    return prepare, help_others


@cache
def waits(barriers: Barriers):
    """Device functions (shared, piece, step) waits for what others told for a step, which the first has; and (shared,
    piece, lane): a warp has read it, and written what it passes."""
    from nbdnn.kernels.cuda import ptx, ptx_tma

    integer, u32 = ptx.INTEGER[32], ptx.cuda.types.uint32
    full_at, done_at = barriers.at, barriers.at + BARRIER_BYTES * barriers.pieces

    @ptx.inline
    def wait_for(shared, piece, step):
        if step > 0:
            ptx_tma.wait(u32(shared + u32(full_at + piece * BARRIER_BYTES)), integer((step - 1) & 1))

    @ptx.inline
    def have_done(shared, piece, lane):
        ptx_tma.reads_before_copies()
        ptx.cuda.syncwarp()
        if lane == 0:
            ptx_tma.arrive(u32(shared + u32(done_at + piece * BARRIER_BYTES)))

    return wait_for, have_done
