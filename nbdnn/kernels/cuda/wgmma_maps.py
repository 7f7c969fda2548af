"""What TMA copies of a convolution: the pixels that windows reach in a channels-last image, and the filter.

A window's first tap lies, over all outputs, from `lower` before an image's border to `upper` behind the last pixel;
TMA walks these places row by row, image by image, and moves each by the tap's distance.
"""

from __future__ import annotations

from math import prod

from nbdnn.kernels.cuda.tensor_map import TensorMap, Window
from nbdnn.kernels.cuda.turn_channels import is_planar
from nbdnn.kernels.cuda.wgmma_pipeline import LINE_BYTES, LINE_ELEMS
from nbdnn.problem import ITEMSIZE
from nbdnn.problem_conv import ConvProblem

# What a map can say, by spatial axes: places from the border (least, most), and how far the last tap lies; steps.
_PLACES = {2: (-128, 127), 3: (-16, 15)}
_MOST_REACH = {2: 255, 3: 31}
_MOST_STEP = 8


def source_shape(problem: ConvProblem) -> tuple[int, ...]:
    """Of what windows gather: x, or dy of a bwd_data."""
    return problem.y_shape if problem.op == "conv_bwd_data" else problem.x_shape


def window(problem: ConvProblem) -> Window:
    """The places of the first taps, the innermost axis first. A bwd_data has its taps in reverse order."""
    lower, upper = [], []
    axes = zip(problem.pad, problem.filter, problem.dilation, problem.stride, strict=True)
    data = problem.op == "conv_bwd_data"
    targets = problem.spatial if data else problem.out_spatial
    for axis, ((before, _), taps, dilation, stride) in enumerate(axes):
        start = before - (taps - 1) * dilation if data else -before
        lower.append(start)
        upper.append(start + (targets[axis] - 1) * stride - (source_shape(problem)[2 + axis] - 1))
    return Window(tuple(lower[::-1]), tuple(upper[::-1]), tuple(problem.stride[::-1]))


def refusal(problem: ConvProblem) -> str:
    """The number that no map can say, or ''."""
    least, most = _PLACES[problem.ndim]
    reach = _MOST_REACH[problem.ndim]
    places = window(problem)
    for place in (*places.lower, *places.upper):
        if not least <= place <= most:
            return f"windows begin {place} from a border, {least} to {most} are known"
    for taps, dilation in zip(problem.filter, problem.dilation, strict=True):
        if (taps - 1) * dilation > reach:
            return f"the last tap lies {(taps - 1) * dilation} from the first, above {reach}"
    return f"stride {problem.stride} is above {_MOST_STEP}" if max(problem.stride) > _MOST_STEP else ""


def image_map(problem: ConvProblem, place: int, pixels: int) -> TensorMap:
    """Of what windows gather: a copy takes a line of channels of so many pixels."""
    n, channels, *extents = source_shape(problem)
    shape, box = (channels, *extents[::-1], n), (line_elems(problem.dtype), pixels)
    return _map(problem, place, shape, box, seen=window(problem))


def line_elems(dtype: str) -> int:
    """Channels in a line of shared memory."""
    return LINE_BYTES // ITEMSIZE[dtype]


def rows_map(problem: ConvProblem, place: int, line: int, rows: int) -> TensorMap:
    """Of what windows gather, in two dimensions: a copy takes a line of channels of so many rows of `line` pixels."""
    n, channels, *extents = source_shape(problem)
    shape = (channels, *extents[::-1], n)
    box = (line_elems(problem.dtype), line, rows, 1)
    return _map(problem, place, shape, box)


def filter_map(problem: ConvProblem, place: int, filters: int) -> TensorMap:
    """Of the filter [k][tap][c]: a copy takes a line of channels of one tap of so many filters."""
    shape = (problem.w_shape[1], prod(problem.filter), problem.k)
    box = (line_elems(problem.dtype), 1, filters)
    return _map(problem, place, shape, box)


def filters_last(problem: ConvProblem) -> bool:
    """Whether the filter is turned so that what is summed comes last: the instructions of TF32 know no other factor."""
    return problem.op == "conv_bwd_data" and problem.dtype == "f32"


def filters_last_map(problem: ConvProblem, place: int, channels: int) -> TensorMap:
    """Of the filter with its filters turned last: a copy takes a line of filters of one tap of so many channels."""
    shape = (problem.k, prod(problem.filter), problem.w_shape[1])
    each, taps_first = ITEMSIZE[problem.dtype], not is_planar(problem.operands[0])
    tap, channel = (shape[2], 1) if taps_first else (1, shape[1])
    strides = (each * problem.k * tap, each * problem.k * channel)
    return _map(problem, place, shape, (line_elems(problem.dtype), 1, channels), strides)


def gradient_map(problem: ConvProblem, place: int) -> TensorMap:
    """Of dy as [pixel][k]: a copy takes 64 channels of 64 pixels."""
    shape = (problem.k, problem.n * prod(problem.out_spatial))
    return _map(problem, place, shape, (LINE_ELEMS, LINE_ELEMS))


def _map(
    problem: ConvProblem,
    place: int,
    shape: tuple[int, ...],
    box: tuple[int, ...],
    strides_bytes: tuple[int, ...] = (),
    seen: Window | None = None,
) -> TensorMap:
    """Of a tensor that lies as its shape says, unless strides are given."""
    dense = tuple(ITEMSIZE[problem.dtype] * prod(shape[:axis]) for axis in range(1, len(shape)))
    rounded = problem.dtype == "f32"
    return TensorMap(place, problem.dtype, shape, strides_bytes or dense, box, seen, rounded=rounded)
