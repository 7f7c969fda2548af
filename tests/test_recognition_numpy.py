"""NumPy's arrays are recognised by their C structs: what differs is noticed, and nothing else is read."""

from __future__ import annotations

import pickle
import weakref
from typing import Any

import numpy as np
import pytest

from nbdnn import dnn_batch_normalization_train, dnn_conv, dnn_pool_grad, dnn_softmax
from nbdnn.array_numpy import NumPy
from nbdnn.dispatch import dispatcher
from nbdnn.errors import InvalidProblem
from nbdnn.kernels.cpu import ndarrays

SHAPE = 2, 4, 6, 6
_RNG = np.random.default_rng(0)


def _random(*shape: int) -> np.ndarray:
    return _RNG.standard_normal(shape, np.float32)


def _constant(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


class _Named(np.ndarray):
    """A subclass, which may say anything of itself."""


@pytest.fixture(params=["struct", "facts"])
def recogniser(request: pytest.FixtureRequest) -> Any:
    return ndarrays.recogniser if request.param == "struct" else NumPy().recogniser


def test_what_differs_is_noticed(recogniser: Any) -> None:
    x, y, other = _random(*SHAPE), _random(*SHAPE), _random(*SHAPE)
    recognise = recogniser((x, None, y))
    assert recognise((x, None, y)) == [x.ctypes.data, 0, y.ctypes.data]
    assert recognise((other, None, x)) == [other.ctypes.data, 0, x.ctypes.data]
    assert recognise((x, None, x)) == [x.ctypes.data, 0, x.ctypes.data]
    unlike: dict[str, Any] = {
        "shape": _random(2, 4, 6, 7),
        "first extent": _random(3, 4, 6, 6),
        "rank": _random(2, 4, 36),
        "no axes": np.zeros((), np.float32),
        "scalar": np.float32(1),
        "strides": other.transpose(0, 1, 3, 2),
        "backwards": other[:, :, ::-1],
        "dtype": other.astype(np.float64),
        "bits": other.view(np.int32),
        "byte order": other.astype(other.dtype.newbyteorder()),
        "constancy": _constant(_random(*SHAPE)),
        "type": [[1.0]],
        "absence": None,
    }
    for name, different in unlike.items():
        assert recognise((different, None, y)) is None, name
        assert recognise((x, None, different)) is None, name
    assert recognise((x, other, y)) is None
    assert recognise((x, None)) is None
    assert recognise((x, None, y, None)) is None
    assert recognise((other, None, y)) is not None


def test_what_may_be_written_is_not_what_is_constant(recogniser: Any) -> None:
    recognise = recogniser((_constant(_random(*SHAPE)), None))
    x = _random(*SHAPE)
    assert recognise((x, None)) is None
    assert recognise((_constant(x), None)) == [x.ctypes.data, 0]


def test_arrays_whose_structs_do_not_tell() -> None:
    x = _random(*SHAPE)
    assert ndarrays.recogniser((x.view(_Named), None)) is None
    assert ndarrays.recogniser((x, [1.0])) is None
    assert ndarrays.recogniser((x,) * (ndarrays.MOST_ARRAYS + 1)) is None
    assert ndarrays.recogniser((np.zeros((1,) * (ndarrays.MOST_AXES + 1)),)) is None
    recognise = ndarrays.recogniser((x,) * ndarrays.MOST_ARRAYS)
    assert recognise is not None
    assert recognise((x,) * ndarrays.MOST_ARRAYS) == [x.ctypes.data] * ndarrays.MOST_ARRAYS
    assert recognise([x] * ndarrays.MOST_ARRAYS) is None, "a list lies otherwise than a tuple"
    assert recognise((x.view(_Named),) * ndarrays.MOST_ARRAYS) is None


def test_dtypes_that_are_made_anew_leave_others_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    """As pickle makes them, of which each array has one of its own."""
    x = _random(2, 4, 6, 5)
    for _ in range(2 * dispatcher._MOST_ALIKE):
        loaded = pickle.loads(pickle.dumps(x))
        assert loaded.dtype is not x.dtype and ndarrays.recogniser((loaded,)) is None
        np.testing.assert_array_equal(dnn_softmax(loaded), dnn_softmax(x))
    with monkeypatch.context() as patched:
        patched.setattr(NumPy, "read_all", lambda *given: pytest.fail("an array was looked up"))
        dnn_softmax(pickle.loads(pickle.dumps(x)))
        dnn_softmax(x)


def test_arrays_whose_shape_is_no_tuple_are_not_kept() -> None:
    """As of libraries whose arrays have a method for it."""

    class Array:
        def shape(self) -> tuple[int, ...]:
            return SHAPE

    context = dispatcher.context()
    arrays = [Array() for _ in range(3)]
    for array in arrays:
        context.recognise(("nothing",), (array, None), NumPy(), None)
    seen = [weakref.ref(array) for array in arrays]
    del arrays, array
    assert [each() for each in seen] == [None] * 3


def test_the_layout_is_this_interpreters() -> None:
    assert ndarrays._is_laid_out_as_here()


def test_a_recognised_call_reads_no_array(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = _random(*SHAPE), _random(3, 4, 1, 1)
    gamma, beta = (_random(1, 4, 1, 1) for _ in range(2))
    calls: list[Any] = [
        lambda x: dnn_softmax(x),
        lambda x: dnn_softmax(x, out=np.empty_like(x)),
        lambda x: dnn_conv(x, w),
        lambda x: dnn_pool_grad(x, x, x, (1, 1)),
        lambda x: dnn_batch_normalization_train(x, gamma, beta, "spatial")[0],
    ]
    expected = [call(x) for call in calls]
    other = x.copy()
    with monkeypatch.context() as patched:
        for name in ("read", "read_all"):
            patched.setattr(NumPy, name, lambda *given: pytest.fail("an array was read"))
        again = [call(other) for call in calls]
    for one, two in zip(expected, again, strict=True):
        np.testing.assert_array_equal(one, two)


def test_calls_in_turn_have_their_own_results() -> None:
    """More kinds of arrays than are known, one shape among them in several."""
    every = [
        _random(*SHAPE),
        _random(2, 6, 6, 4).transpose(0, 3, 1, 2),
        _random(3, 4, 6, 6),
        _constant(_random(*SHAPE)),
    ]
    every += [each.astype(np.float64) for each in every] + [each.astype(np.float16) for each in every]
    every += [_random(*SHAPE).transpose(0, 1, 3, 2), _random(*SHAPE).view(_Named), _random(4, 4, 6, 6)[::2]]
    for _ in range(3):
        for x in every:
            wide = np.asarray(x, np.float64)
            expected = np.exp(wide) / np.exp(wide).sum(1, keepdims=True)
            for out in (None, np.empty_like(x, subok=False)):
                y = dnn_softmax(x, out=out)
                assert out is None or y is out
                np.testing.assert_allclose(y, expected, rtol=2e-3 if x.dtype == np.float16 else 1e-5, atol=1e-4)


def test_what_is_wrong_is_refused_as_ever() -> None:
    x = _random(*SHAPE)
    out = np.empty_like(x)
    both = _random(2 * x.size)
    for _ in range(2):
        dnn_softmax(x, out=out)
        with pytest.raises(InvalidProblem, match="overlaps"):
            dnn_softmax(x, out=x)
        with pytest.raises(InvalidProblem, match=r"\(2, 4, 6, 7\)"):
            dnn_softmax(x, out=np.empty((2, 4, 6, 7), np.float32))
        with pytest.raises(InvalidProblem, match="overlaps"):
            dnn_softmax(both[: x.size].reshape(SHAPE), out=both[x.size - 32 : -32].reshape(SHAPE))


def test_what_is_not_aligned_runs_as_such() -> None:
    memory, x = _random(1 + 330)[1:], _random(2, 3, 5, 11)
    aside = memory.reshape(2, 3, 5, 11)
    for _ in range(3):
        for each in (x, aside):
            np.testing.assert_allclose(dnn_softmax(each), np.exp(each) / np.exp(each).sum(1, keepdims=True), rtol=1e-5)


def test_arrays_are_not_kept() -> None:
    x = _random(*SHAPE)
    seen = weakref.ref(x)
    dnn_softmax(x)
    dnn_softmax(x)
    del x
    assert seen() is None
