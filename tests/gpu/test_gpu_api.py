"""The public functions on GPU arrays of each library: results, layouts, streams, graphs, threads, memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from conv_example import PROBLEM, W, X, Y
from gpu_example import DW, DX, DY, assert_all_right, assert_close, in_threads
from libraries import library

import nbdnn
from nbdnn import (
    InvalidProblem,
    config,
    dnn_conv,
    dnn_conv3d,
    dnn_dropout,
    dnn_gradinput,
    dnn_gradweight,
    driver,
    events,
)
from nbdnn.candidate import NoConfig
from nbdnn.device import Gpu, gpu
from nbdnn.dispatch import registry
from nbdnn.dispatch.check import Check
from nbdnn.errors import CudaError
from nbdnn.kernels.cuda import conv_direct
from nbdnn.kernels.cuda.conv_direct import Direct
from nbdnn.problem_conv import ConvProblem

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("no_plans")]

RNG = np.random.default_rng(0)


class Library(NamedTuple):
    """How arrays of one library come to the GPU and back, and what their type is."""

    put: Callable[[np.ndarray], Any]
    get: Callable[[Any], np.ndarray]
    type: type


def _torch() -> Library:
    torch = library("torch")
    return Library(lambda a: torch.from_numpy(a).cuda(), lambda a: a.cpu().numpy(), torch.Tensor)


def _cupy() -> Library:
    cupy = library("cupy")
    return Library(cupy.asarray, cupy.asnumpy, cupy.ndarray)


def _numba() -> Library:
    library("numba.cuda")
    from numba import cuda
    from numba.cuda.cudadrv.devicearray import DeviceNDArray

    return Library(cuda.to_device, lambda a: a.copy_to_host(), DeviceNDArray)


def _jax() -> Library:
    jax = library("jax")
    return Library(jax.numpy.asarray, np.asarray, jax.Array)


LIBRARIES = {"torch": _torch, "cupy": _cupy, "numba": _numba, "jax": _jax}


@pytest.fixture(params=LIBRARIES)
def lib(request: pytest.FixtureRequest) -> Library:
    return LIBRARIES[request.param]()


def test_results_are_of_the_library_on_the_gpu(lib: Library) -> None:
    x, w, dy = map(lib.put, (X, W, DY))
    with events() as log:
        results = dnn_conv(x, w, 1), dnn_gradinput(w, dy, X.shape, 1), dnn_gradweight(x, dy, W.shape, 1)
    assert {event.candidate.split("/")[1] for event in log if event.kind == "selected"} <= {"numba", "cudnn"}
    for result, expected in zip(results, (Y, DX, DW), strict=True):
        assert isinstance(result, lib.type)
        assert_close(lib.get(result), expected)


def test_libraries_in_turn_get_arrays_of_their_own() -> None:
    """A call is planned once for equal arrays, and those of two libraries are not."""
    libraries = [make() for make in LIBRARIES.values()]
    for lib in libraries * 2:
        result = dnn_conv(lib.put(X), lib.put(W), 1)
        assert isinstance(result, lib.type)
        assert_close(lib.get(result), Y)


def test_strided_operands_are_made_dense(lib: Library) -> None:
    if lib.type.__module__.startswith("jax"):
        wide = np.repeat(X, 2, axis=3)
        x = lib.put(wide)[:, :, :, ::2]  # JAX makes it dense itself
        assert_close(lib.get(dnn_conv(x, lib.put(W), 1)), Y)
        return
    x = lib.put(np.repeat(X, 2, axis=3))[:, :, :, ::2]
    with events() as log:
        result = dnn_conv(x, lib.put(W), 1)
    assert "copied" in [event.kind for event in log]
    assert_close(lib.get(result), Y)


def test_operands_of_two_dtypes_become_one(lib: Library) -> None:
    result = lib.get(dnn_conv(lib.put(X.astype(np.float16)), lib.put(W), 1))
    assert result.dtype == np.float32
    np.testing.assert_allclose(result, Y, rtol=1e-2, atol=2e-2)


@pytest.mark.parametrize("name", ["torch", "cupy", "numba"])
def test_out_alpha_and_beta(name: str) -> None:
    lib = LIBRARIES[name]()
    before = RNG.standard_normal(Y.shape).astype("f")
    out = lib.put(before)
    assert dnn_conv(lib.put(X), lib.put(W), 1, alpha=2, beta=0.5, out=out) is out
    assert_close(lib.get(out), 2 * Y + 0.5 * before)
    with pytest.raises(InvalidProblem, match="out has shape"):
        dnn_conv(lib.put(X), lib.put(W), 0, out=out)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_dtypes_and_channels_last_of_torch(dtype: str) -> None:
    torch = library("torch")
    x, w = (torch.from_numpy(a).cuda().to(getattr(torch, dtype)) for a in (X, W))
    for form in (torch.contiguous_format, torch.channels_last):
        result = dnn_conv(x.contiguous(memory_format=form), w.contiguous(memory_format=form), 1)
        assert result.dtype == x.dtype
        assert result.is_contiguous(memory_format=form)
        np.testing.assert_allclose(result.double().cpu(), Y, rtol=2e-2, atol=1e-1 if dtype == "bfloat16" else 2e-2)


def test_bfloat16_of_jax() -> None:
    lib = _jax()
    x, w = (lib.put(a.astype(ml_dtypes.bfloat16)) for a in (X, W))
    result = dnn_conv(x, w, 1)
    assert result.dtype.name == "bfloat16"
    np.testing.assert_allclose(lib.get(result).astype("f"), Y, rtol=2e-2, atol=1e-1)


def test_dropout_of_jax_without_64_bit_integers() -> None:
    lib = _jax()
    y, _, state = dnn_dropout(lib.put(X), 0.5)
    later = dnn_dropout(lib.put(X), 0.5, state=state)[2]
    assert np.array_equal(lib.get(y), dnn_dropout(X, 0.5)[0])
    assert (state.tolist(), later.tolist()) == ([4242, X.size // 4], [4242, 2 * (X.size // 4)])


def test_three_dimensions_epilogue_and_nothing_to_sum() -> None:
    torch = library("torch")
    x, w = torch.randn(2, 3, 4, 5, 6), torch.randn(4, 3, 2, 2, 2)
    bias = torch.randn(4)
    expected = torch.relu(torch.nn.functional.conv3d(x.double(), w.double(), bias.double(), padding=1))
    got = dnn_conv3d(x.cuda(), w.cuda(), 1, conv_mode="cross", bias=bias.cuda(), activation="relu")
    assert_close(got.cpu().numpy(), expected.numpy())
    none = torch.empty(2, 0, 5, 5).cuda()
    filled = dnn_conv(none, torch.empty(4, 0, 3, 3).cuda(), 1, bias=bias.cuda())
    assert_close(filled.cpu().numpy(), np.broadcast_to(bias.numpy()[:, None, None], (2, 4, 5, 5)))


def test_arrays_on_two_devices_are_refused() -> None:
    torch = library("torch")
    with pytest.raises(InvalidProblem, match="kerns is on the CPU, img on GPU 0"):
        dnn_conv(torch.from_numpy(X).cuda(), torch.from_numpy(W))
    with pytest.raises(InvalidProblem, match="kerns is on GPU 0, img on the CPU"):
        dnn_conv(X, torch.from_numpy(W).cuda())


@pytest.mark.parametrize("by", ["current", "argument"])
def test_work_goes_to_the_stream(by: str) -> None:
    """Inputs that are still being written on a busy stream: a call on another stream would read them too early."""
    torch = library("torch")
    x, w = (torch.from_numpy(a).cuda() for a in (X, W))
    dnn_conv(x, w, 1)
    big = torch.randn(8192, 8192, device="cuda")
    late = torch.zeros_like(x)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(20):
            big = big @ big
            big /= big.norm()
        late.copy_(x)
        if by == "current":
            result = dnn_conv(late, w, 1)
    if by == "argument":
        result = dnn_conv(late, w, 1, stream=stream)
    done = torch.cuda.Event()
    done.record(stream)
    assert not done.query(), "the stream was not busy: nothing is shown"
    done.synchronize()
    assert_close(result.cpu().numpy(), Y)


def test_a_planned_call_can_be_captured_and_another_cannot() -> None:
    torch = library("torch")
    x, w = (torch.from_numpy(a).cuda() for a in (X, W))
    out = torch.empty(Y.shape, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(CudaError, match="run it once before the capture"), torch.cuda.graph(graph):
        dnn_conv(x, w, 1, out=out)
    torch.cuda.synchronize()
    for candidate in [row.candidate for row in nbdnn.explain(PROBLEM, device=gpu(0)).rows if row.supported]:
        dnn_conv(x, w, 1, out=out, algo=candidate)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            dnn_conv(x, w, 1, out=out, algo=candidate)
        for factor in (1.0, 2.0):
            x.copy_(torch.from_numpy(X) * factor)
            out.fill_(float("nan"))
            graph.replay()
            assert_close(out.cpu().numpy(), factor * Y)
        x.copy_(torch.from_numpy(X))


@pytest.mark.parametrize("layout", ["contiguous_format", "channels_last"])
def test_launches_that_overlap_read_what_was_written_before(layout: str) -> None:
    """Two buffers in turns, each read while the one before may still be at its end: as with a wait after every call,
    eagerly and in a graph, with PyTorch's kernels among them. One kernel fills the GPU, another has blocks for a few
    multiprocessors, a third is of clusters or, channels-last, has all of its blocks wait for each other."""
    torch = library("torch")
    form = getattr(torch, layout)
    trained = "bn_train/numba/resident" if layout == "channels_last" else "bn_train/numba/held"
    first = torch.randn((16, 128, 28, 28), device="cuda").contiguous(memory_format=form)
    few = torch.randn((1, 128, 1, 1), device="cuda")
    one, gain = torch.ones_like(few), torch.rand_like(few) + 0.5
    narrow = torch.empty_like(few)

    def run(wait: Callable[[], None]) -> list[Any]:
        a, b, small = first.clone(), torch.empty_like(first), few.clone()
        mean, spread = torch.empty_like(few), torch.empty_like(few)
        steps = (
            lambda: nbdnn.dnn_batch_normalization_test(a, gain, small, few, one, "spatial", out=b),
            lambda: nbdnn.dnn_batch_normalization_test(small, gain, few, few, one, "spatial", out=narrow),
            lambda: nbdnn.dnn_pool(b, (3, 3), mode="average_inc_pad", pad=(1, 1), out=a),
            lambda: small.copy_(narrow),
            lambda: nbdnn.dnn_batch_normalization_train(
                a, gain, small, "spatial", policy=trained, out=(b, mean, spread)
            ),
            lambda: nbdnn.dnn_softmax(b, out=a),
            lambda: a.mul_(30.0),
        )
        for step in 4 * steps:
            step()
            wait()
        return [each.clone() for each in (a, b, small, mean, spread)]

    expected = run(torch.cuda.synchronize)
    for _ in range(20):
        assert all(map(torch.equal, run(lambda: None), expected))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(lambda: None)
    for _ in range(20):
        graph.replay()
        assert all(map(torch.equal, captured, expected))


def test_two_threads_call_at_once() -> None:
    torch = library("torch")
    tensors = [torch.from_numpy(a).cuda() for a in (X, W, DY)]

    def work() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            assert_all_right(*tensors, 50)

    in_threads(work, work)


def test_timing_measures_every_candidate_and_remembers() -> None:
    torch = library("torch")
    x, w = (torch.from_numpy(a).cuda() for a in (X, W))
    before = x.clone()
    with config.change(tune__budget_s=300), events() as log:  # kernels are compiled in it
        result = dnn_conv(x, w, 1, algo="time_on_shape_change")
    assert_close(result.cpu().numpy(), Y)
    assert torch.equal(x, before)
    supported = {row.candidate for row in nbdnn.explain(PROBLEM, device=gpu(0)).rows if row.supported}
    assert {event.candidate for event in log if event.kind == "measured"} == supported
    assert not [event for event in log if event.kind == "failed"]
    nbdnn.empty_cache()
    with events() as log:
        dnn_conv(x, w, 1, algo="time_on_shape_change")
    assert [event.kind for event in log] == ["selected"]


def test_the_check_sees_what_was_never_written() -> None:
    verdict = Check(PROBLEM, gpu(0)).run(lambda *_: None, conv_direct.FWD, 0)
    assert verdict.error is None and "nan instead of" in verdict.reason


class Needy(Direct):
    """The direct kernel, which asks for a workspace that it does not use."""

    algorithm = "needy"

    def workspace_bytes(self, problem: ConvProblem, config: NoConfig, device: Gpu) -> int:
        return 1 << 20

    def estimate(self, problem: ConvProblem, config: NoConfig, device: Gpu) -> float:
        return 0.0


def test_a_workspace_that_cannot_be_had_falls_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = library("torch")
    x, w = (torch.from_numpy(a).cuda() for a in (X, W))
    needy = Needy("conv_fwd")
    monkeypatch.setitem(registry.table("cuda", "conv").lists, "conv_fwd", (needy, conv_direct.FWD))
    monkeypatch.setitem(registry.table("cuda", "conv").by_id, needy.id, needy)
    with config.change(tune__mode="off"), events() as log:  # without what other tests measured
        assert_close(dnn_conv(x, w, 1).cpu().numpy(), Y)
        nbdnn.empty_cache()
        monkeypatch.setattr(driver, "call", _without("cuMemAllocFromPoolAsync"))
        assert_close(dnn_conv(x, w, 1).cpu().numpy(), Y)
    chosen = [(event.kind, event.candidate.rpartition("/")[2]) for event in log]
    assert chosen == [("selected", "needy"), ("selected", "needy"), ("failed", "needy"), ("selected", "direct")]


def _without(name: str) -> Callable[..., Any]:
    """The driver with no memory left for that call."""
    call = driver.call

    def failing(called: str, *arguments: Any) -> Any:
        if called == name:
            raise CudaError(f"{name}: CUDA_ERROR_OUT_OF_MEMORY: out of memory")
        return call(called, *arguments)

    return failing


def test_deterministic_requests_repeat_bit_by_bit() -> None:
    torch = library("torch")
    x, w, dy = (torch.randn(shape, device="cuda") for shape in ((8, 64, 28, 28), (64, 64, 3, 3), (8, 64, 28, 28)))
    with config.change(dnn__deterministic=True):
        for call in (
            lambda: dnn_conv(x, w, 1, algo="time_on_shape_change"),
            lambda: dnn_gradinput(w, dy, x.shape, 1, algo="time_on_shape_change"),
            lambda: dnn_gradweight(x, dy, w.shape, 1, algo="time_on_shape_change"),
        ):
            first = call()
            assert all(torch.equal(call(), first) for _ in range(5))


def test_another_context_stays_current() -> None:
    """A call on GPU 0 gives a thread's own context back: here none at all."""
    torch = library("torch")
    x, w = (torch.from_numpy(a).cuda() for a in (X, W))
    seen: list[int] = []

    def work() -> None:
        driver.call("cuCtxSetCurrent", 0)
        dnn_conv(x, w, 1, out=torch.empty(Y.shape, device="cuda"))
        driver.call("cuCtxSetCurrent", 0)
        dnn_conv(x, w, 1, out=out)
        seen.append(int(driver.call("cuCtxGetCurrent")))

    out = torch.empty(Y.shape, device="cuda")
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [0]


def exporting(tensor: Any, *names: str) -> Any:
    """An array of a library of its own, which shows these protocols of a tensor and nothing else."""
    shown = {name: property(lambda self, name=name: getattr(tensor, name)) for name in names}
    return type("Exported", (), {"shape": tuple(tensor.shape), **shown})()


@pytest.mark.parametrize(
    "names", [("__cuda_array_interface__",), ("__dlpack__", "__dlpack_device__")], ids=["interface", "dlpack"]
)
def test_any_array_with_a_protocol_for_gpus(names: tuple[str, ...]) -> None:
    torch = library("torch")
    x, w = (exporting(torch.from_numpy(a).cuda(), *names) for a in (X, W))
    result = dnn_conv(x, w, 1)
    assert_close(torch.as_tensor(result, device="cuda").cpu().numpy(), Y)
    assert_close(torch.from_dlpack(result).cpu().numpy(), Y)
