"""Reading the text form of problems: tokens in, fields out. The grammar is in ``problem.py``."""

from __future__ import annotations

import re
from typing import Any

from nbdnn.errors import InvalidProblem

_DIMS = re.compile(r"n(\d+)c(\d+)(?:d(\d+))?h(\d+)w(\d+)")
_FILTER = re.compile(r"k(\d+)(?:t(\d+))?r(\d+)s(\d+)")
_PAIR = re.compile(r"(\d+)\.(\d+)")


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
