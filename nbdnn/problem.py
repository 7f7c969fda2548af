"""What to compute: frozen, validated problems and their one text form.

A problem says nothing about how it is computed. Its text is the database key, the test id, the benchmark row, the
command-line argument and the log line, and ``parse(str(problem)) == problem``. Each family of ops has its problems, and
their grammar, in a module of its own, ``problem_<family>.py``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module
from math import prod
from typing import Any, ClassVar, Literal

from nbdnn.cached import cached_property
from nbdnn.errors import InvalidProblem, InvalidType
from nbdnn.problem_text import Tokens

ITEMSIZE = {"f16": 2, "bf16": 2, "f32": 4, "f64": 8}
ANY_ITEMSIZE = ITEMSIZE | {"u8": 1, "i64": 8}
DEFAULT_COMPUTE = {"f16": "f32", "bf16": "f32", "f32": "f32", "f64": "f64"}
# Families of ops: the problems of each, and their grammar, are in problem_<family>.py.
FAMILIES = {
    "conv": ("conv_fwd", "conv_bwd_data", "conv_bwd_filter"),
    "softmax": ("softmax_fwd", "softmax_bwd"),
    "bn": ("bn_train", "bn_infer", "bn_bwd", "bn_infer_bwd"),
    "dropout": ("dropout_fwd", "dropout_bwd"),
    "pool": ("pool_fwd", "pool_bwd"),
    "rnn": ("rnn_fwd", "rnn_bwd"),
    "spatialtf": (
        *("spatialtf_fwd", "spatialtf_bwd", "spatialtf_grid_fwd", "spatialtf_grid_bwd"),
        *("spatialtf_sampler_fwd", "spatialtf_sampler_bwd"),
    ),
}
OPS = tuple(op for ops in FAMILIES.values() for op in ops)
DEFAULT_ALIGN = 16
LAYOUTS = {2: ("nchw", "nhwc"), 3: ("ncdhw", "ndhwc")}
# Of a filter, window, stride, dilation, pad, hidden state or a convolution's channels: int32 to drivers and kernels.
LARGEST_STEP = 2**31 - 1
DIM_NAMES = {2: ("h", "w"), 3: ("d", "h", "w")}


@dataclass(frozen=True, slots=True)
class Operand:
    """One array of a problem: its logical shape (channels second), strides in elements, and whether it is written.

    dtype: 'f32' and the like, or 'u8' or 'i64' of what is no tensor of numbers (masks, states of generators).
    keeps: of an output, whether what was in it before is read. positive: values are, as those of a variance. optional:
    of an input, whether a runner may be given address 0, for zeros. scale: of random values to measure and check with.
    """

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    role: Literal["in", "out"] = "in"
    keeps: bool = False
    positive: bool = False
    optional: bool = False
    scale: float = 1.0

    @property
    def size_elems(self) -> int:
        return prod(self.shape)

    @property
    def size_bytes(self) -> int:
        return self.size_elems * ANY_ITEMSIZE[self.dtype]

    @property
    def is_read(self) -> bool:
        return self.role == "in" or self.keeps


class Problem(ABC):
    """What every problem has. Subclasses are frozen dataclasses, validated at construction.

    op: such as 'conv_fwd'. dtype: of the tensors. compute: the type of the arithmetic. align: bytes that every pointer
    is a multiple of. scalars: values such as those that a runner takes besides pointers, to measure and check with.
    multiplies_matrices: whether matrix units could do its arithmetic.
    """

    op: str
    dtype: str
    compute: str
    align: int
    scalars: ClassVar[tuple[float, ...]] = ()
    multiplies_matrices: ClassVar[bool] = False

    @property
    @abstractmethod
    def operands(self) -> tuple[Operand, ...]:
        """Every array, in the order in which a runner takes their pointers."""

    @property
    @abstractmethod
    def flops(self) -> int:
        """Arithmetic operations of the plain method."""

    @property
    def min_bytes(self) -> int:
        """Bytes moved if every operand is read or written once (an output that keeps what was in it: both)."""
        return sum(o.size_bytes * (1 + o.keeps) for o in self.operands)

    @property
    def only(self) -> str:
        """The one candidate, as provider/algorithm, that understands the operands; '' where anybody does."""
        return ""

    @abstractmethod
    def _tokens(self, *, extents: bool) -> list[str]:
        """The words of the text form; without `extents` those of the layer."""

    @cached_property
    def _text(self) -> str:
        return ":".join(self._tokens(extents=True))

    def __str__(self) -> str:
        return self._text

    @cached_property
    def layer(self) -> str:
        """The problem without batch and spatial extents: what ``*_once`` policies remember a choice by."""
        return ":".join(self._tokens(extents=False))


def dense_strides(shape: tuple[int, ...], channels_last: bool) -> tuple[int, ...]:
    """Strides in elements of a dense array of logical `shape` (axis 1 is the channel axis)."""
    axes = list(range(len(shape)))
    memory_order = [0, *axes[2:], 1] if channels_last and len(shape) > 2 else axes
    strides = [0] * len(shape)
    step = 1
    for axis in reversed(memory_order):
        strides[axis] = step
        step *= shape[axis]
    return tuple(strides)


def named(names: tuple[str, ...], extents: tuple[int, ...]) -> str:
    return "".join(f"{name}{extent}" for name, extent in zip(names, extents, strict=True))


def joined(extents: tuple[int, ...]) -> str:
    return "x".join(map(str, extents))


def check_kind(problem: Problem, ops: tuple[str, ...]) -> None:
    """The checks of what every problem has: op, dtype and align."""
    if problem.op not in ops:
        raise InvalidProblem(f"unknown op {problem.op!r}: expected one of {', '.join(ops)}")
    if problem.dtype not in ITEMSIZE:
        raise InvalidType(f"dtype {problem.dtype!r} is not one of {', '.join(ITEMSIZE)}")
    if problem.align < (size := ITEMSIZE[problem.dtype]):
        raise InvalidProblem(f"alignment is {problem.align}, it must be at least the {size} bytes of {problem.dtype}")


def check_fields(problem: Any, ops: tuple[str, ...]) -> None:
    """The checks of what problems of images have: op, dtype, align, n, c, spatial and layout."""
    check_kind(problem, ops)
    ndim = len(problem.spatial)
    if ndim not in LAYOUTS:
        raise InvalidType(f"{problem.op} has 2 or 3 spatial axes, not {ndim}")
    if problem.layout not in LAYOUTS[ndim]:
        raise InvalidProblem(f"layout {problem.layout!r} is not one of {', '.join(LAYOUTS[ndim])}")
    check_numbers("extent", (problem.n, problem.c), 0)
    check_numbers("spatial extent", problem.spatial, 1)


def check_numbers(name: str, values: Iterable[int], smallest: int, largest: int | None = None) -> None:
    for value in values:
        if value < smallest:
            raise InvalidProblem(f"{name} is {value}, it must be at least {smallest}")
        if largest is not None and value > largest:
            raise InvalidProblem(f"{name} is {value}, it must be at most {largest}")


def parse(text: str) -> Problem:
    """The problem that `text` names; InvalidProblem says which token is wrong and what was expected there."""
    if not isinstance(text, str):
        raise InvalidProblem(f"{text!r} is not the text of a problem")
    op, *tokens = text.strip().split(":")
    family = op.partition("_")[0]
    if op in FAMILIES.get(family, ()):
        return import_module(f"nbdnn.problem_{family}").read(op, Tokens(tokens, text))
    raise InvalidProblem(f"unknown op {op!r} in {text!r}: expected one of {', '.join(OPS)}")
