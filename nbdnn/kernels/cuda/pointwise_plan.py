"""What 1x1 layers by TMA boxes share: what they refuse, which tiles they try, and where these lie."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from math import prod
from typing import Any, NamedTuple, TypeVar

from nbdnn.device import Gpu
from nbdnn.kernels.cuda.division import reciprocal
from nbdnn.kernels.cuda.geometry import index_bits
from nbdnn.kernels.cuda.peaks import blocks_at_once, shared_bytes
from nbdnn.problem import ITEMSIZE
from nbdnn.problem_conv import ConvProblem

CHUNK_BYTES = 16  # rows of a tensor begin at multiples of it
_MOST_STAGES = 6
_CONFIGS, _WORTH_MEASURING = 8, 1.3
TileT = TypeVar("TileT", bound=tuple)


class Integers(NamedTuple):
    """Those of a kernel. A block takes every step-th of `tiles` tiles: of images, of each `of_pixels` sets of pixels,
    of each `of_outputs` sets of output channels, with what `ptx.split` takes. summed: channels of the image that is
    gathered; outputs: of the other one."""

    tiles: int
    step: int
    of_pixels: int
    of_pixels_by: int
    of_pixels_shift: int
    of_outputs: int
    of_outputs_by: int
    of_outputs_shift: int
    summed: int
    outputs: int
    pixels: int


def refusal(problem: ConvProblem, device: Gpu, dtypes: tuple[str, ...]) -> str:
    """Why no kernel of these is correct here, or ''."""
    if device.capability[0] != 9:
        return f"compute capability {device.capability}: tensor maps are passed as compilers of 9.0 read them"
    if problem.dtype not in dtypes:
        return f"dtype {problem.dtype} is not {' or '.join(dtypes)}"
    if prod(problem.filter) > 1 or any(map(any, problem.pad)) or max(problem.stride) > 1 or problem.groups > 1:
        has = f"filter {problem.filter}, pad {problem.pad}, stride {problem.stride}, {problem.groups} groups"
        return f"{has}: only one tap of stride 1 without padding or groups"
    if problem.channels_last != problem.y_channels_last:
        return f"layouts {problem.layout} and {problem.y_layout} differ"
    if problem.align < CHUNK_BYTES:
        return f"alignment of {problem.align} bytes is below {CHUNK_BYTES}"
    if 0 in (problem.n, problem.c, problem.k, pixels := prod(problem.spatial)):
        return f"{problem.n} images of {pixels} pixels, {problem.c} to {problem.k} channels: one of them is 0"
    whole = CHUNK_BYTES // ITEMSIZE[problem.dtype]
    if not problem.channels_last and pixels % whole:
        return f"planes of {pixels} pixels are not multiples of {whole}"
    if index_bits(problem, ()) != 32:
        return f"{max(operand.size_elems for operand in problem.operands)} elements are more than int32 counts"
    return ""


def worth_measuring(tiles: Iterable[TileT], us: Callable[[TileT], float]) -> tuple[TileT, ...]:
    """Those that are guessed to take the least, the best first."""
    order = sorted((us(tile), tile) for tile in tiles)
    return tuple(tile for each, tile in order[:_CONFIGS] if each <= _WORTH_MEASURING * order[0][0])


def deepest(shape: TileT, needed_bytes: Callable[[TileT], int], device: Gpu, least: int = 2) -> Iterator[TileT]:
    """The shape with as many stages as shared memory has room for, if these are `least` or more."""
    tile: Any = shape
    for stages in range(_MOST_STAGES, least - 1, -1):
        needed = needed_bytes(deep := tile._replace(stages=stages))
        if needed <= shared_bytes(device) and blocks_at_once(needed, device) >= tile.blocks:
            yield deep
            return


def channels(problem: ConvProblem) -> tuple[int, int]:
    """(of what is summed over, of the output)."""
    return (problem.k, problem.c) if problem.op == "conv_bwd_data" else (problem.c, problem.k)


def integers_of(problem: ConvProblem, tiles: tuple[int, int, int], step: int) -> Integers:
    """tiles: (images, sets of pixels of each, sets of output channels)."""
    _, of_pixels, of_outputs = tiles
    walk = (*(of_pixels, *reciprocal(of_pixels)), *(of_outputs, *reciprocal(of_outputs)))
    pixels = prod(problem.spatial) * (problem.n if problem.channels_last else 1)
    return Integers(prod(tiles), step, *walk, *channels(problem), pixels)


@cache
def place_of(of_pixels: int, of_outputs: int):
    """Device function (number, f) -> image, first pixel and first output channel of a tile of that extent."""
    from nbdnn.kernels.cuda import ptx

    integer = ptx.INTEGER[32]

    @ptx.inline
    def place(number, f):
        rest, outputs = ptx.split(number, f.of_outputs, f.of_outputs_by, f.of_outputs_shift)
        n, pixels = ptx.split(rest, f.of_pixels, f.of_pixels_by, f.of_pixels_shift)
        return n, integer(pixels * of_pixels), integer(outputs * of_outputs)

    return place
