"""The gradient of recurrent networks on a GPU with R shared out over all multiprocessors: one launch for all steps.

    group      blocks that have all units of some images and one direction; each some units, in registers
    warpgroup  `units` units: their columns of R, of which each of its warps has a quarter of the rows; a lane the rows
               4 (32 i + lane) to + 3 of these
    piece      images that a warpgroup computes at once: as many as leave each thread one gate of one unit and image

A step of a piece: all db of the step after from shared memory, products, exchanges that leave each lane one sum, which
the warps of a group add up; what a gate's gradient is a multiple of is there (`rnn_records.py`), so each thread
multiplies, and stores its gradient in place and where all blocks of the group copy it from (`rnn_passing.py`), while
they compute other pieces. The records are copied to shared memory a step ahead, each thread its own. dx, dW and dR are
products over all steps afterwards (`rnn_product.py`).

What bounds it are the FMA units, as in `rnn_grid.py`, and what is passed, G times as much. Sums in float32, in one
order. Source: own.
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
from nbdnn.kernels.cuda.rnn_plan import GRADIENTS, RECORD, GradientMemory, gates_of, of_steps
from nbdnn.problem_rnn import RnnProblem

_CYCLES = 600  # of a warp's piece beside its multiply-adds: a fit (H200)
RING = 2  # steps whose records are in shared memory or on their way
_LANES, _SLICES, _GROUP = 32, 4, 128  # of a row; warps and threads of a warpgroup
_UNITS = (4, 8, 16)


class Variant(NamedTuple):
    """What a kernel is compiled for.

    units: of a warpgroup. warps: of a block, that compute. quads: of 4 rows, of a lane. pieces: of a block.
    """

    mode: str
    dtype: str
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
        return VALUES // self.units

    @property
    def pitch(self) -> int:
        """Rows of R with those that are zeros."""
        return 4 * self.quads * _LANES * _SLICES

    @property
    def slots(self) -> tuple[int, ...]:
        """Of a record, beside a gate's own: what every thread wants."""
        return tuple(range(GRADIENTS[self.mode], RECORD[self.mode]))

    @property
    def states_at(self) -> int:
        """Bytes of shared memory before dh and dc of each piece and thread: db of all pieces."""
        return self.pieces * self.images * self.pitch * 4

    @property
    def sums_at(self) -> int:
        """Before the sums of each warp, in two buffers."""
        return self.states_at + 2 * self.pieces * self.threads * 4

    @property
    def ring_at(self) -> int:
        return self.sums_at + 2 * self.threads * 4

    @property
    def barriers(self) -> Barriers:
        ring_bytes = RING * self.pieces * (1 + len(self.slots)) * self.threads * 4
        return Barriers(self.ring_at + ring_bytes, self.pieces, self.warps)

    @property
    def shared_bytes(self) -> int:
        return self.barriers.end


class Fields(NamedTuple):
    """First elements in the block of parameters, and what a second direction adds; of states. peers: blocks of a group.
    slabs: groups of a direction; first_slab: of those of all launches."""

    steps: int
    batch: int
    hidden: int
    directions: int
    recurrent: int
    next_matrices: int
    state: int
    peers: int
    slabs: int
    first_slab: int


def back_kernel(*specialised_on):
    """Pointers: records, w, dhy, dcy, dhx, dcx, what blocks pass to each other, counters."""
    from nbdnn.kernels.cuda import ptx, ptx_products, ptx_rnn, ptx_tile, ptx_tma
    from nbdnn.kernels.cuda.rnn_exchange import sums_of_warp
    from nbdnn.kernels.cuda.rnn_gates import back_of_gate, given_or_zero
    from nbdnn.kernels.cuda.rnn_passing import helpers, registers, waits

    v = Variant(*specialised_on)
    gates, gradients, record, slots = gates_of(v.mode), GRADIENTS[v.mode], RECORD[v.mode], v.slots
    units, warps, quads, pieces, images, pitch = v.units, v.warps, v.quads, v.pieces, v.images, v.pitch
    integer, real, u32 = ptx.INTEGER[32], ptx.REAL["f32"], ptx.cuda.types.uint32
    widen, narrow, zero = ptx.WIDEN[v.dtype], ptx.NARROW[v.dtype], real(0.0)
    is_lstm, is_gru, threads = v.mode == "lstm", v.mode == "gru", v.threads
    store, load, bits_of = ptx_tile.STORE_SHARED[1], ptx_tile.LOAD_SHARED[1], ptx_tile.word_of
    copy, commit, float_of = ptx_tile.COPY_ASYNC[4], ptx_tile.copy_async_commit, ptx_tile.float_of
    wait = ptx_tile.copy_async_wait((RING - 1) * pieces - 1)
    multiply = ptx_products.rows_by_images(units, 1, quads, images, pitch * 4)
    sum_of_lane, gate_back, state_of = sums_of_warp(4), back_of_gate(v.mode), given_or_zero(v.dtype)
    (prepare, help_others), (wait_for, have_done) = helpers(v.barriers, images, pitch), waits(v.barriers)
    count, first_slot, select, all_weights = len(slots), slots[0], ptx_rnn.select, units * 4 * quads
    piece_elems, piece_bytes, slice_rows = images * pitch, images * pitch * 4, 4 * quads * _LANES
    states_at, sums_at, ring_at, thread_bytes = v.states_at, v.sums_at, v.ring_at, threads * 4
    all_threads, (more, fewer) = threads + 32 * HELPERS, registers(warps)

    @ptx.inline
    def load_weights(w, weights, first, unit, first_row, lane, f):
        most = integer(gates * f.hidden - 1)
        for j in range(units):
            column = integer(min(integer(unit + j), integer(f.hidden - 1)))
            for i in range(quads):
                for k in range(4):
                    row = integer(first_row + (i * _LANES + lane) * 4 + k)
                    r = widen(ptx.load_constant(w, integer(first + min(row, most) * f.hidden + column)))
                    weights[(j * quads + i) * 4 + k] = select(unit + j < f.hidden and row <= most, r, zero)

    @ptx.inline
    def row_of_step(step, direction, image, f):
        time = integer(step if direction else f.steps - 1 - step)
        return integer((time * f.batch + image) * f.directions + direction)

    @ptx.inline
    def slot_of(ring, step, piece):
        return u32(ring + u32(((step & (RING - 1)) * pieces + piece) * ((1 + count) * thread_bytes)))

    @ptx.inline
    def copy_record(ring, records, step, piece, direction, image, gate, unit, f):
        """Starts the copies of the record that this thread will want at a step; behind the last of one that nobody
        reads."""
        first = integer(row_of_step(integer(min(step, integer(f.steps - 1))), direction, image, f) * record)
        to = slot_of(ring, step, piece)
        copy(to, ptx.address(records, integer((first + gate) * f.hidden + unit)), integer(4))
        for k in range(count):
            source = ptx.address(records, integer((first + first_slot + k) * f.hidden + unit))
            copy(u32(to + u32((k + 1) * thread_bytes)), source, integer(4))
        commit()

    @ptx.inline
    def compute(records, w, dhy, dcy, dhx, dcx, passed, shared, thread, rank, slab, direction, f):
        # 1. Which rows a lane has, and which unit, image of a piece and gate a thread in the end.
        lane, group = integer(thread & 31), integer(thread // _GROUP)
        slice_, of_group = integer((thread & (_GROUP - 1)) >> 5), integer((thread & (_GROUP - 1)) >> 2)
        first_unit, first_row = integer((rank * (warps // _SLICES) + group) * units), integer(slice_ * slice_rows)
        of_units, of_piece = ptx.divided(of_group, integer(images))
        unit, gate = integer(first_unit + of_units), integer(lane & 3)
        is_one = unit < f.hidden and gate < gradients
        here, own_gate = integer(min(unit, integer(f.hidden - 1))), integer(min(gate, integer(gradients - 1)))
        # The row of R that a gate's gradient is for; a GRU's of n's a is for none, that of n's b for the third.
        row_of_gate = integer((integer(2) if is_gru and gate == 3 else gate) * f.hidden + unit)
        has_row = is_one and not (is_gru and gate == 2)
        weights, found = ptx.cuda.local.array(all_weights, real), ptx.cuda.local.array(VALUES, real)
        others = ptx.cuda.local.array(count, real)
        load_weights(w, weights, integer(f.recurrent + direction * f.next_matrices), first_unit, first_row, lane, f)
        first_image, last_image = integer((f.first_slab + slab) * (pieces * images) + of_piece), integer(f.batch - 1)
        number = integer((direction * f.slabs + slab) * pieces)
        states, ring = u32(shared + u32(states_at + thread * 4)), u32(shared + u32(ring_at + thread * 4))
        own_sum = u32(shared + u32(sums_at + (group * _SLICES + slice_) * (_LANES * 4) + lane * 4))
        all_sums = u32(shared + u32(sums_at + group * (_GROUP * 4) + of_group * 4))
        piece = integer(0)
        while piece < pieces:
            image = integer(min(integer(first_image + piece * images), last_image))
            cell = integer(f.state + (direction * f.batch + image) * f.hidden + here)
            at = u32(states + u32(piece * (2 * thread_bytes)))
            store(at, bits_of(state_of(dhy, cell)))
            store(u32(at + u32(thread_bytes)), bits_of(state_of(dcy, cell) if is_lstm else zero))
            piece = integer(piece + 1)
        for step in range(RING - 1):
            piece = integer(0)
            while piece < pieces:
                image = integer(min(integer(first_image + piece * images), last_image))
                copy_record(ring, records, integer(step), piece, direction, image, own_gate, here, f)
                piece = integer(piece + 1)

        # 2. The steps, from the last one back, and one more for what is before the first.
        step, buffer = integer(0), integer(0)
        while step <= f.steps:
            piece = integer(0)
            while piece < pieces:
                image = integer(first_image + piece * images)
                is_image = image <= last_image
                image = integer(min(image, last_image))
                wait()
                slot, state_in = slot_of(ring, step, piece), u32(states + u32(piece * (2 * thread_bytes)))
                multiple, dh = float_of(load(slot)), float_of(load(state_in))
                for k in range(count):
                    others[k] = float_of(load(u32(slot + u32((k + 1) * thread_bytes))))
                dc = float_of(load(u32(state_in + u32(thread_bytes))))
                copy_record(ring, records, integer(step + RING - 1), piece, direction, image, own_gate, here, f)
                wait_for(shared, piece, step)
                multiply(weights, found, u32(shared + u32(piece * piece_bytes + first_row * 4 + lane * 16)))
                store(u32(own_sum + u32(buffer * thread_bytes)), bits_of(sum_of_lane(found, lane)))
                ptx_tma.meet_warpgroup(integer(group + 2))
                for k in range(_SLICES):
                    dh = dh + float_of(load(u32(all_sums + u32(buffer * thread_bytes + k * (_LANES * 4)))))
                buffer = integer(1 - buffer)
                if step < f.steps:
                    gradient, dc, past = gate_back(dh + others[count - 1], dc, multiple, others, gate)
                    if has_row:
                        place = integer(((number + piece) * 2 + (integer(step + 1) & 1)) * piece_elems)
                        passed[integer(place + of_piece * pitch + row_of_gate)] = gradient
                    have_done(shared, piece, lane)
                    store(state_in, bits_of(past))
                    store(u32(state_in + u32(thread_bytes)), bits_of(dc))
                    if is_one and is_image:
                        row = row_of_step(step, direction, image, f)
                        records[integer((row * record + gate) * f.hidden + unit)] = gradient
                elif gate == 0 and is_one and is_image:
                    cell = integer(f.state + (direction * f.batch + image) * f.hidden + unit)
                    dhx[cell] = narrow(dh)
                    if is_lstm:
                        dcx[cell] = narrow(dc)
                piece = integer(piece + 1)
            step = integer(step + 1)

    def back(records, w, dhy, dcy, dhx, dcx, passed, counters, f):
        thread, direction = integer(ptx.thread_x()), integer(ptx.block_y())
        slab, rank = ptx.divided(integer(ptx.block_x()), f.peers)
        shared, at = ptx_tile.dynamic_shared(), thread
        while at < pieces * piece_elems:
            store(u32(shared + u32(at * 4)), u32(0))
            at = integer(at + all_threads)
        if thread == 0:
            prepare(shared)
        ptx.cuda.syncthreads()
        if thread < threads:
            more()
            compute(records, w, dhy, dcy, dhx, dcx, passed, shared, thread, rank, slab, direction, f)
        else:
            fewer()
            group = integer(direction * f.slabs + slab)
            help_others(integer(thread - threads), counters, passed, group, f.peers, shared, integer(f.steps + 1))

    data, wide = ptx.pointer(v.dtype), ptx.pointer("f32")
    return back, (wide, *[data] * 5, wide, wide, ptx.record(Fields, 32))


class PersistentGridGradient(Grid):
    """Gradient, where R fits the registers of the GPU."""

    op, units = "rnn_bwd", _UNITS

    def layout(self, problem: RnnProblem, config: Config) -> Layout:
        return _layout(problem, config)

    def memory(self, problem: RnnProblem, device: Gpu) -> GradientMemory:
        return rnn_layers.gradient_memory(problem, device)

    def launches(self, problem: RnnProblem, config: Config, device: Gpu) -> list[Launch]:
        memory, found = self.memory(problem, device), list[Launch]()
        layout = _layout(problem, config)
        passing = plan.passing(problem, config, layout, memory.workspace, device)
        for layer in reversed(range(problem.layers)):
            found += [rnn_layers.records(problem, memory, layer)]
            for round_ in plan.rounds(problem, config, layout, device):
                found += [passing.clear(), _steps_back(problem, memory, passing, layer, config, round_)]
            found += rnn_layers.after_steps_back(problem, memory, layer, device)
        return found


def _variant(problem: RnnProblem, config: Config) -> Variant:
    return Variant(
        mode=problem.mode,
        dtype=problem.dtype,
        units=config.units,
        warps=config.warps,
        quads=ceil(problem.parameters.gates * problem.hidden / (4 * _LANES * _SLICES)),
        pieces=config.pieces,
    )


def _layout(problem: RnnProblem, config: Config) -> Layout:
    v = _variant(problem, config)
    return Layout(
        weights=v.units * 4 * v.quads,
        loads=v.images * v.quads,
        cycles=_CYCLES,
        shared_bytes=v.shared_bytes,
        images=v.images,
        peers=ceil(problem.hidden / (v.units * v.warps // _SLICES)),
        pitch=v.pitch,
    )


def _steps_back(
    problem: RnnProblem, memory: GradientMemory, passing: Passing, layer: int, config: Config, round_: Round
) -> Launch:
    variant, peers = _variant(problem, config), _layout(problem, config).peers
    states = [memory.state(name, layer) for name in ("dhy", "dcy", "dhx", "dcx")]
    places = (memory.records, memory.operand("w"), *states, passing.passed, passing.counters)
    return Launch(
        source=Source(back_kernel, variant, variant.threads + 32 * HELPERS),
        grid=(peers * round_.slabs, problem.directions, 1),
        pointers=tuple(place.pointer for place in places),
        scalars="",
        integers=Fields(**of_steps(problem, layer), peers=peers, slabs=round_.slabs, first_slab=round_.first_slab),
        dynamic_shared_bytes=variant.shared_bytes,
        cooperative=True,
    )


BWD = PersistentGridGradient()
