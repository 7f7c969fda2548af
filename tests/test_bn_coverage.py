"""What each candidate of batch normalisation must support, written out; the matrix is made of what they say."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from cells import check
from edge_cases import edges
from gpus import DEVICE

from nbdnn.candidate import NoConfig
from nbdnn.device import Cpu
from nbdnn.dispatch import registry
from nbdnn.problem import DEFAULT_ALIGN, parse
from nbdnn.problem_bn import BN_OPS

_DTYPES = ("f32", "f64", "f16", "bf16", "f16 pf32", "bf16 pf32")
_CUDNN_DTYPES = ("f32", "f64", "f16 pf32", "bf16 pf32")
_SPATIAL = ("n2c16h9w11:spatial:nchw", "n2c16h9w11:spatial:nhwc", "n2c16d5h6w7:spatial:ncdhw", "n2c5h1w1:spatial:nchw")
_ACTIVATION = (
    "n8c16h3w5:per-activation:nchw",
    "n8c16h3w5:per-activation:nhwc",
    "n8c5d2h3w5:per-activation:ndhwc",
    "n64c10h1w1:per-activation:nchw",
)
_NEIGHBOURS_DIFFER = (_SPATIAL[1], _SPATIAL[3], *_ACTIVATION)

# (dtypes, with that of parameters; shapes, modes and layouts) by algorithm, for the ops that it has.
COVERAGE = {
    "cpu/rows": (BN_OPS, _DTYPES, _NEIGHBOURS_DIFFER),
    "cpu/planes": (BN_OPS, _DTYPES, (*_SPATIAL, *_ACTIVATION)),
    "numba/held": (("bn_train", "bn_bwd"), _DTYPES, (*_SPATIAL, *_ACTIVATION, "n32c256h56w56:spatial:nchw")),
    "numba/teams": (
        ("bn_train", "bn_bwd"),
        _DTYPES,
        (*_SPATIAL, *_ACTIVATION, *(f"n32c256h56w56:spatial:{layout}" for layout in ("nchw", "nhwc"))),
    ),
    "numba/resident": (
        ("bn_train", "bn_bwd"),
        _DTYPES,
        (*_NEIGHBOURS_DIFFER, "n32c256h56w56:spatial:nhwc"),
    ),
    "numba/few_rows": (("bn_train", "bn_bwd", "bn_infer_bwd"), _DTYPES, (_SPATIAL[3], *_ACTIVATION)),
    "numba/flat": (("bn_infer",), _DTYPES, (*_SPATIAL, *_ACTIVATION)),
    "numba/streamed": (BN_OPS, _DTYPES, (*_SPATIAL, *_ACTIVATION)),
    "cudnn/spatial": (BN_OPS[:3], _CUDNN_DTYPES, _SPATIAL),
    "cudnn/spatial_persistent": (("bn_train", "bn_bwd"), _CUDNN_DTYPES, _SPATIAL),
    "cudnn/per_activation": (BN_OPS[:3], _CUDNN_DTYPES, _ACTIVATION),
}


@pytest.mark.parametrize("name", [name for name in COVERAGE if not name.startswith("cudnn")])
def test_supports_what_it_must(name: str, device: Cpu) -> None:
    assert_supports(name, device)


@pytest.mark.usefixtures("cudnn")
@pytest.mark.parametrize("name", [name for name in COVERAGE if name.startswith("cudnn")])
def test_cudnn_supports_what_it_must(name: str, device: Cpu) -> None:
    assert_supports(name, device)


def assert_supports(name: str, device: Cpu) -> None:
    ops, dtypes, shapes = COVERAGE[name]
    for op, dtype, shape in product(ops, dtypes, shapes):
        candidate = registry.candidate(f"{op}/{name}")
        of_data, _, of_params = dtype.partition(" ")
        on = device if registry.kind_of(candidate) == "cpu" else DEVICE
        for end in ("", "run") if op == "bn_train" else ("",):
            problem = parse(":".join(filter(None, (op, of_data, shape, of_params, end))))
            support = candidate.supports(problem, on)
            assert support.ok, f"{candidate.id}, {problem}: {support.reason}"


@pytest.mark.parametrize("op", BN_OPS)
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_results_past_the_caches(op: str, dtype: str, device: Cpu) -> None:
    """As of operands that are larger than the last-level cache: of lines that are aligned, as operands are to 16 bytes,
    and of lines that are not."""
    shapes = (4, 16), (3, 5), (300, 8), (3, 40)
    some = [problem for problem in edges(op, "cpu") if (problem.n, problem.c) in shapes]
    posed = [
        problem
        for problem in some
        if (problem.dtype, problem.param_dtype, problem.align) == (dtype, dtype, DEFAULT_ALIGN) and not problem.running
    ]
    assert len(posed) >= 4
    for problem in posed:
        for candidate in registry.candidates(op):
            if candidate.supports(problem, device).ok:
                check(candidate, problem, NoConfig(), replace(device, llc_bytes=0, vector_bytes=16))
