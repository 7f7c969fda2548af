"""Batch normalisation in waves: in plain Python, all blocks there at once; and what a GPU is asked for."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

import emulated
import emulated_ptx
import emulated_vectors
import pytest
from gpus import H200
from guarded import values

from nbdnn.dispatch import registry
from nbdnn.kernels.cuda import bn_plan, bn_waves
from nbdnn.kernels.cuda.bn_waves import Waves
from nbdnn.problem import parse

# Blocks of two multiprocessors; slabs of a wave that is not whole at the end, rows that are no whole rounds.
SMALL = replace(H200, sms=2, l2_bytes=64 << 10)
EMULATED = (
    ("f32:n3c40h7w6:spatial:nhwc", Waves(8, 1, 2)),
    ("f32:n3c36h7w6:spatial:nhwc", Waves(4, 2, 2)),
    ("f32:n300c6h2w2:spatial:nhwc", Waves(2, 1, 2, "h")),
    ("f32:n3c5h5w7:spatial:nchw", Waves(1, 2, 2)),
    ("f32:n2c3h40w52:spatial:nchw", Waves(1, 1, 2)),
    ("bf16:n5c24h6w6:spatial:nhwc:pf32", Waves(2, 1, 2)),
    ("bf16:n3c3h5w7:spatial:nchw", Waves(1, 2, 2)),
    ("f16:n3c2h8w8:spatial:nchw", Waves(1, 1, 1)),
    ("f32:n9c3h3w5:per-activation:nchw", Waves(8, 4, 2)),
)


@pytest.mark.parametrize("of_warp", [64, 1], ids=["a warp a channel", "a block a channel"])
@pytest.mark.parametrize("op", ["bn_train", "bn_bwd"])
@pytest.mark.parametrize(("text", "config"), EMULATED)
def test_waves_compute_what_the_reference_does(
    op: str, text: str, config: Waves, of_warp: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bn_waves, "_OF_WARP", of_warp)
    problem = parse(f"{op}:{text}{':run' if op == 'bn_train' else ''}")
    candidate = registry.candidate(f"{op}/numba/waves")
    block = emulated_ptx.install(monkeypatch)
    emulated_vectors.install(monkeypatch, block)
    emulated.assert_near(candidate, problem, config, values(problem, "normal"), SMALL, block, problem.scalars)


@pytest.mark.parametrize(
    "text",
    [
        "bn_train:f32:n32c256h56w56:spatial:nhwc",
        "bn_bwd:bf16:n4c64d16h56w56:spatial:ncdhw:pf32",
        "bn_bwd:f32:n4096c4096h1w1:per-activation:nchw",
        "bn_train:f16:n3c40h5w7:spatial:nhwc",
        "bn_bwd:f64:n3c1200h2w4:per-activation:nhwc",
    ],
)
def test_all_blocks_of_a_wave_are_there_at_once(text: str) -> None:
    problem = parse(text)
    candidate = registry.candidate(f"{problem.op}/numba/waves")
    configs = candidate.configs(problem, H200)
    assert 1 < len(configs) <= 5
    for config in configs:
        _, main = candidate.launches(problem, config, H200)
        walk = bn_plan.Walk._make(main.integers[: len(bn_plan.Walk._fields)])
        of_wave = bn_waves._OfWave._make(main.integers[len(bn_plan.Walk._fields) :])
        assert main.cooperative
        assert main.grid == (of_wave.wave * walk.parts, 1, 1)
        assert main.grid[0] <= H200.sms * config.resident == H200.sms * main.source.min_blocks
        assert walk.chunk * walk.parts >= walk.rows > walk.chunk * (walk.parts - 1)
        elems = of_wave.full * (walk.parts - 1) + of_wave.rest
        assert elems == problem.m, f"{elems} elements of a channel are counted"


def test_two_waves_stay_in_the_cache() -> None:
    for text in ("bn_train:f32:n32c256h56w56:spatial:nhwc", "bn_bwd:bf16:n32c256h56w56:spatial:nchw:pf32"):
        problem = parse(text)
        candidate = registry.candidate(f"{problem.op}/numba/waves")
        read_bytes = sum(each.size_bytes for each in problem.operands if each.role == "in")
        _, main = candidate.launches(problem, config := candidate.configs(problem, H200)[0], H200)
        waves = ceil(bn_plan.Walk._make(main.integers[: len(bn_plan.Walk._fields)]).slabs / config.slabs)
        assert 2 * read_bytes / waves < H200.l2_bytes / 2


def test_some_config_takes_small_problems_in_waves() -> None:
    """So that what the matrix runs on a GPU is what large problems run."""
    problem = parse("bn_train:f32:n3c1200h2w4:spatial:nhwc")
    slabs = 1200 // 32 + 1
    assert any(4 * (config.slabs - 1) < slabs for config in bn_waves.TRAIN.configs(problem, H200))
