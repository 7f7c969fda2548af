"""Extents and strides of two or three spatial axes, as kernels of either device see them: always three."""

from __future__ import annotations

from nbdnn.problem import dense_strides


def spatial3(extents: tuple[int, ...], fill: int = 1) -> tuple[int, ...]:
    """Extents, steps or pads of three axes: a 2-D problem gets a leading depth of `fill`."""
    return (fill,) * (3 - len(extents)) + tuple(extents)


def with_depth(strides: tuple[int, ...], lead: int) -> tuple[int, ...]:
    """Strides with one for the depth, behind the first `lead`: 0 in 2-D."""
    return strides if len(strides) == lead + 3 else (*strides[:lead], 0, *strides[lead:])


def tensor_strides(shape: tuple[int, ...], channels_last: bool) -> tuple[int, ...]:
    """(n, c, d, h, w) strides of a dense tensor of 2 or 3 spatial axes."""
    return with_depth(dense_strides(shape, channels_last), 2)
