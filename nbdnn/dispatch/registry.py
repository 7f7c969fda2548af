"""THE ordered lists: every candidate of every op, in the order that breaks ties. Each ends with one that runs all.

Importing this module loads the kernel modules and Numba: nothing that ``import nbdnn`` loads may import it.
"""

from __future__ import annotations

from nbdnn.candidate import Candidate
from nbdnn.cudnn import conv_graph, conv_legacy
from nbdnn.errors import InvalidProblem
from nbdnn.kernels.cpu import (
    conv_channel_gemm,
    conv_depthwise,
    conv_depthwise_filter,
    conv_direct,
    conv_fft,
    conv_filter_gemm,
    conv_im2col,
    conv_pixel_gemm,
    conv_winograd,
    conv_winograd_filter,
)
from nbdnn.kernels.cpu.conv_lowered import AsBwdData, AsBwdFilter
from nbdnn.kernels.cuda import conv_direct as conv_direct_cuda
from nbdnn.kernels.cuda import conv_grouped, conv_stem

_LISTS: dict[str, tuple[Candidate, ...]] = {
    "conv_fwd": (
        conv_depthwise.FWD,
        conv_winograd.FWD_4X4,
        conv_winograd.FWD_2X2,
        conv_pixel_gemm.FWD,
        conv_channel_gemm.FWD,
        conv_fft.FWD_TILING,
        conv_fft.FWD,
        conv_im2col.FWD,
        *conv_graph.FWD,
        *conv_legacy.FWD,
        conv_stem.FWD,
        conv_stem.FWD_TF32,
        conv_grouped.FWD,
        conv_grouped.FWD_TF32,
        conv_direct_cuda.FWD,
        conv_direct.FWD,
    ),
    "conv_bwd_data": (
        conv_depthwise.BWD_DATA,
        conv_winograd.BWD_DATA_4X4,
        conv_winograd.BWD_DATA_2X2,
        conv_pixel_gemm.BWD_DATA,
        conv_channel_gemm.BWD_DATA,
        conv_fft.BWD_DATA_TILING,
        conv_fft.BWD_DATA,
        conv_im2col.BWD_DATA,
        *conv_graph.BWD_DATA,
        *conv_legacy.BWD_DATA,
        conv_grouped.BWD_DATA,
        conv_grouped.BWD_DATA_TF32,
        conv_direct_cuda.BWD_DATA,
        conv_direct.BWD_DATA,
    ),
    "conv_bwd_filter": (
        conv_depthwise_filter.BWD_FILTER,
        conv_winograd_filter.BWD_FILTER,
        conv_filter_gemm.BWD_FILTER,
        conv_fft.BWD_FILTER_TILING,
        conv_fft.BWD_FILTER,
        conv_im2col.BWD_FILTER,
        *conv_graph.BWD_FILTER,
        *conv_legacy.BWD_FILTER,
        conv_stem.BWD_FILTER,
        conv_stem.BWD_FILTER_TF32,
        conv_grouped.BWD_FILTER,
        conv_grouped.BWD_FILTER_TF32,
        conv_direct_cuda.BWD_FILTER,
        conv_direct.BWD_FILTER,
    ),
}

# The kind of device that a provider's candidates run on; others are for the CPU.
_KINDS = {"cudnn": "cuda", "numba": "cuda"}


def kind_of(candidate: Candidate) -> str:
    """The ``kind`` of the devices that a candidate is for: 'cpu' or 'cuda'."""
    return _KINDS.get(candidate.provider, "cpu")


# The forward through a gradient's candidates: these race only where the caller's direction_hint asks for them. Their
# transposes run on the CPU.
_LOWERINGS: dict[str, tuple[Candidate, ...]] = {
    "bprop weights": tuple(AsBwdFilter(inner) for inner in _LISTS["conv_bwd_filter"] if kind_of(inner) == "cpu"),
    "bprop inputs": tuple(AsBwdData(inner) for inner in _LISTS["conv_bwd_data"] if kind_of(inner) == "cpu"),
}


def candidates(op: str, hint: str = "", kind: str = "cpu") -> tuple[Candidate, ...]:
    """The candidates of `op` for a kind of device, in order; with a direction hint, that lowering's come before the
    last of them."""
    own = [candidate for candidate in _LISTS[op] if kind_of(candidate) == kind]
    lowered = [candidate for candidate in _LOWERINGS.get(hint, ()) if kind_of(candidate) == kind]
    return (*own[:-1], *lowered, *own[-1:])


def candidate(id: str) -> Candidate:
    """The candidate of that id; InvalidProblem lists the ids of its op."""
    if found := _BY_ID.get(id):
        return found
    known = [known for known in _BY_ID if known.startswith(id.partition("/")[0] + "/")]
    raise InvalidProblem(f"no candidate {id!r}; there are {', '.join(known or _BY_ID)}")


_BY_ID = {member.id: member for group in (*_LISTS.values(), *_LOWERINGS.values()) for member in group}
