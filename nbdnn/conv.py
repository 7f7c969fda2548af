"""Convolution and both its gradients, in 2-D and 3-D.

Shapes are those of the operands' logical axes whatever their layout in memory: img (N, C, *spatial*), kerns
(K, C / num_groups, *filter*), topgrad and the result (N, K, *out*). The gradients are the exact adjoints of the forward
with the same arguments.
"""

from __future__ import annotations

import reprlib
from typing import Any

from nbdnn.errors import InvalidProblem, as_float

Axes = int | tuple[int, ...]
BorderMode = str | int | tuple[int | tuple[int, int], ...]
# What nearly every call multiplies by, which needs no conversion.
_ONE, _ZERO, _USUAL = 1, 0, (1.0, 0.0)


def dnn_conv(
    img: Any, kerns: Any, border_mode: BorderMode = "valid", subsample: Axes = (1, 1), dilation: Axes = (1, 1),
    conv_mode: str = "conv",
    *, direction_hint: str | None = None, algo: str | None = None, precision: str | None = None, num_groups: int = 1,
    bias: Any = None, activation: str | None = None, residual: Any = None, alpha: float = 1, beta: float = 0,
    out: Any = None, stream: Any = None, workspace_limit: int | None = None, deterministic: bool | None = None,
    allow_tf32: bool | None = None, layer: str | int | None = None, workmem: None = None,
) -> Any:  # fmt: skip
    """Convolve a batch of images with a set of filters.

    ::

        conv[n, k, p, q] = sum_{c, r, s} img[n, c, p*u + r*d - pad, q*u + s*d - pad] * kerns[k, c, R-1-r, S-1-s]
        result = activation(alpha * conv + beta * out + bias + residual)

    Parameters
    ----------
    img : array (N, C, H, W)
        float16, bfloat16, float32 or float64 of NumPy, PyTorch, JAX, CuPy, Numba or what README names; contiguous or
        channels-last (other strides are made dense first). On a GPU nothing waits for the result, but for JAX's arrays.
    kerns : array (K, C / num_groups, R, S)
        Of the same dtype; else both are cast to the common one.
    border_mode : 'valid', 'full', 'half', int, tuple of int, or tuple of (before, after)
        Zeros around the image: none; (k-1)*d; ((k-1)*d+1)//2; or so many, per axis if a tuple.
    subsample, dilation : int or tuple of int
        Stride u of the output, and distance d between filter taps.
    conv_mode : 'conv' or 'cross'
        'cross' does not flip the filter: it reads ``kerns[k, c, r, s]``.
    direction_hint : None, 'forward!', 'bprop weights' or 'bprop inputs'
        The last two let a gradient's kernels compute the forward too, in the same race; where they do not apply they
        are ignored. 'forward!' changes nothing.
    algo : str, optional
        A method ('none', 'small', 'large', 'fft', 'fft_tiling', 'winograd', 'winograd_non_fused'), a selection policy
        ('guess_once', 'guess_on_shape_change', 'time_once', 'time_on_shape_change') or a candidate id such as
        'conv_fwd/cpu/direct'. Default: flag dnn.conv.algo_fwd.
    precision : str, optional
        Compute type: 'as_input_f32' (float32 for 16-bit data), 'as_input', 'float16', 'float32' or 'float64'. Default:
        flag dnn.conv.precision.
    num_groups : int
        Channels are convolved in this many separate groups; C of them make a depthwise convolution.
    bias : array (K,), optional
        Of the same dtype as well, as `residual`: a float64 one makes all of the call float64.
    activation : None, 'relu', 'swish', 'sigmoid' or 'tanh'
    residual : array of the result's shape, optional
    alpha, beta : float
        Scale of the convolution and of what is in `out`; a beta needs `out`.
    out : array, optional
        Where the result goes; it may not overlap an operand.
    stream : int, or a stream of PyTorch, CuPy, Numba or any with ``__cuda_stream__``, optional
        CUDA stream for arrays on a GPU. Default: the current one of their library, else the default stream.
    workspace_limit : int, optional
        Bytes of scratch memory that may be used; 0: none. Default: flag dnn.workspace_limit, else what is free.
    deterministic : bool, optional
        Only implementations whose results repeat bit by bit. Default: flag dnn.deterministic.
    allow_tf32 : bool, optional
        Whether float32 may be multiplied as TF32. Default: flag dnn.allow_tf32.
    layer : str, optional
        Separates otherwise equal layers for the ``*_once`` policies.

    Returns
    -------
    array (N, K, P, Q)
        Of the library and layout of `img`, where P = floor((H + pads - ((R-1)*d + 1)) / u) + 1; or `out`.

    Raises
    ------
    InvalidProblem
        Operands or arguments that disagree (a ValueError); InvalidType where it is dtype or rank (also a TypeError).
    UnsupportedProblem
        A candidate asked for by id cannot run this problem, or a method and the flag dnn.fallback is 'raise'.

    Notes
    -----
    Sums are accumulated in the compute type, with an error of at most 8 * eps * sqrt(C*R*S) times the root sum of
    squares of the products on zero-mean data; the result is rounded once (by cuDNN in 16 bits twice, where it does not
    fuse the epilogue or there is a beta). Thread-safe.
    """
    if workmem is not None:
        raise TypeError("workmem= is gone: say which algorithm with algo=")
    return _compute(
        (
            "conv_fwd", 2, None, border_mode, subsample, dilation, conv_mode, direction_hint, algo, precision,
            num_groups, activation, workspace_limit, deterministic, allow_tf32, layer, beta != 0,
        ),
        (img, kerns, bias, residual, out),
        _USUAL if alpha is _ONE and beta is _ZERO else _scalars(alpha, beta),
        stream,
    )  # fmt: skip


def dnn_gradinput(
    kerns: Any, topgrad: Any, img_shp: tuple[int, ...], border_mode: BorderMode = "valid", subsample: Axes = (1, 1),
    dilation: Axes = (1, 1), conv_mode: str = "conv",
    *, precision: str | None = None, algo: str | None = None, num_groups: int = 1, alpha: float = 1, beta: float = 0,
    out: Any = None, stream: Any = None, workspace_limit: int | None = None, deterministic: bool | None = None,
    allow_tf32: bool | None = None, layer: str | int | None = None,
) -> Any:  # fmt: skip
    """Gradient of `dnn_conv` with respect to its images.

    ::

        dimg[n, c, p*u + r*d - pad, q*u + s*d - pad] += topgrad[n, k, p, q] * kerns[k, c, R-1-r, S-1-s]
        result = alpha * dimg + beta * out

    Parameters
    ----------
    kerns : array (K, C / num_groups, R, S)
    topgrad : array (N, K, P, Q)
        Gradient with respect to the result of the forward.
    img_shp : tuple of int
        Shape (N, C, H, W) of the images: a stride leaves several possible.
    algo : str, optional
        'none', 'small', 'deterministic', 'fft', 'fft_tiling', 'winograd', 'winograd_non_fused', a selection policy or
        a candidate id. Default: flag dnn.conv.algo_bwd_data.
    border_mode, subsample, dilation, conv_mode, precision, num_groups, alpha, beta, out, stream, workspace_limit,
    deterministic, allow_tf32, layer
        As in `dnn_conv`; 16-bit compute is refused.

    Returns
    -------
    array (N, C, H, W)
        Of the library of `kerns` and the layout of `topgrad`; or `out`.

    Raises
    ------
    InvalidProblem, UnsupportedProblem
        As in `dnn_conv`; also where `topgrad` has not the shape that the forward gives.
    """
    return _compute(
        (
            "conv_bwd_data", 2, _hashable(img_shp), border_mode, subsample, dilation, conv_mode, None, algo, precision,
            num_groups, None, workspace_limit, deterministic, allow_tf32, layer, beta != 0,
        ),
        (kerns, topgrad, None, None, out),
        _USUAL if alpha is _ONE and beta is _ZERO else _scalars(alpha, beta),
        stream,
    )  # fmt: skip


def dnn_gradweight(
    img: Any, topgrad: Any, kerns_shp: tuple[int, ...], border_mode: BorderMode = "valid", subsample: Axes = (1, 1),
    dilation: Axes = (1, 1), conv_mode: str = "conv",
    *, precision: str | None = None, algo: str | None = None, num_groups: int = 1, alpha: float = 1, beta: float = 0,
    out: Any = None, stream: Any = None, workspace_limit: int | None = None, deterministic: bool | None = None,
    allow_tf32: bool | None = None, layer: str | int | None = None,
) -> Any:  # fmt: skip
    """Gradient of `dnn_conv` with respect to its filters.

    ::

        dkerns[k, c, R-1-r, S-1-s] = sum_{n, p, q} topgrad[n, k, p, q] * img[n, c, p*u + r*d - pad, q*u + s*d - pad]
        result = alpha * dkerns + beta * out

    Parameters
    ----------
    img : array (N, C, H, W)
    topgrad : array (N, K, P, Q)
        Gradient with respect to the result of the forward.
    kerns_shp : tuple of int
        Shape (K, C / num_groups, R, S) of the filters.
    algo : str, optional
        'none', 'small', 'deterministic', 'fft', 'fft_tiling', 'winograd_non_fused', a selection policy or a candidate
        id. Default: flag dnn.conv.algo_bwd_filter.
    border_mode, subsample, dilation, conv_mode, precision, num_groups, alpha, beta, out, stream, workspace_limit,
    deterministic, allow_tf32, layer
        As in `dnn_conv`; 16-bit compute is refused.

    Returns
    -------
    array (K, C / num_groups, R, S)
        Of the library of `img`; channels-last where both operands are, else contiguous; or `out`.

    Raises
    ------
    InvalidProblem, UnsupportedProblem
        As in `dnn_conv`; also where `topgrad` has not the shape that the forward gives.
    """
    return _compute(
        (
            "conv_bwd_filter", 2, _hashable(kerns_shp), border_mode, subsample, dilation, conv_mode, None, algo,
            precision, num_groups, None, workspace_limit, deterministic, allow_tf32, layer, beta != 0,
        ),
        (img, topgrad, None, None, out),
        _USUAL if alpha is _ONE and beta is _ZERO else _scalars(alpha, beta),
        stream,
    )  # fmt: skip


def dnn_conv3d(
    img: Any, kerns: Any, border_mode: BorderMode = "valid", subsample: Axes = (1, 1, 1), dilation: Axes = (1, 1, 1),
    conv_mode: str = "conv",
    *, direction_hint: str | None = None, algo: str | None = None, precision: str | None = None, num_groups: int = 1,
    bias: Any = None, activation: str | None = None, residual: Any = None, alpha: float = 1, beta: float = 0,
    out: Any = None, stream: Any = None, workspace_limit: int | None = None, deterministic: bool | None = None,
    allow_tf32: bool | None = None, layer: str | int | None = None, workmem: None = None,
) -> Any:  # fmt: skip
    """Convolve a batch of volumes with a set of filters: `dnn_conv` with three spatial axes.

    Parameters
    ----------
    img : array (N, C, D, H, W)
    kerns : array (K, C / num_groups, T, R, S)
    algo : str, optional
        'none', 'small', 'fft_tiling', 'winograd', a selection policy or a candidate id.
    border_mode, subsample, ...
        As in `dnn_conv`, with triples.

    Returns
    -------
    array (N, K, O, P, Q)
    """
    if workmem is not None:
        raise TypeError("workmem= is gone: say which algorithm with algo=")
    return _compute(
        (
            "conv_fwd", 3, None, border_mode, subsample, dilation, conv_mode, direction_hint, algo, precision,
            num_groups, activation, workspace_limit, deterministic, allow_tf32, layer, beta != 0,
        ),
        (img, kerns, bias, residual, out),
        _USUAL if alpha is _ONE and beta is _ZERO else _scalars(alpha, beta),
        stream,
    )  # fmt: skip


def dnn_gradinput3d(
    kerns: Any, topgrad: Any, img_shp: tuple[int, ...], border_mode: BorderMode = "valid",
    subsample: Axes = (1, 1, 1), dilation: Axes = (1, 1, 1), conv_mode: str = "conv",
    *, precision: str | None = None, algo: str | None = None, num_groups: int = 1, alpha: float = 1, beta: float = 0,
    out: Any = None, stream: Any = None, workspace_limit: int | None = None, deterministic: bool | None = None,
    allow_tf32: bool | None = None, layer: str | int | None = None,
) -> Any:  # fmt: skip
    """Gradient of `dnn_conv3d` with respect to its images: `dnn_gradinput` with three spatial axes.

    Parameters
    ----------
    kerns : array (K, C / num_groups, T, R, S)
    topgrad : array (N, K, O, P, Q)
    img_shp : tuple of int
        (N, C, D, H, W).
    algo : str, optional
        'none', 'deterministic', 'fft_tiling', 'winograd', a selection policy or a candidate id.
    border_mode, subsample, ...
        As in `dnn_gradinput`, with triples.

    Returns
    -------
    array (N, C, D, H, W)
    """
    return _compute(
        (
            "conv_bwd_data", 3, _hashable(img_shp), border_mode, subsample, dilation, conv_mode, None, algo, precision,
            num_groups, None, workspace_limit, deterministic, allow_tf32, layer, beta != 0,
        ),
        (kerns, topgrad, None, None, out),
        _USUAL if alpha is _ONE and beta is _ZERO else _scalars(alpha, beta),
        stream,
    )  # fmt: skip


def dnn_gradweight3d(
    img: Any, topgrad: Any, kerns_shp: tuple[int, ...], border_mode: BorderMode = "valid",
    subsample: Axes = (1, 1, 1), dilation: Axes = (1, 1, 1), conv_mode: str = "conv",
    *, precision: str | None = None, algo: str | None = None, num_groups: int = 1, alpha: float = 1, beta: float = 0,
    out: Any = None, stream: Any = None, workspace_limit: int | None = None, deterministic: bool | None = None,
    allow_tf32: bool | None = None, layer: str | int | None = None,
) -> Any:  # fmt: skip
    """Gradient of `dnn_conv3d` with respect to its filters: `dnn_gradweight` with three spatial axes.

    Parameters
    ----------
    img : array (N, C, D, H, W)
    topgrad : array (N, K, O, P, Q)
    kerns_shp : tuple of int
        (K, C / num_groups, T, R, S).
    algo : str, optional
        'none', 'small', a selection policy or a candidate id.
    border_mode, subsample, ...
        As in `dnn_gradweight`, with triples.

    Returns
    -------
    array (K, C / num_groups, T, R, S)
    """
    return _compute(
        (
            "conv_bwd_filter", 3, _hashable(kerns_shp), border_mode, subsample, dilation, conv_mode, None, algo,
            precision, num_groups, None, workspace_limit, deterministic, allow_tf32, layer, beta != 0,
        ),
        (img, topgrad, None, None, out),
        _USUAL if alpha is _ONE and beta is _ZERO else _scalars(alpha, beta),
        stream,
    )  # fmt: skip


def get_conv_out_shape(
    ishape: tuple[int, ...],
    kshape: tuple[int, ...],
    border_mode: BorderMode = "valid",
    subsample: Axes = 1,
    dilation: Axes = 1,
) -> tuple[int, ...]:
    """Shape of the result of a convolution, from the full shapes of its operands.

    ::

        out = floor((in + pad_before + pad_after - ((k - 1) * dilation + 1)) / stride) + 1

    Parameters
    ----------
    ishape : (N, C, *spatial*)
    kshape : (K, C / num_groups, *filter*)
    border_mode, subsample, dilation
        As in `dnn_conv`.

    Returns
    -------
    (N, K, *out*)

    Raises
    ------
    InvalidProblem
        Where that is not positive, or an argument is not understood.
    """
    from nbdnn.conv_arguments import out_shape

    return out_shape(ishape, kshape, border_mode, subsample, dilation)


def _scalars(alpha: Any, beta: Any) -> tuple[float, float]:
    return _number("alpha", alpha), _number("beta", beta)


def _number(name: str, value: Any) -> float:
    try:
        return as_float(value)
    except (TypeError, ValueError, OverflowError):
        raise InvalidProblem(f"{name} is {reprlib.repr(value)}, expected a number") from None


def _hashable(shape: Any) -> Any:
    try:
        return tuple(shape)
    except TypeError:  # of no axis
        return shape


def _compute(*call: Any) -> Any:
    """Load the dispatcher, which takes a second for Numba, at the first call; it is called directly from then on."""
    global _compute
    from nbdnn.conv_call import compute

    _compute = compute
    return compute(*call)
