"""What programs of recurrent networks are made of, whoever multiplies: places of arrays, and phases that convert rows.

A network has more operands than a task is given pointers: their addresses are in a table, whose address is the first,
and the workspace's comes last in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
from numba import njit

from nbdnn.device import Cpu
from nbdnn.kernels.cpu.compile import DEVICE, compile_task
from nbdnn.kernels.cpu.launch import Phase, Program
from nbdnn.kernels.cpu.rows import convert_row
from nbdnn.kernels.cpu.vector import filled, pointer, record, struct
from nbdnn.problem import DEFAULT_COMPUTE, ITEMSIZE
from nbdnn.problem_rnn import RnnProblem

_CONVERT_ELEMS_A_TASK = 1 << 14


class Place(NamedTuple):
    """Where an array is: its operand's place among them (the workspace is behind the last), and bytes beyond that
    address. dtype: 'f32' and the like."""

    operand: int
    offset_bytes: int
    dtype: str

    def beyond(self, elements: int) -> Place:
        return self._replace(offset_bytes=self.offset_bytes + elements * ITEMSIZE[self.dtype])


NOWHERE = Place(-1, 0, "f32")  # an array of zeros that nobody has


def place_fields(*names: str) -> tuple[str, ...]:
    """Fields of a task's record that say where arrays are."""
    return tuple(f"{name}_{part}" for name in names for part in ("operand", "offset"))


def place_values(**places: Place) -> dict[str, int]:
    found: dict[str, int] = {}
    for name, place in places.items():
        found |= {f"{name}_operand": place.operand, f"{name}_offset": place.offset_bytes}
    return found


class SequenceProgram:
    """A runner: a `Program` whose tasks find the addresses of operands and workspace in a table."""

    def __init__(self, problem: RnnProblem, phases: Sequence[Phase], keep: Sequence[np.ndarray] = ()) -> None:
        self._table = np.zeros(len(problem.operands) + 1, np.int64)
        self._pointer = (self._table.ctypes.data,)
        self._program = Program(phases, keep)

    def __call__(
        self, pointers: tuple[int, ...], scalars: tuple[float, ...], workspace: int = 0, stream: int = 0
    ) -> None:
        self._table[:] = *pointers, workspace
        self._program(self._pointer, ())


@cache
def address_of():
    """Compiled-in function (args, operand, offset): the address of a `Place`; 0 where the operand is absent."""
    i64 = pointer("i64")

    @njit(**DEVICE)
    def find(args, operand, offset):
        base = i64(i64(args)[0])[operand] if operand >= 0 else 0
        return base + offset if base else 0

    return find


class Workspace:
    """The workspace of a program, given out piece by piece, each on lines of its own."""

    def __init__(self, problem: RnnProblem) -> None:
        self._operand, self._dtype = len(problem.operands), problem.compute
        self.size_bytes = 0

    def take(self, elements: int) -> Place:
        """Room for so many elements of the compute type."""
        start = self.size_bytes
        self.size_bytes = start + -(-elements * ITEMSIZE[self._dtype] // 64) * 64
        return Place(self._operand, start, self._dtype)


_CONVERT = record(*place_fields("source", "target"), "source_pitch", "target_pitch", "rows", "length", "rows_a_task")


@cache
def _convert_task(source: str, target: str, vl: int):
    """A run of rows; zeros where there is no source."""
    at, find = struct(_CONVERT), address_of()
    convert, data, item = convert_row(source, target, vl), pointer("u8"), ITEMSIZE[target]

    def convert_rows(args, ctx, index, worker):
        f = at(ctx)
        start = find(args, f.source_operand, f.source_offset)
        to = find(args, f.target_operand, f.target_offset)
        for row in range(index * f.rows_a_task, min(f.rows, (index + 1) * f.rows_a_task)):
            if start:
                convert(to + row * f.target_pitch, start + row * f.source_pitch, f.length)
            else:
                for i in range(f.length * item):
                    data(to + row * f.target_pitch)[i] = 0

    return compile_task(convert_rows, (source, target, vl))


def converted(
    source: Place,
    target: Place,
    rows: int,
    length: int,
    device: Cpu,
    *,
    source_pitch: int | None = None,
    target_pitch: int | None = None,
) -> Phase:
    """Rows of `length` elements, converted to the target's dtype, or zeros; pitches are in elements, default dense."""
    rows_a_task = max(1, min(rows, _CONVERT_ELEMS_A_TASK // max(1, length)))
    ctx = filled(
        _CONVERT,
        **place_values(source=source, target=target),
        source_pitch=(length if source_pitch is None else source_pitch) * ITEMSIZE[source.dtype],
        target_pitch=(length if target_pitch is None else target_pitch) * ITEMSIZE[target.dtype],
        rows=rows,
        length=length,
        rows_a_task=rows_a_task,
    )
    tasks = -(-rows // rows_a_task)
    task = _convert_task(source.dtype, target.dtype, device.lanes(DEFAULT_COMPUTE[source.dtype]))
    return Phase(task, tasks, ctx, alone=tasks < 2)
