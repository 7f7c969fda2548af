"""Honest versions: a hash of what the code says, over a module and every kernel module it imports.

The hash is of the parsed source without docstrings, so a comment, a reformatting or a better docstring keeps
measurements and compiled kernels valid, and any change of behaviour, also in an imported kernel module, does not.

Parsing takes a second for all kernels, so what it found is kept on disk beside a hash of the file's bytes, sealed: it
stands between a user and stale kernels.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
import sys
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from nbdnn import config
from nbdnn.kept import sealed, unsealed, write_whole

_STARTED_S = time.time()
_KERNEL_PACKAGES = ("nbdnn.kernels", "nbdnn.cudnn")


class _Parsed(NamedTuple):
    """What a module's source says: hashes of its bytes and of its syntax tree without docstrings; what it imports, as
    pairs of a module and the names taken from it."""

    bytes_hash: str
    tree_hash: str
    imports: list[tuple[str, list[str]]]


def transitive_hash(module: ModuleType) -> str:
    """16 hex digits over `module` and the kernel modules it reaches by import, in sorted order."""
    return _hash_of(module.__name__)


def changed_since_start(module: ModuleType) -> bool:
    """Whether a source file behind `transitive_hash` is newer than this process: it may not be what was imported."""
    return any(_source_path(name).stat().st_mtime > _STARTED_S for name in _reachable(module.__name__))


@cache
def _hash_of(name: str) -> str:
    digest = hashlib.sha256()
    for reached in sorted(_reachable(name)):
        digest.update(f"{reached} {_parsed(reached).tree_hash} ".encode())
    _keep_parsed()
    return digest.hexdigest()[:16]


def _reachable(name: str) -> set[str]:
    seen: set[str] = set()
    todo = [name]
    while todo:
        current = todo.pop()
        if current not in seen:
            seen.add(current)
            todo.extend(name for module, names in _parsed(current).imports for name in _modules_of(module, names))
    return seen


@cache
def _parsed(name: str) -> _Parsed:
    content = _source_path(name).read_bytes()
    bytes_hash = hashlib.sha256(content).hexdigest()
    known = _on_disk().get(name)
    return known if known and known.bytes_hash == bytes_hash else _new.setdefault(name, _parse(bytes_hash, content))


def _parse(bytes_hash: str, content: bytes) -> _Parsed:
    tree = ast.parse(content)
    imports: list[tuple[str, list[str]]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0 and _is_kernel(node.module):
            imports.append((node.module, [alias.name for alias in node.names]))
        elif isinstance(node, ast.Import):
            imports += [(alias.name, []) for alias in node.names if _is_kernel(alias.name)]
        _drop_docstring(node)
    return _Parsed(bytes_hash, hashlib.sha256(ast.dump(tree).encode()).hexdigest(), imports)


_new: dict[str, _Parsed] = {}  # parsed by this process, and not on disk yet


def _path() -> Path:
    """One for each Python, whose syntax trees are its own, and each text of this module, which reads them."""
    reader = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:8]
    return config.cache_dir() / f"sources-{sys.hexversion:x}-{reader}.json"


@cache
def _on_disk() -> dict[str, _Parsed]:
    """What processes before this one parsed; nothing where that cannot be read or is damaged."""
    with suppress(OSError):
        if (text := unsealed(_path().read_bytes())) is not None:
            return {name: _Parsed(*found) for name, found in json.loads(text).items()}
    return {}


def _keep_parsed() -> None:
    """Kept for the next process; where that cannot be done it parses as well."""
    if _new:
        _on_disk.cache_clear()
        with suppress(OSError):
            write_whole(_path(), sealed(json.dumps({**_on_disk(), **_new}).encode()))
        _on_disk().update(_new)
        _new.clear()


def _source_path(name: str) -> Path:
    loaded = sys.modules.get(name)
    if loaded is not None and loaded.__file__:
        return Path(loaded.__file__)
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"no source for module {name}")
    return Path(spec.origin)


def _modules_of(package: str, names: list[str]) -> list[str]:
    """The modules of `from package import names`, or of `import package` where there are none."""
    submodules = [f"{package}.{name}" for name in names]
    found = [m for m in submodules if _is_module(m)]
    return found if names and len(found) == len(names) else [package, *found]


def _is_module(name: str) -> bool:
    """Whether a module of this package exists: by its file, for importing its parents may load a compiler."""
    path = Path(__file__).parent.joinpath(*name.split(".")[1:])
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def _is_kernel(name: str) -> bool:
    return any(name == package or name.startswith(package + ".") for package in _KERNEL_PACKAGES)


def _drop_docstring(node: ast.AST) -> None:
    if (
        isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
        and isinstance(node.body[0].value, ast.Constant)
        and isinstance(node.body[0].value.value, str)
    ):
        node.body = node.body[1:] or [ast.Pass()]
