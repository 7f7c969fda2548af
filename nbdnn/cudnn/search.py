"""Where cuDNN may lie, and what is wrong with a file before it is opened.

Opening a broken cuDNN cannot be undone and may end the process: a missing libcudnn_graph or libcublasLt aborts it, and
the parts of a rejected library stay loaded and mix with those of the next. So whatever can be known from the file
system is checked here, each refusal in words that say what to mend.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from nbdnn import config

SONAME = "libcudnn.so.9"
# 3-D 16-bit convolutions were wrong in 9.8 to 9.14, and 3-D ones in TF32 up to 9.15.
OLDEST = 91600
# What the convolutions need of the library. Without libcudnn_graph it aborts instead of returning an error.
_PARTS = ("graph", "ops", "cnn", "engines_precompiled", "engines_runtime_compiled", "heuristic")
_HEADER_NUMBERS = re.compile(r"#define CUDNN_(?:MAJOR|MINOR|PATCHLEVEL)\s+(\d+)")


def places(chosen: str) -> Iterator[tuple[str, Path]]:
    """(why there, path of a library file) in the order of trial; `chosen` is the flag dnn.library_path."""
    if chosen:
        path = Path(chosen)
        yield "flag dnn.library_path", path if ".so" in path.name else _inside(path)
    roots = config.cuda_roots()
    if "CUDNN_PATH" in roots:
        yield "CUDNN_PATH", _inside(roots["CUDNN_PATH"])
    for folder in package_folders():
        yield "Python's packages", folder / "cudnn" / "lib" / SONAME
    for name, root in roots.items():
        if name != "CUDNN_PATH":
            yield name, _inside(root)
    for folder in _system_folders():
        yield "the system's libraries", folder / SONAME


def package_folders() -> list[Path]:
    """The folders that hold NVIDIA's Python packages."""
    return [folder for entry in dict.fromkeys(sys.path) if (folder := Path(entry, "nvidia")).is_dir()]


def refusal(path: Path) -> str:
    """Why the library at `path` cannot be used, judged without opening it; '' where nothing speaks against it."""
    if fault := _unreadable(path):
        return fault
    version = stated_version(path)
    if version is not None and version < OLDEST:
        return too_old(version)
    folder = path.resolve().parent
    for part in _PARTS:
        name = f"libcudnn_{part}.so.9"
        if fault := _unreadable(folder / name):
            return f"its part {name} in {folder}: {fault}"
    return ""


def too_old(version: int) -> str:
    return f"version {dotted(version)} is older than {dotted(OLDEST)}, whose 3-D convolutions are the first right ones"


def stated_version(path: Path) -> int | None:
    """The version that the file's name or the header beside it states, such as 91900; None where neither does."""
    numbers = re.findall(r"\d+", path.resolve().name.partition(".so.")[2])
    if len(numbers) < 3:
        for header in sorted(path.parent.parent.glob("include/cudnn_version*.h")):
            if len(numbers := _HEADER_NUMBERS.findall(header.read_text(errors="replace"))) == 3:
                break
        else:
            return None
    major, minor, patch = map(int, numbers[:3])
    return major * 10_000 + minor * 100 + patch


def dotted(version: int) -> str:
    """9.27.0 for 92700."""
    return f"{version // 10_000}.{version // 100 % 100}.{version % 100}"


def loaded(stem: str) -> Path | None:
    """The file behind a library that this process has loaded already, by the start of its name."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        path = line.partition("/")
        if path[1] and Path(path[2]).name.startswith(stem):
            return Path("/" + path[2])
    return None


def cuda_libraries(cudnn: Path, pattern: str) -> list[Path]:
    """Files of the CUDA toolkit's libraries that match `pattern`, those that were installed with cuDNN first."""
    folder = cudnn.resolve().parent
    folders = [folder, *(lib for packages in (folder.parents[1], *package_folders()) for lib in packages.glob("*/lib"))]
    folders += [root / lib for root in config.cuda_roots().values() for lib in ("lib64", "lib")]
    folders += _system_folders()
    return list(dict.fromkeys(path for folder in folders for path in sorted(folder.glob(pattern))))


def _inside(root: Path) -> Path:
    """The library in a folder or in its lib or lib64; where it is in none, where it was expected."""
    paths = [root / lib / SONAME for lib in ("", "lib", "lib64")]
    return next((path for path in paths if os.path.lexists(path)), paths[0])


def _unreadable(path: Path) -> str:
    if path.is_symlink() and not path.exists():
        return f"a link to {os.readlink(path)}, which does not exist"
    if not path.exists():
        return "no such file"
    if path.is_dir():
        return "a folder, not a file"
    return "" if os.access(path, os.R_OK) else "this user may not read it"


def _system_folders() -> list[Path]:
    """What the system's loader searches: its configured folders and the usual ones."""
    listed: list[str] = []
    for file in sorted(Path("/etc/ld.so.conf.d").glob("*.conf")):
        listed += [line for line in map(str.strip, file.read_text(errors="replace").splitlines()) if line[:1] == "/"]
    return [
        *map(Path, listed),
        Path(sys.prefix, "lib"),
        *map(Path, ("/usr/local/cuda/lib64", "/usr/lib64", "/usr/lib")),
    ]
