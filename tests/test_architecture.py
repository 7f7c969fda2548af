"""The rules of the house that a reader relies on: imports point one way, and importing nbdnn loads next to nothing."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import nbdnn

ROOT = Path(nbdnn.__file__).parent
LEAVES = (
    "array",
    "array_cuda",
    "array_cupy",
    "array_jax",
    "array_numpy",
    "array_torch",
    "cached",
    "candidate",
    "config",
    "device",
    "device_array",
    "driver",
    "errors",
    "expected",
    "interrupt",
    "kept",
    "locks",
    "problem",
    "reference",
    "rnn_parameters",
    "source",
    "tolerance",
    "workload_onnx",
    "workload_onnx_nodes",
    "workloads",
)
# A family of ops has one of each: problem_conv, reference_conv, edges_conv.
LEAF_FAMILIES = ("edges_", "problem_", "reference_")
MODULES = sorted(
    ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__")
    for path in ROOT.rglob("*.py")
)


def rank(module: str) -> int:
    """0 leaves, 1 kernels and cudnn, 2 dispatch, 3 public modules and ops, 4 the command line."""
    _, _, name = module.partition(".")
    top = name.partition(".")[0]
    if top in LEAVES or top.startswith(LEAF_FAMILIES):
        return 0
    if top in ("kernels", "cudnn"):
        return 1
    if top == "dispatch":
        return 2
    return 4 if top.startswith(("cli", "__main__")) else 3


def imports(module: str) -> Iterator[str]:
    """The nbdnn modules that `module` imports anywhere, also inside functions; not for type checkers only."""
    path = ROOT.parent / Path(*module.split("."))
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    todo: list[ast.AST] = [ast.parse(source.read_text())]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        todo += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("nbdnn"))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("nbdnn"):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in MODULES else node.module or "" for name in names)


@pytest.mark.parametrize("module", [m for m in MODULES if m != "nbdnn"])
def test_imports_point_one_way(module: str) -> None:
    upwards = [name for name in imports(module) if name != "nbdnn" and rank(name) > rank(module)]
    assert not upwards, f"{module} imports {', '.join(upwards)}"


def test_only_config_reads_the_environment() -> None:
    readers = {path.name for path in ROOT.rglob("*.py") if re.search(r"os\.(environ|getenv)", path.read_text())}
    assert readers == {"config.py"}


def test_importing_nbdnn_loads_no_compiler_and_no_array_library_but_numpy() -> None:
    heavy = ("numba", "llvmlite", "cuda.bindings", "torch", "jax", "cupy", "sqlite3", "rich", "ml_dtypes", "onnx")
    code = f"import sys, nbdnn; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_the_list_of_candidates_loads_nothing_of_cuda() -> None:
    """Also where there is no CUDA: its candidates import what they need when they prepare."""
    code = """if True:
        import sys
        from nbdnn.dispatch import registry
        from nbdnn.problem import FAMILIES
        assert all(registry.table("cuda", family).by_id for family in FAMILIES)
        print([name for name in ("cuda.bindings", "numba") if name in sys.modules])"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_numba_cuda_is_touched_in_few_places() -> None:
    """It is only maintained: a move to its successor must not go through every kernel."""
    kernels = (ROOT / "kernels").rglob("*.py")
    touching = {path.name for path in kernels if re.search(r"numba\.cuda|numba import cuda", path.read_text())}
    assert {name for name in touching if not name.startswith("ptx")} == {"compile.py", "inlining.py"}


def test_tests_of_other_libraries_run_where_these_are() -> None:
    """`make test` skips them, and what installs a library runs the tests with its fixture: what imported one by itself
    would be skipped everywhere."""
    tests = ROOT.parent / "tests"
    pattern = r"importorskip|find_spec|^ *(from libraries|import (torch|jax|numba_cuda)\b)"
    found = {str(path.relative_to(tests)) for path in tests.rglob("*.py") if re.search(pattern, path.read_text(), re.M)}
    mine = "test_architecture.py"
    assert {name for name in found if not name.startswith("gpu/")} == {
        "conftest.py",
        "libraries.py",
        "cudnn/conftest.py",
        mine,
    }


def test_everything_public_is_there_and_documented() -> None:
    for name in nbdnn.__all__:
        assert getattr(nbdnn, name).__doc__, f"nbdnn.{name} has no docstring"


def test_no_module_is_a_drawer() -> None:
    drawers = {"utils", "helpers", "common", "manager", "misc"}
    assert not [m for m in MODULES if m.rpartition(".")[2] in drawers]


def test_what_is_loaded_late_has_types_all_the_same() -> None:
    (late,) = (node for node in ast.parse((ROOT / "__init__.py").read_text()).body if isinstance(node, ast.If))
    imported = [each for each in late.body if isinstance(each, ast.ImportFrom)]
    assert {alias.name: each.module for each in imported for alias in each.names} == nbdnn._LAZY | {"ops": "nbdnn"}
