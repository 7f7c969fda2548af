"""Measuring: what is checked, what is stored, what an interruption keeps, and how long it takes."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import numpy as np
import pytest
from fakes import SMALL, Fake, ids, register

from nbdnn import InvalidProblem, InvalidType, dnn_conv, events, explain
from nbdnn.array import at
from nbdnn.device import Cpu, cpu_device
from nbdnn.dispatch import benchmark, selection, timing, tuner
from nbdnn.dispatch.check import Check
from nbdnn.dispatch.database import Database
from nbdnn.dispatch.selection import Option
from nbdnn.kernels.cpu import conv_direct
from nbdnn.problem import parse

pytestmark = pytest.mark.usefixtures("fresh")
STRIDED = parse("conv_bwd_filter:bf16:n2c6h9w8:k4r3s2:ba1.2x0.1:u2x1:d1x1:g2:conv:nhwc:a2")


@pytest.fixture
def database(fresh: Path) -> Database:
    return Database(fresh)


def tune(database: Database, **options: object) -> tuner.TuneResult:
    return tuner.tune(SMALL, cpu_device(), database, **options)


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        ("wrong", "times the permitted error"),
        ("lazy", "nan instead of"),
        ("raises", "RuntimeError: out of luck"),
    ],
)
def test_what_is_wrong_is_stored_as_failed(
    monkeypatch: pytest.MonkeyPatch, database: Database, behaviour: str, reason: str
) -> None:
    register(monkeypatch, Fake("bad", 10, behaviour=behaviour), Fake("good", 100))
    with events() as log:
        result = tune(database)
    assert result.best is not None and result.best.candidate.algorithm == "good"
    assert ids(log, "failed") == ["bad"] and ids(log, "measured") == ["good"]
    stored = {row.candidate: row for row in database.rows(cpu_device().fingerprint, str(SMALL))}
    bad = stored["conv_fwd/cpu/bad"]
    assert (bad.status, bad.median_us, bad.samples) == ("failed", None, 0)
    assert reason in bad.reason
    assert stored["conv_fwd/cpu/good"].status in ("ok", "noisy") and stored["conv_fwd/cpu/good"].error < 1


@pytest.mark.parametrize("behaviour", ["interrupts", "interrupts unheard"])
def test_an_interruption_keeps_what_was_measured(
    monkeypatch: pytest.MonkeyPatch, database: Database, behaviour: str
) -> None:
    first, second = Fake("first", estimate=1.0), Fake("second", estimate=2.0, behaviour=behaviour)
    register(monkeypatch, first, second)
    with pytest.raises(KeyboardInterrupt):
        tune(database)
    assert [row.candidate for row in database.rows(cpu_device().fingerprint, str(SMALL))] == ["conv_fwd/cpu/first"]
    second.behaviour = "right"
    result = tune(database)
    assert (first.prepared, second.prepared) == ([""], ["", ""])
    assert (result.complete, result.measured) == (True, 1)


def test_what_a_handler_of_signals_raises_is_no_failure_of_a_candidate(
    monkeypatch: pytest.MonkeyPatch, database: Database
) -> None:
    class Late(Exception):
        pass

    def raise_late(number: int, frame: object) -> None:
        raise Late

    register(monkeypatch, Fake("only", behaviour="is timed out"))
    before = signal.signal(signal.SIGALRM, raise_late)
    try:
        with pytest.raises(Late):
            tune(database)
        assert signal.getsignal(signal.SIGALRM) is raise_late
    finally:
        signal.signal(signal.SIGALRM, before)
    assert not database.rows(cpu_device().fingerprint, str(SMALL))


def test_the_guess_is_measured_whatever_the_budget(monkeypatch: pytest.MonkeyPatch, database: Database) -> None:
    dear, fair = Fake("dear", 20, estimate=3.0), Fake("fair", 200, estimate=2.0)
    register(monkeypatch, dear, Fake("cheap", 1000, estimate=1.0), fair)
    seen = []
    for _ in range(3):
        result = tune(database, budget_s=0.0, progress=lambda *state: seen.append(state))
        assert result.guess.candidate.algorithm == "cheap" and result.measured == 1
    assert seen == [(0, 3, "conv_fwd/cpu/cheap"), (0, 2, "conv_fwd/cpu/fair"), (0, 1, "conv_fwd/cpu/dear")]
    assert result.complete and result.best is not None and result.best.candidate.algorithm == "dear"
    assert tune(database).measured == 0
    assert tune(database, again=True).measured == 3


def test_the_hopeless_cost_little(monkeypatch: pytest.MonkeyPatch, database: Database) -> None:
    many = {f"tile {i}": 5000.0 + i for i in range(24)}
    register(monkeypatch, Fake("good", 300, estimate=1.0), Fake("many", many, estimate=2.0))
    monkeypatch.setattr(timing, "_displacements", lambda: 0)
    result = tune(database)
    samples = {row.config: row.samples for row in result.rows.values()}
    assert samples.pop("") >= 7
    assert sum(samples.values()) < 1.5 * len(samples)
    assert result.seconds < 3


def test_the_guess_is_not_given_up_for_one_sample(monkeypatch: pytest.MonkeyPatch, database: Database) -> None:
    register(monkeypatch, Fake("guessed", 100, estimate=1.0), Fake("other", 300, estimate=2.0))
    monkeypatch.setattr(timing, "_displacements", lambda: 0)
    take = tuner._Race._take

    def take_amiss(race: tuner._Race, watch: timing.Samples, candidate: Fake) -> None:
        take(race, watch, candidate)
        if candidate.algorithm == "guessed" and len(watch.samples_us) == 1:
            watch.samples_us[0] *= 100

    monkeypatch.setattr(tuner._Race, "_take", take_amiss)
    best = tune(database).best
    assert best is not None and best.candidate.algorithm == "guessed"


def test_one_sample_gives_up_no_config_that_should_be_fast(monkeypatch: pytest.MonkeyPatch, database: Database) -> None:
    tiles = {f"tile {i}": 5000.0 for i in range(4)}
    guesses = dict.fromkeys(tiles, 10.0) | {"last": 1.5}
    guessed = Fake("guessed", dict.fromkeys("abc", 1500.0), estimate=1.0)
    register(monkeypatch, guessed, Fake("many", tiles | {"last": 100.0}, estimate=guesses))
    monkeypatch.setattr(timing, "_displacements", lambda: 0)
    enter, last = tuner._Race._enter, []

    def enter_amiss(race: tuner._Race, option: Option) -> None:
        enter(race, option)
        if option.config == "last":
            last.append(race._entrants[-1])
            last[0].watch.samples_us[0] *= 100

    monkeypatch.setattr(tuner._Race, "_enter", enter_amiss)
    best = tune(database).best
    assert best is not None and best.config == "last"
    assert len(last[0].watch.samples_us) > 1


def test_the_callers_operands_are_measured_and_never_written() -> None:
    rng = np.random.default_rng(0)
    x, w = (rng.uniform(-1, 1, shape).astype(np.float32) for shape in (SMALL.x_shape, SMALL.w_shape))
    out = rng.uniform(-1, 1, SMALL.y_shape).astype(np.float32)
    expected = 2 * dnn_conv(x, w, 1, conv_mode="cross") + 3 * out
    kept = x.copy(), w.copy()
    dnn_conv(x, w, 1, conv_mode="cross", algo="time_on_shape_change", alpha=2, beta=3, out=out)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)
    assert all(np.array_equal(*pair) for pair in zip((x, w), kept, strict=True))


def test_operands_rotate_beyond_the_last_level_cache() -> None:
    small_cache = Cpu("cpu", "test", "generic", 16, 1, 1 << 14, 1 << 16)
    given = np.arange(SMALL.operands[0].size_elems, dtype=np.float32), np.ones(SMALL.w_shape, np.float32)
    addresses = (given[0].ctypes.data, given[1].ctypes.data, 0)
    rotation = benchmark.rotating(SMALL, small_cache, 1 << 30, timing.Given(addresses, (1.0, 0.0)))
    span = rotation.pointers[-1][1] - rotation.pointers[0][0]
    assert (1 << 16) < span < (1 << 17)
    assert len({pointers[2] for pointers in rotation.pointers}) == 1  # an output stays where it is
    for pointers in rotation.pointers:
        assert [a % 64 for a in pointers] == [a % 64 for a in addresses]
        np.testing.assert_array_equal(at(pointers[0], given[0].shape, (1,), "f32"), given[0])
    with pytest.raises(MemoryError, match="100 are allowed"):
        benchmark.rotating(SMALL, small_cache, 100)


def test_generated_operands_are_zero_mean_and_as_badly_aligned_as_the_problem_says() -> None:
    operands = timing.Operands(STRIDED, copies=2)
    assert all(pointer % 16 == 2 for pointers in operands.pointers for pointer in pointers)
    x = timing.random_values(parse(str(SMALL).replace("n1", "n1000")).operands[0], np.random.default_rng(0))
    assert abs(x.mean()) < 0.02 and x.min() < -0.99 and 0.99 < x.max() < 1


@pytest.mark.parametrize("problem", [SMALL, STRIDED, parse(str(SMALL) + ":e:bias+relu+res+beta")])
def test_the_check_accepts_what_is_right(problem: object) -> None:
    candidate = conv_direct.BWD_FILTER if problem is STRIDED else conv_direct.FWD
    device = cpu_device()
    (only,) = candidate.configs(problem, device)
    runner = candidate.prepare(problem, only, device)
    verdict = Check(problem, device).run(runner, candidate, candidate.workspace_bytes(problem, only, device))
    assert verdict.reason == "" and 0 <= verdict.error <= 1


def test_near_ties_go_to_less_workspace_then_registry_order(database: Database) -> None:
    a, b, c = (Option(Fake(name, workspace_bytes=size), "", size) for name, size in (("a", 8), ("b", 0), ("c", 0)))

    def choose(times: tuple[float, float, float], spread: float = 0.0) -> str:
        rows = {option.key: _row(time, spread) for option, time in zip((a, b, c), times, strict=True)}
        best = selection.fastest([a, b, c], rows)
        assert best is not None
        return best.candidate.algorithm

    assert choose((100.0, 100.5, 100.2)) == "b"
    assert choose((100.0, 102.0, 110.0)) == "a"
    assert choose((100.0, 102.0, 110.0), spread=0.03) == "b"
    assert choose((100.0, 106.0, 110.0), spread=0.5) == "a"  # noise makes no more than 5% of difference disappear


def _row(median_us: float, spread: float) -> object:
    fields = dict.fromkeys(tuner.Measurement._fields, "")
    return tuner.Measurement(**{**fields, "median_us": median_us, "spread": spread, "status": "ok"})


def test_busy_samples_are_taken_again_and_called_noisy(monkeypatch: pytest.MonkeyPatch, database: Database) -> None:
    register(monkeypatch, Fake("only", 100))
    count = iter(range(0, 10_000, 100))
    monkeypatch.setattr(timing, "_displacements", lambda: next(count))
    with events() as log:
        (row,) = tune(database).rows.values()
    assert row.status == "noisy" and row.samples >= 3 + 8
    assert ids(log, "noisy") == ["only"]


def test_explain_takes_names_of_devices() -> None:
    text = "dropout_fwd:f32:m1000"
    assert explain(text, device="cpu").device == cpu_device()
    with pytest.raises(InvalidProblem, match="device 'gpu' is not cpu, cuda or cuda:N"):
        explain(text, device="gpu")
    with pytest.raises(InvalidType, match="device is 0, expected"):
        explain(text, device=0)  # type: ignore[arg-type]


def test_explain_tells_time_reason_and_choice(monkeypatch: pytest.MonkeyPatch, fresh: Path) -> None:
    fakes = Fake("good", {"x": 100, "y": 30}), Fake("bad", behaviour="raises"), Fake("short", refuses_height=6)
    register(monkeypatch, *fakes)
    with pytest.raises(InvalidType, match="problem is None"):
        explain(None)  # type: ignore[arg-type]
    before = explain(str(SMALL))
    assert [row.source for row in before.rows] == ["cost model", "cost model", ""]
    tune(Database(fresh))
    good, bad, short = explain(SMALL).rows
    assert (good.config, good.source in ("measured", "noisy"), good.chosen) == ("y", True, True)
    assert good.time_us is not None and 30 <= good.time_us < 100
    assert (bad.source, bad.reason, bad.chosen) == ("failed", "RuntimeError: out of luck", False)
    assert (short.supported, short.reason, short.workspace_bytes) == (False, "height is 6", None)
    assert "* " in str(before) and "height is 6" in str(before)


def test_a_child_measures_though_another_thread_did_at_the_fork(
    monkeypatch: pytest.MonkeyPatch, database: Database, tmp_path: Path
) -> None:
    register(monkeypatch, Fake("only", 100))
    measuring, forked = threading.Event(), threading.Event()

    def hold(*_: object) -> None:
        measuring.set()
        forked.wait()

    thread = threading.Thread(target=tune, args=(database,), kwargs={"progress": hold})
    thread.start()
    measuring.wait()
    child = os.fork()
    if child == 0:
        signal.alarm(30)  # ends a child that waits for a thread it does not have
        try:
            os._exit(0 if tune(Database(tmp_path / "child.db")).measured == 1 else 1)
        finally:
            os._exit(2)
    forked.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
