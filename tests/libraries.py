"""Array libraries that nbdnn works with and does not depend on."""

from __future__ import annotations

import importlib
import os
from types import ModuleType

import pytest


def library(name: str) -> ModuleType:
    """The library; without it the test is skipped, unless NBDNN_TEST_LIBRARIES says that all must be there."""
    if os.environ.get("NBDNN_TEST_LIBRARIES"):
        return importlib.import_module(name)
    return pytest.importorskip(name)
