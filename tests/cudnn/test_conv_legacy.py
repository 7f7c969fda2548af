"""Theano's algorithms: which there are, and what is refused before and by cuDNN. On a GPU the matrix runs them."""

from __future__ import annotations

import re
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from gpus import H200

from nbdnn import config
from nbdnn.candidate import NoConfig
from nbdnn.cudnn import conv_legacy
from nbdnn.cudnn.api import StatusError
from nbdnn.cudnn.conv_legacy import BWD_DATA, BWD_FILTER, FWD, Legacy
from nbdnn.cudnn.library import library
from nbdnn.problem import parse

SHAPE = "n2c16h9w11:k24r3s3:p1x1:u1x1:d1x1:g1:cross:nchw"
ALL = (*FWD, *BWD_DATA, *BWD_FILTER)


def test_every_method_that_theano_named_is_there() -> None:
    methods = {(c.op, c.algo): c.algorithm for c in ALL}
    assert methods == {
        ("conv_fwd", "none"): "implicit_gemm",
        ("conv_fwd", "small"): "implicit_precomp_gemm",
        ("conv_fwd", "large"): "gemm",
        ("conv_fwd", "fft"): "fft",
        ("conv_fwd", "fft_tiling"): "fft_tiling",
        ("conv_fwd", "winograd"): "winograd",
        ("conv_fwd", "winograd_non_fused"): "winograd_nonfused",
        ("conv_bwd_data", "none"): "algo_0",
        ("conv_bwd_data", "deterministic"): "algo_1",
        ("conv_bwd_data", "fft"): "fft",
        ("conv_bwd_data", "fft_tiling"): "fft_tiling",
        ("conv_bwd_data", "winograd"): "winograd",
        ("conv_bwd_data", "winograd_non_fused"): "winograd_nonfused",
        ("conv_bwd_filter", "none"): "algo_0",
        ("conv_bwd_filter", "deterministic"): "algo_1",
        ("conv_bwd_filter", "small"): "algo_3",
        ("conv_bwd_filter", "fft"): "fft",
        ("conv_bwd_filter", "fft_tiling"): "fft_tiling",
        ("conv_bwd_filter", "winograd_non_fused"): "winograd_nonfused",
    }
    for (op, ndim), names in config.METHODS.items():
        named = {algo for each, algo in methods if each == op}
        assert ndim == 3 or set(names) - named <= {"small"}  # bwd_data: any with a small workspace


def test_those_that_add_in_any_order() -> None:
    nondeterministic = {c.id for c in ALL if not c.deterministic}
    assert nondeterministic == {
        "conv_bwd_data/cudnn/algo_0",
        "conv_bwd_filter/cudnn/algo_0",
        "conv_bwd_filter/cudnn/algo_3",
    }


@pytest.mark.parametrize("candidate", ALL, ids=lambda candidate: candidate.id)
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (("p1x1", "ba1.2x0.3"), r"pads of 1 before and 2 after"),
        (("nchw", "nchw:a4"), r"multiples of 4 bytes only, not of 16"),
        (("n2c16h9w11", "n0c16h9w11"), r"has 0 elements"),
        (("n2c16h9w11", "n3000c16h300w301"), r"has \d{10} elements, the legacy API takes 1 to 2147483647"),
    ],
    ids=lambda value: value[1] if isinstance(value, tuple) else "",
)
def test_what_the_api_cannot_express(candidate: Legacy, change: tuple[str, str], reason: str) -> None:
    support = candidate.supports(parse(f"{candidate.op}:f32:{SHAPE.replace(*change)}"), H200)
    assert not support.ok and re.search(reason, support.reason)


@pytest.mark.parametrize("epilogue", ["bias", "relu", "bias+relu+res+beta"])
def test_epilogues_are_not_fused(epilogue: str) -> None:
    fused = epilogue.removesuffix("+beta")
    support = FWD[0].supports(parse(f"conv_fwd:f32:{SHAPE}:e:{epilogue}"), H200)
    assert support == (False, f"the epilogue e:{fused} is not fused here")


@pytest.fixture
def no_handle(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN is called with no handle: it refuses every call of the three directions, in words."""
    nobody = SimpleNamespace(address=0, use=lambda stream: None)
    monkeypatch.setattr(conv_legacy, "handle", lambda device: nobody)
    monkeypatch.setattr(conv_legacy.driver, "Current", lambda index: nullcontext())
    conv_legacy._workspace.cache_clear()


@pytest.mark.parametrize("candidate", ALL, ids=lambda candidate: candidate.id)
@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32", "f64"])
def test_cudnns_refusal_is_the_reason(candidate: Legacy, dtype: str, no_handle: None) -> None:
    support = candidate.supports(parse(f"{candidate.op}:{dtype}:{SHAPE}"), H200)
    assert not support.ok
    if candidate.algorithm == "algo_0" and dtype in ("f16", "bf16"):
        assert support.reason == f"it adds the parts of a sum in {dtype}"
    else:
        assert re.match(r"cudnnGetConvolution\w+WorkspaceSize -> CUDNN_STATUS_BAD_PARAM\w* \(2\d+\)", support.reason)


@pytest.mark.parametrize("candidate", [FWD[0], BWD_DATA[0], BWD_FILTER[0]], ids=lambda candidate: candidate.id)
def test_a_failed_call_names_function_and_problem(
    candidate: Legacy, no_handle: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = parse(f"{candidate.op}:f32:{SHAPE}")
    monkeypatch.setattr(conv_legacy, "_workspace", lambda *_: 0)
    run = candidate.prepare(problem, NoConfig(), H200)
    with pytest.raises(StatusError, match=rf"^cudnnConvolution\w+ -> CUDNN_STATUS_BAD_PARAM.*; {problem}$"):
        run((256, 512, 768), (1.0, 0.0), 0, 0)


def test_guesses_follow_cudnns_ranking(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = parse(f"conv_fwd:f32:{SHAPE}")
    monkeypatch.setattr(conv_legacy, "_ranking", lambda *_: (4, 0, 1))  # FFT, IMPLICIT_GEMM, IMPLICIT_PRECOMP_GEMM
    order = sorted(FWD, key=lambda candidate: candidate.estimate(problem, NoConfig(), H200))
    assert [candidate.algorithm for candidate in order[:3]] == ["fft", "implicit_gemm", "implicit_precomp_gemm"]


@pytest.mark.parametrize("candidate", [BWD_DATA[0], BWD_FILTER[0]], ids=lambda candidate: candidate.id)
def test_backward_of_16_bits_in_nhwc_is_no_good_guess(candidate: Legacy, monkeypatch: pytest.MonkeyPatch) -> None:
    """It took up to 100 times as long as an engine of the graph API."""
    monkeypatch.setattr(conv_legacy, "_ranking", lambda *_: (1,))
    shape = "n32c64h56w56:k64r3s3:p1x1:u1x1:d1x1:g1:cross"
    slow, fast = (parse(f"{candidate.op}:bf16:{shape}:{layout}") for layout in ("nhwc", "nchw"))
    assert candidate.estimate(slow, NoConfig(), H200) > 5 * candidate.estimate(fast, NoConfig(), H200)


def test_the_ranks_fields_are_the_headers() -> None:
    (header,) = library().path.parent.parent.glob("include/cudnn_cnn.h")
    for direction in ("Fwd", "BwdData", "BwdFilter"):
        start = f"struct cudnnConvolution{direction}AlgoPerfStruct {{"
        body = header.read_text().partition(start)[2].partition("}")[0]
        assert re.findall(r"(\w+)\s+\w+(?:\[3\])?;", body) == [
            f"cudnnConvolution{direction}Algo_t",
            "cudnnStatus_t",
            "float",
            "size_t",
            "cudnnDeterminism_t",
            "cudnnMathType_t",
            "int",
        ]
