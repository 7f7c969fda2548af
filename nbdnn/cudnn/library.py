"""The loaded cuDNN: found, checked and opened at the first need, once in a process.

A cuDNN that the process has loaded already, PyTorch's for example, is used wherever it came from: the parts of a second
one would mix with its own. Else the places of `search.places` are tried in order. Whatever was tried and why it was
not used is kept for the message, for nobody can mend a path that is not named.
"""

from __future__ import annotations

import ctypes
import threading
from pathlib import Path
from typing import NamedTuple

from nbdnn import config
from nbdnn.cudnn import search
from nbdnn.errors import CudnnError

WHY = " (nbdnn info tells why)"  # where only the first line of an error is shown
_VERSION_CHECKS = ("cudnnGraphVersionCheck", "cudnnOpsVersionCheck", "cudnnCnnVersionCheck")


class MixedVersions(CudnnError):
    """Parts of different versions of cuDNN are installed in one place."""


class Tried(NamedTuple):
    """A file that was looked at, why there, and why it was not used ('' for the one that was)."""

    place: str
    path: Path
    reason: str

    def __str__(self) -> str:
        return f"{self.path} ({self.place}): {self.reason or 'opened'}"


class Library(NamedTuple):
    """An opened and checked cuDNN. version: 92700 for 9.27.0."""

    cdll: ctypes.CDLL
    path: Path
    version: int
    tried: tuple[Tried, ...]


class _Process:
    """What loading came to: a library or the error that says why there is none. Neither changes any more."""

    lock = threading.Lock()
    outcome: Library | CudnnError | None = None


def library() -> Library:
    """The process's cuDNN.

    Raises
    ------
    CudnnError
        Where there is none that works: every path that was tried, and what is wrong with it.
    """
    if _Process.outcome is None:
        with _Process.lock:
            if _Process.outcome is None:
                _Process.outcome = _load()
    if isinstance(_Process.outcome, CudnnError):
        raise type(_Process.outcome)(*_Process.outcome.args)
    return _Process.outcome


def loaded_version() -> int:
    """Version of the process's cuDNN; 0 where there is none that works."""
    try:
        return library().version
    except CudnnError:
        return 0


def _load() -> Library | CudnnError:
    tried: list[Tried] = []
    chosen = config.current()["dnn.library_path"]
    if there := search.loaded(search.SONAME):
        if chosen:
            reason = f"the process has loaded {there} before: the parts of two cuDNN libraries would mix"
            tried.append(Tried("flag dnn.library_path", Path(chosen), reason))
        places = iter([("loaded before by another library", there)])
    else:
        places = search.places(chosen)
    for place, path in places:
        reason = search.refusal(path)
        if not reason:
            try:
                opened = _opened(path)
            except OSError as error:  # not a library, or not for this machine: nothing was loaded
                reason = str(error)
            except CudnnError as error:  # parts of it are loaded by now, and would mix with those of another
                tried.append(Tried(place, path, str(error)))
                return _absent(tried, type(error))
            else:
                tried.append(Tried(place, path, ""))
                return Library(*opened, tuple(tried))
        tried.append(Tried(place, path, reason))
    return _absent(tried)


def _absent(tried: list[Tried], kind: type[CudnnError] = CudnnError) -> CudnnError:
    advice = f"no cuDNN that works here was found{WHY}: install nbdnn[cuda13] or nbdnn[cuda12]"
    return kind("\n".join([advice, *(f"  {each}" for each in tried)]))


def _opened(path: Path) -> tuple[ctypes.CDLL, Path, int]:
    """Open the library and what it opens later by itself, each checked first: a missing one would abort the process."""
    cdll = ctypes.CDLL(str(path))
    for name in ("cudnnGetVersion", "cudnnGetCudartVersion"):
        getattr(cdll, name).restype = ctypes.c_size_t
    version = cdll.cudnnGetVersion()
    if version < search.OLDEST:
        raise CudnnError(search.too_old(version))
    cuda_major = cdll.cudnnGetCudartVersion() // 1000
    _open_cublas_lt(path, cuda_major)
    _open_compiler(path, cuda_major)
    for name in _VERSION_CHECKS:
        if status := getattr(cdll, name)():
            raise MixedVersions(f"{name} gives {status}: {last_error(cdll) or 'its parts are of different versions'}")
    return cdll, path, version


def _open_cublas_lt(cudnn: Path, cuda_major: int) -> None:
    soname = f"libcublasLt.so.{cuda_major}"
    faults = []
    found = search.loaded(soname)
    for path in [found] if found else [*search.cuda_libraries(cudnn, soname), Path(soname)]:
        try:
            ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
            return
        except OSError as error:
            faults.append(str(error))
    raise CudnnError(f"{soname}, which it needs, cannot be opened ({'; '.join(faults)}): install nvidia-cublas")


def _open_compiler(cudnn: Path, cuda_major: int) -> None:
    """NVRTC, for the engines that are compiled at run time. Without it the other engines work."""
    if search.loaded("libnvrtc.so"):
        return
    for pattern in (f"libnvrtc-builtins.so.{cuda_major}*", f"libnvrtc.so.{cuda_major}"):
        for path in search.cuda_libraries(cudnn, pattern)[:1]:
            try:
                ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
            except OSError:
                return


def last_error(cdll: ctypes.CDLL) -> str:
    """cuDNN's own words for the calling thread's last error."""
    text = ctypes.create_string_buffer(2048)
    cdll.cudnnGetLastErrorString(text, ctypes.c_size_t(len(text)))
    return " ".join(text.value.decode(errors="replace").split())
