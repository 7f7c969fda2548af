"""What each candidate must support, written out: a `supports` that says no must not shrink the matrix unseen."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import NamedTuple

import pytest
from edge_cases import edges
from gpus import DEVICE, H200

from nbdnn.device import Cpu
from nbdnn.dispatch import registry
from nbdnn.problem import FAMILIES, OPS, parse
from nbdnn.problem_conv import CONV_OPS
from nbdnn.rnn_parameters import GATES

# One shape a feature; {} takes the rest of the text. 2-D and 3-D alike where the layout has a depth.
_SHAPES_2D = {
    "3x3": "n2c16h9w11:k24r3s3:p1x1:u1x1:d1x1:g1:cross",
    "1x1": "n2c16h9w11:k24r1s1:p0x0:u1x1:d1x1:g1:cross",
    "1x1 of vectors": "n2c16h9w12:k24r1s1:p0x0:u1x1:d1x1:g1:cross",
    "1x1 of chunks": "n2c16h8w12:k24r1s1:p0x0:u1x1:d1x1:g1:cross",
    "5x5": "n2c16h9w11:k24r5s5:p2x2:u1x1:d1x1:g1:cross",
    "7x7/2": "n2c3h23w25:k24r7s7:p3x3:u2x2:d1x1:g1:cross",
    "rows of words": "n2c3h23w24:k24r7s7:p3x3:u2x2:d1x1:g1:cross",
    "stride": "n2c16h9w11:k24r3s3:p1x1:u2x2:d1x1:g1:cross",
    "dilation": "n2c16h9w11:k24r3s3:p2x2:u1x1:d2x2:g1:cross",
    "asymmetric": "n2c16h9w11:k24r3s2:ba1.2x0.3:u2x1:d1x2:g1:cross",
    "groups": "n2c16h9w11:k24r3s3:p1x1:u1x1:d1x1:g4:cross",
    "groups of 4": "n2c16h9w11:k16r3s3:p1x1:u1x1:d1x1:g4:cross",
    "groups of 32": "n2c64h9w11:k64r3s3:p1x1:u1x1:d1x1:g2:cross",
    "few filters": "n2c16h9w12:k3r3s3:p1x1:u1x1:d1x1:g1:cross",
    "few channels": "n2c3h9w12:k16r3s3:p1x1:u1x1:d1x1:g1:cross",
    "depthwise": "n2c16h9w11:k16r3s3:p1x1:u1x1:d1x1:g16:cross",
    "depthwise 7x7": "n2c16h9w11:k16r7s7:p3x3:u1x1:d1x1:g16:conv",
    "conv mode": "n2c16h9w11:k24r3s3:p1x1:u1x1:d1x1:g1:conv",
    "one pixel": "n1c16h1w1:k24r3s3:p1x1:u1x1:d1x1:g1:cross",
    "patches": "n2c3h16w24:k24r8s8:p0x0:u8x8:d1x1:g1:cross",
    "odd channels": "n2c13h9w11:k22r3s3:p1x1:u1x1:d1x1:g1:cross",
}
_SHAPES_3D = {
    "3x3": "n2c16d5h6w7:k24t3r3s3:p1x1x1:u1x1x1:d1x1x1:g1:cross",
    "1x1": "n2c16d5h6w7:k24t1r1s1:p0x0x0:u1x1x1:d1x1x1:g1:cross",
    "1x1 of chunks": "n2c16d5h6w8:k24t1r1s1:p0x0x0:u1x1x1:d1x1x1:g1:cross",
    "1x1 of vectors": "n2c16d5h6w8:k24t1r1s1:p0x0x0:u1x1x1:d1x1x1:g1:cross",
    "stride": "n2c16d5h6w7:k24t3r3s3:p1x1x1:u2x2x2:d1x1x1:g1:cross",
    "dilation": "n2c16d5h6w7:k24t3r3s3:p2x2x2:u1x1x1:d2x2x2:g1:cross",
    "asymmetric": "n2c16d5h6w7:k24t2r3s1:ba1.0x0.2x1.1:u1x2x1:d2x1x1:g1:cross",
    "groups": "n2c16d5h6w7:k24t3r3s3:p1x1x1:u1x1x1:d1x1x1:g4:cross",
    "depthwise": "n2c16d5h6w7:k16t3r3s3:p1x1x1:u1x1x1:d1x1x1:g16:cross",
    "conv mode": "n2c16d5h6w7:k24t3r3s3:p1x1x1:u1x1x1:d1x1x1:g1:conv",
    "patches": "n2c2d4h8w12:k24t2r4s4:p0x0x0:u2x4x4:d1x1x1:g1:cross",
    "odd channels": "n2c13d5h6w7:k22t3r3s3:p1x1x1:u1x1x1:d1x1x1:g1:cross",
}


class Covers(NamedTuple):
    """Space-separated dtypes and layouts, comma-separated shapes of the tables above, and ends of the text."""

    dtypes: str
    layouts: str
    shapes: str
    ends: str = ""


_EVERY_DTYPE, _EVERY_LAYOUT = "f16 bf16 f32 f64", "nchw nhwc ncdhw ndhwc"
_FORWARD_ENDS = "e:bias e:bias+relu e:swish e:sigmoid e:tanh e:bias+relu+res+beta a8"
_FORWARD = Covers(_EVERY_DTYPE, _EVERY_LAYOUT, ", ".join(_SHAPES_2D), _FORWARD_ENDS)
_GRADIENT = _FORWARD._replace(ends="e:beta a8")
# Matrix units: channels of a group in multiples of 8 (TF32: 4).
_OF_MATRIX = "3x3, 1x1, 5x5, stride, dilation, asymmetric, conv mode, one pixel"
_MATRIX = Covers("f16 bf16", _EVERY_LAYOUT, _OF_MATRIX, _FORWARD_ENDS.removesuffix(" a8"))
_MATRIX_TF32 = Covers("f32", _EVERY_LAYOUT, _OF_MATRIX, _FORWARD_ENDS.removesuffix(" a8"))
_OF_STRIDE_1 = "3x3, 1x1, 5x5, dilation, conv mode, one pixel"
_OF_PATCHES = _MATRIX._replace(layouts="nchw nhwc", shapes="3x3, 5x5, dilation, conv mode, one pixel")
_POINTWISE = Covers("f32 f64", "nhwc ndhwc", "1x1", _FORWARD_ENDS)
_OF_PIXELS = Covers("f16 bf16", "nhwc ndhwc", "1x1", "e:beta")
_OF_VECTORS = Covers("f32", _EVERY_LAYOUT, "1x1 of vectors", "e:beta")
# To matrix units as they lie. Of TF32 what is summed comes last.
_OF_CHUNKS = Covers("f16 bf16", _EVERY_LAYOUT, "1x1 of chunks", "e:beta")
_OF_STEM = Covers("f16 bf16 f32", "nchw nhwc", "7x7/2", "e:beta a8")
_OF_ROWS = _OF_STEM._replace(shapes="rows of words", ends=_FORWARD_ENDS)
_OF_ROWS_FILTER = _OF_STEM._replace(layouts="nhwc", shapes="rows of words", ends="e:beta")
_OF_HEAD = _OF_STEM._replace(shapes="few filters")
_OF_FOLDS = Covers("f16 bf16", _EVERY_LAYOUT, "7x7/2, patches, odd channels", _FORWARD_ENDS.removesuffix(" a8"))
_OF_PATCHES_FOLDED = _OF_FOLDS._replace(shapes="patches")
_OF_GROUPED = _OF_STEM._replace(shapes="groups")
_OF_EQUAL_GROUPS = Covers("f16 bf16", "nhwc", "groups of 4, groups of 32", "e:beta")
_OF_BANDS = Covers("f16 bf16", "nchw nhwc", "depthwise, depthwise 7x7", "e:beta")
_OF_LANES = _OF_BANDS._replace(dtypes="f32", layouts="nhwc")
_OF_BOXES = Covers("f16 bf16 f32", "nhwc", "depthwise", _FORWARD_ENDS.removesuffix(" a8"))
_OF_TAPS = "5x5, dilation, one pixel"
_OF_WINOGRAD = "3x3, groups, conv mode, one pixel"
_OF_GPU_WINOGRAD = "3x3, conv mode, one pixel"
_OF_FMA_GEMM = "3x3, 1x1, 5x5, stride, dilation, asymmetric, groups, conv mode, one pixel"
_OF_FFT = f"{_OF_WINOGRAD}, 1x1, 5x5, depthwise"

COVERAGE: dict[str, Covers] = {
    "conv_fwd/numba/wgmma_gemm": _MATRIX,
    "conv_fwd/numba/wgmma_gemm_tf32": _MATRIX._replace(dtypes="f32"),
    "conv_fwd/numba/wgmma_patch": _OF_PATCHES,
    "conv_fwd/numba/wgmma_patch_tf32": _OF_PATCHES._replace(dtypes="f32"),
    "conv_fwd/numba/mma_gemm": _MATRIX,
    "conv_fwd/numba/mma_gemm_tf32": _MATRIX_TF32,
    "conv_fwd/numba/folded_wgmma_gemm": _OF_PATCHES_FOLDED,
    "conv_fwd/numba/folded_wgmma_gemm_tf32": _OF_PATCHES_FOLDED._replace(dtypes="f32"),
    "conv_fwd/numba/folded_mma_gemm": _OF_FOLDS,
    "conv_fwd/numba/folded_mma_gemm_tf32": _OF_FOLDS._replace(dtypes="f32"),
    "conv_fwd/numba/folded_fma_gemm": _OF_FOLDS._replace(dtypes="f32", shapes="7x7/2, patches"),
    "conv_fwd/numba/depthwise": _FORWARD._replace(dtypes="f16 bf16 f32", shapes="depthwise"),
    "conv_fwd/numba/depthwise_boxes": _OF_BOXES,
    "conv_fwd/numba/depthwise_mma": _OF_BANDS._replace(ends=_FORWARD_ENDS.removesuffix(" a8")),
    "conv_fwd/numba/depthwise_lanes": _OF_LANES._replace(ends=_FORWARD_ENDS.removesuffix(" a8")),
    "conv_fwd/numba/direct": _FORWARD,
    "conv_fwd/numba/fma_gemm": _FORWARD._replace(dtypes="f32", shapes=_OF_FMA_GEMM),
    "conv_fwd/numba/winograd_2x2": _FORWARD._replace(dtypes="f32", shapes=_OF_GPU_WINOGRAD),
    "conv_fwd/numba/winograd_4x4": _FORWARD._replace(dtypes="f32", shapes=_OF_GPU_WINOGRAD),
    "conv_fwd/numba/rows": _OF_ROWS,
    "conv_fwd/numba/rows_tf32": _OF_ROWS._replace(dtypes="f32", shapes="7x7/2, rows of words"),
    "conv_fwd/numba/stem": _OF_STEM._replace(ends=_FORWARD_ENDS),
    "conv_fwd/numba/stem_tf32": _OF_STEM._replace(dtypes="f32", ends=_FORWARD_ENDS),
    "conv_fwd/numba/grouped_boxes": _OF_EQUAL_GROUPS._replace(ends=_FORWARD_ENDS.removesuffix(" a8")),
    "conv_fwd/numba/grouped": _OF_GROUPED._replace(ends=_FORWARD_ENDS),
    "conv_fwd/numba/grouped_tf32": _OF_GROUPED._replace(dtypes="f32", ends=_FORWARD_ENDS),
    "conv_fwd/numba/head": _OF_HEAD._replace(ends=_FORWARD_ENDS),
    "conv_fwd/numba/pointwise": _OF_PIXELS._replace(ends=_FORWARD_ENDS.removesuffix(" a8")),
    "conv_fwd/numba/pointwise_boxes": _OF_VECTORS._replace(ends=_FORWARD_ENDS.removesuffix(" a8")),
    "conv_fwd/numba/wgmma_boxes": _OF_CHUNKS._replace(ends=_FORWARD_ENDS.removesuffix(" a8")),
    "conv_fwd/numba/wgmma_boxes_tf32": _OF_CHUNKS._replace(
        dtypes="f32", layouts="nhwc ndhwc", ends=_FORWARD_ENDS.removesuffix(" a8")
    ),
    "conv_fwd/cpu/direct": _FORWARD,
    "conv_fwd/cpu/tap_gemm": _FORWARD._replace(shapes=_OF_TAPS),
    "conv_fwd/cpu/tap_dot": _FORWARD._replace(dtypes="bf16", shapes=_OF_TAPS),
    "conv_fwd/cpu/pixel_gemm": _FORWARD,
    "conv_fwd/cpu/channel_gemm": _FORWARD,
    "conv_fwd/cpu/pixel_dot": _FORWARD._replace(dtypes="bf16"),
    "conv_fwd/cpu/amx": _FORWARD._replace(dtypes="f16 bf16"),
    "conv_fwd/cpu/channel_dot": _FORWARD._replace(dtypes="bf16"),
    "conv_fwd/cpu/pointwise": _POINTWISE,
    "conv_fwd/cpu/few_outputs": _FORWARD._replace(shapes="few filters, groups, depthwise"),
    "conv_fwd/cpu/winograd_2x2": _FORWARD._replace(shapes=f"{_OF_WINOGRAD}, stride, dilation"),
    "conv_fwd/cpu/winograd_4x4": _FORWARD._replace(shapes=f"{_OF_WINOGRAD}, stride, dilation"),
    "conv_fwd/cpu/fft_tiling": _FORWARD._replace(shapes=_OF_FFT),
    "conv_fwd/cpu/fft": _FORWARD._replace(shapes=_OF_FFT),
    "conv_fwd/cpu/im2col": _FORWARD,
    "conv_fwd/cpu/depthwise": _FORWARD._replace(shapes="depthwise"),
    "conv_bwd_data/numba/wgmma_gemm": _MATRIX._replace(shapes=_OF_STRIDE_1, ends="e:beta"),
    "conv_bwd_data/numba/wgmma_gemm_tf32": _MATRIX._replace(dtypes="f32", shapes=_OF_STRIDE_1, ends="e:beta"),
    "conv_bwd_data/numba/wgmma_patch": _OF_PATCHES._replace(ends="e:beta"),
    "conv_bwd_data/numba/wgmma_patch_tf32": _OF_PATCHES._replace(dtypes="f32", ends="e:beta"),
    "conv_bwd_data/numba/mma_gemm": _MATRIX._replace(ends="e:beta"),
    "conv_bwd_data/numba/mma_gemm_tf32": _MATRIX_TF32._replace(ends="e:beta"),
    "conv_bwd_data/numba/folded_wgmma_gemm": _OF_PATCHES_FOLDED._replace(ends="e:beta"),
    "conv_bwd_data/numba/folded_wgmma_gemm_tf32": _OF_PATCHES_FOLDED._replace(dtypes="f32", ends="e:beta"),
    "conv_bwd_data/numba/folded_mma_gemm": _OF_FOLDS._replace(ends="e:beta"),
    "conv_bwd_data/numba/folded_mma_gemm_tf32": _OF_FOLDS._replace(dtypes="f32", ends="e:beta"),
    "conv_bwd_data/numba/folded_fma_gemm": _OF_FOLDS._replace(dtypes="f32", shapes="7x7/2, patches", ends="e:beta"),
    "conv_bwd_data/numba/depthwise": _GRADIENT._replace(dtypes="f16 bf16 f32", shapes="depthwise"),
    "conv_bwd_data/numba/depthwise_boxes": _OF_BOXES._replace(ends="e:beta"),
    "conv_bwd_data/numba/depthwise_mma": _OF_BANDS,
    "conv_bwd_data/numba/depthwise_lanes": _OF_LANES,
    "conv_bwd_data/numba/direct": _GRADIENT,
    "conv_bwd_data/numba/fma_gemm": _GRADIENT._replace(dtypes="f32", shapes=_OF_FMA_GEMM),
    "conv_bwd_data/numba/winograd_2x2": _GRADIENT._replace(dtypes="f32", shapes=_OF_GPU_WINOGRAD),
    "conv_bwd_data/numba/winograd_4x4": _GRADIENT._replace(dtypes="f32", shapes=_OF_GPU_WINOGRAD),
    "conv_bwd_data/numba/grouped_boxes": _OF_EQUAL_GROUPS,
    "conv_bwd_data/numba/grouped": _OF_GROUPED,
    "conv_bwd_data/numba/grouped_tf32": _OF_GROUPED._replace(dtypes="f32"),
    "conv_bwd_data/numba/rows": _OF_HEAD,
    "conv_bwd_data/numba/rows_tf32": _OF_HEAD._replace(dtypes="f32"),
    "conv_bwd_data/numba/stem": _OF_HEAD,
    "conv_bwd_data/numba/stem_tf32": _OF_HEAD._replace(dtypes="f32"),
    "conv_bwd_data/numba/head": _OF_HEAD._replace(shapes="few channels"),
    "conv_bwd_data/numba/pointwise": _OF_PIXELS,
    "conv_bwd_data/numba/pointwise_boxes": _OF_VECTORS,
    "conv_bwd_data/numba/wgmma_boxes": _OF_CHUNKS,
    "conv_bwd_data/numba/wgmma_boxes_tf32": _OF_CHUNKS._replace(dtypes="f32", layouts="nhwc ndhwc"),
    "conv_bwd_data/cpu/direct": _GRADIENT,
    "conv_bwd_data/cpu/tap_gemm": _GRADIENT._replace(shapes=_OF_TAPS),
    "conv_bwd_data/cpu/tap_dot": _GRADIENT._replace(dtypes="bf16", shapes=_OF_TAPS),
    "conv_bwd_data/cpu/pixel_gemm": _GRADIENT,
    "conv_bwd_data/cpu/channel_gemm": _GRADIENT,
    "conv_bwd_data/cpu/pixel_dot": _GRADIENT._replace(dtypes="bf16"),
    "conv_bwd_data/cpu/amx": _GRADIENT._replace(dtypes="f16 bf16"),
    "conv_bwd_data/cpu/channel_dot": _GRADIENT._replace(dtypes="bf16"),
    "conv_bwd_data/cpu/pointwise": _POINTWISE._replace(ends="e:beta a8"),
    "conv_bwd_data/cpu/few_outputs": _GRADIENT._replace(shapes="few channels, 7x7/2, groups, depthwise, patches"),
    "conv_bwd_data/cpu/winograd_2x2": _GRADIENT._replace(shapes=f"{_OF_WINOGRAD}, dilation"),
    "conv_bwd_data/cpu/winograd_4x4": _GRADIENT._replace(shapes=f"{_OF_WINOGRAD}, dilation"),
    "conv_bwd_data/cpu/fft_tiling": _GRADIENT._replace(shapes=_OF_FFT),
    "conv_bwd_data/cpu/fft": _GRADIENT._replace(shapes=_OF_FFT),
    "conv_bwd_data/cpu/im2col": _GRADIENT,
    "conv_bwd_data/cpu/depthwise": _GRADIENT._replace(shapes="depthwise"),
    "conv_bwd_filter/numba/wgmma_gemm": _MATRIX._replace(ends="e:beta"),
    "conv_bwd_filter/numba/mma_gemm": _MATRIX._replace(ends="e:beta"),
    "conv_bwd_filter/numba/mma_gemm_tf32": _MATRIX_TF32._replace(ends="e:beta"),
    "conv_bwd_filter/numba/folded_wgmma_gemm": _OF_PATCHES_FOLDED._replace(ends="e:beta"),
    "conv_bwd_filter/numba/folded_mma_gemm": _OF_FOLDS._replace(ends="e:beta"),
    "conv_bwd_filter/numba/folded_mma_gemm_tf32": _OF_FOLDS._replace(dtypes="f32", ends="e:beta"),
    "conv_bwd_filter/numba/folded_fma_gemm": _OF_FOLDS._replace(dtypes="f32", shapes="7x7/2, patches", ends="e:beta"),
    "conv_bwd_filter/numba/depthwise": _GRADIENT._replace(dtypes="f16 bf16 f32", shapes="depthwise"),
    "conv_bwd_filter/numba/depthwise_mma": _OF_BANDS,
    "conv_bwd_filter/numba/depthwise_lanes": _OF_LANES,
    "conv_bwd_filter/numba/direct": _GRADIENT,
    "conv_bwd_filter/numba/fma_gemm": _GRADIENT._replace(dtypes="f32", shapes=_OF_FMA_GEMM),
    "conv_bwd_filter/numba/winograd_4x4": _GRADIENT._replace(dtypes="f32", shapes=_OF_GPU_WINOGRAD),
    "conv_bwd_filter/numba/fft_tiling": _GRADIENT._replace(
        dtypes="f32", layouts="nchw nhwc", shapes=f"{_OF_GPU_WINOGRAD}, 1x1, 5x5"
    ),
    "conv_bwd_filter/numba/rows": _OF_ROWS_FILTER._replace(shapes="rows of words, few filters"),
    "conv_bwd_filter/numba/rows_tf32": _OF_ROWS_FILTER._replace(dtypes="f32", shapes="rows of words, few filters"),
    "conv_bwd_filter/numba/stem": _OF_STEM._replace(shapes="7x7/2, few filters"),
    "conv_bwd_filter/numba/stem_tf32": _OF_STEM._replace(dtypes="f32", shapes="7x7/2, few filters"),
    "conv_bwd_filter/numba/grouped_boxes": _OF_EQUAL_GROUPS,
    "conv_bwd_filter/numba/pointwise_boxes": _OF_VECTORS,
    "conv_bwd_filter/numba/wgmma_boxes": _OF_CHUNKS,
    "conv_bwd_filter/numba/wgmma_boxes_tf32": _OF_CHUNKS._replace(dtypes="f32", layouts="nchw ncdhw"),
    "conv_bwd_filter/numba/grouped": _OF_GROUPED,
    "conv_bwd_filter/numba/grouped_tf32": _OF_GROUPED._replace(dtypes="f32"),
    "conv_bwd_filter/cpu/amx": _GRADIENT._replace(dtypes="bf16"),
    "conv_bwd_filter/cpu/few_outputs": _GRADIENT._replace(shapes="few filters, groups, depthwise"),
    "conv_bwd_filter/cpu/direct": _GRADIENT,
    "conv_bwd_filter/cpu/filter_gemm": _GRADIENT,
    "conv_bwd_filter/cpu/filter_strips": _GRADIENT._replace(shapes=f"{_OF_MATRIX}, 7x7/2, rows of words"),
    "conv_bwd_filter/cpu/filter_dot": _GRADIENT._replace(dtypes="bf16"),
    "conv_bwd_filter/cpu/strips_dot": _GRADIENT._replace(dtypes="bf16", shapes=f"{_OF_MATRIX}, 7x7/2, rows of words"),
    "conv_bwd_filter/cpu/fft_tiling": _GRADIENT._replace(shapes=_OF_FFT),
    "conv_bwd_filter/cpu/fft": _GRADIENT._replace(shapes=_OF_FFT),
    "conv_bwd_filter/cpu/im2col": _GRADIENT,
    "conv_bwd_filter/cpu/winograd_4x4": _GRADIENT._replace(layouts="nchw nhwc", shapes=f"{_OF_WINOGRAD}, dilation"),
    "conv_bwd_filter/cpu/depthwise": _GRADIENT._replace(shapes="depthwise"),
}


@pytest.mark.parametrize("id", COVERAGE)
def test_supports_what_it_must(id: str, device: Cpu) -> None:
    candidate, covers = registry.candidate(id), COVERAGE[id]
    every = replace(device, multiplies_bf16=True, multiplies_tiles=True, vector_bytes=64)
    on = every if registry.kind_of(candidate) == "cpu" else H200
    for dtype, layout, shape in product(covers.dtypes.split(), covers.layouts.split(), covers.shapes.split(", ")):
        body = (_SHAPES_3D if "d" in layout else _SHAPES_2D).get(shape)
        for end in ("", *covers.ends.split()) if body else ():
            problem = parse(":".join(filter(None, (candidate.op, dtype, body, layout, end))))
            support = candidate.supports(problem, on)
            assert support.ok, f"{problem}: {support.reason}"


@pytest.mark.parametrize("op", CONV_OPS)
def test_depthwise_takes_groups_of_few_channels(op: str, device: Cpu) -> None:
    on, candidate = replace(device, vector_bytes=64), registry.candidate(f"{op}/cpu/depthwise")
    for dtype, group in product(("f16", "bf16", "f32", "f64"), (2, 4, 8)):
        channels = 3 * group
        for shape in (
            f"n2c{channels}h9w11:k{channels}r3s3:p1x1:u2x1:d1x1:g3:cross:nhwc",
            f"n2c{channels}d5h6w7:k{channels}t3r1s3:p1x0x1:u1x1x1:d1x1x1:g3:cross:ndhwc",
        ):
            support = candidate.supports(parse(f"{op}:{dtype}:{shape}"), on)
            assert support.ok, f"{dtype}:{shape}: {support.reason}"


@pytest.mark.parametrize("op", CONV_OPS)
def test_strips_of_few_outputs_are_not_beyond_32_bits(op: str, device: Cpu) -> None:
    candidate = registry.candidate(f"{op}/cpu/few_outputs")
    for width, fits in ((40_000, True), (500_000_000, False)):
        for layout in ("nchw", "nhwc"):
            problem = parse(f"{op}:f32:n1c2h4w{width}:k2r3s3:p1x1:u1x1:d1x1:g1:cross:{layout}")
            support = candidate.supports(problem, device)
            assert support.ok == fits, f"{problem}: {support.reason}"
            assert fits or "bytes: offsets are 32 bits" in support.reason


# Of recurrent networks: dtypes, hidden extents, and ends of the text; in every mode, with and without a tape.
_EVERY_END = "uni:linear uni:skip bi:linear bi:linear:a8"
_OF_RNN = {
    "numba/direct": (_EVERY_DTYPE, (1, 70, 2000), _EVERY_END),
    "numba/persistent": ("f16 bf16 f32", (1, 70, 128, 256), _EVERY_END),
    "numba/persistent_grid": ("f16 bf16 f32", (129, 256, 301, 640), _EVERY_END),
    "cpu/direct": (_EVERY_DTYPE, (1, 70, 2000), _EVERY_END),
    "cpu/packed": (_EVERY_DTYPE, (1, 70, 2000), _EVERY_END),
}


@pytest.mark.parametrize("op", FAMILIES["rnn"])
@pytest.mark.parametrize("name", _OF_RNN)
def test_supports_the_networks_it_must(op: str, name: str, device: Cpu) -> None:
    candidate, (dtypes, hidden, ends) = registry.candidate(f"{op}/{name}"), _OF_RNN[name]
    on = device if registry.kind_of(candidate) == "cpu" else H200
    for dtype, h, mode, end in product(dtypes.split(), hidden, GATES, ends.split()):
        for layers in (1, 3):
            problem = parse(f"{op}:{dtype}:t50b20i{h}h{h}l{layers}:{mode}:{end}")
            support = candidate.supports(problem, on)
            assert support.ok, f"{problem}: {support.reason}"


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize("op", OPS)
def test_the_last_candidate_supports_every_edge_case(op: str, kind: str, device: Cpu) -> None:
    last = registry.candidates(op, kind=kind)[-1]
    on = device if kind == "cpu" else DEVICE
    assert not [problem for problem in edges(op) if not last.supports(problem, on).ok]
