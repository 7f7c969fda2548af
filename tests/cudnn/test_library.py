"""cuDNN is found where it is, and where it is not usable the message says which file is at fault and why."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import mkdtemp

import pytest
from gpus import H200
from stand_ins import fake_cudnn

from nbdnn.cudnn import api, search
from nbdnn.cudnn.conv_graph import FWD
from nbdnn.cudnn.library import _Process as Process
from nbdnn.cudnn.library import library
from nbdnn.cudnn.search import SONAME, refusal
from nbdnn.errors import CudnnError
from nbdnn.problem import parse

# A process loads cuDNN once: each case has its own.
_LOAD = """
import json, sys
{before}
from nbdnn.cudnn.library import library, loaded_version
from nbdnn.errors import CudnnError
try:
    found = library()
    print(json.dumps([found.version, str(found.path), list(map(str, found.tried))]))
except CudnnError as error:
    try:
        library()
    except CudnnError as again:
        assert str(again) == str(error) and again is not error and loaded_version() == 0
        print(json.dumps([type(error).__name__, str(error)]))
"""
_ROOTS = ("CUDNN_PATH", "CUDA_HOME", "CUDA_ROOT", "CUDA_PATH", "CONDA_PREFIX")
_NOBODY = 65534


def load(chosen: Path | str = "", before: str = "", **environment: str) -> list:
    """[version, path, tried] of what a fresh process loads, or [kind of error, message]."""
    others = {name: value for name, value in os.environ.items() if name not in _ROOTS}
    variables = {**others, "NBDNN_FLAGS": f"dnn.library_path={chosen}", **environment}
    command = [sys.executable, "-c", _LOAD.format(before=before)]
    run = subprocess.run(command, env=variables, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def linked(folder: Path, *missing: str) -> Path:
    """A folder with links to every part of the installed cuDNN but the missing ones."""
    for file in library().path.resolve().parent.iterdir():
        if file.name not in missing:
            (folder / file.name).symlink_to(file)
    return folder


def test_the_installed_one_is_loaded() -> None:
    version, path, tried = load()
    assert (version, path) == (library().version, str(library().path))
    assert version >= search.OLDEST and tried[-1] == f"{path} (Python's packages): opened"


@pytest.mark.parametrize("named", ["file", "folder", "lib", "lib64"])
def test_the_flag_goes_first(tmp_path: Path, named: str) -> None:
    folder = tmp_path / named if named.startswith("lib") else tmp_path
    folder.mkdir(exist_ok=True)
    path = linked(folder) / SONAME
    _, used, tried = load(path if named == "file" else tmp_path)
    assert used == str(path) and tried == [f"{path} (flag dnn.library_path): opened"]


@pytest.mark.parametrize("variable", _ROOTS)
def test_roots_in_the_environment(tmp_path: Path, variable: str) -> None:
    path = linked(tmp_path) / SONAME
    no_packages = "from nbdnn.cudnn import search; search.package_folders = lambda: []"
    _, used, tried = load(before=no_packages, **{variable: str(tmp_path)})
    assert used == str(path) and tried == [f"{path} ({variable}): opened"]


def test_one_that_the_process_has_loaded_wins(tmp_path: Path) -> None:
    installed = library().path
    _, used, tried = load(linked(tmp_path), before=f"import ctypes; ctypes.CDLL({str(installed)!r})")
    assert used == str(installed) and tried[-1].endswith("(loaded before by another library): opened")
    assert f"has loaded {installed} before" in tried[0] and str(tmp_path) in tried[0]


def test_a_link_to_nowhere(tmp_path: Path) -> None:
    (tmp_path / SONAME).symlink_to("gone/libcudnn.so.9.27.0")
    version, _, tried = load(tmp_path)
    assert tried[0].endswith("a link to gone/libcudnn.so.9.27.0, which does not exist")
    assert version == library().version  # the next in order is taken


def test_no_file_and_no_folder(tmp_path: Path) -> None:
    assert refusal(tmp_path / SONAME) == "no such file"
    (tmp_path / SONAME).mkdir()
    assert refusal(tmp_path / SONAME) == "a folder, not a file"


def test_a_file_that_may_not_be_read() -> None:
    folder = Path(mkdtemp(prefix="nbdnn-unreadable-"))
    path = folder / SONAME
    path.touch()
    try:
        folder.chmod(0o755)
        path.chmod(0)
        said = _said_to_nobody(path) if os.getuid() == 0 else refusal(path)
        assert said == "this user may not read it"
    finally:
        shutil.rmtree(folder)


def _said_to_nobody(path: Path) -> str:
    """The refusal that a user without rights gets; root may read everything."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.setuid(_NOBODY)
        os.write(writing, refusal(path).encode())
        os._exit(0)
    os.waitpid(child, 0)
    return os.read(reading, 1000).decode()


@pytest.mark.parametrize("part", ["graph", "ops", "engines_precompiled"])
def test_a_missing_part(tmp_path: Path, part: str) -> None:
    """Without libcudnn_graph the real library aborts the process at its first call."""
    name = f"libcudnn_{part}.so.9"
    shutil.copy(library().path, linked(tmp_path, SONAME, name) / SONAME)
    _, _, tried = load(tmp_path)
    assert tried[0].endswith(f"its part {name} in {tmp_path}: no such file")


def test_a_part_that_is_a_link_to_nowhere(tmp_path: Path) -> None:
    name = "libcudnn_graph.so.9"
    shutil.copy(library().path, linked(tmp_path, SONAME, name) / SONAME)
    (tmp_path / name).symlink_to("gone.so")
    assert refusal(tmp_path / SONAME) == f"its part {name} in {tmp_path}: a link to gone.so, which does not exist"


def test_too_old_by_the_name_of_its_file(tmp_path: Path) -> None:
    fake_cudnn(tmp_path).rename(tmp_path / "libcudnn.so.9.14.0")
    (tmp_path / SONAME).symlink_to("libcudnn.so.9.14.0")
    _, _, tried = load(tmp_path)
    assert "version 9.14.0 is older than 9.16.0" in tried[0] and tried[-1].endswith("opened")


def test_too_old_by_the_header_beside_it(tmp_path: Path) -> None:
    for folder in ("include", "lib"):
        (tmp_path / folder).mkdir()
    numbers = {"MAJOR": 9, "MINOR": 15, "PATCHLEVEL": 1}
    header = "\n".join(f"#define CUDNN_{name} {number}" for name, number in numbers.items())
    (tmp_path / "include" / "cudnn_version_v9.h").write_text(header)
    assert "version 9.15.1 is older" in refusal(fake_cudnn(tmp_path / "lib"))


def test_the_installed_ones_header_states_its_version() -> None:
    assert search.stated_version(library().path) == library().version


def test_too_old_by_its_own_word(tmp_path: Path) -> None:
    """It is in the process by then, and the next one's parts would mix with its own: the search ends."""
    fake_cudnn(tmp_path, version=91400)
    kind, message = load(tmp_path)
    assert kind == "CudnnError" and "version 9.14.0 is older than 9.16.0" in message and str(tmp_path) in message


def test_a_missing_cublas_lt(tmp_path: Path) -> None:
    """The real library aborts the process when it needs it."""
    fake_cudnn(tmp_path, cudart=99000)
    kind, message = load(tmp_path)
    assert kind == "CudnnError" and "libcublasLt.so.99, which it needs, cannot be opened" in message


def test_parts_of_different_versions(tmp_path: Path) -> None:
    fake_cudnn(tmp_path, cudart=library().cdll.cudnnGetCudartVersion(), ops_status=1002)
    kind, message = load(tmp_path)
    assert kind == "MixedVersions" and "cudnnOpsVersionCheck gives 1002: ops is 9.14.0" in message


def test_a_file_that_is_no_library(tmp_path: Path) -> None:
    (linked(tmp_path, SONAME) / SONAME).write_text("<html>not found</html>" * 100)
    _, _, tried = load(tmp_path)
    assert "invalid ELF header" in tried[0] and tried[-1].endswith("opened")


def test_what_it_opens_later_is_loaded_with_it() -> None:
    assert library() is library()
    assert all(map(search.loaded, (SONAME, "libcublasLt.so", "libnvrtc.so")))


def test_candidates_say_in_a_line_that_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message lists every path that was tried; a refusal is one line of a table."""
    absent = CudnnError("no cuDNN that works here was found\n  /nowhere: no such file")
    monkeypatch.setattr(Process, "outcome", absent)
    api.function.cache_clear()
    problem = parse("conv_fwd:f32:n7c2h8w8:k3r3s3:p1x1:u1x1:d1x1:g1:cross:nchw")
    assert FWD[0].supports(problem, H200) == (False, "no cuDNN that works here was found")
    assert FWD[0].cudnn_version == 0
