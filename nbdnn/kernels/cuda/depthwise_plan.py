"""What depthwise kernels know when they are compiled: the tile of a thread, what its taps meet, and its vectors.

On one axis a thread computes `tile` neighbouring outputs, number i*tile and on. They read positions of the input that
lie at fixed distances from i*step, whichever tile it is; a bwd_data of stride u reads dy at every u-th distance, which
needs a tile of a multiple of u. Channels-last, a vector is a few channels of one pixel; planar, a few columns of one
row, of which a tap needs one: there a vector begins at a multiple of its own size, so that its address does.
"""

from __future__ import annotations

from math import ceil, gcd
from typing import NamedTuple

from nbdnn.candidate import ConfigT
from nbdnn.device import Gpu
from nbdnn.kernels.cpu.geometry import spatial3, tensor_strides
from nbdnn.kernels.cuda.geometry import index_bits
from nbdnn.kernels.cuda.peaks import copy_bytes_per_s
from nbdnn.problem import ITEMSIZE
from nbdnn.problem_conv import ConvProblem

WARP = 32
THREADS = 128  # of a block, but of those that `conv_depthwise` keeps busy
REGISTER_TAPS = 49  # weights, or sums of them, that a thread holds at most: 7x7 taps, or 3x3 taps of 4 channels
MOST_PRODUCTS = 1300  # written out in one kernel: 20 KB of code
_KEPT, _LOADED = 136, 182  # of the 168 registers of a thread; others keep addresses
_KEPT_OF_128, _LOADED_OF_128, _BOTH_OF_128 = 88, 90, 150
WEIGHTS_BYTES = 48 << 10  # of shared memory, at most, while that leaves a block more than one vector of channels
VECTOR_BYTES = 16
_CONFIGS, _CONFIGS_OF_LAUNCHES = 4, 2  # worth measuring; where a launch takes longest, tiles hardly matter
_WORTH_MEASURING = 1.6  # times the best guess
_LAUNCH_US = 2.5
_INSTRUCTIONS_PER_CLOCK_AND_SM = 128  # one for each lane of the four schedulers' warps
_RESIDENT = 512  # threads of a multiprocessor that hide what they wait for
# Times what layers take that have several outputs of a channel, channels-last and in planes: of one channel to 32,
# 3x3x3 and 5x5, in f16 and f32, 2.0 to 2.3 and 1.1 to 1.6 (an H200).
_SEVERAL_LAST, _SEVERAL_PLANAR = 2.1, 1.3
# Loads of a warp whose threads' tiles are wider than their vectors meet as many lines of the cache as they span.
_LINE_BYTES, _CLOCKS_OF_A_LINE = 128, 1.8
# Stores that fill a sector of the second-level cache one after the other: each but the first, of 7x7 to 112x112 images.
_SECTOR_BYTES, _SECTORS_PER_NS = 32, 110.0


class Axis(NamedTuple):
    """What a filter does on one axis: its taps and how they meet the image; pad is that before."""

    taps: int
    stride: int
    pad: int
    dilation: int


class Reach(NamedTuple):
    """One tap of one output of a tile: the input position that it reads, counted from the tile's step."""

    output: int
    position: int
    tap: int


class Row(NamedTuple):
    """A row of a tile. offsets: columns at which vectors are loaded, counted from the tile's step.

    products: (output, loaded element, element of the row's weights), each an index into a flat tuple.
    """

    offsets: tuple[int, ...]
    products: tuple[tuple[int, int, int], ...]


def axes(problem: ConvProblem) -> tuple[Axis, Axis, Axis]:
    """Of depth, rows and columns."""
    fields = (problem.filter, problem.stride, tuple(before for before, _ in problem.pad), problem.dilation)
    every = (spatial3(field, 0 if field is fields[2] else 1) for field in fields)
    depth, rows, columns = (Axis(*values) for values in zip(*every, strict=True))
    return depth, rows, columns


def step(forward: bool, axis: Axis, tile: int) -> int:
    """Input positions from one tile to the next."""
    return tile * axis.stride if forward else tile // axis.stride


def reaches(forward: bool, axis: Axis, tile: int) -> list[Reach]:
    """What the taps of a tile's outputs read, in the order of the taps."""
    if forward:
        return [
            Reach(output, output * axis.stride + tap * axis.dilation - axis.pad, tap)
            for tap in range(axis.taps)
            for output in range(tile)
        ]
    distances = [
        (output, output + axis.pad - tap * axis.dilation, tap) for tap in range(axis.taps) for output in range(tile)
    ]
    return [
        Reach(output, distance // axis.stride, tap)
        for output, distance, tap in distances
        if distance % axis.stride == 0
    ]


def row(columns: list[Reach], lanes: int, channels_last: bool) -> Row:
    """The vectors of `lanes` elements that a row's taps need, and what they are multiplied with."""
    if channels_last:
        offsets = tuple(sorted({reach.position for reach in columns}))
        place = {position: index for index, position in enumerate(offsets)}
        return Row(
            offsets,
            tuple(
                (reach.output * lanes + lane, place[reach.position] * lanes + lane, reach.tap * lanes + lane)
                for reach in columns
                for lane in range(lanes)
            ),
        )
    offsets = tuple(sorted({reach.position // lanes * lanes for reach in columns}))
    place = {offset + lane: i * lanes + lane for i, offset in enumerate(offsets) for lane in range(lanes)}
    return Row(offsets, tuple((reach.output, place[reach.position], reach.tap) for reach in columns))


def strides(prefix: str, shape: tuple[int, ...], channels_last: bool) -> dict[str, int]:
    """A dense tensor's strides by name: <prefix>_n and so on."""
    return {f"{prefix}_{axis}": s for axis, s in zip("ncdhw", tensor_strides(shape, channels_last), strict=True)}


def vector_lanes(problem: ConvProblem, most: int) -> int:
    """Elements of a vector, a power of two: what pointers, channels (or rows) and both layouts allow."""
    itemsize = ITEMSIZE[problem.dtype]
    limit = min(most, VECTOR_BYTES // itemsize, max(1, problem.align // itemsize))
    if problem.channels_last != problem.y_channels_last or (problem.channels_last and problem.k != problem.c):
        return 1
    extents = (problem.c,) if problem.channels_last else (problem.spatial[-1], problem.out_spatial[-1])
    lanes = 1
    while 2 * lanes <= limit and not any(extent % (2 * lanes) for extent in extents):
        lanes *= 2
    return lanes


def stored_lanes(problem: ConvProblem, columns: int) -> int:
    """Elements of the vectors in which a planar tile's row of so many columns is stored."""
    output, itemsize = problem.operands[2], ITEMSIZE[problem.dtype]
    if problem.channels_last != problem.y_channels_last:
        return 1
    return gcd(min(VECTOR_BYTES, max(itemsize, problem.align)) // itemsize, columns, output.shape[-1])


def vector_registers(dtype: str, lanes: int) -> int:
    """Registers of a vector as it is loaded."""
    return max(1, lanes * ITEMSIZE[dtype] // 4)


def vectors_a_block(vectors: int, most: int) -> int:
    """How many of a pixel's vectors of channels a block takes: at most `most`, with as few lanes idle as may be."""
    if vectors <= most:
        return max(1, vectors)
    return min(range(most, max(1, most // 2) - 1, -1), key=lambda count: ceil(vectors / count) * count)


class Held(NamedTuple):
    """What a thread keeps in registers by name (sums, weights, inputs), and all that it loads between two waits.

    The compiler moves loads ahead as far as registers go, and where hundreds could go ahead, it has spilled some.
    """

    kept: int
    loaded: int

    @property
    def fits(self) -> bool:
        return self.kept <= _KEPT and self.loaded <= _LOADED

    @property
    def min_blocks(self) -> int:
        """Blocks of a multiprocessor: 4 leave a thread 128 registers, 3 leave it 168."""
        few = self.kept <= _KEPT_OF_128 and self.loaded <= _LOADED_OF_128
        return 4 if few and self.kept + self.loaded <= _BOTH_OF_128 else 3


def kernel_us(problem: ConvProblem, device: Gpu, threads: int, instructions: float, lines: float = 0.0) -> float:
    """Microseconds of a kernel of so many threads of so many instructions each, whose warps meet so many lines of the
    cache each, or of the bytes that it must move."""
    waves = ceil(threads / (_RESIDENT * device.sms)) * _RESIDENT * device.sms / max(1, threads)
    issue_s = threads * min(waves, 2.0) * instructions / (_INSTRUCTIONS_PER_CLOCK_AND_SM * device.sms * device.clock_hz)
    lines_s = threads / WARP * lines * _CLOCKS_OF_A_LINE / (device.sms * device.clock_hz)
    busy_s = max(issue_s, lines_s, 1.15 * problem.min_bytes / copy_bytes_per_s(device))
    if problem.k > problem.c:
        busy_s *= _SEVERAL_LAST if problem.y_channels_last else _SEVERAL_PLANAR
    return _LAUNCH_US + busy_s * 1e6


def lines_met(loads: int, apart: int, itemsize: int) -> int:
    """Lines of the cache that so many loads of a warp meet, whose threads' elements are so many elements apart."""
    return loads * min(WARP, max(1, WARP * apart * itemsize // _LINE_BYTES))


def rewriting_us(elems: int, itemsize: int, columns: int, stored: int) -> float:
    """Microseconds more that so many elements take to store, by threads of so many columns each, `stored` at once."""
    most_a_sector = max(1, _SECTOR_BYTES // (stored * itemsize))
    again = min(columns // stored, most_a_sector) - 1
    return elems * itemsize / _SECTOR_BYTES * again / _SECTORS_PER_NS * 1e-3


def worth_measuring(guesses: list[tuple[float, ConfigT]]) -> tuple[ConfigT, ...]:
    """The best guesses of (microseconds, config) in order, and as they come where they are equal."""
    best = sorted(guesses, key=lambda guess: guess[0])
    least_us = best[0][0]
    most = _CONFIGS if least_us > 2 * _LAUNCH_US else _CONFIGS_OF_LAUNCHES
    return tuple(config for us, config in best[:most] if us <= _WORTH_MEASURING * least_us)


def refusal(problem: ConvProblem) -> str:
    """Why no depthwise kernel is correct here, or ''."""
    if problem.groups != problem.c or problem.k == 0:
        return f"channels {problem.c}, {problem.k} and groups {problem.groups}: not one input channel a group"
    if problem.dtype == "f64":
        return "float64 is left to direct"
    return ""


# ---- larger filters of stride 1, one a channel -----------------------------------------------------------------------


def unit_stride_refusal(problem: ConvProblem, dtypes: tuple[str, ...], most_taps: int) -> str:
    """Why no kernel for these is correct here, or ''. most_taps: rows of a filter, and taps of a row."""
    if problem.dtype not in dtypes:
        return f"dtype {problem.dtype} is not {' or '.join(dtypes)}"
    if problem.ndim != 2:
        return f"{problem.ndim} spatial axes are not 2"
    if problem.groups != problem.c or problem.k != problem.c:
        return f"channels {problem.c}, {problem.k} and groups {problem.groups}: not one channel in and out a group"
    for name, values in (("stride", problem.stride), ("dilation", problem.dilation)):
        if max(values) > 1:
            return f"{name} {max(values)} is not 1"
    if max(problem.filter) > most_taps:
        return f"a filter extent of {max(problem.filter)} is above {most_taps}"
    if problem.n * problem.c == 0:
        return f"a batch of {problem.n} images of {problem.c} channels"
    if index_bits(problem, ()) != 32:
        return f"{max(operand.size_elems for operand in problem.operands)} elements are more than int32 counts"
    return ""


def unit_stride_gather(problem: ConvProblem) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], bool]:
    """(extents of what is summed, of the result, pads before, whether a filter's last tap comes first).

    bwd_data is the forward on dy with other pads and the filter reversed.
    """
    before = tuple(pad for pad, _ in problem.pad)
    if problem.op == "conv_fwd":
        return problem.spatial, problem.out_spatial, before, problem.mode == "conv"
    around = tuple(taps - 1 - pad for taps, pad in zip(problem.filter, before, strict=True))
    return problem.out_spatial, problem.spatial, around, problem.mode == "cross"
