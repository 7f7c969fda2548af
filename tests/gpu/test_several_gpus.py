"""Several GPUs in one process: work goes where its arrays are, whatever GPU the caller is on."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from conv_example import PROBLEM, W, X, Y
from gpu_example import DW, DX, DY, assert_all_right, assert_close, in_threads
from libraries import library

import nbdnn
from nbdnn import InvalidProblem, config, dnn_conv, dnn_gradinput, dnn_gradweight, driver, events, reference_conv
from nbdnn.device import gpu

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("no_plans"),
    pytest.mark.skipif(driver.device_count() < 2, reason="needs two GPUs"),
]


def on(index: int, *arrays: np.ndarray) -> list[Any]:
    """The arrays as PyTorch's tensors of that GPU."""
    torch = library("torch")
    return [torch.from_numpy(array).to(f"cuda:{index}") for array in arrays]


@pytest.mark.parametrize("current", [0, 1])
@pytest.mark.parametrize("index", [1, 0])
def test_every_candidate_runs_where_its_arrays_are(index: int, current: int) -> None:
    torch = library("torch")
    x, w, dy = on(index, X, W, DY)
    calls = {
        "conv_fwd": (lambda algo: dnn_conv(x, w, 1, algo=algo), Y),
        "conv_bwd_data": (lambda algo: dnn_gradinput(w, dy, X.shape, 1, algo=algo), DX),
        "conv_bwd_filter": (lambda algo: dnn_gradweight(x, dy, W.shape, 1, algo=algo), DW),
    }
    with torch.cuda.device(current):
        for op, (call, expected) in calls.items():
            rows = nbdnn.explain(PROBLEM.with_op(op), device=gpu(index)).rows
            supporting = [row.candidate for row in rows if row.supported]
            assert supporting
            for candidate in supporting:
                result = call(candidate)
                assert result.device.index == index
                assert torch.cuda.current_device() == current
                assert_close(result.cpu().numpy(), expected)


def test_cupy_numba_and_jax_on_the_second_gpu() -> None:
    cupy, jax = library("cupy"), library("jax")
    with cupy.cuda.Device(1):
        x, w = cupy.asarray(X), cupy.asarray(W)
    result = dnn_conv(x, w, 1)
    assert result.device.id == 1
    assert_close(cupy.asnumpy(result), Y)
    second = jax.devices("cuda")[1]
    result = dnn_conv(jax.device_put(X, second), jax.device_put(W, second), 1)
    assert result.devices() == {second}
    assert_close(np.asarray(result), Y)
    library("numba.cuda")
    from numba import cuda

    with cuda.gpus[1]:
        x, w = cuda.to_device(X), cuda.to_device(W)
    result = dnn_conv(x, w, 1)
    assert driver.device_of(result.__cuda_array_interface__["data"][0]) == 1
    with cuda.gpus[1]:
        assert_close(result.copy_to_host(), Y)


def test_arrays_on_two_gpus_are_refused() -> None:
    (x,), (w,), (out,) = on(1, X), on(0, W), on(0, Y)
    with pytest.raises(InvalidProblem, match="kerns is on GPU 0, img on GPU 1"):
        dnn_conv(x, w, 1)
    with pytest.raises(InvalidProblem, match="out is on GPU 0, img on GPU 1"):
        dnn_conv(x, *on(1, W), 1, out=out)


def test_a_thread_for_each_gpu() -> None:
    in_threads(*(partial(assert_all_right, *on(index, X, W, DY), 50) for index in range(2)))


def test_a_graph_of_the_second_gpu() -> None:
    torch = library("torch")
    x, w, out = on(1, X, W, np.zeros_like(Y, "f"))
    with torch.cuda.device(1):
        dnn_conv(x, w, 1, out=out)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.Stream()):  # PyTorch's own may be of the first GPU
            dnn_conv(x, w, 1, out=out)
        out.fill_(float("nan"))
        graph.replay()
    assert_close(out.cpu().numpy(), Y)


def test_measured_on_one_known_on_all_of_its_model() -> None:
    """Two GPUs of one model share their rows of the database, two models do not; each has its own plans and modules."""
    wide = np.concatenate([X, X], axis=3)  # of a shape that no other test measures
    expected = reference_conv.compute(replace(PROBLEM, spatial=wide.shape[2:]), {"x": wide, "w": W})
    known: set[str] = set()
    for index in (1, 0):
        x, w = on(index, wide, W)
        with config.change(tune__budget_s=300), events() as log:  # kernels are compiled in it
            result = dnn_conv(x, w, 1, algo="time_on_shape_change")
        model = replace(gpu(index), index=0).fingerprint
        assert ("measured" in {event.kind for event in log}) == (model not in known)
        assert_close(result.cpu().numpy(), expected)
        known.add(model)


def test_other_ops_on_the_second_gpu() -> None:
    torch = library("torch")
    images = torch.randn(2, 4, 6, 8, device="cuda:1")
    close = torch.testing.assert_close
    close(nbdnn.dnn_pool(images, (2, 2), (2, 2)), torch.nn.functional.max_pool2d(images, 2))
    close(nbdnn.dnn_softmax(images, "accurate", "channel"), torch.softmax(images, 1))
    gamma, beta = torch.ones(1, 4, 1, 1, device="cuda:1"), torch.zeros(1, 4, 1, 1, device="cuda:1")
    y = nbdnn.dnn_batch_normalization_train(images, gamma, beta, "spatial")[0]
    close(y, torch.nn.functional.batch_norm(images, None, None, training=True, eps=1e-4))
    kept, _, _ = nbdnn.dnn_dropout(images, 0.5)
    assert kept.device.index == 1
    assert np.array_equal(kept.cpu().numpy(), nbdnn.dnn_dropout(images.cpu().numpy(), 0.5)[0])
    theta = torch.eye(2, 3, device="cuda:1").repeat(2, 1, 1)
    close(nbdnn.dnn_spatialtf(images, theta), images)
    block = nbdnn.RNNBlock("float32", 8, 1, "lstm")
    count = block.get_param_size([2, 5])
    steps, params = torch.randn(3, 2, 5, device="cuda:1"), torch.randn(count, device="cuda:1")
    state = torch.zeros(1, 2, 8, device="cuda:1")
    got = block.apply(params, steps, state, state)[0]
    expected = block.apply(*(each.cpu() for each in (params, steps, state, state)))[0]
    close(got.cpu(), expected)
