"""The command line as a user meets it: tables, exit codes, one-line errors, interruptions."""

from __future__ import annotations

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
import warnings
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from nbdnn import config
from nbdnn.cli import main
from nbdnn.errors import NbdnnWarning
from nbdnn.kernels.cpu.softmax_rows import Rows
from nbdnn.problem_softmax import SoftmaxProblem

PROBLEM = "conv_fwd:f32:n1c8h10w12:k8r3s3:p1x1:u1x1:d1x1:g1:cross:nchw"
ANOTHER = "conv_bwd_data:f32:n1c8h10w12:k8r3s3:p1x1:u1x1:d1x1:g1:cross:nchw"
COMMANDS = ("autotune", "bench", "explain")


def nbdnn(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, with pipes instead of a terminal."""
    return subprocess.run([sys.executable, "-m", "nbdnn", *arguments], capture_output=True, text=True, timeout=120)


@pytest.fixture
def db(tmp_path: Path) -> str:
    return str(tmp_path / "cli.db")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "arguments are required: COMMAND"),
        (["tune"], "invalid choice: 'tune'"),
        (["autotune"], "arguments are required: TARGET"),
        (["autotune", "resnet51"], r"'resnet51' is not a workload \(resnet50, "),
        (["autotune", "resnet50", "--batch", "0"], "argument --batch: '0' is not a whole number"),
        (["autotune", "resnet50", "--budget", "-1"], "argument --budget: '-1' is not a number of seconds"),
        (["autotune", "resnet50", "--dtype", "int8"], "argument --dtype: invalid choice: 'int8'"),
        (["autotune", "resnet50", "--only", "17x17"], "none of 38 problems matches --only '17x17'"),
        (["explain", "conv_fdw:f32:n1"], "unknown op 'conv_fdw' in 'conv_fdw:f32:n1': expected one of conv_fwd"),
        (
            ["explain", PROBLEM, "--dtype", "bf16"],
            "--dtype is of workloads and models: a problem's text says it itself",
        ),
        (["bench", PROBLEM, "--train"], "--train is of workloads and models"),
        (["explain", "nowhere.txt"], "error: there is no file nowhere.txt$"),
        (["explain", "/nowhere/problems"], "error: there is no file /nowhere/problems$"),
        (["explain", str(Path(__file__).parent)], "tests is not a file, but a folder$"),
        (["explain", "conv_fwd:f32:n1"], "'n1' in 'conv_fwd:f32:n1': expected dims"),
        (["explain", PROBLEM.replace("f32", "f31")], "error: dtype 'f31' is not one of f16"),
        (["explain", PROBLEM.replace("n1", "n0")], r"no work for anybody: x has shape \(0, 8, 10, 12\)"),
        (["autotune", PROBLEM.replace("k8", "k0")], r"no work for anybody: w has shape \(0, 8, 3, 3\)"),
        (["bench", PROBLEM.replace("g1", "g3")], "8 is not a multiple of groups 3"),
        (["info", "--device", "tpu"], "device 'tpu' is not cpu, cuda or cuda:N"),
        (["info", "resnet50"], "unrecognized arguments: resnet50"),
        (["record"], "no program to run"),
        (["record", "-o", os.devnull, "--", "/nowhere/program"], "error: /nowhere/program: No such file or directory$"),
        (["record", "-o", "/nowhere/problems", "--", "true"], "error: /nowhere/problems: No such file or directory$"),
        (["record", "-o", __file__, "--", "true"], r"test_cli.py, line 1: unknown op "),
        (["db"], "arguments are required"),
        (["db", "forget", "conv"], "unknown op 'conv' in 'conv': expected one of conv_fwd"),
        (["db", "import", "/nowhere/tuned"], "error: /nowhere/tuned: No such file or directory$"),
    ],
)
def test_every_error_is_one_line_and_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(r"nbdnn: error: [^\n]*\n", err), err
    assert re.search(message, err)


def test_errors_in_a_file_name_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    problems = tmp_path / "problems.txt"
    problems.write_text(f"# first a good one\n{PROBLEM}\n\n{PROBLEM.replace('k8', 'x8')}\n")
    assert main(["explain", str(problems)]) == 2
    assert f"{problems}, line 4: 'x8r3s3'" in capsys.readouterr().err
    problems.write_text(f"{PROBLEM.replace('k8', 'x8')}\n", encoding="utf-8-sig")  # as some editors write
    assert main(["explain", str(problems)]) == 2
    assert f"{problems}, line 1: 'x8r3s3'" in capsys.readouterr().err
    problems.write_text("# nothing\n")
    assert main(["explain", str(problems)]) == 2
    assert "holds no problem" in capsys.readouterr().err
    problems.write_bytes(b"\xff\xfe\x00")
    assert main(["explain", str(problems)]) == 2
    assert "is not a text file" in capsys.readouterr().err


def test_a_flag_that_does_not_exist_is_an_error_of_the_command_line() -> None:
    environment = {**os.environ, "NBDNN_FLAGS": "dnn.speed=11"}
    command = [sys.executable, "-m", "nbdnn", "info"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == 2
    assert re.fullmatch(r"nbdnn: error: unknown flag 'dnn.speed'[^\n]*\n", done.stderr)


@pytest.mark.parametrize("command", ["", *COMMANDS, "info", "db"])
def test_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([*filter(None, [command]), "--help"])
    assert stop.value.code == 0
    assert "usage: nbdnn" in capsys.readouterr().out


def test_autotune_measures_once_and_says_so(db: str, tmp_path: Path) -> None:
    problems = tmp_path / "problems.txt"
    problems.write_text(f"{PROBLEM}  # with a comment\n{ANOTHER}\n{PROBLEM}\n")
    first = nbdnn("autotune", str(problems), "--db", db, "--budget", "300")
    assert first.returncode == 0, first.stderr
    assert first.stderr == ""
    assert "\x1b" not in first.stdout
    assert PROBLEM in first.stdout
    assert ANOTHER in first.stdout
    assert re.search(rf"\d+ measurements of 2 problems, kept in {re.escape(db)}", first.stdout)
    row = next(line.split() for line in first.stdout.splitlines() if PROBLEM in line)
    assert row[:2] == [PROBLEM, "2"]
    assert row[2].startswith("cpu/")
    assert re.fullmatch(r"\d+\.\d\dx", row[-1])

    second = nbdnn("autotune", str(problems), "--db", db, "--json")
    assert second.returncode == 0, second.stderr
    results = json.loads(second.stdout)
    assert [(r["problem"], r["count"], r["measured"], r["complete"]) for r in results] == [
        (PROBLEM, 2, 0, True),
        (ANOTHER, 1, 0, True),
    ]
    assert all(r["speedup"] == r["default_us"] / r["time_us"] for r in results)
    assert "Nothing was measured" in nbdnn("autotune", str(problems), "--db", db).stdout


@pytest.mark.parametrize(
    ("only", "ops", "count"),
    [
        ("conv", {"conv_fwd"}, 23),  # a family, though layers of others have such names
        ("pool,softmax", {"pool_fwd", "softmax_fwd"}, 3),
        ("bn_infer,maxpool", {"bn_infer", "pool_fwd"}, 13),  # an op, and the name of a layer
        ("layer1.0.bn", {"bn_infer"}, 2),  # names, where no other layer posed the problem before
        ("*r3s3*:u2x2*", {"conv_fwd", "pool_fwd"}, 4),
    ],
)
def test_only_chooses_by_family_op_and_text(
    only: str, ops: set[str], count: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", "resnet50", "--only", only, "--json"]) == 0
    chosen = {row["problem"] for row in json.loads(capsys.readouterr().out)}
    assert {problem.partition(":")[0] for problem in chosen} == ops
    assert len(chosen) == count


@pytest.mark.parametrize("fault", ["off", "read-only", "not a file"])
def test_autotune_does_not_say_kept_where_nothing_is(
    db: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], fault: str
) -> None:
    mode = "read-write" if fault == "not a file" else fault
    place = str(tmp_path) if fault == "not a file" else db
    with config.change(tune__mode=mode, tune__db=place), warnings.catch_warnings():
        warnings.simplefilter("ignore", NbdnnWarning)
        assert main(["autotune", PROBLEM, "--budget", "1"]) == 0
    out = capsys.readouterr().out
    why = f"{place} cannot be written" if fault == "not a file" else f"tune.mode is {mode}"
    assert re.search(
        rf"\n\d+ measurements? of 1 problem, lost with the end of this command: {re.escape(why)}\.\n$", out
    )
    assert not Path(db).exists()


def test_bench_shows_every_candidate_and_explain_what_is_chosen(db: str) -> None:
    from nbdnn.dispatch import registry

    done = nbdnn("bench", PROBLEM, "--db", db, "--json", "--budget", "100")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert {row["candidate"] for row in rows} <= {c.id for c in registry.candidates("conv_fwd")}
    assert sum(row["chosen"] for row in rows) == 1
    assert all(row["gflops"] > 0 and row["share_of_floor"] > 0 for row in rows if row["status"] == "ok")
    times_us = [row["time_us"] for row in rows if row["status"] != "failed"]
    assert times_us == sorted(times_us)

    explained = json.loads(nbdnn("explain", PROBLEM, "--db", db, "--json").stdout)
    assert {row["candidate"] for row in explained} >= {c.id for c in registry.candidates("conv_fwd")}
    chosen = next(row for row in rows if row["chosen"])
    assert [row["candidate"] for row in explained if row["chosen"]] == [chosen["candidate"]]
    assert chosen["candidate"] in nbdnn("explain", PROBLEM, "--db", db).stdout
    whole = nbdnn("bench", PROBLEM, "--db", db).stdout
    assert f"{PROBLEM}: floor" in whole
    assert "budget" not in whole


def test_a_candidates_mistake_costs_its_problem_alone(
    db: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    estimate = Rows.estimate

    def mistaken(self: Rows, problem: SoftmaxProblem, *where: Any) -> float:
        return 1 / 0 if problem.c == 7 else estimate(self, problem, *where)

    monkeypatch.setattr(Rows, "estimate", mistaken)
    bad, good, empty = (f"softmax_fwd:f32:n4c{c}h1w1:accurate:channel:nchw" for c in (7, 8, 0))
    without_work = f"{empty} has no work for anybody: x has shape (4, 0, 1, 1)"
    for wrong, reason in ((bad, "division by zero"), (empty, without_work)):
        assert main(["autotune", wrong, good, "--db", db, "--budget", "1", "--json"]) == 2
        told = capsys.readouterr()
        assert [row["problem"] for row in json.loads(told.out)] == [good]
        assert told.err.strip() == f"nbdnn: error: not measured: {wrong}: {reason}"


def test_explain_goes_on_behind_a_problem_without_work(db: str) -> None:
    empty, good = (f"softmax_fwd:f32:n{n}c8h1w1:accurate:channel:nchw" for n in (0, 4))
    done = nbdnn("explain", empty, good, "--db", db)
    assert good in done.stdout and done.returncode == 2
    assert done.stderr == f"nbdnn: error: {empty} has no work for anybody: x has shape (0, 8, 1, 1)\n"


@pytest.mark.parametrize("command", ["autotune", "bench"])
def test_a_problem_too_large_for_memory_keeps_no_other_from_being_measured(command: str, db: str) -> None:
    large, small = (f"softmax_fwd:f32:n{n}c1000h100w100:accurate:channel:nchw" for n in (10**6, 1))
    done = nbdnn(command, large, small, "--db", db, "--budget", "0", "--json")
    assert {row["problem"] for row in json.loads(done.stdout)} == {small}
    reason = r"a copy of the operands takes 80000000000\d\d\d bytes, \d+ are allowed"
    assert re.fullmatch(rf"nbdnn: error: not measured: {large}: {reason}\n", done.stderr)
    assert done.returncode == 2


def test_bench_says_what_the_budget_left_out(db: str) -> None:
    assert "The budget ended before every candidate" in nbdnn("bench", PROBLEM, "--db", db, "--budget", "0").stdout


@pytest.mark.parametrize("given", ["x", "0"])
def test_a_number_of_threads_that_is_none_is_one_line(given: str) -> None:
    environment = {**os.environ, "NUMBA_NUM_THREADS": given}
    command = [sys.executable, "-m", "nbdnn", "info"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"nbdnn: error: NUMBA_NUM_THREADS is {given!r}, expected a number of threads\n"


def test_info_names_what_a_report_needs(db: str) -> None:
    done = nbdnn("info", "--db", db, "--json")
    facts = json.loads(done.stdout)
    assert db in facts["database"]
    assert "cpu/direct" in facts["conv_fwd"]
    assert facts["device"].startswith("cpu/")
    lines = nbdnn("info", "--db", db).stdout.splitlines()
    assert set(facts) == {line.split("  ")[0] for line in lines} - {""}
    assert "; " not in facts["cudnn"] and all(line.strip() in "\n".join(lines) for line in facts["cudnn"].splitlines())


PROGRAM = """
import subprocess, sys
import numpy as np, nbdnn
x, w = np.ones((1, 8, 10, 12), "f4"), np.ones((8, 8, 3, 3), "f4")
for _ in range(2):
    nbdnn.dnn_conv(x, w, border_mode=1, conv_mode="cross")
if sys.argv[1:]:
    child = "import numpy as np, nbdnn; nbdnn.dnn_softmax(np.ones((2, 3), 'f4'))"
    subprocess.run([sys.executable, "-c", child], check=True)
sys.exit(3)
"""


def test_record_writes_what_a_program_and_its_children_compute(tmp_path: Path, db: str) -> None:
    program, found = tmp_path / "program.py", tmp_path / "problems.txt"
    program.write_text(PROGRAM)
    command = ["record", "-o", str(found), "--", sys.executable, str(program)]
    done = nbdnn(*command)
    assert (done.returncode, done.stderr) == (3, f"nbdnn: problems: 1, new in {found}: 1\n")
    done = nbdnn(*command, "child")
    assert (done.returncode, done.stderr) == (3, f"nbdnn: problems: 2, new in {found}: 1\n")
    softmax = "softmax_fwd:f32:n2c3h1w1:accurate:channel:nchw"
    assert found.read_text().splitlines() == [
        f"# {sys.executable} {program}",
        PROBLEM,
        f"# {sys.executable} {program} child",
        softmax,
    ]
    tuned = nbdnn("autotune", str(found), "--db", db, "--only", "softmax", "--budget", "1", "--json")
    assert [row["problem"] for row in json.loads(tuned.stdout)] == [softmax]


def test_record_writes_a_file_that_can_be_read_whatever_the_command(tmp_path: Path, db: str) -> None:
    found, program = tmp_path / "problems.txt", PROGRAM.replace("if sys.argv[1:]:", "if False:")
    for odd in ("caf\udce9", "two\u2028lines"):
        done = nbdnn("record", "-o", str(found), "--", sys.executable, "-c", program, odd)
        assert done.returncode == 3, done.stderr
    done = nbdnn("autotune", str(found), "--db", db, "--budget", "0", "--json")
    assert [row["problem"] for row in json.loads(done.stdout)] == [PROBLEM]


def test_record_leaves_no_file_where_there_is_no_program(tmp_path: Path) -> None:
    assert nbdnn("record", "-o", str(tmp_path / "problems.txt"), "--", "/nowhere/program").returncode == 2
    assert not list(tmp_path.iterdir())


def test_a_program_that_cannot_record_goes_on(tmp_path: Path) -> None:
    environment = {**os.environ, "NBDNN_RECORD": str(tmp_path / "gone" / "problems")}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 3
    assert done.stderr.count(f"{tmp_path}/gone/problems: No such file or directory; problems are not recorded") == 1


def test_record_ends_as_the_program_does() -> None:
    done = nbdnn("record", "-o", os.devnull, "--", "sh", "-c", "kill -TERM $$")
    assert (done.returncode, done.stderr) == (
        128 + signal.SIGTERM,
        f"nbdnn: problems: 0, new in {os.devnull}: 0\n",
    )


def test_ctrl_c_keeps_what_was_measured(db: str) -> None:
    command = [sys.executable, "-m", "nbdnn", "autotune", "vgg16", "--db", db]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not _rows_in(db) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "the same command goes on from there" in err
    assert "Traceback" not in err
    assert _rows_in(db) > 0


def _rows_in(db: str) -> int:
    if not Path(db).exists():
        return 0
    return len(nbdnn("db", "--db", db, "list").stdout.splitlines()) - 1


def test_output_into_a_closed_pipe_is_no_error(db: str) -> None:
    command = f"{sys.executable} -m nbdnn explain vgg16 --db {db} | true"
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True, timeout=60)
    assert done.stderr == ""


@pytest.mark.parametrize("arguments", ["db path", "info", f"explain {PROBLEM}"])
def test_a_closed_output_is_no_error(arguments: str) -> None:
    command = f"{sys.executable} -m nbdnn {arguments} >&-"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("op", ["conv_fwd", "conv_bwd_data", "conv_bwd_filter"])
@pytest.mark.parametrize("extents", [f"n{10**20}c4h10w10", f"n{10**20}c4h{2**47}w{2**47}"])
def test_images_beyond_any_memory_are_explained(op: str, extents: str, db: str) -> None:
    problem = f"{op}:f32:{extents}:k8r3s3:p0x0:u1x1:d1x1:g1:conv:nchw"
    assert "cpu/im2col" in nbdnn("explain", problem, "--db", db).stdout


@pytest.mark.parametrize(
    ("command", "fault"),
    [("autotune", "folder"), ("bench", "foreign"), ("autotune", "newer"), ("bench", "no place"), ("explain", "newer")],
)
def test_nothing_is_measured_for_a_database_that_cannot_keep_it(tmp_path: Path, command: str, fault: str) -> None:
    path, reason = tmp_path / "tuning.db", "is a database of another program"
    if fault == "folder":
        path, reason = tmp_path, "is not a file"
    elif fault == "no place":
        (tmp_path / "file").touch()
        path, reason = tmp_path / "file" / "tuning.db", f"cannot be written: {tmp_path / 'file'} is no folder"
    else:
        with closing(sqlite3.connect(path)) as connection, connection:
            connection.execute("CREATE TABLE something (a)")
            if fault == "newer":
                connection.execute("PRAGMA user_version = 99")
                reason = "is of schema 99, made by a newer nbdnn"
    done = nbdnn(command, PROBLEM, "--db", str(path))
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(rf"nbdnn: error: {re.escape(str(path))} {reason}[^\n]*\n", done.stderr), done.stderr


def test_problems_come_from_standard_input_and_pipes() -> None:
    for command in (
        f"echo {PROBLEM} | {sys.executable} -m nbdnn explain -",
        f"{sys.executable} -m nbdnn explain <(echo {PROBLEM})",
    ):
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith(PROBLEM)


def test_nothing_is_left_beside_what_is_no_database(db: str, tmp_path: Path) -> None:
    nbdnn("autotune", PROBLEM, "--db", db, "--budget", "0.1")
    nbdnn("db", "--db", db, "export", str(tmp_path / "rows"))
    (tmp_path / "apart").mkdir()
    text = tmp_path / "apart" / "notes.txt"
    text.write_text("no database\n" * 100)
    done = nbdnn("db", "--db", str(text), "import", str(tmp_path / "rows"))
    assert (done.returncode, done.stderr) == (2, f"nbdnn: error: {text} is not a database\n")
    assert os.listdir(text.parent) == ["notes.txt"]
    for command in ("autotune", "explain"):
        done = nbdnn(command, PROBLEM, "--db", str(text))
        assert (done.returncode, done.stdout, done.stderr) == (2, "", f"nbdnn: error: {text} is not a database\n")
    assert os.listdir(text.parent) == ["notes.txt"]
    assert text.read_text() == "no database\n" * 100


@pytest.mark.parametrize("command", ["db list", "db forget", "report"])
def test_an_op_that_there_is_not_is_refused(command: str, db: str) -> None:
    done = nbdnn(*command.split(), "--db", db, "--op", "conv")
    assert done.returncode == 2
    assert "argument --op: 'conv' is no op; there are conv_fwd, " in done.stderr
