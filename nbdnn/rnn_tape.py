"""Which tape a forward in training writes on a GPU: nbdnn's, or one that a library keeps for its own gradient.

It is the tape with which forward and gradient together take least: both are chosen as the caller's policy says, and
measured where that measures. Times that are not all measured are those of the cost models.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING, Any

from nbdnn import driver
from nbdnn.array import library_of
from nbdnn.call_setup import Options, request
from nbdnn.cudnn.rnn import Rnn
from nbdnn.device import Gpu
from nbdnn.dispatch import dispatcher, policy
from nbdnn.dispatch.dispatcher import Context
from nbdnn.dispatch.policy import Request
from nbdnn.dispatch.selection import survey, valid_rows
from nbdnn.errors import InvalidType, UnsupportedProblem
from nbdnn.problem_rnn import OwnTape, RnnProblem

if TYPE_CHECKING:
    from nbdnn.rnn import RNNBlock


def tape_of(block: RNNBlock, w: Any, x: Any, options: tuple) -> OwnTape | None:
    """The tape of its own that a forward in training writes, None where it is nbdnn's."""
    try:
        library, shape = library_of(w), getattr(x, "shape", ())
        gpu = library.gpu(w)
    except InvalidType:  # the call says which array it is
        return None
    if gpu < 0 or len(shape) != 3 or 0 in shape:
        return None
    changed = driver.enter(gpu)
    try:
        context = dispatcher.context(gpu)
        key = "tape", block.facts, tuple(shape), options
        if key not in context.memo:
            if driver.is_capturing(library.stream(gpu)):
                return None  # the call says that there is no plan yet
            problem = block.problem(tuple(shape), training=True)
            context.remember(key, best(problem, context, request(problem, Options(*options))))
        return context.memo[key]
    finally:
        if changed:
            driver.leave()


def best(problem: RnnProblem, context: Context, wanted: Request) -> OwnTape | None:
    """Of a forward in training on a GPU."""
    times, device = {}, context.device
    assert isinstance(device, Gpu)
    for tape in (None, *_offered(problem, device, wanted)):
        if found := _times_us(replace(problem, tape=tape), context, wanted):
            times[tape] = found
    which = 1 if any(measured_us == inf for measured_us, _ in times.values()) else 0
    return min(times, key=lambda tape: times[tape][which], default=None)


def _offered(problem: RnnProblem, device: Gpu, wanted: Request) -> tuple[OwnTape, ...]:
    """The tapes of libraries that the caller permits."""
    options, _ = survey(replace(problem, training=False), device, wanted.filters)
    candidates = dict.fromkeys(option.candidate for option in options)
    return tuple(tape for each in candidates if isinstance(each, Rnn) for tape in each.tapes(problem, device))


def _times_us(problem: RnnProblem, context: Context, wanted: Request) -> tuple[float, float] | None:
    """Of a forward with its gradient: measured (infinite where they are not), and by the cost models. None where nobody
    may run both."""
    gradient = replace(problem, op="rnn_bwd", training=False)
    measured_us, estimated_us = 0.0, 0.0
    for each, asked in ((problem, wanted), (gradient, wanted._replace(filters=wanted.filters.unnamed()))):
        try:
            option = policy.choose(each, context.device, context.database, asked).option
        except UnsupportedProblem:
            return None
        row = valid_rows(each, context.device, context.database).get(option.key)
        measured_us += inf if row is None or row.median_us is None else row.median_us
        estimated_us += option.candidate.estimate(each, option.config, context.device)
    return measured_us, estimated_us
