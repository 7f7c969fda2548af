"""Pooling and its gradient: the maximum, the average or the sum of each window of an image."""

from __future__ import annotations

from typing import Any

Axes = int | tuple[int, ...]


def dnn_pool(
    img: Any, ws: Axes, stride: Axes | None = None, mode: str = "max", pad: Axes | None = None,
    *, policy: str | None = None, out: Any = None, stream: Any = None, workspace_limit: int | None = None,
    deterministic: bool | None = None, allow_tf32: bool | None = None, layer: str | int | None = None,
) -> Any:  # fmt: skip
    """What the windows of `img` have in them, each of them reduced to one number.

    ::

        max               y[p] = max over r < ws of img[p*stride + r - pad], -inf outside of the image
        sum               y[p] = sum over r < ws of img[p*stride + r - pad], 0 outside of the image
        average_inc_pad   the sum, divided by the elements of the window
        average_exc_pad   the sum, divided by those of them that are inside of the image; 0 where none is

    Parameters
    ----------
    img : array (N, C, H, W) or (N, C, D, H, W)
        float16, bfloat16, float32 or float64 of NumPy, PyTorch, JAX, CuPy, Numba or what README names; contiguous or
        channels-last (other strides are made dense first). On a GPU nothing waits for the result, but for JAX's arrays.
    ws : int or tuple of ints
        Extents of the window: one for all spatial axes, or one for each.
    stride : int or tuple of ints, optional
        Steps between windows. Default: 1, not `ws`.
    mode : 'max', 'max_deterministic', 'average_inc_pad', 'average_exc_pad', 'average' or 'sum'
        'average' is 'average_inc_pad'; 'max_deterministic' is 'max', whose gradient is deterministic already.
    pad : int or tuple of ints, optional
        What is added at both ends of each spatial axis. Default: 0.
    policy : str, optional
        A selection policy ('guess_once', 'guess_on_shape_change', 'time_once', 'time_on_shape_change') or a candidate
        id such as 'pool_fwd/cpu/rows'. Default: flag dnn.policy.
    out : array, optional
        Where the result goes; it may not overlap `img`.
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
    array (N, C, (H + 2*pad - ws)//stride + 1, ...) of the dtype, library and layout of `img`; or `out`.

    Raises
    ------
    InvalidProblem
        An argument that is not understood, or windows larger than the padded image (a ValueError); InvalidType where it
        is dtype or rank (also a TypeError).
    UnsupportedProblem
        A candidate asked for by id cannot run this problem.

    Notes
    -----
    Sums in float32 (float64 for float64), rounded once. A window with a NaN in it is NaN. Thread-safe.
    """
    arguments = "pool_fwd", ws, stride, mode, pad, policy, workspace_limit, deterministic, allow_tf32, layer
    return _compute(arguments, (img, out), (), stream)


def dnn_pool_grad(
    img: Any, out: Any, out_grad: Any, ws: Axes, stride: Axes | None = None, mode: str = "max", pad: Axes | None = None,
    *, policy: str | None = None, dx: Any = None, stream: Any = None, workspace_limit: int | None = None,
    deterministic: bool | None = None, allow_tf32: bool | None = None, layer: str | int | None = None,
) -> Any:  # fmt: skip
    """Gradient of `dnn_pool` with respect to its input.

    ::

        max       dx[i] = sum of out_grad[p] over the windows p whose maximum is at i
        sum       dx[i] = sum over r < ws of out_grad[p],  i = p*stride + r - pad;  average: / elements of p

    The maximum of a window is the first of equal ones in row-major order, or where there are NaNs the last of them, in
    'max' as in 'max_deterministic'.

    Parameters
    ----------
    img, out, out_grad : arrays
        Input of the forward, its result, and the gradient with respect to that. What is in `img` and `out` matters for
        the maxima only; then `out` must be that result.
    ws, stride, mode, pad, policy, stream, workspace_limit, deterministic, allow_tf32, layer
        As in `dnn_pool`.
    dx : array, optional
        Where the result goes; it may not overlap the others.

    Returns
    -------
    array of the shape, library and layout of `img`; or `dx`.

    Raises
    ------
    InvalidProblem, UnsupportedProblem
        As in `dnn_pool`; also where a shape is not that of the forward.

    Notes
    -----
    Every implementation sums in a fixed order, in float32 (float64 for float64), and rounds once.
    """
    arguments = "pool_bwd", ws, stride, mode, pad, policy, workspace_limit, deterministic, allow_tf32, layer
    return _compute(arguments, (img, out, out_grad, dx), (), stream)


def _compute(*call: Any) -> Any:
    """Load the dispatcher, which takes a second for Numba, at the first call; it is called directly from then on."""
    global _compute
    from nbdnn.pool_call import compute

    _compute = compute
    return compute(*call)
