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


@pytest.mark.parametrize("function", FUNCTIONS)
def test_numbers_of_numpy_are_options(function: str) -> None:
    FUNCTIONS[function](deterministic=np.True_, allow_tf32=np.bool_(False), workspace_limit=np.int64(1 << 20), layer=3)
