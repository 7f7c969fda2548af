"""Each test of the dispatcher begins with an empty database and remembers nothing.

nbdnn is imported in the fixtures: `pytest tests/dispatch` loads this file before the tests are isolated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

if TYPE_CHECKING:
    from nbdnn.problem_conv import ConvProblem


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file of its own in a folder of its own, neither of which is there yet."""
    return tmp_path / "folder" / "tuning.db"


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Path]:
    """The path of this test's own database; on one thread, whose times nobody else disturbs."""
    import numba

    from nbdnn import config
    from nbdnn.dispatch import dispatcher, policy

    threads = numba.get_num_threads()
    numba.set_num_threads(1)
    policy.forget_once()
    policy._warned.clear()
    with config.change(tune__db=str(tmp_path / "tuning.db")):
        yield tmp_path / "tuning.db"
    dispatcher.empty_cache()
    numba.set_num_threads(threads)


@pytest.fixture
def restart() -> Callable[[], None]:
    """Forget what a new process would not know."""
    from nbdnn.dispatch import dispatcher, policy

    def forget() -> None:
        dispatcher.empty_cache()
        dispatcher._databases.clear()
        policy.forget_once()
        policy._spent.clear()

    return forget


@pytest.fixture
def call() -> Callable:
    """Run a forward problem through `dnn_conv`, check the result, and return it."""
    from nbdnn import dnn_conv, reference_conv, tolerance
    from nbdnn.kernels.cpu import conv_direct

    def run(problem: ConvProblem, **arguments: object) -> np.ndarray:
        rng = np.random.default_rng(0)
        x, w = (rng.uniform(-1, 1, shape).astype(np.float32) for shape in (problem.x_shape, problem.w_shape))
        y = dnn_conv(x, w, problem.pad, problem.stride, problem.dilation, problem.mode, **arguments)
        sample = reference_conv.whole(problem, {"x": x, "w": w})
        assert not tolerance.fault(problem, conv_direct.FWD, y, sample)
        return y

    return run
