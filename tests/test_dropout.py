"""dnn_dropout and its gradient as a user meets them: masks, states, layouts, outputs, errors, array libraries."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from nbdnn import InvalidProblem, InvalidType, dnn_dropout, dnn_dropout_grad, ops
from nbdnn.dispatch import registry
from nbdnn.problem import parse
from nbdnn.reference_dropout import philox

X = np.random.default_rng(0).standard_normal((3, 5, 4, 7)).astype(np.float32)
MASK = np.zeros(53, np.uint8)


def bits(mask: Any, count: int) -> np.ndarray:
    return np.unpackbits(np.asarray(mask), bitorder="little")[:count].astype(bool)


def test_the_generator_is_philox() -> None:
    """Known answers of Random123: philox4x32-10 of zeros, and of all bits set in the words that are used here."""
    assert [hex(word) for word in philox(np.array([0]), 0)[0]] == [
        "0x6627e8d5",
        "0xe169c58d",
        "0xbc57ac4c",
        "0x9b00dbd8",
    ]


def test_what_is_kept_is_scaled_and_the_rest_is_zero() -> None:
    y, mask, state = dnn_dropout(X, 0.25, seed=7)
    expected = philox(np.arange(X.size // 4), 7).reshape(-1) >= 2**30
    assert np.array_equal(bits(mask, X.size), expected)
    np.testing.assert_allclose(y.reshape(-1), np.where(expected, X.reshape(-1) / 0.75, 0), rtol=1e-6)
    assert mask.dtype == np.uint8 and mask.shape == (-(-X.size // 8),) and state.dtype == np.int64
    assert list(state) == [7, X.size // 4]
    assert not np.unpackbits(mask, bitorder="little")[X.size :].any()


def test_the_mask_is_the_same_for_every_dtype_and_goes_by_memory() -> None:
    masks = [dnn_dropout(X.astype(d), 0.5)[1] for d in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)]
    last = np.ascontiguousarray(X.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)
    y, mask, _ = dnn_dropout(last, 0.5)
    assert all(np.array_equal(each, mask) for each in masks)
    assert y.strides == last.strides
    in_memory = y.transpose(0, 2, 3, 1).reshape(-1)
    assert np.array_equal(in_memory != 0, bits(mask, X.size))


def test_strides_of_no_layout_count_in_c_order() -> None:
    y, mask, _ = dnn_dropout(X[:, :, ::2], 0.5)
    assert np.array_equal(y.reshape(-1) != 0, bits(mask, y.size))


def test_a_state_goes_on_where_it_stopped() -> None:
    first, second = X[:1], X[1:]
    _, whole, _ = dnn_dropout(X, 0.3, seed=11)
    _, mask, state = dnn_dropout(first, 0.3, seed=11)
    _, rest, same = dnn_dropout(second, 0.3, seed=99, state=state)
    assert same is state and list(state) == [11, X.size // 4]
    assert np.array_equal(np.concatenate([bits(mask, first.size), bits(rest, second.size)]), bits(whole, X.size))


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9])
def test_as_many_are_dropped_as_were_asked_for(p: float) -> None:
    count = 1 << 20
    y, mask, _ = dnn_dropout(np.ones(count, np.float32), p)
    kept = np.count_nonzero(bits(mask, count)) / count
    assert abs(kept - (1 - p)) <= 5 * np.sqrt(p * (1 - p) / count)
    assert abs(y.mean() - 1) < 0.01 and (p or np.array_equal(y, np.ones(count)))


def test_seeds_of_64_bits_and_negative_ones_differ() -> None:
    seeds = (0, 1, 2**32, -1, 2**63 - 1, -(2**63))
    masks = {dnn_dropout(X, 0.5, seed=seed)[1].tobytes() for seed in seeds}
    assert len(masks) == len(seeds)
    _, of_the_same_bits, _ = dnn_dropout(X, 0.5, seed=np.uint64(2**64 - 1))
    assert np.array_equal(of_the_same_bits, dnn_dropout(X, 0.5, seed=-1)[1])
    for seed in (2**64, -(2**63) - 1):
        with pytest.raises(InvalidProblem, match=f"seed is {seed}, which has more than 64 bits"):
            dnn_dropout(X, 0.5, seed=seed)


def test_the_gradient_is_the_forward_of_the_mask() -> None:
    dy = np.random.default_rng(1).standard_normal(X.shape)
    _, mask, _ = dnn_dropout(X.astype(np.float64), 0.4)
    dx = dnn_dropout_grad(dy, mask, 0.4)
    assert np.array_equal(dx.reshape(-1), np.where(bits(mask, X.size), dy.reshape(-1) / 0.6, 0))


def test_outputs_are_written_where_the_caller_says() -> None:
    y, mask, state = np.empty_like(X), np.empty(-(-X.size // 8), np.uint8), np.array([5, 3])
    given = dnn_dropout(X, 0.5, state=state, out=(y, mask, state))
    assert given[0] is y and given[1] is mask and given[2] is state
    expected = philox(np.arange(3, 3 + X.size // 4), 5).reshape(-1) >= 2**31
    assert np.array_equal(bits(mask, X.size), expected) and np.array_equal(y.reshape(-1) != 0, expected)
    some = dnn_dropout(X, 0.5, out=(None, mask, None))
    assert some[1] is mask
    dx = np.empty_like(X)
    assert dnn_dropout_grad(X, mask, 0.5, out=dx) is dx
    spread = np.empty((3, 5, 4, 14), np.float32)[..., ::2]
    assert dnn_dropout_grad(X, mask, 0.5, out=spread) is spread
    assert np.array_equal(spread, dx)


def test_an_empty_array_gives_empty_results() -> None:
    y, mask, state = dnn_dropout(np.empty((0, 3), np.float32), 0.5)
    assert y.shape == (0, 3) and mask.shape == (0,) and list(state) == [4242, 0]


def test_results_belong_to_torch(torch: ModuleType) -> None:
    y, mask, state = dnn_dropout(torch.from_numpy(X), 0.5)
    assert all(isinstance(each, torch.Tensor) for each in (y, mask, state))
    assert np.array_equal(y.numpy(), dnn_dropout(X, 0.5)[0])
    dx = dnn_dropout_grad(torch.from_numpy(X), mask, 0.5)
    assert np.array_equal(dx.numpy(), dnn_dropout_grad(X, mask.numpy(), 0.5))
    assert dnn_dropout(torch.from_numpy(X), 0.5, state=state)[2] is state and list(state) == [4242, 2 * (X.size // 4)]


def test_results_belong_to_jax_whose_states_are_new_ones(jax: ModuleType) -> None:
    with jax.enable_x64(True):
        y, mask, state = dnn_dropout(jax.numpy.asarray(X), 0.5)
        assert np.array_equal(y, dnn_dropout(X, 0.5)[0])
        assert mask.dtype == jax.numpy.uint8 and state.dtype == jax.numpy.int64
        later = dnn_dropout(jax.numpy.asarray(X), 0.5, state=state)[2]
    assert np.asarray(state).tolist() == [4242, X.size // 4]
    assert np.asarray(later).tolist() == [4242, 2 * (X.size // 4)]


def test_without_64_bit_integers_the_states_of_jax_are_of_numpy(jax: ModuleType) -> None:
    y, mask, state = dnn_dropout(jax.numpy.asarray(X), 0.5)
    later = dnn_dropout(jax.numpy.asarray(X), 0.5, state=state)[2]
    assert np.array_equal(y, dnn_dropout(X, 0.5)[0]) and type(mask) is type(y)
    assert state.dtype == later.dtype == np.int64 and not state.flags.writeable
    assert (state.tolist(), later.tolist()) == ([4242, X.size // 4], [4242, 2 * (X.size // 4)])


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: dnn_dropout(X, 1.0), InvalidProblem, "dropout is 1.0"),
        (lambda: dnn_dropout(X, -0.1), InvalidProblem, "dropout is -0.1"),
        (lambda: dnn_dropout(X, float("nan")), InvalidProblem, "dropout is nan"),
        (lambda: dnn_dropout(X, "half"), InvalidProblem, "dropout is 'half'"),
        (lambda: dnn_dropout(X.astype(np.int32), 0.5), InvalidType, "x: dtype int32"),
        (lambda: dnn_dropout(X, 0.5, state=np.zeros(3, np.int64)), InvalidProblem, r"state has shape \(3,\)"),
        (lambda: dnn_dropout(X, 0.5, state=np.zeros(2, np.float32)), InvalidType, "state: dtype float32"),
        (lambda: dnn_dropout(X, 0.5, state=np.zeros(2, np.int32)), InvalidType, "state: dtype int32 is not int64"),
        (lambda: dnn_dropout(X, 0.5, seed=None), InvalidType, "seed is None, expected a whole number"),
        (lambda: dnn_dropout(X, 0.5, out=X), InvalidProblem, "not a tuple of three"),
        (lambda: dnn_dropout(X, 0.5, out=(X, None, None)), InvalidProblem, r"out\[0\] overlaps x"),
        (
            lambda: dnn_dropout(X, 0.5, out=(None, np.zeros(3, np.uint8), None)),
            InvalidProblem,
            r"\(3,\), expected \(53,\)",
        ),
        (lambda: dnn_dropout(X, 0.5, out=(None, None, np.zeros(2, np.int64))), InvalidProblem, "not the given state"),
        (
            lambda: dnn_dropout_grad(X, np.zeros(52, np.uint8), 0.5),
            InvalidProblem,
            r"mask has shape \(52,\), expected \(53,\)",
        ),
        (lambda: dnn_dropout_grad(X, MASK.view(np.int8), 0.5), InvalidType, "mask: dtype int8 is not uint8"),
        (lambda: dnn_dropout_grad(X, MASK > 0, 0.5), InvalidType, "mask: dtype bool is not uint8"),
        (lambda: dnn_dropout(X, 0.5, policy="best"), InvalidProblem, "policy 'best' is unknown"),
    ],
)
def test_bad_input_is_named(call: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        call()


def test_every_problem_has_a_candidate_on_the_cpu(device: Any) -> None:
    for op in ("dropout_fwd", "dropout_bwd"):
        for dtype in ("f16", "bf16", "f32", "f64"):
            assert registry.candidates(op)[-1].supports(parse(f"{op}:{dtype}:m1003"), device).ok


def test_the_op_of_theano() -> None:
    state = np.array([3, 0])
    y, mask, advanced = ops.GpuDnnDropoutOp()(X, 0.5, state)
    assert list(state) == [3, 0] and list(advanced) == [3, X.size // 4]
    assert ops.GpuDnnDropoutOp(inplace=True)(X, 0.5, state)[2] is state and list(state) == list(advanced)
    dx, *none = ops.GpuDnnDropoutOp().grad((X, 0.5, mask), (X,))
    assert np.array_equal(dx, y) and none == [None, None]


def test_a_state_that_cannot_advance_is_refused() -> None:
    """Else every call with it would draw the same mask."""
    state = np.array([7, 0])
    state.flags.writeable = False
    with pytest.raises(InvalidProblem, match="state is read-only; it advances in place"):
        dnn_dropout(np.ones((2, 3), np.float32), 0.5, state=state)
