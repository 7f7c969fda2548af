"""These tests run against the installed cuDNN, without a GPU; where it is not installed, they are skipped."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest
from stand_ins import stand_in_driver


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get("NBDNN_TEST_LIBRARIES") or (find_spec("nvidia") and find_spec("nvidia.cudnn")):
        return
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.skip(reason="nvidia-cudnn is not installed"))


@pytest.fixture(autouse=True, scope="session")
def _a_driver_to_be_linked_with() -> None:
    stand_in_driver()
