"""Which strip of a lowered image an index is: some rows of one depth of one group of one image."""

from __future__ import annotations

from functools import cache

import numpy as np
from numba import njit

from nbdnn.kernels.cpu.compile import DEVICE
from nbdnn.kernels.cpu.vector import struct


@cache
def strip_address(parameters: np.dtype):
    """Compiled-in function: (image, group, depth, first row, rows, address of the lowered strip) of a strip."""
    params_at = struct(parameters)

    @njit(**DEVICE)
    def locate(ctx, index, workspace, worker):
        f = params_at(ctx)
        first_row = index % f.strips * f.strip_rows
        rest = index // f.strips
        depth, rest = rest % f.count_d, rest // f.count_d
        low = workspace + f.strip_offset + (index if f.shared else worker) * f.strip_bytes
        return rest // f.groups, rest % f.groups, depth, first_row, min(f.strip_rows, f.count_h - first_row), low

    return locate
