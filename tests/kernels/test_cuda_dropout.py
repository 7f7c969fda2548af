"""Dropout's kernels for GPUs: what they need when compiled, and what they refuse."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from budget import ARCHITECTURES, device_of, in_turn
from gpus import H200

from nbdnn.dispatch import registry
from nbdnn.kernels.cuda.compile import compile_kernel, ptx_text
from nbdnn.kernels.cuda.launch import LaunchedCandidate
from nbdnn.problem import FAMILIES, parse

_MULTIPLIER = 0xD2511F53  # of the generator's first word


@pytest.mark.usefixtures("numba_cuda")
@pytest.mark.parametrize(
    ("op", "dtype", "elements", "arch"),
    in_turn(
        product(
            FAMILIES["dropout"],
            ("f32", "bf16", "f16", "f64", "f32:a4"),
            ("m33554432", "m65536", "m1000"),
            ARCHITECTURES,
        ),
        7,
    ),
)
def test_kernels_stay_within_their_means(op: str, dtype: str, elements: str, arch: str) -> None:
    """No spills, no stack, and blocks enough on a multiprocessor to hide what the generator takes."""
    name, _, align = dtype.partition(":")
    problem = parse(":".join(filter(None, (op, name, elements, align))))
    (candidate,) = registry.candidates(op, kind="cuda")
    assert isinstance(candidate, LaunchedCandidate) and candidate.supports(problem, H200).ok
    device = device_of(arch)
    for launch in candidate.launches(problem, candidate.configs(problem, device)[0], device):
        kernel = compile_kernel(launch.source, arch)
        assert (kernel.spill_bytes, kernel.stack_bytes) == (0, 0), f"{arch}: {kernel._replace(cubin=b'')}"
        assert kernel.registers * launch.source.threads * launch.source.min_blocks <= 65536


@pytest.mark.usefixtures("numba_cuda")
@pytest.mark.parametrize(("elements", "cluster"), [(1, 1), (2049, 2), (14337, 8), (16385, 5), (32768, 8)])
def test_the_kernel_of_few_elements_advances_the_state_itself(elements: int, cluster: int) -> None:
    """When all blocks have said that they have read it; an older GPU has no clusters."""
    problem = parse(f"dropout_fwd:f32:m{elements}")
    (candidate,) = registry.candidates(problem.op, kind="cuda")
    assert isinstance(candidate, LaunchedCandidate)
    (alone,) = candidate.launches(problem, candidate.configs(problem, H200)[0], H200)
    assert alone.grid == (cluster, 1, 1) and alone.cluster == cluster
    text = ptx_text(alone.source, "sm_90a")
    read, said, waited = (text.index(each) for each in ("ld.global", "barrier.cluster.arrive", "barrier.cluster.wait"))
    assert read < said < waited < text.rindex("st.global")
    assert len(candidate.launches(problem, candidate.configs(problem, H200)[0], replace(H200, capability=(8, 0)))) == 2


@pytest.mark.usefixtures("numba_cuda")
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
def test_what_is_dropped_is_on_its_way_while_the_generator_draws(dtype: str) -> None:
    """Two quads are two loads of float32, and one of 16-bit data. The compiler had put them behind the rounds."""
    problem = parse(f"dropout_fwd:{dtype}:m33554432")
    (candidate,) = registry.candidates(problem.op, kind="cuda")
    assert isinstance(candidate, LaunchedCandidate)
    main, _ = candidate.launches(problem, candidate.configs(problem, H200)[0], H200)
    text = ptx_text(main.source, "sm_90a")
    before, _, _ = text.partition(f"{_MULTIPLIER};")
    assert before != text and before.count("ld.global.v4.b32") == (2 if dtype == "f32" else 1)


def test_more_elements_than_an_int32_counts_are_refused() -> None:
    (candidate,) = registry.candidates("dropout_fwd", kind="cuda")
    support = candidate.supports(parse(f"dropout_fwd:f32:m{2**31}"), H200)
    assert not support.ok and str(2**31) in support.reason
