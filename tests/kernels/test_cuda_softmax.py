"""Softmax kernels for GPUs: what they need when compiled, which configs there are, and what they refuse."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product

import emulated
import emulated_ptx
import pytest
from edge_cases import edges
from gpus import H200
from guarded import values

from nbdnn.candidate import Candidate, NoConfig
from nbdnn.dispatch import registry
from nbdnn.kernels.cuda import (
    softmax_columns,
    softmax_direct,
    softmax_parts,
    softmax_parts_vectors,
    softmax_plan,
    softmax_rows,
    softmax_staged,
)
from nbdnn.kernels.cuda.compile import compile_kernel, ptx_text
from nbdnn.kernels.cuda.launch import LaunchedCandidate
from nbdnn.problem import FAMILIES, parse

# (geometry, dtype, algorithm, mode and layout) of forward and backward: each kind of kernel, at its largest.
KERNELS = (
    "f32:n8192c1024h1w1:accurate:channel:nchw",  # a warp a row
    "bf16:n1048576c16h1w1:accurate:channel:nchw",  # two lanes a row
    "f16:n4096c32000h1w1:log:channel:nchw",  # a block, or a cluster of blocks, a row
    "bf16:n512c131072h1w1:fast:channel:nchw",  # the longest rows
    "f16:n4096c50257h1w1:log:channel:nchw",  # rows that begin anywhere
    "f32:n4096c50257h1w1:accurate:channel:nchw",
    "bf16:n1c30000000h1w1:log:channel:nchw",  # rows in parts
    "f32:n32c21h128w128:log:channel:nhwc",  # vectors of one element, in registers and from shared memory
    "bf16:n32c21h128w128:accurate:channel:nhwc",
    "bf16:n32c1000h28w28:accurate:channel:nchw",
    "f32:n32c21h128w128:log:channel:nchw",
    "f64:n32c21h128w128:log:channel:nchw",
    "f64:n8c3000h1w1:accurate:channel:nchw",
)
ARCHITECTURES = {"sm_80": (8, 0), "sm_90a": (9, 0), "sm_100a": (10, 0), "sm_120": (12, 0)}
CANDIDATES = {
    op: [each for each in registry.candidates(op, kind="cuda") if isinstance(each, LaunchedCandidate)]
    for op in FAMILIES["softmax"]
}


@pytest.mark.usefixtures("numba_cuda")
@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("text", KERNELS)
def test_kernels_stay_within_their_means(text: str, arch: str) -> None:
    """No spills, no stack, no arithmetic wider than it must be."""
    device = replace(H200, capability=ARCHITECTURES[arch])
    assert device.arch == arch
    for op in FAMILIES["softmax"]:
        problem = parse(f"{op}:{text}")
        supporting: list[Candidate] = [each for each in CANDIDATES[op] if each.supports(problem, device).ok]
        for candidate, place in product(supporting[:2], range(2)):
            for config in candidate.configs(problem, device)[place : place + 1]:
                for launch in candidate.launches(problem, config, device):
                    kernel, ptx = compile_kernel(launch.source, arch), ptx_text(launch.source, arch)
                    what = f"{arch}, {candidate.id}, {config}, {problem}: {kernel._replace(cubin=b'')}"
                    assert (kernel.spill_bytes, kernel.stack_bytes) == (0, 0), what
                    assert kernel.registers * launch.source.threads * launch.source.min_blocks <= 65536, what
                    assert kernel.shared_bytes + launch.dynamic_shared_bytes <= 48 << 10, what
                    assert (".f64" in ptx) == (problem.dtype == "f64"), what
                assert ("barrier.cluster" in ptx) == (launch.cluster > 1), what
                assert launch.integer_bits == 64 or not re.search(r"(?:div|rem)\.[su]64", ptx), what


def test_every_edge_case_has_configs_with_names_of_their_own() -> None:
    for op, candidates in CANDIDATES.items():
        for problem in edges(op):
            for candidate in candidates:
                if candidate.supports(problem, H200).ok:
                    names = [str(config) for config in candidate.configs(problem, H200)]
                    assert len(set(names)) == len(names) > 0, f"{candidate.id}, {problem}"


def test_grids_hold_every_row_once() -> None:
    for candidate in (softmax_rows.FWD, softmax_rows.BWD):
        problem = parse(f"{candidate.op}:f32:n1000c96h1w1:accurate:channel:nchw")
        for config in candidate.every(problem, H200):
            (launch,) = candidate.launches(problem, config, H200)
            rows = launch.source.threads // config.threads
            blocks = launch.grid[0] // config.blocks
            assert (blocks - 1) * rows < 1000 <= blocks * rows, config
    problem = parse("softmax_fwd:bf16:n3c50h7w24:accurate:channel:nchw")
    for columns in softmax_columns.FWD.every(problem):
        (launch,) = softmax_columns.FWD.launches(problem, columns, H200)
        tiles = launch.grid[0] // 3
        assert (tiles - 1) * columns.columns < 7 * 24 // 8 <= tiles * columns.columns, columns


def test_clusters_are_for_gpus_that_have_them() -> None:
    problem = parse("softmax_fwd:f32:n64c100000h1w1:accurate:channel:nchw")
    assert {config.blocks for config in softmax_rows.FWD.every(problem, H200)} == {4, 8}
    older = softmax_rows.FWD.supports(problem, replace(H200, capability=(8, 0)))
    assert not older.ok and "100000 elements a row" in older.reason


@pytest.mark.parametrize(
    ("candidate", "text", "reason"),
    [
        (softmax_rows.FWD, "f32:n2c3h4w5:accurate:channel:nchw", "lie 20 apart"),
        (softmax_parts.FWD, "f32:n2c3h4w5:accurate:channel:nchw", "lie 20 apart"),
        (softmax_parts.BWD, "f32:n2c65535h1w1:accurate:channel:nchw", "65535 elements a row, this kernel takes 65536"),
        (softmax_rows.FWD, "f64:n2c3h4w5:accurate:channel:nhwc", "f64"),
        (softmax_rows.FWD, "f32:n0c3h4w5:accurate:channel:nhwc", "0 rows of 3 elements"),
        (softmax_rows.FWD, "f32:n3000000000c3h1w1:accurate:channel:nchw", "3000000000 rows"),
        (softmax_rows.BWD, "f32:n2c300000h1w1:accurate:channel:nchw", "300000 elements a row"),
        (softmax_staged.FWD, "f32:n2c3h4w5:accurate:channel:nchw", "lie 20 apart"),
        (softmax_staged.FWD, "bf16:n2c3h4w5:accurate:channel:nhwc:a2", "multiples of 2 bytes"),
        (softmax_staged.FWD, "bf16:n2c24h4w5:accurate:channel:nhwc", "24 elements a row: whole vectors"),
        (softmax_staged.BWD, "f32:n2c4097h1w1:accurate:channel:nchw", "4097 elements a row"),
        (softmax_columns.FWD, "f32:n2c3h4w5:accurate:channel:nhwc", "side by side"),
        (softmax_columns.FWD, "f64:n2c3h4w5:accurate:channel:nchw", "f64"),
        (softmax_columns.FWD, "f32:n2c100000h4w5:accurate:channel:nchw", "100000 elements a row"),
        (softmax_columns.BWD, "f32:n300000c3h100w100:accurate:channel:nchw", "3000000000 rows"),
    ],
)
def test_refusals_say_the_number(candidate: LaunchedCandidate, text: str, reason: str) -> None:
    support = candidate.supports(parse(f"{candidate.op}:{text}"), H200)
    assert not support.ok and reason in support.reason


def test_rows_that_do_not_divide_into_vectors() -> None:
    """Lanes divide the length and the alignment that is promised."""
    for text, lanes in (("bf16:n2c1000h1w1", 8), ("bf16:n2c1002h1w1", 2), ("f32:n2c21h1w1", 1), ("f16:n2c1h1w1", 1)):
        problem = parse(f"softmax_fwd:{text}:accurate:channel:nchw")
        assert softmax_plan.vector_lanes(problem, problem.rows[1]) == lanes
    narrow = parse("softmax_fwd:bf16:n2c1000h1w1:accurate:channel:nchw:a4")
    assert softmax_plan.vector_lanes(narrow, 1000) == 2
    assert softmax_direct.FWD.supports(narrow, H200).ok


def test_whole_vectors_between_edges_are_for_arrays_that_begin_at_some() -> None:
    """And for rows of threads enough for the elements beside them; the guess is for them where rows are long."""
    for candidate in (softmax_rows.FWD, softmax_rows.BWD):
        for text, least in (("f16:n4096c50257h1w1", 16), ("f32:n4096c50257h1w1", 8), ("bf16:n99c1002h1w1", 16)):
            problem = parse(f"{candidate.op}:{text}:log:channel:nchw")
            edged = [config for config in candidate.every(problem, H200) if config.edges]
            assert edged and all(config.threads * config.blocks >= least for config in edged)
            assert candidate.configs(problem, H200)[0].edges
        for text in ("f16:n99c1001h1w1:log:channel:nchw:a8", "f16:n99c1000h1w1:log:channel:nchw"):
            assert not any(config.edges for config in candidate.every(parse(f"{candidate.op}:{text}"), H200))


@pytest.mark.parametrize("algorithm", ["accurate", "fast", "log"])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize(
    ("align", "length", "sms"), [(4, 4501, 132), (16, 4501, 132), (16, 4096, 132), (16, 9001, 1), (16, 6150, 1)]
)
def test_rows_in_parts(
    align: int, length: int, sms: int, dtype: str, algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By elements and by vectors, of several parts or of one or two of several tiles, of which the last is short or
    has only elements beside vectors; of one row whose powers are 0 but there."""
    monkeypatch.setattr(softmax_parts, "_LEAST_ELEMS", 1)
    monkeypatch.setattr(softmax_parts_vectors, "VECTORS", 1)
    block, device = emulated_ptx.install(monkeypatch), replace(H200, sms=sms)
    for candidate in (softmax_parts.FWD, softmax_parts.BWD):
        text = f"{dtype}:n2c{length}h1w1:{algorithm}:channel:nchw" + (":a4" if align == 4 else "")
        problem = parse(f"{candidate.op}:{text}")
        assert candidate.supports(problem, device).ok
        given = values(problem, "normal")
        if candidate is softmax_parts.FWD:
            given["x"][1, : length - 300] = -200
        emulated.assert_near(candidate, problem, NoConfig(), given, device, block)


# (dtype, algorithm, threads and blocks of a row, its elements): every rest that whole vectors leave.
ROWS = (
    ("f16", "log", (64, 1), 8 * 100 + 1),  # a block a row, of two vectors a thread
    ("f16", "accurate", (16, 1), 8 * 30 + 2),  # rows side by side in a warp
    ("bf16", "accurate", (32, 1), 8 * 40 + 3),  # a warp a row
    ("bf16", "log", (256, 2), 8 * 600 + 5),  # a cluster a row
    ("f16", "fast", (64, 1), 8 * 64 + 6),
    ("bf16", "log", (16, 1), 8 * 8 + 7),
    ("f16", "log", (32, 1), 8 * 50 + 4),
    ("f32", "log", (8, 1), 4 * 10 + 1),
    ("f32", "accurate", (128, 1), 4 * 150 + 2),
    ("f32", "accurate", (256, 2), 4 * 513 + 3),
)


@pytest.mark.parametrize(("dtype", "algorithm", "held_by", "length"), ROWS)
def test_rows_that_begin_anywhere(
    dtype: str, algorithm: str, held_by: tuple[int, int], length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nine of them: each begins at another element of a vector than the one before it. Powers of 0 at their edges."""
    block = emulated_ptx.install(monkeypatch)
    for candidate in (softmax_rows.FWD, softmax_rows.BWD):
        problem = parse(f"{candidate.op}:{dtype}:n9c{length}h1w1:{algorithm}:channel:nchw")
        config = softmax_rows.Config(*held_by, edges=True)
        assert config in candidate.every(problem, H200)
        given = values(problem, "normal")
        if candidate is softmax_rows.FWD and algorithm != "fast":
            given["x"][1, :7] = given["x"][2, -7:] = given["x"][3, : length // 2] = -200
        emulated.assert_near(candidate, problem, config, given, H200, block)
