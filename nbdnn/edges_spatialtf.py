"""Edge cases of the spatial transformer for the tests, each with its reason."""

from __future__ import annotations

from collections.abc import Iterator

from nbdnn.problem import parse
from nbdnn.problem_spatialtf import SpatialtfProblem

# dims, output. All in both layouts; the core in every dtype.
_CORE = (
    "n2c3h9w11:o10x13",  # few channels, nothing alike on two axes
    "n3c16h8w16:o8x16",  # whole vectors, output as large as the image
    "n1c33h12w7:o5x40",  # one image: work is shared by its channels; rows longer than a vector
)
_MORE = (
    "n1c1h1w1:o1x1",  # one pixel, one output: no axis has an extent to interpolate along
    "n2c5h1w9:o4x6",  # an image of one row
    "n2c2h7w1:o3x5",  # an image of one column
    "n1c2h3w2:o4x5",  # rows of two pixels, each of which has only the other one beside it
    "n2c4h6w5:o1x7",  # one row of outputs, which lies in the middle
    "n2c4h6w5:o7x1",  # one column
    "n2c8h5w6:o31x29",  # enlarged: many outputs between the same pixels
    "n2c6h40w36:o7x5",  # made smaller: most pixels have no output near them
    "n40c2h6w7:o6x9",  # more images than threads
    "n2c65h6w5:o6x5",  # a block of channels and one more
    "n1c4h33w70:o35x130",  # several tiles of outputs in both directions
    "n1c3h130w140:o9x21",  # outputs that lie too far apart for what is between them to be held at once
)
_GRIDS = ("n1:o1x1", "n3:o1x7", "n2:o5x1", "n2:o10x13", "n5:o33x70", "n1:o64x257", "n9:o257x512")
_LAYOUTS = ("nchw", "nhwc")
_KINDS = {"f32": ("", "a4"), "f64": ("",), "f16": ("", "pf32"), "bf16": ("", "pf32", "a2")}


def _texts(op: str) -> Iterator[str]:
    if op.startswith("spatialtf_grid"):
        for shape in _GRIDS:
            yield from (f"{op}:{dtype}:{shape}" for dtype in _KINDS)
            yield f"{op}:f32:{shape}:a4"
            yield f"{op}:bf16:{shape}:a2"
        return
    for layout in _LAYOUTS:
        for shape in _CORE:
            for dtype, ends in _KINDS.items():
                yield from (":".join(filter(None, (op, dtype, shape, layout, end))) for end in ends)
        for shape in _MORE:
            yield from (f"{op}:f32:{shape}:{layout}", f"{op}:bf16:{shape}:{layout}:pf32")


def edges(op: str) -> list[SpatialtfProblem]:
    """The edge cases of an op of the family."""
    return [parse(text) for text in dict.fromkeys(_texts(op))]  # type: ignore[misc]
