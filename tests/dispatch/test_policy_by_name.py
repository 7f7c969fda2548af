"""algo= with the name of a method or the id of a candidate, and direction hints."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from fakes import SMALL, TALL, Fake, ids, register
from gpus import H200

import nbdnn
from nbdnn import config, dnn_conv, dnn_conv3d, dnn_gradinput, events
from nbdnn.cudnn import library
from nbdnn.device import cpu_device
from nbdnn.dispatch import dispatcher, policy, registry, selection
from nbdnn.dispatch.policy import Request
from nbdnn.dispatch.selection import Filters
from nbdnn.errors import CudnnError, InvalidProblem, NbdnnWarning, UnsupportedProblem
from nbdnn.problem import parse
from nbdnn.problem_conv import ConvProblem

pytestmark = pytest.mark.usefixtures("fresh")
Call = Callable


def test_a_method_is_run_by_whoever_implements_it(monkeypatch: pytest.MonkeyPatch, call: Call) -> None:
    fakes = [Fake("a", estimate=1.0), Fake("b", estimate=3.0, algo="small"), Fake("c", estimate=2.0, algo="small")]
    register(monkeypatch, *fakes)
    with events() as log:
        call(SMALL, algo="small")
        with config.change(dnn__conv__algo_fwd="small"):
            call(SMALL)
    assert ids(log, "selected") == ["c", "c"]


def test_cudnn_goes_first_in_its_own_methods(monkeypatch: pytest.MonkeyPatch, call: Call) -> None:
    ours, theirs = (
        Fake("ours", estimate=1.0, algo="small"),
        Fake("theirs", estimate=2.0, algo="small", provider="cudnn"),
    )
    register(monkeypatch, ours, theirs)
    with events() as log:
        call(SMALL, algo="small")
        with config.change(dnn__enabled=False):
            call(SMALL, algo="small")
    assert ids(log, "selected") == ["theirs", "ours"]


def test_demanded_cudnn_that_is_not_there_is_an_error_on_gpus_only(monkeypatch: pytest.MonkeyPatch, call: Call) -> None:
    monkeypatch.setattr(library._Process, "outcome", CudnnError("no cuDNN here"))
    with config.change(dnn__enabled=True):
        with pytest.raises(RuntimeError, match="no cuDNN here"):
            selection.survey(SMALL, H200, Filters())
        call(SMALL)


def test_small_gradient_of_data_is_whoever_needs_little_memory() -> None:
    problem = SMALL.with_op("conv_bwd_data")
    fits = Fake("fits", op="conv_bwd_data", workspace_bytes=selection.SMALL_WORKSPACE_BYTES)
    too_big = Fake("big", op="conv_bwd_data", workspace_bytes=selection.SMALL_WORKSPACE_BYTES + 1)
    with pytest.MonkeyPatch.context() as patch:
        register(patch, fits, too_big)
        from nbdnn.device import cpu_device

        options, refused = selection.survey(problem, cpu_device(), selection.Filters(method="small"))
    assert [option.candidate for option in options] == [fits]
    assert "exceeds 1048576" in refused[0].reason


def test_an_impossible_method_falls_back_with_one_warning(monkeypatch: pytest.MonkeyPatch, call: Call) -> None:
    register(monkeypatch, Fake("direct"), Fake("fft", algo="fft", refuses_height=6))
    with (
        events() as log,
        pytest.warns(NbdnnWarning, match="algo='fft'.*fft: height is 6.*direct runs instead") as warned,
    ):
        call(SMALL, algo="fft")
        call(SMALL, algo="fft", layer="another")
    assert len(warned) == 1 and not Path(warned[0].filename).is_relative_to(Path(nbdnn.__file__).parent)
    assert ids(log, "fallback") == ["direct", "direct"]  # one a plan
    assert ids(log, "selected") == ["direct", "direct"]


def test_an_impossible_method_raises_where_the_flag_says_so(monkeypatch: pytest.MonkeyPatch, call: Call) -> None:
    register(monkeypatch, Fake("direct", algo="none"), Fake("fft", algo="fft", refuses_height=6))
    with (
        config.change(dnn__fallback="raise"),
        pytest.raises(UnsupportedProblem, match=r"may not be run by conv_fwd/cpu/fft: height is 6$"),
    ):
        call(SMALL, algo="fft")


def test_what_has_no_name_of_theanos_is_told_by_its_own(monkeypatch: pytest.MonkeyPatch, call: Call) -> None:
    register(monkeypatch, Fake("depthwise"))
    with (
        config.change(dnn__fallback="raise"),
        pytest.raises(UnsupportedProblem, match="depthwise: its method is depthwise, not fft"),
    ):
        call(SMALL, algo="fft")


def test_a_deterministic_request_never_falls_back_to_less(monkeypatch: pytest.MonkeyPatch, call: Call) -> None:
    atomic = Fake("atomic", estimate=1.0, algo="small", deterministic=False)
    register(monkeypatch, atomic, Fake("ordered", estimate=2.0))
    with events() as log, pytest.warns(NbdnnWarning, match="not deterministic"):
        call(SMALL, algo="small", deterministic=True)
    assert ids(log, "selected") == ["ordered"]
    register(monkeypatch, atomic)
    with pytest.raises(UnsupportedProblem, match="not deterministic"):
        call(TALL, algo="small", deterministic=True)


def test_the_method_deterministic_never_falls_back_to_less(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, Fake("atomic", deterministic=False))
    request = Request(filters=Filters(method="deterministic"))
    with pytest.raises(UnsupportedProblem, match="not deterministic"):
        policy.choose(SMALL, cpu_device(), dispatcher.database(), request)


def test_an_id_is_exact(monkeypatch: pytest.MonkeyPatch, call: Call) -> None:
    register(monkeypatch, Fake("short", estimate=9.0, refuses_height=9), Fake("any", estimate=1.0))
    with events() as log:
        call(SMALL, algo="conv_fwd/cpu/short")
    assert ids(log, "selected") == ["short"]
    with pytest.raises(UnsupportedProblem, match="height is 9"):  # whatever dnn.fallback says
        call(TALL, algo="conv_fwd/cpu/short")
    with pytest.raises(InvalidProblem, match=r"no candidate 'conv_fwd/cpu/nobody'; there are conv_fwd/cpu/"):
        call(SMALL, algo="conv_fwd/cpu/nobody")
    with pytest.raises(InvalidProblem, match=r"such as conv_fwd/cpu/im2col or conv_bwd_data/cpu/im2col"):
        call(SMALL, algo="cpu/im2col")
    with pytest.raises(InvalidProblem, match=r"'best/one': an id is .*, such as conv_fwd/cpu/direct$"):
        call(SMALL, algo="best/one")
    with pytest.raises(UnsupportedProblem, match="computes conv_bwd_data, not conv_fwd"):
        call(SMALL, algo="conv_bwd_data/cpu/direct")


def test_the_flag_that_names_nobody_is_told(call: Call) -> None:
    with config.change(dnn__conv__algo_fwd="conv_fwd/cpu/nobody", dnn__policy="softmax_fwd/cpu/nobody"):
        for use in (call, nbdnn.explain):
            with pytest.raises(InvalidProblem, match=r"^flag dnn.conv.algo_fwd: no candidate 'conv_fwd/cpu/nobody'"):
                use(SMALL)
        softmax = "softmax_fwd:f32:n2c3h1w1:accurate:channel:nchw"
        for use, given in ((nbdnn.dnn_softmax, np.ones((2, 3))), (nbdnn.explain, softmax)):
            with pytest.raises(InvalidProblem, match=r"^flag dnn.policy: no candidate 'softmax_fwd/cpu/nobody'"):
                use(given)
    with pytest.raises(InvalidProblem, match=r"^policy: no candidate 'softmax_fwd/cpu/nobody'"):
        nbdnn.dnn_softmax(np.ones((2, 3)), policy="softmax_fwd/cpu/nobody")


def test_a_less_accurate_candidate_is_taken_by_name_only(monkeypatch: pytest.MonkeyPatch, call: Call) -> None:
    register(
        monkeypatch, Fake("fast", 20, estimate=1.0, algo="winograd", by_name_only=True), Fake("exact", estimate=2.0)
    )
    with events() as log:
        call(SMALL)
        call(SMALL, algo="time_on_shape_change")
        call(SMALL, algo="winograd")
        call(SMALL, algo="conv_fwd/cpu/fast")
    assert ids(log, "selected") == ["exact", "exact", "fast", "fast"]


def test_tf32_needs_permission(monkeypatch: pytest.MonkeyPatch, call: Call) -> None:
    register(monkeypatch, Fake("tensor", estimate=1.0, math="tf32"), Fake("exact", estimate=2.0))
    with events() as log:
        call(SMALL)
        call(SMALL, allow_tf32=True)
        with config.change(dnn__allow_tf32=True):
            call(SMALL)
            call(SMALL, allow_tf32=False)
    assert ids(log, "selected") == ["exact", "tensor", "tensor", "exact"]


@pytest.mark.parametrize(
    "problem", [SMALL, parse("conv_fwd:f32:n1c2d4h6w6:k2t2r3s3:p0x0x0:u1x1x1:d1x1x1:g1:conv:ncdhw")]
)
def test_workspace_limit_is_obeyed(monkeypatch: pytest.MonkeyPatch, call: Call, problem: ConvProblem) -> None:
    register(monkeypatch, Fake("big", estimate=1.0, workspace_bytes=1000), Fake("lean", estimate=2.0))
    x, w = np.ones(problem.x_shape, np.float32), np.ones(problem.w_shape, np.float32)
    run = dnn_conv if problem.ndim == 2 else dnn_conv3d
    with events() as log:
        for limit in (None, 1000, 999, 0):
            run(x, w, workspace_limit=limit)
    assert ids(log, "selected") == ["big", "big", "lean", "lean"]


VALID = "conv_fwd:f32:n1c2h6w6:k2r3s3:p0x0:u1x1:d1x1:g1:cross:nchw"


def test_a_hint_lets_the_lowering_race(call: Call) -> None:
    with events() as log:
        call(parse(VALID), algo="time_on_shape_change", direction_hint="bprop weights")
    assert any(id.startswith("bwd_filter_") for id in ids(log, "measured"))
    assert not ids(log, "ignored")
    with events() as log:
        call(parse(VALID), algo="time_on_shape_change", direction_hint="forward!")
    assert not any(id.startswith("bwd_") for id in ids(log, "selected"))


@pytest.mark.parametrize(("hint", "border"), [("bprop weights", "valid"), ("bprop inputs", "full")])
@pytest.mark.parametrize("mode", ["cross", "conv"])
@pytest.mark.parametrize("last", [False, True])
def test_a_lowering_computes_the_forward(hint: str, border: str, mode: str, last: bool) -> None:
    rng = np.random.default_rng(0)
    shapes = ((2, 6, 5, 3), (4, 3, 2, 3)) if last else ((2, 3, 6, 5), (4, 3, 3, 2))
    x, w = (rng.uniform(-1, 1, shape) for shape in shapes)
    if last:
        x, w = np.moveaxis(x, -1, 1), np.moveaxis(w, -1, 1)
    expected = dnn_conv(x, w, border, conv_mode=mode, algo="conv_fwd/cpu/direct")
    for candidate in registry.table("cpu", "conv").lowerings[hint]:
        with contextlib.suppress(UnsupportedProblem):
            np.testing.assert_allclose(dnn_conv(x, w, border, conv_mode=mode, algo=candidate.id), expected, atol=1e-12)
    general = registry.table("cpu", "conv").lowerings[hint][-1].id
    np.testing.assert_allclose(dnn_conv(x, w, border, conv_mode=mode, algo=general), expected, atol=1e-12)


@pytest.mark.parametrize(
    ("hint", "text", "why"),
    [
        ("bprop weights", "conv_fwd:f32:n1c2h6w6:k2r3s3:p1x1:u1x1:d1x1:g1:cross:nchw", "border_mode 'valid'"),
        ("bprop inputs", VALID, "border_mode 'full'"),
        ("bprop inputs", "conv_fwd:f32:n1c2h6w6:k2r3s3:p2x2:u2x1:d1x1:g1:cross:nchw", "stride"),
    ],
)
def test_a_hint_that_does_not_apply_is_ignored(hint: str, text: str, why: str, call: Call) -> None:
    with events() as log:
        call(parse(text), direction_hint=hint)
    assert [why in event.detail for event in log if event.kind == "ignored"] == [True]


def test_deterministic_gradient(call: Call) -> None:
    with events() as log:
        dnn_gradinput(np.ones((2, 2, 3, 3)), np.ones((1, 2, 4, 4)), (1, 2, 6, 6), algo="deterministic")
    assert registry.candidate(next(e.candidate for e in log if e.kind == "selected")).deterministic
