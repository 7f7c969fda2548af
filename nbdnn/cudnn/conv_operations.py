"""Convolution problems as graphs of cuDNN's backend operations.

    no epilogue:  y = alpha * conv(x, w) + beta * y                       one operation, also for both gradients
    epilogue:     y = activation(alpha * conv(x, w) + c * z + bias)       up to four; z is y, with c = beta, or the
                                                                          residual, with c = 1

The second is the pattern for which cuDNN has compiled kernels in both layouts, activation None or relu; one general
engine takes sigmoid. It has no kernels without the bias: where there is none, zeros stand for it. Every other
epilogue exists only as a kernel compiled at run time, for channels-last data and alpha = 1, and is refused. alpha and
beta are part of an operation, so there is a graph for each value.
"""

from __future__ import annotations

from typing import NamedTuple

from nbdnn.cudnn.descriptors import DATA_TYPE, MODE, Backend
from nbdnn.cudnn.enums import Attribute, AttributeType, DescriptorType, PointwiseMode
from nbdnn.problem import ITEMSIZE, Operand, dense_strides
from nbdnn.problem_conv import ConvProblem

# cuDNN 9.19's tanh after a convolution is NaN where its argument is beyond 44.
_ACTIVATION = {"relu": PointwiseMode.RELU_FWD, "sigmoid": PointwiseMode.SIGMOID_FWD}
# Unique ids of the tensors that have memory: 1 up in the order of the problem's operands, and z.
_Z = 9
_FIRST_VIRTUAL = 100


class _Names(NamedTuple):
    """How the attributes of one direction's operation are called, its operands in the problem's order."""

    kind: DescriptorType
    operands: tuple[Attribute, Attribute, Attribute]
    convolution: Attribute
    alpha: Attribute
    beta: Attribute


_NAMES = {
    "conv_fwd": _Names(
        DescriptorType.OPERATION_CONVOLUTION_FORWARD,
        (
            Attribute.OPERATION_CONVOLUTION_FORWARD_X,
            Attribute.OPERATION_CONVOLUTION_FORWARD_W,
            Attribute.OPERATION_CONVOLUTION_FORWARD_Y,
        ),
        Attribute.OPERATION_CONVOLUTION_FORWARD_CONV_DESC,
        Attribute.OPERATION_CONVOLUTION_FORWARD_ALPHA,
        Attribute.OPERATION_CONVOLUTION_FORWARD_BETA,
    ),
    "conv_bwd_data": _Names(
        DescriptorType.OPERATION_CONVOLUTION_BACKWARD_DATA,
        (
            Attribute.OPERATION_CONVOLUTION_BWD_DATA_W,
            Attribute.OPERATION_CONVOLUTION_BWD_DATA_DY,
            Attribute.OPERATION_CONVOLUTION_BWD_DATA_DX,
        ),
        Attribute.OPERATION_CONVOLUTION_BWD_DATA_CONV_DESC,
        Attribute.OPERATION_CONVOLUTION_BWD_DATA_ALPHA,
        Attribute.OPERATION_CONVOLUTION_BWD_DATA_BETA,
    ),
    "conv_bwd_filter": _Names(
        DescriptorType.OPERATION_CONVOLUTION_BACKWARD_FILTER,
        (
            Attribute.OPERATION_CONVOLUTION_BWD_FILTER_X,
            Attribute.OPERATION_CONVOLUTION_BWD_FILTER_DY,
            Attribute.OPERATION_CONVOLUTION_BWD_FILTER_DW,
        ),
        Attribute.OPERATION_CONVOLUTION_BWD_FILTER_CONV_DESC,
        Attribute.OPERATION_CONVOLUTION_BWD_FILTER_ALPHA,
        Attribute.OPERATION_CONVOLUTION_BWD_FILTER_BETA,
    ),
}


class Scalars(NamedTuple):
    """The factors that a graph is built for."""

    alpha: float = 1.0
    beta: float = 0.0


class _Stage(NamedTuple):
    """A pointwise operation on the value so far and, with its factors, on another tensor."""

    mode: PointwiseMode
    other: Backend | None = None
    factors: Scalars | None = None


class Operations(NamedTuple):
    """Operations in order, and for each tensor with memory (unique id, place among the problem's operands).

    The place after the last operand is that of a bias of zeros, which the caller owns.
    """

    operations: list[Backend]
    tensors: list[tuple[int, int]]


def outside_of_the_pattern(problem: ConvProblem) -> str:
    """Why the epilogue of a problem is none of cuDNN's compiled ones; '' if it is."""
    tokens = problem.epilogue
    told = f"the epilogue e:{'+'.join(tokens)} is not fused here: "
    if tokens in ((), ("beta",)):
        return ""
    if "res" in tokens and "beta" in tokens:
        return told + "cuDNN adds one tensor besides the bias, not two"
    if problem.activation not in (None, *_ACTIVATION):
        return told + f"cuDNN has no {problem.activation} after a convolution that is right"
    return ""


def roundings_with_beta(problem: ConvProblem) -> int:
    """How often a 16-bit result is rounded: engines store the convolution before they add beta * out."""
    return 2 if "beta" in problem.epilogue and problem.dtype in ("f16", "bf16") else 1


def operations(problem: ConvProblem, scalars: Scalars) -> Operations:
    """The operations of a problem with these factors."""
    if problem.epilogue in ((), ("beta",)):
        return Operations([_convolution(problem, scalars, None)], [(place + 1, place) for place in range(3)])
    return _fused(problem, scalars)


def splits_odd_channels(problem: ConvProblem) -> bool:
    """Whether it is a filter gradient of 1x1 in 16 bits, channels-last, of channels that are no multiples of eight: of
    13 such problems what splits the sum was wrong in 12, by up to 118 times what is permitted (an H200, cuDNN 9.19)."""
    return (
        problem.op == "conv_bwd_filter"
        and problem.dtype in ("f16", "bf16")
        and (problem.channels_last or problem.y_channels_last)
        and max(*problem.filter, *problem.stride) == 1
        and (problem.c % 8 > 0 or problem.k % 8 > 0)
    )


def zero_bias_bytes(problem: ConvProblem) -> int:
    """The size of the zeros that stand for a bias; 0 where none do."""
    has_own = "bias" in problem.epilogue or problem.epilogue in ((), ("beta",))
    return 0 if has_own else problem.k * ITEMSIZE[problem.dtype]


def _fused(problem: ConvProblem, scalars: Scalars) -> Operations:
    places = {operand.name: place for place, operand in enumerate(problem.operands)}
    y, bias_at, has_residual = problem.operands[2], places.get("bias", len(places)), "residual" in places
    tensors = [(1, 0), (2, 1), (3, 2), (4, bias_at)]
    stages: list[_Stage] = []
    if has_residual or "beta" in problem.epilogue or scalars.alpha != 1.0:
        # Where alpha alone needs the sum, y with the factor 0 stands for z; cuDNN does not read it then.
        factors = Scalars(scalars.alpha, 1.0) if has_residual else scalars
        tensors.append((_Z, places.get("residual", 2)))
        stages.append(_Stage(PointwiseMode.ADD, _tensor(y, _Z, problem), factors))
    one_pixel = (1, problem.k, *(1,) * problem.ndim)
    bias = Operand("bias", one_pixel, dense_strides(one_pixel, problem.y_channels_last), problem.dtype)
    stages.append(_Stage(PointwiseMode.ADD, _tensor(bias, 4, problem)))
    if problem.activation:
        stages.append(_Stage(_ACTIVATION[problem.activation]))
    made, value = [], _tensor(y, _FIRST_VIRTUAL, problem, virtual=True)
    made.append(_convolution(problem, Scalars(), value))
    for index, stage in enumerate(stages):
        last = index == len(stages) - 1
        result = _tensor(y, 3, problem) if last else _tensor(y, _FIRST_VIRTUAL + 1 + index, problem, virtual=True)
        made.append(_pointwise(problem, stage, value, result))
        value = result
    return Operations(made, tensors)


def _tensor(operand: Operand, unique_id: int, problem: ConvProblem, virtual: bool = False) -> Backend:
    """An operand; a virtual one lives in registers, in the compute type."""
    made = Backend(DescriptorType.TENSOR)
    dtype = ("f64" if problem.dtype == "f64" else "f32") if virtual else operand.dtype
    made.set(Attribute.TENSOR_DATA_TYPE, [DATA_TYPE[dtype]], AttributeType.DATA_TYPE)
    made.set(Attribute.TENSOR_DIMENSIONS, operand.shape).set(Attribute.TENSOR_STRIDES, operand.strides)
    made.set(Attribute.TENSOR_UNIQUE_ID, [unique_id]).set(Attribute.TENSOR_BYTE_ALIGNMENT, [problem.align])
    if virtual:
        made.set(Attribute.TENSOR_IS_VIRTUAL, [True], AttributeType.BOOLEAN)
    return made.finalize()


def _convolution(problem: ConvProblem, scalars: Scalars, result: Backend | None) -> Backend:
    """The operation of the problem's direction, into its third operand or `result`."""
    geometry = Backend(DescriptorType.CONVOLUTION)
    geometry.set(Attribute.CONVOLUTION_COMP_TYPE, [DATA_TYPE[problem.compute]], AttributeType.DATA_TYPE)
    geometry.set(Attribute.CONVOLUTION_CONV_MODE, [MODE[problem.mode]], AttributeType.CONVOLUTION_MODE)
    for attribute, values in (
        (Attribute.CONVOLUTION_SPATIAL_DIMS, [problem.ndim]),
        (Attribute.CONVOLUTION_DILATIONS, problem.dilation),
        (Attribute.CONVOLUTION_FILTER_STRIDES, problem.stride),
        (Attribute.CONVOLUTION_PRE_PADDINGS, [before for before, _ in problem.pad]),
        (Attribute.CONVOLUTION_POST_PADDINGS, [after for _, after in problem.pad]),
    ):
        geometry.set(attribute, values)
    names = _NAMES[problem.op]
    made = Backend(names.kind).link(names.convolution, geometry.finalize())
    for place, attribute in enumerate(names.operands):
        is_result = result is not None and place == 2
        operand = result if is_result else _tensor(problem.operands[place], place + 1, problem)
        assert operand is not None
        made.link(attribute, operand)
    kind = _scalar_type(problem)
    return made.set(names.alpha, [scalars.alpha], kind).set(names.beta, [scalars.beta], kind).finalize()


def _pointwise(problem: ConvProblem, stage: _Stage, value: Backend, result: Backend) -> Backend:
    """result = mode(alpha * value, beta * other)."""
    mode, other, factors = stage
    made = Backend(DescriptorType.POINTWISE).set(Attribute.POINTWISE_MODE, [mode], AttributeType.POINTWISE_MODE)
    precision = "f64" if problem.dtype == "f64" else "f32"
    made.set(Attribute.POINTWISE_MATH_PREC, [DATA_TYPE[precision]], AttributeType.DATA_TYPE)
    operation = Backend(DescriptorType.OPERATION_POINTWISE)
    operation.link(Attribute.OPERATION_POINTWISE_PW_DESCRIPTOR, made.finalize())
    operation.link(Attribute.OPERATION_POINTWISE_XDESC, value).link(Attribute.OPERATION_POINTWISE_YDESC, result)
    if other:
        operation.link(Attribute.OPERATION_POINTWISE_BDESC, other)
    if factors:
        kind = _scalar_type(problem)
        operation.set(Attribute.OPERATION_POINTWISE_ALPHA1, [factors.alpha], kind)
        operation.set(Attribute.OPERATION_POINTWISE_ALPHA2, [factors.beta], kind)
    return operation.finalize()


def _scalar_type(problem: ConvProblem) -> AttributeType:
    return AttributeType.DOUBLE if problem.dtype == "f64" else AttributeType.FLOAT
