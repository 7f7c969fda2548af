"""A convolution of few channels as windows of raw image rows: what is contiguous in memory stays so in shared memory.

    tile    outputs: some rows of *groups* of 8 pixels beside each other
    line    a row of the image as it lies in memory: all its channels where they are last, else of one channel
    slab    the lines that a tile sees, copied asynchronously, with zeros beyond the image's edges
    window  what one output sees: *segments* of neighbours, R of S * C, or C * R of S
    word    of a window: 32 bits of a segment

Nothing is unpacked: a window of 3 x 3 x 3 is 27 products, not the 36 of quads of channels. Where elements have 16 bits
and the padding makes a window begin in the middle of a word, the first half is masked; where every second window does,
because windows begin an odd number of elements apart, words of theirs are made of two. A table in shared memory says
where each word lies, and what counts.
"""

from __future__ import annotations

from math import ceil, gcd
from typing import NamedTuple

from nbdnn.kernels.cuda.window_plan import Image, image
from nbdnn.problem import ITEMSIZE
from nbdnn.problem_conv import ConvProblem

GROUP = 8  # pixels
ENTRY_BYTES = 8  # of a table
# Pixels are divided by those of a row by a product with 2^20 over that, rounded up.
FRACTION_BITS = 20
CHUNK_BYTES = 16
CHUNK, STEP = 8, 16  # of a filter gradient by phases: elements, and pixels of a product
MOST_CHUNKS = 8  # of a set: its sums and addresses stay in registers
SET_WORDS = 32  # of a window, that a warp sums for a filter gradient in float32: rows of a product


class Lines(NamedTuple):
    """What the code that copies and reads lines depends on.

    math: 'fma', 'mma' or 'tf32'. inner: channels of a line; planar: there are others. step: elements from a pixel's
    window to the next one's. odd: elements before a window, so that it begins on a word. copy_bytes: of one copy.
    """

    dtype: str
    math: str
    inner: int
    planar: bool
    taps_w: int
    step: int
    odd: int
    copy_bytes: int

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]

    @property
    def run(self) -> int:
        """Elements of a segment."""
        return self.taps_w * self.inner

    @property
    def segment_words(self) -> int:
        return ceil((self.run + self.odd) * self.itemsize / 4)

    @property
    def step_bytes(self) -> int:
        return self.step * self.itemsize

    @property
    def split(self) -> bool:
        """Whether windows may begin in the middle of a word."""
        return self.step_bytes % 4 > 0


def lines(seen: Image, problem: ConvProblem, math: str) -> Lines:
    inner = seen.group_in if seen.image_last else 1
    itemsize = ITEMSIZE[problem.dtype]
    return Lines(
        dtype=problem.dtype,
        math=math,
        inner=inner,
        planar=seen.group_in > inner,
        taps_w=seen.taps[1],
        step=seen.stride[1] * inner,
        odd=seen.pad[1] * inner % 2 if itemsize == 2 else 0,
        copy_bytes=gcd(CHUNK_BYTES, seen.extent[1] * inner * itemsize, problem.align),
    )


class Rows(NamedTuple):
    """The integers of a kernel: of the tiles, of shared memory (places and extents in bytes), of the tensors.

    blocks: that share the tiles. tile_groups: of a row; groups: of a tile. planes: channels that are lines of their
    own. line_copies: of a line. per_row: fraction that divides by the pixels of a tile's row. entries: of the table
    of words, or of segments; fragments: of eight. parts: a block's warps take turns at pixels; sets: of words, of a
    block and of all. By phases: entries are a window's chunks, fragments the products of a phase, and groups_at and
    filters_at the places of the tables of pixels.
    """

    tiles: int
    blocks: int
    tiles_h: int
    tiles_w: int
    tile_rows: int
    tile_groups: int
    groups: int
    planes: int
    in_rows: int
    line_copies: int
    per_row: int
    line_elems: int
    pitch: int
    entries: int
    fragments: int
    groups_at: int
    filters_at: int
    slabs_at: int
    slab_bytes: int
    dy_at: int
    parts: int
    sets: int
    all_sets: int
    out_c: int
    taps_h: int
    rows: int
    columns: int
    extent_h: int
    stride_h: int
    stride_w: int
    pad_h: int
    pad_w: int
    dilation_h: int
    image_n: int
    image_c: int
    image_h: int
    w_start: int
    w_out: int
    w_in: int
    w_r: int
    w_s: int
    out_n: int
    out_k: int
    out_h: int
    out_w: int


class Tile(NamedTuple):
    """As in `Rows`."""

    tiles_h: int
    tiles_w: int
    rows: int
    row_groups: int
    in_rows: int
    line_copies: int
    pitch: int

    @property
    def groups(self) -> int:
        return self.rows * self.row_groups


def tile(seen: Image, form: Lines, pixels: int, width: int) -> Tile:
    """As many whole rows of outputs as come near to `pixels`; a row is cut where it is longer than `width`."""
    rows, columns = seen.outputs
    tiles_w = ceil(columns / width)
    row_groups = ceil(ceil(columns / tiles_w) / GROUP)
    tile_rows = max(1, min(rows, pixels // (row_groups * GROUP)))
    reach = (seen.taps[0] - 1) * seen.dilation[0]
    copy_elems = form.copy_bytes // form.itemsize
    # From the first element that is copied, before the first window, to the last word of the last window.
    words = form.segment_words + form.split
    elems = copy_elems - 1 + (row_groups * GROUP - 1) * form.step + words * 4 // form.itemsize
    copies = ceil(elems / copy_elems)
    return Tile(
        tiles_h=ceil(rows / tile_rows),
        tiles_w=ceil(columns / (row_groups * GROUP)),
        rows=tile_rows,
        row_groups=row_groups,
        in_rows=(tile_rows - 1) * seen.stride[0] + reach + 1,
        line_copies=copies,
        pitch=aligned(copies * form.copy_bytes, CHUNK_BYTES),
    )


class Block(NamedTuple):
    """What differs between the passes of `Rows`."""

    blocks: int
    entries: int
    fragments: int
    groups_at: int
    filters_at: int
    slabs_at: int
    slab_bytes: int
    dy_at: int
    parts: int
    sets: int
    all_sets: int


def rows(seen: Image, form: Lines, tile: Tile, block: Block) -> Rows:
    _, _, w_k, w_c, w_r, w_s = seen.filter_strides
    image_n, image_c, image_h, _ = seen.image_strides
    return Rows._make((
        seen.n * tile.tiles_h * tile.tiles_w, block.blocks, tile.tiles_h, tile.tiles_w,
        tile.rows, tile.row_groups, tile.groups, seen.group_in // form.inner,
        tile.in_rows, tile.line_copies, ceil((1 << FRACTION_BITS) / (tile.row_groups * GROUP)),
        seen.extent[1] * form.inner, tile.pitch,
        *block[1:],
        seen.group_out, seen.taps[0], *seen.outputs, seen.extent[0], *seen.stride, *seen.pad, seen.dilation[0],
        image_n, image_c, image_h, seen.filter_strides[0], w_k, w_c, w_r, w_s, *seen.out_strides,
    ))  # fmt: skip


class Forward(NamedTuple):
    """What a kernel of conv_fwd is compiled for.

    stages: slabs, of which one is read. units: of a block, whose warps take turns at them. filters: of a unit. groups:
    of a warp's turn. run: outputs stored at once.
    """

    lines: Lines
    stages: int
    units: int
    filters: int
    groups: int
    run: int
    epilogue: tuple[str, ...]

    @property
    def registers(self) -> int:
        """Of a thread, at least: its sums and 53 more."""
        return self.groups * (8 if self.lines.math == "fma" else self.filters // 4) + 53


class Gradient(NamedTuple):
    """What a kernel of bwd_filter in float32 is compiled for. stages as of the forward; filters, threads of a block."""

    lines: Lines
    stages: int
    filters: int
    threads: int

    @property
    def groups(self) -> int:
        """That a warp adds at once."""
        return {"tf32": 2, "fma": 1}[self.lines.math]

    @property
    def dy_bytes(self) -> int:
        """From a pixel of dy to the next in shared memory; four pixels' filters lie in different banks."""
        return self.filters * 4 + 32

    @property
    def registers(self) -> int:
        """Of a thread: its sums, and the factors of some groups at once."""
        return {"fma": 128, "tf32": 64 + self.filters}[self.lines.math]

    @property
    def set_sums(self) -> int:
        return SET_WORDS * self.filters


class Phased(NamedTuple):
    """What a kernel of bwd_filter in 16 bits is compiled for: `rows_phases.py`.

    stages as of the forward; filters, threads of a block. phases: of all pixels; of_block: that a block
    takes. chunks: of a segment. set_chunks: of a set. shift: elements from where a tile's lines are copied to the first
    window; before: by which they are copied from further on the left, for each group of phases.
    """

    lines: Lines
    stages: int
    filters: int
    threads: int
    phases: int
    of_block: int
    chunks: int
    set_chunks: int
    shift: int
    before: tuple[int, ...]

    @property
    def dy_bytes(self) -> int:
        """From a pixel of dy to the next in shared memory: eight pixels lie in different banks."""
        return self.filters * 2 + 16

    @property
    def sums_step(self) -> int:
        """Elements from a column of a warp's sums to the next in shared memory."""
        return self.filters + 4

    @property
    def warp_bytes(self) -> int:
        """Of a warp's sums."""
        return self.set_chunks * CHUNK * self.sums_step * 4

    @property
    def registers(self) -> int:
        """Of a thread: its sums and 56 more."""
        return self.set_chunks * self.filters // 4 + 56


def aligned(bytes_: int, to: int = 128) -> int:
    return -(-bytes_ // to) * to


def refusal(problem: ConvProblem, math: str) -> str:
    """Why no window of raw rows is right, with the number that says so; or ''."""
    seen = image(problem)
    form = lines(seen, problem, math)
    if problem.dilation[1] != 1 and problem.filter[1] > 1:
        return f"taps of a row are {problem.dilation[1]} pixels apart, this kernel takes neighbours"
    if form.copy_bytes < 4:
        return f"rows of the image are multiples of {form.copy_bytes} bytes, this kernel copies 4 or more"
    return ""
