"""Nothing is read outside of the operands and the workspace, be it to throw it away: there may be no memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from cells import is_for

from nbdnn.device import cpu_device
from nbdnn.dispatch import registry
from nbdnn.problem import OPS

_IDS = [candidate.id for op in OPS for candidate in registry.candidates(op) if is_for(candidate, cpu_device())]


@pytest.mark.parametrize("id", _IDS)
def test_pages_beside_the_operands_are_not_touched(id: str) -> None:
    """In a process of its own, which would die."""
    script = Path(__file__).parent / "beside_pages.py"
    found = subprocess.run([sys.executable, str(script), id], capture_output=True, text=True, env=os.environ)
    *_, last = ["", *(line for line in found.stderr.splitlines() if line.startswith(id.partition("/")[0]))]
    assert found.returncode == 0, f"{last}\n{found.stderr[-2000:]}"
    assert int(found.stdout) > 0
