"""Pooling kernels for GPUs: what they need when compiled, their tiles, and what they refuse."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import emulated
import emulated_ptx
import numpy as np
import pytest
from edge_cases import edges
from gpus import H200
from guarded import values

from nbdnn import reference
from nbdnn.candidate import Candidate, NoConfig
from nbdnn.dispatch import registry
from nbdnn.kernels.cuda import (
    pool_marching,
    pool_plane,
    pool_rolling,
    pool_separable,
    pool_spread,
    pool_staged,
    pool_window,
)
from nbdnn.kernels.cuda.compile import compile_kernel, ptx_text
from nbdnn.kernels.cuda.division import reciprocal
from nbdnn.kernels.cuda.launch import LaunchedCandidate
from nbdnn.kernels.cuda.pool_axes import Axis, Tile, covers, reaches, taps_met
from nbdnn.kernels.cuda.staged import COPY_BYTES
from nbdnn.problem import FAMILIES, ITEMSIZE, parse
from nbdnn.problem_pool import PoolProblem

pytestmark = pytest.mark.usefixtures("numba_cuda")

# Of forward and backward: each kind of kernel, at its largest.
KERNELS = (
    "f32:n32c64h112w112:r3s3:p1x1:u2x2:max:nchw",
    "bf16:n32c64h112w112:r3s3:p1x1:u2x2:max:nhwc",
    "bf16:n16c64h224w224:r2s2:p0x0:u2x2:max:nchw",
    "f16:n32c256h28w28:r3s3:p1x1:u1x1:average_exc_pad:nhwc",
    "f32:n32c256h28w28:r3s3:p1x1:u1x1:average_inc_pad:nchw",
    "f32:n4c64d16h56w56:t3r3s3:p1x1x1:u2x2x2:max:ncdhw",
    "f32:n32c256h56w56:r56s56:p0x0:u1x1:average_inc_pad:nchw",
    "bf16:n32c256h56w56:r56s56:p0x0:u1x1:average_inc_pad:nhwc",
    "f64:n8c16h33w31:r3s3:p1x1:u2x2:max:nhwc",
    "f32:n32c512h14w14:r2s2:p0x0:u2x2:average_exc_pad:nchw",
    "bf16:n4c64d16h14w14:t2r2s2:p0x0x0:u2x2x2:sum:ncdhw",
)
ARCHITECTURES = {"sm_80": (8, 0), "sm_90a": (9, 0), "sm_100a": (10, 0), "sm_120": (12, 0)}
_THREADS_OF_SM = {"sm_120": 1536}  # a multiprocessor holds no more
CANDIDATES = {
    op: [each for each in registry.candidates(op, kind="cuda") if isinstance(each, LaunchedCandidate)]
    for op in FAMILIES["pool"]
}


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("text", KERNELS)
def test_kernels_stay_within_their_means(text: str, arch: str) -> None:
    """No spills, no stack, no arithmetic wider than it must be."""
    device = replace(H200, capability=ARCHITECTURES[arch])
    for op in FAMILIES["pool"]:
        problem = parse(f"{op}:{text}")
        candidate: Candidate = next(each for each in CANDIDATES[op] if each.supports(problem, device).ok)
        for config in candidate.configs(problem, device)[:2]:
            for launch in candidate.launches(problem, config, device):
                kernel, ptx = compile_kernel(launch.source, arch), ptx_text(launch.source, arch)
                what = f"{arch}, {candidate.id}, {config}, {problem}: {kernel._replace(cubin=b'')}"
                assert (kernel.spill_bytes, kernel.stack_bytes) == (0, 0), what
                blocks = min(launch.source.min_blocks, _THREADS_OF_SM.get(arch, 2048) // launch.source.threads)
                assert kernel.registers * launch.source.threads * blocks <= 65536, what
                assert (".f64" in ptx) == (problem.dtype == "f64"), what
                assert launch.integer_bits == 64 or not re.search(r"(?:div|rem)\.[su]64", ptx), what


def test_vectors_are_moved_whole() -> None:
    """And what is loaded once leaves the second-level cache first, unless it is much more than fits into that."""
    for op, layout, n in product(FAMILIES["pool"], ("nchw", "nhwc"), (32, 64)):
        problem = parse(f"{op}:f32:n{n}c64h112w112:r2s2:p0x0:u2x2:average_inc_pad:{layout}")
        candidate = registry.candidate(f"{op}/numba/window")
        widest = max(candidate.configs(problem, H200), key=lambda tile: tile.columns * tile.lanes)
        (launch,) = candidate.launches(problem, widest, H200)
        ptx = ptx_text(launch.source, "sm_90a")
        loads = "v2" if (op, layout) == ("pool_bwd", "nchw") else "v4"  # a vector of dx is two windows wide
        hint = ".L2::cache_hint" if (op, n) == ("pool_fwd", 32) else ""
        assert f"ld.global.nc{hint}.{loads}.b32" in ptx and "st.global.v4.b32" in ptx


def test_every_edge_case_has_configs_with_names_of_their_own() -> None:
    for op, candidates in CANDIDATES.items():
        for problem in edges(op):
            for candidate in candidates:
                if candidate.supports(problem, H200).ok:
                    names = [str(config) for config in candidate.configs(problem, H200)]
                    assert len(set(names)) == len(names) > 0, f"{candidate.id}, {problem}"


def test_tables_are_the_definition() -> None:
    """Each output of a tile meets what its windows say, both ways, and every tap of a window once."""
    for axis in (Axis(*numbers) for numbers in product((1, 2, 3, 5), (1, 2, 3), (0, 1, 2))):
        assert reaches(axis, 4) == [(p, p * axis.stride + r - axis.pad) for p in range(4) for r in range(axis.taps)]
        tile = 2 * axis.stride
        expected = {
            (i, p)
            for i, p, r in product(range(tile), range(-20, 20), range(axis.taps))
            if p * axis.stride + r - axis.pad == i
        }
        found = covers(axis, tile)
        assert set(found) == expected and len(found) == len(expected)
        windows = sorted({p for _, p in found})
        met = taps_met(axis, windows)
        assert sum(map(len, met.values())) == len(windows) * axis.taps
        assert all(p * axis.stride + r - axis.pad == i for i, pairs in met.items() for p, r in pairs)


@pytest.mark.parametrize("divisor", [1, 2, 3, 7, 56, 255, 256, 65537, 2**30, 2**30 + 1, 2**31 - 1])
def test_what_is_multiplied_by_a_reciprocal_is_divided(divisor: int) -> None:
    multiplier, shift = reciprocal(divisor)
    most = 2**31 - 1
    ends = (k * divisor for k in (1, 2, most // divisor // 2, most // divisor))
    for n in {0, most, *(n for end in ends for n in (end - 1, end, end + 1) if 0 <= n <= most)}:
        assert (2 * n * (multiplier % 2**32) >> 32) >> shift == n // divisor, n


def test_tiles_cover_every_output_once() -> None:
    for op, layout in product(FAMILIES["pool"], ("nchw", "nhwc")):
        problem = parse(f"{op}:f32:n3c40h29w28:r3s3:p1x1:u2x2:max:{layout}")
        candidate = registry.candidate(f"{op}/numba/window")
        height, width = problem.out_spatial if op == "pool_fwd" else problem.spatial
        for config in candidate.configs(problem, H200):
            (launch,) = candidate.launches(problem, config, H200)
            first = len(pool_window.Pool._fields)
            blocks = pool_window.Blocks._make(launch.integers[first : first + len(pool_window.Blocks._fields)])
            assert (blocks.tiles_h - 1) * config.rows < height <= blocks.tiles_h * config.rows
            assert (blocks.tiles_w - 1) * config.columns < width <= blocks.tiles_w * config.columns
            if layout == "nhwc":
                assert blocks.vectors * blocks.block_w * blocks.block_h <= launch.source.threads
                assert blocks.slabs * blocks.vectors * config.lanes >= problem.c
                assert blocks.blocks_w * blocks.block_w >= blocks.tiles_w
                assert blocks.blocks_h * blocks.block_h >= blocks.tiles_h


def test_elements_between_windows_are_written() -> None:
    """Rows that no window covers get their zeros from both ways to a gradient: as many stores with y as without, but
    the one of elements that are stored one after the other."""
    problem = parse("pool_bwd:f32:n2c3h7w5:r2s3:p1x0:u3x2:max:nchw")

    def stores(config: Tile) -> int:
        (launch,) = pool_window.BWD.launches(problem, config, H200)
        return ptx_text(launch.source, "sm_90a").count("st.global")

    reading = [config for config in pool_window.BWD.configs(problem, H200) if config.reads_y]
    for config in reading:
        assert stores(config) == stores(config._replace(reads_y=False)) + 1, config
    assert reading


def test_windows_that_overlap_may_read_y() -> None:
    overlapping, apart = (
        parse(f"pool_bwd:f32:n8c64h56w56:{window}:max:nchw") for window in ("r3s3:p1x1:u2x2", "r2s2:p0x0:u2x2")
    )
    assert {config.reads_y for config in pool_window.BWD.configs(overlapping, H200)} == {False, True}
    assert {config.reads_y for config in pool_window.BWD.configs(apart, H200)} == {False}


@pytest.mark.parametrize(
    "arch", ["sm_90a", *(pytest.param(arch, marks=pytest.mark.slow) for arch in ("sm_80", "sm_120"))]
)
@pytest.mark.parametrize(
    "text", ["f16:n32c288h35w35:r3s3:p0x0:u2x2:max:nchw", "f32:n32c64h55w55:r5s5:p2x2:u1x1:max:nchw"]
)
def test_planes_of_odd_rows_are_moved_by_whole_vectors(text: str, arch: str) -> None:
    problem, device = parse(f"pool_bwd:{text}"), replace(H200, capability=ARCHITECTURES[arch])
    (launch,) = pool_staged.BWD.launches(problem, pool_staged.BWD.configs(problem, device)[0], device)
    kernel, ptx = compile_kernel(launch.source, arch), ptx_text(launch.source, arch)
    assert (kernel.spill_bytes, kernel.stack_bytes) == (0, 0)
    assert kernel.registers * launch.source.threads * launch.source.min_blocks <= 65536
    assert "cp.async.cg.shared.global" in ptx and "st.global.v4" in ptx
    assert not re.search(r"(?:div|rem)\.[su]64", ptx)


def test_what_windows_reach_beyond_their_planes_is_memory_of_the_block() -> None:
    """It is loaded, and not used."""
    seen = 0
    for problem in edges("pool_bwd"):
        if not pool_staged.BWD.supports(problem, H200).ok:
            continue
        itemsize, (rows, columns) = ITEMSIZE[problem.dtype], pool_staged._axes(problem)
        for config in pool_staged.BWD.configs(problem, H200):
            (launch,) = pool_staged.BWD.launches(problem, config, H200)
            f = pool_staged._Planes._make(launch.integers[: len(pool_staged._Planes._fields)])
            of_x, of_sums = f.margin, 2 * f.margin + f.x_staged
            # Places of elements, from the beginning of the first plane.
            first = -rows.pad * f.in_w - columns.pad
            last = first + ((f.out_h - 1) * rows.stride + rows.taps - 1) * f.in_w
            last += (f.out_w - 1) * columns.stride + columns.taps - 1 + (config.planes - 1) * f.in_h * f.in_w
            assert of_x + first * itemsize >= 0 and of_x + COPY_BYTES + (last + 1) * itemsize <= of_sums
            assert f.sums_staged >= 4 * (COPY_BYTES // itemsize - 1 + config.planes * f.in_h * f.in_w)
            assert of_sums + f.sums_staged + f.y_staged <= launch.dynamic_shared_bytes <= 96 << 10
            seen += 1
    assert seen > 20


@pytest.mark.parametrize(
    ("candidate", "text", "reason"),
    [
        (pool_staged.BWD, "f32:n2c3h9w9:r3s3:p1x1:u2x2:max:nhwc", "max in nhwc"),
        (pool_staged.BWD, "f32:n2c3h9w9:r3s3:p1x1:u2x2:sum:nchw", "sum in nchw"),
        (pool_staged.BWD, "f64:n2c3h9w9:r3s3:p1x1:u2x2:max:nchw", "float64"),
        (pool_staged.BWD, "f32:n2c3h9w9:r2s2:p0x0:u2x2:max:nchw", "windows (2, 2), (2, 2) apart, share nothing"),
        (
            pool_staged.BWD,
            "f32:n2c3h19w19:r6s6:p0x0:u2x2:max:nchw",
            "windows (6, 6), (2, 2) apart, this kernel takes 25",
        ),
        (
            pool_staged.BWD,
            "f32:n2c3h161w161:r3s3:p1x1:u2x2:max:nchw",
            "planes of (161, 161) need more than 98304 bytes",
        ),
        (pool_staged.BWD, "f16:n2c3h9w9:r3s3:p1x1:u2x2:max:nchw:a2", "multiples of 2 bytes"),
        (pool_spread.BWD, "f32:n2c3h8w8:r2s2:p0x0:u2x2:max:nchw", "max of f32 in nchw"),
        (pool_spread.BWD, "f64:n2c3h8w8:r2s2:p0x0:u2x2:sum:nchw", "sum of f64 in nchw"),
        (pool_spread.BWD, "f32:n2c3h8w8:r2s2:p0x0:u2x2:sum:nhwc", "sum of f32 in nhwc"),
        (pool_spread.BWD, "f32:n2c3h8w8:r3s2:p0x0:u2x2:sum:nchw", "windows (3, 2), (2, 2) apart"),
        (pool_spread.BWD, "f32:n2c3h8w8:r2s2:p1x0:u2x2:sum:nchw", "pad (1, 0)"),
        (pool_spread.BWD, "f32:n2c3h8w9:r2s2:p0x0:u2x2:sum:nchw", "rows of 9 are not whole windows of 2"),
        (pool_spread.BWD, "f32:n3000c1000h30w30:r2s2:p0x0:u2x2:sum:nchw", "2700000000 elements"),
        (pool_window.FWD, "f64:n2c3h8w8:r2s2:p0x0:u2x2:max:nchw", "float64"),
        (pool_window.FWD, "f32:n2c3h20w20:r9s9:p0x0:u2x2:max:nchw", "the window has 81 elements, more than 64"),
        (pool_separable.FWD, "f32:n2c3h8w9:r1s9:p0x0:u1x1:max:nchw", "a window has 9 taps, this kernel takes 14"),
        (pool_separable.BWD, "f32:n2c3h300w8:r255s2:p0x0:u1x1:max:nchw", "(255, 2), this kernel takes up to 254"),
        (pool_rolling.BWD, "f64:n2c3h8w9:r5s5:p0x0:u1x1:max:nchw", "max of f64"),
        (pool_rolling.BWD, "f32:n2c3h8w9:r5s5:p0x0:u1x1:sum:nchw", "sum of f32"),
        (pool_rolling.BWD, "f32:n2c3h8w9:r5s5:p0x0:u2x2:max:nchw", "an element is in 6.25 windows"),
        (pool_rolling.BWD, "f32:n2c3h18w9:r4s4:p0x0:u5x1:max:nchw", "(5, 1) apart, have elements between them"),
        (
            pool_rolling.BWD,
            "f32:n2c3h130w130:r90s90:p0x0:u1x1:max:nchw",
            "fits 512 threads of 200 registers",
        ),
        (pool_rolling.BWD, "f32:n3000c1000h30w30:r4s4:p0x0:u1x1:max:nchw", "x has 2700000000 elements"),
        (pool_rolling.BWD, "f16:n100000c1000h2w2:r4s4:p3x3:u1x1:max:nchw", "y has 2500000000 elements"),
        (pool_staged.BWD, "f16:n100000c1000h2w2:r4s4:p3x3:u1x1:max:nchw", "y has 2500000000 elements"),
        (pool_marching.BWD, "f32:n2c4h9w9:r3s3:p1x1:u2x2:max:nchw", "max of f32 in nchw"),
        (pool_marching.BWD, "f64:n2c4h9w9:r3s3:p1x1:u2x2:max:nhwc", "max of f64 in nhwc"),
        (pool_marching.BWD, "f32:n2c4h9w9:r3s3:p1x1:u2x2:sum:nhwc", "sum of f32 in nhwc"),
        (pool_marching.BWD, "f32:n2c4h9w9:r2s2:p0x0:u2x2:max:nhwc", "windows (2, 2), (2, 2) apart, share nothing"),
        (pool_marching.BWD, "f32:n2c4h9w9:r3s3:p1x1:u1x1:max:nhwc", "windows are one apart on all axes"),
        (pool_marching.BWD, "f32:n2c4h29w29:r9s8:p1x1:u2x2:max:nhwc", "windows of (9, 8) have more taps"),
        (pool_marching.BWD, "f16:n2c5h9w9:r3s3:p1x1:u2x2:max:nhwc", "5 channels of f16 are no vectors of 4 bytes"),
        (pool_marching.BWD, "f32:n3000c1000h30w30:r3s3:p1x1:u2x2:max:nhwc", "x has 2700000000 elements"),
        (pool_plane.FWD, "f32:n2c3h8w8:r8s7:p0x0:u1x1:max:nchw", "are not the image"),
        (pool_plane.FWD, "f64:n2c3h8w8:r8s8:p0x0:u1x1:max:nchw", "float64"),
        (pool_plane.BWD, "f32:n2c3h8w8:r8s8:p0x0:u1x1:max:nchw", "of gradients only that of a sum"),
        (pool_plane.FWD, "f32:n3000c1000h30w30:r30s30:p0x0:u1x1:max:nchw", "2700000000 elements"),
    ],
)
def test_refusals_say_the_number(candidate: LaunchedCandidate, text: str, reason: str) -> None:
    support = candidate.supports(parse(f"{candidate.op}:{text}"), H200)
    assert not support.ok and reason in support.reason


def test_pairs_of_bfloat16_are_compared_since_9_0() -> None:
    problem = parse("pool_bwd:bf16:n2c8h9w9:r3s3:p1x1:u2x2:max:nhwc")
    assert pool_marching.BWD.supports(problem, H200).ok
    support = pool_marching.BWD.supports(problem, replace(H200, capability=(8, 6)))
    assert not support.ok and "since compute capability 9.0" in support.reason


@pytest.mark.parametrize(
    "arch", ["sm_90a", *(pytest.param(arch, marks=pytest.mark.slow) for arch in ("sm_80", "sm_100a", "sm_120"))]
)
@pytest.mark.parametrize(
    "text",
    ["f32:n4c64d16h56w56:t3r3s3:p1x1x1:u2x2x2:max:ndhwc", "f16:n32c288h35w35:r3s3:p0x0:u2x2:max:nhwc"],
)
def test_windows_are_searched_in_registers(text: str, arch: str) -> None:
    """Nothing is spilled; for compute capabilities above 9.0, where ptxas has other ideas, some words."""
    problem, device = parse(f"pool_bwd:{text}"), replace(H200, capability=ARCHITECTURES[arch])
    for config in pool_marching.BWD.configs(problem, device)[:2]:
        (launch,) = pool_marching.BWD.launches(problem, config, device)
        kernel, ptx = compile_kernel(launch.source, arch), ptx_text(launch.source, arch)
        most_bytes = 0 if arch in ("sm_80", "sm_90a") else 32
        assert kernel.spill_bytes <= most_bytes, f"{config}: {kernel._replace(cubin=b'')}"
        assert "ld.global.v4.b32" in ptx and "st.global.v4.b32" in ptx and ".f64" not in ptx


# Planes of less than a vector a thread and of several; pixels, and vectors of channels, that no team divides.
_GLOBAL = (
    "f32:n2c5h6w10:r6s10:p0x0:u1x1:{}:nchw",
    "bf16:n3c3h40w34:r40s34:p0x0:u1x1:{}:nchw",
    "f16:n2c9h3w5:r3s5:p0x0:u1x1:{}:nchw",
    "f32:n3c20h5w7:r5s7:p0x0:u1x1:{}:nhwc",
    "bf16:n2c80h9w10:r9s10:p0x0:u1x1:{}:nhwc",
    "f32:n2c3d2h4w9:t2r4s9:p0x0x0:u1x1x1:{}:ndhwc",
)


@pytest.mark.parametrize("mode", ["max", "average_inc_pad", "sum"])
@pytest.mark.parametrize("text", _GLOBAL)
def test_global_pooling(text: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    block = emulated_ptx.install(monkeypatch)
    for candidate in (pool_plane.FWD, pool_plane.BWD):
        problem = parse(f"{candidate.op}:{text.format(mode)}")
        if candidate.supports(problem, H200).ok:
            given = values(problem, "normal")
            for config in candidate.configs(problem, H200):
                emulated.assert_near(candidate, problem, config, given, H200, block)


# Windows of many taps, and such as lie beside the image or leave elements between them.
_LARGE = (
    "f32:n1c2h21w19:r13s11:p6x5:u4x3:{}:nchw",
    "bf16:n2c5h9w9:r5s5:p2x2:u1x1:{}:nhwc",
    "f16:n2c3h7w6:r6s5:p0x4:u7x1:{}:nchw",
    "f32:n1c3h4w5:r4s5:p3x0:u2x1:{}:nhwc",
    "f32:n2c3d4h5w4:t3r3s3:p1x1x1:u1x2x1:{}:ncdhw",
    "bf16:n1c3d5h4w4:t5r2s2:p2x0x1:u2x1x1:{}:ndhwc",
    "f32:n1c2d3h6w7:t1r5s4:p0x2x1:u1x1x2:{}:ncdhw",
    "f16:n2c3h2w20:r1s15:p0x7:u1x2:{}:nhwc",
    "f32:n1c1h40w42:r5s5:p2x1:u1x1:{}:nchw",
)


@pytest.mark.parametrize("mode", ["max", "average_inc_pad", "average_exc_pad", "sum"])
@pytest.mark.parametrize("text", _LARGE)
def test_an_axis_at_a_time(text: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    block = emulated_ptx.install(monkeypatch)
    for candidate in (pool_separable.FWD, pool_separable.BWD):
        problem = parse(f"{candidate.op}:{text.format(mode)}")
        assert candidate.supports(problem, H200).ok
        emulated.assert_near(candidate, problem, NoConfig(), values(problem, "normal"), H200, block)


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_the_maximum_of_axes_is_that_of_the_window(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of equal elements the first of the window, of NaNs the last, where rows and columns disagree."""
    block = emulated_ptx.install(monkeypatch)
    problem = parse(f"pool_bwd:f32:n2c3h11w9:r5s5:p2x1:u1x2:max:{layout}")
    given, draw = values(problem, "normal"), np.random.default_rng(5)
    x = draw.integers(0, 3, given["x"].shape).astype("f")
    x[draw.random(x.shape) < 0.1] = np.nan
    x[draw.random(x.shape) < 0.1] = -np.inf
    given["x"] = x
    given["y"] = reference.derived(problem, given)["y"].astype("f")
    emulated.assert_near(pool_separable.BWD, problem, NoConfig(), given, H200, block)


# Elements in many windows: tiles of all columns and of parts, beside the image, with pads beyond them.
_OVERLAPPING = (
    "f32:n2c3d5h9w10:t3r3s3:p1x1x1:u1x1x1:max:ncdhw",
    "f16:n1c19d4h6w7:t3r3s3:p1x1x1:u1x1x1:max:ndhwc",
    "bf16:n1c3d6h9w8:t5r5s3:p1x2x1:u2x2x2:max:ncdhw",
    "f32:n1c9d7h5w6:t7r1s2:p0x0x1:u1x1x2:max:ndhwc",
    "f16:n1c2d7h11w5:t5r3s5:p2x1x2:u2x1x1:max:ncdhw",
    "f32:n2c2h21w19:r13s11:p6x5:u4x3:max:nchw",
    "bf16:n2c5h9w9:r5s5:p2x2:u1x1:max:nhwc",
    "f32:n1c2h9w7:r2s7:p3x8:u2x1:max:nchw",
    "f32:n1c1h8w530:r5s3:p0x1:u1x2:max:nchw",
    "f16:n3c17h5w80:r5s5:p0x2:u1x3:max:nhwc",
)


def _ties_and_nans(problem: PoolProblem) -> Iterator[dict[str, np.ndarray]]:
    """Operands of a gradient of maxima: at random, and with images of few values, NaNs and infinities."""
    given, draw = values(problem, "normal"), np.random.default_rng(5)
    x = draw.integers(-1, 2, given["x"].shape).astype("f")
    x[draw.random(x.shape) < 0.1] = np.nan
    x[draw.random(x.shape) < 0.1] = -np.inf
    x[x == 0] *= draw.choice([-1.0, 1.0], np.count_nonzero(x == 0))
    x[0, 0] = -np.inf  # which padding must not equal
    x[0, 0, ..., -1] = np.inf
    for image in (given["x"], x):
        given["x"] = image
        given["y"] = reference.derived(problem, given)["y"].astype("f")
        yield given


@pytest.mark.parametrize("text", _OVERLAPPING)
def test_planes_that_roll(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of equal elements the first of the window gets its dy, of NaNs the last, where axes disagree."""
    block = emulated_ptx.install(monkeypatch)
    candidate, problem = pool_rolling.BWD, parse(f"pool_bwd:{text}")
    assert candidate.supports(problem, H200).ok
    for number, given in enumerate(_ties_and_nans(problem)):
        for config in candidate.configs(problem, H200)[number::3]:
            emulated.assert_near(candidate, problem, config, given, H200, block)


# Windows that overlap on some axes: beside the image, elements between them, pads beyond them, several images at once.
_APART = (
    "f32:n2c8h9w11:r3s3:p1x1:u2x2:max:nhwc",
    "f16:n3c20h7w9:r3s3:p0x0:u2x2:max:nhwc",
    "bf16:n2c16d5h6w7:t3r3s3:p1x1x1:u2x2x2:max:ndhwc",
    "f32:n1c5d6h5w9:t3r3s3:p0x1x1:u1x2x2:max:ndhwc",
    "f16:n1c34h11w13:r5s4:p2x1:u2x3:max:nhwc",
    "f32:n5c4h9w8:r2s3:p1x0:u3x2:max:nhwc",
    "f32:n1c6h4w9:r2s5:p3x1:u1x3:max:nhwc",
    "bf16:n1c6d9h3w5:t4r1s2:p1x0x1:u2x1x1:max:ndhwc",
    "f32:n1c132h12w40:r3s3:p1x1:u2x2:max:nhwc",
)


@pytest.mark.parametrize("text", _APART)
def test_windows_that_tell_their_neighbours(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    block = emulated_ptx.install(monkeypatch)
    candidate, problem = pool_marching.BWD, parse(f"pool_bwd:{text}")
    assert candidate.supports(problem, H200).ok
    for given in _ties_and_nans(problem):
        for config in candidate.configs(problem, H200)[::4]:
            emulated.assert_near(candidate, problem, config, given, H200, block)


@pytest.mark.parametrize(
    "arch", ["sm_90a", *(pytest.param(arch, marks=pytest.mark.slow) for arch in ("sm_80", "sm_100a", "sm_120"))]
)
@pytest.mark.parametrize(
    "text", ["f32:n2c32d32h64w64:t3r3s3:p1x1x1:u1x1x1:max:ncdhw", "f16:n8c256h28w28:r5s5:p2x2:u1x1:max:nhwc"]
)
def test_planes_roll_in_registers(text: str, arch: str) -> None:
    """Nothing is spilled; for compute capability 12.0 ten words by some tiles, beside which others have none."""
    problem, device = parse(f"pool_bwd:{text}"), replace(H200, capability=ARCHITECTURES[arch])
    for config in pool_rolling.BWD.configs(problem, device):
        (launch,) = pool_rolling.BWD.launches(problem, config, device)
        kernel, ptx = compile_kernel(launch.source, arch), ptx_text(launch.source, arch)
        assert kernel.spill_bytes <= (40 if arch == "sm_120" else 0), f"{config}: {kernel.spill_bytes}"
        assert kernel.registers * launch.source.threads * launch.source.min_blocks <= 65536
        assert not re.search(r"\.f64|(?:div|rem)\.[su]64", ptx)


# With vectors of one window, of a part of one and of several; rows and planes that no vector divides.
@pytest.mark.parametrize(
    ("text", "lanes"),
    [
        ("f32:n2c3h7w10:r2s2:p0x0:u2x2:average_exc_pad:nchw", 4),
        ("bf16:n2c4h7w10:r2s2:p0x0:u2x2:average_inc_pad:nchw", 8),
        ("f16:n2c4h8w12:r4s4:p0x0:u4x4:sum:nchw", 8),
        ("f32:n1c2h9w16:r3s8:p0x0:u3x8:sum:nchw", 4),
        ("f32:n1c3h6w6:r2s3:p0x0:u2x3:sum:nchw", 1),
        ("f32:n2c3h6w2:r2s2:p0x0:u2x2:sum:nchw", 2),
        ("f16:n1c2d5h6w8:t2r4s2:p0x0x0:u2x4x2:average_inc_pad:ncdhw", 8),
        ("f32:n1c3h5w6:r2s2:p0x0:u2x2:sum:nchw", 2),
        ("f32:n2c3h8w8:r2s2:p0x0:u2x2:sum:nchw:a4", 1),
    ],
)
def test_sums_spread_by_whole_vectors(text: str, lanes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    candidate, problem = pool_spread.BWD, parse(f"pool_bwd:{text}")
    assert candidate.supports(problem, H200).ok
    (launch,) = candidate.launches(problem, NoConfig(), H200)
    assert launch.source.specialised_on.lanes == lanes
    block = emulated_ptx.install(monkeypatch)
    emulated.assert_near(candidate, problem, NoConfig(), values(problem, "normal"), H200, block)
