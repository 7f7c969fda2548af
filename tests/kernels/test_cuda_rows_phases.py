"""The filter gradient of first layers by phases of alignment: whole blocks as plain Python, and what is planned."""

from __future__ import annotations

from dataclasses import replace

import pytest
from emulated import result
from emulated_ptx import Words, install
from gpus import H200

from nbdnn.kernels.cuda.conv_rows import BWD_FILTER
from nbdnn.kernels.cuda.rows_launch import Config
from nbdnn.kernels.cuda.rows_plan import Phased
from nbdnn.problem import parse

SMALL = Config(64, 128, 16, 1, 2)
# Whose chunks of eight pixels of a phase lie in different banks: the stand-ins refuse others, which are slower only.
SHAPES = (
    ("n1c3h8w16:k16r3s3:p1x1:u2x2:d1x1:g1:cross:nhwc", SMALL, 1, "four phases, a line's products not whole"),
    ("n2c3h9w24:k24r3s3:p1x1:u2x2:d1x1:g1:conv:nhwc:e:beta", SMALL, 1, "flipped; filters and rows beyond the tile"),
    ("n1c3h11w64:k40r7s7:p3x3:u2x2:d1x1:g1:cross:nhwc", Config(128, 128, 64, 1, 3), 4, "whole tiles, groups of phases"),
    ("n1c3h11w64:k16r7s7:p3x3:u2x2:d1x1:g1:conv:nchw:krsc:ynhwc", Config(128, 128, 16, 4, 2), 2, "planar; few warps"),
    ("n2c1h9w32:k16r3s3:p1x1:u1x1:d1x1:g1:cross:nhwc", Config(64, 16, 16, 2, 2), 1, "eight phases, lines that are cut"),
    ("n1c4h9w16:k8r3s5:ba1.0x2.3:u1x2:d1x1:g1:cross:nhwc", SMALL, 1, "one phase; dy 8 filters wide, uneven padding"),
)


def run(monkeypatch: pytest.MonkeyPatch, text: str, config: Config, sms: int, early: bool = False) -> None:
    problem, block = parse(f"conv_bwd_filter:bf16:{text}"), install(monkeypatch, early)
    got, expected = result(BWD_FILTER, problem, config, replace(H200, sms=sms), block)
    assert got == expected


@pytest.mark.parametrize("early", [False, True], ids=["late", "early"])
@pytest.mark.parametrize(("text", "config", "sms"), [shape[:3] for shape in SHAPES])
def test_every_output_is_its_sum(
    text: str, config: Config, sms: int, early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    run(monkeypatch, text, config, sms, early)


def test_a_copy_that_is_not_waited_for_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Words, "copy_async_wait", lambda words, groups: lambda: None)
    with pytest.raises(AssertionError):
        run(monkeypatch, SHAPES[0][0], SMALL, 1)


@pytest.mark.parametrize(
    ("layer", "phases", "chunks"),
    [
        ("c3h224w224:k64r7s7:p3x3:u2x2", 4, 3),
        ("c3h224w224:k32r3s3:p1x1:u2x2", 4, 2),
        ("c3h224w224:k64r11s11:p2x2:u4x4", 2, 5),
        ("c4h224w224:k32r3s3:p1x1:u2x2", 1, 2),
        ("c3h224w224:k32r3s3:p1x1:u1x1", 8, 2),
    ],
)
def test_windows_are_of_as_many_phases_as_they_begin_at(layer: str, phases: int, chunks: int) -> None:
    """A window of 7x7x3 has 21 neighbours, and begins 7, 5, 3 or 1 behind 16 aligned bytes: 28 elements are 4 chunks.

    A block of the first two has lines that are copied from 4 further on the left, and all do with 3.
    """
    problem = parse(f"conv_bwd_filter:bf16:n32{layer}:d1x1:g1:cross:nhwc")
    planned = BWD_FILTER.plan(problem, BWD_FILTER.configs(problem, H200)[0], H200)
    variant = planned.source.specialised_on
    assert isinstance(variant, Phased)
    assert (variant.phases, variant.chunks) == (phases, chunks)
    assert len(variant.before) * variant.of_block == phases
    assert planned.grid[2] % len(variant.before) == 0
