"""Recurrent networks: a block of several layers, its parameters, its forward over whole sequences and its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import Any

from nbdnn.errors import CudnnError, InvalidProblem, InvalidType, check_one_of
from nbdnn.problem import LARGEST_STEP
from nbdnn.problem_rnn import OwnTape, RnnProblem
from nbdnn.rnn_parameters import GATES, MOST_LAYERS, Parameters

INPUT_MODES = ("linear", "skip")
DIRECTION_MODES = ("unidirectional", "bidirectional")


@dataclass(eq=False)
class Tape:
    """What a forward in training leaves to `RNNBlock.grad`: the arrays that it was given, y, and a memory of its own.

    The arrays are the caller's, not copies: what is written into them between the forward and the gradient changes the
    gradient. memory: in float32 (float64 for float64), for each layer its outputs h (T, B, directions * H), then for
    each step, sequence and direction what the mode keeps: of an LSTM i, f, g, o after their activations and the cell c;
    of a GRU r, u, n and what r multiplied, R_n h + bR_n; of the others nothing more. own: where the memory is not that,
    but what a library keeps for its own gradient, whose it is. consumed: a gradient was told not to retain it.
    """

    block: RNNBlock
    w: Any = field(repr=False)
    x: Any = field(repr=False)
    hx: Any = field(repr=False)
    cx: Any = field(repr=False)
    y: Any = field(repr=False)
    memory: Any = field(repr=False)
    own: OwnTape | None = None
    consumed: bool = field(default=False, init=False)

    @property
    def problem(self) -> str:
        """The text of the problem that this is the tape of."""
        return str(replace(self.block.problem(tuple(self.x.shape), training=True), tape=self.own))


class RNNBlock:
    """A recurrent network of several layers, as cuDNN has it, over sequences of equal length.

    ::

        a_g = W_g x + bW_g,   b_g = R_g h + bR_g              for each gate g; h, c: of the step before
        rnn_relu, rnn_tanh   h' = relu(a + b),  tanh(a + b)
        lstm                 i, f, o = sigmoid(a + b);  g = tanh(a + b);  c' = f * c + i * g;  h' = o * tanh(c')
        gru                  r, u = sigmoid(a + b);  n = tanh(a_n + r * b_n);  h' = (1 - u) * n + u * h

    A layer's input is the output of the one below; a bidirectional layer runs once forward and once backward in time,
    and its output has both side by side.

    Parameters
    ----------
    dtype : str or dtype
        float16, bfloat16, float32 or float64: of parameters and data. Arrays of another dtype are converted.
    hidden_size, num_layers : int
        H and L.
    rnn_mode : 'rnn_relu', 'rnn_tanh', 'lstm' or 'gru'
    input_mode : 'linear' or 'skip'
        With 'skip' the first layer adds its input as it is, W x = x: the input then has H elements.
    direction_mode : 'unidirectional' or 'bidirectional'

    Notes
    -----
    All parameters are one array of one axis, in cuDNN's order on every device and for every implementation: the
    matrices of all pseudo-layers, then the biases; see `split_params`. 16-bit data are computed in float32, and each
    result is rounded once; by cuDNN also what one step leaves to the next. Errors: every sum of K products by the model
    of `nbdnn.tolerance`, through all steps. A gradient needs a workspace, as does a forward through several layers.
    Thread-safe; a block has no state.
    """

    def __init__(
        self,
        dtype: Any,
        hidden_size: int,
        num_layers: int,
        rnn_mode: str,
        input_mode: str = "linear",
        direction_mode: str = "unidirectional",
    ) -> None:
        for name, value, valid in (
            ("rnn_mode", rnn_mode, tuple(GATES)),
            ("input_mode", input_mode, INPUT_MODES),
            ("direction_mode", direction_mode, DIRECTION_MODES),
        ):
            check_one_of(name, value, valid)
        for name, number, most in (
            ("hidden_size", hidden_size, LARGEST_STEP),
            ("num_layers", num_layers, MOST_LAYERS),
        ):
            if not isinstance(number, Integral) or number < 1:
                raise InvalidProblem(f"{name} is {number!r}, expected a whole number of at least 1")
            if number > most:
                raise InvalidProblem(f"{name} is {number!r}, it must be at most {most}")
        self.dtype = _dtype(dtype)
        self.hidden_size, self.num_layers, self.rnn_mode = int(hidden_size), int(num_layers), rnn_mode
        self.input_mode, self.direction_mode = input_mode, direction_mode

    def __repr__(self) -> str:
        from nbdnn.array import DTYPE_NAMES  # here: it takes NumPy

        numbers = f"{DTYPE_NAMES[self.dtype]!r}, {self.hidden_size}, {self.num_layers}"
        return f"RNNBlock({numbers}, {self.rnn_mode!r}, {self.input_mode!r}, {self.direction_mode!r})"

    @property
    def facts(self) -> tuple:
        """What tells blocks apart: dtype, hidden, layers, mode, whether bidirectional, whether input skips."""
        both, skip = self.direction_mode == "bidirectional", self.input_mode == "skip"
        return self.dtype, self.hidden_size, self.num_layers, self.rnn_mode, both, skip

    def problem(self, x_shape: tuple[int, ...], *, training: bool = False) -> RnnProblem:
        """The forward of this block on an input (T, B, I)."""
        if len(x_shape) != 3:
            raise InvalidType(f"x has {len(x_shape)} axes, expected 3: steps, batch, input")
        steps, batch, width = x_shape
        dtype, hidden, layers, mode, both, skip = self.facts
        return RnnProblem("rnn_fwd", dtype, steps, batch, width, hidden, layers, mode, both, skip, training)

    def get_param_size(self, input_size: Sequence[int]) -> int:
        """Elements of the parameter block for inputs [batch, I], whose batch does not count: over the layers and their
        directions, the sum of gates * (H * in + H * H + 2 * H)."""
        return self._parameters(input_size).size_elems

    def split_params(self, w: Any, layer: int, input_size: Sequence[int]) -> list[Any]:
        """The parameters of one layer: matrix, bias, matrix, bias, ... as views that alias `w`.

        Parameters
        ----------
        w : array (get_param_size(input_size),)
        layer : int
            From 0; of a bidirectional block the pseudo-layer, 0 to 2L - 1: a layer's forward direction, then its
            backward.
        input_size : [batch, I], of which batch does not count

        Returns
        -------
        list
            Of each gate W as (in, H), and bW (H,); then of each gate R as (H, H), and bR (H,). Gates: of an LSTM input,
            forget, newmem, output; of a GRU reset, update, newmem. With skip input the first layer has None for each W.
            A matrix is stored as its transpose, so x @ W is the product. Copies where arrays have no views (JAX).
        """
        parameters = self._parameters(input_size)
        if not hasattr(w, "shape"):
            raise InvalidType(f"w is a {type(w).__name__}, expected an array")
        if tuple(w.shape) != (parameters.size_elems,):
            raise InvalidProblem(f"w has shape {tuple(w.shape)}, expected {(parameters.size_elems,)}")
        if not isinstance(layer, Integral) or not 0 <= layer < parameters.pseudo_layers:
            raise InvalidProblem(f"layer is {layer!r}, expected 0 to {parameters.pseudo_layers - 1}")
        found: list[Any] = []
        for matrix, bias in zip(parameters.matrices(layer), parameters.biases(layer), strict=True):
            if matrix is None:
                found.append(None)
            else:
                rows, columns = matrix.shape
                found.append(w[matrix.offset : matrix.offset + rows * columns].reshape(rows, columns).T)
            found.append(w[bias.offset : bias.offset + self.hidden_size])
        return found

    def _parameters(self, input_size: Sequence[int]) -> Parameters:
        try:
            extents = list(input_size)
        except TypeError:  # one number
            extents = []
        if len(extents) != 2 or not all(isinstance(extent, Integral) for extent in extents):
            raise InvalidProblem(f"input_size is {input_size!r}, expected [batch, input]")
        return self.problem((0, 0, int(extents[1]))).parameters

    def apply(
        self, w: Any, x: Any, hx: Any = None, cx: Any = None,
        *, training: bool = False, policy: str | None = None, out: tuple | None = None, stream: Any = None,
        workspace_limit: int | None = None, deterministic: bool | None = None, allow_tf32: bool | None = None,
        layer: str | int | None = None,
    ) -> tuple:  # fmt: skip
        """Run the network over sequences.

        Parameters
        ----------
        w : array (get_param_size([B, I]),)
            The parameters; the results are of its library and on its device.
        x : array (T, B, I)
            Of NumPy, PyTorch, JAX or CuPy; what is not dense is made so first.
        hx, cx : arrays (L * directions, B, H), optional
            States to begin with; default zeros. cx is an LSTM's only.
        training : bool
            Also return the tape that `grad` reads.
        policy : str, optional
            A selection policy ('guess_once', 'guess_on_shape_change', 'time_once', 'time_on_shape_change') or a
            candidate id such as 'rnn_fwd/cpu/direct'. Default: flag dnn.policy.
        out : tuple of arrays, optional
            Where the results but the tape go, in the order in which they are returned, None for those to be allocated.
            They may not overlap an input.
        stream : int, or a stream of PyTorch, CuPy, Numba or any with ``__cuda_stream__``, optional
            CUDA stream for arrays on a GPU. Default: the current one of their library, else the default stream.
        workspace_limit : int, optional
            Bytes of scratch memory that may be used; 0: none. Default: flag dnn.workspace_limit, else what is free.
        deterministic : bool, optional
            Only implementations whose results repeat bit by bit. Default: flag dnn.deterministic.
        allow_tf32 : bool, optional
            Whether products of float32 may be of TF32. Default: flag dnn.allow_tf32.
        layer : str, optional
            Separates otherwise equal blocks for the ``*_once`` policies.

        Returns
        -------
        y, hy, and of an LSTM cy, and in training a `Tape`
            y (T, B, directions * H): the last layer's outputs; hy, cy (L * directions, B, H): every layer's last
            states, those of a backward direction at t = 0. Without steps y is empty, hy is hx and cy is cx.

        Raises
        ------
        InvalidProblem
            Shapes that disagree, a cx where there is no cell, an `out` that overlaps an input (a ValueError);
            InvalidType where it is dtype or rank (also a TypeError).
        UnsupportedProblem
            A candidate asked for by id cannot run this problem, or none in so little workspace.
        """
        options = policy, workspace_limit, deterministic, allow_tf32, layer
        if training is False or not _truth("training", training):
            return _compute("rnn_fwd", self.facts, False, None, (w, x, hx, cx), out, options, stream)
        own = _tape_of(self, w, x, options)
        *results, memory = _compute("rnn_fwd", self.facts, True, own, (w, x, hx, cx), out, options, stream)
        return (*results, Tape(self, w, x, hx, cx, results[0], memory, own))

    def grad(
        self, tape: Tape, dy: Any, dhy: Any = None, dcy: Any = None,
        *, retain_tape: bool = True, policy: str | None = None, out: tuple | None = None, stream: Any = None,
        workspace_limit: int | None = None, deterministic: bool | None = None, allow_tf32: bool | None = None,
        layer: str | int | None = None,
    ) -> tuple:  # fmt: skip
        """The gradient of a forward in training: the exact adjoint of `apply`.

        Parameters
        ----------
        tape : Tape
            What that forward returned last. It may be read more than once, unless `retain_tape` is False.
        dy : array (T, B, directions * H)
        dhy, dcy : arrays (L * directions, B, H), optional
            Gradients of the last states; default zeros. dcy is an LSTM's only.
        retain_tape : bool
            False: this gradient is the last that reads the tape, and may write into its memory. cuDNN's would otherwise
            need a copy of what it kept.
        policy, out, stream, workspace_limit, deterministic, allow_tf32, layer
            As of `apply`.

        Returns
        -------
        dw, dx, dhx, and of an LSTM dcx
            Also where hx and cx were not given. Each of the shape and dtype of what it is the gradient of.

        Raises
        ------
        InvalidProblem
            The tape is of another block or consumed, or shapes disagree (a ValueError); InvalidType where it is dtype
            or rank.
        """
        if not isinstance(tape, Tape):
            given = f"of type {type(tape).__name__}"
            raise InvalidProblem(f"tape is {given}, expected what apply(..., training=True) returns last")
        if tape.block.facts != self.facts:
            raise InvalidProblem(f"tape is of {tape.block!r}, expected one of {self!r}")
        if tape.consumed:
            raise InvalidProblem("tape was consumed by an earlier gradient, whose retain_tape was False")
        options = policy, workspace_limit, deterministic, allow_tf32, layer
        arrays = tape.w, tape.x, tape.hx, tape.cx, tape.y, tape.memory, dy, dhy, dcy
        consumed = not _truth("retain_tape", retain_tape)
        own = tape.own._replace(consumed=consumed) if tape.own else None
        try:
            results = _compute("rnn_bwd", self.facts, False, own, arrays, out, options, stream)
        except CudnnError:
            tape.consumed = consumed  # who knows what was written
            raise
        tape.consumed = consumed
        return results


def _dtype(given: Any) -> str:
    """The dtype, such as 'f32', that a user calls 'float32', np.float32 or torch.float32."""
    import numpy as np  # here: whoever only imports nbdnn does not wait for it

    from nbdnn.array import float_named

    name = str(given)
    if not isinstance(given, str | None) and not name.startswith("torch."):
        with suppress(TypeError, ValueError):  # the latter of tensors
            name = np.dtype(given).name
    return float_named(name.removeprefix("torch."))


def _truth(name: str, value: Any) -> bool:
    from nbdnn.call_setup import truth  # here: it takes the registry

    return value is True or truth(name, value)


def _compute(*call: Any) -> Any:
    """Load the dispatcher, which takes a second for Numba, at the first call; it is called directly from then on."""
    global _compute
    from nbdnn.rnn_call import compute

    _compute = compute
    return compute(*call)


def _tape_of(*call: Any) -> Any:
    """The same for the choice of a tape."""
    global _tape_of
    from nbdnn.rnn_tape import tape_of

    _tape_of = tape_of
    return tape_of(*call)
