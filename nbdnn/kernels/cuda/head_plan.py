"""A convolution with few channels of outputs, by rows: what a block computes, and where it lies in shared memory.

    y[k, p, q] = sum over s of  z[s, k, p, q + s*d]
    z[s, k, p, j] = sum over r, c of  x[c, p + r*d, j] * w[k, c, r, s]

    tile    outputs: some rows of 16 to 128 columns; of the image: the rows and columns that they see
    slab    a tile of some channels, a *chunk*, copied asynchronously, with zeros beyond the image and its channels
    sums    z of a tile: a plane for each pair (s, k), the columns of a product whose rows are the image's pixels

An element of a row is multiplied with all taps of its row and all filters at once, where windows would load it for each
tap; the taps' shifted sums are added in the end.
"""

from __future__ import annotations

from math import ceil, gcd
from typing import NamedTuple

from nbdnn.device import Gpu
from nbdnn.kernels.cuda import head_forward
from nbdnn.kernels.cuda.compile import Source
from nbdnn.kernels.cuda.head_records import Head, Variant
from nbdnn.kernels.cuda.rows_plan import aligned
from nbdnn.kernels.cuda.window_candidate import Planned
from nbdnn.kernels.cuda.window_plan import Image, image
from nbdnn.problem import ITEMSIZE
from nbdnn.problem_conv import ConvProblem

_COPY_BYTES = 16
_FMA_THREADS = 256
_REGISTERS = 65536  # of a multiprocessor
_MOST_SUMS = 112  # of a thread


class Config(NamedTuple):
    """A tile has `rows` rows (about that many in float32) of `columns` outputs; blocks: of a multiprocessor at once.

    stages: slabs of a block, of which one is read while others arrive. chunk_bytes: of a pixel in one.
    """

    rows: int
    columns: int
    stages: int
    blocks: int
    chunk_bytes: int

    def __str__(self) -> str:
        return f"{self.rows}x{self.columns}x{self.chunk_bytes}/{self.blocks}s{self.stages}"


MMA = (
    *(Config(8, 32, 2, 2, 64), Config(8, 64, 2, 2, 32), Config(16, 32, 2, 1, 64), Config(8, 32, 3, 2, 64)),
    *(Config(16, 64, 2, 1, 32), Config(4, 64, 2, 4, 32), Config(8, 16, 2, 2, 64), Config(8, 32, 2, 2, 32)),
)
FMA = (
    *(Config(12, 32, 2, 2, 32), Config(8, 32, 2, 2, 64), Config(4, 64, 2, 3, 32), Config(12, 64, 2, 1, 64)),
    *(Config(8, 64, 2, 2, 32), Config(4, 32, 2, 3, 64), Config(8, 32, 2, 1, 32), Config(12, 64, 2, 1, 32)),
)
SMALLEST = Config(4, 32, 2, 1, 64), Config(4, 16, 2, 1, 32)


def forward(problem: ConvProblem, math: str, config: Config, device: Gpu) -> Planned:
    """The kernel of a conv_fwd or bwd_data of stride 1."""
    seen, itemsize = image(problem), ITEMSIZE[problem.dtype]
    planar = not seen.image_last
    neighbours = seen.extent[1] if planar else seen.group_in
    copy_elems = gcd(_COPY_BYTES, neighbours * itemsize, problem.align) // itemsize
    lead = -seen.pad[1] % copy_elems if planar else 0
    reach_h, reach_w = ((taps - 1) * d for taps, d in zip(seen.taps, seen.dilation, strict=True))
    chunk = config.chunk_bytes // itemsize
    step = 8 if math == "mma" else copy_elems if planar else 1
    columns = aligned(config.columns + reach_w + lead, step)
    sums = seen.taps[1] * seen.group_out
    rows, pixels, threads = config.rows, 0, config.rows * 32
    if math == "fma":
        pixels, threads = ceil(config.rows * columns / _FMA_THREADS), _FMA_THREADS
        rows = max(1, min(pixels * _FMA_THREADS // columns, seen.outputs[0]))
    variant = Variant(
        dtype=problem.dtype,
        math=math,
        planar=planar,
        chunk=chunk,
        copy_elems=copy_elems,
        stages=config.stages,
        threads=threads,
        filters=seen.group_out,
        sums=sums,
        columns=columns,
        columns_log2=config.columns.bit_length() - 1,
        pixels=pixels,
        epilogue=problem.epilogue,
    )
    in_rows = rows + reach_h
    row_bytes = (chunk if planar else columns) * variant.pitch
    slab_bytes = in_rows * row_bytes
    chunks = ceil(seen.group_in / chunk)
    # Of a lane's two neighbours in a sum, those of four planes lie in different banks.
    plane = aligned(rows * columns, 32) + 8
    sums_at = aligned(chunks * seen.taps[0] * variant.filter_bytes, 128)
    slabs_at = aligned(sums_at + sums * plane * 4, 128)
    tiles_h, tiles_w = ceil(seen.outputs[0] / rows), ceil(seen.outputs[1] / config.columns)
    tiles = seen.n * tiles_h * tiles_w
    blocks = min(tiles, config.blocks * device.sms)
    registers = variant.held_sums + 64
    return Planned(
        source=Source(head_forward.kernel, variant, threads, config.blocks),
        integers=Head._make((
            tiles, blocks, tiles_h, tiles_w, rows, in_rows, chunks, row_bytes, slab_bytes, plane, lead,
            sums_at, slabs_at, seen.group_in, seen.group_out, *seen.taps, *seen.outputs, *seen.extent, *seen.pad,
            *seen.dilation, *seen.image_strides, seen.filter_strides[0], *seen.filter_strides[2:], *seen.out_strides,
        )),
        grid=(blocks, 1, 1),
        shared_bytes=slabs_at + config.stages * slab_bytes,
        most_blocks=0 if variant.held_sums > _MOST_SUMS else _REGISTERS // (registers * threads),
    )  # fmt: skip


def refusal(seen: Image, problem: ConvProblem) -> str:
    """Why rows of a slab cannot be copied, with the number that says so; or ''."""
    neighbours = seen.group_in if seen.image_last else seen.extent[1]
    if (bytes_ := gcd(_COPY_BYTES, neighbours * ITEMSIZE[problem.dtype], problem.align)) < 4:
        return f"neighbours in the image are multiples of {bytes_} bytes, this kernel copies 4 or more"
    return ""
