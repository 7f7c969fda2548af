"""What plans of 1x1 layers share whose operands come by TMA boxes: what they refuse, and which tiles they try."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from math import prod
from typing import Any, TypeVar

from nbdnn.device import Gpu
from nbdnn.kernels.cuda.geometry import index_bits
from nbdnn.kernels.cuda.peaks import blocks_at_once, shared_bytes
from nbdnn.problem import ITEMSIZE
from nbdnn.problem_conv import ConvProblem

CHUNK_BYTES = 16  # rows of a tensor begin at multiples of it
_MOST_STAGES = 6
_CONFIGS, _WORTH_MEASURING = 8, 1.3
TileT = TypeVar("TileT", bound=tuple)


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
