"""These tests run against the installed cuDNN, without a GPU; where it is not installed, they are skipped."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get("NBDNN_TEST_LIBRARIES") or (find_spec("nvidia") and find_spec("nvidia.cudnn")):
        return
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.skip(reason="nvidia-cudnn is not installed"))
