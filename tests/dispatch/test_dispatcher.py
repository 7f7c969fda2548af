"""Plans and memos: what is made once, what is made anew, whose memory is used."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numba
import numpy as np
import pytest
from fakes import SMALL, TALL, Fake, ids, register

import nbdnn
from nbdnn import call_setup, config, dnn_conv, dnn_softmax, events
from nbdnn.dispatch import dispatcher, policy, workspace
from nbdnn.dispatch.policy import Request
from nbdnn.errors import RefusedOperands

pytestmark = pytest.mark.usefixtures("fresh")
Call = Callable
X, W = np.ones(SMALL.x_shape, np.float32), np.ones(SMALL.w_shape, np.float32)


def test_a_repeated_call_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "choose", counted := Counted(policy.choose))
    for _ in range(3):
        dnn_conv(X, W, 1)
    assert counted.calls == 1
    dnn_conv(X, W, (1, 1))  # another way to say the same: another key, the same plan
    assert counted.calls == 2 and len(dispatcher.context()._plans) == 1
    dnn_conv(X, W, 2)
    assert counted.calls == 3 and len(dispatcher.context()._plans) == 2


class Counted:
    def __init__(self, function: Callable) -> None:
        self.calls, self._function = 0, function

    def __call__(self, *args: object) -> object:
        self.calls += 1
        return self._function(*args)


def test_a_new_measurement_reaches_plans_made_before(monkeypatch: pytest.MonkeyPatch, call: Call) -> None:
    register(monkeypatch, Fake("dear", 20, estimate=2.0), Fake("cheap", 200, estimate=1.0))
    with events() as log:
        call(SMALL)
        call(TALL)
        call(SMALL, algo="time_on_shape_change")
        call(SMALL)
        call(TALL)
    selected = [(event.candidate.rpartition("/")[2], event.problem) for event in log if event.kind == "selected"]
    # cheap for SMALL and TALL; dear when timed; SMALL goes over to dear, TALL stays: its plan is not made again.
    assert [name for name, _ in selected] == ["cheap", "cheap", "dear", "dear"]
    assert selected[-1][1] == str(SMALL)


def test_flags_make_their_own_plans(monkeypatch: pytest.MonkeyPatch, call: Call) -> None:
    register(monkeypatch, Fake("atomic", estimate=1.0, deterministic=False), Fake("ordered", estimate=2.0))
    with events() as log:
        for _ in range(2):
            call(SMALL)
            with config.change(dnn__deterministic=True):
                call(SMALL)
    assert ids(log, "selected") == ["atomic", "ordered"]


def test_workspace_that_cannot_be_had_falls_to_the_next(monkeypatch: pytest.MonkeyPatch, call: Call) -> None:
    fakes = (
        Fake("huge", estimate=1.0, workspace_bytes=3000),
        Fake("big", estimate=2.0, workspace_bytes=2000),
        Fake("lean"),
    )
    fakes[-1].estimated = 3.0
    register(monkeypatch, *fakes)
    allocate = workspace._allocate

    def scarce(size_bytes: int) -> workspace.Memory:
        if size_bytes > 1000:
            raise MemoryError
        return allocate(size_bytes)

    monkeypatch.setattr(workspace, "_allocate", scarce)
    with events() as log:
        call(SMALL)
        call(SMALL)
    assert ids(log, "selected") == ["huge", "big", "lean"]
    assert ids(log, "failed") == ["huge", "big"]


@pytest.mark.parametrize("chosen", ["guess_on_shape_change", "guess_once"])
def test_a_guess_that_refuses_its_operands_is_nobodys_again(
    monkeypatch: pytest.MonkeyPatch, call: Call, chosen: str
) -> None:
    fakes = [Fake("picky", estimate=1.0, behaviour="refuses"), Fake("picky_too", estimate=2.0, behaviour="refuses")]
    register(monkeypatch, *fakes, Fake("easy", estimate=3.0))
    with events() as log:
        first = call(SMALL, algo=chosen)
        again = call(SMALL, algo=chosen)
    assert ids(log, "selected") == ["picky", "picky_too", "easy"]
    assert ids(log, "failed") == ["picky", "picky_too"] and "multiple of 16" in str(log)
    assert first.any() and np.array_equal(first, again)
    (row,) = [row for row in nbdnn.explain(SMALL).rows if row.candidate == "conv_fwd/cpu/picky"]
    assert row.source == "failed" and row.reason == "not a multiple of 16"


def test_who_is_named_and_refuses_says_so(monkeypatch: pytest.MonkeyPatch, call: Call) -> None:
    register(monkeypatch, Fake("picky", behaviour="refuses"), Fake("easy"))
    for _ in range(2):
        with pytest.raises(nbdnn.UnsupportedProblem, match="cpu/picky: failed when tried: not a multiple of 16"):
            call(SMALL, algo="conv_fwd/cpu/picky")


def test_who_was_measured_may_not_refuse(monkeypatch: pytest.MonkeyPatch, call: Call) -> None:
    register(monkeypatch, moody := Fake("moody", estimate=1.0), Fake("easy", 500, estimate=2.0))
    call(SMALL, algo="time_on_shape_change")
    moody.behaviour = "refuses"
    with pytest.raises(RefusedOperands):
        call(SMALL)


def test_a_candidate_that_must_run_says_that_memory_is_missing(monkeypatch: pytest.MonkeyPatch, call: Call) -> None:
    register(monkeypatch, Fake("huge", workspace_bytes=1 << 60))
    with pytest.raises(nbdnn.UnsupportedProblem, match=f"workspace of {1 << 60} bytes exceeds"):
        call(SMALL)


def test_workspace_grows_is_aligned_and_shared() -> None:
    workspace.empty()
    first = workspace.take(100)
    assert first.address % 64 == 0 and first.array.ctypes.data <= first.address
    assert first.address + 100 <= first.array.ctypes.data + first.array.nbytes
    assert workspace.take(50) is first
    assert workspace.take(first.size_bytes) is first
    assert workspace.take(first.size_bytes + 1) is not first
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(workspace.take, 100).result().address != workspace.take(100).address
    workspace.empty()
    assert workspace.take(0).size_bytes == 0


def test_empty_cache_costs_nothing_but_time(call: Call) -> None:
    call(SMALL)
    nbdnn.empty_cache()
    call(SMALL)


def test_threads_have_their_own_plans_and_agree() -> None:
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((3, 8, 9, 10)), rng.standard_normal((4, 8, 3, 3))
    expected = dnn_conv(x, w, 1)
    barrier = threading.Barrier(4)

    def work() -> tuple[list[np.ndarray], dispatcher.Context]:
        barrier.wait()
        return [dnn_conv(x, w, 1) for _ in range(20)], dispatcher.context()

    with events(all_threads=True) as everywhere, events() as here, ThreadPoolExecutor(4) as pool:
        results = [future.result() for future in [pool.submit(work) for _ in range(4)]]
    for computed, _ in results:
        assert all(np.allclose(y, expected, rtol=1e-12) for y in computed)
    assert len({id(context) for _, context in results}) == 4
    assert len(ids(everywhere, "selected")) == 4 and not here


def test_threads_that_tune_one_problem_measure_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, Fake("only", 100))
    path = config.tune.db

    def work() -> None:
        with config.change(tune__db=path):
            dnn_conv(X, W, 1, algo="time_on_shape_change")

    with events(all_threads=True) as log, ThreadPoolExecutor(3) as pool:
        for future in [pool.submit(work) for _ in range(3)]:
            future.result()
    threads = {event.detail for event in log if event.kind == "measured"}
    assert len(threads) == len(ids(log, "measured")) == 1


def test_memos_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatcher, "_MAX_MEMO", 3)
    monkeypatch.setattr(config, "_MAX_KEPT", 2)
    for height in range(5, 12):
        dnn_conv(np.ones((1, 1, height, 5)), np.ones((1, 1, 3, 3)))
        assert len(dispatcher.context().memo) <= 3
    for limit in range(5):
        with config.change(dnn__workspace_limit=limit + 10_000):
            dnn_conv(X, W)
    assert len(config._thread.kept) <= 2


def test_plans_are_bounded_while_rows_are_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every store empties the memo, so that plans have to be counted themselves."""
    monkeypatch.setattr(dispatcher, "_MAX_MEMO", 3)
    for height in range(5, 15):
        dnn_conv(np.ones((1, 1, height, 5)), np.ones((1, 1, 3, 3)))
        dispatcher.database().generation += 1
        assert len(dispatcher.context()._plans) <= 3


def test_what_many_flags_kept_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "_MAX_KEPT", 2)
    contexts = []
    for limit in range(3):
        with config.change(dnn__workspace_limit=limit + 10_000):
            dnn_conv(X, W)
            contexts.append(dispatcher.context())
    assert [bool(context._runners) for context in contexts] == [False, False, True]


def test_flags_that_another_thread_sets_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call is remembered for the flags that it was prepared by."""
    real, others = call_setup.request, iter([True])

    def request(*given: object) -> Request:
        if next(others, False):
            config.set_flags(dnn__workspace_limit=12_345)
        return real(*given)

    try:
        with config.change(dnn__policy="guess_on_shape_change"):
            first = dispatcher.context()
            monkeypatch.setattr(call_setup, "request", request)
            dnn_softmax(X)
            assert not first.memo
            (known,) = dispatcher.context().memo.values()
            assert known.request.filters.workspace_limit == 12_345
    finally:
        config.set_flags(dnn__workspace_limit=None)


def test_flags_set_while_a_thread_begins_to_keep_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a signal handler may do."""
    kept = dispatcher._Kept

    def handled(settings: config.Settings) -> object:
        config.set_flags(dnn__deterministic=False)
        return kept(settings)

    try:
        config.set_flags(dnn__deterministic=True)
        monkeypatch.setattr(dispatcher, "_Kept", handled)
        dispatcher.empty_cache()
        dispatcher.context()
        assert config.dnn.deterministic is False
    finally:
        config.set_flags(dnn__deterministic=False)


def test_a_choice_that_cannot_be_prepared_leaves_the_plan_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """No runner meets the workspace of another."""
    register(monkeypatch, Fake("one", workspace_bytes=4096))
    context = dispatcher.context()
    plan = context.plan(SMALL, Request())
    before = plan.ready, plan.choice
    assert before[0][0] == 4096
    other = plan.choice._replace(option=plan.choice.option._replace(workspace_bytes=0))

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(dispatcher.Context, "runner", interrupted)
        with pytest.raises(KeyboardInterrupt):
            plan.take(other)
    assert (plan.ready, plan.choice) == before
    plan.take(other)
    assert plan.ready[0] == 0


def test_the_logger_tells_of_each_plan(caplog: pytest.LogCaptureFixture, call: Call) -> None:
    with caplog.at_level("INFO", logger="nbdnn"):
        call(SMALL)
        call(SMALL)
    assert len([record for record in caplog.records if str(SMALL) in record.getMessage()]) == 1


def test_a_plan_is_one_object_for_a_request() -> None:
    context = dispatcher.context()
    plan = context.plan(SMALL, Request())
    assert context.plan(SMALL, Request()) is plan
    assert context.plan(SMALL, Request(layer="another")) is not plan


@pytest.mark.skipif(numba.config.NUMBA_NUM_THREADS < 2, reason="needs two threads")
def test_another_number_of_threads_is_another_device() -> None:
    alone = dispatcher.context()
    numba.set_num_threads(2)
    both = dispatcher.context()
    assert (alone.device.threads, both.device.threads) == (1, 2)
    with events() as log:
        dnn_conv(X, W, 1)
        numba.set_num_threads(1)
        dnn_conv(X, W, 1)
    assert len(ids(log, "selected")) == 2


def test_ctrl_c_that_the_compiler_swallows_ends_the_call(monkeypatch: pytest.MonkeyPatch, call: Call) -> None:
    register(monkeypatch, Fake("only", behaviour="interrupts unheard"))
    handler, hook = signal.getsignal(signal.SIGINT), sys.unraisablehook
    with pytest.raises(KeyboardInterrupt):
        call(SMALL)
    assert (signal.getsignal(signal.SIGINT), sys.unraisablehook) == (handler, hook)
    heard: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
    try:
        with pytest.raises(RuntimeError, match="no machine code"):  # a program that handles Ctrl-C itself goes on
            call(SMALL)
    finally:
        signal.signal(signal.SIGINT, handler)
    assert heard == [signal.SIGINT]
