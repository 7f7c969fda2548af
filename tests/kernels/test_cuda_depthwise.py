"""Depthwise kernels of GPUs at the sizes that networks have, and the tables that they are made from."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product

import pytest
from gpus import H200

from nbdnn.candidate import Candidate
from nbdnn.dispatch import registry
from nbdnn.kernels.cuda import depthwise_plan as plan
from nbdnn.kernels.cuda.compile import compile_kernel, ptx_text
from nbdnn.kernels.cuda.depthwise_plan import Axis
from nbdnn.kernels.cuda.depthwise_tile import Tiles
from nbdnn.kernels.cuda.launch import Launch
from nbdnn.problem import parse
from nbdnn.problem_conv import CONV_OPS, ConvProblem

pytestmark = pytest.mark.usefixtures("numba_cuda")

ARCHITECTURES = ("sm_80", "sm_90a", "sm_100a", "sm_120")
# (shape, dtype, layout): what edge cases are too small for, each a tile or a filter of its own.
_SIZES = (
    ("n32c32h112w112:k32r3s3:p1x1:u1x1:d1x1:g32:cross", "f32", "nhwc"),
    ("n32c32h112w112:k32r3s3:p1x1:u1x1:d1x1:g32:cross", "bf16", "nhwc"),
    ("n32c32h112w112:k32r3s3:p1x1:u1x1:d1x1:g32:cross", "f16", "nchw"),
    ("n32c144h56w56:k144r3s3:p1x1:u2x2:d1x1:g144:cross", "f32", "nhwc"),
    ("n32c144h56w56:k144r3s3:p1x1:u2x2:d1x1:g144:cross", "f32", "nchw"),
    ("n32c144h56w56:k144r3s3:p1x1:u2x2:d1x1:g144:cross", "bf16", "nhwc"),
    ("n32c96h56w56:k96r3s3:p1x1:u2x2:d1x1:g96:cross", "f16", "nhwc"),
    ("n32c200h56w56:k200r3s3:p1x1:u2x2:d1x1:g200:cross", "bf16", "nhwc"),
    ("n32c384h14w14:k384r7s7:p3x3:u1x1:d1x1:g384:cross", "f32", "nhwc"),
    ("n32c384h14w14:k384r7s7:p3x3:u1x1:d1x1:g384:cross", "bf16", "nhwc"),
    ("n32c96h56w56:k96r7s7:p3x3:u1x1:d1x1:g96:cross", "f32", "nchw"),
    ("n32c120h28w28:k120r5s5:p2x2:u1x1:d1x1:g120:cross", "f32", "nhwc"),
    ("n8c384h32w32:k384r31s31:p15x15:u1x1:d1x1:g384:cross", "f32", "nchw"),
    ("n8c384h32w32:k384r31s31:p15x15:u1x1:d1x1:g384:cross", "bf16", "nhwc"),
    ("n8c64h33w33:k64r3s3:p12x12:u1x1:d12x12:g64:cross", "f32", "nhwc"),
    ("n4c64d16h56w56:k64t3r3s3:p1x1x1:u1x1x1:d1x1x1:g64:cross", "f32", "ndhwc"),
    ("n4c64d16h56w56:k64t3r3s3:p1x1x1:u2x2x2:d1x1x1:g64:cross", "f32", "ncdhw"),
)


def _candidate(op: str) -> Candidate:
    return registry.candidate(f"{op}/numba/depthwise")


def _launches(op: str, most_configs: int) -> list[tuple[ConvProblem, Launch]]:
    """Every different kernel, with a problem that launches it."""
    problems = [parse(f"{op}:{dtype}:{shape}:{layout}") for shape, dtype, layout in _SIZES]
    candidate, found = _candidate(op), {}
    for problem in problems:
        for config in candidate.configs(problem, H200)[:most_configs]:
            for launch in candidate.launches(problem, config, H200):
                found.setdefault(launch.source, (problem, launch))
    return list(found.values())


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("op", CONV_OPS)
def test_nothing_spills(op: str, arch: str) -> None:
    for problem, launch in _launches(op, 4 if arch == "sm_90a" else 1):
        kernel = compile_kernel(launch.source, arch)
        assert (kernel.spill_bytes, kernel.stack_bytes) == (0, 0), f"{problem}: {launch.source}"
        assert kernel.registers * launch.source.threads * launch.source.min_blocks <= 65536, f"{problem}"


@pytest.mark.parametrize("op", CONV_OPS)
def test_vectors_are_moved_whole(op: str) -> None:
    """As many bytes as the layout allows a load: 16, channels-last of 16-bit data 8, and no branch round a load."""
    for layout, dtype, loads, stores in (
        ("nhwc", "f32", "nc.v4.b32", "v4.b32"),
        ("nchw", "f32", "nc.v4.b32", "v4.b32"),
        ("nhwc", "bf16", "nc.v2.b32", "v2.b32"),
        ("nchw", "bf16", "nc.v4.b32", "v4.b32"),
    ):
        problem = parse(f"{op}:{dtype}:n8c32h64w64:k32r3s3:p1x1:u1x1:d1x1:g32:cross:{layout}")
        first, *_ = _candidate(op).launches(problem, _candidate(op).configs(problem, H200)[0], H200)
        ptx = ptx_text(first.source, "sm_90a")
        assert f"ld.global.{loads}" in ptx
        assert op == "conv_bwd_filter" or f"st.global.{stores}" in ptx
        narrow = re.findall(r"ld\.global\.nc\.(?:b|u)(?:16|32) ", ptx)
        assert len(narrow) <= 9, "more than the weights"


def test_tables_are_the_definition() -> None:
    """Each tap of each output meets the position that the definition says, in whichever tile it lies; both ways."""
    extents = product((1, 2, 3, 5), (1, 2, 3, 4), (0, 1, 3), (1, 2, 5))
    for axis, number in product((Axis(*values) for values in extents), (0, 1, 3)):
        met = {
            (number * 4 + reach.output, number * plan.step(True, axis, 4) + reach.position, reach.tap)
            for reach in plan.reaches(True, axis, 4)
        }
        outputs = range(number * 4, number * 4 + 4)
        assert met == {
            (q, q * axis.stride + s * axis.dilation - axis.pad, s) for q in outputs for s in range(axis.taps)
        }
        tile = 2 * axis.stride
        back = {
            (number * tile + reach.output, number * plan.step(False, axis, tile) + reach.position, reach.tap)
            for reach in plan.reaches(False, axis, tile)
        }
        images = range(number * tile, (number + 1) * tile)
        assert back == {
            (i, q, s)
            for i in images
            for s in range(axis.taps)
            for q in range(-40, 60)
            if q * axis.stride + s * axis.dilation - axis.pad == i
        }


@pytest.mark.parametrize("lanes", [1, 2, 4])
def test_planar_vectors_begin_at_multiples_of_their_size(lanes: int) -> None:
    axis = Axis(5, 2, 3, 1)
    row = plan.row(plan.reaches(True, axis, 4), lanes, channels_last=False)
    assert all(offset % lanes == 0 for offset in row.offsets)
    for output, element, tap in row.products:
        assert row.offsets[element // lanes] + element % lanes == output * axis.stride + tap - axis.pad
    assert len(row.products) == 4 * axis.taps


@pytest.mark.parametrize(
    ("text", "lanes", "stored"),
    [
        ("conv_fwd:f32:n1c32h8w8:k32r3s3:p1x1:u1x1:d1x1:g32:cross:nhwc", 4, 4),
        ("conv_fwd:f32:n1c32h8w8:k32r3s3:p1x1:u1x1:d1x1:g32:cross:nhwc:a4", 1, 1),
        ("conv_fwd:bf16:n1c32h8w8:k32r3s3:p1x1:u1x1:d1x1:g32:cross:nhwc:a4", 2, 2),
        ("conv_fwd:f32:n1c34h8w8:k34r3s3:p1x1:u1x1:d1x1:g34:cross:nhwc", 2, 2),
        ("conv_fwd:f32:n1c32h8w8:k64r3s3:p1x1:u1x1:d1x1:g32:cross:nhwc", 1, 1),
        ("conv_fwd:f32:n1c32h8w8:k32r3s3:p1x1:u1x1:d1x1:g32:cross:nhwc:ynchw", 1, 1),
        ("conv_fwd:bf16:n1c3h8w16:k3r3s3:p1x1:u1x1:d1x1:g3:cross:nchw", 8, 8),
        ("conv_fwd:f32:n1c3h8w16:k3r3s3:p1x1:u2x2:d1x1:g3:cross:nchw", 4, 4),
        ("conv_fwd:f32:n1c3h8w14:k3r3s3:p1x1:u1x1:d1x1:g3:cross:nchw", 2, 2),
        ("conv_bwd_data:f16:n1c3h8w16:k3r3s3:p1x1:u2x4:d1x1:g3:cross:nchw", 2, 8),
        ("conv_bwd_data:f32:n1c3h8w16:k3r3s3:p1x1:u2x2:d1x1:g3:cross:nchw", 2, 4),
        ("conv_bwd_data:f32:n1c3h8w14:k3r3s3:p1x1:u2x2:d1x1:g3:cross:nchw", 1, 2),
    ],
)
def test_vectors_are_as_long_as_rows_and_tiles_allow(text: str, lanes: int, stored: int) -> None:
    problem = parse(text)
    (launch,) = _candidate(problem.op).launches(problem, _candidate(problem.op).configs(problem, H200)[0], H200)
    v = launch.source.specialised_on
    assert (v.lanes, v.stored) == (lanes, stored)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("conv_fwd:f32:n1c32h8w8:k32r3s3:p1x1:u1x1:d1x1:g16:cross:nhwc", "channels 32, 32 and groups 16"),
        ("conv_bwd_filter:f32:n1c32h8w8:k0r3s3:p1x1:u1x1:d1x1:g32:cross:nhwc", "channels 32, 0 and groups 32"),
        ("conv_fwd:f64:n1c32h8w8:k32r3s3:p1x1:u1x1:d1x1:g32:cross:nhwc", "float64"),
        ("conv_bwd_data:f32:n1c32h90w90:k32r3s3:p1x1:u9x9:d1x1:g32:cross:nhwc", "column stride 9 is more than 8"),
        ("conv_fwd:f32:n1c32h90w90:k32r60s60:p1x1:u1x1:d1x1:g32:cross:nhwc", "115200 bytes, more than 98304"),
    ],
)
def test_refusals_carry_the_number(text: str, reason: str) -> None:
    problem = parse(text)
    support = _candidate(problem.op).supports(problem, H200)
    assert not support.ok
    assert reason in support.reason


def test_filter_gradients_of_a_gpu_with_more_multiprocessors_are_split_more() -> None:
    problem = parse("conv_bwd_filter:f32:n32c32h112w112:k32r3s3:p1x1:u1x1:d1x1:g32:cross:nhwc")
    candidate = _candidate(problem.op)
    config = candidate.configs(problem, H200)[0]
    half = replace(H200, sms=H200.sms // 2)
    assert candidate.workspace_bytes(problem, config, half) * 2 == candidate.workspace_bytes(problem, config, H200)


@pytest.mark.parametrize("channels, block", [(144, (36, 8)), (96, (24, 8)), (576, (16, 12)), (240, (15, 8))])
def test_16_bit_gradients_with_a_stride_leave_no_thread_idle(channels: int, block: tuple[int, int]) -> None:
    problem = parse(f"conv_bwd_data:bf16:n32c{channels}h56w56:k{channels}r3s3:p1x1:u2x2:d1x1:g{channels}:cross:nhwc")
    candidate, (vectors, tiles) = _candidate(problem.op), block
    for config in candidate.configs(problem, H200):
        (launch,) = candidate.launches(problem, config, H200)
        integers = Tiles(*launch.integers[: len(Tiles._fields)])
        assert (integers.vectors, integers.block_tiles) == block
        assert integers.slabs * vectors * 4 >= channels
        assert launch.grid[0] * tiles >= integers.slabs * integers.tiles
        # 15 vectors share no whole number of warps: 120 of 128 threads.
        assert launch.source.threads == (vectors * tiles if channels != 240 else 128)
