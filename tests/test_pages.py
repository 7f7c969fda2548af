"""Nothing is read outside of the operands and the workspace, be it to throw it away: there may be no memory."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cells import is_for

from nbdnn.device import cpu_device
from nbdnn.dispatch import registry
from nbdnn.problem import OPS

_AT_ONCE = 3  # candidates a process, which takes a second to begin


def _some() -> Iterator[list[str]]:
    for op in OPS:
        ids = [candidate.id for candidate in registry.candidates(op) if is_for(candidate, cpu_device())]
        yield from (ids[i : i + _AT_ONCE] for i in range(0, len(ids), _AT_ONCE))


@pytest.mark.parametrize("ids", list(_some()), ids=",".join)
def test_pages_beside_the_operands_are_not_touched(ids: list[str]) -> None:
    """In a process of their own, which would die."""
    script = Path(__file__).parent / "beside_pages.py"
    found = subprocess.run([sys.executable, str(script), *ids], capture_output=True, text=True, env=os.environ)
    *_, last = ["", *(line for line in found.stderr.splitlines() if line.startswith(ids[0].partition("/")[0]))]
    assert found.returncode == 0, f"{last}\n{found.stderr[-2000:]}"
    assert all(int(count) > 0 for count in found.stdout.split()) and len(found.stdout.split()) == len(ids)
