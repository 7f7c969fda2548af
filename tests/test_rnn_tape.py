"""Tapes that only their writer understands: in a problem's text, to the reference, and who may run them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import nbdnn
from nbdnn import InvalidProblem, RNNBlock, UnsupportedProblem, reference_rnn
from nbdnn.problem import parse
from nbdnn.problem_rnn import OwnTape, RnnProblem

OWN = "rnn_bwd:f32:t4b2i3h5l2:lstm:bi:linear:tape100/cudnn/rnn/standard"


def own() -> RnnProblem:
    problem = parse(OWN)
    assert isinstance(problem, RnnProblem)
    return problem


def test_its_problem_says_whose_it_is_and_how_large() -> None:
    problem = own()
    assert problem.tape == OwnTape(100, "cudnn/rnn/standard") and problem.only == "cudnn/rnn"
    assert problem.operands[problem.places["tape"]].shape == (100,)
    assert str(problem) == OWN and parse(OWN + ":a4") == replace(problem, align=4)
    assert problem.layer == "rnn_bwd:f32:i3h5l2:lstm:bi:linear:tape/cudnn/rnn/standard"
    forward = replace(problem, op="rnn_fwd", training=True)
    assert parse(str(forward)) == forward
    assert replace(problem, tape=None).only == ""


def test_its_problem_says_that_it_is_consumed() -> None:
    problem = parse(OWN + "/consumed")
    assert isinstance(problem, RnnProblem)
    assert problem.tape == OwnTape(100, "cudnn/rnn/standard", consumed=True) and problem.only == "cudnn/rnn"
    assert str(problem) == OWN + "/consumed" and problem.tape.retained == own().tape
    assert problem.layer == "rnn_bwd:f32:i3h5l2:lstm:bi:linear:tape/cudnn/rnn/standard/consumed"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("rnn_fwd:f32:t4b2i3h5l2:lstm:bi:linear:tape100/cudnn/rnn/standard", "is written in training only"),
        ("rnn_fwd:f32:t4b2i3h5l2:lstm:bi:linear:train:tape9/cudnn/rnn/standard/consumed", "rnn_bwd that consumes it"),
        ("rnn_bwd:f32:t4b2i3h5l2:lstm:bi:linear:tape100/cudnn/rnn/standard/kept", "'tape100/.*/kept' in .* is not und"),
        ("rnn_bwd:f32:t4b2i3h5l2:lstm:bi:linear:tape100/cudnn", "'tape100/cudnn' in .* is not understood there"),
        ("rnn_bwd:f32:t4b2i3h5l2:lstm:bi:linear:a4:tape100/cudnn/rnn/standard", "is not understood there"),
    ],
)
def test_what_is_wrong_with_it_is_said(text: str, says: str) -> None:
    with pytest.raises(InvalidProblem, match=says):
        parse(text)


def test_nobody_else_may_run_it() -> None:
    rows = nbdnn.explain(OWN).rows
    assert rows and {row.reason for row in rows} == {"the operands are cudnn/rnn's own"}
    block = RNNBlock("float32", 5, 1, "gru")
    w, x = np.zeros(block.get_param_size([2, 3]), "f"), np.zeros((4, 2, 3), "f")
    y, _, tape = block.apply(w, x, training=True)
    assert tape.own is None
    foreign = replace(tape, own=OwnTape(tape.memory.size, "cudnn/rnn/standard"))
    assert foreign.problem.endswith(f":train:tape{tape.memory.size}/cudnn/rnn/standard")
    with pytest.raises(UnsupportedProblem, match="the operands are cudnn/rnn's own"):
        block.grad(foreign, y)


def test_the_reference_reads_none_of_it() -> None:
    problem, rng = own(), np.random.default_rng(0)
    given = {o.name: rng.standard_normal(o.shape) * o.scale for o in problem.operands if o.role == "in"}
    assert reference_rnn.derived(problem, given) == {}
    nbdnns = replace(problem, tape=None)
    known = given | reference_rnn.derived(nbdnns, given)
    expected = reference_rnn.samples(nbdnns, known, (), None)
    given["tape"] = np.full(problem.tape.size_elems, np.nan)  # type: ignore[union-attr]
    for name, sample in reference_rnn.samples(problem, given, (), None).items():
        assert np.array_equal(sample.value, expected[name].value), name
    forward = replace(problem, op="rnn_fwd", training=True)
    written = reference_rnn.samples(forward, given, (), None)
    assert written["tape"].value.shape == (0,) and written["y"].value.shape == (4 * 2 * 10,)
