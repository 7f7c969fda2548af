"""What every function takes besides its own arguments, said wrongly: one error, whichever the function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from nbdnn import (
    InvalidProblem,
    RNNBlock,
    dnn_batch_normalization_train,
    dnn_conv,
    dnn_dropout,
    dnn_gradinput,
    dnn_pool,
    dnn_softmax,
    dnn_spatialtf,
)

X, ROW = np.ones((1, 3, 4, 4), "f"), np.ones((1, 3, 1, 1), "f")
BLOCK = RNNBlock("float32", 2, 1, "gru")
FUNCTIONS: dict[str, Callable] = {
    "conv": lambda **options: dnn_conv(X, X, **options),
    "pool": lambda **options: dnn_pool(X, 2, **options),
    "softmax": lambda **options: dnn_softmax(X, **options),
    "batchnorm": lambda **options: dnn_batch_normalization_train(X, ROW, ROW, "spatial", **options),
    "dropout": lambda **options: dnn_dropout(X, 0.5, **options),
    "spatialtf": lambda **options: dnn_spatialtf(X, np.ones((1, 2, 3), "f"), **options),
    "rnn": lambda **options: BLOCK.apply(np.ones(BLOCK.get_param_size([4, 4]), "f"), X[0], **options),
}


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("deterministic", "no", "deterministic is 'no', expected True, False or None"),
        ("deterministic", np.ones(2), r"deterministic is array\(\[1., 1.\]\), expected True, False or None"),
        ("allow_tf32", 2, "allow_tf32 is 2, expected True, False or None"),
        ("workspace_limit", -1, "workspace_limit is -1: -1 is less than 0"),
        ("workspace_limit", "a", "workspace_limit is 'a', expected an int$"),
        ("workspace_limit", 1.5, "workspace_limit is 1.5, expected an int$"),
        ("layer", [], r"layer is \[\], expected a name"),
        ("stream", "abc", "stream is 'abc', expected a handle or an object with __cuda_stream__"),
    ],
)
def test_an_option_that_is_none_is_refused(function: str, option: str, value: Any, message: str) -> None:
    with pytest.raises(InvalidProblem, match=message):
        FUNCTIONS[function](**{option: value})


@pytest.mark.parametrize("given", [np.ones(2), np.empty(0), ["max"], {}], ids=["array", "empty", "list", "dict"])
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda given: dnn_conv(X, np.ones((2, 3, 1, 1), "f"), conv_mode=given), "conv_mode .* is not one of"),
        (lambda given: dnn_conv(X, np.ones((2, 3, 1, 1), "f"), algo=given), "algo "),
        (lambda given: dnn_conv(X, np.ones((2, 3, 1, 1), "f"), precision=given), "precision .* is not one of"),
        (lambda given: dnn_pool(X, 2, mode=given), "mode .* is not one of"),
        (lambda given: dnn_pool(X, 2, policy=given), "policy .* is unknown"),
        (lambda given: dnn_softmax(X, mode=given), "mode .* is not one of"),
        (lambda given: dnn_batch_normalization_train(X, ROW, ROW, mode=given), "mode .* is not one of"),
        (lambda given: RNNBlock("float32", 4, 1, given), "rnn_mode .* is not one of"),
    ],
    ids=["conv_mode", "algo", "precision", "pool", "policy", "softmax", "bn", "rnn"],
)
def test_what_is_no_name_is_refused_where_one_is_expected(call: Callable, message: str, given: Any) -> None:
    with pytest.raises(InvalidProblem, match=message):
        call(given)


@pytest.mark.parametrize("given", ["2", b"2", [2], None, 2j])
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda given: dnn_conv(X, X, alpha=given), "alpha is .*, expected a number"),
        (lambda given: dnn_conv(X, X, beta=given), "beta is .*, expected a number"),
        (lambda given: dnn_dropout(X, given), "dropout is .*, expected a probability"),
        (
            lambda given: dnn_batch_normalization_train(X, ROW, ROW, "spatial", given),
            "epsilon is .*, expected a number",
        ),
        (lambda given: dnn_spatialtf(X, np.ones((1, 2, 3), "f"), given), "scale_width is .*, expected a number"),
    ],
    ids=["alpha", "beta", "dropout", "epsilon", "scale"],
)
def test_what_is_no_number_is_refused_where_one_is_expected(call: Callable, message: str, given: Any) -> None:
    with pytest.raises(InvalidProblem, match=message):
        call(given)


class Interface:
    """An array that says of itself what it is given, on a GPU."""

    def __init__(self, facts: Any) -> None:
        self.__cuda_array_interface__ = facts


@pytest.mark.parametrize(
    ("array", "says"),
    [
        (np.ndarray, "ndarray is a class, not an array"),
        (Interface(None), "a Interface whose __cuda_array_interface__ is None"),
        (Interface({"shape": (2,), "typestr": "<f4"}), "a Interface whose __cuda_array_interface__ is {'shape'"),
        (Interface({"data": 7, "shape": (2,), "typestr": "<f4"}), "a Interface whose __cuda_array_interface__ is "),
        (Interface({"data": (0, False), "shape": (2,), "typestr": "<f4", "mask": X}), "a Interface with a mask"),
    ],
)
def test_what_is_no_array_is_refused_by_its_name(array: Any, says: str) -> None:
    with pytest.raises(InvalidProblem, match=f"img: {says}"):
        dnn_pool(array, 2)
    with pytest.raises(InvalidProblem, match=f"x: {says}"):
        dnn_dropout(array, 0.5)
    with pytest.raises(InvalidProblem, match=f"state: {says}"):
        dnn_dropout(X, 0.5, state=array)


@pytest.mark.parametrize("shape", [np.array(3), 5, None, [[1], [3]], "1344"])
def test_what_is_no_shape_is_refused_where_one_is_expected(shape: Any) -> None:
    with pytest.raises(InvalidProblem, match=r"img_shp is .*, expected a tuple of ints"):
        dnn_gradinput(np.ones((2, 3, 1, 1), "f"), np.ones((1, 2, 4, 4), "f"), shape)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_numbers_of_numpy_are_options(function: str) -> None:
    FUNCTIONS[function](deterministic=np.True_, allow_tf32=np.bool_(False), workspace_limit=np.int64(1 << 20), layer=3)
