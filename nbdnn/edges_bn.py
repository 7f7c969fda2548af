"""Edge cases of batch normalisation for the tests, each with its reason."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

from nbdnn.problem_bn import MODES, BnProblem

# n, c, spatial: every one in float32, both layouts and modes; the core in every dtype and with every token.
_CORE = (
    (4, 16, (8, 8)),  # whole vectors, and as many channels as a block of a GPU takes
    (3, 5, (5, 7)),  # nothing is a multiple of anything
    (2, 3, (2, 3, 4)),  # three axes
)
_MORE = (
    (2, 1, (1, 1)),  # the least batch that has a running variance
    (7, 1, (3, 3)),  # one channel
    (64, 130, (1, 1)),  # after a dense layer: channels in whole blocks and a rest
    (2, 3, (40, 52)),  # planes longer than a chunk of the CPU's
    (300, 8, (2, 2)),  # many short planes
    (1100, 4, (1, 3)),  # many rows of few channels
    (3, 40, (30, 31)),  # more channels than threads, planes of no vector
    (3, 1200, (2, 4)),  # more channels than a GPU has blocks at once
    (16, 64, (28, 28)),  # a layer: several blocks of a GPU share a channel
)


def edges(op: str) -> list[BnProblem]:
    """The edge cases of one op."""
    problems = []
    for (n, c, spatial), mode, last in product((*_CORE, *_MORE), MODES, (False, True)):
        layout = (("nchw", "nhwc"), ("ncdhw", "ndhwc"))[len(spatial) - 2][last]
        plain = BnProblem(op, "f32", n, c, spatial, mode, layout)
        problems.append(plain)
        if (n, c, spatial) in _CORE:
            narrow = [replace(plain, dtype=dtype, param_dtype=p) for dtype in ("f16", "bf16") for p in ("", "f32")]
            problems += [*narrow, replace(plain, dtype="f64", param_dtype="")]
            problems += [replace(plain, align=4), replace(narrow[2], align=2)]
            if op == "bn_train":
                problems += [replace(problem, running=True) for problem in (plain, *narrow[2:])]
    if op == "bn_infer_bwd":
        # Planes of odd places: as many as a block of a GPU holds at once, and more.
        problems += [BnProblem(op, "bf16", 32, 9, (7, 7), "spatial", "nchw", "f32")]
        problems += [BnProblem(op, "f32", n, 3, (7, 7), "spatial", "nchw") for n in (41, 42)]
    if op in ("bn_train", "bn_bwd"):
        # More channels of 16 bits than a GPU has blocks at once, in vectors.
        problems += [BnProblem(op, "bf16", 3, 1061, (4, 6), "spatial", "nchw", "f32")]
    if op == "bn_train":
        # Sums of 2048 lines, as many as the CPU's have.
        problems.append(BnProblem(op, "bf16", 1, 256, (128, 128), "spatial", "nhwc", "f32"))
        # So long that float64 loses digits to a sum of one element after the other.
        problems.append(BnProblem(op, "f64", 2, 130, (28, 28), "spatial", "nhwc"))
        problems += [BnProblem(op, "f32", 1, 6, (1, 1), mode) for mode in MODES]  # variance 0
    return list(dict.fromkeys(problems))
