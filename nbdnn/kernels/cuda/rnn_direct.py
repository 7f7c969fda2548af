"""Recurrent networks on a GPU as they are written: the sums of all inputs at once, then a launch a step.

    forward    layer by layer: W x + bW of every step -> T steps
    gradient   from the last layer: records -> T steps back and one more -> dx, dW, dR

Products over all steps: `rnn_product.py`; steps: `rnn_steps.py`. Every mode, direction, depth and dtype; R comes from
cache once a step for every four images, and a launch takes 2 to 3 us: what is kept on the chip over all steps is
`rnn_persistent.py` and `rnn_grid.py`. Sums in float32 (float64), in one order; products over all steps of 16-bit
networks round what is float32 between layers to TF32. Supports everything, and ends the lists. Source: own.
"""

from __future__ import annotations

from math import ceil

from nbdnn.candidate import YES, NoConfig, Support
from nbdnn.device import Gpu
from nbdnn.kernels.cuda import rnn_layers, rnn_steps
from nbdnn.kernels.cuda.compile import Source
from nbdnn.kernels.cuda.launch import Launch, LaunchedCandidate
from nbdnn.kernels.cuda.peaks import fma_flops_per_s
from nbdnn.kernels.cuda.rnn_plan import ForwardMemory, GradientMemory, index_bits, of_steps, weights
from nbdnn.problem_rnn import RnnProblem

_STEP_US = 2.5  # of a launch in a graph, whatever it does
_SHARE_OF_FMA = 0.1  # of the FMA units' rate, that a step reaches


class Direct(LaunchedCandidate[NoConfig]):
    """Supports every network."""

    algorithm = "direct"

    def __init__(self, op: str) -> None:
        self.op = op

    def supports(self, problem: RnnProblem, device: Gpu) -> Support:
        return YES

    def roundings(self, problem: RnnProblem, device: Gpu) -> int:
        return rnn_layers.roundings(problem, device)

    def workspace_bytes(self, problem: RnnProblem, config: NoConfig, device: Gpu) -> int:
        memory = ForwardMemory(problem, True) if self.op == "rnn_fwd" else rnn_layers.gradient_memory(problem, device)
        return memory.workspace.size_bytes

    def estimate(self, problem: RnnProblem, config: NoConfig, device: Gpu) -> float:
        of_step = 2 * problem.batch * problem.directions * problem.parameters.gates * problem.hidden**2
        step_us = _STEP_US + of_step / (_SHARE_OF_FMA * fma_flops_per_s(device, problem.compute)) * 1e6
        return problem.layers * problem.steps * step_us + rnn_layers.products_us(problem, device)

    def launches(self, problem: RnnProblem, config: NoConfig, device: Gpu) -> list[Launch]:
        found = []
        if self.op == "rnn_fwd":
            memory = ForwardMemory(problem, True)
            for layer in range(problem.layers):
                found += [rnn_layers.sums(problem, memory, layer, device), *_steps(problem, memory, layer)]
            return found
        gradient = rnn_layers.gradient_memory(problem, device)
        for layer in reversed(range(problem.layers)):
            found += [rnn_layers.records(problem, gradient, layer), *_steps_back(problem, gradient, layer)]
            found += rnn_layers.after_steps_back(problem, gradient, layer, device)
        return found


def _steps(problem: RnnProblem, memory: ForwardMemory, layer: int) -> list[Launch]:
    w, out, y, saved = weights(problem, layer), memory.outputs(layer), memory.y(layer), memory.saved(layer)
    kind = rnn_steps.ForwardKind(
        problem.mode, problem.dtype, problem.training, y.is_somewhere, index_bits(problem)
    )  # fmt: skip
    pointers = (memory.sums, memory.operand("w"), memory.state("hx", layer), memory.state("cx", layer), memory.cells)
    more = (out, y, saved, memory.state("hy", layer), memory.state("cy", layer))
    grid = (ceil(problem.hidden / rnn_steps.WARPS), ceil(problem.batch / rnn_steps.IMAGES), problem.directions)
    fields = rnn_steps.ForwardFields(
        step=0,
        **of_steps(problem, layer),
        bias=w.recurrent_bias,
        next_biases=w.next_biases,
        out=out.first,
        saved=saved.first,
    )
    source = Source(rnn_steps.forward_kernel, kind, rnn_steps.THREADS)
    places = tuple(place.pointer for place in (*pointers, *more))
    return [
        Launch(source, grid, places, "", fields._replace(step=step), kind.bits) for step in range(problem.steps)
    ]  # fmt: skip


def _steps_back(problem: RnnProblem, memory: GradientMemory, layer: int) -> list[Launch]:
    """One more than there are steps: the last finds the gradients of the first states."""
    bits = index_bits(problem)
    pointers = (memory.records, memory.operand("w"), memory.state("dhy", layer), memory.state("dcy", layer))
    more = (memory.carried, memory.state("dhx", layer), memory.state("dcx", layer))
    grid = (ceil(problem.hidden / rnn_steps.LANES), ceil(problem.batch / rnn_steps.IMAGES), problem.directions)
    fields = rnn_steps.BackFields(step=0, **of_steps(problem, layer))
    source = Source(rnn_steps.back_kernel, (problem.mode, problem.dtype, bits), rnn_steps.THREADS)
    places = tuple(place.pointer for place in (*pointers, *more))
    return [Launch(source, grid, places, "", fields._replace(step=step), bits) for step in range(problem.steps + 1)]


FWD, BWD = Direct("rnn_fwd"), Direct("rnn_bwd")
