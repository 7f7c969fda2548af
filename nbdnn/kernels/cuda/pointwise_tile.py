"""What kernels of 1x1 layers in float32 share, whose operands come by TMA boxes: lanes of a warp and their channels.

A warp multiplies two factors in shared memory, of which one is *wide*, the other *narrow*, `QUAD` steps of their sum at
a time. A factor lies there in one of two ways:

    lines    32 steps of an element are a line of 128 bytes, whose pieces of 16 bytes lie where their number ^ that of
             the line says: what is contiguous in memory is summed over
    rows     the elements of a step are neighbours: what is contiguous in memory is not summed over
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import prod
from typing import NamedTuple, TypeVar

from nbdnn.device import Gpu
from nbdnn.kernels.cuda.peaks import copy_bytes_per_s
from nbdnn.kernels.cuda.tensor_map import TensorMap
from nbdnn.problem_conv import ConvProblem

WARP, WARPS = 32, 8  # that multiply; one more asks for boxes
QUAD = 4  # steps that are multiplied at once, and elements of 16 bytes
LINE, LINE_BYTES, SWIZZLE = 32, 128, 8  # steps of a line; lines after which their order begins anew
MOST_BOX = 256  # elements of a box on an axis
MOST_REGISTERS = {1: 140, 2: 58}  # of a thread, for sums and factors, by blocks of a multiprocessor
OF_LANE, LANES = (1, 2, 3, 4, 5, 6, 8, 9, 10, 12, 16), (8, 16, 32)
WORKERS, THREADS = WARP * WARPS, WARP * (WARPS + 1)
_LONG_US = 1.0
_PADDED, _SHAPES = 1.25, 40  # times the least that tiles are larger than what they cover; shapes that are looked at
TileT = TypeVar("TileT", bound=tuple)


class Factor(NamedTuple):
    """A factor as lanes have it. different: lanes of a warp that have other elements than each other; held: elements
    of each. step_bytes: of rows, from a step to the next; 0 of lines."""

    different: int
    held: int
    step_bytes: int

    @property
    def words(self) -> int:
        """Neighbours that a lane has, as many as one load takes, and again so many behind those of the other lanes."""
        return next(words for words in (QUAD, 2, 1) if self.held % words == 0) if self.step_bytes else 1

    def place(self, i: int) -> int:
        """Of the lane's elements, from its first one."""
        block, of_block = divmod(i, self.words)
        return block * self.different * self.words + of_block

    @property
    def loads(self) -> int:
        """For QUAD steps."""
        return QUAD * self.held // self.words if self.step_bytes else self.held

    @property
    def registers(self) -> int:
        return self.held if self.step_bytes else QUAD * self.held


class Products(NamedTuple):
    """The factors of a warp."""

    wide: Factor
    narrow: Factor

    @property
    def sums(self) -> int:
        return self.wide.held * self.narrow.held

    @property
    def registers(self) -> int:
        """For sums and factors. Of two that come by lines the shorter one is held whole, and one that comes by rows is
        there for a step."""
        wide, narrow = self
        if wide.step_bytes or narrow.step_bytes:
            return self.sums + wide.registers + narrow.registers
        return self.sums + QUAD * min(wide.held, narrow.held)


class Costs(NamedTuple):
    """Clocks of a load of lines, of a word of rows, and of a stage; the share of the FMA units' rate that a lone block
    of a multiprocessor reaches, that two reach, and of a copy's; how sharply the slowest of all decides; and what is
    spent beside it, and as much again of long ones."""

    line: float
    word: float
    stage: float
    rates: tuple[float, float]
    copy: float
    power: float
    launch_us: float
    long_us: float


def spent_us(
    costs: Costs, products: Products, blocks: int, quads: float, stages: float, moved_bytes: float, device: Gpu
) -> float:
    """Microseconds of memory, shared memory and products beside each other: of a multiprocessor's warps so many quads
    and stages; moved_bytes of all together."""
    lines = sum(factor.held for factor in products if not factor.step_bytes)
    words = sum(factor.held * QUAD for factor in products if factor.step_bytes)
    loads, per_us = sum(factor.loads for factor in products), device.clock_hz / 1e6
    loaded_us = quads * (costs.line * lines + costs.word * words) / per_us
    multiplied_us = quads / 4 * (QUAD * products.sums + loads) / costs.rates[blocks - 1] / per_us
    moved_us = moved_bytes / (copy_bytes_per_s(device) * costs.copy) * 1e6
    together = sum(us**costs.power for us in (loaded_us, multiplied_us, moved_us)) ** (1 / costs.power)
    beside_us = costs.launch_us + costs.long_us * together / (together + _LONG_US)
    return beside_us + together + stages * costs.stage / per_us


def products(lanes: int, of_wide: int, of_narrow: int, steps_bytes: tuple[int, int]) -> Products:
    """Of a warp in which so many lanes have different elements of the wide factor."""
    return Products(Factor(lanes, of_wide, steps_bytes[0]), Factor(WARP // lanes, of_narrow, steps_bytes[1]))


def good_shapes(shapes: Iterable[TileT], elements: Callable[[TileT], int], us: Callable[[TileT], float]) -> list[TileT]:
    """The best guesses of those that are hardly larger than what they cover. elements: of all tiles of a shape."""
    sizes = {shape: elements(shape) for shape in shapes}
    least = min(sizes.values())
    return sorted((shape for shape, size in sizes.items() if size <= _PADDED * least), key=us)[:_SHAPES]


def image_map(problem: ConvProblem, place: int, channels: int, box: tuple[int, int], plain: bool) -> TensorMap:
    """Of x or dy with so many channels. box: elements of pixels and channels, the neighbours in memory first."""
    pixels = prod(problem.spatial)
    if problem.channels_last:
        return TensorMap(place, "f32", (channels, problem.n * pixels), (4 * channels,), box, plain=plain)
    strides_bytes = 4 * pixels, 4 * pixels * channels
    return TensorMap(place, "f32", (pixels, channels, problem.n), strides_bytes, (*box, 1), plain=plain)


def lane_place(factor: Factor):
    """Device function (shared address, first element, the lane's number among the different ones, quad) -> where the
    lane finds its first element at the first step of the quad. Of lines the first element is a multiple of 8."""
    from nbdnn.kernels.cuda import ptx

    integer, word = ptx.INTEGER[32], ptx.WORD
    lane_bytes, quad_bytes = 4 * factor.words, QUAD * factor.step_bytes

    @ptx.inline
    def of_lines(start, first, number, quad):
        return word(start + (first + number) * LINE_BYTES + ((quad ^ (number & (SWIZZLE - 1))) << 4))

    @ptx.inline
    def of_rows(start, first, number, quad):
        return word(integer(start + quad * quad_bytes + first * 4 + number * lane_bytes))

    return of_rows if factor.step_bytes else of_lines
