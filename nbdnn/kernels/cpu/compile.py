"""Compiled kernels, cached on disk under an honest key.

A kernel is a Python function ``task(args, ctx, index, worker)`` of four int64 that Numba compiles to a C function. The
key hashes everything the machine code depends on: the parsed source of the kernel's module and of every kernel module
it imports, the build parameters, Numba's and llvmlite's versions, the interpreter and the CPU with its features.

Ctrl-C waits until a kernel is compiled: within, llvmlite would free twice what it had just linked, or code that was not
loaded would be called.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import pickle
import secrets
import sys
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import llvmlite
import numba
from numba import njit, types
from numba.core import compiler, serialize
from numba.core import config as numba_config
from numba.core.bytecode import FunctionIdentity
from numba.core.ccallback import CFunc

from nbdnn import config
from nbdnn.errors import ConfigError
from nbdnn.interrupt import held_back
from nbdnn.kept import keep, sealed, unsealed
from nbdnn.kernels.cpu.linked import LinkedCompiler
from nbdnn.source import changed_since_start, transitive_hash

TASK_SIGNATURE = types.void(types.int64, types.int64, types.int64, types.int64)
# NaN and infinities keep their meaning; only the order of additions inside a kernel may change.
FASTMATH = {"contract", "arcp", "nsz"}

# Options of a function that is called from kernels only: `@njit(**DEVICE)`.
DEVICE: dict[str, Any] = {
    "no_cpython_wrapper": True,
    "no_cfunc_wrapper": True,
    "error_model": "numpy",
    "pipeline_class": LinkedCompiler,
}

# Numba tells closures of one function apart by a number in their symbol, counted from 1 in each process. Where machine
# code of several processes meets in one, equal symbols are linked to whichever came first, and a kernel then calls
# another's inner function. Counted from a random number, no two are equal.
FunctionIdentity._unique_ids = itertools.count(secrets.randbits(62))

if numba_config.DISABLE_JIT:  # type: ignore[attr-defined]
    raise ConfigError("NUMBA_DISABLE_JIT is set: nbdnn's kernels run compiled alone")

_log = logging.getLogger("nbdnn")
_tasks: dict[tuple, CFunc] = {}


def cache_dir() -> Path:
    """Where the compiled kernels of this provider are kept."""
    return config.cache_dir() / "cpu"


def compile_task(
    function: Callable, key: Hashable, *, fastmath: bool | set[str] = False, signature: Any = TASK_SIGNATURE
) -> CFunc:
    """The compiled task; its ``.address`` is what the launcher calls.

    `key` must determine every value that `function` closes over; with the function's qualified name and the source
    of its module it names the machine code.
    """
    # Sorted: the order of a set of strings changes from process to process, and the name is part of the key on disk.
    flags = str(sorted(fastmath) if isinstance(fastmath, set) else fastmath)
    name = (function.__module__, function.__qualname__, key, flags)
    if name not in _tasks:
        options = {"nopython": True, "error_model": "numpy", "boundscheck": False, "fastmath": fastmath}
        task = CFunc(function, (signature.args, signature.return_type), locals={}, options=options)
        task._cache = DiskCache(function, name)  # type: ignore[attr-defined]
        with held_back():
            task.compile()
        _tasks[name] = task
    return _tasks[name]


def compile_entry(function: Callable, key: Hashable, signature: Any, **options: Any) -> Callable:
    """The compiled function as Python calls it, without Numba's choice among overloads. key: as of `compile_task`."""
    dispatcher: Any = njit(**options)(function)
    dispatcher._cache = DiskCache(function, key)
    with held_back():
        dispatcher.compile(signature.args)
    (compiled,) = dispatcher.overloads.values()
    return compiled.entry_point


class DiskCache:
    """What a Numba dispatcher or C function expects of its cache: load and save one compiled overload."""

    def __init__(self, function: Callable, key: Hashable) -> None:
        self._module = sys.modules[function.__module__]
        self._label = f"{function.__module__.rpartition('.')[2]}-{function.__name__}"
        self._key = key

    def _path(self, target_context: Any, signature: Any) -> Path:
        facts = (
            "sealed",
            transitive_hash(self._module),
            self._key,
            str(signature),
            numba.__version__,
            llvmlite.__version__,
            sys.version_info[:3],
            target_context.codegen().magic_tuple(),
        )
        return cache_dir() / f"{self._label}-{hashlib.sha256(repr(facts).encode()).hexdigest()[:32]}.nbc"

    def load_overload(self, signature: Any, target_context: Any) -> Any:
        target_context.refresh()
        path = self._path(target_context, signature)
        try:
            text = unsealed(path.read_bytes())
            if text is None:
                raise ValueError("it is damaged")
            payload = pickle.loads(text)
            return compiler.CompileResult._rebuild(target_context, *payload)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except Exception as error:  # a truncated or foreign file must cost a compilation, never the program
            _log.warning("compiled kernel %s could not be read (%s): compiling again", path, error)
            return None

    def save_overload(self, signature: Any, result: Any) -> None:
        if result.library.has_dynamic_globals:
            raise RuntimeError(f"{self._label} embeds an address of this process: it cannot be kept on disk")
        if changed_since_start(self._module):
            _log.warning("%s is not kept on disk: its source has changed since it was loaded", self._label)
            return
        keep(self._path(result.target_context, signature), sealed(serialize.dumps(result._reduce())))
