"""Chains of steps: each direction of a layer, or of each group of images, is one that a thread or a crew goes along.

What a chain does at a step is a compiled-in function (step, part, chain) of `rnn_packed.py` or its gradient: one chunk
of hidden units, of the images of the chain. Its record begins with the fields that are read here.
"""

from __future__ import annotations

from functools import cache
from math import ceil

from numba import int64, njit

from nbdnn.device import Cpu
from nbdnn.kernels.cpu.compile import DEVICE
from nbdnn.kernels.cpu.crew import crew_bytes, first_patience, take_step
from nbdnn.kernels.cpu.launch import Phase
from nbdnn.kernels.cpu.rnn_program import NOWHERE, Workspace, address_of, converted, place_fields, place_values
from nbdnn.kernels.cpu.rnn_split import Split
from nbdnn.kernels.cpu.vector import record, stack, struct
from nbdnn.problem import ITEMSIZE
from nbdnn.problem_rnn import RnnProblem

# Of a task's record, first: steps that are taken, images, groups of them, parts of a step, units of a part.
CHAIN_FIELDS = (*place_fields("crews"), "taken", "batch", "groups", "parts", "part_units", "crew_bytes")
_FIELDS = record(*CHAIN_FIELDS)
# What a step finds: the task's arguments, which chain it is, its direction, and its images [first, end).
CHAIN = record("args", "ctx", "number", "direction", "first", "end")


@cache
def along_chain(part_of_step):
    """Compiled-in function (args, ctx, index): all steps of a chain, or a thread's part of each; index counts chains,
    directions first, and their parts."""
    at, find, chain_at, room = struct(_FIELDS), address_of(), struct(CHAIN), stack(CHAIN.itemsize)
    take = take_step(part_of_step)

    @njit(**DEVICE)
    def run(args, ctx, index):
        f, address = at(ctx), room()
        c = chain_at(address)
        c.args, c.ctx, c.number = args, ctx, index // f.parts
        group = c.number % f.groups
        c.direction, c.first, c.end = (
            c.number // f.groups,
            group * f.batch // f.groups,
            (group + 1) * f.batch // f.groups,
        )
        crew, patience = find(args, f.crews_operand, f.crews_offset) + c.number * f.crew_bytes, first_patience()
        for step in range(f.taken):
            if f.parts == 1:
                part_of_step(step, int64(0), address)
            else:
                patience = take(crew, f.parts, index % f.parts, step, patience, address)

    return run


class Chains:
    """The chains of every layer, and their memory. parts: chunks of `unit_vectors` vectors of hidden units, the last of
    them with fewer."""

    def __init__(self, problem: RnnProblem, split: Split, workspace: Workspace, device: Cpu) -> None:
        self._problem, self._split, self._device = problem, split, device
        self._lanes = device.lanes(problem.compute)
        vectors = ceil(problem.hidden / self._lanes)
        self.unit_vectors = ceil(vectors / split.parts)
        self.parts = ceil(vectors / self.unit_vectors)
        self.count = problem.directions * split.groups
        self._crew_elems = crew_bytes(self.parts) // ITEMSIZE[problem.compute]
        self._crews = workspace.take(self.count * self._crew_elems)

    @property
    def part_units(self) -> int:
        return self.unit_vectors * self._lanes

    @property
    def images(self) -> int:
        """The most of a chain."""
        return ceil(self._problem.batch / self._split.groups)

    @property
    def tasks(self) -> int:
        return self.count * self.parts

    def before(self) -> list[Phase]:
        """What crews need before they go along a layer's chains."""
        if self.parts == 1:
            return []
        zeros = NOWHERE._replace(dtype=self._problem.compute)
        return [converted(zeros, self._crews, self.count, self._crew_elems, self._device)]

    def values(self, taken: int) -> dict[str, int]:
        """CHAIN_FIELDS, for so many steps."""
        return {
            **place_values(crews=self._crews),
            "taken": taken,
            "batch": self._problem.batch,
            "groups": self._split.groups,
            "parts": self.parts,
            "part_units": self.part_units,
            "crew_bytes": self._crew_elems * ITEMSIZE[self._problem.compute],
        }
