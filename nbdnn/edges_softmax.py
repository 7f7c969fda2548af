"""Edge cases of softmax for the tests, each with its reason."""

from __future__ import annotations

from itertools import product

from nbdnn.problem_softmax import ALGORITHMS, MODES, SoftmaxProblem

# n, c, spatial: every one in float32, both layouts and modes; the core in every dtype and algorithm.
_CORE = (
    (4, 10, (1, 1)),  # a classifier: positions of one pixel
    (2, 21, (5, 6)),  # rows that lie apart in one layout and side by side in the other
    (2, 3, (2, 3, 4)),  # three axes
    (3, 130, (1, 7)),  # a row of two vectors of 64 and a rest
)
_MORE = (
    (1, 1, (1, 1)),  # one element: 1, and 0 for the logarithm
    (1, 2, (1, 1)),
    (2, 1, (3, 3)),  # one channel: rows of one element
    (5, 64, (4, 4)),  # whole vectors
    (3, 65, (3, 17)),  # one more than whole vectors, in both directions
    (1, 1000, (1, 1)),  # ImageNet
    (1, 4097, (1, 2)),  # more than a block of threads holds, on addresses that are no multiple of a vector
    (1, 33000, (1, 1)),  # longer than one block of a GPU holds
    (70, 5, (1, 1)),  # many short rows
    (2, 19, (24, 9)),  # positions that do not divide into vectors
    (1, 40, (17, 19)),  # more positions than the widest strip of vectors has on a CPU
    (3, 4, (9, 11)),  # many rows that divide a vector, and a rest of them
    (2, 16, (5, 37)),  # the same, as long as a vector
    (3, 7, (6, 11)),  # the same, of an odd number of elements
    (3, 15, (6, 11)),  # the same, one less than a vector
)


def edges(op: str) -> list[SoftmaxProblem]:
    """The edge cases of softmax_fwd or softmax_bwd."""
    problems = []
    for (n, c, spatial), mode, last in product((*_CORE, *_MORE), MODES, (False, True)):
        layout = (("nchw", "nhwc"), ("ncdhw", "ndhwc"))[len(spatial) - 2][last]
        plain = SoftmaxProblem(op, "f32", n, c, spatial, "accurate", mode, layout)
        problems.append(plain)
        if (n, c, spatial) in _CORE:
            kinds = product(("f32", "f64", "f16", "bf16"), ALGORITHMS)
            problems += [
                SoftmaxProblem(op, dtype, n, c, spatial, algorithm, mode, layout) for dtype, algorithm in kinds
            ]
            problems.append(SoftmaxProblem(op, "f32", n, c, spatial, "accurate", mode, layout, align=4))
            problems.append(SoftmaxProblem(op, "bf16", n, c, spatial, "accurate", mode, layout, align=2))
    # Rows of 16 bits that begin anywhere, of several blocks of a GPU, with a rest of less than 16 bytes.
    problems += [SoftmaxProblem(op, "bf16", 3, 19, (7, 23), algorithm, "channel", "nhwc") for algorithm in ALGORITHMS]
    # Rows that divide a vector, of other types.
    kinds = product(("f64", "f16", "bf16"), ALGORITHMS)
    problems += [SoftmaxProblem(op, dtype, 3, 4, (9, 11), algorithm, "channel", "nhwc") for dtype, algorithm in kinds]
    # Long rows of whole vectors, of which a thread holds many; the last threads have one less.
    long = product(("f32", "f16", "bf16"), ALGORITHMS, (4104, 32008))
    problems += [SoftmaxProblem(op, dtype, 3, c, (1, 1), algorithm, "channel", "nchw") for dtype, algorithm, c in long]
    # Rows that begin anywhere among the 16 bytes of a vector: in a warp, of a warp, of a block, of several blocks.
    anywhere = product(
        ("f32", "f16", "bf16"), ("log", "accurate"), ((9, 121), (9, 1001), (5, 2002), (3, 4100), (3, 50257))
    )
    problems += [
        SoftmaxProblem(op, dtype, n, c, (1, 1), algorithm, "channel", "nchw") for dtype, algorithm, (n, c) in anywhere
    ]
    # Rows in parts, of which the last is short.
    parts = product(("f32", "f64", "f16", "bf16"), ALGORITHMS)
    problems += [
        SoftmaxProblem(op, dtype, 2, 70001, (1, 1), algorithm, "channel", "nchw") for dtype, algorithm in parts
    ]
    return list(dict.fromkeys(problems))
