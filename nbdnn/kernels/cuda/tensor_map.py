"""What the tensor memory accelerator is told of a tensor: everything but its address when a kernel is planned.

A map goes to a kernel by value, for one address. Calls mostly repeat, so a map that was made is kept.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import NamedTuple

from nbdnn import driver

MAP_BYTES = 128
_KNOWN = 256
# 'tf32' is float32 for matrix units, which would cut what is not rounded on its way.
_DATA_TYPE = {"f16": "FLOAT16", "bf16": "BFLOAT16", "f32": "FLOAT32", "tf32": "TFLOAT32"}


class Window(NamedTuple):
    """How pixels are met by windows: on each spatial axis, innermost first, from `lower` to the extent plus `upper`,
    in steps."""

    lower: tuple[int, ...]
    upper: tuple[int, ...]
    steps: tuple[int, ...]


class TensorMap(NamedTuple):
    """A dense tensor whose innermost axis comes first, and what one copy takes of it.

    place: where its address comes from, as a launch's `pointers` say. strides_bytes: of all axes but the first. box:
    elements on each axis; with a window (elements of the innermost axis, pixels). The innermost has 128 bytes, swizzled
    in shared memory, unless the copy is plain: then a multiple of 16 bytes, packed. rounded: float32 becomes TF32.
    """

    place: int
    dtype: str
    extents: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    box: tuple[int, ...]
    window: Window | None = None
    plain: bool = False
    rounded: bool = False


@lru_cache(_KNOWN)
def encoded(tensor: TensorMap, address: int) -> bytes:
    """The map of the tensor at that address, as a kernel's parameter."""
    cuda = driver.bindings()
    word, short = cuda.cuuint64_t, cuda.cuuint32_t
    rank, data_type = len(tensor.extents), _DATA_TYPE["tf32" if tensor.rounded else tensor.dtype]
    common = (
        getattr(cuda.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{data_type}"),
        rank,
        address,
        [word(extent) for extent in tensor.extents],
        [word(stride) for stride in tensor.strides_bytes],
    )
    kept = (
        cuda.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        getattr(cuda.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{'NONE' if tensor.plain else '128B'}"),
        # 256 bytes took 1 to 9 % longer in ten of eleven 1x1 layers by `conv_wgmma_boxes.py` (H200); none as long.
        cuda.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
        cuda.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if tensor.window is None:
        box, steps = [short(elems) for elems in tensor.box], [short(1)] * rank
        made = driver.call("cuTensorMapEncodeTiled", *common, box, steps, *kept)
    else:
        channels, pixels = tensor.box
        lower, upper, apart = tensor.window
        every = [short(step) for step in (1, *apart, 1)]
        made = driver.call("cuTensorMapEncodeIm2col", *common, list(lower), list(upper), channels, pixels, every, *kept)
    return struct.pack("16Q", *(int(part) for part in made.opaque))
