"""Arrays that are recognised without being read: the same results, and nothing that differs goes unnoticed."""

from __future__ import annotations

import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numba
import numpy as np
import pytest

from nbdnn import config, dnn_batch_normalization_train, dnn_conv, dnn_pool, dnn_softmax, events
from nbdnn.array import library_of
from nbdnn.device import cpu_device
from nbdnn.dispatch import dispatcher
from nbdnn.errors import InvalidProblem, InvalidType
from nbdnn.problem import parse

SHAPE = 2, 4, 6, 6
# Of calls with nothing but arrays.
_ARGUMENTS = "softmax_fwd", "accurate", "channel", None, None, None, None, None
_CONV = (
    "conv_fwd", 2, None, "valid", (1, 1), (1, 1), "conv", None, None, None, 1, None, None, None, None, None, False
)  # fmt: skip


@pytest.fixture
def guards(torch: ModuleType) -> None:
    """Of PyTorch are there to be tested: with a release whose guards are not used this fails."""
    from nbdnn import array_torch

    releases = "is not between the releases whose guards nbdnn uses (array_torch.py)"
    assert array_torch._TensorGuards is not None, f"PyTorch {torch.__version__} {releases}"


@pytest.mark.usefixtures("guards")
def test_what_differs_is_noticed(torch: ModuleType) -> None:
    x, y = torch.randn(SHAPE), torch.randn(SHAPE)
    recognise = library_of(x).recogniser((x, None, y))
    assert recognise((x, None, y)) == [x.data_ptr(), 0, y.data_ptr()]
    other = torch.randn(SHAPE)
    assert recognise((other, None, x)) == [other.data_ptr(), 0, x.data_ptr()]
    unlike = {
        "shape": torch.randn(2, 4, 6, 7),
        "rank": torch.randn(2, 4, 36),
        "strides": other.transpose(2, 3),
        "layout": other.to(memory_format=torch.channels_last),
        "dtype": other.double(),
        "device": other.to("meta"),
        "type": torch.nn.Parameter(other),
        "sign": torch._neg_view(other),
        "sparsity": other.to_sparse(),
        "library": other.numpy(),
        "absence": None,
    }
    for different in unlike.values():
        assert recognise((different, None, y)) is None
        assert recognise((x, None, different)) is None
    assert recognise((x, other, y)) is None
    assert recognise((x, None, y)) is not None


@pytest.mark.usefixtures("guards")
def test_what_guards_do_not_take_is_recognised_by_its_facts(torch: ModuleType) -> None:
    x, other = torch.randn(SHAPE), torch.randn(SHAPE)
    twice, mixed = (library_of(x).recogniser((x, each)) for each in (x, x.numpy()))
    assert twice((other, other)) == [other.data_ptr(), other.data_ptr()]
    assert twice((other, other.numpy())) is None
    assert twice((other, x)) == [other.data_ptr(), x.data_ptr()]
    assert mixed((other, x.numpy())) == [other.data_ptr(), x.data_ptr()]
    for different in (
        (other, x),
        (other, None),
        (other,),
        (other, x.numpy()[:, ::-1]),
        (torch._neg_view(x), x.numpy()),
    ):
        assert mixed(different) is None


def test_calls_in_turn_have_their_own_results(torch: ModuleType) -> None:
    """More kinds of arrays than are recognised, one shape among them in several."""
    every = [torch.randn(SHAPE).to(memory_format=layout) for layout in (torch.contiguous_format, torch.channels_last)]
    every += [each.double() for each in every] + [torch.randn(SHAPE).transpose(2, 3), torch.randn(3, 4, 6, 6)]
    every += [torch.randn(SHAPE, dtype=torch.float64).transpose(2, 3), every[0].bfloat16()]
    for _ in range(3):
        for x in every:
            torch.testing.assert_close(dnn_softmax(x), torch.softmax(x, 1))
            out = torch.empty_like(x)
            assert dnn_softmax(x, out=out) is out
            torch.testing.assert_close(out, torch.softmax(x, 1))


def test_arrays_that_are_there_or_not(torch: ModuleType) -> None:
    x, w, bias, residual = torch.randn(SHAPE), torch.randn(4, 4, 1, 1), torch.randn(4), torch.randn(SHAPE)
    plain = torch.nn.functional.conv2d(x, w)
    given: list[tuple[dict[str, Any], Any]] = [
        ({}, plain), ({"bias": bias}, plain + bias[:, None, None]), ({"residual": residual}, plain + residual),
        ({"bias": bias, "residual": residual}, plain + bias[:, None, None] + residual),
    ]  # fmt: skip
    for _ in range(2):
        for options, expected in given:
            torch.testing.assert_close(dnn_conv(x, w, **options), expected)
            out = torch.empty_like(plain)
            dnn_conv(x, w, out=out, **options)
            torch.testing.assert_close(out, expected)
    gamma, beta, mean, variance = (torch.rand(1, 4, 1, 1) for _ in range(4))
    for _ in range(2):
        assert len(dnn_batch_normalization_train(x, gamma, beta, "spatial")) == 3
        running = {"running_mean": mean, "running_var": variance}
        assert len(dnn_batch_normalization_train(x, gamma, beta, "spatial", **running)) == 5


def test_errors_are_those_of_arrays_that_are_read(torch: ModuleType) -> None:
    x = torch.randn(SHAPE)
    out = torch.empty_like(x)
    for _ in range(2):
        dnn_softmax(x, out=out)
        with pytest.raises(InvalidProblem, match="overlaps"):
            dnn_softmax(x, out=x)
        with pytest.raises(InvalidProblem, match=r"\(2, 4, 6, 7\)"):
            dnn_softmax(x, out=torch.empty(2, 4, 6, 7))
        with pytest.raises(InvalidProblem, match=r"ws is \[2, 2\]"):
            dnn_pool(x, [2, 2])
        with pytest.raises(InvalidType, match="x: a tensor that PyTorch has yet to negate"):
            dnn_softmax(torch._neg_view(x))
        with pytest.raises(InvalidType, match="out: a tensor that PyTorch has yet to negate"):
            dnn_softmax(x, out=torch._neg_view(out))


def test_an_output_that_moves_onto_its_input_is_refused(torch: ModuleType) -> None:
    both = torch.randn(2 * 2 * 4 * 6 * 6)
    x, size = both[:288].view(SHAPE), 288
    dnn_softmax(x, out=both[size:].view(SHAPE))
    with pytest.raises(InvalidProblem, match="overlaps"):
        dnn_softmax(x, out=both[size - 32 : -32].view(SHAPE))


@pytest.mark.usefixtures("guards")
def test_flags_and_threads_have_their_own_plans(torch: ModuleType) -> None:
    """None runs what another prepared: of the same arrays each knows a call of its own."""
    x = torch.randn(SHAPE)

    def known() -> Any:
        for _ in range(2):
            torch.testing.assert_close(dnn_softmax(x), torch.softmax(x, 1))
        (known,) = dispatcher.alike(_ARGUMENTS, (x, None))
        return known.call

    dispatcher.empty_cache()
    ours = known()
    with config.change(dnn__deterministic=True):
        assert known() is not ours
    with ThreadPoolExecutor(1) as other:
        assert other.submit(known).result() is not ours
    assert known() is ours


@pytest.mark.usefixtures("guards")
def test_tensors_are_not_kept_and_memos_stay_small(torch: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(SHAPE)
    seen = weakref.ref(x)
    dnn_softmax(x)
    dnn_softmax(x)
    del x
    assert seen() is None
    monkeypatch.setattr(dispatcher, "_MAX_MEMO", 3)
    for height in range(5, 12):
        dnn_softmax(torch.randn(1, 2, height, 5))
        known = config.kept(dispatcher._Kept).known
        assert 1 <= sum(map(len, known.values())) <= 3


def test_of_many_kinds_few_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are looked up, and none is tried at every call."""
    x, made = np.random.default_rng(0).standard_normal((2, 3, 5, 7), np.float32), []
    monkeypatch.setattr(
        dispatcher, "_recogniser", lambda arrays, library: made.append(library) or (lambda others: None)
    )
    for _ in range(20):
        np.testing.assert_allclose(dnn_softmax(x).sum(1), 1, rtol=1e-5)
    assert len(made) == dispatcher._MOST_ALIKE


@pytest.mark.usefixtures("guards")
def test_what_is_known_already_is_not_kept_once_more(torch: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of calls that are looked up although they are known: with a stream, or in another context."""
    x = torch.randn(2, 3, 5, 13)
    dispatcher.empty_cache()
    for _ in range(3):
        torch.testing.assert_close(dnn_softmax(x), torch.softmax(x, 1))
        (known,) = dispatcher.alike(_ARGUMENTS, (x, None))
        monkeypatch.setattr(dispatcher, "alike", lambda arguments, arrays: ())
        torch.testing.assert_close(dnn_softmax(x), torch.softmax(x, 1))
        monkeypatch.undo()
    assert dispatcher.alike(_ARGUMENTS, (x, None)) == [known]


@pytest.mark.usefixtures("guards")
@pytest.mark.skipif(numba.config.NUMBA_NUM_THREADS < 2, reason="needs two threads")
def test_a_known_call_follows_the_number_of_threads(torch: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    x, before = torch.randn(2, 3, 5, 17), numba.get_num_threads()
    expected = torch.softmax(x, 1)
    dispatcher.empty_cache()
    try:
        for threads in (1, 2):
            numba.set_num_threads(threads)
            for _ in range(2):
                torch.testing.assert_close(dnn_softmax(x), expected)
        one, two = dispatcher.alike(_ARGUMENTS, (x, None))
        assert (one.context.device.threads, two.context.device.threads) == (1, 2)
        monkeypatch.setattr(type(library_of(x)), "read_all", lambda self, arrays: pytest.fail("read"))
        for threads, ours, other in ((1, one, two), (2, two, one)):
            numba.set_num_threads(threads)
            ours.call.latest = other.call.latest = None, ()
            torch.testing.assert_close(dnn_softmax(x), expected)
            assert ours.call.latest[0] and not other.call.latest[0], "the plan of another number of threads ran"
    finally:
        numba.set_num_threads(before)


@pytest.mark.usefixtures("guards")
def test_every_device_knows_its_calls(torch: ModuleType) -> None:
    x, known = torch.randn(SHAPE), dict[tuple, Any]()
    devices = [replace(cpu_device(), threads=count) for count in range(1, dispatcher._MOST_ALIKE + 3)]
    contexts = [dispatcher.Context(device, dispatcher.database(), known) for device in devices]
    for context in contexts * 2:
        context.recognise(_ARGUMENTS, (x, None), library_of(x), "call")
    assert [each.context for each in known[_ARGUMENTS][x.shape]] == contexts


@pytest.mark.usefixtures("guards")
def test_a_call_with_a_stream_is_known(torch: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(2, 3, 5, 29)
    dnn_softmax(x)
    monkeypatch.setattr(type(library_of(x)), "read_all", lambda self, arrays: pytest.fail("read"))
    torch.testing.assert_close(dnn_softmax(x, stream=0), torch.softmax(x, 1))


@pytest.mark.usefixtures("guards")
def test_a_known_call_follows_the_database(torch: ModuleType, tmp_path: Path) -> None:
    """What was measured since decides the next call."""
    x, w = torch.randn(1, 3, 9, 9), torch.randn(4, 3, 3, 3)
    with config.change(tune__db=str(tmp_path / "tuning.db"), tune__budget_s=20):
        expected = dnn_conv(x, w)
        with events() as log:
            dnn_conv(x, w, algo="time_on_shape_change")
        device, problem = dispatcher.context().device.fingerprint, log[0].problem
        for candidate in ("conv_fwd/cpu/direct", "conv_fwd/cpu/pixel_gemm"):
            rows = dispatcher.database().rows(device, problem)
            times = {row: 1.0 if row.candidate == candidate else 1e4 for row in rows}
            dispatcher.database().store([row._replace(median_us=us, spread=0.0) for row, us in times.items()])
            for _ in range(2):
                torch.testing.assert_close(dnn_conv(x, w), expected)
            (known,) = dispatcher.alike(_CONV, (x, w, None, None, None))
            assert known.call.plan.choice.option.candidate.id == candidate


@pytest.mark.usefixtures("guards")
def test_what_is_not_aligned_does_not_keep_others_from_being_recognised(
    torch: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    aside, x = torch.randn(1 + 330)[1:].view(2, 3, 5, 11), torch.randn(2, 3, 5, 11)
    for _ in range(20):
        torch.testing.assert_close(dnn_softmax(aside), torch.softmax(aside, 1))
    dnn_softmax(x)
    (known,) = dispatcher.alike(_ARGUMENTS, (x, None))
    assert known.call.latest[0] == [x.data_ptr(), 0]
    torch.testing.assert_close(dnn_softmax(aside), torch.softmax(aside, 1))
    assert known.call.latest[0] == [x.data_ptr(), 0], "what is not aligned ran as if it were"
    monkeypatch.setattr(type(library_of(x)), "read_all", lambda self, arrays: pytest.fail("read"))
    torch.testing.assert_close(dnn_softmax(x), torch.softmax(x, 1))


@pytest.mark.usefixtures("no_plans")
def test_what_is_not_aligned_beside_a_tensor_has_a_problem_of_its_own(torch: ModuleType) -> None:
    x, memory = torch.randn(2, 3, 5, 11), np.zeros(4 + 330, np.float32)
    first = -memory.ctypes.data % 16 // 4
    aligned, aside = (memory[start : start + 330].reshape(2, 3, 5, 11) for start in (first, first + 1))
    keys = [library_of(x).read_all((x, out))[1] for out in (aligned, aside)]
    assert keys[0] != keys[1]
    with events() as log:
        for out in (aligned, aside, aligned, aside):
            np.testing.assert_allclose(dnn_softmax(x, out=out), torch.softmax(x, 1), rtol=1e-5)
    assert {parse(event.problem).align for event in log} == {4, 16}


def test_what_has_no_shape_is_refused_as_ever(torch: ModuleType) -> None:
    ragged = torch.nested.nested_tensor([torch.randn(3, 4), torch.randn(2, 4)])
    with pytest.raises(InvalidType, match=r"x: a .* tensor: it must be dense"):
        dnn_softmax(ragged)


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_between_the_graphs_of_torch_compile(torch: ModuleType) -> None:
    softmax = torch.compiler.disable(dnn_softmax)
    x = torch.randn(4, 5)
    for _ in range(2):  # and what is recognised
        y = torch.compile(lambda x: softmax(x * 2) + 1, backend="eager")(x)
        torch.testing.assert_close(y, torch.softmax(x * 2, 1) + 1)


def test_what_is_traced_has_no_values(torch: ModuleType) -> None:
    for traced in (torch.vmap(dnn_softmax), torch.func.grad(lambda x: dnn_softmax(x).sum())):
        with pytest.raises(InvalidType, match=r"x: .* cannot be called inside torch.vmap or torch.func"):
            traced(torch.randn(2, 3, 4))


@pytest.mark.usefixtures("guards")
def test_a_recognised_call_reads_no_array(torch: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without this the tests above could pass by reading."""
    x = torch.randn(SHAPE)
    expected = dnn_softmax(x)
    kind = type(library_of(x))
    with monkeypatch.context() as patched:
        patched.setattr(kind, "read_all", lambda self, arrays: pytest.fail("read"))
        again = dnn_softmax(torch.empty_like(x).copy_(x))
    assert np.array_equal(again, expected)
