"""Softmax and its gradient, over the channels at each position or over everything but the batch."""

from __future__ import annotations

from typing import Any


def dnn_softmax(
    x: Any, algo: str = "accurate", mode: str = "channel",
    *, policy: str | None = None, out: Any = None, stream: Any = None, workspace_limit: int | None = None,
    deterministic: bool | None = None, allow_tf32: bool | None = None, layer: str | int | None = None,
) -> Any:  # fmt: skip
    """Exponentials of `x`, divided by their sum.

    ::

        y[i] = exp(x[i] - max(x)) / sum_j exp(x[j] - max(x))
        'log':  y[i] = x[i] - max(x) - log(sum_j exp(x[j] - max(x)))

    Parameters
    ----------
    x : array (N, C), (N, C, W), (N, C, H, W) or (N, C, D, H, W)
        float16, bfloat16, float32 or float64 of NumPy, PyTorch, JAX, CuPy, Numba or what README names; contiguous or
        channels-last (other strides are made dense first). On a GPU nothing waits for the result, but for JAX's arrays.
    algo : 'accurate', 'fast' or 'log'
        'fast' does not subtract the maximum: it overflows where float32 does, at 88.7. 'log' is the logarithm.
    mode : 'channel' or 'instance'
        i and j run over the channels, at each position of each image; or over everything but the batch axis.
    policy : str, optional
        A selection policy ('guess_once', 'guess_on_shape_change', 'time_once', 'time_on_shape_change') or a candidate
        id such as 'softmax_fwd/cpu/rows'. Default: flag dnn.policy.
    out : array, optional
        Where the result goes; it may not overlap `x`.
    stream : int, or a stream of PyTorch, CuPy, Numba or any with ``__cuda_stream__``, optional
        CUDA stream for arrays on a GPU. Default: the current one of their library, else the default stream.
    workspace_limit : int, optional
        Bytes of scratch memory that may be used; 0: none. Default: flag dnn.workspace_limit, else what is free.
    deterministic : bool, optional
        Only implementations whose results repeat bit by bit. Default: flag dnn.deterministic.
    allow_tf32 : bool, optional
        Accepted by every function; nothing is multiplied as TF32 here.
    layer : str, optional
        Separates otherwise equal layers for the ``*_once`` policies.

    Returns
    -------
    array of the shape, dtype, library and layout of `x`; or `out`.

    Raises
    ------
    InvalidProblem
        An argument that is not understood (a ValueError); InvalidType where it is dtype or rank (also a TypeError).
    UnsupportedProblem
        A candidate asked for by id cannot run this problem.

    Notes
    -----
    Computed in float32 (float64 for float64), rounded once. A row with one finite entry among -inf is exact; a row of
    -inf alone, or with a NaN, is NaN, as in NumPy. Thread-safe.
    """
    arguments = "softmax_fwd", algo, mode, policy, workspace_limit, deterministic, allow_tf32, layer
    return _compute(arguments, (x, out), (), stream)


def dnn_softmax_grad(
    dy: Any, y: Any, algo: str = "accurate", mode: str = "channel",
    *, policy: str | None = None, out: Any = None, stream: Any = None, workspace_limit: int | None = None,
    deterministic: bool | None = None, allow_tf32: bool | None = None, layer: str | int | None = None,
) -> Any:  # fmt: skip
    """Gradient of `dnn_softmax` with respect to its input.

    ::

        dx[i] = (dy[i] - sum_j dy[j] * y[j]) * y[i]
        'log':  dx[i] = dy[i] - exp(y[i]) * sum_j dy[j]

    Parameters
    ----------
    dy, y : arrays of one shape
        Gradient with respect to the result of the forward, and that result.
    algo, mode, policy, out, stream, workspace_limit, deterministic, allow_tf32, layer
        As in `dnn_softmax`.

    Returns
    -------
    array of the shape, library and layout of `dy`; or `out`.

    Raises
    ------
    InvalidProblem, UnsupportedProblem
        As in `dnn_softmax`; also where `dy` and `y` differ in shape.
    """
    arguments = "softmax_bwd", algo, mode, policy, workspace_limit, deterministic, allow_tf32, layer
    return _compute(arguments, (dy, y, out), (), stream)


def _compute(*call: Any) -> Any:
    """Load the dispatcher, which takes a second for Numba, at the first call; it is called directly from then on."""
    global _compute
    from nbdnn.softmax_call import compute

    _compute = compute
    return compute(*call)
