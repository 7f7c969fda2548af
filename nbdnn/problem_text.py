"""Reading the text form of problems: tokens in, fields out. The grammars are in ``problem_<family>.py``."""

from __future__ import annotations

import re

from nbdnn.errors import InvalidProblem

_DIMS = re.compile(r"n(\d+)c(\d+)(?:d(\d+))?h(\d+)w(\d+)")
_PAIR = re.compile(r"(\d+)\.(\d+)")
_ALIGNMENTS = "a2", "a4", "a8", "a16"


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

    def pad(self) -> tuple[tuple[int, int], ...]:
        """What is before and after each axis, as in p1x1 and ba1.2x0.3."""
        token = self.next("a pad such as p1x1")
        if not token.startswith("ba"):
            return tuple((p, p) for p in _axes("p", token, self._text))
        expected = "before.after pairs such as ba1.2x0.3"
        pairs = [_match(_PAIR, part, expected, self._text) for part in token[2:].split("x")]
        return tuple((before, after) for before, after in pairs)

    def flag(self, *words: str) -> str:
        """The next word if it is one of `words`, else ''."""
        return self._left.pop(0) if self._left and self._left[0] in words else ""

    def optional(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """The next word if it is of that form, taken."""
        found = pattern.fullmatch(self._left[0]) if self._left else None
        if found:
            self._left.pop(0)
        return found

    def one_of(self, *words: str) -> str:
        """The next word, which must be one of `words`."""
        token = self.next(expected := " or ".join(words))
        if token not in words:
            raise InvalidProblem(f"{token!r} in {self._text!r}: expected {expected}")
        return token

    def align(self) -> int:
        """The alignment, where there is one."""
        if not self._left or not re.fullmatch(r"a\d+", self._left[0]):
            return 16
        token = self._left.pop(0)
        if token not in _ALIGNMENTS:
            raise InvalidProblem(f"{token!r} in {self._text!r}: expected one of {', '.join(_ALIGNMENTS)}")
        return int(token[1:])

    def end(self) -> None:
        """Refuse what is left."""
        if self._left:
            raise InvalidProblem(f"{self._left[0]!r} in {self._text!r} is not understood there")


def _match(pattern: re.Pattern[str], token: str, expected: str, text: str) -> list[int]:
    if not (found := pattern.fullmatch(token)):
        raise InvalidProblem(f"{token!r} in {text!r}: expected {expected}")
    return [int(group) for group in found.groups() if group is not None]


def _axes(prefix: str, token: str, text: str) -> tuple[int, ...]:
    if not re.fullmatch(prefix + r"\d+(x\d+)*", token):
        raise InvalidProblem(f"{token!r} in {text!r}: expected {prefix} and numbers joined by x, such as {prefix}1x1")
    return tuple(int(part) for part in token[len(prefix) :].split("x"))
