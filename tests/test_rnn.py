"""RNNBlock as a user meets it: parameters, states, tapes, outputs, errors, array libraries, and that it learns."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import nbdnn
from nbdnn import InvalidProblem, InvalidType, RNNBlock, UnsupportedProblem, ops, reference_rnn
from nbdnn.device import Cpu
from nbdnn.dispatch import registry
from nbdnn.rnn_parameters import GATES

DIRECTIONS = ("unidirectional", "bidirectional")
IDS = {op: [candidate.id for candidate in registry.candidates(op)] for op in ("rnn_fwd", "rnn_bwd")}


def drawn(block: RNNBlock, steps: int = 5, batch: int = 3, width: int = 7, dtype: Any = np.float32) -> dict[str, Any]:
    """Operands of a forward and of its gradient, by name."""
    rng = np.random.default_rng(0)
    directions = 2 if block.direction_mode == "bidirectional" else 1
    state = block.num_layers * directions, batch, block.hidden_size
    shapes = {
        "w": (block.get_param_size([batch, width]),),
        "x": (steps, batch, width),
        "hx": state,
        "cx": state,
        "dy": (steps, batch, directions * block.hidden_size),
        "dhy": state,
        "dcy": state,
    }
    values = {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}
    values["w"] = (values["w"] * max(width, block.hidden_size) ** -0.5).astype(dtype)
    return values if block.rnn_mode == "lstm" else {n: v for n, v in values.items() if n not in ("cx", "dcy")}


def run(block: RNNBlock, given: dict[str, Any], **options: Any) -> tuple[tuple, tuple]:
    """(results of the forward in training but the tape, results of the gradient)."""
    *results, tape = block.apply(given["w"], given["x"], given.get("hx"), given.get("cx"), training=True, **options)
    return tuple(results), block.grad(tape, given["dy"], given.get("dhy"), given.get("dcy"))


@pytest.mark.parametrize("mode", GATES)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("kind", ["linear", "skip"])
@pytest.mark.parametrize("layers", [1, 3])
def test_results_are_those_of_float64_step_by_step(mode: str, direction: str, kind: str, layers: int) -> None:
    block = RNNBlock("float32", 7, layers, mode, kind, direction)
    given = drawn(block)
    results, gradients = run(block, given)
    wide = {name: value.astype(np.float64) for name, value in given.items()}
    problem = block.problem((5, 3, 7), training=True)
    forward = reference_rnn.forward(problem, wide)
    names = ["y", "hy", "cy"] if mode == "lstm" else ["y", "hy"]
    assert len(results) == len(names)
    for name, result in zip(names, results, strict=True):
        assert result.dtype == np.float32
        np.testing.assert_allclose(result, forward[name].value, rtol=1e-5, atol=1e-6, err_msg=name)
    wide |= {name: forward[name].value for name in ("y", "tape")}
    backward = reference_rnn.backward(replace(problem, op="rnn_bwd", training=False), wide)
    names = ["dw", "dx", "dhx", "dcx"] if mode == "lstm" else ["dw", "dx", "dhx"]
    assert len(gradients) == len(names)
    for name, result in zip(names, gradients, strict=True):
        np.testing.assert_allclose(result, backward[name].value, rtol=1e-4, atol=2e-5, err_msg=name)


@pytest.mark.parametrize("id", IDS["rnn_fwd"])
@pytest.mark.parametrize("mode", GATES)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_states_that_are_absent_are_zeros_in_a_forward(id: str, mode: str, direction: str) -> None:
    block = RNNBlock("float32", 20, 2, mode, direction_mode=direction)
    given = drawn(block)
    zeros = [np.zeros_like(given["hx"])] * (1 + (mode == "lstm"))
    with_zeros = block.apply(given["w"], given["x"], *zeros, policy=id)
    for a, b in zip(block.apply(given["w"], given["x"], policy=id), with_zeros, strict=True):
        assert np.array_equal(a, b)


@pytest.mark.parametrize("id", IDS["rnn_bwd"])
@pytest.mark.parametrize("mode", GATES)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_gradients_of_states_that_are_absent_are_zeros(id: str, mode: str, direction: str) -> None:
    block = RNNBlock("float32", 20, 2, mode, direction_mode=direction)
    given = drawn(block)
    zeros = [np.zeros_like(given["hx"])] * (1 + (mode == "lstm"))
    *_, absent = block.apply(given["w"], given["x"], training=True)
    *_, there = block.apply(given["w"], given["x"], *zeros, training=True)
    gradients = block.grad(absent, given["dy"], policy=id)
    assert len(gradients) == 3 + (mode == "lstm") and gradients[2].shape == given["hx"].shape
    for a, b in zip(gradients, block.grad(there, given["dy"], *zeros, policy=id), strict=True):
        assert np.array_equal(a, b)


def test_inference_gives_what_training_gives() -> None:
    for mode in GATES:
        block = RNNBlock("float32", 19, 2, mode, direction_mode="bidirectional")
        given = drawn(block)
        for id in IDS["rnn_fwd"]:
            trained = block.apply(given["w"], given["x"], given["hx"], training=True, policy=id)[:-1]
            for a, b in zip(block.apply(given["w"], given["x"], given["hx"], policy=id), trained, strict=True):
                assert np.array_equal(a, b), id


@pytest.mark.parametrize(
    "arguments, input_size, size",
    [
        (("float32", 16, 3, "gru"), [8, 32], 5664),
        (("float32", 16, 3, "gru", "linear", "bidirectional"), [8, 32], 14400),
        (("float32", 16, 3, "lstm"), [8, 32], 7552),
        (("float32", 16, 1, "rnn_relu", "skip"), [8, 16], 16 * 16 + 2 * 16),
        (("float32", 1, 10**4, "rnn_relu"), [8, 1], 4 * 10**4),
    ],
)
def test_sizes_of_the_parameters(arguments: tuple, input_size: list[int], size: int) -> None:
    assert RNNBlock(*arguments).get_param_size(input_size) == size


def test_parts_of_the_parameters_are_views_in_cudnns_order() -> None:
    block = RNNBlock("float32", 3, 2, "gru", direction_mode="bidirectional")
    w = np.arange(block.get_param_size([1, 5]), dtype=np.float32)
    parts = block.split_params(w, 1, [1, 5])
    assert [part.shape for part in parts] == [(5, 3), (3,)] * 3 + [(3, 3), (3,)] * 3
    first = 3 * (3 * 5 + 3 * 3)  # behind the matrices of pseudo-layer 0
    assert np.array_equal(parts[0], np.arange(first, first + 15).reshape(3, 5).T)
    matrices = first * 2 + 2 * 3 * (3 * 6 + 3 * 3)
    assert np.array_equal(parts[1], np.arange(matrices + 18, matrices + 21))
    parts[0][...] = 7
    assert (w[first : first + 15] == 7).all() and (w == 7).sum() == 16
    assert [part.shape for part in block.split_params(w, 3, [1, 5])[:1]] == [(6, 3)]


def test_skip_input_has_no_matrices_and_keeps_its_biases() -> None:
    block = RNNBlock("float32", 4, 2, "lstm", "skip")
    w = np.zeros(block.get_param_size([1, 4]), np.float32)
    first, second = (block.split_params(w, layer, [1, 4]) for layer in (0, 1))
    assert [part is None for part in first] == [True, False] * 4 + [False] * 8
    assert all(part is not None for part in second)
    assert w.size == 4 * 16 + 8 * 16 + 2 * 8 * 4


def test_a_gru_by_the_parts_of_its_parameters() -> None:
    """Theano's convention: x @ W, gates in the order reset, update, newmem."""
    block = RNNBlock("float64", 6, 1, "gru")
    given = drawn(block, dtype=np.float64)
    parts = block.split_params(given["w"], 0, [3, 7])
    (w_r, bw_r, w_u, bw_u, w_n, bw_n), (r_r, br_r, r_u, br_u, r_n, br_n) = parts[:6], parts[6:]
    h, expected = given["hx"][0], []
    for x in given["x"]:
        r = 1 / (1 + np.exp(-(x @ w_r + bw_r + h @ r_r + br_r)))
        u = 1 / (1 + np.exp(-(x @ w_u + bw_u + h @ r_u + br_u)))
        n = np.tanh(x @ w_n + bw_n + r * (h @ r_n + br_n))
        h = (1 - u) * n + u * h
        expected.append(h)
    y, hy = block.apply(given["w"], given["x"], given["hx"])
    np.testing.assert_allclose(y, expected, rtol=1e-12, atol=1e-14)
    assert np.array_equal(hy[0], y[-1])


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_16_bit_results_are_those_of_float32_rounded_once(dtype: Any) -> None:
    for mode in GATES:
        narrow, wide = RNNBlock(dtype, 9, 2, mode), RNNBlock("float32", 9, 2, mode)
        given = drawn(narrow, dtype=dtype)
        results, gradients = run(narrow, given, policy="rnn_fwd/cpu/direct")
        exact, _ = run(wide, {n: v.astype(np.float32) for n, v in given.items()}, policy="rnn_fwd/cpu/direct")
        for a, b in zip(results, exact, strict=True):
            assert a.dtype == dtype and np.array_equal(a, b.astype(dtype))
        assert all(gradient.dtype == dtype for gradient in gradients)


def test_arrays_of_other_dtypes_and_strides_are_converted() -> None:
    block = RNNBlock(np.float32, 5, 1, "lstm")
    given = drawn(block)
    expected, _ = run(block, given)
    spread = np.empty((5, 3, 14), np.float32)
    spread[..., ::2] = given["x"]
    with nbdnn.events() as log:
        results, _ = run(block, given | {"x": spread[..., ::2], "hx": given["hx"].astype(np.float64)})
    assert {event.detail for event in log if event.kind == "copied"} == {
        "x is not dense, aligned and f32",
        "hx is not dense, aligned and f32",
    }
    for a, b in zip(results, expected, strict=True):
        assert np.array_equal(a, b)


def test_outputs_are_written_where_the_caller_says() -> None:
    block = RNNBlock("float32", 5, 1, "lstm")
    given = drawn(block)
    (y, hy, cy), gradients = run(block, given)
    own = np.empty_like(y), np.empty((1, 3, 10), np.float32)[..., ::2]
    *results, tape = block.apply(
        given["w"], given["x"], given["hx"], given["cx"], training=True, out=(own[0], None, own[1])
    )
    assert results[0] is own[0] and results[2] is own[1] and tape.y is own[0]
    assert np.array_equal(own[0], y) and np.array_equal(results[1], hy) and np.array_equal(own[1], cy)
    dw = np.empty_like(given["w"])
    found = block.grad(tape, given["dy"], given["dhy"], given["dcy"], out=(dw, None, None, None))
    assert found[0] is dw
    for a, b in zip(found, gradients, strict=True):
        assert np.array_equal(a, b)
    with pytest.raises(InvalidProblem, match=r"out \(y\) overlaps x"):
        same = RNNBlock("float32", 7, 1, "rnn_tanh")
        w = np.zeros(same.get_param_size([3, 7]), np.float32)
        same.apply(w, given["x"], out=(given["x"], None))


@pytest.mark.parametrize("mode", ["lstm", "gru"])
def test_without_steps_states_stay_what_they_are(mode: str) -> None:
    block = RNNBlock("float32", 5, 2, mode)
    given = drawn(block, steps=0)
    results, (dw, dx, dhx, *dcx) = run(block, given)
    assert results[0].shape == (0, 3, 5)
    for result, name in zip(results[1:], ("hx", "cx"), strict=False):
        assert np.array_equal(result, given[name])
    assert not dw.any() and dw.shape == given["w"].shape and dx.shape == (0, 3, 7)
    assert np.array_equal(dhx, given["dhy"])
    assert all(np.array_equal(each, given["dcy"]) for each in dcx)
    y, hy, *_ = block.apply(given["w"], given["x"])
    assert y.shape == (0, 3, 5) and not hy.any() and hy.shape == (2, 3, 5)


def test_without_a_batch_there_is_nothing_but_zeros() -> None:
    block = RNNBlock("float32", 5, 1, "gru")
    given = drawn(block, batch=0)
    results, (dw, dx, dhx) = run(block, given)
    assert [result.shape for result in results] == [(5, 0, 5), (1, 0, 5)]
    assert not dw.any() and dx.shape == (5, 0, 7) and dhx.shape == (1, 0, 5)


def test_a_tape_says_what_it_is_of_and_may_be_read_twice() -> None:
    block = RNNBlock("bfloat16", 6, 2, "gru")
    given = drawn(block, dtype=ml_dtypes.bfloat16)
    *_, tape = block.apply(given["w"], given["x"], training=True)
    assert tape.problem == "rnn_fwd:bf16:t5b3i7h6l2:gru:uni:linear:train"
    assert tape.memory.dtype == np.float32 and tape.memory.shape == (2 * 5 * 3 * 6 * 5,)
    for a, b in zip(block.grad(tape, given["dy"]), block.grad(tape, given["dy"]), strict=True):
        assert np.array_equal(a, b)
    with pytest.raises(InvalidProblem, match="expected one of RNNBlock"):
        RNNBlock("bfloat16", 6, 2, "rnn_tanh").grad(tape, given["dy"])


def test_a_tape_that_is_not_retained_is_read_once() -> None:
    block = RNNBlock("float32", 6, 2, "gru")
    given = drawn(block)
    *_, tape = block.apply(given["w"], given["x"], training=True)
    first = block.grad(tape, given["dy"])
    with pytest.raises(InvalidProblem, match="dy has shape"):
        block.grad(tape, given["dy"][1:], retain_tape=False)
    assert not tape.consumed
    for a, b in zip(block.grad(tape, given["dy"], retain_tape=False), first, strict=True):
        assert np.array_equal(a, b)
    for retain in (True, False):
        with pytest.raises(InvalidProblem, match="tape was consumed by an earlier gradient, whose retain_tape was Fal"):
            block.grad(tape, given["dy"], retain_tape=retain)


def test_a_tape_that_cudnn_may_have_begun_to_write_into_is_read_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    block = RNNBlock("float32", 6, 1, "gru")
    given = drawn(block)
    *_, tape = block.apply(given["w"], given["x"], training=True)

    def failing(*_: Any) -> Any:
        raise nbdnn.CudnnError("cudnnRNNBackwardWeights_v8 -> CUDNN_STATUS_EXECUTION_FAILED (5000)")

    monkeypatch.setattr(nbdnn.rnn, "_compute", failing)
    for retain in (True, False):
        with pytest.raises(nbdnn.CudnnError):
            block.grad(tape, given["dy"], retain_tape=retain)
        assert tape.consumed != retain


def test_measuring_chooses_among_the_candidates_also_without_states() -> None:
    block = RNNBlock("float32", 8, 1, "lstm")
    given = drawn(block)
    expected = block.apply(given["w"], given["x"])
    with nbdnn.config.change(tune__budget_s=1.0), nbdnn.events() as log:
        *results, tape = block.apply(given["w"], given["x"], training=True, policy="time_on_shape_change")
        block.grad(tape, given["dy"], policy="time_on_shape_change")
    measured = {event.candidate.partition(" ")[0] for event in log if event.kind == "measured"}
    assert measured == {id for ids in IDS.values() for id in ids}
    for a, b in zip(results, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    rows = nbdnn.explain("rnn_bwd:f32:t5b3i7h8l1:lstm:uni:linear").rows
    assert [row.candidate for row in rows if row.time_us is not None] != [] and sum(row.chosen for row in rows) == 1


@pytest.mark.parametrize("mode", ["lstm", "rnn_tanh"])
def test_theanos_object(mode: str) -> None:
    block = RNNBlock("float32", 5, 2, mode, direction_mode="bidirectional")
    given = drawn(block)
    op = ops.GpuDnnRNNOp(mode, "bidirectional")
    states = [given[name] for name in ("hx", "cx") if name in given]
    tape, *results = op(block, given["w"], given["x"], *states)
    expected, gradients = run(block, given)
    for a, b in zip(results, expected, strict=True):
        assert np.array_equal(a, b)
    top = [given[name] for name in ("dy", "dhy", "dcy") if name in given]
    of_block, *found = op.grad((block, given["w"], given["x"], *states), (None, *top))
    assert of_block is None and tape.block is block
    for a, b in zip(found, gradients, strict=True):
        assert np.array_equal(a, b)
    only_state = op.grad((block, given["w"], given["x"], *states), (None, None, *top[1:]))
    assert np.array_equal(only_state[2], block.grad(tape, np.zeros_like(given["dy"]), *top[1:])[1])
    with pytest.raises(InvalidProblem, match="is no descriptor of"):
        ops.GpuDnnRNNOp("gru")(block, given["w"], given["x"])


def test_results_belong_to_torch(torch: ModuleType) -> None:
    block = RNNBlock(torch.float32, 6, 2, "lstm")
    given = drawn(block)
    tensors = {name: torch.from_numpy(value) for name, value in given.items()}
    for a, b in zip(sum(run(block, tensors), ()), sum(run(block, given), ()), strict=True):
        assert isinstance(a, torch.Tensor) and np.array_equal(a.numpy(), b)
    parts = block.split_params(tensors["w"], 0, [3, 7])
    parts[0].fill_(5)
    assert (tensors["w"][:42] == 5).all() and parts[0].shape == (7, 6)


@pytest.mark.parametrize("mode", ["rnn_tanh", "rnn_relu", "gru", "lstm"])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_the_block_of_parameters_is_torchs(mode: str, bidirectional: bool, torch: ModuleType) -> None:
    """Its networks have the same gates in the same order, which it packs for cuDNN one after the other."""
    options = {"num_layers": 2, "bidirectional": bidirectional, "dtype": torch.float64}
    if mode in ("lstm", "gru"):
        theirs = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU}[mode](7, 6, **options)
    else:
        theirs = torch.nn.RNN(7, 6, nonlinearity=mode.removeprefix("rnn_"), **options)
    block = RNNBlock("float64", 6, 2, mode, direction_mode=DIRECTIONS[bidirectional])
    weights = [w.detach().numpy().reshape(-1) for w in theirs.parameters()]
    quadruples = [weights[i : i + 4] for i in range(0, len(weights), 4)]
    w = np.concatenate([p for each in quadruples for p in each[:2]] + [p for each in quadruples for p in each[2:]])
    given = drawn(block, dtype=np.float64)
    (y, hy, *_), _ = run(block, given | {"w": w})
    states = torch.from_numpy(given["hx"])
    if mode == "lstm":
        expected, (state, _) = theirs(torch.from_numpy(given["x"]), (states, torch.from_numpy(given["cx"])))
    else:
        expected, state = theirs(torch.from_numpy(given["x"]), states)
    np.testing.assert_allclose(y, expected.detach().numpy(), rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(hy, state.detach().numpy(), rtol=1e-12, atol=1e-14)


def test_results_belong_to_jax(jax: ModuleType) -> None:
    block = RNNBlock("float32", 6, 1, "gru")
    given = drawn(block)
    results, gradients = run(block, {name: jax.numpy.asarray(value) for name, value in given.items()})
    for a, b in zip((*results, *gradients), sum(run(block, given), ()), strict=True):
        assert isinstance(a, jax.numpy.ndarray) and np.array_equal(np.asarray(a), b)
    assert block.split_params(jax.numpy.asarray(given["w"]), 0, [3, 7])[0].shape == (7, 6)


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda b, g: RNNBlock("int32", 3, 1, "gru"), InvalidType, "int32"),
        (lambda b, g: RNNBlock("int64", 3, 1, "gru"), InvalidType, "dtype int64 is not one of float16"),
        (lambda b, g: RNNBlock(int, 3, 1, "gru"), InvalidType, "dtype int64 is not one of float16"),
        (lambda b, g: RNNBlock(np.uint8, 3, 1, "gru"), InvalidType, "dtype uint8 is not one of float16"),
        (lambda b, g: RNNBlock(None, 3, 1, "gru"), InvalidType, "dtype None is not one of float16"),
        (lambda b, g: RNNBlock("float32", 0, 1, "gru"), InvalidProblem, "hidden_size is 0"),
        (lambda b, g: RNNBlock("float32", 2**31, 1, "gru"), InvalidProblem, "hidden_size is 2147483648, it must"),
        (lambda b, g: RNNBlock("float32", 3, 10_001, "gru"), InvalidProblem, "num_layers is 10001, it must be at most"),
        (lambda b, g: RNNBlock("float32", 3, 1, "elman"), InvalidProblem, "rnn_mode 'elman'"),
        (lambda b, g: RNNBlock("float32", 3, 1, "gru", "concat"), InvalidProblem, "input_mode 'concat'"),
        (
            lambda b, g: RNNBlock("float32", 3, 1, "gru", "skip").get_param_size([1, 4]),
            InvalidProblem,
            "units: 4 and 3",
        ),
        (lambda b, g: b.get_param_size(7), InvalidProblem, r"input_size is 7, expected \[batch, input\]"),
        (lambda b, g: b.get_param_size([4]), InvalidProblem, r"expected \[batch, input\]"),
        (
            lambda b, g: b.get_param_size([3, 5.7]),
            InvalidProblem,
            r"input_size is \[3, 5.7\], expected \[batch, input\]",
        ),
        (lambda b, g: b.get_param_size("ab"), InvalidProblem, "input_size is 'ab', expected"),
        (lambda b, g: b.get_param_size(np.array(1)), InvalidProblem, r"input_size is array\(1\), expected \[batch"),
        (lambda b, g: RNNBlock(np.ones(2), 3, 1, "gru"), InvalidType, "dtype .* is not one of float16"),
        (
            lambda b, g: b.apply(g["w"], g["x"], training="no"),
            InvalidProblem,
            "training is 'no', expected True or False",
        ),
        (lambda b, g: b.apply(g["w"], g["x"], training=np.ones(2)), InvalidProblem, "training is array"),
        (
            lambda b, g: b.grad(b.apply(g["w"], g["x"], training=1)[-1], g["dy"], retain_tape=None),
            InvalidProblem,
            "retain_tape is None, expected True or False",
        ),
        (lambda b, g: b.split_params(None, 0, [3, 7]), InvalidType, "w is a NoneType, expected an array"),
        (lambda b, g: b.split_params(g["w"], "0", [3, 7]), InvalidProblem, "layer is '0', expected 0 to 0"),
        (lambda b, g: b.split_params(g["w"], 0.5, [3, 7]), InvalidProblem, "layer is 0.5, expected 0 to 0"),
        (lambda b, g: b.split_params(g["w"][1:], 0, [3, 7]), InvalidProblem, "w has shape"),
        (lambda b, g: b.split_params(g["w"], 1, [3, 7]), InvalidProblem, "layer is 1, expected 0 to 0"),
        (lambda b, g: b.apply(g["w"], g["x"][0]), InvalidType, "x has 2 axes"),
        (lambda b, g: b.apply(g["w"][1:], g["x"]), InvalidProblem, r"w has shape \(\d+,\), expected"),
        (lambda b, g: b.apply(g["w"], g["x"], g["hx"][0]), InvalidProblem, "hx has shape"),
        (lambda b, g: b.apply(g["w"], g["x"], g["hx"], g["hx"]), InvalidProblem, "cx is given, but gru has no cell"),
        (lambda b, g: b.apply(g["w"], None), InvalidType, "x is None"),
        (lambda b, g: b.apply(g["w"], g["x"], out=(g["x"],)), InvalidProblem, "out has 1 arrays, expected 2: y, hy"),
        (lambda b, g: b.apply(g["w"], g["x"], policy="fastest"), InvalidProblem, "policy 'fastest' is unknown"),
        (lambda b, g: b.apply(g["w"].astype(np.int64), g["x"]), InvalidType, "w: dtype int64"),
        (lambda b, g: b.grad(None, g["dy"]), InvalidProblem, "tape is of type NoneType, expected what apply"),
        (lambda b, g: b.grad(g["dy"], g["dy"]), InvalidProblem, "tape is of type ndarray, expected what apply"),
        (lambda b, g: b.grad(b.apply(g["w"], g["x"], training=True)[-1], g["dy"][1:]), InvalidProblem, "dy has shape"),
    ],
)
def test_what_is_wrong_is_said(call: Any, error: type, says: str) -> None:
    block = RNNBlock("float32", 5, 1, "gru")
    with pytest.raises(error, match=says):
        call(block, drawn(block))


@pytest.mark.parametrize("dtype", ["float16", ml_dtypes.bfloat16, np.float32, float])
def test_the_text_of_a_block_makes_another(dtype: Any) -> None:
    block = RNNBlock(dtype, 5, 2, "gru", "linear", "bidirectional")
    assert eval(repr(block)).facts == block.facts


def test_a_lstm_learns_to_copy() -> None:
    """One of 4 symbols is shown, then blanks; after the last of them the network has to say which it was. Plain
    gradient descent, on a linear read-out of the last output. A guess costs log(4) = 1.39."""
    symbols, steps, batch, rate = 4, 6, 64, np.float32(0.3)
    block = RNNBlock("float32", 16, 1, "lstm")
    rng = np.random.default_rng(0)
    w = rng.uniform(-0.25, 0.25, block.get_param_size([batch, symbols + 1])).astype(np.float32)
    readout = rng.uniform(-0.25, 0.25, (16, symbols)).astype(np.float32)
    losses = []
    for _ in range(1000):
        shown = rng.integers(symbols, size=batch)
        x = np.zeros((steps, batch, symbols + 1), np.float32)
        x[0, np.arange(batch), shown] = 1
        x[1:, :, symbols] = 1
        y, _, _, tape = block.apply(w, x, training=True)
        scores = y[-1] @ readout
        powers = np.exp(scores - scores.max(axis=1, keepdims=True))
        shares = powers / powers.sum(axis=1, keepdims=True)
        losses.append(float(-np.log(shares[np.arange(batch), shown]).mean()))
        shares[np.arange(batch), shown] -= 1
        of_scores = shares / batch
        dy = np.zeros_like(y)
        dy[-1] = of_scores @ readout.T
        readout -= rate * (y[-1].T @ of_scores)
        w -= rate * block.grad(tape, dy, retain_tape=False)[0]
    assert 1.2 < np.mean(losses[:5]) < 1.6
    assert np.mean(losses[-20:]) < 0.05


@pytest.mark.parametrize("op", IDS)
def test_supports_what_it_must(op: str, device: Cpu) -> None:
    """Every mode, direction, input and dtype: whoever computes recurrent networks on a CPU."""
    assert IDS[op] == [f"{op}/cpu/packed", f"{op}/cpu/direct"]
    for dtype, mode, direction, kind in product(
        ("f16", "bf16", "f32", "f64"), GATES, ("uni", "bi"), ("linear", "skip")
    ):
        for end in ("", ":a8", *([":train"] if op == "rnn_fwd" else [])):
            problem = nbdnn.problem.parse(f"{op}:{dtype}:t3b2i9h9l2:{mode}:{direction}:{kind}{end}")
            for id in IDS[op]:
                assert registry.candidate(id).supports(problem, device).ok, f"{id}: {problem}"


@pytest.mark.parametrize("mode", ["lstm", "gru"])
def test_several_threads_may_call_at_once(mode: str) -> None:
    """Also where each call is a crew of threads, of which there are not enough for all."""
    block = RNNBlock("float32", 96, 1, mode)
    given = drawn(block, steps=40, batch=1, width=32)
    expected = run(block, given)

    def calls(_: int) -> bool:
        found = [run(block, given) for _ in range(20)]
        return all(
            np.array_equal(a, b) for each in found for a, b in zip(sum(each, ()), sum(expected, ()), strict=True)
        )

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(calls, range(4)))


def test_too_little_workspace_is_said() -> None:
    block = RNNBlock("float32", 8, 2, "gru")
    given = drawn(block)
    with pytest.raises(UnsupportedProblem, match=r"workspace"):
        block.apply(given["w"], given["x"], workspace_limit=0)
