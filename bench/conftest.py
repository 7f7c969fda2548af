"""The benchmarks have a database of their own; the kernels compiled for them are kept."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Before anything of nbdnn is imported."""
    folder = tempfile.TemporaryDirectory(prefix="nbdnn-bench-")
    config.add_cleanup(folder.cleanup)
    os.environ.pop("NBDNN_FLAGS", None)
    os.environ["NBDNN_DB"] = str(Path(folder.name) / "tuning.db")
