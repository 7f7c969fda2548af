"""Recurrent networks on a GPU with R shared out over all multiprocessors: one launch a layer.

    group     blocks that have all units of some images and one direction; each some units, in registers
    warp      `units` units with all their gates; a lane has of each row of R the columns 4 (32 i + lane) to + 3
    piece     images that a warp computes at once: as many as leave each lane one gate of one unit and image

A step of a piece: h from shared memory, products, exchanges that leave each lane its sum, its activation there, the
gates to the four lanes of a unit and image; h to global memory, from where all blocks of the group copy it
(`rnn_passing.py`) while they compute other pieces. The inputs' sums of all steps are there (`rnn_product.py`) and are
copied to shared memory some steps ahead, each thread its own.

What bounds it are the FMA units: a multiprocessor has G H^2 / 128 cycles for each of its images, over the blocks of a
group; and while there are few pieces the way around, 1.5 us. Sums in float32, in one order: a lane's, then by
exchanges; those of inputs as `rnn_product.py` says. Source: own; weights that stay: Diamos et al., Persistent RNNs
(ICML 2016).
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from nbdnn.device import Gpu
from nbdnn.kernels.cuda import rnn_grid_plan as plan
from nbdnn.kernels.cuda import rnn_layers
from nbdnn.kernels.cuda.compile import Source
from nbdnn.kernels.cuda.launch import Launch
from nbdnn.kernels.cuda.rnn_grid_plan import VALUES, Config, Grid, Layout, Round
from nbdnn.kernels.cuda.rnn_passing import HELPERS, Barriers, Passing
from nbdnn.kernels.cuda.rnn_plan import ForwardMemory, gates_of, of_steps, weights
from nbdnn.problem_rnn import SAVED, RnnProblem

_CYCLES = 310  # of a warp's piece beside its multiply-adds: a fit (H200)
RING = 4  # steps whose sums are in shared memory or on their way
_LANES = 32  # of a row
_GATE_LANES = 4  # lanes of a unit and image
_UNITS = (1, 2, 4)


class Variant(NamedTuple):
    """What a kernel is compiled for.

    units: of a warp. warps: of a block, that compute. quads: of 4 columns, of a lane. pieces: of a block. out, y: which
    of the outputs are written.
    """

    mode: str
    dtype: str
    training: bool
    out: bool
    y: bool
    units: int
    warps: int
    quads: int
    pieces: int

    @property
    def threads(self) -> int:
        """That compute."""
        return 32 * self.warps

    @property
    def images(self) -> int:
        """Of a piece."""
        return VALUES // (_GATE_LANES * self.units)

    @property
    def pitch(self) -> int:
        """Columns of R with those that are zeros."""
        return 4 * self.quads * _LANES

    @property
    def state_at(self) -> int:
        """Bytes of shared memory before each thread's states of its pieces: h of all pieces."""
        return self.pieces * self.images * self.pitch * 4

    @property
    def ring_at(self) -> int:
        return self.state_at + self.pieces * self.threads * 4

    @property
    def barriers(self) -> Barriers:
        return Barriers(self.ring_at + RING * self.pieces * self.threads * 4, self.pieces, self.warps)

    @property
    def shared_bytes(self) -> int:
        return self.barriers.end


class Fields(NamedTuple):
    """First elements in the block of parameters, and what a second direction adds; of states, outputs and tape. peers:
    blocks of a group. slabs: groups of a direction; first_slab: of those of all launches."""

    steps: int
    batch: int
    hidden: int
    directions: int
    recurrent: int
    next_matrices: int
    bias: int
    next_biases: int
    state: int
    out: int
    saved: int
    peers: int
    slabs: int
    first_slab: int


def forward_kernel(*specialised_on):
    """Pointers: sums, w, hx, cx, outputs, y, what is saved, hy, cy, what blocks pass to each other, counters."""
    from nbdnn.kernels.cuda import ptx, ptx_products, ptx_rnn, ptx_tile
    from nbdnn.kernels.cuda.rnn_exchange import gates_of_threads, sums_of_warp
    from nbdnn.kernels.cuda.rnn_gates import given_or_zero
    from nbdnn.kernels.cuda.rnn_passing import helpers, registers, waits

    v = Variant(*specialised_on)
    gates, kept, units, quads, pieces, images = gates_of(v.mode), SAVED[v.mode], v.units, v.quads, v.pieces, v.images
    integer, real, u32 = ptx.INTEGER[32], ptx.REAL["f32"], ptx.cuda.types.uint32
    widen, narrow, zero = ptx.WIDEN[v.dtype], ptx.NARROW[v.dtype], real(0.0)
    is_lstm, is_gru, training, has_out, has_y = v.mode == "lstm", v.mode == "gru", v.training, v.out, v.y
    warps, threads, pitch, state_at, ring_at = v.warps, v.threads, v.pitch, v.state_at, v.ring_at
    store, load, bits_of = ptx_tile.STORE_SHARED[1], ptx_tile.LOAD_SHARED[1], ptx_tile.word_of
    copy, commit, float_of = ptx_tile.COPY_ASYNC[4], ptx_tile.copy_async_commit, ptx_tile.float_of
    wait = ptx_tile.copy_async_wait((RING - 1) * v.pieces - 1)
    multiply = ptx_products.rows_by_images(units, gates, quads, images, pitch * 4)
    sum_of_lane, do_gates, state_of = sums_of_warp(gates), gates_of_threads(v.mode), given_or_zero(v.dtype)
    (prepare, help_others), (wait_for, have_done) = helpers(v.barriers, images, pitch), waits(v.barriers)
    select, all_weights, values = ptx_rnn.select, units * gates * 4 * quads, VALUES // _GATE_LANES * gates
    piece_elems, piece_bytes = images * pitch, images * pitch * 4
    all_threads, (more, fewer) = threads + 32 * HELPERS, registers(warps)

    @ptx.inline
    def load_weights(w, weights, first, unit, lane, f):
        for j in range(units):
            row_of = integer(min(integer(unit + j), integer(f.hidden - 1)))
            for gate in range(gates):
                row = integer(first + (gate * f.hidden + row_of) * f.hidden)
                for i in range(quads):
                    for k in range(4):
                        column = integer((i * _LANES + lane) * 4 + k)
                        r = widen(ptx.load_constant(w, integer(row + min(column, integer(f.hidden - 1)))))
                        is_there = unit + j < f.hidden and column < f.hidden
                        weights[((j * gates + gate) * quads + i) * 4 + k] = select(is_there, r, zero)

    @ptx.inline
    def row_of_step(step, direction, image, f):
        time = integer(f.steps - 1 - step if direction else step)
        return integer((time * f.batch + image) * f.directions + direction)

    @ptx.inline
    def copy_sum(ring, sums, step, piece, direction, image, gate, unit, f):
        """Starts the copy of the sum that this thread will want at a step; behind the last of one that nobody reads."""
        row = row_of_step(integer(min(step, integer(f.steps - 1))), direction, image, f)
        to = u32(ring + u32(((step & (RING - 1)) * pieces + piece) * (threads * 4)))
        copy(to, ptx.address(sums, integer((row * gates + gate) * f.hidden + unit)), integer(4))
        commit()

    @ptx.inline
    def compute(sums, w, hx, cx, out, y, saved, hy, cy, passed, shared, thread, rank, slab, direction, f):
        # 1. Which unit, image of a piece and gate a thread has in the end; its weights; its states and first sums.
        lane, first_unit = integer(thread & 31), integer((rank * warps + (thread >> 5)) * units)
        of_warp, of_piece = ptx.divided(integer(lane >> 2), integer(images))
        unit = integer(first_unit + of_warp)
        is_there = unit < f.hidden
        here, gate = integer(unit if is_there else 0), integer(min(integer(lane & 3), integer(gates - 1)))
        weights, found = ptx.cuda.local.array(all_weights, real), ptx.cuda.local.array(values, real)
        load_weights(w, weights, integer(f.recurrent + direction * f.next_matrices), first_unit, lane, f)
        bias = zero
        if is_gru:
            bias = widen(ptx.load_constant(w, integer(f.bias + direction * f.next_biases + 2 * f.hidden + here)))
        first_image, last_image = integer((f.first_slab + slab) * (pieces * images) + of_piece), integer(f.batch - 1)
        number = integer((direction * f.slabs + slab) * pieces)
        states, ring = u32(shared + u32(state_at + thread * 4)), u32(shared + u32(ring_at + thread * 4))
        piece = integer(0)
        while piece < pieces:
            image = integer(min(integer(first_image + piece * images), last_image))
            cell = integer(f.state + (direction * f.batch + image) * f.hidden + here)
            state = state_of(cx, cell) if is_lstm else state_of(hx, cell)
            store(u32(states + u32(piece * (threads * 4))), bits_of(state))
            piece = integer(piece + 1)
        for step in range(RING - 1):
            piece = integer(0)
            while piece < pieces:
                image = integer(min(integer(first_image + piece * images), last_image))
                copy_sum(ring, sums, integer(step), piece, direction, image, gate, here, f)
                piece = integer(piece + 1)

        # 2. The steps.
        step = integer(0)
        while step < f.steps:
            piece = integer(0)
            while piece < pieces:
                image = integer(first_image + piece * images)
                is_image = image <= last_image
                image = integer(min(image, last_image))
                wait()
                slot = u32(ring + u32(((step & (RING - 1)) * pieces + piece) * (threads * 4)))
                a, state_in = float_of(load(slot)), u32(states + u32(piece * (threads * 4)))
                copy_sum(ring, sums, integer(step + RING - 1), piece, direction, image, gate, here, f)
                wait_for(shared, piece, step)
                multiply(weights, found, u32(shared + u32(piece * piece_bytes + lane * 16)))
                b, state = sum_of_lane(found, lane), float_of(load(state_in))
                h, c, value = do_gates(b, a, state, bias, lane)
                if is_there and (lane & 3) == 3:
                    place = integer(((number + piece) * 2 + (integer(step + 1) & 1)) * piece_elems)
                    passed[integer(place + of_piece * pitch + unit)] = h
                have_done(shared, piece, lane)
                store(state_in, bits_of(c))
                row = row_of_step(step, direction, image, f)
                if is_there and is_image:
                    at = integer(row * f.hidden + unit)
                    if training and kept > 0:
                        tape = integer(f.saved + row * kept * f.hidden + unit)
                        saved[integer(tape + (lane & 3) * f.hidden)] = value
                        if is_lstm and (lane & 3) == 0:
                            saved[integer(tape + gates * f.hidden)] = c
                    if has_out and (lane & 3) == 1:
                        out[integer(f.out + at)] = h
                    if has_y and (lane & 3) == 2:
                        y[at] = narrow(h)
                    if step + 1 == f.steps and (lane & 3) == 0:
                        cell = integer(f.state + (direction * f.batch + image) * f.hidden + unit)
                        hy[cell] = narrow(h)
                        if is_lstm:
                            cy[cell] = narrow(c)
                piece = integer(piece + 1)
            step = integer(step + 1)

    def forward(sums, w, hx, cx, out, y, saved, hy, cy, passed, counters, f):
        thread, direction = integer(ptx.thread_x()), integer(ptx.block_y())
        slab, rank = ptx.divided(integer(ptx.block_x()), f.peers)
        shared, at = ptx_tile.dynamic_shared(), thread
        # h of the first step, zeros behind the units.
        while at < pieces * piece_elems:
            image, column = ptx.divided(at, integer(pitch))
            image = integer(min(integer((f.first_slab + slab) * (pieces * images) + image), integer(f.batch - 1)))
            cell = integer(direction * f.batch + image)
            inside = integer(min(column, integer(f.hidden - 1)))
            h = state_of(hx, integer(f.state + cell * f.hidden + inside))
            store(u32(shared + u32(at * 4)), bits_of(select(column < f.hidden, h, zero)))
            at = integer(at + all_threads)
        if thread == 0:
            prepare(shared)
        ptx.cuda.syncthreads()
        if thread < threads:
            more()
            compute(sums, w, hx, cx, out, y, saved, hy, cy, passed, shared, thread, rank, slab, direction, f)
        else:
            fewer()
            group = integer(direction * f.slabs + slab)
            help_others(integer(thread - threads), counters, passed, group, f.peers, shared, f.steps)

    data, wide = ptx.pointer(v.dtype), ptx.pointer("f32")
    pointers = (wide, data, data, data, wide, data, wide, data, data, wide, wide)
    return forward, (*pointers, ptx.record(Fields, 32))


class PersistentGrid(Grid):
    """Forward, where R fits the registers of the GPU."""

    op, units = "rnn_fwd", _UNITS

    def layout(self, problem: RnnProblem, config: Config) -> Layout:
        return _layout(problem, config)

    def memory(self, problem: RnnProblem, device: Gpu) -> ForwardMemory:
        return ForwardMemory(problem, False)

    def launches(self, problem: RnnProblem, config: Config, device: Gpu) -> list[Launch]:
        memory, found = self.memory(problem, device), list[Launch]()
        layout = _layout(problem, config)
        passing = plan.passing(problem, config, layout, memory.workspace, device)
        for layer in range(problem.layers):
            found += [rnn_layers.sums(problem, memory, layer, device)]
            for round_ in plan.rounds(problem, config, layout, device):
                found += [passing.clear(), _steps(problem, memory, passing, layer, config, round_)]
        return found


def _variant(problem: RnnProblem, config: Config) -> Variant:
    """Of a layer that is not the last."""
    return Variant(
        mode=problem.mode,
        dtype=problem.dtype,
        training=problem.training,
        out=True,
        y=False,
        units=config.units,
        warps=config.warps,
        quads=ceil(problem.hidden / (4 * _LANES)),
        pieces=config.pieces,
    )


def _layout(problem: RnnProblem, config: Config) -> Layout:
    v = _variant(problem, config)
    return Layout(
        weights=v.units * problem.parameters.gates * 4 * v.quads,
        loads=v.images * v.quads,
        cycles=_CYCLES,
        shared_bytes=v.shared_bytes,
        images=v.images,
        peers=ceil(problem.hidden / (v.units * v.warps)),
        pitch=v.pitch,
    )


def _steps(
    problem: RnnProblem, memory: ForwardMemory, passing: Passing, layer: int, config: Config, round_: Round
) -> Launch:
    w, out, y, saved = weights(problem, layer), memory.outputs(layer), memory.y(layer), memory.saved(layer)
    variant = _variant(problem, config)._replace(out=out.is_somewhere, y=y.is_somewhere)
    states = [memory.state(name, layer) for name in ("hx", "cx", "hy", "cy")]
    places = (memory.sums, memory.operand("w"), *states[:2], out, y, saved, *states[2:])
    places += passing.passed, passing.counters
    peers = _layout(problem, config).peers
    fields = Fields(
        **of_steps(problem, layer),
        bias=w.recurrent_bias,
        next_biases=w.next_biases,
        out=out.first,
        saved=saved.first,
        peers=peers,
        slabs=round_.slabs,
        first_slab=round_.first_slab,
    )
    return Launch(
        source=Source(forward_kernel, variant, variant.threads + 32 * HELPERS),
        grid=(peers * round_.slabs, problem.directions, 1),
        pointers=tuple(place.pointer for place in places),
        scalars="",
        integers=fields,
        dynamic_shared_bytes=variant.shared_bytes,
        cooperative=True,
    )


FWD = PersistentGrid()
