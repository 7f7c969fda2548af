"""What the documents show, works: code runs, commands parse, targets and links exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from nbdnn.cli import parser
from nbdnn.dispatch import registry
from nbdnn.problem import FAMILIES, parse
from nbdnn.problem_conv import CONV_OPS

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])


def blocks(document: Path, *languages: str) -> list[str]:
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", document.read_text(), re.MULTILINE | re.DOTALL)
    return [block for language, block in fenced if language in languages]


@pytest.mark.parametrize(("name", "least"), [("README.md", 4), ("docs/porting.md", 2), ("docs/ops.md", 1)])
def test_code_runs(name: str, least: int) -> None:
    namespace: dict[str, object] = {}
    code = blocks(ROOT / name, "python")
    assert len(code) >= least
    for block in code:
        exec(compile(block, name, "exec"), namespace)


def test_readme_lists_every_candidate() -> None:
    rows = re.findall(r"^\| `(cpu/\w+)` \| (.*?) ?\| (.+?) \|", (ROOT / "README.md").read_text(), re.MULTILINE)
    told = [(f"conv_{each}/{name}", method) for name, method, passes in rows for each in passes.split(", ")]
    assert len(told) == len(set(told))
    methods = {name: method.strip("'") for name, method, _ in rows}
    for op in CONV_OPS:
        ids = [candidate.id for candidate in registry.candidates(op)]
        assert [id for id, _ in told if id.startswith(f"{op}/")] == ids
        for candidate in registry.candidates(op):
            assert candidate.algo in (methods[candidate.id.partition("/")[2]], None)


def test_readme_lists_every_kernel_of_a_gpu() -> None:
    rows = re.findall(r"^\| `numba/(\w+)` \| (.*?) ?\| (.+?) \|", (ROOT / "README.md").read_text(), re.MULTILINE)
    told = {
        (f"conv_{each}", name, method.strip("'") or None)
        for name, method, passes in rows
        for each in passes.split(", ")
    }
    every = [c for op in CONV_OPS for c in registry.candidates(op, kind="cuda") if c.provider == "numba"]
    assert told == {(c.op, c.algorithm.removesuffix("_tf32"), c.algo) for c in every}


_HEADINGS = {"bn": "dnn_batch_normalization", "rnn": "RNNBlock"}


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {"conv"}))
def test_every_candidate_of_the_other_ops_is_in_a_table(family: str) -> None:
    sections = re.split(r"^## ", (ROOT / "docs/ops.md").read_text(), flags=re.MULTILINE)
    text = next(each for each in sections if _HEADINGS.get(family, f"dnn_{family}") in each.partition("\n")[0])
    every = [c for kind in ("cpu", "cuda") for op in FAMILIES[family] for c in registry.candidates(op, kind=kind)]
    names = {f"{c.provider}/{c.algorithm.removesuffix('_tf32')}" for c in every}
    assert {name for name in names if f"| `{name}`" not in text and f", `{name}`" not in text} == set()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_commands_parse_and_targets_exist(document: Path) -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for block in blocks(document, "sh", ""):
        for line in block.splitlines():
            words = shlex.split(re.split(r"\s{3,}|#", line)[0])
            if words[:1] == ["nbdnn"]:
                parser().parse_args(words[1:])
            if words[:1] == ["make"]:
                assert words[1] in targets


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_and_problem_texts_are_right(document: Path) -> None:
    text = document.read_text()
    for link in re.findall(r"\]\((?!http)([^)#]+)\)", text):
        assert (document.parent / link).exists(), link
    for problem in re.findall(r"conv_\w+:f\d+:[\w:.+]+", text):
        assert problem.endswith("...") or str(parse(problem)) == problem
