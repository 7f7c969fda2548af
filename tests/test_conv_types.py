"""What a convolution's operands are: dtypes, precisions, arrays of other libraries."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from conv_example import W, X, Y, assert_is_y, kinds

from nbdnn import InvalidProblem, InvalidType, config, dnn_conv, dnn_gradweight, events
from nbdnn.problem import parse

pytestmark = pytest.mark.usefixtures("no_plans")


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_dtypes(dtype: Any) -> None:
    y = dnn_conv(X.astype(dtype), W.astype(dtype), 1)
    assert y.dtype == dtype
    expected = dnn_conv(X.astype(dtype).astype("d"), W.astype(dtype).astype("d"), 1)
    eps = max(float(ml_dtypes.finfo(dtype).eps), 2e-6)
    np.testing.assert_allclose(y.astype("d"), expected, rtol=eps, atol=20 * eps)


@pytest.mark.parametrize(
    ("one", "other", "common"),
    [("e", "f", "f"), ("f", "d", "d"), ("e", ml_dtypes.bfloat16, "f"), (ml_dtypes.bfloat16, "d", "d")],
)
def test_mixed_dtypes_are_cast_to_the_common_one(one: Any, other: Any, common: str) -> None:
    with events() as log:
        y = dnn_conv(X.astype(one), W.astype(other), 1)
    assert y.dtype == common and "copied" in kinds(log)
    np.testing.assert_allclose(y, Y, rtol=0.02, atol=0.2)


@pytest.mark.parametrize(
    ("dtype", "precision", "compute"),
    [
        ("e", None, "f32"),
        ("e", "as_input_f32", "f32"),
        ("e", "as_input", "f16"),
        ("e", "float32", "f32"),
        (ml_dtypes.bfloat16, "as_input", "f32"),
        ("f", "as_input", "f32"),
        ("d", None, "f64"),
        ("d", "float64", "f64"),
    ],
)
def test_precisions(dtype: Any, precision: str | None, compute: str) -> None:
    with events() as log:
        dnn_conv(X.astype(dtype), W.astype(dtype), 1, precision=precision)
    assert parse(log[0].problem).compute == compute
    with config.change(**({"dnn__conv__precision": precision} if precision else {})), events() as log:
        dnn_conv(X.astype(dtype), W.astype(dtype), 1, num_groups=1)
    assert all(parse(event.problem).compute == compute for event in log)


def test_a_gradient_is_not_told_to_take_a_precision_it_refuses() -> None:
    x, y = X.astype("e"), Y.astype("e")
    with pytest.raises(ValueError, match=r"'float64' does not go with float16 data; possible: float32$"):
        dnn_gradweight(x, y, W.shape, 1, precision="float64")
    with pytest.raises(ValueError, match=r"possible: float32, float16$"):
        dnn_conv(x, W.astype("e"), 1, precision="float64")


def test_bfloat16_gradient_as_input_is_float32_inside() -> None:
    x, y = X.astype(ml_dtypes.bfloat16), Y.astype(ml_dtypes.bfloat16)
    assert dnn_gradweight(x, y, W.shape, 1, precision="as_input").dtype == ml_dtypes.bfloat16


def test_torch(torch: ModuleType) -> None:
    x, w = torch.tensor(X), torch.nn.Parameter(torch.tensor(W))
    y = dnn_conv(x, w, 1, conv_mode="cross")
    np.testing.assert_allclose(y, torch.nn.functional.conv2d(x, w, padding=1).detach(), rtol=1e-4, atol=1e-5)
    assert type(y) is torch.Tensor and not y.requires_grad
    last = dnn_conv(x.to(memory_format=torch.channels_last), w, 1)
    assert last.is_contiguous(memory_format=torch.channels_last)
    out = torch.empty_like(y)
    assert dnn_conv(X, W, 1, out=out) is out
    assert_is_y(out)
    odd = torch.zeros(2, 6, 6, 10)[..., ::2]
    assert dnn_conv(x, w, 1, out=odd) is odd
    assert_is_y(odd)
    with pytest.raises(InvalidType, match="meta"):
        dnn_conv(torch.empty(X.shape, device="meta"), w)
    with pytest.raises(InvalidType, match=r"torch\.int32"):
        dnn_conv(x.int(), w)
    with pytest.raises(InvalidProblem, match="out overlaps img"):
        dnn_conv(y, torch.ones(6, 6, 1, 1), out=y)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_arrays_without_memory_are_refused(torch: ModuleType) -> None:
    """Where PyTorch has freed it, as sharding does, or never had any, as compilers do: address 0 is not read."""
    x, w = torch.tensor(X), torch.tensor(W)
    freed = torch.tensor(X)
    out = torch.empty_like(dnn_conv(x, w, 1))
    dnn_conv(freed, w, 1, out=out)
    for tensor in freed, out:
        tensor.untyped_storage().resize_(0)
    for _ in range(2):
        with pytest.raises(InvalidType, match=r"img: .* no memory"):
            dnn_conv(freed, w, 1)
        with pytest.raises(InvalidType, match=r"out: .* no memory"):
            dnn_conv(x, w, 1, out=out)
    with torch._subclasses.fake_tensor.FakeTensorMode():
        with pytest.raises(InvalidType, match=r"FakeTensor.* no memory for a result"):
            dnn_conv(x, w, 1)
        with pytest.raises(InvalidType, match=r"img: .* no memory"):
            dnn_conv(torch.zeros(X.shape), w, 1)
    with pytest.raises(InvalidType, match=r"kerns: .* no memory"):
        dnn_conv(x, w.to("meta"), 1)


def test_a_key_of_jax_is_no_array_of_numbers(jax: ModuleType) -> None:
    with pytest.raises(InvalidType, match="img: dtype key<fry> is not one of float16"):
        dnn_conv(jax.random.key(0), jax.numpy.asarray(W))


def in_a_new_process(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    every = {**os.environ, **environment}
    return subprocess.run([sys.executable, "-W", "ignore", "-c", code], env=every, capture_output=True, text=True)


@pytest.mark.usefixtures("jax")
def test_a_jax_array_on_another_cpu_device_is_refused() -> None:
    code = """if True:
        import nbdnn, jax
        first, second = (jax.device_put(jax.numpy.ones((2, 3)), device) for device in jax.devices())
        print(nbdnn.dnn_softmax(first).devices() == first.devices())
        nbdnn.dnn_softmax(second)"""
    done = in_a_new_process(code, XLA_FLAGS="--xla_force_host_platform_device_count=2", JAX_PLATFORMS="cpu")
    assert done.stdout == "True\n"
    assert "InvalidType: x: a JAX array on" in done.stderr.splitlines()[-1]


@pytest.mark.usefixtures("torch")
def test_a_first_call_may_be_one_that_pytorch_compiles(tmp_path: Path) -> None:
    """Before any kernel is: Numba's compiler is no part of a graph."""
    code = """if True:
        import nbdnn, torch
        x = torch.randn(3, 4)
        y = torch.compile(lambda a: nbdnn.dnn_softmax(a) * 2, backend="eager")(x)
        print(torch.allclose(y, 2 * torch.softmax(x, 1)))"""
    done = in_a_new_process(code, NBDNN_CACHE_DIR=str(tmp_path))
    assert done.stdout == "True\n", done.stderr


def test_a_deleted_jax_array_is_refused(jax: ModuleType) -> None:
    x, w = jax.numpy.asarray(X), jax.numpy.asarray(W)
    dnn_conv(x, w, 1)
    w.delete()
    with pytest.raises(InvalidType, match=r"kerns: .* deleted"):
        dnn_conv(x, w, 1)


def test_a_torch_output_that_is_mapped_anew(torch: ModuleType) -> None:
    """From 4 MiB on it is in huge pages where the system has them; above 32 MiB the C library maps it."""
    x = torch.rand(1, 1, 2, 4_500_000)
    y = dnn_conv(x, torch.full((1, 1, 1, 1), 2.0))
    assert torch.equal(y, 2 * x)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_torch_dtypes(dtype: str, torch: ModuleType) -> None:
    y = dnn_conv(torch.tensor(X).to(getattr(torch, dtype)), W, 1, out=None)
    assert y.dtype == (torch.float64 if dtype == "float64" else torch.float32)  # the common one with W's float32
    y = dnn_conv(torch.tensor(X).to(getattr(torch, dtype)), torch.tensor(W).to(getattr(torch, dtype)), 1)
    assert y.dtype == getattr(torch, dtype)
    np.testing.assert_allclose(y.double(), Y, rtol=0.02, atol=0.1)


def test_jax(jax: ModuleType) -> None:
    x, w = jax.numpy.asarray(X), jax.numpy.asarray(W)
    y = dnn_conv(x, w, 1)
    assert isinstance(y, jax.Array)
    assert_is_y(y)
    half = dnn_conv(x.astype("bfloat16"), w.astype("bfloat16"), 1)
    assert half.dtype == jax.numpy.bfloat16
    np.testing.assert_allclose(half.astype("float32"), Y, rtol=0.02, atol=0.1)
    assert isinstance(dnn_conv(X, w, 1), np.ndarray)
    with pytest.raises(InvalidProblem, match="out cannot be written"):
        dnn_conv(X, W, 1, out=y + 0)
    with pytest.raises(InvalidType, match=r"inside jax\.jit"):
        jax.jit(lambda a: dnn_conv(a, w, 1))(x)


def test_dtype_errors_name_the_argument() -> None:
    with pytest.raises(InvalidType, match="residual: dtype complex128"):
        dnn_conv(X, W, 1, residual=Y.astype("D"))
