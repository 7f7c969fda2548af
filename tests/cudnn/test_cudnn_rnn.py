"""cuDNN's recurrent networks: that its parameters lie where nbdnn's do, what is refused before it is called, and the
calls that are made. On a GPU the matrix runs them."""

from __future__ import annotations

import ctypes
from ctypes import byref, c_size_t, c_void_p
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from gpus import DEVICE, H200

from nbdnn import driver
from nbdnn.cudnn import rnn
from nbdnn.cudnn.api import StatusError, call, function
from nbdnn.cudnn.descriptors import MATH, Legacy
from nbdnn.cudnn.enums import RnnAlgo, Status
from nbdnn.cudnn.handle import handle
from nbdnn.problem import ITEMSIZE, parse
from nbdnn.problem_rnn import OwnTape, RnnProblem
from nbdnn.rnn_parameters import GATES

LSTM = "f32:t3b2i4h5l2:lstm:uni:linear"
TAPE = OwnTape(100, "cudnn/rnn/standard")
DYNAMIC = rnn.Algorithm(RnnAlgo.PERSIST_DYNAMIC)
SPACES = rnn._Spaces(inference_bytes=1000, training_bytes=2000, kept_bytes=400)


def problem(op: str, end: str = "") -> RnnProblem:
    found = parse(f"{op}:{LSTM}{end}")
    assert isinstance(found, RnnProblem)
    return found


@pytest.fixture(scope="module")
def handle_address() -> Any:
    """Of a handle; where there is no GPU, of zeros: where parameters lie depends on nothing that is in one."""
    if driver.device_count():
        yield handle(DEVICE).address
    else:
        zeros = ctypes.create_string_buffer(1 << 20)
        yield ctypes.addressof(zeros)


@pytest.mark.parametrize("mode", GATES)
@pytest.mark.parametrize("kind", ["uni:linear", "bi:linear", "uni:skip", "bi:skip"])
@pytest.mark.parametrize("dtype", ["f16", "f32", "f64"])
def test_the_block_of_parameters_is_cudnns(mode: str, kind: str, dtype: str, handle_address: int) -> None:
    given = parse(f"rnn_fwd:{dtype}:t3b2i6h6l3:{mode}:{kind}")
    assert isinstance(given, RnnProblem)
    parameters, base = given.parameters, 1 << 20
    network = rnn._described(given, RnnAlgo.STANDARD, MATH[dtype]).network
    size = c_size_t()
    call("cudnnGetRNNWeightSpaceSize", handle_address, network.address, byref(size))
    assert size.value == parameters.size_elems * ITEMSIZE[dtype]
    matrix, bias, matrix_at, bias_at = Legacy("Tensor"), Legacy("Tensor"), c_void_p(), c_void_p()
    for pseudo_layer in range(parameters.pseudo_layers):
        pairs = zip(parameters.matrices(pseudo_layer), parameters.biases(pseudo_layer), strict=True)
        for place, (of_matrix, of_bias) in enumerate(pairs):
            asked = handle_address, network.address, pseudo_layer, size, base, place
            found = matrix.address, byref(matrix_at), bias.address, byref(bias_at)
            call("cudnnGetRNNWeightParams", *asked, *found)
            offset = None if of_matrix is None else base + of_matrix.offset * ITEMSIZE[dtype]
            assert (matrix_at.value, bias_at.value) == (offset, base + of_bias.offset * ITEMSIZE[dtype])


@pytest.fixture
def spaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a GPU would say: only the standard algorithm runs."""
    monkeypatch.setattr(
        rnn, "_spaces", lambda given, device, algorithm, math: "no such kernel" if algorithm else SPACES
    )  # fmt: skip


@pytest.mark.usefixtures("spaces")
def test_it_supports_inference_and_tapes_of_its_own() -> None:
    assert rnn.FWD.supports(problem("rnn_fwd"), H200) == (True, "")
    assert [str(config) for config in rnn.FWD.configs(problem("rnn_fwd"), H200)] == ["standard"]
    assert rnn.FWD.tapes(problem("rnn_fwd", ":train"), H200) == (TAPE,)
    for candidate, end in ((rnn.FWD, f":train:{TAPE}"), (rnn.BWD, f":{TAPE}")):
        assert candidate.supports(problem(candidate.op, end), H200) == (True, "")
    assert rnn.FWD.cudnn_version > 90000


@pytest.mark.usefixtures("spaces")
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (f"rnn_fwd:{LSTM}:train", "is not the tape of nbdnn"),
        (f"rnn_bwd:{LSTM}", "is not the tape of nbdnn"),
        (f"rnn_bwd:{LSTM}:tape101/cudnn/rnn/standard", "none of its own here: tape100/cudnn/rnn/standard"),
        (f"rnn_bwd:{LSTM}:tape100/cudnn/rnn/persist_static", "none of its own here: tape100/cudnn/rnn/standard"),
        ("rnn_fwd:f32:t65536b256i128h5l1:lstm:uni:linear", "x has 2147483648 elements, cuDNN takes 1 to 2147483647"),
    ],
)
def test_refusals_say_the_number(text: str, reason: str) -> None:
    given = parse(text)
    support = {"rnn_fwd": rnn.FWD, "rnn_bwd": rnn.BWD}[given.op].supports(given, H200)  # type: ignore[arg-type]
    assert not support.ok and reason in support.reason


@pytest.mark.parametrize(
    ("text", "plain", "tf32"),
    [
        ("f32:t3b2i4h5l2:lstm:uni:linear", 1, 4),
        ("f32:t3b2i4h5l2:rnn_relu:uni:linear", 4, 0),
        ("f16:t3b2i4h5l2:gru:uni:linear", 4, 0),
        ("bf16:t3b2i4h5l2:gru:uni:linear", 1, 0),
        ("f64:t3b2i4h5l2:rnn_tanh:uni:linear", 1, 0),
    ],
)
def test_algorithms_that_approximate_need_permission(
    text: str, plain: int, tf32: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rnn, "_spaces", lambda *_: SPACES)
    given = parse(f"rnn_fwd:{text}")
    for candidate, count in ((rnn.FWD, plain), (rnn.FWD_TF32, tf32)):
        assert candidate.supports(given, H200).ok == bool(count)  # type: ignore[arg-type]
        if count:
            configs = candidate.configs(given, H200)  # type: ignore[arg-type]
            assert len(configs) == count and configs[-1] == rnn.STANDARD
    assert (rnn.FWD.math, rnn.FWD_TF32.math) == ("fma", "tf32")


def test_the_gradient_of_small_networks_takes_fewer_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rnn, "_spaces", lambda *_: SPACES)
    for mode, most in (("lstm", 128), ("rnn_tanh", 256)):
        for hidden, count in ((most, 4), (most + 1, 3)):
            given = parse(f"rnn_fwd:f16:t3b2i4h{hidden}l1:{mode}:uni:linear")
            assert isinstance(given, RnnProblem)
            assert len(rnn.FWD.configs(given, H200)) == 4
            assert len(rnn.FWD.tapes(replace(given, training=True), H200)) == count


def test_a_refusal_of_every_algorithm_is_cudnns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rnn, "_spaces", lambda *_: "no such kernel")
    assert rnn.FWD.supports(problem("rnn_fwd"), H200) == (False, "no such kernel")


@pytest.mark.parametrize("hidden", [32, 128, 1024])
@pytest.mark.parametrize("batch", [1, 8, 64])
def test_no_guess_has_a_network_compiled(hidden: int, batch: int) -> None:
    for dtype, candidate in (("f16", rnn.FWD), ("f32", rnn.FWD_TF32)):
        given = parse(f"rnn_fwd:{dtype}:t50b{batch}i64h{hidden}l1:lstm:uni:linear")
        assert isinstance(given, RnnProblem)
        slowest = max(rnn.ALGORITHMS[1:], key=lambda each: candidate.estimate(given, each, H200))
        assert slowest == DYNAMIC


# 64 bytes behind a multiple of 256: what is kept begins at the next one.
WORKSPACE, KEPT_BEHIND = 51_200_064, 192


class _Handle:
    address = 7

    def use(self, stream: int) -> None: ...


# What each call takes behind handle and network, by operand; "." a descriptor or a number, "0" nothing.
CALLS = {
    "": [("Forward", ". 0 . x . y . hx hy . cx cy . w . ws . 0")],
    "train": [("Forward", ". 0 . x . y . hx hy . cx cy . w . ws . tape")],
    "bwd": [
        ("BackwardData_v8", "0 . y dy . dx . hx dhy dhx . cx dcy dcx . w . ws . kept"),
        ("BackwardWeights_v8", ". 0 . x . hx . y . dw . ws . kept"),
    ],
    "consumed": [
        ("BackwardData_v8", "0 . y dy . dx . hx dhy dhx . cx dcy dcx . w . ws . tape"),
        ("BackwardWeights_v8", ". 0 . x . hx . y . dw . ws . tape"),
    ],
}
BACKWARD = ("bwd", "consumed")


def recorded(monkeypatch: pytest.MonkeyPatch) -> tuple[list[tuple[str, tuple[int, ...]]], list[tuple[Any, ...]]]:
    """What runners call from now on: functions of cuDNN with their arguments, and the driver's."""
    made: list[tuple[str, tuple[int, ...]]] = []
    moved: list[tuple[Any, ...]] = []

    def noted(name: str) -> Any:
        def of_network(*arguments: int) -> int:
            assert len(arguments) == len(function(name).argtypes)  # type: ignore[attr-defined]
            made.append((name.removeprefix("cudnnRNN"), arguments))
            return 0

        return of_network

    monkeypatch.setattr(rnn, "handle", lambda device: _Handle())
    monkeypatch.setattr(rnn, "function", noted)
    monkeypatch.setattr(driver, "call", lambda name, *arguments: moved.append((name, *arguments)))
    return made, moved


@pytest.mark.usefixtures("spaces")
@pytest.mark.parametrize("align", [16, 4])
def test_states_that_are_absent_are_zeros_in_the_workspace(align: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made, moved = recorded(monkeypatch)
    given = replace(problem("rnn_bwd", f":{TAPE}"), align=align)
    (config,) = rnn.BWD.configs(given, H200)
    pointers = tuple(0 if o.optional else 1_000_000 * (i + 1) for i, o in enumerate(given.operands))
    rnn.BWD.prepare(given, config, H200)(pointers, (), WORKSPACE, 0)
    parts = rnn._workspace(given, SPACES)
    zeros, state_bytes = WORKSPACE + parts.zeros, 2 * 2 * 5 * 4
    assert moved[0] == ("cuMemsetD8Async", zeros, 0, state_bytes, 0)
    assert parts.zeros + state_bytes <= parts.kept
    data = dict(zip(CALLS["bwd"][0][1].split(), made[0][1][2:], strict=False))
    assert [data[name] for name in ("hx", "dhy", "cx", "dcy")] == [zeros] * 4
    assert all(source for name, _, source, *_ in moved if name == "cuMemcpyDtoDAsync")


@pytest.mark.usefixtures("spaces")
@pytest.mark.parametrize(("kind", "align"), list(product(CALLS, (16, 4))))
def test_the_calls_take_what_the_header_says(kind: str, align: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made, copied = recorded(monkeypatch)
    candidate = rnn.BWD if kind in BACKWARD else rnn.FWD
    end = {"": "", "train": f":train:{TAPE}", "bwd": f":{TAPE}", "consumed": f":{TAPE}/consumed"}[kind]
    given = replace(problem(candidate.op, end), align=align)
    (config,) = candidate.configs(given, H200)
    named = {operand.name: 1_000_000 * (i + 1) + 16 for i, operand in enumerate(given.operands)}
    parts = rnn._workspace(given, SPACES)
    runner = candidate.prepare(given, config, H200)
    runner(tuple(named.values()), (), WORKSPACE, 0)
    at = named | {name: WORKSPACE + offset for name, offset in parts.copies.items()}
    at |= {"ws": WORKSPACE, "kept": WORKSPACE + KEPT_BEHIND + parts.kept + at.get("tape", 0) % 256}
    assert [name for name, _ in made] == [name for name, _ in CALLS[kind]]
    for (_, arguments), (_, places) in zip(made, CALLS[kind], strict=True):
        assert arguments[0] == _Handle.address
        for argument, name in zip(arguments[2:], places.split(), strict=True):
            assert argument not in at.values() if name == "." else argument == at.get(name)
    if align == 4:
        staged = [operand for operand in given.operands if operand.name != "tape"]
        moves = [("cuMemcpyDtoDAsync", at[o.name], named[o.name], o.size_bytes, 0) for o in staged]
        backs = [(name, own, copy, *rest) for name, copy, own, *rest in moves]
        roles = [operand.role for operand in staged]
        expected = [m for m, role in zip(moves, roles, strict=True) if role == "in"]
        expected_back = [b for b, role in zip(backs, roles, strict=True) if role == "out"]
        assert copied[: len(expected)] == expected and copied[-len(expected_back) :] == expected_back
    assert not [
        name for name, address, *_ in copied if name == "cuMemsetD8Async" and address == WORKSPACE + parts.zeros
    ]
    if kind in BACKWARD:
        assert (("cuMemcpyDtoDAsync", at["kept"], at["tape"], 400, 0) in copied) == (kind == "bwd")
        assert ("cuMemsetD8Async", at["dw"], 0, given.parameters.size_elems * 4, 0) in copied
    assert candidate.workspace_bytes(given, config, H200) == parts.end >= (2000 if kind else 1000)


@pytest.mark.usefixtures("spaces")
def test_a_tape_that_is_consumed_needs_no_room_for_a_copy() -> None:
    copied, consumed = problem("rnn_bwd", f":{TAPE}"), problem("rnn_bwd", f":{TAPE}/consumed")
    assert rnn.BWD.supports(consumed, H200) == (True, "")
    saved = rnn._workspace(copied, SPACES).end - rnn._workspace(consumed, SPACES).end
    assert SPACES.kept_bytes <= saved <= SPACES.kept_bytes + 4 * 256


@pytest.mark.parametrize("config", rnn.ALGORITHMS, ids=str)
@pytest.mark.parametrize("op", ["rnn_fwd", "rnn_bwd"])
def test_the_dynamic_algorithm_is_compiled_once_it_is_described(
    op: str, config: rnn.Algorithm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rnn, "_spaces", lambda *_: SPACES)
    monkeypatch.setattr(rnn, "handle", lambda device: _Handle())
    called = []

    def noted(name: str, *arguments: Any) -> None:
        called.append((name, arguments))
        if name == "cudnnBuildRNNDynamic":
            assert len(arguments) == len(function(name).argtypes)  # type: ignore[attr-defined]
        else:
            call(name, *arguments)

    monkeypatch.setattr(rnn, "call", noted)
    given = parse(f"{op}:f16:t3b2i4h5l2:lstm:bi:linear" + (f":tape100/cudnn/rnn/{config}" if op == "rnn_bwd" else ""))
    rnn.FWD.prepare(given, config, H200)  # type: ignore[arg-type]
    (described,) = (arguments[0] for name, arguments in called if name == "cudnnSetRNNDescriptor_v8")
    built = [("cudnnBuildRNNDynamic", (_Handle.address, described, 2))]
    assert called[0][0] == "cudnnSetRNNDescriptor_v8"
    assert [each for each in called if each[0] == built[0][0]] == (built if config == DYNAMIC else [])


def test_what_cannot_be_compiled_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """As without NVRTC, or of a network that has no such kernel."""
    monkeypatch.setattr(rnn, "_spaces", lambda *_: SPACES)
    monkeypatch.setattr(rnn, "handle", lambda device: _Handle())
    real = rnn.call

    def refused(name: str, *arguments: Any) -> None:
        if name == "cudnnBuildRNNDynamic":
            raise StatusError(f"{name} -> CUDNN_STATUS_NOT_SUPPORTED (3000)", Status.NOT_SUPPORTED)
        real(name, *arguments)

    monkeypatch.setattr(rnn, "call", refused)
    given = parse("rnn_fwd:f16:t3b2i4h5l2:lstm:bi:linear")
    with pytest.raises(StatusError, match=r"cudnnBuildRNNDynamic.*NOT_SUPPORTED.*; rnn_fwd:f16:t3b2i4h5l2") as caught:
        rnn.FWD.prepare(given, DYNAMIC, H200)  # type: ignore[arg-type]
    assert caught.value.kind == Status.NOT_SUPPORTED
    assert rnn.FWD.prepare(given, rnn.STANDARD, H200)  # type: ignore[arg-type]
