"""Recurrent networks on a GPU with R in registers over the whole sequence: one launch a layer.

    block     some images, some units with all their gates, one direction; R's rows of these units, widened to float32
    cluster   blocks that share the units where their weights do not fit the registers of one; each keeps all of h
    unit      S neighbouring threads: thread s has of each gate's row the columns 4 (i S + s) to 4 (i S + s) + 3

A step: h from shared memory, 4 (or 3, or 1) sums a thread; sums of a unit by exchanges that leave gate g's in thread
g; its activation there; the gates to all S threads; c and h there; h to the other buffer of every block of the
cluster; one barrier. The inputs' sums of all steps are there (`rnn_product.py`) and are copied to shared memory some
steps ahead, each thread its own. Images are independent: blocks take one each while there are multiprocessors.

What bounds it is the chain of a step. On an H200 it took 280 cycles, and for each warp of a scheduler 96 more beside
its multiply-adds, of which a multiprocessor has G H^2 / 128 cycles (G gates; a cluster shares them): 0.21 us with 32
units, 0.31 with 64, 0.46 with 96 (LSTM). The barrier of a cluster adds 0.3 us: 0.61 us with 128.
Sums in float32, in one order: a thread's, then by exchanges; those of inputs as `rnn_product.py` says. Source: own;
weights that stay: Diamos et al., Persistent RNNs (ICML 2016).
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
from nbdnn.kernels.cuda.rnn_plan import ForwardMemory, gates_of, of_steps, weights
from nbdnn.problem import ITEMSIZE
from nbdnn.problem_rnn import SAVED, RnnProblem

RING = 4  # steps whose sums are in shared memory or on their way


class Variant(NamedTuple):
    """What a kernel is compiled for.

    lanes: threads of a unit, S. units: of a block. threads: of a block, whole warps. quads: of 4 columns, of a thread.
    images: of a block. out, y: which of the outputs are written.
    """

    mode: str
    dtype: str
    training: bool
    out: bool
    y: bool
    lanes: int
    units: int
    threads: int
    quads: int
    images: int
    cluster: int

    @property
    def padded(self) -> int:
        """Columns of R with those that are zeros."""
        return 4 * self.quads * self.lanes

    @property
    def ring_at(self) -> int:
        """Bytes of shared memory before the copied sums: two buffers of h."""
        return 2 * self.images * self.padded * 4

    @property
    def shared_bytes(self) -> int:
        """With a word for what nobody reads."""
        return self.ring_at + RING * self.images * self.threads * 4 + 4


class Fields(NamedTuple):
    """First elements in the block of parameters, and what a second direction adds; of states, outputs and tape."""

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


def forward_kernel(*specialised_on):
    """Pointers: sums, w, hx, cx, outputs, y, what is saved, hy, cy."""
    from nbdnn.kernels.cuda import ptx, ptx_cluster, ptx_local, ptx_rnn, ptx_tile
    from nbdnn.kernels.cuda.rnn_exchange import barrier, cleared, gates_of_threads, sums_of_threads
    from nbdnn.kernels.cuda.rnn_gates import given_or_zero

    v = Variant(*specialised_on)
    gates, kept, lanes, units, quads, images = gates_of(v.mode), SAVED[v.mode], v.lanes, v.units, v.quads, v.images
    integer, real, u32 = ptx.INTEGER[32], ptx.REAL["f32"], ptx.cuda.types.uint32
    widen, narrow, zero = ptx.WIDEN[v.dtype], ptx.NARROW[v.dtype], real(0.0)
    is_lstm, is_gru, training, has_out, has_y = v.mode == "lstm", v.mode == "gru", v.training, v.out, v.y
    cluster, padded, threads, ring_at = v.cluster, v.padded, v.threads, v.ring_at
    load_quad, store, bits_of = ptx_local.load_shared("f32", 4), ptx_tile.STORE_SHARED[1], ptx_tile.word_of
    load, copy, commit = ptx_tile.LOAD_SHARED[1], ptx_tile.COPY_ASYNC[4], ptx_tile.copy_async_commit
    wait, float_of = ptx_tile.copy_async_wait(RING - 1), ptx_tile.float_of
    sums_of_unit, do_gates = sums_of_threads(lanes, gates), gates_of_threads(v.mode)
    (arrive, leave), clear = barrier(cluster), cleared(threads, cluster, v.shared_bytes)
    state_of = given_or_zero(v.dtype)
    long, moved, store_at, select = ptx.INTEGER[64], ptx_rnn.moved, ptx_rnn.store_at, ptx_rnn.select
    all_weights, all_quads, spare_at = gates * 4 * quads, 4 * quads, v.shared_bytes - 4
    # Beside its gate thread 0 may write c, 1 h to the outputs and 2 h to y; y of 16 bits is written apart.
    keeps_c, wide_y, narrow_y = training and is_lstm, has_y and v.dtype == "f32", has_y and v.dtype != "f32"
    first_other, end_other = (0 if keeps_c else 1, 3 if wide_y else 2) if has_out else (0, 0)
    y_bytes = ITEMSIZE[v.dtype]
    buffer_bytes, image_bytes, slot_bytes = images * padded * 4, padded * 4, images * threads * 4

    @ptx.inline
    def load_weights(w, weights, first, unit, lane, is_there, f):
        for gate in range(gates):
            row = integer(first + (gate * f.hidden + unit) * f.hidden)
            for i in range(quads):
                for j in range(4):
                    k = integer((i * lanes + lane) * 4 + j)
                    r = widen(ptx.load_constant(w, integer(row + min(k, integer(f.hidden - 1)))))
                    weights[(gate * quads + i) * 4 + j] = select(is_there and k < f.hidden, r, zero)

    @ptx.inline
    def put_h(to, h):
        """h of a unit to a block's buffer: by all threads of the unit, which have the same."""
        if cluster > 1:
            ptx_cluster.store_in_block(to, h)
        else:
            store(to, bits_of(h))

    @ptx.inline
    def copy_sums(ring, step, source, pitch, ahead, last, f):
        """Starts the copies of the sums that this thread will want at a step; returns where those of the next step
        are. Behind the last step its sums are copied again, which nobody reads."""
        for i in range(images):
            to = u32(ring + u32((step & (RING - 1)) * slot_bytes + i * (threads * 4)))
            copy(to, moved(source, long(min(integer(i), last) * pitch)), integer(4))
        commit()
        return moved(source, select(step + 1 < f.steps, ahead, long(0)))

    @ptx.inline
    def load_h(quad, at, image):
        for i in range(quads):
            load_quad(quad, 4 * i, u32(at + u32(image * image_bytes + i * (lanes * 16))))

    @ptx.inline
    def products(weights, found, quad):
        for gate in range(gates):
            found[gate] = zero
        for i in range(quads):
            for gate in range(gates):
                for j in range(4):
                    found[gate] = ptx.fma(weights[(gate * quads + i) * 4 + j], quad[4 * i + j], found[gate])

    @ptx.inline
    def places(out, y, saved, first_row, unit, lane, f):
        """Addresses of the first step's results: of the gate of this thread, of its other one, and of y."""
        at, tape = integer(first_row * f.hidden + unit), integer(f.saved + first_row * kept * f.hidden + unit)
        other = ptx.address(out, integer(f.out + at))
        if keeps_c and lane == 0:
            other = ptx.address(saved, integer(tape + 4 * f.hidden))
        if wide_y and lane == 2:
            other = ptx.address(y, at)
        return ptx.address(saved, integer(tape + (lane & 3) * f.hidden)), other, ptx.address(y, at)

    def forward(sums, w, hx, cx, out, y, saved, hy, cy, f):
        # 1. Where a thread is; its weights; h of the first step, zeros behind it.
        thread, direction = integer(ptx.thread_x()), integer(ptx.block_y())
        slab, rank = ptx.divided(integer(ptx.block_x()), integer(cluster))
        in_block, lane = integer(thread // lanes), integer(thread & (lanes - 1))
        unit, image = integer(rank * units + in_block), integer(slab * images)
        is_there = in_block < units and unit < f.hidden
        here, gate = integer(unit if is_there else 0), integer(min(integer(lane & 3), integer(gates - 1)))
        weights, found = ptx.cuda.local.array(all_weights, real), ptx.cuda.local.array(gates, real)
        quad = ptx.cuda.local.array(all_quads, real)
        h, c = ptx.cuda.local.array(images, real), ptx.cuda.local.array(images, real)
        values = ptx.cuda.local.array(images, real)
        load_weights(w, weights, integer(f.recurrent + direction * f.next_matrices), here, lane, is_there, f)
        bias = zero
        if is_gru:
            bias = widen(ptx.load_constant(w, integer(f.bias + direction * f.next_biases + 2 * f.hidden + here)))
        shared = ptx_tile.dynamic_shared()
        clear(shared, thread)
        # Threads without a unit put their h where nobody reads it.
        to = u32(shared + u32(here * 4 if is_there else spare_at))
        apart, image_step = u32(buffer_bytes if is_there else 0), u32(image_bytes if is_there else 0)
        if cluster > 1:
            to = ptx_cluster.address_in_block(to, integer(lane & (cluster - 1)))
        for i in range(images):
            row = integer(direction * f.batch + min(integer(image + i), integer(f.batch - 1)))
            cell = integer(f.state + row * f.hidden + here)
            h[i], c[i] = state_of(hx, cell), zero
            if is_lstm:
                c[i] = state_of(cx, cell)
            put_h(u32(to + u32(i * image_step)), h[i])
        # From here on addresses go from step to step, forward or back, and bytes from an image to the next.
        row = integer(((f.steps - 1 if direction else 0) * f.batch + image) * f.directions + direction)
        ring, last = u32(shared + u32(ring_at + thread * 4)), integer(f.batch - 1 - image)
        image_elems = long(f.directions * f.hidden)
        step_elems = long((-f.batch if direction else f.batch) * image_elems)
        source = ptx.address(sums, integer((row * gates + gate) * f.hidden + here))
        pitch, ahead = long(image_elems * (4 * gates)), long(step_elems * (4 * gates))
        for step in range(RING - 1):
            source = copy_sums(ring, integer(step), source, pitch, ahead, last, f)
        of_gate, other, of_y = places(out, y, saved, row, here, lane, f)
        rows_of_other = integer(kept if keeps_c and lane == 0 else 1)
        writes_gate, writes_other = is_there and lane < 4, is_there and first_other <= lane < end_other
        writes_y = is_there and lane == 2
        arrive()
        leave()

        # 2. The steps: the loads of h first, and what waits for nothing while they are under way.
        step, reading, writing = integer(0), u32(shared + u32(lane * 16)), apart
        while step < f.steps:
            load_h(quad, reading, 0)
            source = copy_sums(ring, integer(step + RING - 1), source, pitch, ahead, last, f)
            wait()
            slot = u32(ring + u32((step & (RING - 1)) * slot_bytes))
            for i in range(images):
                a = float_of(load(u32(slot + u32(i * (threads * 4)))))
                if i > 0:
                    load_h(quad, reading, i)
                products(weights, found, quad)
                h[i], c[i], value = do_gates(sums_of_unit(found, lane), a, c[i] if is_lstm else h[i], bias, lane)
                put_h(u32(to + writing + u32(i * image_step)), h[i])
                values[i] = value
            # What is written to global memory after the arrival, no other block waits for.
            arrive()
            for i in range(images):
                if i <= last:
                    if training and kept > 0 and writes_gate:
                        store_at(moved(of_gate, long(i * image_elems * (4 * kept))), values[i])
                    if writes_other:
                        result = select(lane == 0, c[i], h[i]) if keeps_c else h[i]
                        store_at(moved(other, long(i * image_elems * rows_of_other * 4)), result)
                    if narrow_y and writes_y:
                        store_at(moved(of_y, long(i * image_elems * y_bytes)), narrow(h[i]))
            leave()
            of_gate, of_y = moved(of_gate, long(step_elems * (4 * kept))), moved(of_y, long(step_elems * y_bytes))
            other = moved(other, long(step_elems * rows_of_other * 4))
            step, writing = integer(step + 1), u32(apart - writing)
            reading = u32(shared + u32(lane * 16 + (step & 1) * buffer_bytes))

        # 3. The last state.
        for i in range(images):
            if lane == 0 and is_there and image + i < f.batch:
                cell = integer(f.state + (direction * f.batch + image + i) * f.hidden + unit)
                hy[cell] = narrow(h[i])
                if is_lstm:
                    cy[cell] = narrow(c[i])

    data, wide = ptx.pointer(v.dtype), ptx.pointer("f32")
    return forward, (wide, data, data, data, wide, data, wide, data, data, ptx.record(Fields, 32))


class Persistent(LaunchedCandidate[Config]):
    """Forward, where R fits the registers of a cluster."""

    op, algorithm = "rnn_fwd", "persistent"

    def supports(self, problem: RnnProblem, device: Gpu) -> Support:
        return plan.support(problem, self.configs(problem, device))

    def configs(self, problem: RnnProblem, device: Gpu) -> tuple[Config, ...]:
        return plan.configs(problem, device, _LANES, _layout)

    def roundings(self, problem: RnnProblem, device: Gpu) -> int:
        return rnn_layers.roundings(problem, device)

    def workspace_bytes(self, problem: RnnProblem, config: Config, device: Gpu) -> int:
        return ForwardMemory(problem, False).workspace.size_bytes

    def estimate(self, problem: RnnProblem, config: Config, device: Gpu) -> float:
        step_us = plan.step_us(problem, config, _layout(problem, config), device)
        launches_us = problem.layers * rnn_layers.LAUNCH_US
        return launches_us + problem.layers * problem.steps * step_us + rnn_layers.products_us(problem, device)

    def launches(self, problem: RnnProblem, config: Config, device: Gpu) -> list[Launch]:
        memory, found = ForwardMemory(problem, False), list[Launch]()
        for layer in range(problem.layers):
            found += [rnn_layers.sums(problem, memory, layer, device), _steps(problem, memory, layer, config)]
        return found


_LANES = (4, 8, 16, 32)


def _variant(problem: RnnProblem, config: Config) -> Variant:
    """Of a layer that is not the last."""
    units = ceil(problem.hidden / config.cluster)
    return Variant(
        mode=problem.mode,
        dtype=problem.dtype,
        training=problem.training,
        out=True,
        y=False,
        lanes=config.lanes,
        units=units,
        threads=ceil(units * config.lanes / 32) * 32,
        quads=ceil(problem.hidden / (4 * config.lanes)),
        images=config.images,
        cluster=config.cluster,
    )


def _layout(problem: RnnProblem, config: Config) -> Layout:
    variant = _variant(problem, config)
    return Layout(variant.threads, problem.parameters.gates * 4 * variant.quads, variant.shared_bytes)


def _steps(problem: RnnProblem, memory: ForwardMemory, layer: int, config: Config) -> Launch:
    w, out, y, saved = weights(problem, layer), memory.outputs(layer), memory.y(layer), memory.saved(layer)
    variant = _variant(problem, config)._replace(out=out.is_somewhere, y=y.is_somewhere)
    states = [memory.state(name, layer) for name in ("hx", "cx", "hy", "cy")]
    places = (memory.sums, memory.operand("w"), *states[:2], out, y, saved, *states[2:])
    fields = Fields(
        **of_steps(problem, layer),
        bias=w.recurrent_bias,
        next_biases=w.next_biases,
        out=out.first,
        saved=saved.first,
    )
    return Launch(
        source=Source(forward_kernel, variant, variant.threads),
        grid=(plan.blocks(problem, config), problem.directions, 1),
        pointers=tuple(place.pointer for place in places),
        scalars="",
        integers=fields,
        dynamic_shared_bytes=variant.shared_bytes,
        cluster=config.cluster,
    )


FWD = Persistent()
