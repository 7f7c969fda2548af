"""Reading the text form of problems: tokens in, fields out. The grammar is in ``problem.py``."""

from __future__ import annotations

import re
from typing import Any

from nbdnn.errors import InvalidProblem

_DIMS = re.compile(r"n(\d+)c(\d+)(?:d(\d+))?h(\d+)w(\d+)")
_FILTER = re.compile(r"k(\d+)(?:t(\d+))?r(\d+)s(\d+)")
_PAIR = re.compile(r"(\d+)\.(\d+)")


class Tokens:
    """The words after a problem's op, taken from the front; an error names the word that was not expected."""

    def __init__(self, tokens: list[str], text: str) -> None:
        self._left, self._text = list(tokens), text

    def next(self, expected: str) -> str:
        """The next word as it is."""
        if not self._left:
            raise InvalidProblem(f"{self._text!r} ends too soon: expected {expected}")
        return self._left.pop(0)

    def match(self, pattern: re.Pattern[str], expected: str) -> list[int]:
        """The numbers in the next word, which must be of that form."""
        return _match(pattern, self.next(expected), expected, self._text)

    def dims(self) -> list[int]:
        """n, c and the spatial extents."""
        return self.match(_DIMS, "dims such as n32c64h56w56")

    def axes(self, prefix: str) -> tuple[int, ...]:
        """A number an axis, as in u2x2."""
        return _axes(prefix, self.next(f"{prefix} and numbers"), self._text)

    def flag(self, *words: str) -> str:
        """The next word if it is one of `words`, else ''."""
        return self._left.pop(0) if self._left and self._left[0] in words else ""

    def align(self) -> int:
        """The alignment, where there is one."""
        if self._left and re.fullmatch(r"a\d+", self._left[0]):
            return int(self._left.pop(0)[1:])
        return 16

    def end(self) -> None:
        """Refuse what is left."""
        if self._left:
            raise InvalidProblem(f"{self._left[0]!r} in {self._text!r} is not understood there")


def conv_fields(tokens: list[str], text: str) -> dict[str, Any]:
    """The fields of a convolution but its op; `text` is the whole, for the error that names a wrong token."""
    tokens = list(tokens)
    try:
        dtype = tokens.pop(0)
        compute = tokens.pop(0)[1:] if tokens[0] in ("cf16", "cf32", "cf64") else ""
        n, c, *spatial = _match(_DIMS, tokens.pop(0), "dims such as n32c64h56w56", text)
        k, *extents = _match(_FILTER, tokens.pop(0), "a filter such as k64r3s3", text)
        pad = _pad(tokens.pop(0), text)
        stride = _axes("u", tokens.pop(0), text)
        dilation = _axes("d", tokens.pop(0), text)
        (groups,) = _axes("g", tokens.pop(0), text)
        mode, layout = tokens.pop(0), tokens.pop(0)
    except IndexError:
        raise InvalidProblem(f"{text!r} ends too soon: see the grammar of nbdnn.problem") from None
    return dict(
        dtype=dtype,
        n=n,
        c=c,
        spatial=tuple(spatial),
        k=k,
        filter=tuple(extents),
        pad=pad,
        stride=stride,
        dilation=dilation,
        groups=groups,
        mode=mode,
        layout=layout,
        compute=compute,
        **_optional(tokens, text),
    )


def _match(pattern: re.Pattern[str], token: str, expected: str, text: str) -> list[int]:
    if not (found := pattern.fullmatch(token)):
        raise InvalidProblem(f"{token!r} in {text!r}: expected {expected}")
    return [int(group) for group in found.groups() if group is not None]


def _axes(prefix: str, token: str, text: str) -> tuple[int, ...]:
    if not re.fullmatch(prefix + r"\d+(x\d+)*", token):
        raise InvalidProblem(f"{token!r} in {text!r}: expected {prefix} and numbers joined by x, such as {prefix}1x1")
    return tuple(int(part) for part in token[len(prefix) :].split("x"))


def _pad(token: str, text: str) -> tuple[tuple[int, int], ...]:
    if not token.startswith("ba"):
        return tuple((p, p) for p in _axes("p", token, text))
    pairs = [_match(_PAIR, part, "before.after pairs such as ba1.2x0.3", text) for part in token[2:].split("x")]
    return tuple((before, after) for before, after in pairs)


def _optional(tokens: list[str], text: str) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if tokens and tokens[0] in ("kcrs", "krsc", "kctrs", "ktrsc"):
        fields["w_layout"] = tokens.pop(0)
    if tokens and tokens[0] in ("ynchw", "ynhwc", "yncdhw", "yndhwc"):
        fields["y_layout"] = tokens.pop(0)[1:]
    if tokens and re.fullmatch(r"a\d+", tokens[0]):
        fields["align"] = int(tokens.pop(0)[1:])
    if len(tokens) >= 2 and tokens[0] == "e":
        fields["epilogue"] = tuple(tokens[1].split("+"))
        tokens = tokens[2:]
    if tokens:
        raise InvalidProblem(f"{tokens[0]!r} in {text!r} is not understood there: see the grammar of nbdnn.problem")
    return fields
