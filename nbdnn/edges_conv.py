"""Edge cases of convolutions for the tests, each with its reason."""

from __future__ import annotations

from dataclasses import replace

from nbdnn.edges_conv_shapes import (
    CORE_2D,
    CORE_3D,
    EDGES_2D,
    EDGES_3D,
    EDGES_BANDS,
    EDGES_CHUNKS,
    EDGES_FIRST,
    EDGES_FLAT,
    EDGES_FOLDED,
    EDGES_GROUPS,
    EDGES_JOINED,
    EDGES_LAST,
    EDGES_MATRIX,
    EDGES_PAIRS,
    EDGES_POINTWISE,
    EDGES_STRIPS,
    EPILOGUES,
    ODD_GROUPS,
    Edge,
)
from nbdnn.problem_conv import ConvProblem, conv


def edges(op: str, kind: str = "cuda") -> list[ConvProblem]:
    """The edge cases of a convolution for a kind of device: what every kernel must get right, and on GPUs what theirs
    have edges of their own at."""
    problems = _of_all(op)
    if kind == "cuda":
        problems += _of_matrices(op) + _of_first_layers(op) + _of_last_layers(op) + _of_bands(op) + _of_folds(op)
        problems += _of_groups(op) + _of_pointwise(op) + _of_chunks(op)
        flat = [_posed(op, "f32", edge, layout) for edge in EDGES_FLAT for layout in ("ncdhw", "ndhwc")]
        problems += [*flat, *(replace(posed, dtype="bf16", compute="") for posed in flat)]
        problems += [
            replace(p, dtype="bf16", compute="")
            for p in problems
            if (p.epilogue and CORE_2D[1].shape in str(p)) or ODD_GROUPS.shape in str(p)
        ]
    else:
        problems += [replace(p, dtype="bf16", compute="") for p in problems[::3] if p.dtype == "f32"]
        problems += [_posed(op, "bf16", edge, layout) for edge in EDGES_PAIRS for layout in ("nchw", "nhwc")]
        grouped, ends = _posed(op, "f32", ODD_GROUPS, "nhwc"), tuple(_epilogues(op)[-1].split("+"))
        problems += [replace(grouped, mode="conv"), replace(grouped, epilogue=ends)]
        for edge in (*EDGES_LAST, *EDGES_STRIPS):
            layouts = ("nchw", "nhwc") if _ndim(edge) == 2 else ("ncdhw", "ndhwc")
            problems += [_posed(op, "f32", edge, layout) for layout in layouts]
        problems += _of_joined(op)
        last = [_posed(op, dtype, EDGES_LAST[0], layout) for dtype in ("f32", "f16") for layout in ("nchw", "nhwc")]
        problems += [replace(posed, epilogue=ends) for posed in last]
    return list(dict.fromkeys(problems))


def _of_all(op: str) -> list[ConvProblem]:
    """All in float32 and both layouts; the core in every dtype, mode and epilogue; those of matrix units in one layout,
    in bfloat16 too."""
    plain, last = {2: "nchw", 3: "ncdhw"}, {2: "nhwc", 3: "ndhwc"}
    problems = [_posed(op, "f32", edge, layout) for edge in EDGES_2D for layout in ("nchw", "nhwc")]
    problems += [_posed(op, "f32", edge, layout) for edge in EDGES_3D for layout in ("ncdhw", "ndhwc")]
    for edge in (*CORE_2D, *CORE_3D):
        ndim = 3 if edge in CORE_3D else 2
        in_f32 = [_posed(op, "f32", edge, layout[ndim]) for layout in (plain, last)]
        problems += [replace(p, mode="conv") for p in in_f32]
        problems += [replace(p, dtype=dtype, compute="") for p in in_f32 for dtype in ("f64", "f16", "bf16")]
        problems += [replace(p, dtype="f16", compute="f16") for p in in_f32]
    for shape in CORE_2D[::3]:
        contiguous, channels_last = (_posed(op, "f32", shape, layout) for layout in ("nchw", "nhwc"))
        problems += [
            replace(contiguous, w_layout="krsc"),
            replace(contiguous, y_layout="nhwc"),
            replace(channels_last, w_layout="kcrs"),
            replace(channels_last, y_layout="nchw"),
            replace(contiguous, align=4),
            replace(channels_last, align=4),
        ]
    for edge in EDGES_MATRIX:
        posed = _posed(op, "f32", edge, last[_ndim(edge)])
        problems += [posed, replace(posed, dtype="bf16", mode="conv", compute="")]
    problems += [
        replace(_posed(op, "f32", edge, layout), epilogue=tuple(epilogue.split("+")))
        for epilogue in _epilogues(op)
        for edge in CORE_2D[1:5]
        for layout in ("nchw", "nhwc")
    ]
    return problems


def _of_matrices(op: str) -> list[ConvProblem]:
    """Those of matrix units in the other layout, and some in mixed ones."""
    problems = []
    for edge in EDGES_MATRIX:
        layouts = ("nchw", "nhwc") if _ndim(edge) == 2 else ("ncdhw", "ndhwc")
        planar, last = (_posed(op, "f32", edge, layout) for layout in layouts)
        problems += [planar, replace(planar, dtype="bf16", mode="conv", compute="")]
        if edge in EDGES_MATRIX[::4]:
            problems += [replace(planar, dtype="f16", compute="", y_layout=layouts[1])]
            problems += [replace(last, dtype="f16", compute="", y_layout=layouts[0])]
    return problems


def _of_first_layers(op: str) -> list[ConvProblem]:
    both = [_posed(op, "f32", edge, layout) for edge in EDGES_FIRST for layout in ("nchw", "nhwc")]
    return both + [replace(posed, dtype="bf16", mode="conv", compute="") for posed in both]


def _of_last_layers(op: str) -> list[ConvProblem]:
    both = [_posed(op, "f32", edge, layout) for edge in EDGES_LAST for layout in ("nchw", "nhwc")]
    return both + [replace(posed, dtype=dtype, compute="") for posed in both for dtype in ("bf16", "f16")]


def _of_groups(op: str) -> list[ConvProblem]:
    """In 16 bits, channels-last; epilogues of the first four, one width each."""
    plain = [_posed(op, "bf16", edge, "nhwc") for edge in EDGES_GROUPS]
    ends = [replace(p, dtype="f16", compute="", epilogue=tuple(_epilogues(op)[-1].split("+"))) for p in plain[:4]]
    return [*plain, *ends, *(replace(p, mode="conv", w_layout="kcrs") for p in plain[6:8])]


def _of_pointwise(op: str) -> list[ConvProblem]:
    """In both layouts; of the first two, and of those of many channels, with what follows a result."""
    plain, ends = [], tuple(_epilogues(op)[-1].split("+"))
    for edge in EDGES_POINTWISE:
        layouts = ("nchw", "nhwc") if _ndim(edge) == 2 else ("ncdhw", "ndhwc")
        plain += [_posed(op, "f32", edge, layout) for layout in layouts]
    return [*plain, *(replace(posed, epilogue=ends) for posed in plain if posed in plain[:4] or posed.c == 300)]


def _of_chunks(op: str) -> list[ConvProblem]:
    """In bfloat16, both layouts, and in mode 'conv' float16; of the second with what follows a result."""
    plain, ends = [], tuple(_epilogues(op)[-1].split("+"))
    for edge in EDGES_CHUNKS:
        layouts = ("nchw", "nhwc") if _ndim(edge) == 2 else ("ncdhw", "ndhwc")
        plain += [_posed(op, "bf16", edge, layout) for layout in layouts]
    in_f16 = [replace(posed, dtype="f16", mode="conv", compute="") for posed in plain[:4]]
    return [*plain, *in_f16, *(replace(posed, epilogue=ends) for posed in (*plain[2:4], *in_f16[2:]))]


def _of_folds(op: str) -> list[ConvProblem]:
    """Those that fold in every type, some in mode 'conv'; the first two with what follows a result of 16 bits."""
    problems = []
    for edge in EDGES_FOLDED:
        layouts = ("nchw", "nhwc") if _ndim(edge) == 2 else ("ncdhw", "ndhwc")
        both = [_posed(op, "f32", edge, layout) for layout in layouts]
        problems += [*both, *(replace(posed, dtype="bf16", mode="conv", compute="") for posed in both)]
        problems += [replace(posed, dtype="f16", compute="") for posed in both]
    for edge in EDGES_FOLDED[:2]:
        in_f16 = _posed(op, "f16", edge, "nchw")
        problems += [replace(in_f16, epilogue=tuple(epilogue.split("+"))) for epilogue in _epilogues(op)[-2:]]
        problems += [replace(in_f16, y_layout="nhwc"), replace(in_f16, align=4)]
    return problems


def _of_joined(op: str) -> list[ConvProblem]:
    """Those that a CPU joins, in both layouts and modes, and bfloat16; two with all other layouts, types and ends."""
    problems = []
    for edge in EDGES_JOINED:
        layouts = ("nchw", "nhwc") if _ndim(edge) == 2 else ("ncdhw", "ndhwc")
        both = [_posed(op, "f32", edge, layout) for layout in layouts]
        problems += [*both, *(replace(posed, mode="conv") for posed in both)]
        problems += [replace(posed, dtype="bf16", compute="") for posed in both]
        if edge in EDGES_JOINED[:2]:
            for posed, w_layout, y_layout in zip(both, ("krsc", "kcrs"), reversed(layouts), strict=True):
                problems += [replace(posed, w_layout=w_layout), replace(posed, y_layout=y_layout)]
                problems += [replace(posed, dtype=dtype, compute="") for dtype in ("f64", "f16")]
                problems += [replace(posed, align=4), replace(posed, epilogue=tuple(_epilogues(op)[-1].split("+")))]
    return problems


def _of_bands(op: str) -> list[ConvProblem]:
    """Those of bands in either type and mode; the first with every pair of layouts and every epilogue."""
    problems, epilogues = [], _epilogues(op)
    for layout, other in (("nchw", "nhwc"), ("nhwc", "nchw")):
        every = [_posed(op, "bf16", edge, layout) for edge in EDGES_BANDS]
        in_f32 = [replace(problem, dtype="f32", compute="") for problem in every]
        problems += [*every, *in_f32, *(replace(problem, dtype="f16", mode="conv") for problem in every)]
        problems += [replace(first, epilogue=tuple(e.split("+"))) for first in (every[0], in_f32[0]) for e in epilogues]
        problems += [replace(every[0], y_layout=other), replace(every[0], align=4), replace(in_f32[0], mode="conv")]
    return problems


def _posed(op: str, dtype: str, edge: Edge, layout: str) -> ConvProblem:
    return conv(f"{op}:{dtype}:{edge.shape}:cross:{layout}")


def _epilogues(op: str) -> tuple[str, ...]:
    return EPILOGUES if op == "conv_fwd" else ("beta",)


def _ndim(edge: Edge) -> int:
    return 3 if "d" in edge.shape.partition(":")[0] else 2
