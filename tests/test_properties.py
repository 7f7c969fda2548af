"""What holds for every convolution, on problems that nobody chose."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import numpy as np
from guarded import Operands, values
from hypothesis import given, settings
from hypothesis import strategies as st

from nbdnn import reference_conv, tolerance
from nbdnn.device import cpu_device
from nbdnn.dispatch import registry
from nbdnn.errors import InvalidProblem
from nbdnn.problem import parse
from nbdnn.problem_conv import ACTIVATIONS, COMPUTE_OF, CONV_OPS, ConvProblem


@st.composite
def problems(draw: st.DrawFn, op: str | None = None, dtypes: tuple[str, ...] = tuple(COMPUTE_OF)) -> ConvProblem:
    """Any small valid problem: extents are drawn so that every output extent is positive."""
    ndim, dtype = draw(st.sampled_from((2, 3))), draw(st.sampled_from(dtypes))
    op = op or draw(st.sampled_from(CONV_OPS))

    def axes(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw(st.lists(st.integers(low, high), min_size=ndim, max_size=ndim)))

    filter_, dilation, before, after = axes(1, 4), axes(1, 3), axes(0, 3), axes(0, 3)
    room = axes(0, 6)
    spatial = tuple(
        max(1, (r - 1) * d + 1 - b - a + extra)
        for r, d, b, a, extra in zip(filter_, dilation, before, after, room, strict=True)
    )
    groups = draw(st.integers(1, 3))
    layouts, filter_layouts = {
        2: (("nchw", "nhwc"), ("kcrs", "krsc")),
        3: (("ncdhw", "ndhwc"), ("kctrs", "ktrsc")),
    }[ndim]
    beta = ("beta",) if draw(st.booleans()) else ()
    forward_only = draw(st.sampled_from(((), ("bias",), *((a,) for a in ACTIVATIONS), ("bias", "relu", "res"))))
    return ConvProblem(
        op=op,
        dtype=dtype,
        compute=draw(st.sampled_from(COMPUTE_OF[dtype])),
        n=draw(st.integers(1, 3)),
        c=groups * draw(st.integers(1, 5)),
        spatial=spatial,
        k=groups * draw(st.integers(1, 5)),
        filter=filter_,
        pad=tuple(zip(before, after, strict=True)),
        stride=axes(1, 3),
        dilation=dilation,
        groups=groups,
        mode=draw(st.sampled_from(("conv", "cross"))),
        layout=draw(st.sampled_from(layouts)),
        w_layout=draw(st.sampled_from(filter_layouts)),
        y_layout=draw(st.sampled_from(layouts)),
        align=draw(st.sampled_from((8, 16))),
        epilogue=(*forward_only, *beta) if op == "conv_fwd" else beta,
    )


@given(problems())
def test_text_round_trip(problem: ConvProblem) -> None:
    assert parse(str(problem)) == problem


@given(problems(), st.data())
def test_a_misspelt_text_is_another_problem_or_an_invalid_one(problem: ConvProblem, data: st.DataObject) -> None:
    text = str(problem)
    start, stop = sorted(data.draw(st.integers(0, len(text)), label="cut") for _ in range(2))
    misspelt = text[:start] + data.draw(st.text("conv:0123456789xpudghkre.+", max_size=3)) + text[stop:]
    with suppress(InvalidProblem):
        other = parse(misspelt)
        assert parse(str(other)) == other


@given(problems())
def test_output_shape_is_where_the_last_window_ends(problem: ConvProblem) -> None:
    for i, r, (before, after), u, d, p in zip(
        problem.spatial,
        problem.filter,
        problem.pad,
        problem.stride,
        problem.dilation,
        problem.out_spatial,
        strict=True,
    ):
        end = (p - 1) * u + (r - 1) * d + 1
        assert end <= before + i + after < end + u


@given(problems("conv_fwd", ("f64",)))
def test_gradients_of_the_reference_are_adjoints(problem: ConvProblem) -> None:
    problem = replace(problem, epilogue=())
    operands = values(problem, "integers")
    dy = values(problem.with_op("conv_bwd_filter"), "integers")["dy"]
    y = reference_conv.compute(problem, operands)
    dx = reference_conv.compute(problem.with_op("conv_bwd_data"), {"w": operands["w"], "dy": dy})
    dw = reference_conv.compute(problem.with_op("conv_bwd_filter"), {"x": operands["x"], "dy": dy})
    assert (y * dy).sum() == (dx * operands["x"]).sum() == (dw * operands["w"]).sum()


@settings(max_examples=150)
@given(problems(), st.data())
def test_every_candidate_is_right_on_problems_nobody_chose(problem: ConvProblem, data: st.DataObject) -> None:
    device = cpu_device()
    able = [c for c in registry.candidates(problem.op) if c.supports(problem, device).ok]
    candidate = data.draw(st.sampled_from(able), label="candidate")
    config = candidate.configs(problem, device)[0]
    operands = Operands(problem, values(problem, "normal"))
    workspace = np.empty(candidate.workspace_bytes(problem, config, device) + 64, np.uint8)
    address = -(-workspace.ctypes.data // 64) * 64
    candidate.prepare(problem, config, device)(operands.pointers, (1.25, -0.5), address, 0)
    operands.assert_only_outs_were_written()
    expected = reference_conv.whole(problem, values(problem, "normal"), (1.25, -0.5))
    (out,) = operands.outs.values()
    fault = tolerance.fault(problem, candidate, out, expected)
    assert not fault, f"{candidate.id}: {fault}"
