"""Depthwise kernels of larger filters: what they refuse, what their code is made of, and where planes lie."""

from __future__ import annotations

import re
from itertools import product

import pytest
from gpus import H200

from nbdnn.candidate import Candidate
from nbdnn.dispatch import registry
from nbdnn.kernels.cuda import planes_plan
from nbdnn.kernels.cuda.compile import compile_kernel, ptx_text
from nbdnn.kernels.cuda.launch import Launch
from nbdnn.kernels.cuda.planes_plan import Planes
from nbdnn.problem import parse
from nbdnn.problem_conv import CONV_OPS

pytestmark = pytest.mark.usefixtures("numba_cuda")

_7X7 = "n32c384h14w14:k384r7s7:p3x3:u1x1:d1x1:g384:cross"
# What edge cases are too small for: (candidate, dtype, layout, shape).
_SIZES = (
    ("depthwise_mma", "bf16", "nhwc", _7X7),
    ("depthwise_mma", "bf16", "nchw", _7X7),
    ("depthwise_mma", "f16", "nhwc", "n32c96h56w56:k96r7s7:p3x3:u1x1:d1x1:g96:cross"),
    ("depthwise_mma", "f16", "nchw", "n32c96h56w56:k96r9s9:p4x4:u1x1:d1x1:g96:cross"),
    ("depthwise_mma", "bf16", "nhwc", "n8c64h33w33:k64r15s15:p7x7:u1x1:d1x1:g64:cross"),
    ("depthwise_lanes", "f32", "nhwc", _7X7),
    ("depthwise_lanes", "f32", "nhwc", "n32c96h56w56:k96r5s5:p2x2:u1x1:d1x1:g96:cross"),
    ("depthwise_lanes", "f32", "nhwc", "n8c64h33w33:k64r9s9:p4x4:u1x1:d1x1:g64:cross"),
)


def _candidate(op: str, name: str) -> Candidate:
    return registry.candidate(f"{op}/numba/{name}")


def _launches(op: str, name: str, dtype: str, layout: str, shape: str) -> list[Launch]:
    """The first kernel of each config; none where the candidate says no."""
    problem, candidate = parse(f"{op}:{dtype}:{shape}:{layout}"), _candidate(op, name)
    if not candidate.supports(problem, H200).ok:
        return []
    return [candidate.launches(problem, config, H200)[0] for config in candidate.configs(problem, H200)]


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a", "sm_120"])
@pytest.mark.parametrize("op", CONV_OPS)
def test_nothing_spills(op: str, arch: str) -> None:
    for size in _SIZES:
        for launch in _launches(op, *size):
            kernel = compile_kernel(launch.source, arch)
            assert (kernel.spill_bytes, kernel.stack_bytes) == (0, 0), f"{size}: {launch.source}"


def test_a_filter_row_is_one_product_for_eight_columns() -> None:
    """7 rows of taps, two tiles of columns: 14 products, and of each row of x three chunks by two instructions."""
    ptx = ptx_text(_launches("conv_fwd", *_SIZES[0])[0].source, "sm_90a")
    assert len(re.findall(r"mma\.sync\.aligned\.m16n8k16", ptx)) == 14
    assert len(re.findall(r"ldmatrix\.sync\.aligned\.m8n8\.x[24]\.shared", ptx)) == 14


def test_a_lane_multiplies_without_addresses() -> None:
    """2x14 outputs of 49 taps, 8 rows of 20 pixels: nothing is computed between a load and its products."""
    source = _launches("conv_fwd", *_SIZES[5])[0].source
    assert source.specialised_on.tile[:2] == (2, 14)  # type: ignore[attr-defined]
    ptx = ptx_text(source, "sm_90a")
    assert len(re.findall(r"fma\.rn\.f32", ptx)) == 2 * 14 * 49
    assert len(re.findall(r"ld\.shared\.f32", ptx)) == 8 * 20 + 49


@pytest.mark.parametrize(("chunks", "vectors"), list(product((1, 2, 3, 5, 6), (1, 2, 4, 8))))
def test_planes_meet_every_bank_once(chunks: int, vectors: int) -> None:
    planes = Planes(22, chunks, vectors)
    of_rows = {row * planes.row_bytes % 128 for row in range(8)}
    assert len(of_rows) == 8, "eight rows of a matrix"
    pairs = 32 // vectors  # of pixels that a warp turns at once, a word to each plane
    words = {(plane * planes.plane_bytes + 4 * pair) % 128 for plane in range(vectors) for pair in range(pairs)}
    assert len(words) == 32
    assert planes.plane_bytes >= planes.zeros_at + 16 * chunks


@pytest.mark.parametrize("width", [14, 28, 56, 13])
@pytest.mark.parametrize(("taps", "pad"), [(3, 1), (5, 2), (7, 3), (9, 4), (7, 6), (15, 7), (3, -2)])
def test_planar_runs_begin_at_multiples_of_their_length(width: int, taps: int, pad: int) -> None:
    problem = parse(f"conv_fwd:bf16:n1c8h16w{width}:k8r3s3:p1x1:u1x1:d1x1:g8:cross:nchw")
    run, shift = planes_plan.run_of(problem, width, pad, taps)
    assert width % run == 0
    assert (pad + shift) % run == 0
    assert planes_plan.steps(taps, shift) == planes_plan.steps(taps)
    assert (width, taps, pad, run) not in {(14, 7, 3, 1), (56, 7, 3, 2), (56, 5, 2, 2)}, "longer ones would do"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("bf16:n1c16h8w8:k16r3s3:p1x1:u2x1:d1x1:g16:cross:nhwc", "stride 2"),
        ("bf16:n1c16h8w8:k16r3s3:p1x1:u1x1:d1x2:g16:cross:nhwc", "dilation 2"),
        ("bf16:n1c16h20w20:k16r17s3:p1x1:u1x1:d1x1:g16:cross:nhwc", "17 is above"),
        ("bf16:n1c16h8w8:k32r3s3:p1x1:u1x1:d1x1:g16:cross:nhwc", "channels 16, 32 and groups 16"),
        ("bf16:n1c12h8w8:k12r3s3:p1x1:u1x1:d1x1:g12:cross:nhwc", "12 channels are not a multiple of 8"),
        ("bf16:n1c16h8w8:k16r3s3:p1x1:u1x1:d1x1:g16:cross:nhwc:a8", "8 bytes is below 16"),
        ("bf16:n1c16h8w8:k16r3s3:p1x1:u1x1:d1x1:g16:cross:nchw:a2", "2 bytes is below 4"),
        ("f32:n1c16h8w8:k16r3s3:p1x1:u1x1:d1x1:g16:cross:nchw", "layouts nchw and nchw"),
        ("f32:n1c18h8w8:k18r3s3:p1x1:u1x1:d1x1:g18:cross:nhwc", "18 channels are not a multiple of 4"),
        ("f32:n1c16h8w8:k16r3s11:p1x5:u1x1:d1x1:g16:cross:nhwc", "11 is above 9"),
    ],
)
@pytest.mark.parametrize("op", CONV_OPS)
def test_refusals_carry_the_number(op: str, text: str, reason: str) -> None:
    problem = parse(f"{op}:{text}")
    name = "depthwise_lanes" if problem.dtype == "f32" else "depthwise_mma"
    support = _candidate(op, name).supports(problem, H200)
    assert not support.ok
    assert reason in support.reason
