"""The flags, and the only place that reads the environment.

=======================  ==========================  ===============================================================
flag                     default                     values
=======================  ==========================  ===============================================================
dnn.enabled              auto                        auto | True | False: whether cuDNN may be used
dnn.library_path         (empty)                     folder or file of cuDNN, searched first
dnn.conv.algo_fwd        guess_on_shape_change       a method, a selection policy or a candidate id
dnn.conv.algo_bwd_filter guess_on_shape_change       the same
dnn.conv.algo_bwd_data   guess_on_shape_change       the same
dnn.conv.algo_bwd        (empty)                     sets both of the above
dnn.conv.precision       as_input_f32                as_input_f32 | as_input | float16 | float32 | float64
dnn.allow_tf32           False                       True | False
dnn.deterministic        False                       True | False
dnn.workspace_limit      None                        bytes, or None: available memory
dnn.fallback             warn                        warn | raise: when a named method cannot run
dnn.policy               guess_on_shape_change       a selection policy or a candidate id, for ops but convolutions
tune.budget_s            20.0                        seconds spent on measuring one problem
tune.db                  (empty)                     file of the tuning database; empty: in the user data folder
tune.mode                read-write                  read-write | read-only | off
=======================  ==========================  ===============================================================

``NBDNN_FLAGS="dnn.conv.algo_fwd=time_once,dnn.enabled=False"`` sets them for a process and ``NBDNN_DB`` sets tune.db;
``nbdnn.config.dnn.conv.algo_fwd = "time_once"`` sets one in the program, for all threads;
``with nbdnn.config.change(dnn__conv__algo_fwd="time_once"):`` sets it for the calling thread and the block.
Dots and double underscores mean the same. What is wrong raises ConfigError when a flag is first used.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar
from weakref import WeakValueDictionary

from nbdnn.errors import ConfigError, UnknownFlag
from nbdnn.locks import reentrant_lock

POLICIES = ("guess_once", "guess_on_shape_change", "time_once", "time_on_shape_change")
PRECISIONS = ("as_input_f32", "as_input", "float16", "float32", "float64")
# Theano's names of methods, by op and number of spatial axes.
METHODS = {
    ("conv_fwd", 2): ("none", "small", "large", "fft", "fft_tiling", "winograd", "winograd_non_fused"),
    ("conv_fwd", 3): ("none", "small", "fft_tiling", "winograd"),
    ("conv_bwd_filter", 2): ("none", "small", "deterministic", "fft", "fft_tiling", "winograd_non_fused"),
    ("conv_bwd_filter", 3): ("none", "small"),
    ("conv_bwd_data", 2): ("none", "small", "deterministic", "fft", "fft_tiling", "winograd", "winograd_non_fused"),
    ("conv_bwd_data", 3): ("none", "deterministic", "fft_tiling", "winograd"),
}

# What names the root of an installation of cuDNN or of the CUDA toolkit, in the order in which they are searched.
_CUDA_ROOTS = ("CUDNN_PATH", "CUDA_HOME", "CUDA_ROOT", "CUDA_PATH", "CONDA_PREFIX")
_VARIABLES = ("NBDNN_FLAGS", "NBDNN_DB", "NBDNN_CACHE_DIR", "NBDNN_RECORD", "NUMBA_NUM_THREADS", *_CUDA_ROOTS)
_ENVIRONMENT = {name: os.environ.get(name, "") for name in _VARIABLES}


class _Flag(NamedTuple):
    """Default, the text that says what is valid, and the function from a given value to the stored one.

    `read` raises ValueError on what the flag does not take; it receives text from the environment, any value in code.
    """

    default: Any
    valid: str
    read: Callable[[Any], Any]


def _one_of(*choices: Any, default: Any) -> _Flag:
    by_text = {str(choice).lower(): choice for choice in choices}

    def read(value: Any) -> Any:
        if isinstance(value, int | str) and str(value).lower() in by_text:
            return by_text[str(value).lower()]
        raise ValueError

    return _Flag(default, ", ".join(map(str, choices)), read)


def _algo(op: str) -> _Flag:
    names = (*METHODS[op, 2], *POLICIES)

    def read(value: Any) -> str:
        if value in names or (isinstance(value, str) and value.startswith(f"{op}/")):
            return value
        raise ValueError

    return _Flag("guess_on_shape_change", f"{', '.join(names)}, or a candidate id such as {op}/cpu/direct", read)


def _read_policy(value: Any) -> str:
    if value in POLICIES or (isinstance(value, str) and value.count("/") == 2):
        return value
    raise ValueError


_OF_BOTH_GRADIENTS = (
    *(method for method in METHODS["conv_bwd_filter", 2] if method in METHODS["conv_bwd_data", 2]),
    *POLICIES,
)


def _read_algo_bwd(value: Any) -> str:
    if value == "" or value in _OF_BOTH_GRADIENTS:
        return value
    raise ValueError


def _read_bytes(value: Any) -> int | None:
    if value is None or str(value).lower() == "none":
        return None
    if isinstance(value, float) and not value.is_integer():
        raise ValueError
    if isinstance(value, bool) or (number := int(value)) < 0:
        raise ValueError
    return number


def _read_seconds(value: Any) -> float:
    if isinstance(value, bool) or not 0 <= (number := float(value)) < float("inf"):
        raise ValueError
    return number


def _read_path(value: Any) -> str:
    path = os.fspath(value)
    if not isinstance(path, str) or "\0" in path:
        raise ValueError
    return path


_FLAGS: dict[str, _Flag] = {
    "dnn.enabled": _one_of("auto", True, False, default="auto"),
    "dnn.library_path": _Flag("", "a path", _read_path),
    "dnn.conv.algo_fwd": _algo("conv_fwd"),
    "dnn.conv.algo_bwd_filter": _algo("conv_bwd_filter"),
    "dnn.conv.algo_bwd_data": _algo("conv_bwd_data"),
    "dnn.conv.algo_bwd": _Flag("", ", ".join(_OF_BOTH_GRADIENTS), _read_algo_bwd),
    "dnn.conv.precision": _one_of(*PRECISIONS, default="as_input_f32"),
    "dnn.allow_tf32": _one_of(True, False, default=False),
    "dnn.deterministic": _one_of(True, False, default=False),
    "dnn.workspace_limit": _Flag(None, "a number of bytes, 0 or more, or None", _read_bytes),
    "dnn.fallback": _one_of("warn", "raise", default="warn"),
    "dnn.policy": _Flag("guess_on_shape_change", f"{', '.join(POLICIES)}, or a candidate id", _read_policy),
    "tune.budget_s": _Flag(20.0, "a finite number of seconds, 0 or more", _read_seconds),
    "tune.db": _Flag("", "a path", _read_path),
    "tune.mode": _one_of("read-write", "read-only", "off", default="read-write"),
}


def _checked(values: dict[str, Any]) -> dict[str, Any]:
    """`values` by dotted name, as they are stored; dnn.conv.algo_bwd stands for the two flags it sets."""
    checked = {}
    for spelled, value in values.items():
        name = spelled.replace("__", ".")
        if name not in _FLAGS:
            raise ConfigError(f"unknown flag {spelled!r}; the flags are {', '.join(_FLAGS)}")
        try:
            checked[name] = _FLAGS[name].read(value)
        except (ValueError, TypeError):
            raise ConfigError(f"{name} is {value!r}; valid: {_FLAGS[name].valid}") from None
        if name == "dnn.conv.algo_bwd" and checked[name]:
            checked["dnn.conv.algo_bwd_filter"] = checked["dnn.conv.algo_bwd_data"] = checked[name]
    return checked


def _from_environment() -> dict[str, Any]:
    given = {}
    for item in filter(None, map(str.strip, _ENVIRONMENT["NBDNN_FLAGS"].split(","))):
        name, equals, value = item.partition("=")
        if not equals:
            raise ConfigError(f"NBDNN_FLAGS: {item!r} is not of the form flag=value")
        given[name.strip()] = value.strip()
    if _ENVIRONMENT["NBDNN_DB"]:
        given["tune.db"] = _ENVIRONMENT["NBDNN_DB"]
    return _checked(given)


def cache_dir() -> Path:
    """Where compiled kernels are kept: ``$NBDNN_CACHE_DIR``, else the user's cache folder."""
    if given := _ENVIRONMENT["NBDNN_CACHE_DIR"]:
        return Path(given)
    import platformdirs

    return Path(platformdirs.user_cache_dir("nbdnn"))


def record_file() -> str:
    """What the texts of problems are appended to: ``$NBDNN_RECORD``; empty where nobody records."""
    return _ENVIRONMENT["NBDNN_RECORD"]


def recording_to(file: Path) -> dict[str, str]:
    """The environment of a process that records there."""
    return {**os.environ, "NBDNN_RECORD": str(file)}


def numba_threads() -> int | None:
    """How many threads Numba was told to use, by ``$NUMBA_NUM_THREADS``; None where by nobody."""
    given = _ENVIRONMENT["NUMBA_NUM_THREADS"]
    if given and not (given.isdecimal() and int(given)):
        raise ConfigError(f"NUMBA_NUM_THREADS is {given!r}, expected a number of threads")
    return int(given) if given else None


def cuda_roots() -> dict[str, Path]:
    """Roots of installations of cuDNN and CUDA that the environment names, by variable."""
    return {name: Path(_ENVIRONMENT[name]) for name in _CUDA_ROOTS if _ENVIRONMENT[name]}


class Settings:
    """The value of every flag at one moment. Equal settings are one object, so that memos can go by identity."""

    _known: ClassVar[WeakValueDictionary[tuple, Settings]] = WeakValueDictionary()
    _being_made: ClassVar[threading.Lock] = threading.Lock()
    _values: dict[str, Any]

    def __new__(cls, values: dict[str, Any]) -> Settings:
        settings = super().__new__(cls)
        settings._values = values
        with cls._being_made:
            return cls._known.setdefault(tuple(values.items()), settings)

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def changed(self, values: dict[str, Any]) -> Settings:
        return Settings({**self._values, **values})


class Forgets(Protocol):
    """What a thread keeps for some flags."""

    def forget(self) -> None: ...


KeptT = TypeVar("KeptT", bound=Forgets)
_NOTHING: tuple[None, None, None] = (None, None, None)
_MAX_KEPT = 32  # a program whose flags never repeat must not grow for ever


class _Thread(threading.local):
    """The calling thread's changes; latest: the process's settings that they were last merged into, the result, and
    what is `kept` for that; kept: of every settings."""

    latest: tuple[Settings | None, Settings | None, Any] = _NOTHING
    changes: tuple[dict[str, Any], ...] = ()

    def __init__(self) -> None:
        self.kept: dict[Settings, Forgets] = {}


_thread = _Thread()
_process: Settings | None = None
_lock = reentrant_lock()


def current() -> Settings:
    """The flags as the calling thread sees them."""
    base, merged, _ = _thread.latest
    if merged is None or base is not _process:
        base, merged = _merged()
        _thread.latest = base, merged, None
    return merged


def kept(make: Callable[[Settings], KeptT]) -> KeptT:
    """What the calling thread keeps for the flags as it sees them now, which `make`, always the same, makes of them. On
    the path of a call."""
    base, _, found = _thread.latest
    if found is None or base is not _process:
        base, merged = _merged()
        found = _thread.kept.get(merged)
        if found is None:
            if len(_thread.kept) >= _MAX_KEPT:
                forget()
            found = _thread.kept[merged] = make(merged)
        _thread.latest = base, merged, found
    return found


def forget() -> None:
    """Keep nothing in the calling thread, for any flags."""
    while _thread.kept:
        _thread.kept.popitem()[1].forget()
    _thread.latest = _NOTHING


def _merged() -> tuple[Settings, Settings]:
    """The process's flags, and what the calling thread's changes make of them."""
    global _process
    with _lock:
        if _process is None:
            defaults = {name: flag.default for name, flag in _FLAGS.items()}
            _process = Settings({**defaults, **_from_environment()})
        base = merged = _process
    for change_ in _thread.changes:
        merged = merged.changed(change_)
    return base, merged


def set_flags(**values: Any) -> None:
    """Set flags for every thread of the process: ``set_flags(dnn__deterministic=True)``."""
    global _process
    checked = _checked(values)
    current()
    with _lock:
        _process = _process.changed(checked)  # type: ignore[union-attr]


@contextmanager
def change(**values: Any) -> Iterator[None]:
    """Set flags for the calling thread while the block runs: ``with change(dnn__conv__algo_fwd="time_once"):``.

    Blocks of one thread that do not end in turn, as those of coroutines, see each other's flags while both run.
    """
    mine = _checked(values)
    try:
        _thread.changes, _thread.latest = (*_thread.changes, mine), _NOTHING
        yield
    finally:
        others = tuple(each for each in _thread.changes if each is not mine)
        _thread.changes, _thread.latest = others, _NOTHING


def database_path(settings: Settings | None = None) -> Path:
    """The file of the tuning database: NBDNN_DB or the flag tune.db, else in the user data folder."""
    if path := (settings or current())["tune.db"]:
        return Path(path)
    from platformdirs import user_data_path

    return user_data_path("nbdnn", appauthor=False) / "tuning.db"


class _Section:
    """The flags that begin with one word, as attributes: ``nbdnn.config.dnn.conv.algo_fwd``."""

    def __init__(self, prefix: str) -> None:
        object.__setattr__(self, "_prefix", prefix)

    def __getattr__(self, word: str) -> Any:
        name = self._prefix + word.replace("__", ".")
        if name in _FLAGS:
            return current()[name]
        if any(flag.startswith(name + ".") for flag in _FLAGS):
            return _Section(name + ".")
        raise UnknownFlag(f"unknown flag {name!r}; the flags are {', '.join(_FLAGS)}")

    def __setattr__(self, word: str, value: Any) -> None:
        set_flags(**{self._prefix + word: value})

    def __dir__(self) -> list[str]:
        return [flag[len(self._prefix) :] for flag in _FLAGS if flag.startswith(self._prefix)]

    def __repr__(self) -> str:
        return "\n".join(f"{self._prefix}{word} = {getattr(self, word)!r}" for word in self.__dir__())


class _Module(ModuleType):
    """This module: the flags are attributes, and a misspelt one is an error instead of a silent new attribute."""

    def __getattr__(self, word: str) -> Any:
        if word.startswith("__"):
            raise AttributeError(word)
        return getattr(_Section(""), word)

    def __setattr__(self, word: str, value: Any) -> None:
        if word.startswith("_"):
            super().__setattr__(word, value)
        else:
            set_flags(**{word: value})


sys.modules[__name__].__class__ = _Module
