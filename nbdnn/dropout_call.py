"""What is particular to calls of dropout: the state, the checks and the problem. `call.py` has the rest."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from operator import index
from typing import Any

import numpy as np

from nbdnn import call, call_setup, driver
from nbdnn.array import View, at, library_of, view
from nbdnn.call import Call
from nbdnn.errors import InvalidProblem, InvalidType, as_float
from nbdnn.problem_dropout import DropoutProblem

_WORDS = 2**32
_NAMES = {"dropout_fwd": ("x", "out[0]", "out[1]", "state"), "dropout_bwd": ("dy", "mask", "out")}
_MASK, _STATE = ("u8",), ("i64",)


def compute(direction: str, given: tuple, dropout: float, options: tuple, stream: Any) -> Any:
    """The result of a call. given: x, seed, state and out; or dy, mask and out."""
    scalars = _scalars(dropout if type(dropout) is float else _probability(dropout))
    if direction == "backward":
        return call.compute(_FAMILY, ("dropout_bwd", *options), given, scalars, stream)
    x, seed, state, out = given
    y, mask, state_out = _three(out)
    if state_out is not None and state_out is not state:
        raise InvalidProblem("out[2] is not the given state, which advances in place")
    arguments = ("dropout_fwd", *options)
    try:
        arrays = x, y, mask, _new_state(x, seed) if state is None else _writable(x, state)
    except InvalidType:
        call.name_unreadable(_names(arguments), (x, y, mask, state))
        raise
    y, mask, advanced = call.compute(_FAMILY, arguments, arrays, scalars, stream)
    return y, mask, advanced if advanced is state else library_of(x).given(advanced)


def _probability(dropout: Any) -> float:
    try:
        return as_float(dropout)
    except (TypeError, ValueError, OverflowError):
        raise InvalidProblem(f"dropout is {dropout!r}, expected a probability in [0, 1)") from None


@lru_cache(64)
def _scalars(probability: float) -> tuple[float, float]:
    """(threshold, scale)."""
    if not 0 <= probability < 1:
        raise InvalidProblem(f"dropout is {probability}, expected a probability in [0, 1)")
    return float(round(probability * _WORDS)), 1 / (1 - probability)


def _three(out: Any) -> tuple[Any, Any, Any]:
    if out is None:
        return None, None, None
    if not isinstance(out, tuple) or len(out) != 3:
        raise InvalidProblem("out is not a tuple of three: (y, mask, state)")
    return out


def _new_state(x: Any, seed: Any) -> Any:
    """(seed, 0) in an array of x's library, on its device."""
    try:
        number = index(seed)
    except TypeError:
        raise InvalidType(f"seed is {seed!r}, expected a whole number") from None
    if not -(1 << 63) <= number < 1 << 64:
        raise InvalidProblem(f"seed is {number}, which has more than 64 bits")
    return _state_at(x, np.array([number % (1 << 64), 0], np.uint64).view(np.int64))


def _state_at(x: Any, words: np.ndarray) -> Any:
    """`words` in an array of x's library, on its device."""
    library = library_of(x)
    gpu = library.gpu(x)
    state = library.allocator((2,), False, "i64", gpu)()
    if gpu < 0:
        at(library.pointer(state), (2,), (1,), "i64")[...] = words
    else:
        with driver.Current(gpu):
            driver.upload(library.pointer(state), words)
    return state


def _writable(x: Any, state: Any) -> Any:
    """The state itself, or a copy of one that cannot be written: of JAX, or read-only and of NumPy, which JAX has where
    it knows no int64. Such a copy is on x's device."""
    library = library_of(state)
    if library.always_writable:
        return state
    seen = view(state, "state", _STATE)
    if seen.writable or seen.shape != (2,):
        return state
    if not (library.never_writable or library_of(x).never_writable):
        raise InvalidProblem("state is read-only; it advances in place")
    if seen.gpu < 0:
        return _state_at(x, np.asarray(state))
    copied = library.allocator((2,), False, "i64", seen.gpu)()
    library.copy(copied, state)
    return copied


def _names(arguments: tuple) -> tuple[str, ...]:
    return _NAMES[arguments[0]]


def _prepare(arguments: tuple, arrays: Sequence[Any], scalars: tuple[float, ...]) -> Call:
    op, *options = arguments
    names, forward = _names(arguments), op == "dropout_fwd"
    dtypes = {2: _MASK, 3: _STATE} if forward else {1: _MASK}
    views = call_setup.views_of(names, arrays, 1 if forward else 2, dtypes)
    tensor = views[0]
    assert tensor is not None
    last = not tensor.is_dense(False) and tensor.is_dense(True)
    wanted = {0: (last, tensor.dtype)} | ({} if forward else {1: (False, "u8")})
    copies = call_setup.copies_of(names, views, wanted)
    result = 1 if forward else 2
    staged = [result] if (out := views[result]) is not None and not out.is_dense(last) else []
    problem = DropoutProblem(op, tensor.dtype, prod(tensor.shape), _alignment(tensor, out, copies, staged))
    call_setup.check_shape("mask", None if forward else views[1], (problem.mask_bytes,))
    return call_setup.assemble(
        problem,
        call_setup.request(problem, call_setup.Options(*options)),
        arrays,
        names,
        views,
        order=tuple(range(len(names))),
        lasts={result: last, 2: last if result == 2 else False, 3: False},
        copies=copies,
        shapes={result: tensor.shape},
        without_plan=call.NothingToDo if not problem.elements else None,
    )


def _alignment(tensor: View, out: View | None, copies: Sequence[call.Copied], staged: Sequence[int]) -> int:
    """Of the tensors; a mask and a state lie as their own types do."""
    places = [tensor, None, None] if out is None else [tensor, out, None]
    return call_setup.common_alignment(places, [c for c in copies if c.place == 0], [1] if staged else [])


_FAMILY = call.Family(_names, _prepare)
