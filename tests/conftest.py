"""Every test session has its own empty database; compiled kernels, whose key is honest, are kept between sessions."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import settings
from libraries import library

# A first example may compile a kernel; what an example costs says nothing about its result.
settings.register_profile("nbdnn", deadline=None, print_blob=True)
settings.load_profile("nbdnn")

_MARKERS = {"torch": "interop", "jax": "interop", "numba_cuda": "cuda_libs", "cudnn": "cuda_libs"}


def pytest_configure(config: pytest.Config) -> None:
    """Before anything of nbdnn is imported: flags and paths of the machine must not reach the tests."""
    # What a shell starts in the background ignores Ctrl-C, and so would what the tests interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    folder = Path(tempfile.mkdtemp(prefix="nbdnn-tests-"))
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    for name in ("NBDNN_FLAGS", "NBDNN_RECORD"):
        os.environ.pop(name, None)
    os.environ["NBDNN_DB"] = str(folder / "tuning.db")
    # JAX takes three quarters of a GPU's memory otherwise, which other processes of the tests need.
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    keep = config.pluginmanager.has_plugin("cacheprovider")
    os.environ["NBDNN_CACHE_DIR"] = str(config.cache.mkdir("nbdnn-kernels") if keep else folder / "kernels")
    # Not in pyproject.toml: pytest would import nbdnn for it before this function runs.
    assert "nbdnn" not in sys.modules
    config.addinivalue_line("filterwarnings", "error::nbdnn.errors.NbdnnWarning")


@pytest.fixture(scope="session")
def device() -> Iterator:
    from nbdnn.device import cpu_device

    return cpu_device()


@pytest.fixture(scope="session")
def torch() -> ModuleType:
    return library("torch")


@pytest.fixture(scope="session")
def jax() -> ModuleType:
    return library("jax")


@pytest.fixture(scope="session")
def numba_cuda() -> ModuleType:
    return library("numba_cuda")


@pytest.fixture(scope="session")
def cudnn() -> ModuleType:
    return library("nvidia.cudnn")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`-m` chooses the tests of a library, which are those that ask for it."""
    for item in items:
        for marker in {_MARKERS[name] for name in getattr(item, "fixturenames", ()) if name in _MARKERS}:
            item.add_marker(marker)


@pytest.fixture
def no_plans() -> None:
    """Every test that uses it sees its plans being made."""
    import nbdnn

    nbdnn.empty_cache()


@pytest.fixture(autouse=True)
def _in_the_context_of_the_gpu(request: pytest.FixtureRequest) -> None:
    """Tests on a GPU call kernels themselves: its context is current, as the dispatcher makes it."""
    if request.node.get_closest_marker("gpu"):
        from nbdnn import driver

        driver.use(0)
