"""The Winograd filter gradient of GPUs: whole blocks as plain Python, and what its machine code needs."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from budget import ARCHITECTURES, in_turn
from emulated import result
from emulated_ptx import Words, install
from gpus import H200

from nbdnn.kernels.cuda.compile import compile_kernel
from nbdnn.kernels.cuda.conv_winograd_filter import BWD_FILTER
from nbdnn.kernels.cuda.filter_products import Config
from nbdnn.kernels.cuda.fma_tile import Tile
from nbdnn.problem import parse

SHAPES = (
    ("n2c5h9w11:k7r3s3:p1x1:u1x1:d1x1:g1:cross:nhwc", "odd everywhere: tiles beyond both edges"),
    ("n2c5h9w11:k7r3s3:p1x1:u1x1:d1x1:g1:conv:nchw", "the same, flipped and planar"),
    ("n1c16h8w12:k8r3s3:p0x0:u1x1:d1x1:g1:cross:nhwc:e:beta", "whole vectors"),
    ("n1c8h6w7:k12r3s3:ba3.2x0.3:u1x1:d1x1:g1:conv:nhwc:kcrs:ynchw", "two layouts; the image begins inside of a tile"),
    ("n1c34h4w5:k6r3s3:p1x1:u1x1:d1x1:g1:cross:nchw:krsc:ynhwc", "the reverse, and channels of two blocks"),
    ("n1c16h8w12:k8r3s3:p1x1:u1x1:d1x1:g1:cross:nhwc:a4", "not aligned: a channel at a time"),
    ("n3c4h1w1:k5r3s3:p1x1:u1x1:d1x1:g1:cross:nchw", "one pixel"),
    ("n0c4h5w5:k5r3s3:p1x1:u1x1:d1x1:g1:cross:nhwc:e:beta", "no image: beta alone"),
    ("n2c5d3h9w6:k7t3r3s3:p1x1x1:u1x1x1:d1x1x1:g1:cross:ndhwc", "slices: the taps reach beyond each image"),
    ("n1c6d4h5w5:k4t3r3s3:ba2.0x3.2x0.3:u1x1x1:d1x1x1:g1:conv:ncdhw:e:beta", "the same, flipped and planar"),
    ("n3c4d5h4w4:k8t2r3s3:p0x1x1:u1x1x1:d1x1x1:g1:conv:ncdhw:ktrsc:yndhwc", "two taps along the depth"),
    ("n2c8d2h7w3:k4t1r3s3:p0x1x1:u1x1x1:d1x1x1:g1:cross:ndhwc", "one"),
    ("n2c4d2h3w4:k4t3r3s3:ba4.3x1.1x1.1:u1x1x1:d1x1x1:g1:cross:ncdhw", "more padding than taps"),
    ("n0c4d2h5w5:k5t3r3s3:p1x1x1:u1x1x1:d1x1x1:g1:cross:ndhwc:e:beta", "no image of slices: beta alone"),
)


def run(monkeypatch: pytest.MonkeyPatch, text: str, config: Config, sms: int, early: bool = False) -> None:
    problem, block = parse(f"conv_bwd_filter:f32:{text}"), install(monkeypatch, early)
    got, expected = result(BWD_FILTER, problem, config, replace(H200, sms=sms), block)
    assert got == pytest.approx(expected, rel=1e-12, abs=1e-9)


@pytest.mark.parametrize("sms", [1, 9], ids="{} multiprocessors".format)
@pytest.mark.parametrize("text", [shape for shape, _ in SHAPES])
def test_every_output_is_its_sum(text: str, sms: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one multiprocessor a block has several tiles of M; with many, several blocks share one."""
    run(monkeypatch, text, Config(Tile(64, 64)), sms, early=sms == 1)


@pytest.mark.parametrize("sms", [1, 9], ids="{} multiprocessors".format)
@pytest.mark.parametrize(
    ("tile", "channels"), [(Tile(64, 64), "c68h9w10:k8"), (Tile(64, 128), "c8h9w10:k72")], ids=["columns", "rows"]
)
def test_several_tiles_of_channels(tile: Tile, channels: str, sms: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of several tiles of M, tiles of several blocks, and channels beyond the last tile's edge."""
    text = f"n1{channels}r3s3:p1x1:u1x1:d1x1:g1:cross:nhwc"
    run(monkeypatch, text, Config(tile), sms)


@pytest.mark.parametrize(("extent", "products"), [("h8w8", 144), ("h7w8", 132), ("h7w7", 121), ("h14w13", 23 * 23)])
def test_what_is_zero_is_left_out(extent: str, products: int) -> None:
    """7 rows are a whole tile of 6 products an axis, and one whose last product is none: 11 of 12."""
    problem = parse(f"conv_bwd_filter:f32:n8c64{extent}:k64r3s3:p1x1:u1x1:d1x1:g1:cross:nhwc")
    product = BWD_FILTER.launches(problem, Config(Tile(64, 64)), H200)[1]
    assert product.integers[0] == products


def test_a_copy_that_is_not_waited_for_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Words, "copy_async_wait", lambda words, groups: lambda: None)
    with pytest.raises(AssertionError):
        run(monkeypatch, SHAPES[0][0], Config(Tile(64, 64)), 1)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("bf16:n1c16h8w8:k16r3s3:p1x1:u1x1:d1x1:g1:cross:nhwc", "dtype is bf16"),
        ("f32:n1c16h8w8:k16r5s5:p2x2:u1x1:d1x1:g1:cross:nhwc", "the filter is 5x5"),
        ("f32:n1c16d8h8w8:k16t3r3s3:p1x1x1:u2x1x1:d1x1x1:g1:cross:ndhwc", "stride (2, 1, 1)"),
        ("f32:n1c16h8w8:k16r3s3:p1x1:u2x2:d1x1:g1:cross:nhwc", "stride (2, 2)"),
        ("f32:n1c16h8w8:k16r3s3:p1x1:u1x1:d2x2:g1:cross:nhwc", "dilation (2, 2)"),
        ("f32:n1c16h8w8:k16r3s3:p1x1:u1x1:d1x1:g4:cross:nhwc", "in 4 groups"),
        ("f32:n64c512h512w512:k8r3s3:p1x1:u1x1:d1x1:g1:cross:nhwc", "an index reaches"),
    ],
)
def test_refusals_have_numbers(body: str, reason: str) -> None:
    support = BWD_FILTER.supports(parse(f"conv_bwd_filter:{body}"), H200)
    assert not support.ok and reason in support.reason


pytestmark = pytest.mark.usefixtures("numba_cuda")


@pytest.mark.parametrize(("layout", "arch"), in_turn(product(("nhwc", "nchw", "nhwc:a4"), ARCHITECTURES), 3))
def test_a_tile_stays_in_registers(layout: str, arch: str) -> None:
    problem = parse(f"conv_bwd_filter:f32:n32c128h28w28:k128r3s3:p1x1:u1x1:d1x1:g1:cross:{layout}")
    for launch in BWD_FILTER.launches(problem, BWD_FILTER.configs(problem, H200)[0], H200):
        kernel = compile_kernel(launch.source, arch)
        assert (kernel.spill_bytes, kernel.stack_bytes) == (0, 0)
        assert kernel.registers * launch.source.threads * launch.source.min_blocks <= 65536
