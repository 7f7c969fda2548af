"""Descriptors say what problems say, and go with their owners."""

from __future__ import annotations

import gc
from collections.abc import Callable
from ctypes import c_int, c_void_p
from typing import Any

import pytest
from edge_cases import edges

from nbdnn.cudnn import descriptors
from nbdnn.cudnn.api import StatusError
from nbdnn.cudnn.descriptors import Backend, Legacy, conv_descriptors, convolution, filter_, ints, tensor
from nbdnn.cudnn.enums import Attribute, AttributeType, DescriptorType, TensorFormat
from nbdnn.cudnn.library import library
from nbdnn.problem import parse
from nbdnn.problem_conv import CONV_OPS, ConvProblem

EVEN = [p for p in edges("conv_fwd", "cpu") if all(before == after for before, after in p.pad) and p.n * p.c * p.k]


def output_shape(problem: ConvProblem) -> tuple[int, ...]:
    """The shape of y as cuDNN computes it from the descriptors of a forward problem."""
    x, w, _ = problem.operands[:3]
    layout = TensorFormat.NHWC if problem.w_channels_last else TensorFormat.NCHW
    described = convolution(problem), tensor(x), filter_(w, layout)
    shape = ints([0] * len(x.shape))
    addresses = [c_void_p(each.address) for each in described]
    assert library().cdll.cudnnGetConvolutionNdForwardOutputDim(*addresses, c_int(len(shape)), shape) == 0
    return tuple(shape)


@pytest.mark.parametrize("problem", EVEN, ids=str)
def test_output_shapes_agree(problem: ConvProblem) -> None:
    assert output_shape(problem) == problem.y_shape


@pytest.mark.parametrize("op", CONV_OPS)
@pytest.mark.parametrize("layout", ["ncdhw", "ndhwc"])
def test_three_spatial_axes_in_each_direction(op: str, layout: str) -> None:
    problem = parse(f"{op}:bf16:n2c6d5h6w7:k4t3r1s2:p1x0x1:u2x1x1:d1x1x2:g2:conv:{layout}")
    made = conv_descriptors(problem)
    assert len({each.address for each in (*made.operands, made.convolution)} - {0}) == 4


def test_a_stride_of_zero_is_refused_in_cudnns_words() -> None:
    problem = parse("conv_fwd:f32:n1c2h8w8:k3r3s3:p1x1:u1x1:d1x1:g1:cross:nchw")
    object.__setattr__(problem, "stride", (0, 1))
    with pytest.raises(StatusError, match=r"cudnnSetConvolutionNdDescriptor -> CUDNN_STATUS_BAD_PARAM\w* \(\d+\): \S"):
        convolution(problem)


@pytest.fixture
def destroyed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """(function, address) of what owners of this test destroy."""
    calls: list[tuple[str, int]] = []
    real = descriptors.function

    def recording(name: str) -> Callable[[int], Any]:
        return lambda address: calls.append((name, address)) or real(name)(address)

    monkeypatch.setattr(descriptors, "function", recording)
    return calls


@pytest.mark.parametrize("kind", ["Tensor", "Filter", "Convolution", "Backend"])
def test_an_owner_destroys_its_descriptor_once(kind: str, destroyed: list[tuple[str, int]]) -> None:
    made = Backend(DescriptorType.TENSOR) if kind == "Backend" else Legacy(kind)
    address = made.address
    assert address and not destroyed
    del made
    gc.collect()
    name = "cudnnBackendDestroyDescriptor" if kind == "Backend" else f"cudnnDestroy{kind}Descriptor"
    assert destroyed == [(name, address)]


def test_what_a_descriptor_is_made_of_lives_as_long(destroyed: list[tuple[str, int]]) -> None:
    part = Backend(DescriptorType.TENSOR).set(Attribute.TENSOR_DATA_TYPE, [0], AttributeType.DATA_TYPE)
    part.set(Attribute.TENSOR_DIMENSIONS, (2, 3, 5, 7)).set(Attribute.TENSOR_STRIDES, (105, 35, 7, 1))
    part.set(Attribute.TENSOR_UNIQUE_ID, [4]).set(Attribute.TENSOR_BYTE_ALIGNMENT, [4]).finalize()
    owner = Backend(DescriptorType.OPERATION_POINTWISE).link(Attribute.OPERATION_POINTWISE_XDESC, part)
    addresses = {part.address, owner.address}
    del part
    gc.collect()
    assert not destroyed
    del owner
    gc.collect()
    assert {address for _, address in destroyed} == addresses


def test_attributes_come_back_as_they_were_set() -> None:
    made = Backend(DescriptorType.TENSOR)
    made.set(Attribute.TENSOR_DATA_TYPE, [0], AttributeType.DATA_TYPE)
    made.set(Attribute.TENSOR_DIMENSIONS, (2, 3, 5, 7)).set(Attribute.TENSOR_STRIDES, (105, 1, 21, 3))
    made.set(Attribute.TENSOR_UNIQUE_ID, [4]).set(Attribute.TENSOR_BYTE_ALIGNMENT, [4]).finalize()
    assert made.get(Attribute.TENSOR_DIMENSIONS, AttributeType.INT64, 8) == [2, 3, 5, 7]
    assert made.get(Attribute.TENSOR_STRIDES, AttributeType.INT64, 8) == [105, 1, 21, 3]
    with pytest.raises(StatusError, match="cudnnBackendSetAttribute -> CUDNN_STATUS_"):
        made.set(Attribute.TENSOR_UNIQUE_ID, [5])  # finalized
