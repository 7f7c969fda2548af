"""What to compute: a recurrent network over whole sequences, and its gradient.

Grammar (tokens joined by ``:``, the ones in brackets only where they differ from the default)::

    op : dtype : dims : mode : direction : input [: training] [: tape] [: alignment]

    op         rnn_fwd | rnn_bwd
    dtype      f16 | bf16 | f32 | f64                 of everything but the tape
    dims       t50b32i128h256l2                       steps, batch, input, hidden, layers
    mode       rnn_relu | rnn_tanh | lstm | gru
    direction  uni | bi
    input      linear | skip                          skip: the first layer adds its input as it is (then i = h)
    training   train                                  rnn_fwd also writes the tape that rnn_bwd reads
    tape       tape46080/cudnn/rnn/standard           a tape of that writer's own, of so many elements;
               ditto .../standard/consumed            rnn_bwd may write into it, and nobody reads it again
    alignment  a4                                     bytes every pointer is a multiple of; default 16

The tape has what a gradient needs and cannot know again cheaply, in the compute type: for each layer its outputs h
(t, b, directions * h), then for each step, image and direction what the mode saves, (t, b, directions, saved, h)::

    lstm   gates i, f, g, o after their activations, and the cell c
    gru    gates r, u, n after their activations, and q = R_n h + bR_n, which r multiplies
    rnn_*  nothing: h says all

A library that keeps a secret of its own for its own gradient has tapes of its own. The problem then says whose it is:
``provider/algorithm/config`` of the candidate of rnn_fwd that writes it, which alone runs the problem, as does its
gradient.

Example: ``rnn_fwd:f32:t50b32i128h256l2:lstm:uni:linear``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

from nbdnn.cached import cached_property
from nbdnn.errors import InvalidProblem
from nbdnn.problem import (
    DEFAULT_ALIGN,
    DEFAULT_COMPUTE,
    FAMILIES,
    ITEMSIZE,
    LARGEST_STEP,
    Operand,
    Problem,
    check_kind,
    check_numbers,
    dense_strides,
    named,
)
from nbdnn.problem_text import Tokens
from nbdnn.rnn_parameters import GATES, MOST_LAYERS, Parameters

# Values that the tape keeps of a hidden unit at a step, besides its output.
SAVED = {"rnn_relu": 0, "rnn_tanh": 0, "lstm": 5, "gru": 4}
_TAPE = re.compile(r"tape(\d+)/(\w+/\w+/\w+?)(/consumed)?")
_DIMS = re.compile(r"t(\d+)b(\d+)i(\d+)h(\d+)l(\d+)")
# Of each op: what is read, what is written.
_NAMES = {
    "rnn_fwd": (["x", "hx", "cx", "w"], ["y", "hy", "cy", "tape"]),
    "rnn_bwd": (["x", "hx", "cx", "w", "y", "tape", "dy", "dhy", "dcy"], ["dw", "dx", "dhx", "dcx"]),
}
_OPTIONAL = ("hx", "cx", "dhy", "dcy")


class OwnTape(NamedTuple):
    """A tape that only its writer understands. writer: provider/algorithm/config. consumed: the gradient may write into
    it."""

    size_elems: int
    writer: str
    consumed: bool = False

    def __str__(self) -> str:
        return f"tape{self.size_elems}{self._end}"

    @property
    def layer(self) -> str:
        """Its text for a layer, which has no extents."""
        return f"tape{self._end}"

    @property
    def retained(self) -> OwnTape:
        """As it is written, and read more than once."""
        return self._replace(consumed=False)

    @property
    def _end(self) -> str:
        return f"/{self.writer}{'/consumed' if self.consumed else ''}"


@dataclass(frozen=True)
class RnnProblem(Problem):
    """A recurrent network: steps T, batch B, input I, hidden H, layers L. A runner may be given address 0 for hx, cx,
    dhy and dcy, which are zeros then."""

    op: str
    dtype: str
    steps: int
    batch: int
    input: int
    hidden: int
    layers: int
    mode: str
    bidirectional: bool = False
    skip: bool = False
    training: bool = False
    tape: OwnTape | None = None
    align: int = DEFAULT_ALIGN

    multiplies_matrices: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_kind(self, FAMILIES["rnn"])
        if self.mode not in GATES:
            raise InvalidProblem(f"mode {self.mode!r} is not one of {', '.join(GATES)}")
        for name, smallest in (("steps", 0), ("batch", 0), ("input", 1), ("hidden", 1)):
            check_numbers(name, (getattr(self, name),), smallest, LARGEST_STEP)
        check_numbers("layers", (self.layers,), 1, MOST_LAYERS)
        size_elems, itemsize = self.parameters.size_elems, ITEMSIZE[self.dtype]
        if size_elems * itemsize >= 2**63:  # of which there are no addresses
            raise InvalidProblem(f"w would have {size_elems} elements: {size_elems * itemsize} bytes")
        if self.skip and self.input != self.hidden:
            raise InvalidProblem(f"skip input needs as many inputs as hidden units: {self.input} and {self.hidden}")
        if self.training and self.op == "rnn_bwd":
            raise InvalidProblem("rnn_bwd writes no tape")
        if self.tape and self.op == "rnn_fwd" and not self.training:
            raise InvalidProblem(f"{self.tape} is written in training only")
        if self.tape and self.tape.consumed and self.op == "rnn_fwd":
            raise InvalidProblem(f"{self.tape} is written by rnn_fwd, it is rnn_bwd that consumes it")

    @property
    def compute(self) -> str:  # type: ignore[override]
        return DEFAULT_COMPUTE[self.dtype]

    @property
    def directions(self) -> int:
        return 1 + self.bidirectional

    @property
    def has_cell(self) -> bool:
        return self.mode == "lstm"

    @cached_property
    def parameters(self) -> Parameters:
        return Parameters(self.input, self.hidden, self.layers, self.directions, self.mode, self.skip)

    @property
    def only(self) -> str:
        return self.tape.writer.rpartition("/")[0] if self.tape else ""

    @property
    def x_shape(self) -> tuple[int, ...]:
        return self.steps, self.batch, self.input

    @property
    def y_shape(self) -> tuple[int, ...]:
        return self.steps, self.batch, self.directions * self.hidden

    @property
    def state_shape(self) -> tuple[int, ...]:
        """Of hx, cx, hy and cy."""
        return self.layers * self.directions, self.batch, self.hidden

    @property
    def layer_tape_elems(self) -> int:
        """Elements of nbdnn's tape that one layer has: its outputs, then what its mode saves."""
        return self.steps * self.batch * self.directions * self.hidden * (1 + SAVED[self.mode])

    @cached_property
    def operands(self) -> tuple[Operand, ...]:
        """rnn_fwd: x, hx, cx, w, y, hy, cy, tape (in training); rnn_bwd: x, hx, cx, w, y, tape, dy, dhy, dcy, dw, dx,
        dhx, dcx. Those of the cell (cx, cy, dcy, dcx) are an LSTM's only."""
        inputs, outputs = _NAMES[self.op]
        shapes = {
            "x": self.x_shape,
            "y": self.y_shape,
            "w": (self.parameters.size_elems,),
            "tape": (self.tape.size_elems if self.tape else self.layers * self.layer_tape_elems,),
        }

        def operand(name: str, role: Literal["in", "out"]) -> Operand:
            shape = shapes.get(name.removeprefix("d"), self.state_shape)
            strides, dtype = dense_strides(shape, False), self.compute if name == "tape" else self.dtype
            scale = max(self.input, self.hidden) ** -0.5 if name == "w" else 1.0
            return Operand(name, shape, strides, dtype, role, optional=name in _OPTIONAL, scale=scale)

        every = [*(operand(name, "in") for name in inputs), *(operand(name, "out") for name in outputs)]
        left_out = set() if self.has_cell else {"cx", "cy", "dcy", "dcx"}
        if self.op == "rnn_fwd" and not self.training:
            left_out.add("tape")
        return tuple(each for each in every if each.name not in left_out)

    @cached_property
    def places(self) -> dict[str, int]:
        """Where each operand is among them, by name."""
        return {operand.name: place for place, operand in enumerate(self.operands)}

    @property
    def flops(self) -> int:
        """Of the matrix products; a gradient has each of them twice."""
        parameters = self.parameters
        biases = 2 * parameters.pseudo_layers * parameters.gates * self.hidden
        of_a_step = 2 * (parameters.size_elems - biases)
        return self.steps * self.batch * of_a_step * (1 if self.op == "rnn_fwd" else 2)

    def _tokens(self, *, extents: bool) -> list[str]:
        sequence = named(("t", "b"), (self.steps, self.batch)) if extents else ""
        network = named(("i", "h", "l"), (self.input, self.hidden, self.layers))
        kind = [self.mode, "bi" if self.bidirectional else "uni", "skip" if self.skip else "linear"]
        tokens = [self.op, self.dtype, sequence + network, *kind, *(["train"] if self.training else [])]
        if self.tape:
            tokens.append(str(self.tape) if extents else self.tape.layer)
        return tokens + ([f"a{self.align}"] if self.align != DEFAULT_ALIGN else [])


def read(op: str, tokens: Tokens) -> RnnProblem:
    """The problem whose text has these tokens after its op."""
    dtype = tokens.next("a dtype")
    steps, batch, input, hidden, layers = tokens.match(_DIMS, "dims such as t50b32i128h256l2")
    mode = tokens.next("a mode")
    bidirectional = tokens.one_of("uni", "bi") == "bi"
    skip = tokens.one_of("linear", "skip") == "skip"
    training, found, align = bool(tokens.flag("train")), tokens.optional(_TAPE), tokens.align()
    tokens.end()
    tape = OwnTape(int(found[1]), found[2], bool(found[3])) if found else None
    return RnnProblem(
        op, dtype, steps, batch, input, hidden, layers, mode, bidirectional, skip, training, tape, align
    )  # fmt: skip
