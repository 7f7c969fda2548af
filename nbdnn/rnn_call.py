"""What is particular to calls of recurrent networks: the checks, and what there is to do without steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from nbdnn import call, call_setup, driver
from nbdnn.array import at
from nbdnn.call import Call
from nbdnn.device import Device
from nbdnn.errors import InvalidProblem, InvalidType
from nbdnn.problem_rnn import OwnTape, RnnProblem

# Of each op, in the order of the arrays of a call: what the caller gives, and what comes back.
_INPUTS = {
    "rnn_fwd": ("w", "x", "hx", "cx"),
    "rnn_bwd": ("w", "x", "hx", "cx", "y", "tape", "dy", "dhy", "dcy"),
}
_OUTPUTS = {"rnn_fwd": ("y", "hy", "cy", "tape"), "rnn_bwd": ("dw", "dx", "dhx", "dcx")}
_OPTIONAL, _OF_CELL = ("hx", "cx", "dhy", "dcy"), ("cx", "cy", "dcy", "dcx")
# What follows from which state where there are no steps.
_SAME = {"hy": "hx", "cy": "cx", "dhx": "dhy", "dcx": "dcy"}


def compute(
    op: str,
    facts: tuple,
    training: bool,
    own: OwnTape | None,
    arrays: Sequence[Any],
    out: Any,
    options: tuple,
    stream: Any = None,
) -> tuple:
    """The results of a call: those of `op` in its order. facts: of the block. own: whose the tape is, None where it is
    nbdnn's. arrays: inputs, None where absent. out: what the caller gave for the results but the tape."""
    outputs = call_setup.outputs_given(out, _outputs(op, facts))
    arguments = op, facts, training, own, *options
    return call.compute(_FAMILY, arguments, (*arrays, *outputs, *([None] if training else [])), (), stream)


def _outputs(op: str, facts: tuple, training: bool = False) -> tuple[str, ...]:
    """The names of what comes back, the tape only in training."""
    _, _, _, mode, *_ = facts
    names = _OUTPUTS[op] if mode == "lstm" else tuple(name for name in _OUTPUTS[op] if name not in _OF_CELL)
    return names if training else tuple(name for name in names if name != "tape")


def _plain_names(arguments: tuple) -> tuple[str, ...]:
    op, facts, training, *_ = arguments
    return (*_INPUTS[op], *_outputs(op, facts, training))


def _names(arguments: tuple) -> tuple[str, ...]:
    names, inputs = _plain_names(arguments), len(_INPUTS[arguments[0]])
    return (*names[:inputs], *(f"out ({name})" for name in names[inputs:]))


def _prepare(arguments: tuple, arrays: Sequence[Any], scalars: tuple[float, ...]) -> Call:
    op, facts, training, own, *options = arguments
    names, plain = _names(arguments), _plain_names(arguments)
    inputs, outputs = range(len(_INPUTS[op])), range(len(_INPUTS[op]), len(arrays))
    _check_presence(op, facts[3], dict(zip(plain, arrays, strict=True)))
    views = call_setup.views_of(names, arrays, required=2)
    x_shape = views[1].shape  # type: ignore[union-attr]
    if len(x_shape) != 3:
        raise InvalidType(f"x has {len(x_shape)} axes, expected 3: steps, batch, input")
    dtype, hidden, layers, mode, both, skip = facts
    steps, batch, width = x_shape
    problem = RnnProblem(op, dtype, steps, batch, width, hidden, layers, mode, both, skip, training, own)
    operands = {operand.name: operand for operand in problem.operands}
    for name, plain_name, each in zip(names, plain, views, strict=True):
        if plain_name in operands:
            call_setup.check_shape(name, each, operands[plain_name].shape)
    wanted = {i: (False, operands[plain[i]].dtype) for i in inputs if plain[i] in operands}
    copies = call_setup.copies_of(names, views, wanted)
    staged = [i for i in outputs if (out := views[i]) is not None and not out.is_dense(False)]
    problem = replace(problem, align=call_setup.common_alignment(views, copies, staged))
    places = {name: place for place, name in enumerate(plain)}
    return call_setup.assemble(
        problem,
        call_setup.request(problem, call_setup.Options(*options)),
        arrays,
        names,
        views,
        order=tuple(places[operand.name] for operand in problem.operands),
        lasts=dict.fromkeys(outputs, False),
        copies=copies,
        without_plan=None if problem.steps and problem.batch else _NoSteps,
    )


def _check_presence(op: str, mode: str, given: dict[str, Any]) -> None:
    for name, array in given.items():
        if array is not None and mode != "lstm" and name in _OF_CELL:
            raise InvalidProblem(f"{name} is given, but {mode} has no cell")
    for name in _INPUTS[op]:
        if given[name] is None and name not in _OPTIONAL:
            raise InvalidType(f"{name} is None, expected an array")


class _NoSteps:
    """Runs a network without steps or without a batch: states stay what they are, sums over steps are empty."""

    def __init__(self, problem: RnnProblem, device: Device) -> None:
        self._device, places = device, problem.places
        outs = [operand for operand in problem.operands if operand.role == "out" and operand.size_elems]
        self._copies = [(places[out.name], places.get(_SAME.get(out.name, "")), out) for out in outs]

    def __call__(
        self, pointers: tuple[int, ...], scalars: tuple[float, ...], workspace: int, stream: int, /
    ) -> None:  # fmt: skip
        for place, same, out in self._copies:
            source = 0 if same is None else pointers[same]
            if self._device.kind == "cpu":
                like = out.shape, out.strides, out.dtype
                at(pointers[place], *like)[...] = at(source, *like) if source else 0
            elif source:
                driver.call("cuMemcpyDtoDAsync", pointers[place], source, out.size_bytes, stream)
            else:
                driver.upload(pointers[place], np.zeros(out.size_bytes, np.uint8), stream)


_FAMILY = call.Family(_names, _prepare)
