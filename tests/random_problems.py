"""Problems that nobody chose: odd extents, few channels and rows, strides and layouts that go ill together.

    python tests/random_problems.py 1 200 pool,softmax > problems.txt        seed, how many, families
    nbdnn autotune problems.txt --device cuda --budget 3

measures all candidates on them, and checks each; the database then knows what failed, and the table of autotune shows
what each choice won over the cost model's, which is where guesses are found that are wrong many times over.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from itertools import islice
from math import prod

from nbdnn.errors import InvalidProblem
from nbdnn.problem import parse

_CHANNELS = (1, 2, 3, 4, 5, 7, 8, 12, 15, 16, 24, 32, 33, 40, 48, 64, 80, 96, 100, 128, 144, 160, 256, 320)
_DTYPES = ("f32", "f16", "bf16")
_MOST_FLOPS = 3e9


class _Draw:
    """Random words of problem texts."""

    def __init__(self, seed: int, most_elements: int) -> None:
        self._random, self._most = random.Random(seed), most_elements
        self.of, self.between = self._random.choice, self._random.randint

    def chance(self, share: float) -> bool:
        return self._random.random() < share

    def dtype(self) -> str:
        return "f64" if self.chance(0.05) else self.of(_DTYPES)

    def layout(self, ndim: int) -> str:
        return self.of(("nchw", "nhwc") if ndim == 2 else ("ncdhw", "ndhwc"))

    def image(self, ndim: int, smallest: int = 1) -> tuple[int, int, list[int]]:
        """(images, channels, extents)"""
        while True:
            n, c = self.of((1, 1, 2, 3, 4, 8, 16, 32)), self.of(_CHANNELS)
            extents = [self.between(smallest, 80 if ndim == 2 else 28) for _ in range(ndim)]
            if self.chance(0.4):
                extents = extents[:1] * ndim
            if n * c * prod(extents) <= self._most:
                return n, c, extents

    def axes(self, ndim: int, *values: int, alike: float = 0.7) -> list[int]:
        drawn = [self.of(values) for _ in range(ndim)]
        return drawn[:1] * ndim if self.chance(alike) else drawn

    def rest(self, *tokens: str) -> str:
        """One of these more words, now and then."""
        return self.of(tokens) if self.chance(0.1) else ""


def _dims(n: int, c: int, extents: list[int]) -> str:
    names = "hw" if len(extents) == 2 else "dhw"
    return f"n{n}c{c}" + "".join(f"{name}{extent}" for name, extent in zip(names, extents, strict=True))


def _window(extents: list[int]) -> str:
    names = "rs" if len(extents) == 2 else "trs"
    return "".join(f"{name}{extent}" for name, extent in zip(names, extents, strict=True))


def _x(values: list[int]) -> str:
    return "x".join(map(str, values))


def _conv(draw: _Draw) -> str:
    ndim = draw.of((2, 2, 2, 3))
    n, c, extents = draw.image(ndim, 3)
    groups = draw.of((1, 1, 1, 1, c, draw.of((2, 4, 8, 32))))
    groups = 1 if c % groups else groups
    k = c * draw.of((1, 1, 2)) if groups == c else groups * max(1, draw.of(_CHANNELS) // groups)
    taps = draw.axes(ndim, 1, 1, 2, 3, 3, 3, 3, 4, 5, 7)
    pad = [r // 2 for r in taps] if draw.chance(0.5) else [draw.between(0, r // 2 + 1) for r in taps]
    if n * prod(extents) * k * c // groups * prod(taps) > _MOST_FLOPS:
        return ""
    op = draw.of(("conv_fwd", "conv_bwd_data", "conv_bwd_filter"))
    words = [op, draw.dtype(), _dims(n, c, extents), f"k{k}{_window(taps)}", f"p{_x(pad)}"]
    words += [f"u{_x(draw.axes(ndim, 1, 1, 1, 2, 3))}", f"d{_x([draw.of((1, 1, 1, 1, 2, 3))] * ndim)}", f"g{groups}"]
    words += [draw.of(("cross", "cross", "conv")), draw.layout(ndim)]
    words += [draw.rest("kcrs", "krsc") if ndim == 2 else draw.rest("kctrs", "ktrsc")]
    words += [f"y{draw.layout(ndim)}" if draw.chance(0.15) else "", draw.rest("a2", "a4", "a8")]
    ends = ("bias", "bias+relu", "bias+swish+res", "beta", "bias+tanh+beta") if op == "conv_fwd" else ("beta",)
    return ":".join(filter(None, (*words, f"e:{draw.of(ends)}" if draw.chance(0.2) else "")))


def _pool(draw: _Draw) -> str:
    ndim = draw.of((2, 2, 3))
    n, c, extents = draw.image(ndim, 2)
    window = [min(r, extent) for r, extent in zip(draw.axes(ndim, 1, 2, 2, 3, 3, 3, 4, 5, 7, 9), extents, strict=True)]
    window = list(extents) if draw.chance(0.1) else window
    pad = [draw.between(0, r - 1) if draw.chance(0.3) else 0 for r in window]
    mode = draw.of(("max", "max", "max_deterministic", "average_inc_pad", "average_exc_pad", "sum"))
    words = [draw.of(("pool_fwd", "pool_bwd")), draw.dtype(), _dims(n, c, extents), _window(window), f"p{_x(pad)}"]
    return ":".join(filter(None, (*words, f"u{_x(draw.axes(ndim, 1, 2, 3, 4, 5))}", mode, draw.layout(ndim))))


def _softmax(draw: _Draw) -> str:
    ndim = draw.of((2, 2, 3))
    n, c, extents = draw.image(ndim)
    if draw.chance(0.4):
        ndim, n, c, extents = 2, draw.of((1, 5, 64, 300)), draw.between(1, 5000), [1, 1]
    words = [draw.of(("softmax_fwd", "softmax_bwd")), draw.dtype(), _dims(n, c, extents)]
    words += [draw.of(("accurate", "log", "fast")), draw.of(("channel", "instance")), draw.layout(ndim)]
    return ":".join(filter(None, (*words, draw.rest("a2", "a4"))))


def _bn(draw: _Draw) -> str:
    ndim, dtype = draw.of((2, 2, 3)), draw.dtype()
    n, c, extents = draw.image(ndim)
    op, mode = draw.of(("bn_train", "bn_infer", "bn_bwd", "bn_infer_bwd")), draw.of(("spatial", "per-activation"))
    params = "pf32" if dtype in ("f16", "bf16") and draw.chance(0.7) else ""
    running = "run" if op == "bn_train" and draw.chance(0.3) else ""
    words = (op, dtype, _dims(n, c, extents), mode, draw.layout(ndim), params, running, draw.rest("a2", "a4"))
    return ":".join(filter(None, words))


def _dropout(draw: _Draw) -> str:
    most = draw.of((300, 100_000, 1_000_000))
    return f"{draw.of(('dropout_fwd', 'dropout_bwd'))}:{draw.dtype()}:m{draw.between(1, most)}"


def _spatialtf(draw: _Draw) -> str:
    n, c, extents = draw.image(2, 2)
    op, dtype, out = draw.of(("", "_sampler", "_grid")), draw.dtype(), draw.axes(2, *range(1, 90))
    name = f"spatialtf{op}_{draw.of(('fwd', 'bwd'))}"
    if op == "_grid":
        return f"{name}:{dtype}:n{n}:o{_x(out)}"
    params = "pf32" if dtype in ("f16", "bf16") and draw.chance(0.7) else ""
    return ":".join(filter(None, (name, dtype, _dims(n, c, extents), f"o{_x(out)}", draw.layout(2), params)))


def _rnn(draw: _Draw) -> str:
    steps, batch, layers = draw.between(1, 60), draw.of((1, 1, 2, 5, 16, 33, 64, 130)), draw.of((1, 1, 2, 3))
    hidden = draw.of((draw.between(1, 40), draw.of(_CHANNELS), 512))
    is_skip = draw.chance(0.1)
    inputs = hidden if is_skip else draw.of((draw.between(1, 40), draw.of(_CHANNELS)))
    op, direction = draw.of(("rnn_fwd", "rnn_bwd")), draw.of(("uni", "uni", "bi"))
    directions = 2 if direction == "bi" else 1
    if 8 * steps * batch * hidden * (inputs + layers * (directions + 1) * hidden) * directions > _MOST_FLOPS:
        return ""
    words = [op, draw.dtype(), f"t{steps}b{batch}i{inputs}h{hidden}l{layers}"]
    words += [draw.of(("rnn_relu", "rnn_tanh", "lstm", "lstm", "gru")), direction, "skip" if is_skip else "linear"]
    words += ["train" if op == "rnn_fwd" and draw.chance(0.3) else "", draw.rest("a2", "a4", "a8")]
    return ":".join(filter(None, words))


FAMILIES = {f.__name__[1:]: f for f in (_conv, _pool, _softmax, _bn, _dropout, _spatialtf, _rnn)}


def texts(seed: int, *families: str, most_elements: int = 3_000_000) -> Iterator[str]:
    """Texts of valid problems of these families, without end."""
    draw = _Draw(seed, most_elements)
    while True:
        try:
            text = str(parse(FAMILIES[draw.of(families)](draw)))
        except InvalidProblem:
            continue
        yield text


if __name__ == "__main__":
    print(*islice(texts(int(sys.argv[1]), *sys.argv[3].split(",")), int(sys.argv[2])), sep="\n")
