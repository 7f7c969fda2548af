"""Where each matrix and each bias of a recurrent network lies in its block of parameters: cuDNN's order, everywhere.

    block = [matrices of pseudo-layer 0 | of pseudo-layer 1 | ...][biases of pseudo-layer 0 | of pseudo-layer 1 | ...]
    matrices = W of each gate, (H, in) row-major; then R of each gate, (H, H)         product with the input: W x
    biases = bW of each gate, (H,); then bR of each gate

A layer is one pseudo-layer, or two where the network is bidirectional: forward in time, then backward. `in` is I for
the first layer, H for each direction of the layer below for the others. With skip input the first layer has no W.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from nbdnn.cached import cached_property

# The gates of each mode, in the order of their matrices.
GATES = {
    "rnn_relu": ("newmem",),
    "rnn_tanh": ("newmem",),
    "lstm": ("input", "forget", "newmem", "output"),
    "gru": ("reset", "update", "newmem"),
}

MOST_LAYERS = 10_000  # each takes a plan some 100 us


class Part(NamedTuple):
    """One matrix (rows, columns) or bias (rows,) in the block: the offset of its first element, and its shape."""

    offset: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Parameters:
    """The block of a network: input extent I, hidden extent H, layers, directions (1 or 2), mode, skip input."""

    input: int
    hidden: int
    layers: int
    directions: int
    mode: str
    skip: bool

    @property
    def gates(self) -> int:
        return len(GATES[self.mode])

    @property
    def pseudo_layers(self) -> int:
        return self.layers * self.directions

    def inputs_of(self, layer: int) -> int:
        """Extent of what comes into a layer."""
        return self.hidden * self.directions if layer else self.input

    def matrices(self, pseudo_layer: int) -> tuple[Part | None, ...]:
        """W of each gate, None where there is none, then R of each gate."""
        return self._parts[pseudo_layer][0]

    def biases(self, pseudo_layer: int) -> tuple[Part, ...]:
        """bW of each gate, then bR of each gate."""
        return self._parts[pseudo_layer][1]

    @property
    def size_elems(self) -> int:
        first = 0 if self.skip else self.input
        widths = first + (self.layers - 1) * self.inputs_of(1) + self.layers * (self.hidden + 2)
        return self.directions * self.gates * self.hidden * widths

    @cached_property
    def _parts(self) -> list[tuple[tuple[Part | None, ...], tuple[Part, ...]]]:
        end, matrices = 0, []
        for pseudo_layer in range(self.pseudo_layers):
            layer = pseudo_layer // self.directions
            has_input = layer > 0 or not self.skip
            widths = [self.inputs_of(layer) if has_input else 0] * self.gates + [self.hidden] * self.gates
            found: list[Part | None] = []
            for width in widths:
                found.append(Part(end, (self.hidden, width)) if width else None)
                end += self.hidden * width
            matrices.append(tuple(found))
        biases = []
        for _ in range(self.pseudo_layers):
            biases.append(tuple(Part(end + i * self.hidden, (self.hidden,)) for i in range(2 * self.gates)))
            end += 2 * self.gates * self.hidden
        return list(zip(matrices, biases, strict=True))
