"""What a guess goes by, beside what an H200 took (bench/results/h200.md): no GPU is needed."""

from __future__ import annotations

from math import inf

import pytest
from gpus import H200

from nbdnn.cudnn.cost import method_us
from nbdnn.dispatch import registry
from nbdnn.kernels.cuda.launch import LaunchedCandidate
from nbdnn.problem import Problem, parse

# Layers of 1x1 taps in bfloat16, channels-last, and microseconds of cuDNN's best engine.
POINTS = [
    ("conv_fwd:bf16:n32c64h56w56:k64r1s1:p0x0:u1x1", 9.35),
    ("conv_fwd:bf16:n32c64h56w56:k256r1s1:p0x0:u1x1", 18.1),
    ("conv_fwd:bf16:n32c256h56w56:k64r1s1:p0x0:u1x1", 18.4),
    ("conv_fwd:bf16:n32c128h28w28:k512r1s1:p0x0:u1x1", 11.4),
    ("conv_fwd:bf16:n32c256h14w14:k1024r1s1:p0x0:u1x1", 9.74),
    ("conv_bwd_data:bf16:n32c64h56w56:k256r1s1:p0x0:u1x1", 18.4),
    ("conv_bwd_filter:bf16:n32c64h56w56:k256r1s1:p0x0:u1x1", 21.8),
]
TAPS = [
    ("conv_fwd:bf16:n32c64h56w56:k64r3s3:p1x1:u1x1", 24.6),
    ("conv_bwd_data:bf16:n32c256h14w14:k256r3s3:p1x1:u1x1", 16.9),
    ("conv_fwd:bf16:n16c64h224w224:k64r3s3:p1x1:u1x1", 122.6),
]


@pytest.mark.parametrize(("geometry", "seen_us"), [*POINTS, *TAPS])
def test_cudnns_best_engine_takes_about_as_long_as_it_did(geometry: str, seen_us: float) -> None:
    guessed_us = method_us(parse(f"{geometry}:d1x1:g1:cross:nhwc"), H200, 0)
    assert 0.75 < seen_us / guessed_us < 1.25


# Of all but the first what `wgmma_boxes` took on an H200, in float16.
OWN_US = (17.1, 17.2, 11.1, 8.3, 17.4, 19.4)


@pytest.mark.parametrize(("point", "own_seen_us"), list(zip(POINTS[1:], OWN_US, strict=True)))
def test_products_of_matrices_go_to_who_is_hardly_slower(point: tuple[str, float], own_seen_us: float) -> None:
    """Between cuDNN and our own kernels there is little; of these the guess knows the fastest, and about its time."""
    geometry, seen_us = point
    problem = parse(f"{geometry}:d1x1:g1:cross:nhwc")
    own_us, cudnn_us = _own_us(problem), method_us(problem, H200, 0)
    assert own_us == _own_us(problem, "wgmma_boxes")
    assert 0.75 < own_seen_us / own_us < 1.25
    assert (own_seen_us if own_us < cudnn_us else seen_us) < 1.13 * min(own_seen_us, seen_us)


@pytest.mark.parametrize(
    ("layer", "seen_us"),
    [
        ("n32c32h112w112:k16", 11.7),
        ("n32c16h112w112:k96", 26.7),
        ("n32c24h56w56:k144", 11.6),
        ("n32c32h28w28:k192", 5.4),
    ],
)
def test_narrow_products_are_ours(layer: str, seen_us: float) -> None:
    """Which cuDNN took 1.1 to 1.2 times as long for."""
    problem = parse(f"conv_fwd:f16:{layer}r1s1:p0x0:u1x1:d1x1:g1:cross:nhwc")
    own_us = _own_us(problem)
    assert own_us == _own_us(problem, "pointwise") < method_us(problem, H200, 0)
    assert 0.75 < seen_us / own_us < 1.25


@pytest.mark.parametrize("dtype", ["f32", "f16"])
@pytest.mark.parametrize("op", ["conv_fwd", "conv_bwd_data", "conv_bwd_filter"])
def test_last_layers_of_few_filters_are_ours(op: str, dtype: str) -> None:
    """Of which cuDNN took 2.7 to 14 times as long: 1360 us, not 98, of a filter's gradient in float32."""
    problem = parse(f"{op}:{dtype}:n8c64h256w256:k3r3s3:p1x1:u1x1:d1x1:g1:cross:nhwc")
    assert _own_us(problem) < method_us(problem, H200, 0)


@pytest.mark.parametrize(("dtype", "is_product"), [("f16", True), ("bf16", True), ("f32", False)])
@pytest.mark.parametrize("op", ["conv_fwd", "conv_bwd_filter"])
def test_patches_are_products_but_in_float32(op: str, dtype: str, is_product: bool) -> None:
    """In 16 bits 24.7 and 20.8 us by `folded_mma_gemm`, 36.9 and 45.3 by `stem`; in float32 56 and 74 by
    `folded_fma_gemm`, 46 and 56 by `rows` (an H200)."""
    problem = parse(f"{op}:{dtype}:n32c3h224w224:k96r4s4:p0x0:u4x4:d1x1:g1:cross:nhwc")
    by_products, by_windows = (
        min(_own_us(problem, name) for name in names)
        for names in (("folded_mma_gemm", "folded_fma_gemm"), ("rows", "stem"))
    )
    assert (by_products < by_windows) == is_product


def _own_us(problem: Problem, algorithm: str = "") -> float:
    """The least that our own kernels, or one of them, are guessed to take."""
    return min(
        (
            candidate.estimate(problem, config, H200)
            for candidate in registry.candidates(problem.op, kind="cuda")
            if isinstance(candidate, LaunchedCandidate) and algorithm in ("", candidate.algorithm)
            if candidate.supports(problem, H200).ok
            for config in candidate.configs(problem, H200)
        ),
        default=inf,
    )


@pytest.mark.parametrize(("geometry", "seen_us"), TAPS)
def test_taps_that_share_their_pixels_are_ours(geometry: str, seen_us: float) -> None:
    problem = parse(f"{geometry}:d1x1:g1:cross:nhwc")
    candidate = registry.candidate(f"{problem.op}/numba/wgmma_patch")
    assert min(candidate.estimate(problem, config, H200) for config in candidate.configs(problem, H200)) < seen_us


@pytest.mark.parametrize(
    ("problem", "own"),
    [
        ("conv_bwd_filter:f32:n2c32d128h128w128:k32t3r3s3:p1x1x1:u1x1x1", "winograd_4x4"),  # 6.2 ms, cuDNN 425
        ("conv_bwd_filter:f32:n2c32d64h64w64:k64t3r3s3:p1x1x1:u2x2x2", "fma_gemm"),  # 0.32, 0.8
        ("conv_bwd_data:f32:n2c32d128h128w128:k64t2r2s2:p0x0x0:u2x2x2", "fma_gemm"),  # 1.1, 120
        ("conv_bwd_data:f32:n2c32d64h64w64:k64t3r3s3:p1x1x1:u2x2x2", "fma_gemm"),  # 0.39, 24
    ],
)
def test_gradients_of_volumes_in_float32_are_ours(problem: str, own: str) -> None:
    posed = parse(f"{problem}:d1x1x1:g1:cross:ncdhw")
    least_us = min(_own_us(posed, name) for name in ("winograd_4x4", "fma_gemm", "direct"))
    assert _own_us(posed, own) == least_us < method_us(posed, H200, 0)


def test_float64_adds_to_memory_unless_it_may_not() -> None:
    """264 us by an engine that adds to memory in any order, 1520 by one that does not."""
    problem = parse("conv_bwd_filter:f64:n128c1h28w28:k32r5s5:p2x2:u1x1:d1x1:g1:cross:nhwc")
    assert 0.7 < method_us(problem, H200, 0, whole=True) / 1520 < 1.4
    assert method_us(problem, H200, 0) < 264
