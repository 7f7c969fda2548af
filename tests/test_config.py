"""The flags: where they come from, who sees them, and what is not one."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from nbdnn import InvalidProblem, config, dnn_pool, dnn_softmax, events
from nbdnn.errors import ConfigError


def in_a_new_process(code: str, **environment: str) -> str:
    """What `code` prints with these environment variables set."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("NBDNN_")}
    done = subprocess.run(
        [sys.executable, "-c", f"from nbdnn import config\n{code}"],
        env={**clean, **environment}, capture_output=True, text=True,
    )  # fmt: skip
    return (done.stdout + done.stderr).strip()


def test_defaults() -> None:
    code = "print(config.dnn); print(config.tune)"
    assert in_a_new_process(code).splitlines() == [
        "dnn.enabled = 'auto'",
        "dnn.library_path = ''",
        "dnn.conv.algo_fwd = 'guess_on_shape_change'",
        "dnn.conv.algo_bwd_filter = 'guess_on_shape_change'",
        "dnn.conv.algo_bwd_data = 'guess_on_shape_change'",
        "dnn.conv.algo_bwd = ''",
        "dnn.conv.precision = 'as_input_f32'",
        "dnn.allow_tf32 = False",
        "dnn.deterministic = False",
        "dnn.workspace_limit = None",
        "dnn.fallback = 'warn'",
        "dnn.policy = 'guess_on_shape_change'",
        "tune.budget_s = 20.0",
        "tune.db = ''",
        "tune.mode = 'read-write'",
    ]


def test_environment_takes_both_spellings() -> None:
    flags = "dnn.conv.algo_fwd=time_once, dnn__enabled=False,dnn.workspace_limit=1024,tune.budget_s=1.5,"
    code = "print(config.dnn.conv.algo_fwd, config.dnn.enabled, config.dnn.workspace_limit, config.tune.budget_s)"
    assert in_a_new_process(code, NBDNN_FLAGS=flags) == "time_once False 1024 1.5"


def test_place_of_the_database(tmp_path: Path) -> None:
    code = "print(config.database_path())"
    assert in_a_new_process(code, XDG_DATA_HOME=str(tmp_path)) == str(tmp_path / "nbdnn" / "tuning.db")
    assert in_a_new_process(code, NBDNN_FLAGS="tune.db=a.db") == "a.db"
    assert in_a_new_process(code, NBDNN_FLAGS="tune.db=a.db", NBDNN_DB="b.db") == "b.db"
    assert in_a_new_process("config.tune.db = 'c.db'\n" + code, NBDNN_DB="b.db") == "c.db"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("dnn.conv.algo=none", "unknown flag 'dnn.conv.algo'; the flags are dnn.enabled, "),
        ("dnn.fallback=shout", "dnn.fallback is 'shout'; valid: warn, raise"),
        ("dnn.conv.algo_fwd=deterministic", "valid: none, small, large, fft, "),
        ("dnn.conv.algo_bwd=large", "valid: none, small, deterministic, fft, fft_tiling, winograd_non_fused, "),
        ("dnn.deterministic", "'dnn.deterministic' is not of the form flag=value"),
        ("tune.budget_s=-1", "tune.budget_s is '-1'; valid: a finite number of seconds, 0 or more"),
        ("dnn.workspace_limit=1.5", "dnn.workspace_limit is '1.5'; valid: a number of bytes, 0 or more, or None"),
        ("dnn.policy=fastest", "dnn.policy is 'fastest'; valid: guess_once, "),
    ],
)
def test_what_is_wrong_is_said_at_first_use(flags: str, message: str) -> None:
    assert in_a_new_process("print('imported')", NBDNN_FLAGS=flags) == "imported"
    output = in_a_new_process("config.current()", NBDNN_FLAGS=flags).splitlines()[-1]
    assert output.startswith("nbdnn.errors.ConfigError: ") and message in output


@pytest.mark.parametrize("given", ["many", "0", "-1"])
def test_a_number_of_threads_that_is_none_is_named(given: str) -> None:
    output = in_a_new_process("config.numba_threads()", NUMBA_NUM_THREADS=given).splitlines()[-1]
    assert output == f"nbdnn.errors.ConfigError: NUMBA_NUM_THREADS is {given!r}, expected a number of threads"


def test_numba_told_to_compile_nothing_is_named() -> None:
    code = "import numpy, nbdnn\nnbdnn.dnn_softmax(numpy.ones((2, 3)))"
    last = in_a_new_process(code, NUMBA_DISABLE_JIT="1").splitlines()[-1]
    assert last == "nbdnn.errors.ConfigError: NUMBA_DISABLE_JIT is set: nbdnn's kernels run compiled alone"


def test_change_is_for_this_thread_and_block() -> None:
    with ThreadPoolExecutor(1) as pool, config.change(dnn__conv__algo_fwd="time_once", **{"dnn.deterministic": True}):
        assert (config.dnn.conv.algo_fwd, config.dnn.deterministic) == ("time_once", True)
        assert pool.submit(lambda: config.dnn.conv.algo_fwd).result() == "guess_on_shape_change"
        with config.change(dnn__conv__algo_fwd="none"):
            assert (config.dnn.conv.algo_fwd, config.dnn.deterministic) == ("none", True)
        assert config.dnn.conv.algo_fwd == "time_once"
    assert (config.dnn.conv.algo_fwd, config.dnn.deterministic) == ("guess_on_shape_change", False)


def test_change_ends_with_the_block_also_by_an_error() -> None:
    with pytest.raises(KeyError), config.change(dnn__fallback="raise"):
        raise KeyError
    assert config.dnn.fallback == "warn"


def test_blocks_that_do_not_end_in_turn_leave_nothing() -> None:
    """As those of two coroutines on one thread."""
    first, second = config.change(dnn__deterministic=True), config.change(dnn__fallback="raise")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert (config.dnn.deterministic, config.dnn.fallback) == (False, "raise")
    second.__exit__(None, None, None)
    assert (config.dnn.deterministic, config.dnn.fallback) == (False, "warn")


def test_flags_that_never_repeat_are_not_kept() -> None:
    for limit in range(1000, 2000):
        with config.change(dnn__workspace_limit=limit):
            config.current()
    gc.collect()
    assert len(config.Settings._known) < 100


@pytest.mark.parametrize("value", [1.5, float("inf"), float("nan"), True, -1])
def test_what_is_no_number_of_bytes(value: object) -> None:
    with pytest.raises(ConfigError, match=r"dnn\.workspace_limit is"), config.change(dnn__workspace_limit=value):
        pass
    with config.change(dnn__workspace_limit=1e9):
        assert config.dnn.workspace_limit == 10**9


@pytest.mark.parametrize("value", [b"tuning.db", "a\0b", 5])
def test_what_is_no_path(value: object) -> None:
    with pytest.raises(ConfigError, match=r"tune\.db is .*; valid: a path"), config.change(tune__db=value):
        pass


def test_assignment_is_for_the_process_and_yields_to_change() -> None:
    try:
        with config.change(dnn__fallback="raise"):
            config.dnn.workspace_limit = 64
            config.dnn__allow_tf32 = True
            config.dnn.fallback = "warn"
            assert (config.dnn.fallback, config.dnn.workspace_limit) == ("raise", 64)
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(lambda: (config.dnn.workspace_limit, config.dnn__allow_tf32)).result() == (64, True)
    finally:
        config.set_flags(dnn__workspace_limit=None, dnn__allow_tf32=False)


def test_algo_bwd_sets_both() -> None:
    with config.change(dnn__conv__algo_bwd="time_once"):
        assert config.dnn.conv.algo_bwd_filter == config.dnn.conv.algo_bwd_data == "time_once"
        assert config.dnn.conv.algo_fwd == "guess_on_shape_change"


@pytest.mark.parametrize("name", ["dnn", "tune__bd", "dnn__conv", "fallback"])
def test_a_misspelt_flag_is_no_new_attribute(name: str) -> None:
    with pytest.raises(ConfigError, match="the flags are"):
        setattr(config, name, "none")
    for kind in (AttributeError, ConfigError):
        with pytest.raises(kind, match="the flags are"):
            _ = config.dnn.conv.algo_forward


def test_equal_settings_are_one_object() -> None:
    before = config.current()
    with config.change(dnn__fallback="raise"):
        inside = config.current()
    with config.change(dnn__fallback="raise"):
        assert config.current() is inside
    assert config.current() is before is not inside


def test_the_documentation_names_every_flag() -> None:
    assert all(flag in (config.__doc__ or "") for flag in config._FLAGS)
    assert dir(config.dnn.conv) == ["algo_bwd", "algo_bwd_data", "algo_bwd_filter", "algo_fwd", "precision"]


def test_a_candidate_of_a_flag_is_that_of_its_op_alone() -> None:
    x, id = np.ones((1, 2, 4, 4), "f"), "pool_fwd/cpu/rows"
    with config.change(dnn__policy=id), events() as log:
        dnn_pool(x, 2)
        dnn_softmax(x)
    assert [(event.candidate == id, event.kind) for event in log] == [(True, "selected"), (False, "selected")]
    with config.change(dnn__policy="pool/cpu/windows"), pytest.raises(InvalidProblem, match="'pool/cpu/windows'"):
        dnn_pool(x, 2)
