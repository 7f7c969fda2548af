"""The spatial transformer: images seen through an affine grid, its two steps, and the gradients of all three."""

from __future__ import annotations

from typing import Any


def dnn_spatialtf(
    img: Any, theta: Any, scale_width: float = 1, scale_height: float = 1,
    *, policy: str | None = None, out: Any = None, stream: Any = None, workspace_limit: int | None = None,
    deterministic: bool | None = None, allow_tf32: bool | None = None, layer: str | int | None = None,
) -> Any:  # fmt: skip
    """`img` sampled at the positions to which `theta` moves those of the output, by bilinear interpolation.

    ::

        (gx, gy) = theta[n] @ (u, v, 1)          u, v in [-1, 1] over the columns and rows of the output, ends included
        s, t = (gx + 1) / 2 * (W - 1), (gy + 1) / 2 * (H - 1)
        out[n, c] = sum over i, j of img[n, c, i, j] * max(0, 1 - |t - i|) * max(0, 1 - |s - j|)

    So -1 and 1 are the middles of the first and last pixel, an output of one column has u = 0, and what is outside of
    the image counts as zeros. The identity ``[[1, 0, 0], [0, 1, 0]]`` gives the image.

    Parameters
    ----------
    img : array (N, C, H, W)
        float16, bfloat16, float32 or float64 of NumPy, PyTorch, JAX, CuPy, Numba or what README names; contiguous or
        channels-last (other strides are made dense first). On a GPU nothing waits for the result, but for JAX's arrays.
    theta : array (N, 2, 3)
        With 16-bit images it may be float32, and should: in float16 a position among 500 pixels is off by up to 1/4.
    scale_width, scale_height : float
        The output has ceil(H * scale_height) rows and ceil(W * scale_width) columns.
    policy : str, optional
        A selection policy ('guess_once', 'guess_on_shape_change', 'time_once', 'time_on_shape_change') or a candidate
        id such as 'spatialtf_fwd/cpu/planar'. Default: flag dnn.policy.
    out : array, optional
        Where the result goes; it may not overlap an input.
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
    array (N, C, ceil(H * scale_height), ceil(W * scale_width)) of the dtype, library and layout of `img`; or `out`.

    Raises
    ------
    InvalidProblem
        Shapes that do not go together, or a scale that leaves no output (a ValueError); InvalidType where it is dtype
        or rank (also a TypeError).
    UnsupportedProblem
        A candidate asked for by id cannot run this problem.

    Notes
    -----
    Positions and sums in float32 (float64 for float64), rounded once. Operands of different dtypes are cast to their
    common one. Where a position lies on no pixel's neighbourhood, as NaN does, the output is 0. Thread-safe. Source: M.
    Jaderberg et al., Spatial transformer networks, arXiv:1506.02025.
    """
    options = policy, workspace_limit, deterministic, allow_tf32, layer
    return _compute("spatialtf_fwd", (scale_width, scale_height), (img, theta), out, options, stream)


def dnn_spatialtf_grad(
    img: Any, theta: Any, dout: Any, scale_width: float = 1, scale_height: float = 1,
    *, policy: str | None = None, out: tuple | None = None, stream: Any = None, workspace_limit: int | None = None,
    deterministic: bool | None = None, allow_tf32: bool | None = None, layer: str | int | None = None,
) -> tuple[Any, Any]:  # fmt: skip
    """Gradients of `dnn_spatialtf` with respect to its image and theta.

    ::

        dimg[n, c, i, j] = sum over outputs of dout * max(0, 1 - |t - i|) * max(0, 1 - |s - j|)
        dgx = (W - 1) / 2 * sum over c, i, j of dout * img[n, c, i, j] * max(0, 1 - |t - i|) * (1 if j > s else -1),
              |s - j| < 1;  dgy alike
        dtheta[n] = sum over outputs of (dgx, dgy)^T (u, v, 1)

    Parameters
    ----------
    img, theta, scale_width, scale_height, policy, stream, workspace_limit, deterministic, allow_tf32, layer
        As in `dnn_spatialtf`.
    dout : array (N, C, ceil(H * scale_height), ceil(W * scale_width))
        The gradient with respect to its result.
    out : tuple of arrays, optional
        Where dimg and dtheta go, None for one to be allocated. They may not overlap an input.

    Returns
    -------
    dimg, dtheta
        Of shape, dtype and layout of `img` and of `theta`.

    Raises
    ------
    InvalidProblem, UnsupportedProblem
        As in `dnn_spatialtf`.

    Notes
    -----
    The slope by a position jumps at every pixel. On a pixel, it is that to the next one on; where rounding moves a
    position over a pixel, the slope of the other side is given. Sums in float32 (float64 for float64).
    """
    options = policy, workspace_limit, deterministic, allow_tf32, layer
    return _compute("spatialtf_bwd", (scale_width, scale_height), (img, theta, dout), out, options, stream)


def dnn_spatialtf_grid(
    theta: Any, out_dims: tuple[int, int, int, int],
    *, policy: str | None = None, out: Any = None, stream: Any = None, workspace_limit: int | None = None,
    deterministic: bool | None = None, allow_tf32: bool | None = None, layer: str | int | None = None,
) -> Any:  # fmt: skip
    """The positions to which `theta` moves those of an output: the first step of `dnn_spatialtf`.

    ::

        grid[n, i, j] = theta[n] @ (u, v, 1)     u, v in [-1, 1] over the columns and rows of the output, ends included

    Parameters
    ----------
    theta : array (N, 2, 3)
        float16, bfloat16, float32 or float64, which is also the grid's.
    out_dims : tuple of four ints
        (N, C, H', W') of the output; C may be any.
    policy, out, stream, workspace_limit, deterministic, allow_tf32, layer
        As in `dnn_spatialtf`.

    Returns
    -------
    array (N, H', W', 2) of the dtype and library of `theta`: (x, y), x across columns, y down rows; or `out`.

    Raises
    ------
    InvalidProblem, UnsupportedProblem
        As in `dnn_spatialtf`.
    """
    options = policy, workspace_limit, deterministic, allow_tf32, layer
    return _compute("spatialtf_grid_fwd", (out_dims,), (theta,), out, options, stream)


def dnn_spatialtf_grid_grad(
    dgrid: Any,
    *, policy: str | None = None, out: Any = None, stream: Any = None, workspace_limit: int | None = None,
    deterministic: bool | None = None, allow_tf32: bool | None = None, layer: str | int | None = None,
) -> Any:  # fmt: skip
    """Gradient of `dnn_spatialtf_grid`: ``dtheta[n] = sum over i, j of dgrid[n, i, j]^T (u, v, 1)``.

    Parameters
    ----------
    dgrid : array (N, H', W', 2)
        The gradient with respect to the grid.
    policy, out, stream, workspace_limit, deterministic, allow_tf32, layer
        As in `dnn_spatialtf`.

    Returns
    -------
    array (N, 2, 3) of the dtype and library of `dgrid`; or `out`.

    Raises
    ------
    InvalidProblem, UnsupportedProblem
        As in `dnn_spatialtf`.
    """
    options = policy, workspace_limit, deterministic, allow_tf32, layer
    return _compute("spatialtf_grid_bwd", (), (dgrid,), out, options, stream)


def dnn_spatialtf_sampler(
    img: Any, grid: Any,
    *, policy: str | None = None, out: Any = None, stream: Any = None, workspace_limit: int | None = None,
    deterministic: bool | None = None, allow_tf32: bool | None = None, layer: str | int | None = None,
) -> Any:  # fmt: skip
    """`img` sampled at the positions of `grid`: the second step of `dnn_spatialtf`, whose formula is that of this one.

    Parameters
    ----------
    img : array (N, C, H, W)
        As in `dnn_spatialtf`.
    grid : array (N, H', W', 2)
        (x, y), x across the columns; -1 and 1 are the middles of the first and the last pixel. With 16-bit images it
        may be float32.
    policy, out, stream, workspace_limit, deterministic, allow_tf32, layer
        As in `dnn_spatialtf`.

    Returns
    -------
    array (N, C, H', W') of the dtype, library and layout of `img`; or `out`.

    Raises
    ------
    InvalidProblem, UnsupportedProblem
        As in `dnn_spatialtf`.
    """
    options = policy, workspace_limit, deterministic, allow_tf32, layer
    return _compute("spatialtf_sampler_fwd", (), (img, grid), out, options, stream)


def dnn_spatialtf_sampler_grad(
    img: Any, grid: Any, dout: Any,
    *, policy: str | None = None, out: tuple | None = None, stream: Any = None, workspace_limit: int | None = None,
    deterministic: bool | None = None, allow_tf32: bool | None = None, layer: str | int | None = None,
) -> tuple[Any, Any]:  # fmt: skip
    """Gradients of `dnn_spatialtf_sampler` with respect to its image and grid, as in `dnn_spatialtf_grad`.

    Parameters
    ----------
    img, grid : arrays
        As in `dnn_spatialtf_sampler`.
    dout : array (N, C, H', W')
        The gradient with respect to its result.
    out : tuple of arrays, optional
        Where dimg and dgrid go, None for one to be allocated. They may not overlap an input.
    policy, stream, workspace_limit, deterministic, allow_tf32, layer
        As in `dnn_spatialtf`.

    Returns
    -------
    dimg, dgrid
        Of shape, dtype and layout of `img` and of `grid`.

    Raises
    ------
    InvalidProblem, UnsupportedProblem
        As in `dnn_spatialtf`.
    """
    options = policy, workspace_limit, deterministic, allow_tf32, layer
    return _compute("spatialtf_sampler_bwd", (), (img, grid, dout), out, options, stream)


def _compute(*call: Any) -> Any:
    """Load the dispatcher, which takes a second for Numba, at the first call; it is called directly from then on."""
    global _compute
    from nbdnn.spatialtf_call import compute

    _compute = compute
    return compute(*call)
