"""The cache of CUDA kernels: what one process compiled the next one loads, without a compiler."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
from gpus import H200

from nbdnn import config
from nbdnn.errors import CudaError, NbdnnWarning
from nbdnn.kernels.cuda import compile as cuda_compile
from nbdnn.kernels.cuda import conv_direct, inlining, spatialtf_direct
from nbdnn.kernels.cuda.compile import Source, cache_dir, compile_kernel, ptx_text
from nbdnn.problem import parse

pytestmark = pytest.mark.usefixtures("numba_cuda")

PREPARE = """
import sys
from nbdnn.kernels.cuda import conv_direct
from nbdnn.kernels.cuda.compile import compile_kernel
from nbdnn.problem import parse

for candidate in (conv_direct.FWD, conv_direct.BWD_FILTER):
    problem = parse(candidate.op + ":bf16:n1c16h8w24:k32r3s3:p1x1:u1x1:d1x1:g1:cross:nhwc")
    for launch in candidate.launches(problem, (), None):
        print(compile_kernel(launch.source, "sm_90a").digest)
print([name for name in ("numba", "llvmlite", "cuda.bindings") if name in sys.modules])
"""


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder without kernels, for a process that knows none."""
    monkeypatch.setattr(cuda_compile, "cache_dir", lambda: tmp_path / "cuda")
    monkeypatch.setattr(cuda_compile, "_kernels", {})
    return tmp_path / "cuda"


def direct() -> Source:
    problem = parse("conv_fwd:f32:n1c16h8w24:k32r3s3:p1x1:u1x1:d1x1:g1:cross:nchw")
    (launch,) = conv_direct.FWD.launches(problem, conv_direct.FWD.configs(problem, None)[0], None)
    return launch.source


def test_a_process_compiles_as_many_kernels_as_it_likes(empty_cache: Path) -> None:
    """numba-cuda numbers blocks on and on: NVVM refused those of numbers with thousands of digits."""
    from numba.cuda.core import ir_utils

    ir_utils._the_max_label.update(10**6000)
    assert compile_kernel(direct(), "sm_90a").cubin


@pytest.mark.parametrize("known", [True, False])
def test_inlining_once_changes_no_instruction(known: bool, empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a kernel that inlines what inlines others, several times each; and of a numba-cuda that is not known."""
    from numba.cuda.core import inline_closurecall, ir

    def parts() -> list:
        worker = vars(inline_closurecall.InlineWorker)
        copied = [vars(kind).get("__deepcopy__") for kind in (ir.Var, ir.Loc, ir.Scope)]
        return [inline_closurecall.copy, worker["inline_ir"], worker["run_untyped_passes"], *copied]

    def instructions() -> str:
        cuda_compile._ltoir.cache_clear()
        return re.sub(r"_Z\w+|__local_depot\d+", "", ptx_text(source, "sm_90a"))

    problem = parse("spatialtf_fwd:f32:n2c3h8w8:o8x8:nchw")
    (launch,) = spatialtf_direct.FWD.launches(problem, spatialtf_direct.FWD.configs(problem, H200)[0], H200)
    source, before, entered = launch.source, parts(), []
    if not known:
        monkeypatch.setattr(inlining, "_READ", ["self"])
    monkeypatch.setattr(inlining, "_once", lambda read, once=inlining._once: entered.append(1) or once(read))
    found = instructions()
    assert parts() == before and bool(entered) == known
    monkeypatch.setattr(cuda_compile, "inlined_once", nullcontext)
    assert found == instructions()


def test_kernels_wait_for_what_is_before_them_on_the_stream() -> None:
    """Before anything else, on GPUs whose launches overlap; others do not know the instruction."""
    for arch, waits in (("sm_80", 0), ("sm_90a", 1), ("sm_100a", 1), ("sm_120", 1)):
        text = ptx_text(direct(), arch)
        assert text.count("griddepcontrol.wait") == waits
        if waits:
            before, _, _ = text.partition("griddepcontrol.wait")
            assert not re.search(r"\b(ld|st|red|atom|cp)\.(?!param)", before)


def test_a_second_process_compiles_nothing_and_imports_no_compiler(tmp_path: Path) -> None:
    def printed() -> list[str]:
        environment = {**os.environ, "NBDNN_CACHE_DIR": str(tmp_path)}
        command = [sys.executable, "-c", PREPARE]
        done = subprocess.run(command, env=environment, check=True, timeout=300, capture_output=True, text=True)
        return done.stdout.splitlines()

    *first, compilers = printed()
    assert compilers == "['numba', 'llvmlite', 'cuda.bindings']"
    files = set(tmp_path.rglob("*"))
    *second, compilers = printed()
    assert compilers == "[]"
    assert second == first
    assert set(tmp_path.rglob("*")) == files
    assert len([file for file in files if file.suffix == ".kernel"]) == 2


@pytest.mark.parametrize("damage", ["emptied", "cut", "one bit", "foreign"])
def test_a_damaged_file_costs_a_compilation(
    damage: str, empty_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kernel = compile_kernel(direct(), "sm_90a")
    (path,) = empty_cache.iterdir()
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[-1000] ^= 1
    path.write_bytes({"emptied": b"", "cut": whole[:-1], "one bit": flipped, "foreign": b"[1]\nnothing"}[damage])
    monkeypatch.setattr(cuda_compile, "_kernels", {})
    with caplog.at_level(logging.WARNING, "nbdnn"):
        again = compile_kernel(direct(), "sm_90a")
    assert "compiling again" in caplog.text
    assert again[2:] == kernel[2:]
    assert cuda_compile._load(path) == again


def test_a_file_names_what_it_was_compiled_for(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = direct()
    compile_kernel(source, "sm_90a")
    compile_kernel(source, "sm_80")
    compile_kernel(source._replace(min_blocks=8), "sm_80")
    assert len(list(empty_cache.iterdir())) == 3
    monkeypatch.setattr(cuda_compile, "_compilers", lambda: (("numba", "0.0"),))
    monkeypatch.setattr(cuda_compile, "_kernels", {})
    compile_kernel(source, "sm_80")
    assert len(list(empty_cache.iterdir())) == 4


def test_a_folder_that_cannot_be_written_costs_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(cuda_compile, "cache_dir", lambda: tmp_path / "file")
    monkeypatch.setattr(cuda_compile, "_kernels", {})
    with pytest.warns(NbdnnWarning, match="cannot be kept"):
        assert compile_kernel(direct(), "sm_90a").cubin


def test_a_source_edited_meanwhile_is_not_kept(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cuda_compile, "changed_since_start", lambda module: True)
    with caplog.at_level(logging.WARNING, "nbdnn"):
        assert compile_kernel(direct(), "sm_90a").cubin
    assert "has changed since" in caplog.text
    assert not empty_cache.exists()


def _careless(*_: object):
    from nbdnn.kernels.cuda import ptx

    def kernel(x):
        x[0] = x.no_such_attribute

    return kernel, (ptx.pointer("f32"),)


def _of_a_later_architecture(*_: object):
    from nbdnn.kernels.cuda import ptx

    real = ptx.REAL["f32"]
    later = ptx.conversion("setmaxnreg.inc.sync.aligned.u32 232; mov.b32 $0, $1;", "=f,f", real, real)

    def kernel(x):
        x[0] = later(x[0])

    return kernel, (ptx.pointer("f32"),)


def test_what_does_not_compile_says_why(empty_cache: Path) -> None:
    with pytest.raises(
        CudaError, match=r"(?s)test_cuda_compile-careless does not compile for sm_80.*no_such_attribute"
    ):
        compile_kernel(Source(_careless, (), 32), "sm_80")
    with pytest.raises(CudaError, match=r"(?s)nvJitLink: test_cuda_compile-of_a_later.*sm_80.*setmaxnreg"):
        compile_kernel(Source(_of_a_later_architecture, (), 32), "sm_80")


def test_sources_differ_by_what_they_are_specialised_on(empty_cache: Path) -> None:
    source = direct()
    other = source._replace(specialised_on=source.specialised_on._replace(out_channels_last=True))
    assert compile_kernel(source, "sm_90a").digest != compile_kernel(other, "sm_90a").digest
    assert len(list(empty_cache.iterdir())) == 2


def test_cache_lies_beside_that_of_the_cpu() -> None:
    assert cache_dir() == config.cache_dir() / "cuda"
