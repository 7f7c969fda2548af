"""Deep-network primitives on NumPy, PyTorch, JAX, CuPy and Numba arrays, on CPUs and NVIDIA GPUs: always the fastest
correct implementation, measured and remembered."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from nbdnn import config
from nbdnn.batchnorm import (
    dnn_batch_normalization_grad,
    dnn_batch_normalization_test,
    dnn_batch_normalization_test_grad,
    dnn_batch_normalization_train,
)
from nbdnn.conv import (
    dnn_conv,
    dnn_conv3d,
    dnn_gradinput,
    dnn_gradinput3d,
    dnn_gradweight,
    dnn_gradweight3d,
    get_conv_out_shape,
)
from nbdnn.dispatch.events import Event, events
from nbdnn.dropout import dnn_dropout, dnn_dropout_grad
from nbdnn.errors import (
    ConfigError,
    CudaError,
    CudnnError,
    DatabaseError,
    InvalidProblem,
    InvalidType,
    NbdnnWarning,
    UnsupportedProblem,
)
from nbdnn.pool import dnn_pool, dnn_pool_grad
from nbdnn.rnn import RNNBlock
from nbdnn.softmax import dnn_softmax, dnn_softmax_grad
from nbdnn.spatialtf import (
    dnn_spatialtf,
    dnn_spatialtf_grad,
    dnn_spatialtf_grid,
    dnn_spatialtf_grid_grad,
    dnn_spatialtf_sampler,
    dnn_spatialtf_sampler_grad,
)

if TYPE_CHECKING:  # editors and type checkers read here what is loaded at first use
    from nbdnn import ops
    from nbdnn.availability import dnn_available, version
    from nbdnn.dispatch.dispatcher import empty_cache
    from nbdnn.dispatch.explain import Explanation, explain

__version__ = "0.1.0"

# Loaded at first use: with them come Numba, or things that few programs need.
_LAZY = {
    "Explanation": "nbdnn.dispatch.explain",
    "dnn_available": "nbdnn.availability",
    "empty_cache": "nbdnn.dispatch.dispatcher",
    "explain": "nbdnn.dispatch.explain",
    "ops": "nbdnn.ops",
    "version": "nbdnn.availability",
}

__all__ = [
    "ConfigError",
    "CudaError",
    "CudnnError",
    "DatabaseError",
    "Event",
    "Explanation",
    "InvalidProblem",
    "InvalidType",
    "NbdnnWarning",
    "RNNBlock",
    "UnsupportedProblem",
    "config",
    "dnn_available",
    "dnn_batch_normalization_grad",
    "dnn_batch_normalization_test",
    "dnn_batch_normalization_test_grad",
    "dnn_batch_normalization_train",
    "dnn_conv",
    "dnn_conv3d",
    "dnn_dropout",
    "dnn_dropout_grad",
    "dnn_gradinput",
    "dnn_gradinput3d",
    "dnn_gradweight",
    "dnn_gradweight3d",
    "dnn_pool",
    "dnn_pool_grad",
    "dnn_softmax",
    "dnn_softmax_grad",
    "dnn_spatialtf",
    "dnn_spatialtf_grad",
    "dnn_spatialtf_grid",
    "dnn_spatialtf_grid_grad",
    "dnn_spatialtf_sampler",
    "dnn_spatialtf_sampler_grad",
    "empty_cache",
    "events",
    "explain",
    "get_conv_out_shape",
    "ops",
    "version",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'nbdnn' has no attribute {name!r}")
    module = import_module(_LAZY[name])
    value = module if name == "ops" else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
