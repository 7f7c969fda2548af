"""Arrays whose channels are last in memory, and still on the second axis."""

from __future__ import annotations

import numpy as np


def channels_last(array: np.ndarray) -> np.ndarray:
    return np.moveaxis(np.ascontiguousarray(np.moveaxis(array, 1, -1)), -1, 1)


def is_channels_last(array: np.ndarray) -> bool:
    return np.moveaxis(array, 1, -1).flags.c_contiguous
