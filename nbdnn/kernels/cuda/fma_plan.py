"""What a matrix product on the FMA units may be cut into, and a guess at how long each way takes.

A multiprocessor holds 512 to 384 threads of these kernels; with fewer than 256 it waits for memory and multiplies the
slower. So a product with few tiles is cut along its sum, too, whose parts are added afterwards.
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from nbdnn.device import Gpu
from nbdnn.kernels.cuda.fma_tile import STAGE_K, Tile
from nbdnn.kernels.cuda.peaks import copy_bytes_per_s, fma_flops_per_s

# Instructions of a stage and thread, by count: multiply-adds, others, and those of each copy of 4 bytes.
_PRODUCTS, _OTHERS, _OF_A_COPY = 512, 60, 6
_EFFICIENCY = 0.8  # of the rate that their count promises
BUSY_WARPS = 8.0  # of a multiprocessor, from which on it reaches that
# Of the rate, where one block of a forward or bwd_data has a multiprocessor: nobody multiplies while its threads meet.
LONE = 0.85
LAUNCH_US = 0.6  # which waits by itself for what is before it
_OF_A_PART = 1.5  # times what a copy of its bytes takes
_STAGES_OF_START = 2  # what filling the pipeline and storing a tile cost, in stages
MOST_PARTS = 128  # of a forward or bwd_data
# Of a bwd_filter, whose sums are over all pixels: few channels are few tiles. Beyond MOST_PARTS, every fourth.
MOST_FILTER_PARTS, _PARTS_STEP = 1024, 4
MOST_PART_BYTES = 256 << 20
_HOPELESS = 3.0  # times the best guess


class Config(NamedTuple):
    """A block's tile, and in how many parts each sum is split."""

    tile: Tile
    parts: int

    def __str__(self) -> str:
        return f"{self.tile.m}x{self.tile.n}/{self.parts}"


class Product(NamedTuple):
    """`products` of m x n outputs, each summing `stages` stages; out_elems of all together.

    slower: times what a stage takes; lone: of the rate, where a multiprocessor has one block; busy_warps: of a
    multiprocessor, from which on it reaches the rate.
    """

    products: int
    m: int
    n: int
    stages: int
    out_elems: int
    slower: float = 1.0
    lone: float = 1.0
    busy_warps: float = BUSY_WARPS


def product_us(product: Product, config: Config, device: Gpu) -> float:
    """Microseconds of the product and of the addition of its parts."""
    tile, parts = config
    blocks = product.products * ceil(product.m / tile.m) * ceil(product.n / tile.n) * parts
    stages = ceil(product.stages / parts) + _STAGES_OF_START
    full, rest = divmod(ceil(blocks / device.sms), tile.min_blocks)
    of_stage_us = full * tile.min_blocks * stage_us(tile, tile.min_blocks, device, product.busy_warps)
    if rest:
        of_stage_us += rest * stage_us(tile, rest, device, product.busy_warps) / (product.lone if rest == 1 else 1.0)
    us = LAUNCH_US + stages * of_stage_us * product.slower
    if parts > 1:
        us += LAUNCH_US + _OF_A_PART * (2 * parts + 1) * product.out_elems * 4 / copy_bytes_per_s(device) * 1e6
    return us


def stage_us(tile: Tile, on_one: int, device: Gpu, busy_warps: float = BUSY_WARPS) -> float:
    """Microseconds in which a multiprocessor that has so many blocks gets a stage of one of them done."""
    warps = min(on_one, tile.min_blocks) * tile.threads / 32
    copies = STAGE_K * (tile.m + tile.n) / tile.threads
    share = _EFFICIENCY * _PRODUCTS / (_PRODUCTS + _OTHERS + _OF_A_COPY * copies)
    rate = share * min(1.0, warps / busy_warps) * fma_flops_per_s(device, "f32") / device.sms
    return 2 * tile.m * tile.n * STAGE_K / rate * 1e6


def configs(product: Product, tiles: tuple[Tile, ...], device: Gpu, most_parts: int = MOST_PARTS) -> tuple[Config, ...]:
    """For each tile that is not mostly empty the whole sum and the best split; by the guess, and none without hope."""
    fitting = [t for t in tiles if t.n < 2 * product.n and t.m < 2 * product.m] or [tiles[-1]]
    most = max(1, min(most_parts, product.stages // 4, MOST_PART_BYTES // max(1, 4 * product.out_elems)))
    splits = [*range(1, min(most, MOST_PARTS) + 1), *range(MOST_PARTS + _PARTS_STEP, most + 1, _PARTS_STEP)]
    found: dict[Config, float] = {}
    for tile in fitting:
        guesses = {config: product_us(product, config, device) for config in (Config(tile, parts) for parts in splits)}
        best = min(guesses, key=guesses.__getitem__)
        found |= {config: guesses[config] for config in (Config(tile, 1), best)}
    limit = _HOPELESS * min(found.values())
    return tuple(sorted((config for config in found if found[config] <= limit), key=found.__getitem__))[:4]
