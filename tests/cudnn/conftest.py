"""These tests run against the installed cuDNN, without a GPU; where it is not installed, they are skipped."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest
from stand_ins import stand_in_driver


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    there = os.environ.get("NBDNN_TEST_LIBRARIES") or (find_spec("nvidia") and find_spec("nvidia.cudnn"))
    for item in items:
        if not item.path.is_relative_to(Path(__file__).parent):
            continue
        item.add_marker("cuda_libs")
        if not there:
            item.add_marker(pytest.mark.skip(reason="nvidia-cudnn is not installed"))


@pytest.fixture(autouse=True, scope="session")
def _a_driver_to_be_linked_with() -> None:
    stand_in_driver()
