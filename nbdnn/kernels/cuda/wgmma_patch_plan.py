"""Which tiles `conv_wgmma_patch.py` is tried with, and what they should cost.

A tile is some rows of a column of an image: `width` outputs of each row, which are `line` pixels apart in a patch. The
slots between are lost, and those that fill the last eight.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil, prod
from typing import NamedTuple

from nbdnn.device import Gpu
from nbdnn.kernels.cuda import peaks
from nbdnn.kernels.cuda.turn_channels import turned_bytes
from nbdnn.kernels.cuda.wgmma_maps import filters_last, line_elems, source_shape
from nbdnn.kernels.cuda.wgmma_patch import ASKERS, ROWS, PatchTile
from nbdnn.kernels.cuda.wgmma_pipeline import LINE_BYTES
from nbdnn.problem_conv import ConvProblem

_MOST_SLOTS, _MOST_LINE = 256, 256  # of an instruction, of a copy
_REGISTERS, _OTHER_REGISTERS = 65536, 44  # of a multiprocessor; of a thread beside its sums
_MOST_HELD = 18  # stages of 64 filters, 144 KiB
_LEAST_WIDTH = 12  # of columns
_MOST_CONFIGS, _WORTH_A_TRY = 5, 2.0  # times the best estimate
# Fitted to 24 times of 15 to 181 us on an H200, which they meet within 7 %. Cycles of a multiprocessor: until the first
# copy has come, of a slot's sums to the output; bytes from cache in one of them.
_LAUNCH_US = 2.1
_BEGIN_CYCLES, _STORE_CYCLES, _CACHE_BYTES = 2200, 10.3, 32
_SHARE, _STREAMED_SHARE = 0.94, 0.79  # of the peak that products reach; those that wait for every stage
_MEMORY_SHARE = 0.57  # of the time of memory, which is not hidden
# Times what the products of a block take that has a multiprocessor by itself, where there is room for two: 1.75 of 7x14
# and 8x16 outputs, 1.23 to 1.31 of others.
_LONE = 1.7


class Plan(NamedTuple):
    """A kernel, and the rows x width outputs that a tile has of a column of an image.

    stays: whether blocks take tile after tile, as they do where the filter is held; else each has one a team.
    """

    tile: PatchTile
    rows: int
    width: int
    stays: bool

    def __str__(self) -> str:
        tile = self.tile
        kind = f"held{tile.teams}" if tile.held else f"{tile.min_blocks}{'stay' if self.stays else ''}"
        return f"{ROWS * tile.team}x{self.rows}x{self.width}/{kind}"


def targets(problem: ConvProblem) -> tuple[int, int]:
    """Rows and columns of what is computed: y, or dx."""
    rows, columns = problem.operands[2].shape[2:]
    return rows, columns


def reaches(problem: ConvProblem) -> tuple[int, int]:
    """How far the last tap lies from the first."""
    rows, columns = ((taps - 1) * step for taps, step in zip(problem.filter, problem.dilation, strict=True))
    return rows, columns


def lines(problem: ConvProblem, plan: Plan) -> tuple[int, int, int]:
    """(pixels of a patch's row, its rows, lines that the last slot's last tap sees)."""
    reach_h, reach_w = reaches(problem)
    line = plan.width + reach_w
    return line, plan.rows + reach_h, plan.tile.slots + reach_h * line + reach_w


def shared_bytes(problem: ConvProblem, plan: Plan) -> int:
    line, rows, reach = lines(problem, plan)
    return plan.tile.shared_bytes(line * rows, reach)


def tiles(problem: ConvProblem, plan: Plan) -> int:
    """Of all images, for one tile of filters."""
    height, width = targets(problem)
    return problem.n * ceil(height / plan.rows) * ceil(width / plan.width)


def blocks(problem: ConvProblem, plan: Plan, device: Gpu) -> int:
    """For one tile of filters: where they stay, as many as run at once."""
    count = tiles(problem, plan)
    if not plan.stays:
        return count
    at_once = device.sms * plan.tile.min_blocks // _filter_tiles(problem, plan)
    return min(ceil(count / plan.tile.teams), max(1, at_once))


def plans(problem: ConvProblem, device: Gpu) -> tuple[Plan, ...]:
    """Those worth a try, the best first; none where no patch fits."""
    costs = {plan: estimate(problem, plan, device) for plan in every_plan(problem, device)}
    ranked = sorted(costs, key=lambda plan: costs[plan])
    firsts = {(plan.tile._replace(slots=0), plan.stays): plan for plan in reversed(ranked)}.values()
    others = [plan for plan in ranked if plan not in firsts]
    chosen = {*[*sorted(firsts, key=ranked.index), *others][:_MOST_CONFIGS]}
    return tuple(plan for plan in ranked if plan in chosen and costs[plan] <= _WORTH_A_TRY * costs[ranked[0]])


def every_plan(problem: ConvProblem, device: Gpu) -> Iterator[Plan]:
    """All that fit, of those that differ in the number of their blocks alone the one with the most."""
    kinds = tuple(_kinds(problem))
    for rows, width, slots in _extents(problem):
        found: dict[tuple, Plan] = {}
        for kind in kinds:
            plan = Plan(kind._replace(slots=slots), rows, width, stays=kind.held)
            if _fits(problem, plan, device):
                found[kind.team, kind.teams] = plan
        for plan in found.values():
            yield plan
            staying = plan._replace(stays=True)
            if blocks(problem, staying, device) < blocks(problem, plan, device):
                yield staying


def estimate(problem: ConvProblem, plan: Plan, device: Gpu) -> float:
    """Microseconds."""
    cycles = _held_cycles if plan.tile.held else _streamed_cycles
    bytes_per_us = peaks.copy_bytes_per_s(device) / 1e6
    turned = turned_bytes(problem, filters_last(problem))
    turned_us = _LAUNCH_US + 2 * turned / bytes_per_us if turned else 0.0
    products_us, memory_us = cycles(problem, plan, device) / device.clock_hz * 1e6, problem.min_bytes / bytes_per_us
    return _LAUNCH_US + turned_us + max(products_us + _MEMORY_SHARE * memory_us, memory_us)


def _tile_cycles(problem: ConvProblem, plan: Plan) -> tuple[float, float, float]:
    """Of one tile: products, copies, and the way of the sums to the output."""
    tile, stages = plan.tile, prod(problem.filter) * _blocks_in(problem)
    line, rows, _ = lines(problem, plan)
    products = stages * 4 * tile.team * max(tile.slots / 2, 16 + tile.slots / 4)
    copied = _blocks_in(problem) * line * rows * LINE_BYTES + (0 if tile.held else stages * tile.stage_bytes)
    return products, copied / _CACHE_BYTES, _STORE_CYCLES * tile.slots


def _held_cycles(problem: ConvProblem, plan: Plan, device: Gpu) -> float:
    products, copies, stores = _tile_cycles(problem, plan)
    products /= _SHARE
    each = ceil(tiles(problem, plan) / blocks(problem, plan, device))
    held = plan.tile.stages * plan.tile.stage_bytes / _CACHE_BYTES
    # Of a team, whose next patch comes when products are done.
    alone = products + max(stores, _BEGIN_CYCLES + copies)
    step = max(products, alone / plan.tile.teams, copies)
    return _BEGIN_CYCLES + held + each * step + stores


def _streamed_cycles(problem: ConvProblem, plan: Plan, device: Gpu) -> float:
    products, copies, stores = _tile_cycles(problem, plan)
    each = ceil(tiles(problem, plan) * _filter_tiles(problem, plan) / device.sms)
    rounds = ceil(each / plan.tile.min_blocks)
    apart = (1 if plan.stays else rounds) * _BEGIN_CYCLES + rounds * stores
    if each < plan.tile.min_blocks:
        products *= _LONE
    return each * max(products / _STREAMED_SHARE, copies) + apart


def _extents(problem: ConvProblem) -> Iterator[tuple[int, int, int]]:
    """(rows, width, slots) of tiles that cut an image into about equal parts."""
    height, columns = targets(problem)
    reach_w = reaches(problem)[1]
    widths = dict.fromkeys(ceil(columns / parts) for parts in range(1, ceil(columns / _LEAST_WIDTH) + 1))
    for width in widths:
        line = width + reach_w
        if line > _MOST_LINE:
            continue
        for rows in dict.fromkeys(ceil(height / parts) for parts in range(1, height + 1)):
            slots = -(-((rows - 1) * line + width) // 8) * 8
            if slots <= _MOST_SLOTS:
                yield rows, width, slots


def _kinds(problem: ConvProblem) -> Iterator[PatchTile]:
    """Kernels but for their slots, those of most blocks last."""
    taps, blocks_in = prod(problem.filter), _blocks_in(problem)
    # A team that waits for its next channels in its turn would let all others wait.
    if blocks_in == 1 and taps <= _MOST_HELD:
        yield PatchTile(0, 1, 2, 1, taps, True, 32, 1)
        yield PatchTile(0, 1, 3, 1, taps, True, 16, 1)
    depth = min(blocks_in, 2)
    for team in (1, 2) if problem.operands[2].shape[1] > ROWS else (1,):
        yield PatchTile(0, team, 1, depth, 4, False, 32, 1)
        yield PatchTile(0, team, 1, depth, 3, False, 16, 2)


def _fits(problem: ConvProblem, plan: Plan, device: Gpu) -> bool:
    tile = plan.tile
    registers = _REGISTERS // ((tile.workers + ASKERS) * tile.min_blocks) // 8 * 8
    if tile.sums + _OTHER_REGISTERS > registers or lines(problem, plan)[1] > _MOST_LINE:
        return False
    return peaks.blocks_at_once(shared_bytes(problem, plan), device) >= tile.min_blocks


def _filter_tiles(problem: ConvProblem, plan: Plan) -> int:
    return ceil(problem.operands[2].shape[1] / (ROWS * plan.tile.team))


def _blocks_in(problem: ConvProblem) -> int:
    return ceil(source_shape(problem)[1] / line_elems(problem.dtype))
