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
        ("workspace_limit", 1e6, "workspace_limit is 1000000.0, expected an int$"),
        ("layer", [], r"layer is \[\], expected a name"),
    ],
)
def test_an_option_that_is_none_is_refused(function: str, option: str, value: Any, message: str) -> None:
    with pytest.raises(InvalidProblem, match=message):
        FUNCTIONS[function](**{option: value})


@pytest.mark.parametrize("given", [np.ones(2), np.empty(0), ["max"], {}], ids=["array", "empty", "list", "dict"])
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda given: dnn_conv(X, np.ones((2, 3, 1, 1), "f"), conv_mode=given), "conv_mode is "),
        (lambda given: dnn_conv(X, np.ones((2, 3, 1, 1), "f"), algo=given), "algo "),
        (lambda given: dnn_conv(X, np.ones((2, 3, 1, 1), "f"), precision=given), "precision is "),
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


@pytest.mark.parametrize("shape", [np.array(3), 5, None, [[1], [3]], "1344"])
def test_what_is_no_shape_is_refused_where_one_is_expected(shape: Any) -> None:
    with pytest.raises(InvalidProblem, match=r"img_shp is .*, expected a tuple of ints"):
        dnn_gradinput(np.ones((2, 3, 1, 1), "f"), np.ones((1, 2, 4, 4), "f"), shape)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_numbers_of_numpy_are_options(function: str) -> None:
    FUNCTIONS[function](deterministic=np.True_, allow_tf32=np.bool_(False), workspace_limit=np.int64(1 << 20), layer=3)
