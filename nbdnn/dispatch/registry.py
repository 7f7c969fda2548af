"""THE ordered lists: every candidate of every op, in the order that breaks ties. Each ends with one that runs all.

Every kind of device has a table for each family of ops, made when a problem of theirs is asked for: a program loads the
modules of no other family, and the CPU's kernels, and with them Numba, are not loaded for a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

from nbdnn.candidate import Candidate
from nbdnn.errors import InvalidProblem
from nbdnn.problem import FAMILIES, OPS

_Lists = Mapping[str, tuple[Candidate, ...]]
# The kind of device that a provider's candidates run on; others are for the CPU.
_KINDS = {"cudnn": "cuda", "numba": "cuda"}


def _cpu_conv() -> _Lists:
    from nbdnn.kernels.cpu import (
        conv_amx,
        conv_amx_filter,
        conv_channel_gemm,
        conv_depthwise,
        conv_depthwise_filter,
        conv_direct,
        conv_few_outputs,
        conv_few_outputs_filter,
        conv_fft,
        conv_filter_gemm,
        conv_filter_strips,
        conv_im2col,
        conv_pixel_gemm,
        conv_pointwise,
        conv_tap_gemm,
        conv_winograd,
        conv_winograd_filter,
    )

    return {
        "conv_fwd": (
            conv_depthwise.FWD,
            conv_winograd.FWD_4X4,
            conv_winograd.FWD_2X2,
            conv_pointwise.FWD,
            conv_few_outputs.FWD,
            conv_amx.FWD,
            conv_tap_gemm.FWD_DOT,
            conv_tap_gemm.FWD,
            conv_pixel_gemm.FWD_DOT,
            conv_pixel_gemm.FWD,
            conv_channel_gemm.FWD_DOT,
            conv_channel_gemm.FWD,
            conv_fft.FWD_TILING,
            conv_fft.FWD,
            conv_im2col.FWD,
            conv_direct.FWD,
        ),
        "conv_bwd_data": (
            conv_depthwise.BWD_DATA,
            conv_winograd.BWD_DATA_4X4,
            conv_winograd.BWD_DATA_2X2,
            conv_pointwise.BWD_DATA,
            conv_few_outputs.BWD_DATA,
            conv_amx.BWD_DATA,
            conv_tap_gemm.BWD_DATA_DOT,
            conv_tap_gemm.BWD_DATA,
            conv_pixel_gemm.BWD_DATA_DOT,
            conv_pixel_gemm.BWD_DATA,
            conv_channel_gemm.BWD_DATA_DOT,
            conv_channel_gemm.BWD_DATA,
            conv_fft.BWD_DATA_TILING,
            conv_fft.BWD_DATA,
            conv_im2col.BWD_DATA,
            conv_direct.BWD_DATA,
        ),
        "conv_bwd_filter": (
            conv_depthwise_filter.BWD_FILTER,
            conv_winograd_filter.BWD_FILTER,
            conv_few_outputs_filter.BWD_FILTER,
            conv_amx_filter.BWD_FILTER,
            conv_filter_strips.BWD_FILTER_DOT,
            conv_filter_strips.BWD_FILTER,
            conv_filter_gemm.BWD_FILTER_DOT,
            conv_filter_gemm.BWD_FILTER,
            conv_fft.BWD_FILTER_TILING,
            conv_fft.BWD_FILTER,
            conv_im2col.BWD_FILTER,
            conv_direct.BWD_FILTER,
        ),
    }


def _cpu_softmax() -> _Lists:
    from nbdnn.kernels.cpu import softmax_columns, softmax_rows

    return {
        "softmax_fwd": (softmax_rows.FWD, softmax_columns.FWD_SHORT_ROWS, softmax_columns.FWD),
        "softmax_bwd": (softmax_rows.BWD, softmax_columns.BWD_SHORT_ROWS, softmax_columns.BWD),
    }


def _cpu_bn() -> _Lists:
    from nbdnn.kernels.cpu import bn_planes, bn_rows

    return {
        "bn_train": (bn_rows.TRAIN, bn_planes.TRAIN),
        "bn_infer": (bn_rows.INFER, bn_planes.INFER),
        "bn_bwd": (bn_rows.BWD, bn_planes.BWD),
        "bn_infer_bwd": (bn_rows.INFER_BWD, bn_planes.INFER_BWD),
    }


def _cpu_dropout() -> _Lists:
    from nbdnn.kernels.cpu import dropout

    return {
        "dropout_fwd": (dropout.FWD,),
        "dropout_bwd": (dropout.BWD,),
    }


def _cpu_pool() -> _Lists:
    from nbdnn.kernels.cpu import pool, pool_channels, pool_indices, pool_scatter, pool_sliding

    return {
        "pool_fwd": (pool_sliding.FWD, pool_channels.FWD, pool.FWD),
        "pool_bwd": (pool_indices.BWD, pool_scatter.BWD, pool_sliding.BWD, pool.BWD),
    }


def _cpu_rnn() -> _Lists:
    from nbdnn.kernels.cpu import rnn_direct, rnn_packed, rnn_packed_gradient

    return {
        "rnn_fwd": (rnn_packed.FWD, rnn_direct.FWD),
        "rnn_bwd": (rnn_packed_gradient.BWD, rnn_direct.BWD),
    }


def _cpu_spatialtf() -> _Lists:
    from nbdnn.kernels.cpu import (
        spatialtf_backward,
        spatialtf_forward,
        spatialtf_grid,
        spatialtf_interleaved,
        spatialtf_pixels,
    )

    return {
        "spatialtf_fwd": (
            spatialtf_interleaved.FWD,
            spatialtf_forward.CHANNELS,
            spatialtf_pixels.FWD,
            spatialtf_forward.PLANAR,
        ),
        "spatialtf_bwd": (spatialtf_backward.CHANNELS, spatialtf_pixels.BWD, spatialtf_backward.PLANAR),
        "spatialtf_grid_fwd": (spatialtf_grid.FWD,),
        "spatialtf_grid_bwd": (spatialtf_grid.BWD,),
        "spatialtf_sampler_fwd": (
            spatialtf_interleaved.SAMPLER_FWD,
            spatialtf_forward.SAMPLER_CHANNELS,
            spatialtf_pixels.SAMPLER_FWD,
            spatialtf_forward.SAMPLER_PLANAR,
        ),
        "spatialtf_sampler_bwd": (
            spatialtf_backward.SAMPLER_CHANNELS,
            spatialtf_pixels.SAMPLER_BWD,
            spatialtf_backward.SAMPLER_PLANAR,
        ),
    }


def _cuda_conv() -> _Lists:
    from nbdnn.cudnn import conv_graph, conv_legacy
    from nbdnn.kernels.cuda import (
        conv_depthwise,
        conv_depthwise_boxes,
        conv_depthwise_filter,
        conv_depthwise_lanes,
        conv_depthwise_lanes_filter,
        conv_depthwise_mma,
        conv_depthwise_mma_filter,
        conv_direct,
        conv_fft_filter,
        conv_fma_gemm,
        conv_fma_gemm_filter,
        conv_folded,
        conv_grouped,
        conv_grouped_boxes,
        conv_grouped_boxes_filter,
        conv_head,
        conv_mma_gemm,
        conv_mma_gemm_filter,
        conv_pointwise,
        conv_pointwise_boxes,
        conv_pointwise_boxes_filter,
        conv_rows,
        conv_stem,
        conv_wgmma,
        conv_wgmma_boxes,
        conv_wgmma_boxes_filter,
        conv_wgmma_filter,
        conv_wgmma_patch,
        conv_winograd,
        conv_winograd_filter,
        unfused,
    )
    from nbdnn.kernels.cuda.conv_flat import Flat, Tall, Wide

    return {
        "conv_fwd": (
            conv_depthwise.FWD,
            Flat(conv_depthwise_boxes.FWD),
            Flat(conv_depthwise_mma.FWD),
            Flat(conv_depthwise_lanes.FWD),
            Flat(conv_rows.FWD),
            Flat(conv_rows.FWD_TF32),
            Flat(conv_stem.FWD),
            Flat(conv_stem.FWD_TF32),
            Flat(conv_grouped_boxes.FWD),
            Flat(conv_grouped.FWD),
            Flat(conv_grouped.FWD_TF32),
            Flat(conv_head.FWD),
            conv_pointwise.FWD,
            conv_pointwise_boxes.FWD,
            *conv_wgmma_boxes.FWD,
            *map(unfused.Unfused, conv_graph.FWD),
            *map(unfused.Unfused, conv_legacy.FWD),
            *map(Flat, conv_wgmma_patch.FWD),
            *map(Wide, conv_wgmma.FWD),
            *map(Wide, conv_mma_gemm.FWD),
            *conv_folded.FWD,
            conv_winograd.FWD_4X4,
            conv_winograd.FWD_2X2,
            conv_fma_gemm.FWD,
            conv_direct.FWD,
        ),
        "conv_bwd_data": (
            conv_depthwise.BWD_DATA,
            Flat(conv_depthwise_boxes.BWD_DATA),
            Flat(conv_depthwise_mma.BWD_DATA),
            Flat(conv_depthwise_lanes.BWD_DATA),
            Flat(conv_rows.BWD_DATA),
            Flat(conv_rows.BWD_DATA_TF32),
            Flat(conv_stem.BWD_DATA),
            Flat(conv_stem.BWD_DATA_TF32),
            Flat(conv_grouped_boxes.BWD_DATA),
            Flat(conv_grouped.BWD_DATA),
            Flat(conv_grouped.BWD_DATA_TF32),
            Flat(conv_head.BWD_DATA),
            conv_pointwise.BWD_DATA,
            conv_pointwise_boxes.BWD_DATA,
            *conv_wgmma_boxes.BWD_DATA,
            *conv_graph.BWD_DATA,
            *conv_legacy.BWD_DATA,
            *map(Flat, conv_wgmma_patch.BWD_DATA),
            *map(Tall, conv_wgmma.BWD_DATA),
            *map(Wide, conv_mma_gemm.BWD_DATA),
            *conv_folded.BWD_DATA,
            conv_winograd.BWD_DATA_4X4,
            conv_winograd.BWD_DATA_2X2,
            conv_fma_gemm.BWD_DATA,
            conv_direct.BWD_DATA,
        ),
        "conv_bwd_filter": (
            conv_depthwise_filter.BWD_FILTER,
            Flat(conv_depthwise_mma_filter.BWD_FILTER),
            Flat(conv_depthwise_lanes_filter.BWD_FILTER),
            Flat(conv_rows.BWD_FILTER),
            Flat(conv_rows.BWD_FILTER_TF32),
            Flat(conv_stem.BWD_FILTER),
            Flat(conv_stem.BWD_FILTER_TF32),
            Flat(conv_grouped_boxes_filter.BWD_FILTER),
            Flat(conv_grouped.BWD_FILTER),
            Flat(conv_grouped.BWD_FILTER_TF32),
            conv_pointwise_boxes_filter.BWD_FILTER,
            *conv_wgmma_boxes_filter.BWD_FILTER,
            *conv_graph.BWD_FILTER,
            *conv_legacy.BWD_FILTER,
            Wide(conv_wgmma_filter.BWD_FILTER),
            *map(Wide, conv_mma_gemm_filter.BWD_FILTER),
            *conv_folded.BWD_FILTER,
            conv_winograd_filter.BWD_FILTER,
            Flat(conv_fft_filter.BWD_FILTER),
            conv_fma_gemm_filter.BWD_FILTER,
            conv_direct.BWD_FILTER,
        ),
    }


def _cuda_softmax() -> _Lists:
    from nbdnn.cudnn import softmax as cudnn_softmax
    from nbdnn.kernels.cuda import softmax_columns, softmax_direct, softmax_parts, softmax_rows, softmax_staged

    return {
        "softmax_fwd": (
            softmax_rows.FWD,
            softmax_staged.FWD,
            softmax_columns.FWD,
            softmax_parts.FWD,
            cudnn_softmax.FWD,
            softmax_direct.FWD,
        ),
        "softmax_bwd": (
            softmax_rows.BWD,
            softmax_staged.BWD,
            softmax_columns.BWD,
            softmax_parts.BWD,
            cudnn_softmax.BWD,
            softmax_direct.BWD,
        ),
    }


def _cuda_bn() -> _Lists:
    from nbdnn.cudnn import bn_legacy
    from nbdnn.kernels.cuda import bn_few_rows, bn_flat, bn_held, bn_resident, bn_streamed, bn_teams

    return {
        "bn_train": (
            bn_few_rows.TRAIN,
            bn_held.TRAIN,
            bn_teams.TRAIN,
            bn_resident.TRAIN,
            *bn_legacy.TRAIN,
            bn_streamed.TRAIN,
        ),
        "bn_infer": (bn_flat.INFER, *bn_legacy.INFER, bn_streamed.INFER),
        "bn_bwd": (bn_few_rows.BWD, bn_held.BWD, bn_teams.BWD, bn_resident.BWD, *bn_legacy.BWD, bn_streamed.BWD),
        "bn_infer_bwd": (bn_few_rows.INFER_BWD, bn_streamed.INFER_BWD),
    }


def _cuda_dropout() -> _Lists:
    from nbdnn.kernels.cuda import dropout

    return {
        "dropout_fwd": (dropout.FWD,),
        "dropout_bwd": (dropout.BWD,),
    }


def _cuda_pool() -> _Lists:
    from nbdnn.cudnn import pool as cudnn_pool
    from nbdnn.kernels.cuda import (
        pool_direct,
        pool_marching,
        pool_plane,
        pool_rolling,
        pool_separable,
        pool_spread,
        pool_staged,
        pool_window,
    )

    return {
        "pool_fwd": (pool_plane.FWD, pool_window.FWD, pool_separable.FWD, cudnn_pool.FWD, pool_direct.FWD),
        "pool_bwd": (
            pool_plane.BWD,
            pool_spread.BWD,
            pool_marching.BWD,
            pool_window.BWD,
            pool_staged.BWD,
            pool_rolling.BWD,
            pool_separable.BWD,
            cudnn_pool.BWD,
            pool_direct.BWD,
        ),
    }


def _cuda_rnn() -> _Lists:
    from nbdnn.cudnn import rnn as cudnn_rnn
    from nbdnn.kernels.cuda import rnn_direct, rnn_grid, rnn_grid_gradient, rnn_persistent, rnn_persistent_gradient

    return {
        "rnn_fwd": (rnn_persistent.FWD, rnn_grid.FWD, cudnn_rnn.FWD, cudnn_rnn.FWD_TF32, rnn_direct.FWD),
        "rnn_bwd": (
            rnn_persistent_gradient.BWD,
            rnn_grid_gradient.BWD,
            cudnn_rnn.BWD,
            cudnn_rnn.BWD_TF32,
            rnn_direct.BWD,
        ),
    }


def _cuda_spatialtf() -> _Lists:
    from nbdnn.cudnn import spatialtf as cudnn_spatialtf
    from nbdnn.kernels.cuda import (
        spatialtf_binned,
        spatialtf_direct,
        spatialtf_gradient,
        spatialtf_held,
        spatialtf_staged,
        spatialtf_staged_gradient,
        spatialtf_theta,
        spatialtf_turned,
    )

    return {
        "spatialtf_fwd": (spatialtf_staged.FWD, cudnn_spatialtf.ALL["spatialtf_fwd"], spatialtf_direct.FWD),
        "spatialtf_bwd": (
            spatialtf_held.BWD,
            spatialtf_staged_gradient.BWD,
            spatialtf_gradient.ATOMIC,
            cudnn_spatialtf.ALL["spatialtf_bwd"],
            spatialtf_gradient.GATHER,
        ),
        "spatialtf_grid_fwd": (cudnn_spatialtf.ALL["spatialtf_grid_fwd"], spatialtf_direct.GRID_FWD),
        "spatialtf_grid_bwd": (cudnn_spatialtf.ALL["spatialtf_grid_bwd"], spatialtf_theta.GRID_BWD),
        "spatialtf_sampler_fwd": (
            spatialtf_staged.SAMPLER_FWD,
            cudnn_spatialtf.ALL["spatialtf_sampler_fwd"],
            spatialtf_direct.SAMPLER_FWD,
        ),
        "spatialtf_sampler_bwd": (
            spatialtf_held.SAMPLER_BWD,
            spatialtf_binned.SAMPLER_BWD,
            spatialtf_turned.SAMPLER_BWD,
            spatialtf_gradient.SAMPLER_ATOMIC,
            cudnn_spatialtf.ALL["spatialtf_sampler_bwd"],
            spatialtf_gradient.SAMPLER_ORDERED,
        ),
    }


_LISTS: Mapping[str, Mapping[str, Callable[[], _Lists]]] = {
    "cpu": {
        "conv": _cpu_conv,
        "softmax": _cpu_softmax,
        "bn": _cpu_bn,
        "dropout": _cpu_dropout,
        "pool": _cpu_pool,
        "rnn": _cpu_rnn,
        "spatialtf": _cpu_spatialtf,
    },
    "cuda": {
        "conv": _cuda_conv,
        "softmax": _cuda_softmax,
        "bn": _cuda_bn,
        "dropout": _cuda_dropout,
        "pool": _cuda_pool,
        "rnn": _cuda_rnn,
        "spatialtf": _cuda_spatialtf,
    },
}


class Table:
    """The candidates of a family of ops for one kind of device.

    lists: by op. lowerings: the forward through a gradient's candidates, by direction hint: these race only where the
    caller asks for them; their transposes run on the CPU. by_id: all of them.
    """

    def __init__(self, kind: str, family: str) -> None:
        self.lists = dict(_LISTS[kind][family]())
        self.lowerings: dict[str, tuple[Candidate, ...]] = {}
        if (kind, family) == ("cpu", "conv"):
            from nbdnn.kernels.cpu.conv_lowered import AsBwdData, AsBwdFilter

            self.lowerings = {
                "bprop weights": tuple(map(AsBwdFilter, self.lists["conv_bwd_filter"])),
                "bprop inputs": tuple(map(AsBwdData, self.lists["conv_bwd_data"])),
            }
        groups = (*self.lists.values(), *self.lowerings.values())
        self.by_id = {member.id: member for group in groups for member in group}


@cache
def table(kind: str, family: str) -> Table:
    """The candidates for devices of a kind, 'cpu' or 'cuda', and a family of ops such as 'conv'."""
    return Table(kind, family)


def kind_of(candidate: Candidate) -> str:
    """The ``kind`` of the devices that a candidate is for: 'cpu' or 'cuda'."""
    return _KINDS.get(candidate.provider, "cpu")


def candidates(op: str, hint: str = "", kind: str = "cpu") -> tuple[Candidate, ...]:
    """The candidates of `op` for a kind of device, in order; with a direction hint, that lowering's come before the
    last of them."""
    of_family = table(kind, op.partition("_")[0])
    listed = of_family.lists[op]
    return (*listed[:-1], *of_family.lowerings.get(hint, ()), *listed[-1:])


def candidate(id: str, said_by: str = "id") -> Candidate:
    """The candidate of that id; InvalidProblem lists those of its op and provider, or what it may be short for.
    said_by: what has the id, for that: an argument, a flag."""
    op, _, rest = id.partition("/")
    kind, family = _KINDS.get(rest.partition("/")[0], "cpu"), op.partition("_")[0]
    if op in OPS and (found := table(kind, family).by_id.get(id)):
        return found
    every = [known for kind in _LISTS for family in FAMILIES for known in table(kind, family).by_id]
    if known := [known for known in every if known.startswith(f"{op}/")]:
        provided = [each for each in known if each.startswith(id.rpartition("/")[0] + "/")]
        raise InvalidProblem(f"{said_by}: no candidate {id!r}; there are {', '.join(provided or known)}")
    alike = [known for known in every if known.endswith(f"/{id}")] or ["conv_fwd/cpu/direct"]
    form = f"an id is <op>/<provider>/<algorithm>, such as {' or '.join(alike)}"
    raise InvalidProblem(f"{said_by}: no candidate {id!r}: {form}")
