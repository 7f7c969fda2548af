"""What stands for a kernel's source: which changes it notices, and what a process takes from those before it."""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nbdnn import source

SOURCE = '"""A kernel."""\n\nfrom nbdnn.kernels import cpu\n\n\ndef twice(x):\n    """2 x."""\n    return x + x\n'


@pytest.fixture
def hashed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], str]]:
    """The hash of a module of this text, as a new process would find it."""
    monkeypatch.setattr(source, "_path", lambda: tmp_path / "sources.json")

    def restart() -> None:
        for kept in (source._hash_of, source._parsed, source._on_disk):
            kept.cache_clear()

    def of_text(text: str) -> str:
        (tmp_path / "twice.py").write_text(text)
        spec = importlib.util.spec_from_file_location("twice", tmp_path / "twice.py")
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "twice", module)
        restart()
        return source.transitive_hash(module)

    yield of_text
    restart()


@pytest.mark.parametrize(
    "old, new, same",
    [
        ("A kernel", "A fast kernel", True),
        ("2 x.", "Twice.", True),
        ("return x + x", "return (x\n            + x)  # both", True),
        ("x + x", "x * x", False),
        ("import cpu", "import cuda", False),
    ],
)
def test_what_a_change_changes(hashed: Callable[[str], str], old: str, new: str, same: bool) -> None:
    before = hashed(SOURCE)
    assert old in SOURCE
    assert (hashed(SOURCE.replace(old, new)) == before) is same


def test_a_later_process_parses_only_what_is_new(hashed: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> None:
    before, parse = hashed(SOURCE), ast.parse
    parsed: list[bytes] = []
    monkeypatch.setattr(ast, "parse", lambda content: parsed.append(content) or parse(content))
    assert hashed(SOURCE) == before and not parsed
    edited = SOURCE.replace("x + x", "3 * x")
    after = hashed(edited)
    assert after != before and parsed == [edited.encode()]
    assert hashed(edited) == after and len(parsed) == 1


@pytest.mark.parametrize("kept", [0, 1, 64, 65, 66, -1])
def test_what_is_cut_off_is_parsed_again(hashed: Callable[[str], str], tmp_path: Path, kept: int) -> None:
    before, file = hashed(SOURCE), tmp_path / "sources.json"
    whole = file.read_bytes()
    file.write_bytes(whole[:kept])
    assert hashed(SOURCE) == before
    assert file.read_bytes() == whole


def test_one_wrong_bit_is_noticed(hashed: Callable[[str], str], tmp_path: Path) -> None:
    """Of what is imported, which costs the program; of a hash, which would pass for another kernel's."""
    before, file = hashed(SOURCE), tmp_path / "sources.json"
    whole = file.read_bytes()
    for word in (b"nbdnn.kernels", source._parsed("twice").tree_hash.encode(), b"cpu"):
        damaged = bytearray(whole)
        damaged[whole.index(word)] ^= 1
        file.write_bytes(damaged)
        assert hashed(SOURCE) == before
        assert file.read_bytes() == whole


def test_another_reader_has_a_file_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What reads sources differently shall not take what this one found."""
    ours = source._path()
    other = tmp_path / "source.py"
    other.write_bytes(Path(source.__file__).read_bytes() + b"# changed\n")
    monkeypatch.setattr(source, "__file__", str(other))
    assert source._path() != ours


def test_where_nothing_can_be_kept_each_process_parses(
    hashed: Callable[[str], str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(source, "_path", lambda: tmp_path / "file" / "sources.json")
    before = hashed(SOURCE)
    assert hashed(SOURCE) == before
    assert hashed(SOURCE.replace("x + x", "3 * x")) != before


def test_every_module_that_a_kernel_imports_counts() -> None:
    from nbdnn.kernels.cuda import conv_depthwise

    reached = source._reachable(conv_depthwise.__name__)
    assert {"nbdnn.kernels.cuda.ptx", "nbdnn.kernels.cuda.division", "nbdnn.kernels.cuda.depthwise_tile"} <= reached
