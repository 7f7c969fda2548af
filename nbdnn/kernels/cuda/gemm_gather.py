"""A forward or bwd_data in tiles of a matrix product: what its kernel is launched with, and what it makes of that.

bwd_data with strides: the pixels of dx whose position has one residue on each axis are those of a convolution of
stride 1 with some of the taps. The host passes what all residues share, a block works out its own.
"""

from __future__ import annotations

from functools import cache
from math import ceil, gcd, prod
from typing import NamedTuple

from nbdnn.kernels.cpu.geometry import spatial3, tensor_strides
from nbdnn.kernels.cuda.add_parts import part_elems
from nbdnn.kernels.cuda.gemm_tile import Tile
from nbdnn.kernels.cuda.geometry import gather
from nbdnn.kernels.cuda.turn_channels import channels_last
from nbdnn.problem_conv import ConvProblem


class GatherTiles(NamedTuple):
    """A forward or bwd_data in tiles: `Gather`, with what tiles and residues need.

    tap_: taps of a residue are so many apart, and reach the input `reach_` apart. lift_: a multiple of the stride that
    no tap's distance reaches. part_elems: from a part of the sums to the next, 0 where they are whole. out_channel:
    from a channel of the output to the next.
    """

    part_elems: int
    parts: int
    groups: int
    tiles_m: int
    tiles_n: int
    group_out: int
    group_in: int
    n: int
    out_n: int
    out_channel: int
    out_d: int
    out_h: int
    out_w: int
    positions_d: int
    positions_h: int
    positions_w: int
    in_n: int
    in_d: int
    in_h: int
    in_w: int
    extent_d: int
    extent_h: int
    extent_w: int
    w_start: int
    w_g: int
    w_o: int
    w_i: int
    w_t: int
    w_r: int
    w_s: int
    taps_d: int
    taps_h: int
    taps_w: int
    stride_d: int
    stride_h: int
    stride_w: int
    pad_d: int
    pad_h: int
    pad_w: int
    dilation_d: int
    dilation_h: int
    dilation_w: int
    tap_d: int
    tap_h: int
    tap_w: int
    reach_d: int
    reach_h: int
    reach_w: int
    lift_d: int
    lift_h: int
    lift_w: int


def gather_tiles(problem: ConvProblem, tile: Tile, parts: int) -> GatherTiles:
    """The integers of a conv_fwd or conv_bwd_data, whose inputs are channels-last or have been turned."""
    g, forward = gather(channels_last(problem)), problem.op == "conv_fwd"
    target = problem.operands[2]
    out_n, out_channel, *out_places = tensor_strides(target.shape, problem.y_channels_last)
    dilation, taps = (g.dilation_d, g.dilation_h, g.dilation_w), (g.taps_d, g.taps_h, g.taps_w)
    stride = (g.stride_d, g.stride_h, g.stride_w)
    apart = (1, 1, 1) if forward else tuple(u // gcd(u, d) for u, d in zip(stride, dilation, strict=True))
    back = tuple(-(step * d // u) for step, d, u in zip(apart, dilation, stride, strict=True))
    own = {
        "part_elems": part_elems(problem) if parts > 1 else 0,
        "parts": parts,
        "groups": problem.groups,
        "tiles_m": tiles_m(problem, tile),
        "tiles_n": ceil(g.group_out / tile.n),
        "n": problem.n,
        "out_n": out_n,
        "out_channel": out_channel,
        **_by_axis("out", tuple(out_places)),
        **_by_axis("positions", spatial3(target.shape[2:])),
        **_by_axis("tap", apart),
        **_by_axis("reach", dilation if forward else back),
        **_by_axis("lift", tuple(ceil(d * f / u) * u for d, f, u in zip(dilation, taps, stride, strict=True))),
    }
    return GatherTiles(**{name: own[name] if name in own else getattr(g, name) for name in GatherTiles._fields})


def _by_axis(prefix: str, values: tuple[int, ...]) -> dict[str, int]:
    return {f"{prefix}_{axis}": value for axis, value in zip("dhw", values, strict=True)}


def residues(problem: ConvProblem) -> int:
    """Kinds of pixels of a bwd_data, by the taps that reach them."""
    return 1 if problem.op == "conv_fwd" else prod(problem.stride)


def pixels(problem: ConvProblem) -> int:
    """Of the output; of the most frequent residue, which is 0."""
    if problem.op == "conv_fwd":
        return problem.n * prod(problem.out_spatial)
    return problem.n * prod(ceil(extent / u) for extent, u in zip(problem.spatial, problem.stride, strict=True))


def tiles_m(problem: ConvProblem, tile: Tile) -> int:
    return ceil(pixels(problem) / tile.m)


class Axis(NamedTuple):
    """One axis of the pixels that a block takes: pixel i is out_start + i*out_step, and its tap j, first_tap and on,
    reaches in_start + i*in_step + j*reach."""

    pixels: int
    taps: int
    first_tap: int
    in_start: int
    in_step: int
    out_start: int
    out_step: int


@cache
def whole_axis():
    """Device function: the axis of a forward."""
    from nbdnn.kernels.cuda import ptx

    integer = ptx.INTEGER[32]

    @ptx.inline
    def axis(residue, positions, taps, stride, pad, dilation, tap_step, lift):
        return Axis(positions, taps, integer(0), integer(-pad), stride, integer(0), integer(1))

    return axis


@cache
def residue_axis():
    """Device function: the axis of those pixels of a bwd_data whose position is `residue` modulo the stride."""
    from nbdnn.kernels.cuda import ptx

    integer = ptx.INTEGER[32]

    @ptx.inline
    def axis(residue, positions, taps, stride, pad, dilation, tap_step, lift):
        pixels, _ = ptx.divided(integer(positions + stride - 1 - residue), stride)
        # The first tap at a multiple of the stride; the lift keeps its distance positive.
        distance, tap = integer(residue + pad + lift), integer(0)
        start, between = ptx.divided(distance, stride)
        while between != 0 and tap < taps:
            tap = integer(tap + 1)
            distance = integer(distance - dilation)
            start, between = ptx.divided(distance, stride)
        own_taps, _ = ptx.divided(integer(taps - tap + tap_step - 1), tap_step)
        lifted, _ = ptx.divided(lift, stride)
        return Axis(pixels, own_taps, tap, integer(start - lifted), integer(1), residue, stride)

    return axis
