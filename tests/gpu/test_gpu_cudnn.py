"""What the matrix does not see of cuDNN on a GPU: handles, streams, capture, ranking, stored plans."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from gpus import DEVICE
from guarded import GpuBuffer, Operands, values

import nbdnn
from nbdnn import driver
from nbdnn.candidate import Candidate, NoConfig, Runner
from nbdnn.cudnn import conv_graph, conv_legacy, plan_file
from nbdnn.cudnn.handle import handle, properties
from nbdnn.problem import parse
from nbdnn.problem_conv import CONV_OPS, ConvProblem

pytestmark = pytest.mark.gpu

LAYER = "n2c16h9w11:k24r3s3:p1x1:u1x1:d1x1:g1:cross:nchw"
DEPTHWISE = parse("conv_fwd:f32:n4c32h28w28:k32r3s3:p1x1:u1x1:d1x1:g32:cross:nhwc")
EITHER = [conv_graph.FWD[0], conv_legacy.FWD[0]]


class Ready:
    """A runner with operands of random numbers and its workspace."""

    def __init__(self, candidate: Candidate, problem: ConvProblem, config: object = None) -> None:
        config = candidate.configs(problem, DEVICE)[0] if config is None else config
        self.operands = Operands(problem, values(problem, "normal"), "cuda")
        self.workspace = GpuBuffer(candidate.workspace_bytes(problem, config, DEVICE), 256)
        self.runner: Runner = candidate.prepare(problem, config, DEVICE)

    def run(self, stream: int = 0, scalars: tuple[float, float] = (1.0, 0.0)) -> np.ndarray:
        self.operands.reset()
        self.call(stream, scalars)
        return self.out()

    def call(self, stream: int = 0, scalars: tuple[float, float] = (1.0, 0.0)) -> None:
        self.runner(self.operands.pointers, scalars, self.workspace.address, stream)

    def out(self) -> np.ndarray:
        driver.call("cuCtxSynchronize")
        self.operands.fetch()
        (out,) = self.operands.outs.values()
        return out.copy()


def test_cudnn_is_available() -> None:
    assert nbdnn.dnn_available() and nbdnn.dnn_available.msg == "" and nbdnn.version() >= 91600
    assert b'"deviceVer"' in properties(DEVICE)


@pytest.mark.parametrize("op", CONV_OPS)
def test_what_cudnn_ranks_first_is_supported(op: str) -> None:
    problem = parse(f"{op}:f32:{LAYER}")
    ranking = conv_legacy._ranking(problem, DEVICE)
    passes = (conv_legacy.FWD, conv_legacy.BWD_DATA, conv_legacy.BWD_FILTER)
    legacy = dict(zip(CONV_OPS, passes, strict=True))[op]
    supported = {c._value for c in legacy if c.supports(problem, DEVICE).ok}
    assert ranking and ranking[0] in supported


@pytest.mark.parametrize("candidate", EITHER, ids=lambda candidate: candidate.id)
def test_a_captured_call_computes_when_it_is_replayed(candidate: Candidate) -> None:
    ready = Ready(candidate, parse(f"conv_fwd:f32:{LAYER}"))
    expected = ready.run()
    ready.operands.reset()
    stream = driver.call("cuStreamCreate", 1)
    graph = driver.Graph(stream, ready.call)
    assert np.isnan(ready.out().astype("f8")).all(), "captured work ran at once"
    graph.replay()
    assert np.array_equal(ready.out(), expected)


@pytest.mark.parametrize("candidate", EITHER, ids=lambda candidate: candidate.id)
def test_streams_may_change_from_call_to_call(candidate: Candidate) -> None:
    ready = Ready(candidate, parse(f"conv_fwd:f32:{LAYER}"))
    expected = ready.run()
    for stream in (*(int(driver.call("cuStreamCreate", 1)) for _ in range(2)), 0):
        assert np.array_equal(ready.run(stream), expected)


@pytest.mark.parametrize("candidate", EITHER, ids=lambda candidate: candidate.id)
def test_factors_may_change_from_call_to_call(candidate: Candidate) -> None:
    ready = Ready(candidate, parse(f"conv_fwd:f32:{LAYER}"))
    expected = ready.run()
    assert np.allclose(ready.run(scalars=(0.5, 0.0)), 0.5 * expected, rtol=1e-5, atol=1e-5)
    assert np.allclose(ready.run(scalars=(-2.0, 7.0)), -2 * expected, rtol=1e-5, atol=1e-5)  # beta: not read
    assert np.array_equal(ready.run(), expected)


def test_a_factor_with_a_bias_does_not_read_the_output() -> None:
    """y, with the factor 0, stands for the tensor that the pattern adds; here it holds NaN."""
    for epilogue in ("bias+relu", "relu"):
        ready = Ready(conv_graph.FWD[0], parse(f"conv_fwd:f32:{LAYER}:e:{epilogue}"))
        for alpha in (1.0, 0.5):
            assert np.isfinite(ready.run(scalars=(alpha, 0.0))).all()


def test_a_compiled_plan_is_kept_and_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    candidate = conv_graph.FWD[0]
    monkeypatch.setattr(plan_file, "folder", lambda: tmp_path)
    compiled = [
        config
        for config, (usual, _) in conv_graph._chosen(candidate, DEPTHWISE, DEVICE).items()
        if usual.compiled_at_run_time
    ]
    assert compiled, "depthwise layers have an engine that is compiled at run time"
    expected = Ready(candidate, DEPTHWISE, compiled[0]).run()
    assert len(list(tmp_path.iterdir())) == 1
    monkeypatch.setattr(conv_graph, "plan", lambda *_: pytest.fail("compiled again"))
    assert np.array_equal(Ready(candidate, DEPTHWISE, compiled[0]).run(), expected)


def test_every_thread_has_its_handle() -> None:
    results: dict[str, tuple[int, np.ndarray]] = {}

    def work(name: str) -> None:
        driver.use(DEVICE.index)
        ready = Ready(conv_graph.FWD[0], parse(f"conv_fwd:f32:{LAYER}"))
        results[name] = handle(DEVICE).address, ready.run()

    threads = [threading.Thread(target=work, args=(name,)) for name in ("first", "second")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results["first"][0] != results["second"][0]
    assert np.array_equal(results["first"][1], results["second"][1])


def test_float32_is_not_rounded_to_tf32_unless_it_is_allowed() -> None:
    """1 + 2^-12 has no TF32 neighbour but 1."""
    problem = parse("conv_fwd:f32:n8c64h8w8:k64r1s1:p0x0:u1x1:d1x1:g1:cross:nhwc")
    ones = {"x": np.full(problem.x_shape, 1 + 2.0**-12, "f"), "w": np.ones(problem.w_shape, "f")}
    for candidate in (*conv_graph.FWD, *conv_legacy.FWD):
        if candidate.supports(problem, DEVICE).ok:
            for config in candidate.configs(problem, DEVICE):
                ready = Ready(candidate, problem, NoConfig() if isinstance(config, NoConfig) else config)
                ready.operands = Operands(problem, ones, "cuda")
                exact = bool(np.allclose(ready.run(), 64 * (1 + 2.0**-12), rtol=2.0**-16))
                assert exact or candidate.math == "tf32", f"{candidate.id} {config}"
