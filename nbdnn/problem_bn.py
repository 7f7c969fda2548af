"""What to compute: batch normalisation, in training and inference, and the gradients of both.

Grammar (tokens joined by ``:``, the ones in brackets only where they differ from the default)::

    op : dtype : dims : mode : layout [: parameters] [: running] [: alignment]

    op          bn_train | bn_infer | bn_bwd | bn_infer_bwd
    dtype       f16 | bf16 | f32 | f64          of x, y, dy and dx
    dims        n32c256h56w56 | n4c64d16h56w56
    mode        spatial | per-activation        statistics over everything but c, or over n alone
    layout      nchw | nhwc | ncdhw | ndhwc     of x, y, dy, dx, and of parameters that have spatial axes
    parameters  pf32                            dtype of parameters and statistics; default: as the data
    running     run                             bn_train also updates running averages
    alignment   a4                              bytes every pointer is a multiple of; default 16

Epsilon and the running averages' factor are scalars of the runner and not part of the problem.

Example: ``bn_train:f32:n32c256h56w56:spatial:nchw``.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from nbdnn.cached import cached_property
from nbdnn.errors import InvalidProblem, InvalidType
from nbdnn.problem import (
    DEFAULT_ALIGN,
    DEFAULT_COMPUTE,
    DIM_NAMES,
    ITEMSIZE,
    Operand,
    Problem,
    check_fields,
    dense_strides,
    named,
)
from nbdnn.problem_text import Tokens

BN_OPS = ("bn_train", "bn_infer", "bn_bwd", "bn_infer_bwd")
MODES = ("spatial", "per-activation")
# Names of the operands in order: data, parameters that are read; data, parameters that are written.
_NAMES = {
    "bn_train": (("x",), ("gamma", "beta"), ("y",), ("mean", "invstd")),
    "bn_infer": (("x",), ("gamma", "beta", "mean", "var"), ("y",), ()),
    "bn_bwd": (("x", "dy"), ("gamma", "mean", "invstd"), ("dx",), ("dgamma", "dbeta")),
    "bn_infer_bwd": (("x", "dy"), ("gamma", "mean", "var"), ("dx",), ("dgamma", "dbeta", "dmean", "dvar")),
}
_RUNNING = ("running_mean", "running_var"), ("new_running_mean", "new_running_var")
_POSITIVE = ("var", "invstd", "running_var")


@dataclass(frozen=True)
class BnProblem(Problem):
    """A batch normalisation of 4-D or 5-D arrays. A channel is what has statistics of its own: a c, or in mode
    per-activation a c and a position; its elements are the m values that these are over."""

    op: str
    dtype: str
    n: int
    c: int
    spatial: tuple[int, ...]
    mode: str = "spatial"
    layout: str = "nchw"
    param_dtype: str = ""
    running: bool = False
    align: int = DEFAULT_ALIGN

    def __post_init__(self) -> None:
        check_fields(self, BN_OPS)
        object.__setattr__(self, "param_dtype", self.param_dtype or self.dtype)
        if self.mode not in MODES:
            raise InvalidProblem(f"mode {self.mode!r} is not one of {', '.join(MODES)}")
        if self.param_dtype not in (self.dtype, DEFAULT_COMPUTE[self.dtype]):
            raise InvalidType(f"parameters of dtype {self.param_dtype!r} do not go with data of {self.dtype!r}")
        if self.running and self.op != "bn_train":
            raise InvalidProblem(f"{self.op} updates no running averages")
        if self.op == "bn_train" and not self.n:
            raise InvalidProblem("a batch of 0 has no mean: training needs at least 1 image")
        if self.running and self.m < 2:
            raise InvalidProblem(f"the running variance takes m/(m-1) of the batch's, and m is {self.m}")

    @property
    def compute(self) -> str:  # type: ignore[override]
        return DEFAULT_COMPUTE[self.dtype]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of x, y, dy and dx."""
        return (self.n, self.c, *self.spatial)

    @property
    def param_shape(self) -> tuple[int, ...]:
        """Of parameters and statistics: 1 on axes that are reduced."""
        return (1, self.c, *(self.spatial if self.mode == "per-activation" else (1,) * len(self.spatial)))

    @property
    def m(self) -> int:
        """Elements of a channel."""
        return self.n * (prod(self.spatial) if self.mode == "spatial" else 1)

    @property
    def planes(self) -> tuple[int, int, int]:
        """(outer, channels, inner): element (o, j, i) of the dense data lies at (o * channels + j) * inner + i and
        belongs to channel j, the j-th of the dense parameters."""
        positions = prod(self.spatial)
        if self.mode == "per-activation":
            return self.n, self.c * positions, 1
        return (self.n * positions, self.c, 1) if self.layout.endswith("c") else (self.n, self.c, positions)

    @cached_property
    def operands(self) -> tuple[Operand, ...]:
        """bn_train: x, gamma, beta, y, mean, invstd; bn_infer: x, gamma, beta, mean, var, y; bn_bwd: x, dy, gamma,
        mean, invstd, dx, dgamma, dbeta; bn_infer_bwd: x, dy, gamma, mean, var, dx, dgamma, dbeta, dmean, dvar. With
        running averages theirs come last among the inputs, and last among the outputs."""
        last = self.layout.endswith("c")
        data, params, results, statistics = _NAMES[self.op]
        more, new = _RUNNING if self.running else ((), ())

        def of_data(name: str, written: bool) -> Operand:
            strides = dense_strides(self.shape, last)
            return Operand(name, self.shape, strides, self.dtype, "out" if written else "in")

        def of_channels(name: str, written: bool) -> Operand:
            strides, positive = dense_strides(self.param_shape, last), not written and name in _POSITIVE
            role = "out" if written else "in"
            return Operand(name, self.param_shape, strides, self.param_dtype, role, positive=positive)  # type: ignore[arg-type]

        return (
            *(of_data(name, False) for name in data),
            *(of_channels(name, False) for name in (*params, *more)),
            *(of_data(name, True) for name in results),
            *(of_channels(name, True) for name in (*statistics, *new)),
        )

    @cached_property
    def places(self) -> dict[str, int]:
        """Where each operand is among them, by name."""
        return {operand.name: place for place, operand in enumerate(self.operands)}

    @property
    def flops(self) -> int:
        """Of an element: difference, square and two sums, then difference, product and sum; inference the latter."""
        return prod(self.shape) * {"bn_train": 7, "bn_infer": 3, "bn_bwd": 9, "bn_infer_bwd": 5}[self.op]

    @property
    def scalars(self) -> tuple[float, ...]:  # type: ignore[override]
        """(epsilon, factor of the running averages)."""
        return 1e-4, 0.1

    @property
    def vector_bytes(self) -> int:
        """The largest power of 2, at most 16, such that neighbours of that many bytes begin at multiples of it, and
        belong to one channel or, where neighbours are of different channels, to as many: 16 where all is even."""
        _, channels, inner = self.planes
        return min(self.align, _even(ITEMSIZE[self.dtype] * (inner if inner > 1 else channels)))

    def _tokens(self, *, extents: bool) -> list[str]:
        batch, spatial = (f"n{self.n}", named(DIM_NAMES[len(self.spatial)], self.spatial)) if extents else ("", "")
        tokens = [self.op, self.dtype, f"{batch}c{self.c}{spatial}", self.mode, self.layout]
        if self.param_dtype != self.dtype:
            tokens.append(f"p{self.param_dtype}")
        if self.running:
            tokens.append("run")
        return tokens + ([f"a{self.align}"] if self.align != DEFAULT_ALIGN else [])


def _even(size_bytes: int) -> int:
    """The largest power of 2, at most 16, that divides a number of bytes."""
    bits = size_bytes | 16
    return bits & -bits


def read(op: str, tokens: Tokens) -> BnProblem:
    """The problem whose text has these tokens after its op."""
    dtype = tokens.next("a dtype")
    n, c, *spatial = tokens.dims()
    mode, layout = tokens.next("a mode"), tokens.next("a layout")
    param_dtype = tokens.flag("pf32").removeprefix("p")
    running, align = bool(tokens.flag("run")), tokens.align()
    tokens.end()
    return BnProblem(op, dtype, n, c, tuple(spatial), mode, layout, param_dtype, running, align)
