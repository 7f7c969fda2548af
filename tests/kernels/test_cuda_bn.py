"""The kernels of batch normalisation on every architecture: what they need, and what the plan gives them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import emulated
import emulated_ptx
import pytest
from budget import ARCHITECTURES, device_of, in_turn
from gpus import H200
from guarded import values

from nbdnn.dispatch import registry
from nbdnn.kernels.cuda import bn_held, bn_plan, bn_streamed, bn_teams
from nbdnn.kernels.cuda.compile import compile_kernel, ptx_text
from nbdnn.kernels.cuda.peaks import shared_bytes
from nbdnn.problem import parse

pytestmark = pytest.mark.usefixtures("numba_cuda")

# Vectors of 16 bytes and of one element, lanes that are one channel and that are several, with all that is written.
KERNELS = (
    ("bn_train:f32:n7c64h28w28:per-activation:nchw:run", "few_rows"),
    ("bn_bwd:bf16:n32c64h28w28:per-activation:nhwc:pf32", "few_rows"),
    ("bn_infer_bwd:f64:n3c5h5w7:per-activation:nchw", "few_rows"),
    ("bn_infer:f16:n3c6h5w7:per-activation:nchw", "flat"),
    ("bn_infer:f32:n1c2048h7w7:spatial:nchw", "flat"),
    ("bn_infer:bf16:n32c512h7w7:spatial:nchw:pf32", "flat"),
    ("bn_infer:f64:n3c5h5w7:spatial:nchw", "flat"),
    ("bn_infer:f16:n1c64h56w56:spatial:nhwc:pf32", "flat"),
    ("bn_train:f32:n32c256h56w56:spatial:nchw", "held"),
    ("bn_bwd:bf16:n4096c4096h1w1:per-activation:nchw:pf32", "held"),
    ("bn_train:f16:n3c5h5w7:spatial:nchw:run", "held"),
    ("bn_train:f32:n32c256h56w56:spatial:nhwc", "teams"),
    ("bn_bwd:bf16:n4096c4096h1w1:per-activation:nchw:pf32", "teams"),
    ("bn_train:f64:n3c5h5w7:spatial:nchw:run", "teams"),
    ("bn_train:f32:n32c256h56w56:spatial:nhwc", "resident"),
    ("bn_train:bf16:n4c64d16h56w56:spatial:ndhwc:pf32:run", "resident"),
    ("bn_bwd:f16:n32c256h56w56:spatial:nhwc:pf32", "resident"),
    ("bn_bwd:f64:n3c5h5w7:spatial:nhwc", "resident"),
    ("bn_train:bf16:n32c256h56w56:spatial:nhwc", "streamed"),
    ("bn_infer_bwd:f64:n4c16h8w8:spatial:nhwc", "streamed"),
    ("bn_infer:bf16:n32c256h56w56:spatial:nhwc", "streamed"),
)


def _compiled() -> Iterator[tuple[str, str, str]]:
    """Every kernel for every architecture that runs it: of clusters and of teams not all do."""
    for text, algorithm in KERNELS:
        problem = parse(text)
        candidate = registry.candidate(f"{problem.op}/numba/{algorithm}")
        for arch in ARCHITECTURES:
            support = candidate.supports(problem, device_of(arch))
            assert support.ok or (arch in ("sm_80", "sm_120") and algorithm in ("held", "teams"))
            if support.ok:
                yield text, algorithm, arch


@pytest.mark.parametrize(("text", "algorithm", "arch"), in_turn(_compiled(), 3))
def test_kernels_stay_within_their_means(text: str, algorithm: str, arch: str) -> None:
    """No spills, no stack, no arithmetic wider than it must be, and no more shared memory than there is."""
    problem, device = parse(text), device_of(arch)
    candidate = registry.candidate(f"{problem.op}/numba/{algorithm}")
    for launch in candidate.launches(problem, candidate.configs(problem, device)[0], device):
        kernel, source = compile_kernel(launch.source, arch), launch.source
        assert (kernel.spill_bytes, kernel.stack_bytes) == (0, 0), source
        assert kernel.registers * source.threads * source.min_blocks <= 65536, source
        assert kernel.shared_bytes + launch.dynamic_shared_bytes <= shared_bytes(device), source
        assert launch.cluster == 1 or device.capability >= (9, 0)
        ptx = ptx_text(source, arch)
        assert (".f64" in ptx) == (launch.scalars == "f64"), source
        assert not re.search(r"(?:div|rem)\.[su]64", ptx), source


def test_every_row_has_a_block_and_every_slab_a_cluster() -> None:
    for text in ("bn_train:f32:n32c256h56w56:spatial:nchw", "bn_bwd:bf16:n1000c1000h3w5:per-activation:nchw"):
        problem = parse(text)
        for config in bn_held.TRAIN.configs(problem, H200):
            (launch,) = bn_held.TRAIN.launches(problem, config, H200)
            walk = launch.integers
            assert isinstance(walk, bn_plan.Walk)
            assert walk.chunk * config.cluster >= walk.rows
            assert launch.grid[0] == walk.slabs * config.cluster
            assert walk.slabs * config.columns >= walk.columns


@pytest.mark.parametrize(
    "text",
    [
        "bn_train:f32:n32c256h56w56:spatial:nhwc",
        "bn_bwd:bf16:n4c64d16h56w56:spatial:ncdhw:pf32",
        "bn_bwd:f32:n4096c4096h1w1:per-activation:nchw",
        "bn_train:f16:n3c40h5w7:spatial:nhwc",
    ],
)
def test_all_blocks_of_a_team_are_there_at_once(text: str) -> None:
    problem = parse(text)
    candidate = registry.candidate(f"{problem.op}/numba/teams")
    configs = candidate.configs(problem, H200)
    assert configs
    for number, config in enumerate(configs):
        *_, main = candidate.launches(problem, config, H200)
        walk = bn_plan.Walk._make(main.integers[: len(bn_plan.Walk._fields)])
        turns = bn_teams._Turns._make(main.integers[len(bn_plan.Walk._fields) :])
        assert main.grid == (turns.teams * walk.parts, 1, 1)
        assert main.grid[0] <= H200.sms * config.resident
        assert main.cooperative == (walk.parts > 1)
        assert walk.chunk * walk.parts >= walk.rows > walk.chunk * (walk.parts - 1)
        elems = turns.full * (walk.parts - 1) + turns.rest
        assert elems == problem.m, f"{elems} elements of a channel are counted"
        if number % 3 == 0:
            static_bytes = compile_kernel(main.source, "sm_90a").shared_bytes
            block_bytes = static_bytes + main.dynamic_shared_bytes + 1024
            assert config.resident * block_bytes <= shared_bytes(H200) + 1024


@pytest.mark.parametrize(
    ("text", "algorithm", "too_large"),
    [
        ("bn_train:bf16:n1c132h1w115967:spatial:nchw:pf32", "held", bn_held.Held(1, 1)),
        ("bn_train:bf16:n1c264h1w56831:spatial:nchw:pf32", "teams", bn_teams.Teams(1, 2, 4)),
    ],
)
def test_what_lies_before_the_slots_is_padded(text: str, algorithm: str, too_large: NamedTuple) -> None:
    """Slots of 512 bytes fill shared memory to within 1 KiB, which the kernel's own arrays are rounded up to."""
    problem, there = parse(text), shared_bytes(H200) + 1024
    candidate = registry.candidate(f"{problem.op}/numba/{algorithm}")
    for config in candidate.configs(problem, H200)[:3]:
        *_, main = candidate.launches(problem, config, H200)
        block_bytes = compile_kernel(main.source, "sm_90a").shared_bytes + main.dynamic_shared_bytes + 1024
        assert getattr(config, "resident", 1) * block_bytes <= there, config
    assert too_large not in candidate.configs(problem, H200)


@pytest.mark.parametrize(
    ("text", "algorithm"),
    [
        ("bn_train:f32:n2097c128h1w1:per-activation:nchw", "resident"),
        ("bn_train:f32:n1c4h129w520:spatial:nhwc", "resident"),
        ("bn_train:f32:n2c3h243w62:spatial:nchw", "teams"),
        ("bn_train:f16:n3c40h37w41:spatial:nhwc", "teams"),
    ],
)
def test_no_part_is_short(text: str, algorithm: str) -> None:
    """A block measures the means of all parts from its own: of a row that is far from all others, float32 would keep
    little of their squares."""
    problem = parse(text)
    candidate = registry.candidate(f"{problem.op}/numba/{algorithm}")
    configs = candidate.configs(problem, H200)
    assert configs
    for config in configs:
        *_, main = candidate.launches(problem, config, H200)
        fields = len(bn_plan.Walk._fields)
        walk, (most, rest) = bn_plan.Walk._make(main.integers[:fields]), main.integers[fields:][-2:]
        if algorithm == "teams":
            elems = [most] * (walk.parts - 1) + [rest]
        else:
            rows = 512 // config.columns
            elems = [most + max(0, min(rows, rest - part * rows)) for part in range(walk.parts)]
        assert sum(elems) == problem.m
        assert 2 * min(elems) >= max(elems), config


# Threads with no, few, eight and more vectors besides those they hold; slabs with columns of nobody; blocks with fewer
# rows.
_RESIDENT = (
    ("bn_train:f32:n3c5h5w7:spatial:nhwc", 3),
    ("bn_train:f32:n2c8h60w61:spatial:nhwc", 2),
    ("bn_train:bf16:n1c260h5w9:spatial:nhwc:pf32:run", 7),
    ("bn_train:f16:n40c6h3w4:per-activation:nchw", 4),
    ("bn_train:f32:n2c8h66w67:spatial:nhwc", 2),
    ("bn_bwd:f32:n2c4h70w71:spatial:nhwc", 2),
    ("bn_bwd:bf16:n2c8h94w97:spatial:nhwc:pf32", 2),
    ("bn_bwd:bf16:n1c24d3h9w10:spatial:ndhwc:pf32", 3),
)


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize(("text", "sms"), _RESIDENT)
def test_blocks_that_stay(text: str, sms: int, early: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of the grid at once, with all that a thread may hold, and four vectors."""
    block = emulated_ptx.install(monkeypatch, early)
    problem, device = parse(text), replace(H200, sms=sms)
    candidate = registry.candidate(f"{problem.op}/numba/resident")
    configs = candidate.configs(problem, device)
    for config in {*configs, configs[0]._replace(slots=4)}:
        given = values(problem, "normal")
        emulated.assert_near(candidate, problem, config, given, device, block, problem.scalars)


@pytest.mark.parametrize(
    "text",
    [
        "bn_train:f32:n2c8h33w41:spatial:nhwc:run",
        "bn_infer:f32:n2c8h33w41:spatial:nhwc",
        "bn_infer:bf16:n3c2h40w40:spatial:nchw:pf32",
        "bn_bwd:f16:n2c12h31w33:spatial:nhwc:pf32",
        "bn_infer_bwd:f32:n40c3h8w10:spatial:nchw",
        "bn_infer_bwd:bf16:n300c8h3w5:spatial:nhwc:pf32",
        "bn_train:f16:n7c3h15w17:spatial:nchw",
        "bn_infer:f16:n40c5h5w7:spatial:nhwc:pf32",
        "bn_bwd:bf16:n60c5h5w7:spatial:nhwc:pf32",
        "bn_infer_bwd:bf16:n9c5h7w7:spatial:nchw:pf32",
        "bn_infer_bwd:f16:n90c3h7w9:spatial:nchw",
    ],
)
def test_blocks_that_take_a_part(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads with fewer than four vectors, four, and more, of which the next are asked for while one is used; lanes of
    the second kernel with no part, one and several."""
    block = emulated_ptx.install(monkeypatch)
    problem = parse(text)
    candidate = registry.candidate(f"{problem.op}/numba/streamed")
    columns = candidate.configs(problem, H200)[0].columns
    for chunk_kib in (1, 16, 32):
        given = values(problem, "normal")
        config = bn_streamed.Streamed(columns, chunk_kib)
        emulated.assert_near(candidate, problem, config, given, H200, block, problem.scalars)


@pytest.mark.parametrize(
    "text",
    [
        "bn_train:f32:n1c5h5w7:per-activation:nchw",
        "bn_train:f32:n9c8h5w4:per-activation:nchw:run",
        "bn_train:bf16:n33c4h3w7:per-activation:nhwc:pf32:run",
        "bn_bwd:f32:n8c5h4w7:per-activation:nchw",
        "bn_bwd:bf16:n40c6h3w5:per-activation:nchw:pf32",
        "bn_infer_bwd:bf16:n5c12d2h3w3:per-activation:ncdhw",
        "bn_infer_bwd:f32:n21c8h3w1:per-activation:nhwc",
        "bn_bwd:f16:n6c20h2w3:spatial:nhwc",
    ],
)
def test_threads_that_have_all_rows_of_their_channels(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of as many rows as a thread asks for at once, fewer, and several times as many."""
    _assert_near(text, "few_rows", monkeypatch)


def _assert_near(text: str, algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By every config."""
    block = emulated_ptx.install(monkeypatch)
    problem = parse(text)
    candidate = registry.candidate(f"{problem.op}/numba/{algorithm}")
    for config in candidate.configs(problem, H200):
        emulated.assert_near(candidate, problem, config, values(problem, "normal"), H200, block, problem.scalars)


@pytest.mark.parametrize(
    "text",
    [
        "bn_infer:f32:n2c12h7w7:spatial:nchw",
        "bn_infer:f16:n3c40h1w3:spatial:nchw:pf32",
        "bn_infer:bf16:n1c3h5w7:spatial:nchw",
        "bn_infer:f32:n5c9d2h3w4:spatial:ncdhw",
        "bn_infer:f16:n4c33h8w8:spatial:nchw:pf32:a4",
        "bn_infer:f32:n2c5h40w41:spatial:nchw",
        "bn_infer:f16:n3c24h5w7:spatial:nhwc:pf32",
        "bn_infer:f16:n3c24h5w7:spatial:nhwc:pf32:a4",
        "bn_infer:bf16:n2c40h3w3:spatial:nhwc",
        "bn_infer:f16:n3c6h5w7:per-activation:nchw",
        "bn_infer:f32:n18c200h1w1:spatial:nchw",
        "bn_infer:f32:n1c1h1w1:spatial:nchw",
    ],
)
def test_vectors_of_two_planes_and_of_channels(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which begin in one plane and end in the next, also of the next image; in planes of few elements, and of many."""
    _assert_near(text, "flat", monkeypatch)


@pytest.mark.parametrize("text", ["bn_infer:f16:n3c7h5w7:spatial:nchw", "bn_infer:f32:n3c6h5w7:per-activation:nchw"])
def test_vectors_that_int32_does_not_count(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same kernel, of 64-bit integers."""
    monkeypatch.setattr(bn_plan, "INT32_END", 0)
    problem = parse(text)
    candidate = registry.candidate("bn_infer/numba/flat")
    launches = [candidate.launches(problem, config, H200)[0] for config in candidate.configs(problem, H200)]
    assert [launch.integer_bits for launch in launches] == [64, 64]
    _assert_near(text, "flat", monkeypatch)


def test_a_second_vector_beyond_the_end_is_no_negative_place() -> None:
    """Of an odd number of rows some threads have one and another that there is not, 2^31 elements away and more."""
    candidate = registry.candidate("bn_infer/numba/flat")
    for text, bits in (
        ("bn_infer:f16:n499c1h1w4300000:per-activation:nchw", {1: 32, 2: 64}),
        ("bn_infer:f16:n498c1h1w4300000:per-activation:nchw", {1: 32, 2: 32}),
        ("bn_infer:f16:n1c1h1w4300000:per-activation:nchw", {1: 32}),
    ):
        problem = parse(text)
        configs = candidate.configs(problem, H200)
        found = {config.at_once: candidate.launches(problem, config, H200)[0].integer_bits for config in configs}
        assert found == bits, text


@pytest.mark.parametrize("algorithm", ["held", "teams"])
@pytest.mark.parametrize("op", ["bn_train", "bn_bwd"])
@pytest.mark.parametrize("dtype", ["f32", "f64", "bf16"])
def test_every_channel_of_a_block_has_a_thread(dtype: str, op: str, algorithm: str) -> None:
    """Which finishes it: 32 columns of 8 lanes are more channels than a small block has threads."""
    problem, candidate = (
        parse(f"{op}:{dtype}:n3c160h37w37:per-activation:nchw"),
        registry.candidate(f"{op}/numba/{algorithm}"),
    )
    for config in candidate.configs(problem, H200):
        kernel = candidate.launches(problem, config, H200)[-1].source
        v = bn_plan.Variant(*kernel.specialised_on[-len(bn_plan.Variant._fields) :])
        assert v.columns == config.columns and v.columns * v.sums <= v.threads, config


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_blocks_of_many_columns(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    block = emulated_ptx.install(monkeypatch)
    problem = parse(f"bn_infer:{dtype}:n3c80h5w7:per-activation:nchw")
    config, given = bn_streamed.Streamed(256, 16), values(problem, "normal")
    emulated.assert_near(bn_streamed.INFER, problem, config, given, H200, block, problem.scalars)


@pytest.mark.parametrize(
    ("text", "lanes"),
    [
        ("bn_train:f32:n2c3h8w8:spatial:nchw", 4),
        ("bn_train:bf16:n2c3h7w8:spatial:nchw", 8),
        ("bn_train:bf16:n2c3h7w7:spatial:nchw", 1),
        ("bn_train:f32:n2c6h7w7:spatial:nhwc", 2),
        ("bn_train:f32:n2c8h7w7:spatial:nhwc:a4", 1),
        ("bn_train:f64:n2c8h7w7:per-activation:nchw", 2),
    ],
)
def test_vectors_are_as_wide_as_extents_and_addresses_allow(text: str, lanes: int) -> None:
    assert bn_plan.variant(parse(text), 1, 256).lanes == lanes
