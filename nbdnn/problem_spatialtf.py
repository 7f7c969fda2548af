"""What to compute: the spatial transformer, its two steps (grid and sampler), and the gradients of all three.

Grammar (tokens joined by ``:``, the ones in brackets only where they differ from the default)::

    op : dtype : dims : output [: layout] [: parameters] [: alignment]

    op          spatialtf_fwd | spatialtf_bwd | spatialtf_sampler_fwd | spatialtf_sampler_bwd
                spatialtf_grid_fwd | spatialtf_grid_bwd
    dtype       f16 | bf16 | f32 | f64          of x, y, dy and dx
    dims        n32c3h224w224                   the image; of a grid, which knows no image, n32
    output      o224x224                        rows and columns of y, and of the grid
    layout      nchw | nhwc                     of x, y, dy and dx; not of a grid
    parameters  pf32                            dtype of theta, grid and their gradients; default: as the data
    alignment   a4                              bytes every pointer is a multiple of; default 16

Example: ``spatialtf_fwd:f32:n32c3h224w224:o224x224:nchw``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import prod

from nbdnn.cached import cached_property
from nbdnn.errors import InvalidProblem, InvalidType
from nbdnn.problem import (
    DEFAULT_ALIGN,
    DEFAULT_COMPUTE,
    DIM_NAMES,
    FAMILIES,
    Operand,
    Problem,
    check_fields,
    check_kind,
    check_numbers,
    dense_strides,
    named,
)
from nbdnn.problem_text import Tokens

# Names of the operands of each op, and how many of them are read.
_NAMES = {
    "spatialtf_fwd": (("x", "theta", "y"), 2),
    "spatialtf_bwd": (("x", "theta", "dy", "dx", "dtheta"), 3),
    "spatialtf_grid_fwd": (("theta", "grid"), 1),
    "spatialtf_grid_bwd": (("dgrid", "dtheta"), 1),
    "spatialtf_sampler_fwd": (("x", "grid", "y"), 2),
    "spatialtf_sampler_bwd": (("x", "grid", "dy", "dx", "dgrid"), 3),
}
_DIMS, _BATCH = re.compile(r"n(\d+)c(\d+)h(\d+)w(\d+)"), re.compile(r"n(\d+)")


@dataclass(frozen=True)
class SpatialtfProblem(Problem):
    """A spatial transformer of 2-D images.

    ``n, c, spatial`` are the image's and ``out_spatial`` the rows and columns of the output, in both directions. A grid
    has no ``c``, ``spatial`` and ``layout``: 0, () and ''.
    """

    op: str
    dtype: str
    n: int
    c: int
    spatial: tuple[int, ...]
    out_spatial: tuple[int, int]
    layout: str = "nchw"
    param_dtype: str = ""
    align: int = DEFAULT_ALIGN

    def __post_init__(self) -> None:
        object.__setattr__(self, "param_dtype", self.param_dtype or self.dtype)
        if self.has_image:
            check_fields(self, FAMILIES["spatialtf"])
            if len(self.spatial) != 2:
                raise InvalidType(f"{self.op} has 2 spatial axes, not {len(self.spatial)}")
        else:
            check_kind(self, FAMILIES["spatialtf"])
            check_numbers("extent", (self.n,), 0)
        if self.param_dtype not in (self.dtype, DEFAULT_COMPUTE[self.dtype] if self.has_image else self.dtype):
            raise InvalidType(f"parameters of dtype {self.param_dtype!r} do not go with data of {self.dtype!r}")
        if len(self.out_spatial) != 2:
            raise InvalidProblem(f"output has {len(self.out_spatial)} spatial axes, expected 2")
        check_numbers("output extent", self.out_spatial, 1)

    @property
    def compute(self) -> str:  # type: ignore[override]
        return DEFAULT_COMPUTE[self.dtype]

    @property
    def has_image(self) -> bool:
        return not self.op.startswith("spatialtf_grid")

    @property
    def is_affine(self) -> bool:
        """Whether positions follow from theta; else they are a grid's."""
        return "sampler" not in self.op

    @property
    def channels_last(self) -> bool:
        return self.layout == "nhwc"

    @property
    def positions(self) -> int:
        """Outputs of one channel of one image."""
        return prod(self.out_spatial)

    @property
    def x_shape(self) -> tuple[int, ...]:
        return (self.n, self.c, *self.spatial)

    @property
    def y_shape(self) -> tuple[int, ...]:
        return (self.n, self.c, *self.out_spatial)

    @property
    def theta_shape(self) -> tuple[int, ...]:
        return (self.n, 2, 3)

    @property
    def grid_shape(self) -> tuple[int, ...]:
        return (self.n, *self.out_spatial, 2)

    @cached_property
    def operands(self) -> tuple[Operand, ...]:
        """fwd: x, theta, y; bwd: x, theta, dy, dx, dtheta; grid_fwd: theta, grid; grid_bwd: dgrid, dtheta; sampler_fwd:
        x, grid, y; sampler_bwd: x, grid, dy, dx, dgrid."""
        names, inputs = _NAMES[self.op]
        return tuple(self._operand(name, i >= inputs) for i, name in enumerate(names))

    def _operand(self, name: str, written: bool) -> Operand:
        plain, role = name.removeprefix("d"), "out" if written else "in"
        if plain in ("theta", "grid"):
            shape = self.theta_shape if plain == "theta" else self.grid_shape
            return Operand(name, shape, dense_strides(shape, False), self.param_dtype, role)  # type: ignore[arg-type]
        shape = self.x_shape if plain == "x" else self.y_shape
        return Operand(name, shape, dense_strides(shape, self.channels_last), self.dtype, role)  # type: ignore[arg-type]

    @cached_property
    def places(self) -> dict[str, int]:
        """Where each operand is among them, by name."""
        return {operand.name: place for place, operand in enumerate(self.operands)}

    @property
    def flops(self) -> int:
        """Of a position: two products of theta's rows; of an output: four products and three sums, backward thrice."""
        of_grid = 12 * self.n * self.positions if self.is_affine else 0
        return of_grid + prod(self.y_shape) * (21 if self.op.endswith("bwd") else 7) * self.has_image

    def _tokens(self, *, extents: bool) -> list[str]:
        tokens = [self.op, self.dtype]
        batch = f"n{self.n}" if extents else ""
        if self.has_image:
            tokens.append(f"{batch}c{self.c}{named(DIM_NAMES[2], self.spatial) if extents else ''}")
        elif extents:
            tokens.append(batch)
        if extents:
            tokens.append("o" + "x".join(map(str, self.out_spatial)))
        tokens += [self.layout] * self.has_image
        if self.param_dtype != self.dtype:
            tokens.append(f"p{self.param_dtype}")
        return tokens + ([f"a{self.align}"] if self.align != DEFAULT_ALIGN else [])


def read(op: str, tokens: Tokens) -> SpatialtfProblem:
    """The problem whose text has these tokens after its op."""
    if op not in FAMILIES["spatialtf"]:
        raise InvalidProblem(f"unknown op {op!r}: expected one of {', '.join(FAMILIES['spatialtf'])}")
    dtype, has_image = tokens.next("a dtype"), not op.startswith("spatialtf_grid")
    pattern, expected = (_DIMS, "dims such as n32c3h224w224") if has_image else (_BATCH, "a batch such as n32")
    n, c, *spatial = (*tokens.match(pattern, expected), *([] if has_image else [0]))
    out_spatial: tuple[int, int] = tokens.axes("o")  # type: ignore[assignment]
    layout = tokens.next("a layout") if has_image else ""
    param_dtype = tokens.flag("pf32").removeprefix("p")
    align = tokens.align()
    tokens.end()
    return SpatialtfProblem(op, dtype, n, c, tuple(spatial), out_spatial, layout, param_dtype, align)
