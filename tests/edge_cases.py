"""The edge cases of every op, from the module of its family."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

from nbdnn.problem import FAMILIES, Problem


def edges(op: str, kind: str = "cuda") -> Sequence[Problem]:
    """Those of one op for a kind of device; only convolutions and pools have some for GPUs alone."""
    of_family = import_module(f"nbdnn.edges_{op.partition('_')[0]}").edges
    return of_family(op, kind) if op in FAMILIES["conv"] + FAMILIES["pool"] else of_family(op)
