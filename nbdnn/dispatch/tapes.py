"""How a gradient comes by a tape that only its writer understands, to be checked and measured with."""

from __future__ import annotations

from dataclasses import replace

from nbdnn import driver
from nbdnn.device import Gpu
from nbdnn.dispatch import registry
from nbdnn.problem_rnn import RnnProblem


def write(problem: RnnProblem, device: Gpu, pointers: tuple[int, ...], stream: int) -> None:
    """Run the forward that a gradient's tape is of, on the gradient's own operands: y and tape are written."""
    assert problem.tape is not None
    forward = replace(problem, op="rnn_fwd", training=True, tape=problem.tape.retained)
    candidate = registry.candidate(f"rnn_fwd/{problem.only}", "tape")
    (config,) = candidate.configs(forward, device)
    given = dict(zip(problem.places, pointers, strict=True))
    state_bytes = next(operand for operand in forward.operands if operand.name == "hy").size_bytes
    last_states = driver.Memory(device.index, state_bytes)  # of both kinds: nobody reads them
    workspace = driver.Memory(device.index, candidate.workspace_bytes(forward, config, device))
    addresses = tuple(given.get(operand.name, last_states.address) for operand in forward.operands)
    candidate.prepare(forward, config, device)(addresses, (), workspace.address, stream)
    driver.call("cuStreamSynchronize", stream)
