"""Edge cases of pooling for the tests, each with its reason."""

from __future__ import annotations

from collections.abc import Iterator

from nbdnn.problem import parse
from nbdnn.problem_pool import MODES, PoolProblem

# The core runs in every dtype and mode, though not in every pair of them.
_MODES = {
    "f32": MODES,
    "f64": ("max", "average_exc_pad"),
    "f16": ("max", "average_inc_pad"),
    "bf16": ("max", "average_exc_pad", "sum"),
}
# dims, window, pad, stride. All in both layouts.
_CORE = (
    "n2c5h9w11:r3s3:p1x1:u2x2",  # windows that overlap, the last of them beyond the end
    "n2c8h8w16:r2s2:p0x0:u2x2",  # windows side by side, whole vectors
    "n1c16h7w12:r3s3:p1x1:u1x1",  # every element in nine windows
    "n1c3d5h6w8:t2r2s2:p0x0x0:u2x2x2",  # three axes, a depth and a row that no window reaches
)
_MORE = (
    "n1c1h1w1:r1s1:p0x0:u1x1",  # one element
    "n2c3h7w5:r2s3:p1x0:u3x2",  # nothing alike on two axes; a stride beyond the window leaves rows without gradient
    "n1c4h5w6:r2s2:p2x2:u2x2",  # windows wholly in the padding
    "n3c7h7w7:r7s7:p0x0:u1x1",  # the image is one window
    "n2c33h12w13:r12s13:p0x0:u12x13",  # the same, longer than a warp
    "n1c2h20w18:r20s18:p0x0:u1x1",  # the same, longer than a block of 256 threads
    "n1c2h21w19:r13s11:p6x5:u4x3",  # large windows that overlap, with counts of their own at every edge
    "n2c4h24w32:r3s3:p1x1:u2x2",  # several tiles, whole vectors of every type
    "n1c40h13w20:r3s3:p0x0:u2x2",  # vectors of channels with a remainder
    "n2c64h9w9:r5s5:p2x2:u1x1",  # more taps than a small window has
    "n1c132h6w11:r3s3:p1x1:u1x1",  # more channels than vectors of them that go over pixels one by one
    "n1c68d5h6w9:t3r3s3:p1x1x1:u2x2x2",  # the same over three axes
    "n1c6h11w70:r1s3:p0x1:u1x1",  # rows: one axis only
    "n1c6h35w3:r3s1:p1x0:u2x1",  # columns
    "n1c6h3w40:r1s16:p0x7:u1x1",  # one axis only, of many elements
    "n1c3h7w50:r3s6:p1x2:u1x1",  # many elements, of which few lie beside the image along its rows
    "n1c9h12w12:r3s3:p1x1:u3x3",  # stride 3: windows side by side, that begin in the padding
    "n2c4d6h7w8:t3r3s3:p1x1x1:u2x2x2",  # windows that overlap on three axes
    "n1c2h5w530:r3s5:p1x2:u1x1",  # rows of several tiles, of windows that reach across
    "n1c8d4h4w8:t3r3s3:p1x1x1:u1x1x1",  # every element in 27 windows
    "n1c5d4h6w5:t4r1s2:p0x0x1:u1x2x1",  # nothing alike on three axes
    "n2c6d4h9w8:t1r3s2:p0x1x0:u1x2x2",  # every depth by itself
    "n1c7d5h3w6:t3r1s1:p1x0x0:u2x1x1",  # depths only
    "n1c8d4h6w6:t1r3s3:p1x1x1:u1x1x1",  # every depth by itself, behind windows wholly in the padding
    "n2c3d3h4w7:t1r1s1:p1x0x0:u1x1x1",  # one element a window, whole planes of them in the padding
    "n1c5h6w7:r1s1:p2x1:u1x1",  # the same over two axes
    "n1c4d5h7w9:t1r2s3:p2x0x1:u3x1x2",  # depths that no window reaches, of windows that begin in the padding
    "n2c6h9w8:r2s3:p0x2:u1x5",  # stride beyond the window on one axis only, overlap on the other
    "n2c3h7w10:r2s2:p0x0:u2x2",  # windows side by side, in rows that no vector divides, one of them without a window
    "n2c4h8w12:r4s4:p0x0:u4x4",  # the same, of two windows a vector in 16 bits and one in 32
    "n1c2d5h6w6:t2r3s2:p0x0x0:u2x3x2",  # the same over three axes
    "n1c3h17w39:r8s8:p0x0:u8x8",  # the same, of a vector's parts from eight others
    "n2c2h13w41:r4s6:p1x2:u3x7",  # elements of a row that no window reaches, far apart
    "n1c9h5w6:r2s2:p1x0:u40x3",  # one row of windows, whose stride is beyond the image
)
_SELDOM = 3  # of so many of these shapes one in float64, whose kernels take longest to compile
# On CPUs either two of these, in turn: both types are computed in float32, by kernels that take seconds to compile.
_PAIRS = (("f32", "max"), ("bf16", "average_inc_pad")), (("bf16", "max"), ("f32", "average_exc_pad"))
_LAYOUTS = {2: ("nchw", "nhwc"), 3: ("ncdhw", "ndhwc")}


def _texts(op: str, kind: str) -> Iterator[str]:
    for shape in _CORE:
        for layout in _LAYOUTS[3 if "t" in shape else 2]:
            for dtype, modes in _MODES.items():
                yield from (f"{op}:{dtype}:{shape}:{mode}:{layout}" for mode in modes)
            yield f"{op}:f32:{shape}:max:{layout}:a4"
            yield f"{op}:bf16:{shape}:average_inc_pad:{layout}:a2"
    for number, shape in enumerate(_MORE):
        for place, layout in enumerate(_LAYOUTS[3 if "t" in shape else 2]):
            pairs = (_PAIRS[(number + place) % 2],) if kind == "cpu" else _PAIRS
            yield from (f"{op}:{dtype}:{shape}:{mode}:{layout}" for pair in pairs for dtype, mode in pair)
            if number % _SELDOM == 0:
                yield f"{op}:f64:{shape}:max:{layout}"


def edges(op: str, kind: str = "cuda") -> list[PoolProblem]:
    """The edge cases of pool_fwd or pool_bwd for a kind of device."""
    return [parse(text) for text in dict.fromkeys(_texts(op, kind))]  # type: ignore[misc]
