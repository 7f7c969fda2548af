"""nbdnn beside PyTorch on the CPU, for the ops beyond convolution: as `compare_torch.py`, of which it takes all else.

    python bench/compare_torch_ops.py [--quick] [--section NAME]... [--json FILE] [--markdown FILE]

Both sides get operands of the layout that a row names, since a program seldom may choose it at a pooling. A family of
ops has a module ``peers_<family>.py`` with ``cpu_rows()``, the texts of its problems, and ``ours(problem)`` and
``peer(problem, device)``, the two functions of the problem's inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from types import ModuleType

import torch
from compare_torch import Comparison, interleaved, main

from nbdnn.dispatch.timing import Operands
from nbdnn.problem import Problem, parse
from nbdnn.problem_spatialtf import SpatialtfProblem
from nbdnn.workloads import Layer

FAMILIES = {
    "softmax": "softmax",
    "batch normalisation": "bn",
    "pooling": "pool",
    "dropout": "dropout",
    "spatial transformer": "spatialtf",
}
# Of the largest difference between the two sides' results: a bfloat16 is rounded twice.
_TOLERANCES = {"f32": 1e-3, "bf16": 2e-2}


def tensors(problem: Problem) -> list[torch.Tensor]:
    """Random inputs of the problem, in operand order."""
    operands = Operands(problem, 1)  # which the arrays are views of
    given = zip(operands.arrays(), problem.operands, strict=True)
    inputs = [(torch.from_numpy(array).clone(), operand.dtype) for array, operand in given if operand.role == "in"]
    return [tensor.view(torch.bfloat16) if dtype == "bf16" else tensor for tensor, dtype in inputs]


def _is_alike(problem: Problem) -> bool:
    """Whether both sides have the same result: two generators draw different masks, and PyTorch rounds the positions
    that it samples at to the image's dtype."""
    return problem.op != "dropout_fwd" and not (isinstance(problem, SpatialtfProblem) and problem.dtype == "bf16")


def against_peers(family: ModuleType, layers: Sequence[Layer], comparison: Comparison, section: str) -> None:
    for layer in comparison.each(section, layers):
        problem = layer.problem
        candidate = comparison.tune(problem)
        inputs = tensors(problem)
        with torch.inference_mode():
            calls = [partial(side, *inputs) for side in (family.ours(problem), family.peer(problem, "cpu"))]
            if _is_alike(problem):
                results = [call() for call in calls]
                mine, other = (result if isinstance(result, torch.Tensor) else result[0] for result in results)
                tolerance = _TOLERANCES[problem.dtype]
                torch.testing.assert_close(mine, other.reshape(mine.shape), rtol=tolerance, atol=tolerance)
            (mine_us, other_us), busy = interleaved(calls, comparison.rounds)
        comparison.add(section, layer, mine_us, other_us, candidate, busy)


def sections(quick: bool) -> dict[str, Callable[[Comparison, str], None]]:
    """Every section by name. `quick` keeps every third row."""
    found = {}
    for name, family in FAMILIES.items():
        module = import_module(f"peers_{family}")
        layers = [Layer(problem, problem.op, 1) for problem in map(parse, module.cpu_rows())]
        backward = [layer for layer in layers if layer.name.endswith("_bwd")]
        for direction, chosen in (("forward", [n for n in layers if n not in backward]), ("backward", backward)):
            some = chosen[::3] if quick else chosen
            found[f"{name} {direction}"] = partial(against_peers, module, some)
    return found


if __name__ == "__main__":
    main(__doc__, sections)
