"""Honest versions: a hash of what the code says, over a module and every kernel module it imports.

The hash is of the parsed source without docstrings, so a comment, a reformatting or a better docstring keeps
measurements and compiled kernels valid, and any change of behaviour, also in an imported kernel module, does not.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import sys
import time
from functools import cache
from pathlib import Path
from types import ModuleType

_STARTED_S = time.time()
_KERNEL_PACKAGES = ("nbdnn.kernels", "nbdnn.cudnn")


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
        digest.update(reached.encode() + b"\0" + _parsed(reached)[0].encode() + b"\0")
    return digest.hexdigest()[:16]


def _reachable(name: str) -> set[str]:
    seen: set[str] = set()
    todo = [name]
    while todo:
        current = todo.pop()
        if current not in seen:
            seen.add(current)
            todo.extend(_parsed(current)[1])
    return seen


@cache
def _parsed(name: str) -> tuple[str, tuple[str, ...]]:
    """(dump of the syntax tree without docstrings, kernel modules imported) of a module."""
    tree = ast.parse(_source_path(name).read_bytes())
    imported: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            imported.update(_modules_of(node.module, [alias.name for alias in node.names]))
        elif isinstance(node, ast.Import):
            imported.update(alias.name for alias in node.names if _is_kernel(alias.name))
        _drop_docstring(node)
    return ast.dump(tree), tuple(sorted(imported))


def _source_path(name: str) -> Path:
    loaded = sys.modules.get(name)
    if loaded is not None and loaded.__file__:
        return Path(loaded.__file__)
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"no source for module {name}")
    return Path(spec.origin)


def _modules_of(package: str, names: list[str]) -> list[str]:
    if not _is_kernel(package):
        return []
    submodules = [f"{package}.{name}" for name in names]
    found = [m for m in submodules if _is_module(m)]
    return found if len(found) == len(names) else [package, *found]


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
