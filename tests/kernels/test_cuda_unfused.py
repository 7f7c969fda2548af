"""The epilogue behind a convolution that cannot fuse it: its kernel lane by lane, and what the convolution is given."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from emulated import memory, operand_memory, run
from emulated_ptx import install
from gpus import H200
from guarded import NUMPY_DTYPE, values

from nbdnn import reference_conv, tolerance
from nbdnn.candidate import YES, Candidate, NoConfig, Support
from nbdnn.device import Gpu
from nbdnn.kernels.cuda.compile import compile_kernel
from nbdnn.kernels.cuda.unfused import Unfused, finish_launch
from nbdnn.problem import parse
from nbdnn.problem_conv import ConvProblem

_SHAPES = (
    ("n2c4h4w6:k12r1s1:p0x0:u1x1:d1x1:g1:cross:nchw", True, "four pixels of a channel"),
    ("n2c4h3w5:k12r1s1:p0x0:u1x1:d1x1:g1:cross:nhwc", True, "four channels of a pixel"),
    ("n3c4h5w5:k7r1s1:p0x0:u1x1:d1x1:g1:cross:nchw", False, "planes of 25"),
    ("n3c4h5w4:k7r1s1:p0x0:u1x1:d1x1:g1:cross:nhwc", False, "seven channels"),
    ("n2c4h4w6:k12r1s1:p0x0:u1x1:d1x1:g1:cross:nchw:a4", False, "pointers of four bytes"),
    ("n20c4h8w8:k8r1s1:p0x0:u1x1:d1x1:g1:cross:nhwc:ynchw", True, "several blocks, the last with a remainder"),
)
_ENDS = ("e:bias", "e:res", "e:relu", "e:bias+relu+res+beta")


class Plain(Candidate[NoConfig, Gpu]):
    """A convolution that takes alpha and beta only."""

    op, provider, algorithm, algo, by_name_only = "conv_fwd", "test", "plain", "none", True

    def supports(self, problem: ConvProblem, device: Gpu) -> Support:
        return YES if problem.epilogue in ((), ("beta",)) else Support(False, "an epilogue")

    def workspace_bytes(self, problem: ConvProblem, config: NoConfig, device: Gpu) -> int:
        assert self.supports(problem, device).ok
        return 64

    def estimate(self, problem: ConvProblem, config: NoConfig, device: Gpu) -> float:
        assert self.supports(problem, device).ok
        return 10.0

    def prepare(self, problem, config, device):
        raise AssertionError("nothing runs here")


@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32"])
@pytest.mark.parametrize(("shape", "quads"), [(shape, quads) for shape, quads, _ in _SHAPES])
def test_the_output_is_finished_in_place(dtype: str, shape: str, quads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small integers, whose sums are exact in 16 bits too; every element once."""
    for end in _ENDS:
        problem = parse(f"conv_fwd:{dtype}:{shape}:{end}")
        given, before = values(problem, "integers"), np.random.default_rng(0).integers(-9, 9, problem.y_shape)
        operands = [operand_memory(o, {**given, "y": before}[o.name], problem.align) for o in problem.operands]
        launch = finish_launch(problem)
        if "bias" in end:
            assert launch.source.specialised_on.quads == quads
        run(install(monkeypatch), launch, operands, memory("f32", np.zeros(0)))
        added = before + (given["bias"].astype("f8").reshape(-1, 1, 1) if "bias" in end else 0)
        added = added + (given["residual"].astype("f8") if "res" in end else 0)
        expected = operand_memory(problem.operands[2], reference_conv.activate(problem.activation, added), 4)
        assert np.array_equal(operands[2].values(), expected.values()), problem
        assert sorted(operands[2].written) == list(range(operands[2].count))


def test_the_base_computes_what_it_can() -> None:
    candidate, layer = Unfused(Plain()), "conv_fwd:f16:n2c16h8w8:k16r3s3:p1x1:u1x1:d1x1:g1:cross:nhwc"
    plain, beta = parse(layer), parse(f"{layer}:e:beta")
    assert candidate.posed(plain, H200) == plain and candidate.posed(beta, H200) == beta
    assert candidate.posed(parse(f"{layer}:e:bias+tanh+res"), H200) == plain
    full = parse(f"{layer}:e:bias+relu+res+beta")
    assert candidate.posed(full, H200) == beta
    assert candidate.supports(full, H200).ok and candidate.workspace_bytes(full, NoConfig(), H200) == 64
    assert candidate.estimate(plain, NoConfig(), H200) == 10.0 < candidate.estimate(full, NoConfig(), H200)
    assert [candidate.roundings(problem, H200) for problem in (plain, beta, full)] == [1, 1, 2]


def test_it_is_the_base_by_name_and_nature() -> None:
    base = Plain()
    candidate = Unfused(base)
    assert (candidate.id, candidate.algo, candidate.by_name_only) == ("conv_fwd/test/plain", "none", True)
    assert base.version in candidate.version and candidate.version != base.version
    assert candidate.configs(parse("conv_fwd:f32:n1c1h1w1:k1r1s1:p0x0:u1x1:d1x1:g1:cross:nchw"), H200) == (NoConfig(),)


def test_what_is_rounded_twice_may_be_off_by_more() -> None:
    """Also where a residual cancels what beta brought: that sum was rounded."""
    problem = parse("conv_fwd:bf16:n1c8h4w4:k8r1s1:p0x0:u1x1:d1x1:g1:cross:nhwc:e:res+beta")
    given = values(problem, "normal")
    given["residual"] = -given["y"]
    sample = reference_conv.whole(problem, given, (1.0, 1.0))
    conv = reference_conv.compute(problem, given, (1.0, 0.0)) - given["residual"].astype("f8")
    between = (conv + given["y"].astype("f8")).astype(NUMPY_DTYPE["bf16"])
    twice = (between.astype("f8") + given["residual"].astype("f8")).astype(NUMPY_DTYPE["bf16"])
    assert tolerance.fault(problem, Plain(), twice, sample)
    assert not tolerance.fault(problem, Plain(), twice, sample, roundings=2)


@pytest.mark.usefixtures("numba_cuda")
@pytest.mark.parametrize("arch", ["sm_90a", "sm_120"])
def test_the_kernel_needs_few_registers(arch: str) -> None:
    ends = ("e:bias+tanh+res", "e:swish")
    for dtype, layout, end in product(("bf16", "f32", "f64"), ("nchw", "nhwc"), ends):
        launch = finish_launch(parse(f"conv_fwd:{dtype}:n2c8h8w8:k8r3s3:p1x1:u1x1:d1x1:g1:cross:{layout}:{end}"))
        kernel = compile_kernel(launch.source, arch)
        assert (kernel.spill_bytes, kernel.stack_bytes) == (0, 0)
        assert kernel.registers <= 64
