"""Run CPU candidates on operands that end, then begin, at pages that may not be touched: what reads there dies.

python tests/beside_pages.py pool_bwd/cpu/indices ...     prints how many problems each ran
"""

from __future__ import annotations

import ctypes
import faulthandler
import mmap
import sys

import numpy as np
from edge_cases import edges
from guarded import NUMPY_DTYPE, values

from nbdnn.device import cpu_device
from nbdnn.dispatch import registry
from nbdnn.problem import ANY_ITEMSIZE, Operand

_PROT_NONE = 0


class Pages:
    """`size_bytes` of memory, at its end or its begin beside a page that may not be touched."""

    def __init__(self, size_bytes: int, align: int, at_end: bool) -> None:
        page = mmap.PAGESIZE
        inner_bytes = max(1, -(-size_bytes // page)) * page
        self._memory = mmap.mmap(-1, inner_bytes + 2 * page)
        first = ctypes.addressof(ctypes.c_char.from_buffer(self._memory)) + page
        self.address = first + ((inner_bytes - size_bytes) // align * align if at_end else 0)
        protect = ctypes.CDLL(None, use_errno=True).mprotect
        protect.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        for guard in (first - page, first + inner_bytes):
            if protect(guard, page, _PROT_NONE):
                raise OSError(ctypes.get_errno(), "mprotect")

    def fill(self, operand: Operand, value: np.ndarray) -> None:
        if operand.size_bytes:
            memory = (ctypes.c_char * operand.size_bytes).from_address(self.address)
            strides = tuple(step * ANY_ITEMSIZE[operand.dtype] for step in operand.strides)
            np.ndarray(operand.shape, NUMPY_DTYPE[operand.dtype], memory, 0, strides)[...] = value  # type: ignore[call-overload]


def run(id: str) -> int:
    """How many problems the candidate ran, each twice."""
    candidate, device, count = registry.candidate(id), cpu_device(), 0
    for problem in edges(candidate.op, "cpu"):
        if problem.dtype not in ("f32", "bf16") or not candidate.supports(problem, device).ok:
            continue
        config, count = candidate.configs(problem, device)[0], count + 1
        runner, contents = candidate.prepare(problem, config, device), values(problem, "normal")
        workspace_bytes = candidate.workspace_bytes(problem, config, device)
        for at_end in (True, False):
            memories = [Pages(operand.size_bytes, problem.align, at_end) for operand in problem.operands]
            for memory, operand in zip(memories, problem.operands, strict=True):
                if operand.name in contents:
                    memory.fill(operand, contents[operand.name])
            workspace = Pages(workspace_bytes, 64, at_end)
            print(f"{problem} {config}", file=sys.stderr, flush=True)
            runner(tuple(memory.address for memory in memories), problem.scalars, workspace.address, 0)
    return count


if __name__ == "__main__":
    faulthandler.enable()
    for each in sys.argv[1:]:
        print(run(each))
