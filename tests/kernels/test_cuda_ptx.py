"""Each intrinsic becomes the instruction it stands for, on every architecture."""

from __future__ import annotations

import re

import pytest

from nbdnn.kernels.cuda.compile import Source, compile_kernel, ptx_text

pytestmark = pytest.mark.usefixtures("numba_cuda")


def _copies(constant: bool, words: int):
    from nbdnn.kernels.cuda import ptx

    load, store = (ptx.LOAD_CONSTANT if constant else ptx.LOAD)[words], ptx.STORE[words]

    def kernel(x, y):
        i = ptx.thread_x() * words
        store(y, i, load(x, i))

    return kernel, (ptx.pointer("f32"), ptx.pointer("f32"))


def _scalars(dtype: str):
    from nbdnn.kernels.cuda import ptx

    widen, narrow = ptx.WIDEN[dtype], ptx.NARROW[dtype]

    def kernel(x, y):
        i = ptx.thread_x()
        y[i] = narrow(widen(ptx.load_constant(x, i)))

    return kernel, (ptx.pointer(dtype), ptx.pointer(dtype))


def _integers(bits: int):
    from nbdnn.kernels.cuda import ptx

    integer = ptx.INTEGER[bits]

    def kernel(x, extent, stride):
        quotient, rest = ptx.divided(integer(ptx.block_x() * 256 + ptx.thread_x()), extent)
        x[integer(quotient * stride + rest)] = 1

    return kernel, (ptx.pointer("f32"), integer, integer)


def _pairs(dtype: str):
    from nbdnn.kernels.cuda import ptx, ptx_tile

    load, store, pack, unpack = ptx.LOAD[1], ptx.STORE[1], ptx_tile.PACK[dtype], ptx_tile.UNPACK[dtype]

    def kernel(x, y):
        low, high = unpack(load(x, 0))
        store(y, 0, pack(high, ptx.fma(low, high, low)))

    return kernel, (ptx.pointer(dtype), ptx.pointer(dtype))


def _shuffle(dtype: str):
    from nbdnn.kernels.cuda import ptx

    def kernel(x):
        value = x[ptx.thread_x()]
        x[ptx.thread_x()] = value + ptx.shuffle_xor(value, 16)

    return kernel, (ptx.pointer(dtype),)


def _tile(dtype: str, copy_bytes: int):
    """A tile by way of shared memory through a matrix instruction."""
    from nbdnn.kernels.cuda import ptx, ptx_tile

    copy, wait, store_shared = ptx_tile.COPY_ASYNC[copy_bytes], ptx_tile.copy_async_wait(1), ptx_tile.STORE_SHARED[4]
    multiply, load_shared, store = ptx_tile.MULTIPLY[dtype], ptx_tile.LOAD_SHARED[2], ptx.STORE[4]
    word, real, step = ptx.cuda.types.uint32, ptx.REAL["f32"], copy_bytes // 4

    def kernel(x, y, inside):
        lane = ptx.thread_x()
        shared = ptx_tile.dynamic_shared()
        copy(word(shared + lane * copy_bytes), ptx.address(x, lane * step), inside)
        ptx_tile.copy_async_commit()
        wait()
        ptx.cuda.syncthreads()
        a = ptx_tile.load_matrices(word(shared + lane * 16))
        transposed = ptx_tile.load_matrices_transposed(word(shared + 1024 + lane * 16))
        product = multiply(a, (transposed[0], transposed[1]), (real(0), real(0), real(0), real(0)))
        scratch = ptx_tile.shared_address(ptx.cuda.shared.array(256, real, 16))
        words = (
            ptx_tile.word_of(product[0]),
            ptx_tile.word_of(product[1]),
            ptx_tile.to_tf32(product[2]),
            ptx_tile.word_of(product[3]),
        )
        store_shared(word(scratch + lane * 16), words)
        ptx.cuda.syncthreads()
        first = load_shared(word(scratch + (31 - lane) * 8))
        store(y, lane * 4, (first[0], first[1], ptx_tile.word_of(ptx_tile.float_of(first[1])), words[3]))

    return kernel, (ptx.pointer("f32"), ptx.pointer("f32"), ptx.INTEGER[32])


def _outer_products(depth: int, a_by_k: bool, b_by_k: bool):
    """Rows of shared memory by others; what is stored is the last 4 x 4 of 8 x 8."""
    from nbdnn.kernels.cuda import ptx, ptx_products, ptx_tile

    a, b = (ptx_products.Factor(64, 128 if by_k else 32, by_k) for by_k in (a_by_k, b_by_k))
    real, store, multiply = ptx.REAL["f32"], ptx.STORE[4], ptx_products.outer_products(depth, a, b)
    word, zeros = ptx.cuda.types.uint32, (real(0),) * 16

    def kernel(y):
        thread = ptx_tile.computed_here(ptx.thread_x())
        shared = ptx_tile.shared_address(ptx.cuda.shared.array(1024, real, 16))
        at = word(shared + thread * 16)
        last = multiply((zeros, zeros, zeros, zeros), at, word(at + 512))[3]
        store(y, thread * 16, ptx_tile.words_of(last[0:4]))
        store(y, thread * 16 + 4, ptx_tile.words_of(last[4:8]))
        store(y, thread * 16 + 8, ptx_tile.words_of(last[8:12]))
        store(y, thread * 16 + 12, ptx_tile.words_of(last[12:16]))

    return kernel, (ptx.pointer("f32"),)


def _sandwich(matrix: tuple[tuple[float, ...], ...]):
    from nbdnn.kernels.cuda import ptx, ptx_products

    real, rows, columns, transform = ptx.REAL["f32"], len(matrix), len(matrix[0]), ptx_products.sandwich(matrix)
    before, after = columns * columns, rows * rows

    def kernel(x, y):
        source, target = ptx.cuda.local.array(before, real), ptx.cuda.local.array(after, real)
        for i in range(before):
            source[i] = x[i]
        transform(source, target)
        for i in range(after):
            y[i] = target[i]

    return kernel, (ptx.pointer("f32"), ptx.pointer("f32"))


# NVVM before and since Blackwell write the same load as two words or as one of 64 bits.
_VECTOR = {1: r"\.[fbu]32", 2: r"(\.v2\.[fbu]32|\.[bu]64)", 4: r"(\.v4\.[fbu]32|\.v2\.[bu]64)"}
CASES = [
    *((_copies, (False, n), [r"ld\.global" + _VECTOR[n], r"st\.global" + _VECTOR[n]]) for n in (1, 2, 4)),
    *((_copies, (True, n), [r"ld\.global\.nc" + _VECTOR[n]]) for n in (1, 2, 4)),
    (_scalars, ("f16",), [r"ld\.global\.nc\.[bu]16", r"cvt\.f32\.f16", r"cvt\.rn\.f16\.f32"]),
    (_scalars, ("bf16",), [r"ld\.global\.nc\.[bu]16", r"shl\.b32", r"cvt\.rn\.bf16\.f32"]),
    (_scalars, ("f64",), [r"ld\.global\.nc\.[fb]64"]),
    (_integers, (32,), [r"div\.u32", r"ctaid\.x", r"mad\.lo\.s32"]),
    (_integers, (64,), [r"div\.u64"]),
    (_pairs, ("f16",), [r"cvt\.f32\.f16", r"cvt\.rn\.f16x2\.f32", r"fma\.rn\.f32"]),
    (_pairs, ("bf16",), [r"cvt\.rn\.bf16x2\.f32", r"shl\.b32"]),
    (_shuffle, ("f32",), [r"shfl\.sync\.bfly\.b32"]),
    (_shuffle, ("f64",), [r"(?s)shfl\.sync\.bfly\.b32.*shfl\.sync\.bfly\.b32"]),
    *((_tile, ("bf16", n), [rf"cp\.async\.c[ag]\.shared\.global \[\S+\], \[\S+\], {n}, "]) for n in (4, 8, 16)),
    (_tile, ("bf16", 16), [r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.bf16", r"cp\.async\.commit_group"]),
    (_tile, ("f16", 16), [r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.f16", r"cp\.async\.wait_group 1;"]),
    (_tile, ("tf32", 16), [r"mma\.sync\.aligned\.m16n8k8\.row\.col\.f32\.tf32", r"cvt\.rna\.tf32\.f32"]),
    (_tile, ("f16", 8), [r"ldmatrix\.sync\.aligned\.m8n8\.x4\.shared", r"ldmatrix\S+\.x4\.trans\.shared"]),
    (_outer_products, (4, False, False), [r"ld\.shared" + _VECTOR[4], r"fma\.rn\.f32", r"mov\.b32"]),
    (_outer_products, (8, True, True), [r"ld\.shared" + _VECTOR[4], r"fma\.rn\.f32"]),
    (_outer_products, (8, True, False), [r"ld\.shared" + _VECTOR[4], r"fma\.rn\.f32"]),
    (_outer_products, (8, False, True), [r"ld\.shared" + _VECTOR[4], r"fma\.rn\.f32"]),
    (_sandwich, (((1.0, -1.0, 0.0), (0.5, 0.0, 1.0)),), [r"sub\.(rn\.)?f32", r"fma\.rn\.f32|mul\.(rn\.)?f32"]),
    (_tile, ("f16", 4), [r"st\.shared" + _VECTOR[4], r"ld\.shared" + _VECTOR[2], r"(bar|barrier\.cta)\.sync"]),
]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a", "sm_120"])
@pytest.mark.parametrize(("builder", "specialised_on", "instructions"), CASES)
def test_instruction(builder, specialised_on: tuple, instructions: list[str], arch: str) -> None:
    source = Source(builder, specialised_on, 128)
    ptx = ptx_text(source, arch)
    missing = [instruction for instruction in instructions if not re.search(instruction, ptx)]
    assert not missing, ptx
    assert compile_kernel(source, arch).stack_bytes == 0
