"""Convolutions in 2-D and 3-D, and both their gradients: what to compute.

Grammar of a convolution (tokens joined by ``:``; the ones in brackets only where they differ from the default)::

    op : dtype [: compute] : dims : filter : pad : stride : dilation : groups : mode : layout
       [: filter layout] [: y layout] [: alignment] [: e : epilogue]

    op         conv_fwd | conv_bwd_data | conv_bwd_filter
    dtype      f16 | bf16 | f32 | f64                            of every operand
    compute    cf16 | cf32 | cf64                                default: f32 (f64 for f64)
    dims       n32c64h56w56 | n4c64d16h56w56                     the image, in every direction
    filter     k64r3s3 | k64t3r3s3                               k counts all groups
    pad        p1x1 | ba1.2x0.3                                  the same at both ends | before.after on each axis
    stride     u1x1          dilation  d1x1          groups  g1
    mode       cross | conv                                      conv flips every spatial axis of the filter
    layout     nchw | nhwc | ncdhw | ndhwc                       of the image (bwd_data: of dy and dx)
    filter layout  kcrs | krsc | kctrs | ktrsc                   default: channels-last if the layout is
    y layout   ynchw | ynhwc | yncdhw | yndhwc                   of y (bwd_filter: dy; bwd_data: dx); default: as x
    alignment  a4                                                bytes every pointer is a multiple of; default 16
    epilogue   bias+relu+res+beta                                bias | one activation | res | beta (out is read)

Example: ``conv_fwd:f32:n32c64h56w56:k64r3s3:p1x1:u1x1:d1x1:g1:cross:nchw``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

from nbdnn.cached import cached_property
from nbdnn.errors import InvalidProblem, InvalidType
from nbdnn.problem import (
    DEFAULT_ALIGN,
    DEFAULT_COMPUTE,
    DIM_NAMES,
    FAMILIES,
    LARGEST_STEP,
    LAYOUTS,
    Operand,
    Problem,
    check_kind,
    check_numbers,
    dense_strides,
    joined,
    named,
    parse,
)
from nbdnn.problem_text import Tokens

CONV_OPS = FAMILIES["conv"]
COMPUTE_OF = {"f16": ("f32", "f16"), "bf16": ("f32",), "f32": ("f32",), "f64": ("f64",)}
ACTIVATIONS = ("relu", "swish", "sigmoid", "tanh")
EPILOGUE_TOKENS = ("bias", *ACTIVATIONS, "res", "beta")
FILTER_LAYOUTS = {2: ("kcrs", "krsc"), 3: ("kctrs", "ktrsc")}
_LARGEST_EXTENT = 2**47  # of an image that has addresses
_FILTER_NAMES = {2: ("r", "s"), 3: ("t", "r", "s")}
_FILTER = re.compile(r"k(\d+)(?:t(\d+))?r(\d+)s(\d+)")
_GROUPS = re.compile(r"g(\d+)")


@dataclass(frozen=True)
class ConvProblem(Problem):
    """A 2-D or 3-D convolution, forward or one of its gradients.

    ``n, c, spatial`` are the image's and ``k, filter`` the filter's extents in every direction; ``pad`` is one
    (before, after) pair an axis. ``compute``, ``w_layout`` and ``y_layout`` may be left empty: their defaults.

    Raises InvalidProblem or InvalidType (naming the numbers) where the fields do not describe a convolution.
    """

    op: str
    dtype: str
    n: int
    c: int
    spatial: tuple[int, ...]
    k: int
    filter: tuple[int, ...]
    pad: tuple[tuple[int, int], ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int = 1
    mode: str = "cross"
    layout: str = "nchw"
    compute: str = ""
    w_layout: str = ""
    y_layout: str = ""
    align: int = DEFAULT_ALIGN
    epilogue: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self._validate_types()
        set_ = object.__setattr__
        last = self.layout == LAYOUTS[self.ndim][1]
        set_(self, "compute", self.compute or DEFAULT_COMPUTE[self.dtype])
        set_(self, "w_layout", self.w_layout or FILTER_LAYOUTS[self.ndim][last])
        set_(self, "y_layout", self.y_layout or self.layout)
        self._validate_numbers()

    def _validate_types(self) -> None:
        check_kind(self, CONV_OPS)
        if self.ndim not in LAYOUTS:
            raise InvalidType(f"a convolution has 2 or 3 spatial axes, not {self.ndim}")
        for name, value, valid in (
            ("layout", self.layout, LAYOUTS[self.ndim]),
            ("filter layout", self.w_layout, (*FILTER_LAYOUTS[self.ndim], "")),
            ("y layout", self.y_layout, (*LAYOUTS[self.ndim], "")),
            ("mode", self.mode, ("conv", "cross")),
            ("compute type", self.compute, (*COMPUTE_OF[self.dtype], "")),
        ):
            if value not in valid:
                raise InvalidProblem(f"{name} {value!r} is not one of {', '.join(v for v in valid if v)}")

    def _validate_numbers(self) -> None:
        for name, axes in (
            ("filter", self.filter),
            ("pad", self.pad),
            ("stride", self.stride),
            ("dilation", self.dilation),
        ):
            if len(axes) != self.ndim:
                raise InvalidProblem(f"{name} has {len(axes)} axes, the image has {self.ndim} spatial axes")
        if self.groups < 1:
            raise InvalidProblem(f"groups is {self.groups}, it must be at least 1")
        for name, value in (("input channels", self.c), ("output channels", self.k)):
            check_numbers(name, (value,), 0, LARGEST_STEP)
            if value % self.groups:
                raise InvalidProblem(f"{name}: {value} is not a multiple of groups {self.groups}")
        check_numbers("spatial extent", self.spatial, 1, _LARGEST_EXTENT)
        check_numbers("filter extent", self.filter, 1, LARGEST_STEP)
        check_numbers("stride", self.stride, 1, LARGEST_STEP)
        check_numbers("dilation", self.dilation, 1, LARGEST_STEP)
        check_numbers("pad", (p for pair in self.pad for p in pair), 0, LARGEST_STEP)
        check_numbers("extent", (self.n,), 0)
        for axis, extent in enumerate(self.out_spatial):
            if extent < 1:
                raise InvalidProblem(
                    f"output extent of spatial axis {axis} would be {extent}: the filter spans "
                    f"{(self.filter[axis] - 1) * self.dilation[axis] + 1}, the padded image "
                    f"{self.spatial[axis] + sum(self.pad[axis])}"
                )
        if self.epilogue and self.op != "conv_fwd" and self.epilogue != ("beta",):
            raise InvalidProblem(f"epilogue {'+'.join(self.epilogue)} exists on conv_fwd only; gradients take beta")
        if unknown := [t for t in self.epilogue if t not in EPILOGUE_TOKENS]:
            raise InvalidProblem(f"epilogue {unknown[0]!r} is not one of {', '.join(EPILOGUE_TOKENS)}")
        in_order = sorted(self.epilogue, key=_epilogue_rank)
        if list(self.epilogue) != in_order or len({_epilogue_rank(t) for t in in_order}) != len(in_order):
            raise InvalidProblem(
                f"epilogue {'+'.join(self.epilogue)!r}: at most one each of bias, activation, res, beta, in that order"
            )

    @property
    def ndim(self) -> int:
        """Number of spatial axes."""
        return len(self.spatial)

    @cached_property
    def out_spatial(self) -> tuple[int, ...]:
        """Spatial extents of y (and dy)."""
        return tuple(
            (i + before + after - ((f - 1) * d + 1)) // u + 1
            for i, f, (before, after), u, d in zip(
                self.spatial, self.filter, self.pad, self.stride, self.dilation, strict=True
            )
        )

    @property
    def channels_last(self) -> bool:
        """Whether the image (bwd_data: dy) is channels-last."""
        return self.layout.endswith("c")

    @property
    def w_channels_last(self) -> bool:
        return self.w_layout.endswith("c")

    @property
    def y_channels_last(self) -> bool:
        return self.y_layout.endswith("c")

    @property
    def x_shape(self) -> tuple[int, ...]:
        return (self.n, self.c, *self.spatial)

    @property
    def w_shape(self) -> tuple[int, ...]:
        return (self.k, self.c // self.groups, *self.filter)

    @property
    def y_shape(self) -> tuple[int, ...]:
        return (self.n, self.k, *self.out_spatial)

    @property
    def activation(self) -> str | None:
        return next((t for t in self.epilogue if t in ACTIVATIONS), None)

    @property
    def multiplies_matrices(self) -> bool:  # type: ignore[override]
        """A convolution of one channel a group has no matrix to multiply."""
        return self.c // self.groups > 1

    @property
    def is_depthwise(self) -> bool:
        return self.groups > 1 and self.groups == self.c

    @cached_property
    def operands(self) -> tuple[Operand, ...]:
        """Every array of the problem, in the order in which a runner takes their pointers.

        conv_fwd: x, w, y, then bias and residual where present; conv_bwd_data: w, dy, dx; conv_bwd_filter: x, dy, dw.
        """

        def operand(name: str, shape: tuple[int, ...], last: bool, role: Literal["in", "out"] = "in") -> Operand:
            keeps = role == "out" and "beta" in self.epilogue
            return Operand(name, shape, dense_strides(shape, last), self.dtype, role, keeps)

        if self.op == "conv_bwd_data":
            return (
                operand("w", self.w_shape, self.w_channels_last),
                operand("dy", self.y_shape, self.channels_last),
                operand("dx", self.x_shape, self.y_channels_last, "out"),
            )
        x = operand("x", self.x_shape, self.channels_last)
        if self.op == "conv_bwd_filter":
            return (
                x,
                operand("dy", self.y_shape, self.y_channels_last),
                operand("dw", self.w_shape, self.w_channels_last, "out"),
            )
        fixed = (
            x,
            operand("w", self.w_shape, self.w_channels_last),
            operand("y", self.y_shape, self.y_channels_last, "out"),
        )
        bias = (Operand("bias", (self.k,), (1,), self.dtype),) if "bias" in self.epilogue else ()
        residual = (operand("residual", self.y_shape, self.y_channels_last),) if "res" in self.epilogue else ()
        return fixed + bias + residual

    @property
    def reduction_length(self) -> int:
        """Number of products summed into one output element (borders ignored)."""
        if self.op == "conv_bwd_filter":
            return self.n * prod(self.out_spatial)
        channels = self.k if self.op == "conv_bwd_data" else self.c
        return channels // self.groups * prod(self.filter)

    @property
    def flops(self) -> int:
        """Multiplications plus additions of the direct method, the same in all three directions."""
        return 2 * self.n * self.k * prod(self.out_spatial) * (self.c // self.groups) * prod(self.filter)

    @property
    def scalars(self) -> tuple[float, ...]:  # type: ignore[override]
        """(alpha, beta)."""
        return 1.0, 0.5 if "beta" in self.epilogue else 0.0

    def _tokens(self, *, extents: bool) -> list[str]:
        batch, spatial = (f"n{self.n}", named(DIM_NAMES[self.ndim], self.spatial)) if extents else ("", "")
        tokens = [self.op, self.dtype]
        if self.compute != DEFAULT_COMPUTE[self.dtype]:
            tokens.append("c" + self.compute)
        tokens += [f"{batch}c{self.c}{spatial}", f"k{self.k}{named(_FILTER_NAMES[self.ndim], self.filter)}"]
        if all(before == after for before, after in self.pad):
            tokens.append("p" + "x".join(str(before) for before, _ in self.pad))
        else:
            tokens.append("ba" + "x".join(f"{before}.{after}" for before, after in self.pad))
        tokens += ["u" + joined(self.stride), "d" + joined(self.dilation), f"g{self.groups}", self.mode, self.layout]
        if self.w_layout != FILTER_LAYOUTS[self.ndim][self.channels_last]:
            tokens.append(self.w_layout)
        if self.y_layout != self.layout:
            tokens.append("y" + self.y_layout)
        if self.align != DEFAULT_ALIGN:
            tokens.append(f"a{self.align}")
        if self.epilogue:
            tokens += ["e", "+".join(self.epilogue)]
        return tokens

    def with_op(self, op: str) -> ConvProblem:
        """The same convolution in another direction (the forward's epilogue does not follow)."""
        return replace(self, op=op, epilogue=(), w_layout="", y_layout="")


def _epilogue_rank(token: str) -> int:
    return {"bias": 0, "res": 2, "beta": 3}.get(token, 1)


def epilogue_tokens(*, bias: bool, activation: str | None, residual: bool, beta: bool) -> tuple[str, ...]:
    """The epilogue field of a problem from its parts, in canonical order."""
    parts = (("bias", bias), (activation or "", bool(activation)), ("res", residual), ("beta", beta))
    return tuple(token for token, present in parts if present)


def conv(text: str) -> ConvProblem:
    """The convolution that `text` names."""
    problem = parse(text)
    if not isinstance(problem, ConvProblem):
        raise InvalidProblem(f"{text!r} is not a convolution")
    return problem


def read(op: str, tokens: Tokens) -> ConvProblem:
    """The problem whose text has these tokens after its op."""
    dtype, compute = tokens.next("a dtype"), tokens.flag("cf16", "cf32", "cf64")[1:]
    n, c, *spatial = tokens.dims()
    k, *taps = tokens.match(_FILTER, "a filter such as k64r3s3")
    pad, stride, dilation = tokens.pad(), tokens.axes("u"), tokens.axes("d")
    (groups,) = tokens.match(_GROUPS, "groups such as g1")
    mode, layout = tokens.next("a mode"), tokens.next("a layout")
    w_layout = tokens.flag(*(name for names in FILTER_LAYOUTS.values() for name in names))
    y_layout = tokens.flag(*(f"y{name}" for names in LAYOUTS.values() for name in names))[1:]
    align = tokens.align()
    epilogue = tuple(tokens.next("an epilogue such as bias+relu").split("+")) if tokens.flag("e") else ()
    tokens.end()
    return ConvProblem(
        op=op,
        dtype=dtype,
        n=n,
        c=c,
        spatial=tuple(spatial),
        k=k,
        filter=tuple(taps),
        pad=pad,
        stride=stride,
        dilation=dilation,
        groups=groups,
        mode=mode,
        layout=layout,
        compute=compute,
        w_layout=w_layout,
        y_layout=y_layout,
        align=align,
        epilogue=epilogue,
    )
