"""Dropout with a mask of bits that is the same on every device, and its gradient."""

from __future__ import annotations

from typing import Any


def dnn_dropout(
    x: Any, dropout: float = 0.0, seed: int = 4242, state: Any = None,
    *, policy: str | None = None, out: tuple | None = None, stream: Any = None, workspace_limit: int | None = None,
    deterministic: bool | None = None, allow_tf32: bool | None = None, layer: str | int | None = None,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """Set elements of `x` to zero with probability `dropout`, and scale the others so that the mean stays.

    ::

        y[i] = x[i] * mask[i] / (1 - dropout)
        mask[i] = word[i] >= round(dropout * 2**32)

    where ``word[i]`` is word i % 4 of block ``offset + i // 4`` of Philox4x32-10 with the seed as its key, and i counts
    in memory order: the same mask on every device and provider, for every dtype.

    Parameters
    ----------
    x : array
        float16, bfloat16, float32 or float64 of any shape; contiguous or channels-last (of other strides a contiguous
        copy is made first, and its order counts).
    dropout : float
        Probability of a zero, in [0, 1).
    seed : int
        64 bits for a new generator; ignored with `state`. Without `state` every call with one seed draws the same mask.
    state : array (2,) of int64, optional
        (seed, offset) of x's library, on its device, from an earlier call. It advances by ceil(x.size / 4) in place, on
        the device: a captured graph draws a new mask at each replay. JAX gets a new one at each call, of NumPy where
        its flag jax_enable_x64 is not set, since it has no int64 then.
    out : tuple (y, mask, state), optional
        Where the results go, None where they may be allocated; of `state` only None or the given one.
    policy, stream, workspace_limit, deterministic, allow_tf32, layer
        As in `dnn_softmax`.

    Returns
    -------
    y : array of the shape, dtype, library and layout of `x`
    mask : array (ceil(x.size / 8),) of uint8
        Bit i % 8, from the lowest, of byte i // 8 says whether element i was kept; what is left of the last byte is 0.
    state : array (2,) of int64

    Raises
    ------
    InvalidProblem
        A probability outside [0, 1), a state or an output of another shape (a ValueError); InvalidType for dtypes.

    Notes
    -----
    Making a state waits for the device; a call that is given one does not. Thread-safe.
    """
    options = policy, workspace_limit, deterministic, allow_tf32, layer
    return _compute("forward", (x, seed, state, out), dropout, options, stream)


def dnn_dropout_grad(
    dy: Any, mask: Any, dropout: float,
    *, policy: str | None = None, out: Any = None, stream: Any = None, workspace_limit: int | None = None,
    deterministic: bool | None = None, allow_tf32: bool | None = None, layer: str | int | None = None,
) -> Any:  # fmt: skip
    """Gradient of `dnn_dropout` with respect to its input: ``dx[i] = dy[i] * mask[i] / (1 - dropout)``.

    Parameters
    ----------
    dy : array
        Gradient with respect to y, in the same layout as y: the mask goes by the order in memory.
    mask : array (ceil(dy.size / 8),) of uint8
        Of the forward.
    dropout, policy, out, stream, workspace_limit, deterministic, allow_tf32, layer
        As in `dnn_dropout`; `out` is one array.

    Returns
    -------
    array of the shape, dtype, library and layout of `dy`; or `out`.

    Raises
    ------
    InvalidProblem
        As in `dnn_dropout`; also where the mask has not a bit for each element.
    """
    options = policy, workspace_limit, deterministic, allow_tf32, layer
    return _compute("backward", (dy, mask, out), dropout, options, stream)


def _compute(*call: Any) -> Any:
    """Load the dispatcher, which takes a second for Numba, at the first call; it is called directly from then on."""
    global _compute
    from nbdnn.dropout_call import compute

    _compute = compute
    return compute(*call)
