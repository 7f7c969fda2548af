"""The four policies, asserted by what they measured and selected."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from fakes import SMALL, TALL, Fake, ids, register
from gpus import H200

from nbdnn import config, events
from nbdnn.dispatch import dispatcher, registry
from nbdnn.dispatch.measurement import Measurement
from nbdnn.dispatch.policy import OpLayer
from nbdnn.dispatch.selection import Filters, refusal
from nbdnn.errors import UnsupportedProblem
from nbdnn.problem import parse

pytestmark = pytest.mark.usefixtures("fresh")
Call = Callable
FAST, SLOW = 50.0, 1000.0  # far enough apart for a busy machine


def rows() -> dict[str, Measurement]:
    """What the database holds of SMALL, by algorithm."""
    from nbdnn.device import cpu_device

    found = dispatcher.database().rows(cpu_device().fingerprint, str(SMALL))
    return {row.candidate.rpartition("/")[2] + (f" {row.config}" if row.config else ""): row for row in found}


class TestGuessOnShapeChange:
    def test_takes_the_cost_models_first_and_measures_nothing(
        self, monkeypatch: pytest.MonkeyPatch, call: Call
    ) -> None:
        register(monkeypatch, Fake("dear", FAST, estimate=9.0), Fake("cheap", SLOW, estimate=2.0))
        with events() as log:
            call(SMALL)
            call(SMALL)
        assert ids(log, "selected") == ["cheap"]
        assert not ids(log, "measured") and not rows()

    def test_takes_the_fastest_measured(self, monkeypatch: pytest.MonkeyPatch, call: Call) -> None:
        register(monkeypatch, Fake("dear", FAST, estimate=9.0), Fake("cheap", SLOW, estimate=2.0))
        call(SMALL, algo="time_on_shape_change")
        with events() as log:
            call(SMALL)
            call(TALL)
        assert ids(log, "selected") == ["dear", "cheap"]  # TALL has no measurements

    def test_asks_only_what_was_measured_as_fast(
        self, monkeypatch: pytest.MonkeyPatch, call: Call, restart: Callable[[], None]
    ) -> None:
        fast, slow = Fake("fast", FAST, estimate=9.0), Fake("slow", SLOW, estimate=1.0)
        asked: list[str] = []
        register(monkeypatch, slow, fast)
        call(SMALL, algo="time_on_shape_change")
        for fake in (fast, slow):
            supports = type(fake).supports

            def counted(problem: object, device: object, fake: Fake = fake, supports: Callable = supports) -> object:
                asked.append(fake.algorithm)
                return supports(fake, problem, device)

            fake.supports = counted
        restart()
        with events() as log:
            call(SMALL)
            fast.refuses_height = 6
            restart()
            call(SMALL)
        assert ids(log, "selected") == ["fast", "slow"]
        assert asked == ["fast", "fast", "slow"]

    def test_near_ties_go_to_the_smaller_workspace_and_then_to_the_first(
        self, monkeypatch: pytest.MonkeyPatch, call: Call
    ) -> None:
        big = Fake("big", workspace_bytes=4096)
        register(monkeypatch, big, Fake("first"), Fake("second"), Fake("slow", SLOW))
        call(SMALL, algo="time_on_shape_change")
        found = rows()
        for name, us in (("big", 100.0), ("first", 100.9), ("second", 100.8)):
            dispatcher.database().store([found[name]._replace(median_us=us, spread=0.0)])
        with events() as log:
            call(SMALL)
        assert ids(log, "selected") == ["first"]

    def test_never_takes_what_failed(
        self, monkeypatch: pytest.MonkeyPatch, call: Call, restart: Callable[[], None]
    ) -> None:
        wrong, right = Fake("wrong", FAST, estimate=1.0, behaviour="wrong"), Fake("right", SLOW, estimate=2.0)
        register(monkeypatch, wrong, right)
        with config.change(tune__budget_s=0):
            call(SMALL, algo="time_on_shape_change")  # the guess is measured first, and there is no time for another
        assert list(rows()) == ["wrong"]
        restart()
        with events() as log:
            call(SMALL)
        assert ids(log, "selected") == ["right"]


class TestGuessOnce:
    def test_reuses_the_layers_choice(self, monkeypatch: pytest.MonkeyPatch, call: Call) -> None:
        first, second = Fake("first", estimate=1.0), Fake("second", estimate=2.0)
        register(monkeypatch, first, second)
        with events() as log:
            call(SMALL, algo="guess_once")
            first.estimated = 3.0
            call(TALL, algo="guess_once")
            call(TALL, algo="guess_once", layer="another")
            call(TALL)
        assert ids(log, "selected") == ["first", "first", "second", "second"]

    def test_a_number_is_a_name_and_an_op_is_nobody_elses_layer(
        self, monkeypatch: pytest.MonkeyPatch, call: Call
    ) -> None:
        first, op = Fake("first", estimate=1.0), OpLayer()
        register(monkeypatch, first, Fake("second", estimate=2.0))
        with events() as log:
            for layer in (3, op):
                call(SMALL, algo="guess_once", layer=layer)
            first.estimated = 3.0
            for layer in ("3", op, OpLayer(), "4"):
                call(TALL, algo="guess_once", layer=layer)
        assert ids(log, "selected") == ["first"] * 4 + ["second"] * 2

    def test_replaces_a_choice_that_does_not_fit(self, monkeypatch: pytest.MonkeyPatch, call: Call) -> None:
        short, any_height = Fake("short", estimate=1.0, refuses_height=9), Fake("any", estimate=2.0)
        register(monkeypatch, short, any_height)
        with events() as log:
            call(SMALL, algo="guess_once")
            call(TALL, algo="guess_once")
        assert ids(log, "selected") == ["short", "any"]
        assert [event.detail for event in log if event.kind == "replaced"] == ["height is 9"]

    def test_filters_win_over_what_is_remembered(self, monkeypatch: pytest.MonkeyPatch, call: Call) -> None:
        register(monkeypatch, Fake("atomic", estimate=1.0, deterministic=False), Fake("ordered", estimate=2.0))
        with events() as log:
            call(SMALL, algo="guess_once")
            call(SMALL, algo="guess_once", deterministic=True)
        assert ids(log, "selected") == ["atomic", "ordered"]
        assert ids(log, "replaced") == ["atomic"]

    def test_is_of_this_process_only(
        self, monkeypatch: pytest.MonkeyPatch, call: Call, restart: Callable[[], None]
    ) -> None:
        first = Fake("first", estimate=1.0)
        register(monkeypatch, first, Fake("second", estimate=2.0))
        call(SMALL, algo="guess_once")
        first.estimated = 3.0
        restart()
        with events() as log:
            call(SMALL, algo="guess_once")
        assert ids(log, "selected") == ["second"]


class TestTimeOnShapeChange:
    def test_measures_every_candidate_and_config_once(self, monkeypatch: pytest.MonkeyPatch, call: Call) -> None:
        tiled = Fake("tiled", {"big": SLOW, "small": FAST}, estimate=3.0)
        register(monkeypatch, tiled, Fake("plain", 4 * SLOW, estimate=1.0))
        with events() as log:
            call(SMALL, algo="time_on_shape_change")
            call(SMALL, algo="time_on_shape_change")
        assert ids(log, "measured") == ["plain", "tiled", "tiled"]  # the guess first
        assert ids(log, "selected") == ["tiled"]
        assert set(rows()) == {"plain", "tiled big", "tiled small"}
        assert tiled.prepared == ["big", "small", "small"]

    def test_goes_by_shape(self, monkeypatch: pytest.MonkeyPatch, call: Call) -> None:
        register(monkeypatch, Fake("only", FAST))
        with events() as log:
            call(SMALL, algo="time_on_shape_change")
            call(TALL, algo="time_on_shape_change")
        assert ids(log, "measured") == ["only", "only"]  # one applicable candidate is measured as well

    def test_takes_complete_measurements_from_the_database(
        self, monkeypatch: pytest.MonkeyPatch, call: Call, restart: Callable[[], None]
    ) -> None:
        register(monkeypatch, Fake("fast", FAST, estimate=2.0), Fake("slow", SLOW, estimate=1.0))
        call(SMALL, algo="time_on_shape_change")
        restart()
        with events() as log:
            call(SMALL, algo="time_on_shape_change")
        assert ids(log, "selected") == ["fast"] and not ids(log, "measured")

    def test_wider_filters_measure_only_what_is_missing(self, monkeypatch: pytest.MonkeyPatch, call: Call) -> None:
        atomic, big = Fake("atomic", SLOW / 4, deterministic=False), Fake("big", FAST, workspace_bytes=4096)
        register(monkeypatch, atomic, Fake("ordered", SLOW), big)
        with events() as log:
            call(SMALL, algo="time_on_shape_change", deterministic=True, workspace_limit=0)
            call(SMALL, algo="time_on_shape_change", workspace_limit=0)
            call(SMALL, algo="time_on_shape_change")
        assert ids(log, "measured") == ["ordered", "atomic", "big"]
        assert ids(log, "selected") == ["ordered", "atomic", "big"]

    def test_measures_a_changed_candidate_again(
        self, monkeypatch: pytest.MonkeyPatch, call: Call, restart: Callable[[], None]
    ) -> None:
        changed, same = Fake("changed", FAST), Fake("same", SLOW)
        register(monkeypatch, changed, same)
        call(SMALL, algo="time_on_shape_change")
        changed.version = "2"
        restart()
        with events() as log:
            call(SMALL, algo="time_on_shape_change")
        assert ids(log, "measured") == ["changed"]
        assert set(ids(log, "rejected")) == {"changed"}

    def test_a_spent_budget_is_not_spent_again_in_this_process(
        self, monkeypatch: pytest.MonkeyPatch, call: Call, restart: Callable[[], None]
    ) -> None:
        register(monkeypatch, Fake("first", FAST, estimate=1.0), Fake("second", SLOW, estimate=2.0))
        with config.change(tune__budget_s=0), events() as log:
            call(SMALL, algo="time_on_shape_change")
            call(SMALL, algo="time_on_shape_change")
            assert ids(log, "measured") == ["first"]
            restart()
            call(SMALL, algo="time_on_shape_change")
        assert ids(log, "measured") == ["first", "second"]

    @pytest.mark.parametrize("mode", ["read-only", "off"])
    def test_measures_once_a_process_where_nothing_is_written(
        self, monkeypatch: pytest.MonkeyPatch, call: Call, mode: str, fresh: Path
    ) -> None:
        register(monkeypatch, Fake("only", FAST))
        with config.change(tune__mode=mode), events() as log:
            call(SMALL, algo="time_on_shape_change")
            call(SMALL, algo="time_on_shape_change", layer="another")
        assert ids(log, "measured") == ["only"]
        assert not fresh.exists()

    def test_without_memory_for_a_copy_it_guesses(self, monkeypatch: pytest.MonkeyPatch, call: Call) -> None:
        from nbdnn.device import Cpu

        register(monkeypatch, Fake("only", FAST))
        monkeypatch.setattr(Cpu, "free_memory_bytes", lambda self: 100)
        with events() as log:
            call(SMALL, algo="time_on_shape_change")
        assert ids(log, "selected") == ["only"] and not ids(log, "measured")
        assert log[0].kind == "failed"


def test_guess_once_keeps_a_layers_choice_where_one_caller_has_less_memory(
    monkeypatch: pytest.MonkeyPatch, call: Call
) -> None:
    register(monkeypatch, Fake("large", FAST, workspace_bytes=64, estimate=1.0), Fake("small", SLOW, estimate=2.0))
    with events() as log:
        call(SMALL, algo="guess_once")
        call(SMALL, algo="guess_once", workspace_limit=0)
        call(TALL, algo="guess_once")
    assert ids(log, "selected") == ["large", "small", "large"]


class TestTimeOnce:
    def test_measures_the_first_shape_only(self, monkeypatch: pytest.MonkeyPatch, call: Call) -> None:
        register(monkeypatch, Fake("fast", FAST, estimate=2.0), Fake("slow", SLOW, estimate=1.0))
        with events() as log:
            call(SMALL, algo="time_once")
            call(TALL, algo="time_once")
        assert ids(log, "measured") == ["slow", "fast"]
        assert ids(log, "selected") == ["fast", "fast"]

    def test_once_means_once_a_database(
        self, monkeypatch: pytest.MonkeyPatch, call: Call, restart: Callable[[], None]
    ) -> None:
        register(monkeypatch, Fake("fast", FAST, estimate=2.0), Fake("slow", SLOW, estimate=1.0))
        call(SMALL, algo="time_once")
        restart()
        with events() as log:
            call(TALL, algo="time_once")
            assert not ids(log, "measured")
            call(TALL, algo="time_once", layer=OpLayer())
            assert not ids(log, "measured")
            call(TALL, algo="time_once", layer=3)
        assert len(ids(log, "measured")) == 2

    def test_complete_measurements_of_the_problem_win(self, monkeypatch: pytest.MonkeyPatch, call: Call) -> None:
        moody = Fake("moody", FAST)
        register(monkeypatch, moody, Fake("steady", 2 * FAST))
        call(SMALL, algo="time_once")
        moody.us = {"": SLOW}
        call(TALL, algo="time_on_shape_change")
        with events() as log:
            call(TALL, algo="time_once")
        assert ids(log, "selected") == ["steady"]

    def test_replaces_a_choice_that_does_not_fit(self, monkeypatch: pytest.MonkeyPatch, call: Call) -> None:
        register(monkeypatch, Fake("short", FAST, refuses_height=9), Fake("any", SLOW))
        with events() as log:
            call(SMALL, algo="time_once")
            call(TALL, algo="time_once")
        assert ids(log, "selected") == ["short", "any"]
        assert ids(log, "replaced") == ["short"]

    def test_a_caller_with_less_memory_takes_nothing_from_the_others(
        self, monkeypatch: pytest.MonkeyPatch, call: Call
    ) -> None:
        register(monkeypatch, Fake("large", FAST, workspace_bytes=64), Fake("small", SLOW))
        with events() as log:
            call(SMALL, algo="time_once")
            call(TALL, algo="time_once", workspace_limit=0)
            call(TALL, algo="time_once")
        assert ids(log, "selected") == ["large", "small", "large"]
        assert ids(log, "measured") == ["large", "small", "small"]

    def test_a_stale_choice_does_not_count(
        self, monkeypatch: pytest.MonkeyPatch, call: Call, restart: Callable[[], None]
    ) -> None:
        fake = Fake("changed", FAST)
        register(monkeypatch, fake)
        call(SMALL, algo="time_once")
        fake.version = "2"
        restart()
        with events() as log:
            call(TALL, algo="time_once")
        assert "changed" in ids(log, "rejected") and ids(log, "measured") == ["changed"]


def test_real_candidates_are_measured_and_the_fastest_is_taken(call: Call) -> None:
    with events() as log:
        call(SMALL, algo="time_on_shape_change")
    times = {name: row.median_us for name, row in rows().items()}
    assert set(ids(log, "measured")) == {name.partition(" ")[0] for name in times}
    selected = next(event for event in log if event.kind == "selected")
    best = min(times, key=times.__getitem__)
    ours = [time for name, time in times.items() if selected.candidate.endswith("/" + name.partition(" ")[0])]
    assert min(ours) <= 1.05 * times[best]


def test_nobody_left_is_an_error_with_every_reason(monkeypatch: pytest.MonkeyPatch, call: Call) -> None:
    register(monkeypatch, Fake("wrong", FAST, behaviour="wrong"), Fake("short", FAST, refuses_height=6))
    with pytest.raises(UnsupportedProblem, match=r"(?s)short: height is 6.*wrong: failed when tried"):
        call(SMALL, algo="time_on_shape_change")


def test_kernels_are_for_gpus_that_know_their_instructions() -> None:
    problem, turing = parse("dropout_fwd:f16:m1000"), replace(H200, capability=(7, 5))
    (candidate,) = registry.candidates(problem.op, kind="cuda")
    assert refusal(candidate, problem, H200, Filters()) == ""
    assert refusal(candidate, problem, turing, Filters()) == "compute capability 7.5, its kernels are for 8.0 and above"
