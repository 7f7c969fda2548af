"""Batch normalisation in training and inference, and the gradients of both."""

from __future__ import annotations

from typing import Any


def dnn_batch_normalization_train(
    inputs: Any, gamma: Any, beta: Any, mode: str = "per-activation", epsilon: float = 1e-4,
    running_average_factor: float = 0.1, running_mean: Any = None, running_var: Any = None,
    *, policy: str | None = None, out: tuple | None = None, stream: Any = None, workspace_limit: int | None = None,
    deterministic: bool | None = None, allow_tf32: bool | None = None, layer: str | int | None = None,
) -> tuple:  # fmt: skip
    """Normalise each channel of `inputs` by its own mean and variance, then scale and shift it.

    ::

        mean = sum(x) / m,   var = sum((x - mean)^2) / m,   invstd = 1 / sqrt(var + epsilon)
        out = (x - mean) * invstd * gamma + beta
        new_running_mean = running_mean * (1 - f) + mean * f
        new_running_var = running_var * (1 - f) + var * f * m / (m - 1)

    Parameters
    ----------
    inputs : array of 2 to 6 axes, (N, C, *spatial)
        float16, bfloat16, float32 or float64 of NumPy, PyTorch, JAX, CuPy, Numba or what README names; contiguous or
        channels-last (other strides are made dense first). On a GPU nothing waits for the result, but for JAX's arrays.
    gamma, beta : arrays with the axes of `inputs`, of extent 1 where they are reduced
        With 16-bit inputs they may be float32; else, of differing dtypes, all of the call is cast to the common one.
    mode : 'per-activation' ('peractivation') or 'spatial'
        Statistics over axis 0, or over axis 0 and all after axis 1; m is the number of elements they are over.
    epsilon : float
        At least 1e-5.
    running_average_factor : float
        f above.
    running_mean, running_var : arrays of the shape of `gamma`, optional
        Both or neither. They are not changed, and may not be `out`: take new_running_mean and new_running_var.
    policy : str, optional
        A selection policy ('guess_once', 'guess_on_shape_change', 'time_once', 'time_on_shape_change') or a candidate
        id such as 'bn_train/cpu/rows'. Default: flag dnn.policy.
    out : tuple of arrays, optional
        Where the results go, in the order in which they are returned, None for those to be allocated. They may not
        overlap an input.
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
    out, mean, invstd, and with running averages new_running_mean, new_running_var
        The first of the shape, library and layout of `inputs`, the others of shape and dtype of `gamma`, as cast.

    Raises
    ------
    InvalidProblem
        An argument that is not understood, an epsilon below 1e-5, a running average alone, shapes that disagree, a
        batch of 0, running averages of a batch with m = 1 (a ValueError); InvalidType where it is dtype or rank (also a
        TypeError).
    UnsupportedProblem
        A candidate asked for by id cannot run this problem.

    Notes
    -----
    Statistics are of differences from an element or from the mean, and accumulate in float32 (float64 for float64): a
    mean of 1e4 beside a standard deviation of 1e-2 costs nothing. With m = 1 the variance is 0. Thread-safe.
    """
    arguments = "bn_train", mode, policy, workspace_limit, deterministic, allow_tf32, layer
    arrays = inputs, gamma, beta, running_mean, running_var
    return _compute(arguments, arrays, out, (epsilon, running_average_factor), stream)


def dnn_batch_normalization_test(
    inputs: Any, gamma: Any, beta: Any, mean: Any, var: Any, mode: str = "per-activation", epsilon: float = 1e-4,
    *, policy: str | None = None, out: Any = None, stream: Any = None, workspace_limit: int | None = None,
    deterministic: bool | None = None, allow_tf32: bool | None = None, layer: str | int | None = None,
) -> Any:  # fmt: skip
    """Normalise `inputs` by a given mean and variance, then scale and shift.

    ::

        out = (x - mean) / sqrt(var + epsilon) * gamma + beta

    Parameters
    ----------
    inputs, gamma, beta, mode, epsilon, policy, stream, workspace_limit, deterministic, allow_tf32, layer
        As in `dnn_batch_normalization_train`.
    mean, var : arrays of the shape of `gamma`
    out : array, optional
        Where the result goes; it may not overlap an input.

    Returns
    -------
    array of the shape, dtype, library and layout of `inputs`; or `out`.

    Raises
    ------
    InvalidProblem, UnsupportedProblem
        As in `dnn_batch_normalization_train`.
    """
    arguments = "bn_infer", mode, policy, workspace_limit, deterministic, allow_tf32, layer
    arrays = inputs, gamma, beta, mean, var
    return _compute(arguments, arrays, out, (epsilon, 0.0), stream)


def dnn_batch_normalization_grad(
    inputs: Any, dy: Any, gamma: Any, mean: Any, invstd: Any, mode: str = "per-activation", epsilon: float = 1e-4,
    *, policy: str | None = None, out: tuple | None = None, stream: Any = None, workspace_limit: int | None = None,
    deterministic: bool | None = None, allow_tf32: bool | None = None, layer: str | int | None = None,
) -> tuple:  # fmt: skip
    """Gradients of `dnn_batch_normalization_train`, with the mean and invstd that it returned.

    ::

        dbeta = sum(dy),   dgamma = sum(dy * (x - mean) * invstd)
        dinputs = gamma * invstd * (dy - dbeta / m - (x - mean) * invstd * dgamma / m)

    Parameters
    ----------
    inputs, gamma, mode, policy, out, stream, workspace_limit, deterministic, allow_tf32, layer
        As in `dnn_batch_normalization_train`.
    dy : array of the shape of `inputs`
        Gradient with respect to the normalised result.
    mean, invstd : arrays of the shape of `gamma`
    epsilon : float
        What the forward was given; it is in invstd already.

    Returns
    -------
    dinputs, dgamma, dbeta
        The first like `inputs`, the others of shape and dtype of `gamma`. Of an empty batch the latter are 0.

    Raises
    ------
    InvalidProblem, UnsupportedProblem
        As in `dnn_batch_normalization_train`.
    """
    arguments = "bn_bwd", mode, policy, workspace_limit, deterministic, allow_tf32, layer
    arrays = inputs, dy, gamma, mean, invstd
    return _compute(arguments, arrays, out, (epsilon, 0.0), stream)


def dnn_batch_normalization_test_grad(
    inputs: Any, dy: Any, gamma: Any, mean: Any, var: Any, mode: str = "per-activation", epsilon: float = 1e-4,
    *, policy: str | None = None, out: tuple | None = None, stream: Any = None, workspace_limit: int | None = None,
    deterministic: bool | None = None, allow_tf32: bool | None = None, layer: str | int | None = None,
) -> tuple:  # fmt: skip
    """Gradients of `dnn_batch_normalization_test`.

    ::

        s = sqrt(var + epsilon)
        dinputs = dy * gamma / s,   dgamma = sum(dy * (x - mean)) / s,   dbeta = sum(dy)
        dmean = -dbeta * gamma / s,   dvar = -dgamma * gamma / (2 * s^2)

    Parameters
    ----------
    inputs, gamma, mean, var, mode, epsilon, policy, out, stream, workspace_limit, deterministic, allow_tf32, layer
        As in `dnn_batch_normalization_test`; `out` is a tuple.
    dy : array of the shape of `inputs`
        Gradient with respect to the normalised result.

    Returns
    -------
    dinputs, dgamma, dbeta, dmean, dvar
        The first like `inputs`, the others of shape and dtype of `gamma`. Of an empty batch the latter are 0.

    Raises
    ------
    InvalidProblem, UnsupportedProblem
        As in `dnn_batch_normalization_train`.
    """
    arguments = "bn_infer_bwd", mode, policy, workspace_limit, deterministic, allow_tf32, layer
    arrays = inputs, dy, gamma, mean, var
    return _compute(arguments, arrays, out, (epsilon, 0.0), stream)


def _compute(*call: Any) -> Any:
    """Load the dispatcher, which takes a second for Numba, at the first call; it is called directly from then on."""
    global _compute
    from nbdnn.batchnorm_call import compute

    _compute = compute
    return compute(*call)
