"""First layers and gradients of last ones by raw rows: what kernels need when compiled, their plans and refusals."""

from __future__ import annotations

import re
from math import prod

import pytest
from gpus import H200

from nbdnn.kernels.cuda import conv_rows
from nbdnn.kernels.cuda.compile import compile_kernel, ptx_text
from nbdnn.kernels.cuda.peaks import blocks_at_once
from nbdnn.kernels.cuda.rows_plan import FRACTION_BITS, Rows, lines, tile
from nbdnn.kernels.cuda.window_plan import image
from nbdnn.problem import parse
from nbdnn.problem_conv import ConvProblem

FWD, FWD_TF32 = conv_rows.FWD, conv_rows.FWD_TF32
BWD_FILTER, BWD_FILTER_TF32 = conv_rows.BWD_FILTER, conv_rows.BWD_FILTER_TF32
ARCHITECTURES = ("sm_80", "sm_90a", "sm_100a", "sm_120")
_FIRST_LAYERS = (
    "n32c3h224w224:k64r7s7:p3x3:u2x2:d1x1:g1:cross",
    "n64c3h224w224:k32r3s3:p1x1:u2x2:d1x1:g1:cross",
    "n128c3h224w224:k64r11s11:p2x2:u4x4:d1x1:g1:cross",
)
_EVERY = [
    (candidate, parse(f"{candidate.op}:{dtype}:{layer}:nhwc"))
    for candidate, dtype in (
        *((FWD, "bf16"), (FWD, "f32"), (FWD_TF32, "f32")),
        *((BWD_FILTER, "bf16"), (BWD_FILTER, "f32"), (BWD_FILTER_TF32, "f32")),
    )
    for layer in _FIRST_LAYERS
] + [
    (candidate, parse(f"{candidate.op}:{dtype}:n8c64h256w256:k3r3s3:p1x1:u1x1:d1x1:g1:cross:nhwc"))
    for candidate in (conv_rows.BWD_DATA, BWD_FILTER)
    for dtype in ("bf16", "f32")
]


def assert_within_budget(candidate: conv_rows.ByRows, problem: ConvProblem, arch: str) -> None:
    """No spills, no stack, no division of 64 bits, and registers for as many blocks as a config counts on."""
    for config in candidate.configs(problem, H200):
        for launch in candidate.launches(problem, config, H200):
            kernel, source = compile_kernel(launch.source, arch), launch.source
            assert (kernel.spill_bytes, kernel.stack_bytes) == (0, 0), f"{source}"
            assert kernel.registers * source.threads * source.min_blocks <= 65536
            assert not re.search(r"\.f64|div\.[su]64", ptx_text(source, arch)), f"{source}"


@pytest.mark.usefixtures("numba_cuda")
@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(("candidate", "problem"), _EVERY, ids=str)
def test_every_layer_stays_within_the_budget(candidate, problem: ConvProblem, arch: str) -> None:
    assert_within_budget(candidate, problem, arch)


@pytest.mark.usefixtures("numba_cuda")
@pytest.mark.parametrize(("candidate", "text"), [
    (FWD, "conv_fwd:bf16:n2c3h21w24:k32r3s3:p1x1:u2x2:d1x1:g1:cross:nhwc:e:bias+relu"),
    (BWD_FILTER_TF32, "conv_bwd_filter:f32:n2c3h21w24:k32r3s3:p1x1:u2x2:d1x1:g1:cross:nhwc"),
])  # fmt: skip
def test_small_ones_compile(candidate, text: str) -> None:
    assert_within_budget(candidate, parse(text), "sm_90a")


@pytest.mark.parametrize(("candidate", "problem"), _EVERY, ids=str)
def test_every_layer_has_configs(candidate, problem: ConvProblem) -> None:
    assert candidate.supports(problem, H200).ok
    configs = candidate.configs(problem, H200)
    assert len({str(config) for config in configs}) == len(configs) > 0
    for config in configs:
        launch = candidate.launches(problem, config, H200)[0]
        assert blocks_at_once(launch.dynamic_shared_bytes, H200) >= config.blocks
        assert config.blocks * H200.sms >= prod(launch.grid) > 0


@pytest.mark.parametrize("width", [8, 23, 24, 128, 129, 300])
@pytest.mark.parametrize("layer", ["k8r3s3:p1x1:u2x2", "k8r7s7:p3x3:u2x2", "k8r11s11:p2x2:u4x4", "k8r1s1:p0x0:u1x1"])
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_a_tile_holds_all_that_its_windows_see(width: int, layer: str, layout: str) -> None:
    """Every column of outputs is in one tile, and every element of its window in what the tile copies."""
    problem = parse(f"conv_fwd:f32:n1c3h40w{width}:{layer}:d1x1:g1:cross:{layout}")
    seen = image(problem)
    form = lines(seen, problem, "fma")
    tiled = tile(seen, form, 448, 128)
    assert (tiled.tiles_w - 1) * tiled.row_groups * 8 < problem.out_spatial[1] <= tiled.tiles_w * tiled.row_groups * 8
    elems = form.copy_bytes // 4
    for across in range(tiled.tiles_w):
        start = (across * tiled.row_groups * 8 * seen.stride[1] - seen.pad[1]) * form.inner
        last = start + (tiled.row_groups * 8 - 1) * form.step + form.run
        assert last <= start // elems * elems + tiled.line_copies * elems
    assert tiled.line_copies * form.copy_bytes <= tiled.pitch


@pytest.mark.parametrize("width", [1, 9, 23, 225, 640, 1001])
def test_fractions_divide_the_pixels_of_a_tile(width: int) -> None:
    problem = parse(f"conv_bwd_filter:f32:n1c3h400w{width}:k8r3s1:p1x0:u1x1:d1x1:g1:cross:nhwc")
    for config in BWD_FILTER.configs(problem, H200):
        f = BWD_FILTER.launches(problem, config, H200)[0].integers
        assert isinstance(f, Rows)
        for pixel in range((f.groups + 3) * 8):
            assert pixel * f.per_row >> FRACTION_BITS == pixel // (f.tile_groups * 8)


@pytest.mark.parametrize(
    ("candidate", "text", "reason"),
    [
        (FWD, "conv_fwd:f32:n1c5h8w8:k8r3s3:p1x1:u1x1:d1x1:g1:cross:nhwc", "5 channels and 8 filters in 1 groups"),
        (FWD, "conv_fwd:f64:n1c3h8w8:k8r3s3:p1x1:u1x1:d1x1:g1:cross:nhwc", "f64"),
        (FWD, "conv_fwd:f32:n1c3d8h8w8:k8t3r3s3:p1x1x1:u1x1x1:d1x1x1:g1:cross:ndhwc", "3 spatial axes"),
        (FWD, "conv_fwd:f32:n1c3h8w8:k8r3s3:p1x1:u1x1:d1x2:g1:cross:nhwc", "2 pixels apart"),
        (FWD, "conv_fwd:bf16:n1c3h8w9:k8r3s3:p1x1:u2x2:d1x1:g1:cross:nhwc", "multiples of 2 bytes"),
        (FWD, "conv_fwd:f32:n1c3h40w40:k8r3s22:p1x1:u1x1:d1x1:g1:cross:nhwc", "66 neighbours"),
        (FWD, "conv_fwd:f32:n1c3h2000w40:k8r900s3:p0x1:u1x1:d1x1:g1:cross:nhwc", r"1 blocks of \d+ bytes"),
        (FWD_TF32, "conv_fwd:bf16:n1c3h8w8:k8r3s3:p1x1:u2x2:d1x1:g1:cross:nhwc", "bf16"),
        (BWD_FILTER, "conv_bwd_filter:f32:n1c3h8w8:k6r3s3:p1x1:u1x1:d1x1:g1:cross:nhwc", "6 channels of a pixel"),
        (BWD_FILTER, "conv_bwd_filter:f32:n1c3h8w8:k8r3s3:p1x1:u1x1:d1x1:g1:cross:nchw", "in nchw"),
    ],
)
def test_refusals_say_the_number(candidate, text: str, reason: str) -> None:
    support = candidate.supports(parse(text), H200)
    assert not support.ok
    assert re.search(reason, support.reason), support.reason
