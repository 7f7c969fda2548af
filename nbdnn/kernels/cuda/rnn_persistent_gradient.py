"""The gradient of recurrent networks on a GPU with R in registers over the whole sequence: one launch for all steps.

    block     some images, some units, one direction; the columns of R of these units, widened to float32
    cluster   blocks that share the units where their weights do not fit the registers of one; each has all of db
    columns   four, of S neighbouring threads: thread s has of each the rows 4 (i S + s) to 4 (i S + s) + 3

A step: what a gate's gradient is a multiple of is there (`rnn_records.py`), so thread (unit, gate) multiplies and
stores its gradient, in place and to the other buffer of every block of the cluster; one barrier; R^T db, 4 sums a
thread, and exchanges that leave unit j's in the threads s % 4 = j: thread s goes on as gate s / 4 % 4. The records are
copied to shared memory some steps ahead, each thread its own. dx, dW and dR are products over all steps afterwards
(`rnn_product.py`: of 16-bit networks on matrix units, where records are rounded to TF32).

What bounds it is the chain of a step, as in `rnn_persistent.py`: on an H200 0.21 us with 32 units, 0.33 with 64, 0.51
with 96, and 0.71 in clusters of four with 128 (LSTM). Sums in float32, in one order. Source: own.
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from nbdnn.candidate import Support
from nbdnn.device import Gpu
from nbdnn.kernels.cuda import rnn_layers
from nbdnn.kernels.cuda import rnn_persistent_plan as plan
from nbdnn.kernels.cuda.compile import Source
from nbdnn.kernels.cuda.launch import Launch, LaunchedCandidate
from nbdnn.kernels.cuda.rnn_persistent_plan import Config, Layout
from nbdnn.kernels.cuda.rnn_plan import GRADIENTS, RECORD, GradientMemory, gates_of, of_steps
from nbdnn.problem_rnn import RnnProblem

RING = 4  # steps whose records are in shared memory or on their way
_COLUMNS = 4  # of R, of a thread
_LANES = (16, 32)  # a thread for each gate of each column


class Variant(NamedTuple):
    """What a kernel is compiled for.

    lanes: threads of four columns, S. units: of a block, a multiple of 4. threads: of a block, whole warps. quads: of 4
    rows, of a thread. images: of a block.
    """

    mode: str
    dtype: str
    lanes: int
    units: int
    threads: int
    quads: int
    images: int
    cluster: int

    @property
    def padded(self) -> int:
        """Rows of R with those that are zeros."""
        return 4 * self.quads * self.lanes

    @property
    def slots(self) -> tuple[int, ...]:
        """Of a record, beside a gate's own: what every thread wants."""
        return tuple(range(GRADIENTS[self.mode], RECORD[self.mode]))

    @property
    def ring_at(self) -> int:
        """Bytes of shared memory before the copied records: two buffers of db."""
        return 2 * self.images * self.padded * 4

    @property
    def shared_bytes(self) -> int:
        """With a word of each thread for what nobody reads."""
        return self.ring_at + (RING * self.images * (1 + len(self.slots)) + 1) * self.threads * 4


class Fields(NamedTuple):
    """First elements in the block of parameters, and what a second direction adds; of states."""

    steps: int
    batch: int
    hidden: int
    directions: int
    recurrent: int
    next_matrices: int
    state: int


def back_kernel(*specialised_on):
    """Pointers: records, w, dhy, dcy, dhx, dcx."""
    from nbdnn.kernels.cuda import ptx, ptx_cluster, ptx_local, ptx_rnn, ptx_tile
    from nbdnn.kernels.cuda.rnn_exchange import barrier, cleared, sums_of_threads
    from nbdnn.kernels.cuda.rnn_gates import back_of_gate, given_or_zero

    v = Variant(*specialised_on)
    gates, gradients, record, slots = gates_of(v.mode), GRADIENTS[v.mode], RECORD[v.mode], v.slots
    lanes, units, quads, images, cluster, threads = v.lanes, v.units, v.quads, v.images, v.cluster, v.threads
    integer, real, u32 = ptx.INTEGER[32], ptx.REAL["f32"], ptx.cuda.types.uint32
    widen, narrow, zero = ptx.WIDEN[v.dtype], ptx.NARROW[v.dtype], real(0.0)
    is_lstm, is_gru, ring_at = v.mode == "lstm", v.mode == "gru", v.ring_at
    load_quad, store, bits_of = ptx_local.load_shared("f32", 4), ptx_tile.STORE_SHARED[1], ptx_tile.word_of
    load, copy, commit = ptx_tile.LOAD_SHARED[1], ptx_tile.COPY_ASYNC[4], ptx_tile.copy_async_commit
    wait, float_of = ptx_tile.copy_async_wait(RING - 2), ptx_tile.float_of
    sums_of_columns, gate_back = sums_of_threads(lanes, _COLUMNS), back_of_gate(v.mode)
    (arrive, leave), clear = barrier(cluster), cleared(threads, cluster, v.shared_bytes)
    state_of = given_or_zero(v.dtype)
    count, first_slot, words = len(slots), slots[0], 1 + len(slots)
    long, moved, store_at, select = ptx.INTEGER[64], ptx_rnn.moved, ptx_rnn.store_at, ptx_rnn.select
    all_weights, spare_at = _COLUMNS * 4 * quads, v.shared_bytes - threads * 4
    image_bytes, buffer_bytes = v.padded * 4, images * v.padded * 4
    record_bytes, slot_bytes = words * threads * 4, images * words * threads * 4

    @ptx.inline
    def load_weights(w, weights, first, unit, last, lane, f):
        most = integer(gates * f.hidden - 1)
        for column in range(_COLUMNS):
            here = integer(min(integer(unit + column), integer(f.hidden - 1)))
            for i in range(quads):
                for j in range(4):
                    row = integer((i * lanes + lane) * 4 + j)
                    r = widen(ptx.load_constant(w, integer(first + min(row, most) * f.hidden + here)))
                    is_there = unit + column < last and row <= most
                    weights[(column * quads + i) * 4 + j] = select(is_there, r, zero)

    @ptx.inline
    def put_gradient(to, blocks, gradient):
        """db of a gate's unit to a buffer of every block. blocks: where the others' shared memory is."""
        if cluster > 1:
            for block in range(cluster):
                ptx_cluster.store_in_block(u32(blocks[block] + to), gradient)
        else:
            store(to, bits_of(gradient))

    @ptx.inline
    def copy_record(ring, step, source, own, f):
        """Starts the copies of a step's record that this thread will want; returns where that of the next step is.
        own: bytes to its gate's from the others. Behind the last step its record is copied again, for nobody."""
        pitch, ahead, last = own[1], own[2], own[3]
        for i in range(images):
            to = u32(ring + u32((step & (RING - 1)) * slot_bytes + i * record_bytes))
            at = moved(source, long(min(integer(i), last) * pitch))
            copy(to, moved(at, own[0]), integer(4))
            for k in range(count):
                copy(u32(to + u32((k + 1) * (threads * 4))), moved(at, long(k * f.hidden * 4)), integer(4))
        commit()
        return moved(source, select(step + 1 < f.steps, ahead, long(0)))

    @ptx.inline
    def products(weights, found, quad, at):
        for column in range(_COLUMNS):
            found[column] = zero
        for i in range(quads):
            load_quad(quad, 0, u32(at + u32(i * (lanes * 16))))
            for column in range(_COLUMNS):
                for j in range(4):
                    found[column] = ptx.fma(weights[(column * quads + i) * 4 + j], quad[j], found[column])

    def back(records, w, dhy, dcy, dhx, dcx, f):
        # 1. Where a thread is: four columns, and as (unit, gate) of the step; its weights.
        thread, direction = integer(ptx.thread_x()), integer(ptx.block_y())
        slab, rank = ptx.divided(integer(ptx.block_x()), integer(cluster))
        group, lane = integer(thread // lanes), integer(thread & (lanes - 1))
        column, gate = integer(group * _COLUMNS), integer(lane >> 2)
        last = integer(min(f.hidden, integer((rank + 1) * units)))
        column, image = integer(rank * units + column), integer(slab * images)
        unit = integer(column + (lane & 3))
        is_one = unit < last and gate < gradients
        here, own_gate = integer(min(unit, integer(f.hidden - 1))), integer(min(gate, integer(gradients - 1)))
        # The row of R that a gate's gradient is for; a GRU's of n's a is for none, that of n's b for the third.
        row = integer((integer(2) if is_gru and gate == 3 else gate) * f.hidden + unit)
        has_row = is_one and not (is_gru and gate == 2)
        weights, found = ptx.cuda.local.array(all_weights, real), ptx.cuda.local.array(_COLUMNS, real)
        quad, others = ptx.cuda.local.array(4, real), ptx.cuda.local.array(count, real)
        dh, dc = ptx.cuda.local.array(images, real), ptx.cuda.local.array(images, real)
        blocks, values = ptx.cuda.local.array(cluster, u32), ptx.cuda.local.array(images, real)
        load_weights(w, weights, integer(f.recurrent + direction * f.next_matrices), column, last, lane, f)
        shared = ptx_tile.dynamic_shared()
        clear(shared, thread)
        # What is for no row is put where nobody reads it. Of a cluster's blocks addresses are distances from here.
        to = u32(shared + u32(row * 4 if has_row else spare_at + thread * 4))
        apart, image_step = u32(buffer_bytes if has_row else 0), u32(image_bytes if has_row else 0)
        for block in range(cluster):
            blocks[block] = u32(0)
            if cluster > 1:
                blocks[block] = u32(ptx_cluster.address_in_block(shared, integer(block)) - shared)
        # From here on addresses go from step to step, back or forward, and bytes from an image to the next.
        first = integer(((0 if direction else f.steps - 1) * f.batch + image) * f.directions + direction)
        last_image, ring = integer(f.batch - 1 - image), u32(shared + u32(ring_at + thread * 4))
        pitch = long(f.directions * f.hidden * (4 * record))
        ahead = long((f.batch if direction else -f.batch) * pitch)
        source = ptx.address(records, integer((first * record + first_slot) * f.hidden + here))
        target = moved(source, long((own_gate - first_slot) * f.hidden * 4))
        own = long((own_gate - first_slot) * f.hidden * 4), pitch, ahead, last_image
        for step in range(RING - 1):
            source = copy_record(ring, integer(step), source, own, f)
        for i in range(images):
            place = integer(direction * f.batch + image + min(integer(i), last_image))
            cell = integer(f.state + place * f.hidden + here)
            dh[i], dc[i] = state_of(dhy, cell), zero
            if is_lstm:
                dc[i] = state_of(dcy, cell)

        # 2. The steps, from the last one back.
        step, buffer, writing = integer(0), u32(shared + u32(lane * 16)), u32(0)
        while step < f.steps:
            wait()
            slot = u32(ring + u32((step & (RING - 1)) * slot_bytes))
            for i in range(images):
                from_ring = u32(slot + u32(i * record_bytes))
                multiple = float_of(load(from_ring))
                for k in range(count):
                    others[k] = float_of(load(u32(from_ring + u32((k + 1) * (threads * 4)))))
                gradient, dc[i], dh[i] = gate_back(dh[i] + others[count - 1], dc[i], multiple, others, gate)
                put_gradient(u32(to + writing + u32(i * image_step)), blocks, gradient)
                values[i] = gradient
            # What is written to global memory after the arrival, no other block waits for.
            arrive()
            for i in range(images):
                if is_one and i <= last_image:
                    store_at(moved(target, long(i * pitch)), values[i])
            leave()
            source = copy_record(ring, integer(step + RING - 1), source, own, f)
            for i in range(images):
                products(weights, found, quad, u32(buffer + u32(i * image_bytes)))
                dh[i] = dh[i] + sums_of_columns(found, lane)
            step, target, writing = integer(step + 1), moved(target, ahead), u32(apart - writing)
            buffer = u32(shared + u32(lane * 16 + (step & 1) * buffer_bytes))

        # 3. The gradient of the first state.
        for i in range(images):
            if gate == 0 and unit < last and image + i < f.batch:
                cell = integer(f.state + (direction * f.batch + image + i) * f.hidden + unit)
                dhx[cell] = narrow(dh[i])
                if is_lstm:
                    dcx[cell] = narrow(dc[i])

    data = ptx.pointer(v.dtype)
    return back, (ptx.pointer("f32"), *[data] * 5, ptx.record(Fields, 32))


class PersistentGradient(LaunchedCandidate[Config]):
    """Gradient, where R fits the registers of a cluster."""

    op, algorithm = "rnn_bwd", "persistent"

    def supports(self, problem: RnnProblem, device: Gpu) -> Support:
        return plan.support(problem, self.configs(problem, device))

    def configs(self, problem: RnnProblem, device: Gpu) -> tuple[Config, ...]:
        return plan.configs(problem, device, _LANES, _layout)

    def roundings(self, problem: RnnProblem, device: Gpu) -> int:
        return rnn_layers.roundings(problem, device)

    def workspace_bytes(self, problem: RnnProblem, config: Config, device: Gpu) -> int:
        return rnn_layers.gradient_memory(problem, device).workspace.size_bytes

    def estimate(self, problem: RnnProblem, config: Config, device: Gpu) -> float:
        step_us = plan.step_us(problem, config, _layout(problem, config), device)
        return problem.layers * problem.steps * step_us + rnn_layers.products_us(problem, device)

    def launches(self, problem: RnnProblem, config: Config, device: Gpu) -> list[Launch]:
        memory, found = rnn_layers.gradient_memory(problem, device), list[Launch]()
        for layer in reversed(range(problem.layers)):
            found += [rnn_layers.records(problem, memory, layer), _steps_back(problem, memory, layer, config)]
            found += rnn_layers.after_steps_back(problem, memory, layer, device)
        return found


def _variant(problem: RnnProblem, config: Config) -> Variant:
    groups = ceil(problem.hidden / config.cluster / _COLUMNS)
    return Variant(
        mode=problem.mode,
        dtype=problem.dtype,
        lanes=config.lanes,
        units=groups * _COLUMNS,
        threads=ceil(groups * config.lanes / 32) * 32,
        quads=ceil(problem.parameters.gates * problem.hidden / (4 * config.lanes)),
        images=config.images,
        cluster=config.cluster,
    )


def _layout(problem: RnnProblem, config: Config) -> Layout:
    variant = _variant(problem, config)
    return Layout(variant.threads, _COLUMNS * 4 * variant.quads, variant.shared_bytes)


def _steps_back(problem: RnnProblem, memory: GradientMemory, layer: int, config: Config) -> Launch:
    variant = _variant(problem, config)
    states = [memory.state(name, layer) for name in ("dhy", "dcy", "dhx", "dcx")]
    return Launch(
        source=Source(back_kernel, variant, variant.threads),
        grid=(plan.blocks(problem, config), problem.directions, 1),
        pointers=tuple(place.pointer for place in (memory.records, memory.operand("w"), *states)),
        scalars="",
        integers=Fields(**of_steps(problem, layer)),
        dynamic_shared_bytes=variant.shared_bytes,
        cluster=config.cluster,
    )


BWD = PersistentGradient()
