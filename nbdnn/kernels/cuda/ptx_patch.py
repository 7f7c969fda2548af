"""From the sums of `wgmma_patch.py` to the output, chunk by chunk, all of it unrolled.

Numba took 10 to 25 s to make a kernel where all this was written as inlined functions, and takes 2.5.
"""

from __future__ import annotations

from functools import cache

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic
from numba.cuda.typing import signature

from nbdnn.kernels.cuda import epilogue
from nbdnn.kernels.cuda.ptx import EFFECT, F32, I32, asm, unpacked
from nbdnn.kernels.cuda.ptx_vector import load_parts, load_vector, store_vector, widened
from nbdnn.kernels.cuda.quads import QUAD
from nbdnn.kernels.cuda.wgmma_patch import GROUP, ROWS
from nbdnn.kernels.cuda.wgmma_patch_store import Chunks


def _shared(builder, address, of=I32):
    return builder.inttoptr(address, of.as_pointer(3))


class _Outputs:
    """What a thread finishes of chunks: runs of neighbours, in steps."""

    def __init__(self, builder, how: Chunks, given: dict) -> None:
        self.builder, self.how, self.given = builder, how, given
        self.lanes = 1 if how.planar else QUAD
        thread, of_slot = given["thread"], how.chunk if how.planar else ROWS // QUAD
        self.line = builder.udiv(thread, I32(of_slot))  # of planar outputs the first filter, else the first slot
        self.place = builder.urem(thread, I32(of_slot))  # of planar outputs the slot, else which four filters
        self.apart = GROUP // of_slot

    def steps(self, size: int) -> int:
        """For a chunk of so many slots."""
        return (ROWS if self.how.planar else size) // self.apart

    def run(self, first: int, size: int, step: int):
        """(shared offset in a chunk, filter, element of the output, whether it exists) of a step's neighbours."""
        builder, given = self.builder, self.given
        line = builder.add(self.line, I32(step * self.apart))
        if self.how.planar:
            slot, row = self.place, line
            is_slot = builder.icmp_signed("<", slot, I32(size))
            slot = builder.select(is_slot, slot, I32(0))
        else:
            slot, row, is_slot = line, builder.mul(self.place, I32(QUAD)), None
        filter_ = builder.add(given["filter"], row)
        at = builder.add(given["places"], builder.mul(builder.add(slot, I32(first)), I32(4)))
        place = builder.load(_shared(builder, at))
        exists = builder.icmp_signed(">=", place, I32(0))
        exists = builder.and_(exists, builder.icmp_signed("<", filter_, given["filters"]))
        exists = exists if is_slot is None else builder.and_(exists, is_slot)
        offset = builder.add(builder.mul(slot, I32(self.how.slot_bytes)), builder.mul(row, I32(4)))
        element = builder.add(place, builder.mul(filter_, given["of_filter"]))
        return offset, filter_, element, exists

    def ask(self, run) -> dict:
        """By token, the words of what is read of a run."""
        _, _, element, exists = run
        return {
            token: load_parts(
                self.builder,
                self.builder.gep(self.given[token], [element]),
                exists,
                self.how.dtype,
                self.lanes,
                constant=False,
            )
            for token in self.how.read
        }


@cache
def store_chunks(how: Chunks):
    """Intrinsic (sums, (staged sums, the thread's own, places), barrier, (thread, first filter, filters, step),
    (out, bias, residual), (alpha, beta)).

    The first three are shared addresses. thread: of the warpgroup, whose filters begin with the first, of so many in
    all. step: from a filter of the output to the next.
    """
    real, finish = types.float32, epilogue.finish("f32", how.tokens).py_func
    has_bias, of_six = "bias" in how.tokens, signature(real, *[real] * 6)
    addresses, integers = types.UniTuple(types.uint32, 3), types.UniTuple(types.int32, 4)

    @intrinsic
    def store(typingctx, sums, where, barrier, numbers, pointers, scalars):
        def codegen(context, builder, sig, args):
            total = unpacked(builder, args[0], how.slots // 2)
            (staged, own, places), scalars = unpacked(builder, args[1], 3), unpacked(builder, args[5], 2)
            thread, filter_, filters, of_filter = unpacked(builder, args[3], 4)
            out, bias, residual = unpacked(builder, args[4], 3)
            given = {"thread": thread, "filter": filter_, "filters": filters, "places": places, "of_filter": of_filter}
            outputs = _Outputs(builder, how, given | {"beta": out, "res": residual})
            zeros = [F32(0.0)] * outputs.lanes

            def biases(of_run, exists):
                return load_vector(builder, builder.gep(bias, [of_run]), exists, how.dtype, outputs.lanes)

            def meet():
                asm(builder, ir.VoidType(), "bar.sync $0, 128;", "r,~{memory}", [args[2]], EFFECT)

            def store_sums(number, first, size):
                half = number % 2 * how.chunk * how.slot_bytes
                for value, offset in zip(total[first // 2 : (first + size) // 2], _offsets(size, how), strict=True):
                    builder.store(value, _shared(builder, builder.add(own, I32(half + offset)), F32))

            def finished(run, asked, half):
                offset, of_run, element, exists = run
                lanes, vector = outputs.lanes, ir.VectorType(F32, outputs.lanes)
                slot = _shared(builder, builder.add(builder.add(staged, I32(half)), offset), vector)
                came = builder.load(slot, align=4 * lanes)
                values = [builder.extract_element(came, I32(i)) for i in range(lanes)]
                shift = biases(of_run, exists) if has_bias and how.planar else of_thread
                before, added = (
                    widened(builder, how.dtype, asked[t]) if t in asked else zeros for t in ("beta", "res")
                )
                elements = [
                    context.compile_internal(builder, finish, of_six, [value, *scalars, *others])
                    for value, *others in zip(values, before, shift, added, strict=True)
                ]
                store_vector(builder, builder.gep(out, [element]), exists, how.dtype, elements)

            chunks = [(first, min(how.chunk, how.slots - first)) for first in range(0, how.slots, how.chunk)]
            every = [(*chunk, step) for chunk in chunks for step in range(outputs.steps(chunk[1]))]
            asked: list[dict] = []

            def ask_until(count):
                while how.read and len(asked) < min(count, len(every)):
                    asked.append(outputs.ask(outputs.run(*every[len(asked)])))

            done, of_thread = 0, zeros
            if has_bias and not how.planar:
                first_filter = builder.add(filter_, builder.mul(outputs.place, I32(QUAD)))
                of_thread = biases(first_filter, builder.icmp_signed("<", first_filter, filters))
            ask_until(how.ahead)
            for number, (first, size) in enumerate(chunks):
                store_sums(number, first, size)
                meet()
                for step in range(outputs.steps(size)):
                    run = outputs.run(first, size, step)
                    finished(run, asked[done] if how.read else {}, number % 2 * how.chunk * how.slot_bytes)
                    done += 1
                    ask_until(done + how.ahead)
            meet()
            return context.get_dummy_value()

        floats, reals = types.UniTuple(types.float32, how.slots // 2), types.UniTuple(types.float32, 2)
        return signature(types.none, floats, addresses, types.int32, integers, pointers, reals), codegen

    return store


def _offsets(size: int, how: Chunks) -> list[int]:
    """Of a thread's sums of so many slots, in their order: of every eight its row's pair, then those of the eighth row
    after it."""
    return [
        (eight + second) * how.slot_bytes + 4 * half
        for eight in range(0, size, 8)
        for half in (0, 8)
        for second in (0, 1)
    ]
