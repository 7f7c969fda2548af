"""Edge cases of recurrent networks for the tests, each with its reason."""

from __future__ import annotations

from dataclasses import replace

from nbdnn.problem_rnn import RnnProblem
from nbdnn.rnn_parameters import GATES

# steps, batch, input, hidden, layers: the core runs in every mode, in both directions, and one of each in every dtype.
_CORE = (
    (4, 3, 7, 5, 2),  # nothing is a multiple of anything
    (3, 6, 16, 32, 1),  # whole vectors, whole tiles of a batch
)
# Each in one mode after the other.
_MORE = (
    (1, 1, 1, 1, 1),  # the least
    (1, 5, 6, 9, 1),  # one step
    (6, 1, 5, 19, 3),  # one sequence, three layers
    (2, 17, 3, 20, 1),  # a batch of several tiles and a rest
    (3, 4, 12, 70, 1),  # several vectors of units and a rest
    (2, 7, 33, 130, 1),  # several panels of units, and chunks for two threads
    (5, 33, 6, 162, 1),  # units of many blocks, several pieces of a batch and a rest
    (37, 2, 4, 6, 1),  # many steps
    (70, 16, 6, 8, 1),  # more rows (steps x batch) than a gradient of parameters sums at once
)
_DTYPES = ("f16", "bf16", "f64")


def edges(op: str) -> list[RnnProblem]:
    """The edge cases of rnn_fwd or rnn_bwd."""
    problems = []
    for shape in _CORE:
        for mode in GATES:
            plain = RnnProblem(op, "f32", *shape, mode)
            problems += [plain, replace(plain, bidirectional=True)]
            problems += [replace(plain, dtype=dtype, bidirectional=dtype == "bf16") for dtype in _DTYPES]
    for mode in GATES:
        problems += [RnnProblem(op, "f32", 3, 2, 11, 11, 2, mode, skip=True, bidirectional=mode == "gru")]
        problems += [RnnProblem(op, "f32", 3, 2, 8, 8, 1, mode, skip=True)]
        problems += [RnnProblem(op, "f32", *shape, mode) for shape in _MORE[:2]]
        problems += [RnnProblem(op, "f32", *_CORE[0], mode, align=4), RnnProblem(op, "f16", *_CORE[0], mode, align=2)]
    modes = ("lstm", "gru", "rnn_tanh")
    problems += [
        RnnProblem(op, "f32", *shape, modes[(i + j) % len(modes)], bidirectional=bool(j))
        for i, shape in enumerate(_MORE[2:])
        for j in (0, 1)
    ]
    # R shared out over a GPU in 16 bits, two layers, both directions; and in several rounds of images, back.
    problems += [RnnProblem(op, dtype, 2, 11, 8, 139, 2, "gru", bidirectional=True) for dtype in ("f16", "bf16")]
    problems += [RnnProblem(op, "f32", 2, 70, 3, 513, 1, "lstm")]
    if op == "rnn_fwd":
        problems += [replace(problem, training=True) for problem in problems]
    return list(dict.fromkeys(problems))
