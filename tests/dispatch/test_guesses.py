"""What is taken before anything is measured, on a GPU: the slower of two must not be guessed to be the faster.

Each row was measured on an H200, in microseconds. What had been guessed there took five times as long or more, since a
thread's own work, which takes its time however few threads there are, did not count.
"""

from __future__ import annotations

import pytest
from gpus import H200

from nbdnn.cudnn.cost import method_us
from nbdnn.dispatch import registry
from nbdnn.problem import parse

_FOLDED = "folded_mma_gemm"


def _guess_us(problem_text: str, algorithm: str) -> float:
    problem = parse(problem_text)
    candidate = registry.candidate(f"{problem.op}/{algorithm}")
    return min(candidate.estimate(problem, config, H200) for config in candidate.configs(problem, H200))


@pytest.mark.parametrize(
    ("problem", "fast", "slow"),
    [
        # 13.8 and 281, 14.5 and 218, 6.2 and 90, 12.3 and 86, 5.3 and 33, 22 and 333
        ("conv_fwd:f32:n32c80h8w8:k24r5s5:p0x0:u1x1:d1x1:g1:cross:nhwc:kcrs", "fma_gemm", "direct"),
        ("conv_bwd_data:f32:n4c2h14w75:k160r5s5:p0x0:u2x2:d1x1:g1:conv:nhwc", "folded_fma_gemm", "direct"),
        ("conv_fwd:f32:n1c256d12h17w9:k144t1r1s1:p0x1x0:u3x3x3:d3x3x3:g1:cross:ncdhw", "fma_gemm", "direct"),
        ("conv_bwd_filter:f16:n32c12h57w57:k64r1s1:p0x1:u2x2:d1x1:g1:conv:nhwc", _FOLDED, "direct"),
        ("conv_bwd_filter:f32:n1c320h7w52:k320r5s5:p2x3:u1x1:d1x1:g320:cross:nhwc", "depthwise_lanes", "direct"),
        (
            "conv_fwd:f16:n2c4d24h24w24:k320t3r3s1:p1x1x0:u1x1x1:d1x1x1:g1:conv:ncdhw:e:bias",
            _FOLDED,
            "direct",
        ),
        # 1.7 and 8.9, 3.6 and 10.6
        ("pool_fwd:bf16:n1c100d17h7w8:t3r3s3:p0x2x2:u3x3x3:average_exc_pad:ndhwc", "window", "direct"),
        ("pool_fwd:f32:n4c100d7h3w10:t7r3s10:p0x2x0:u1x5x3:sum:ncdhw", "separable", "direct"),
        # 6.5 and 364
        ("softmax_fwd:f16:n4c256h60w37:fast:instance:nhwc", "parts", "direct"),
    ],
)
def test_the_faster_is_guessed(problem: str, fast: str, slow: str) -> None:
    assert _guess_us(problem, f"numba/{fast}") < _guess_us(problem, f"numba/{slow}")


@pytest.mark.usefixtures("cudnn")
@pytest.mark.parametrize(
    ("problem", "fast", "slow"),
    [
        # 6.5 and 971, 18 and 256, 1.9 and 15
        ("softmax_fwd:f16:n4c256h60w37:fast:instance:nhwc", "parts", "legacy"),
        ("pool_bwd:bf16:n4c64h64w75:r64s75:p60x57:u4x4:average_inc_pad:nhwc", "separable", "pooling"),
        ("pool_fwd:f32:n4c15h37w57:r7s7:p6x0:u4x4:max:nhwc", "window", "pooling"),
    ],
)
def test_the_faster_is_guessed_beside_cudnn(problem: str, fast: str, slow: str) -> None:
    assert _guess_us(problem, f"numba/{fast}") < _guess_us(problem, f"cudnn/{slow}")


@pytest.mark.parametrize(
    "problem",
    [
        # Float32 of two networks, where the default policy took 1.8 and 2.5 times the best: 87 and 166 us, 36 and 440,
        # 26 and 49, 255 and 3910, 23 and 68.
        "conv_bwd_data:f32:n32c256h14w14:k1024r1s1:p0x0:u1x1:d1x1:g1:cross:nchw",
        "conv_bwd_filter:f32:n32c64h56w56:k64r1s1:p0x0:u1x1:d1x1:g1:cross:nchw",
        "conv_bwd_filter:f32:n32c32h28w28:k192r1s1:p0x0:u1x1:d1x1:g1:cross:nchw",
        "conv_bwd_data:f32:n32c256h56w56:k512r1s1:p0x0:u2x2:d1x1:g1:cross:nchw",
        "conv_fwd:f32:n32c960h7w7:k160r1s1:p0x0:u1x1:d1x1:g1:cross:nchw",
    ],
)
def test_float32_is_not_guessed_to_be_cudnns(problem: str) -> None:
    cudnn_us = min(method_us(parse(problem), H200, 0, whole=whole) for whole in (False, True))
    assert _guess_us(problem, "numba/fma_gemm") < cudnn_us


def test_sums_that_nothing_splits_are_no_good_guess() -> None:
    """A filter gradient of few channels took cuDNN's first choice 2090 us, and another 111."""
    problem = parse("conv_bwd_filter:f32:n32c32h112w112:k16r1s1:p0x0:u1x1:d1x1:g1:cross:nchw")
    assert method_us(problem, H200, 0, whole=True) > 2 * method_us(problem, H200, 3)


@pytest.mark.parametrize(
    ("problem", "fast", "slow"),
    [
        # Rows of a plane that threads store by parts of a sector: 6.5 and 10.5 us, 5.4 and 8.9
        (
            "conv_fwd:f32:n32c960h7w7:k960r3s3:p1x1:u1x1:d1x1:g960:cross:nchw",
            "numba/depthwise 4x1",
            "numba/depthwise 8x2",
        ),
        (
            "conv_fwd:f16:n32c960h7w7:k960r3s3:p1x1:u1x1:d1x1:g960:cross:nchw",
            "numba/depthwise 8x1",
            "numba/depthwise 8x2",
        ),
        # Channels that a thread takes one after the other: 8.5 and 65 us, 3.1 and 16
        ("spatialtf_bwd:f16:n1c80h46w46:o42x90:nchw:pf32", "numba/gather t1g4", "numba/gather t1g80"),
        ("spatialtf_fwd:f16:n2c64h49w49:o38x90:nchw", "numba/direct t1g4", "numba/direct t1g64"),
    ],
)
def test_the_faster_config_is_guessed(problem: str, fast: str, slow: str) -> None:
    posed, name = parse(problem), fast.partition(" ")[0]
    candidate = registry.candidate(f"{posed.op}/{name}")
    guess = {f"{name} {c}": candidate.estimate(posed, c, H200) for c in candidate.configs(posed, H200)}
    assert guess[fast] < guess[slow]
