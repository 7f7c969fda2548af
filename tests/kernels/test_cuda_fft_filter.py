"""The filter gradient of GPUs by Fourier transforms: whole blocks as plain Python, and what its machine code needs.

The products between the transforms are those of the Winograd filter gradient, which has tests of its own; NumPy's stand
in for them.
"""

from __future__ import annotations

from dataclasses import replace
from math import nan
from typing import Any

import numpy as np
import pytest
from emulated import SCALARS, Block, Memory, memory, operand_memory, run
from emulated_ptx import FourierWords, install
from gpus import H200
from guarded import values

from nbdnn import reference_conv
from nbdnn.kernels.cuda.compile import compile_kernel
from nbdnn.kernels.cuda.conv_fft_filter import BWD_FILTER
from nbdnn.kernels.cuda.fft_filter_input import PLANES
from nbdnn.kernels.cuda.filter_products import Config
from nbdnn.kernels.cuda.fma_tile import Tile
from nbdnn.kernels.cuda.launch import Launch
from nbdnn.kernels.cuda.winograd_product import Fields
from nbdnn.problem import parse

SHAPES = (
    ("n2c5h9w11:k7r5s3:p2x1:u1x1:d1x1:g1:cross:nchw", "few channels, images smaller than a tile"),
    ("n2c5h9w11:k7r5s3:p2x1:u1x1:d1x1:g1:conv:nhwc:e:beta", "the same, flipped and channels-last"),
    ("n1c9h34w40:k6r11s7:p0x3:u1x1:d1x1:g1:cross:nchw", "two tiles an axis, the most taps"),
    ("n1c33h6w5:k2r2s1:ba3.2x0.3:u1x1:d1x1:g1:conv:nhwc:kcrs:ynchw", "two layouts; two blocks of a row of dw"),
    ("n9c1h27w27:k1r1s1:p0x0:u1x1:d1x1:g1:cross:nchw:krsc:ynhwc", "more images than a stage has; one tap"),
    ("n1c65h4w3:k2r2s3:ba40.1x1.0:u1x1:d1x1:g1:cross:nhwc", "two columns of tiles; more padding than image"),
    ("n1c2h1w1:k65r1s1:p0x0:u1x1:d1x1:g1:cross:nchw", "two rows of tiles; one pixel"),
)


def multiply(launch: Launch, tile: Tile, workspace: Memory) -> None:
    """What `winograd_product` leaves in the workspace, a block's tiles of products one after the other."""
    f, words = Fields(*launch.integers), workspace.words
    stages, columns = f.total // (PLANES * f.tiles), f.tiles_n * tile.n
    d, v = (
        np.array(words[start : start + PLANES * stages * 8 * channels]).reshape(PLANES, stages * 8, channels)
        for start, channels in ((f.a_start, f.a_channels), (f.b_start, f.b_channels))
    )
    m = np.full((PLANES, f.tiles // f.tiles_n * tile.m, columns), nan)
    m[:, : d.shape[2], : v.shape[2]] = d.swapaxes(1, 2) @ v
    cut = m.reshape(PLANES, -1, tile.m, f.tiles_n, tile.n).swapaxes(2, 3).reshape(-1, tile.m * tile.n)
    for number, product in enumerate(cut):
        at = f.c_start + (number + number * stages // f.share) * product.size
        words[at : at + product.size] = product.tolist()


def gradient(text: str, sms: int, block: Block) -> tuple[list[float], list[float]]:
    """(what the kernels and the products make, what is expected)."""
    problem, config, device = parse(f"conv_bwd_filter:f32:{text}"), Config(Tile(64, 64)), replace(H200, sms=sms)
    assert BWD_FILTER.supports(problem, device).ok
    given = values(problem, "integers")
    operands = [operand_memory(operand, given.get(operand.name), problem.align) for operand in problem.operands]
    workspace = memory("f32", np.full(BWD_FILTER.workspace_bytes(problem, config, device) // 4, nan))
    first, product, last = BWD_FILTER.launches(problem, config, device)
    run(block, first, operands, workspace)
    assert len(set(workspace.written)) == len(workspace.written)
    multiply(product, config.tile, workspace)
    run(block, last, operands, workspace)
    assert sorted(operands[2].written) == list(range(operands[2].count))
    expected = operand_memory(problem.operands[2], reference_conv.compute(problem, given, SCALARS), 4)
    return operands[2].values().tolist(), expected.values().tolist()


@pytest.mark.parametrize("sms", [1, 200], ids="{} multiprocessors".format)
@pytest.mark.parametrize("text", [shape for shape, _ in SHAPES])
def test_every_output_is_its_sum(text: str, sms: int, monkeypatch: pytest.MonkeyPatch) -> None:
    got, expected = gradient(text, sms, install(monkeypatch))
    assert got == pytest.approx(expected, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("bf16:n1c16h8w8:k16r5s5:p1x1:u1x1:d1x1:g1:cross:nhwc", "dtype is bf16"),
        ("f32:n1c16h18w18:k16r12s5:p2x2:u1x1:d1x1:g1:cross:nhwc", "the filter is 12x5"),
        ("f32:n1c16d8h8w8:k16t3r3s3:p1x1x1:u1x1x1:d1x1x1:g1:cross:ndhwc", "the filter is 3x3x3"),
        ("f32:n1c16h8w8:k16r3s3:p1x1:u2x2:d1x1:g1:cross:nhwc", "stride (2, 2)"),
        ("f32:n1c16h8w8:k16r3s3:p1x1:u1x1:d2x2:g1:cross:nhwc", "dilation (2, 2)"),
        ("f32:n1c16h8w8:k16r3s3:p1x1:u1x1:d1x1:g4:cross:nhwc", "in 4 groups"),
        ("f32:n0c16h8w8:k16r3s3:p1x1:u1x1:d1x1:g1:cross:nhwc", "0 images"),
        ("f32:n128c512h112w112:k512r3s3:p1x1:u1x1:d1x1:g1:cross:nhwc", "an index reaches"),
    ],
)
def test_refusals_have_numbers(body: str, reason: str) -> None:
    support = BWD_FILTER.supports(parse(f"conv_bwd_filter:{body}"), H200)
    assert not support.ok and reason in support.reason


pytestmark = pytest.mark.usefixtures("numba_cuda")


class Arithmetic:
    """Stands in for a builder of instructions: their results, on Python's numbers."""

    def fadd(self, a: Any, b: Any) -> float:
        return number(a) + number(b)

    def fsub(self, a: Any, b: Any) -> float:
        return number(a) - number(b)

    def fmul(self, a: Any, b: Any) -> float:
        return number(a) * number(b)

    def fma(self, a: Any, b: Any, c: Any) -> float:
        return number(a) * number(b) + number(c)


def number(value: Any) -> float:
    """Of a constant of the code as well."""
    return getattr(value, "constant", value)


def test_the_instructions_of_a_transform_compute_what_stands_in_for_it() -> None:
    from nbdnn.kernels.cuda.ptx_fourier import EXTENT, _transformed

    real, imaginary = np.random.default_rng(0).standard_normal((2, EXTENT)).tolist()
    computed = _transformed(Arithmetic(), list(zip(real, imaginary, strict=True)))
    FourierWords.fourier(real, imaginary)
    np.testing.assert_allclose(np.transpose(computed), [real, imaginary], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a", "sm_120"])
@pytest.mark.parametrize("layout", ["nhwc", "nchw"])
def test_lines_stay_in_registers(layout: str, arch: str) -> None:
    problem = parse(f"conv_bwd_filter:f32:n32c64h27w27:k192r5s5:p2x2:u1x1:d1x1:g1:cross:{layout}")
    for launch in BWD_FILTER.launches(problem, BWD_FILTER.configs(problem, H200)[0], H200):
        kernel = compile_kernel(launch.source, arch)
        assert (kernel.spill_bytes, kernel.stack_bytes) == (0, 0)
        assert kernel.registers * launch.source.threads * launch.source.min_blocks <= 65536
