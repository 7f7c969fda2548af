"""The cache of compiled kernels: what one process compiled, the next one loads."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numba import njit

from nbdnn.kept import keep
from nbdnn.kernels.cpu.compile import DEVICE, cache_dir, compile_task
from nbdnn.kernels.cpu.vector import pointer
from nbdnn.problem_conv import CONV_OPS

PREPARE = """
import logging, sys
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
from nbdnn.device import cpu_device
from nbdnn.dispatch import registry
from nbdnn.problem import parse

device, problem = cpu_device(), parse("{op}:f32:n1c16h8w24:k32r3s3:p1x1:u1x1:d1x1:g1:cross:nchw")
for candidate in registry.candidates("{op}"):
    if candidate.supports(problem, device).ok:
        for config in candidate.configs(problem, device):
            candidate.prepare(problem, config, device)
"""


@pytest.mark.parametrize("op", CONV_OPS)
def test_a_second_process_compiles_nothing(op: str) -> None:
    def compiled(hash_seed: str) -> str:
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        command = [sys.executable, "-c", PREPARE.format(op=op)]
        done = subprocess.run(command, env=environment, check=True, timeout=300, capture_output=True, text=True)
        return done.stdout

    compiled("1")
    assert list(cache_dir().glob("*.nbc"))
    assert compiled("2") == ""


def test_what_kernels_call_is_code_of_theirs_alone() -> None:
    """Called by two, and by what one of them calls: linked into each, and by itself no machine code."""

    @njit(**DEVICE)
    def squared(x):
        return x * x

    @njit(**DEVICE)
    def cubed(x):
        return squared(x) * x

    at = pointer("i64")

    def square(args, ctx, index, worker):
        at(args)[0] = squared(index)

    def square_and_cube(args, ctx, index, worker):
        at(args)[0] = squared(index)
        at(args)[1] = cubed(index)

    memory = np.zeros(2, np.int64)
    for task, expected in ((square, [49, 0]), (square_and_cube, [49, 343])):
        compile_task(task, secrets.token_hex()).ctypes(memory.ctypes.data, 0, 7, 0)
        assert memory.tolist() == expected
    for dispatcher in (squared, cubed):
        (result,) = dispatcher.overloads.values()
        engine = result.target_context.codegen()._engine
        assert not engine.is_symbol_defined(result.fndesc.mangled_name)


FIRST_CALL = """
import signal
import numpy as np
from llvmlite.binding import ffi
from numba.core.codegen import JITCodeLibrary
import nbdnn

def interrupted(function):
    def call(*args):
        result = function(*args)
        signal.raise_signal(signal.SIGINT)
        return result
    return call

{interruption}
x = np.arange(12, dtype=np.float32).reshape(3, 4)
try:
    nbdnn.dnn_softmax(x)
except KeyboardInterrupt:
    print("interrupted")
"""
LINKED = "ffi.lib._fntab['LLVMPY_LinkModules'] = interrupted(ffi.lib.LLVMPY_LinkModules)"
LOADED = """
JITCodeLibrary._object_getbuffer_hook = classmethod(interrupted(JITCodeLibrary._object_getbuffer_hook.__func__))
"""


def test_ctrl_c_waits_for_the_compiler(tmp_path: Path) -> None:
    """After code was linked, which llvmlite would free once more, and before machine code is loaded, without which the
    kernel has no address."""

    def first_call(interruption: str) -> tuple[str, str]:
        code, environment = (
            FIRST_CALL.format(interruption=interruption),
            {**os.environ, "NBDNN_CACHE_DIR": str(tmp_path)},
        )
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, env=environment, check=True, timeout=120, capture_output=True, text=True)
        return done.stdout, done.stderr

    assert first_call(LINKED) == ("interrupted\n", "")
    assert first_call("") == ("", "")
    assert first_call(LOADED) == ("interrupted\n", "")


def test_a_source_edited_meanwhile_is_not_kept(tmp_path: Path) -> None:
    """What was imported is no longer what the file says: its machine code must not be filed under the new text."""
    (tmp_path / "edited.py").write_text(
        "import os, sys, time\n"
        "from nbdnn.kernels.cpu import compile as c\n"
        "def task(args, ctx, index, worker):\n    pass\n"
        "os.utime(__file__, (time.time() + float(sys.argv[1]),) * 2)\n"
        "c.compile_task(task, 'test')\n"
        "print(len(list(c.cache_dir().glob('*-task-*'))))\n"
    )

    def kept(age_s: float) -> int:
        environment = {**os.environ, "NBDNN_CACHE_DIR": str(tmp_path / f"cache{age_s}"), "PYTHONPATH": str(tmp_path)}
        command = [sys.executable, str(tmp_path / "edited.py"), str(age_s)]
        done = subprocess.run(command, env=environment, check=True, timeout=300, capture_output=True, text=True)
        return int(done.stdout)

    assert kept(-60) == 1
    assert kept(60) == 0


def test_a_damaged_kernel_is_compiled_again(tmp_path: Path) -> None:
    """One bit of its machine code: whatever reads the file well would run it."""
    (tmp_path / "flipped.py").write_text(
        "import logging, sys\n"
        "logging.basicConfig(stream=sys.stdout, format='%(message)s')\n"
        "from nbdnn.kernels.cpu import compile as c\n"
        "def task(args, ctx, index, worker):\n    pass\n"
        "c.compile_task(task, 'test')\n"
    )

    def told() -> str:
        environment = {**os.environ, "NBDNN_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(tmp_path)}
        command = [sys.executable, str(tmp_path / "flipped.py")]
        done = subprocess.run(command, env=environment, check=True, timeout=300, capture_output=True, text=True)
        return done.stdout

    assert told() == ""
    (kept,) = (tmp_path / "cpu").glob("*-task-*.nbc")
    content = bytearray(kept.read_bytes())
    content[content.index(b"\x7fELF") + 100] ^= 1
    kept.write_bytes(content)
    assert "could not be read (it is damaged): compiling again" in told()
    assert told() == ""


def test_a_folder_that_cannot_be_written_costs_one_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "two.py").write_text(
        "from nbdnn.kernels.cpu import compile as c\n"
        "def task(args, ctx, index, worker):\n    pass\n"
        "c.compile_task(task, 1), c.compile_task(task, 2)\n"
    )
    environment = {**os.environ, "NBDNN_CACHE_DIR": str(tmp_path / "file")}
    command = [sys.executable, str(tmp_path / "two.py")]
    done = subprocess.run(command, env=environment, check=True, timeout=300, capture_output=True, text=True)
    assert f"{tmp_path / 'two.py'}:4: NbdnnWarning: what is compiled" in done.stderr  # the line of who called nbdnn
    assert done.stderr.count("NbdnnWarning") == done.stderr.count(f"cannot be kept in {tmp_path / 'file' / 'cpu'}") == 1


def test_the_logger_tells_what_was_compiled(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="nbdnn"):
        keep(tmp_path / "new" / "kernel.nbc", b"machine code")
    assert f"compiled {tmp_path / 'new' / 'kernel.nbc'}" in caplog.text


def test_kernels_of_different_processes_are_told_apart(tmp_path: Path) -> None:
    """One function with other constants, compiled in two processes: a third process loads both, and each is itself.

    Recursive, so that it stays a function: of two equal names the linker takes the first.
    """
    (tmp_path / "loads.py").write_text(
        "import sys\n"
        "import numpy as np\n"
        "from numba import njit\n"
        "from nbdnn.kernels.cpu import compile as c, vector\n"
        "pointer = vector.pointer('i64')\n"
        "def compiled(number):\n"
        "    @njit(**c.DEVICE)\n"
        "    def fibonacci(n):\n        return number if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)\n"
        "    def task(args, ctx, index, worker):\n        pointer(ctx)[0] = fibonacci(index)\n"
        "    return c.compile_task(task, number)\n"
        "for number in map(int, sys.argv[1:]):\n"
        "    got = np.zeros(1, np.int64)\n"
        "    compiled(number).ctypes(0, got.ctypes.data, 6, 0)\n"
        "    print(got[0])\n"
    )
    environment = {**os.environ, "NBDNN_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": str(tmp_path)}

    def results(*numbers: str) -> list[str]:
        command = [sys.executable, str(tmp_path / "loads.py"), *numbers]
        done = subprocess.run(command, env=environment, check=True, timeout=300, capture_output=True, text=True)
        return done.stdout.split()

    assert results("2") == ["26"]
    assert results("3") == ["39"]
    assert results("2", "3") == ["26", "39"]
