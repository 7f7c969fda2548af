"""Exports, merges, upkeep and the ``nbdnn db`` commands, run through the command line's own entry."""

from __future__ import annotations

import io
import json
import os
import pty
import random
import sys
from collections.abc import Callable
from itertools import permutations
from pathlib import Path

import pytest
from database_records import DEVICE, PROBLEM, contents, layer_choice, measurement, sql

from nbdnn import cli, config
from nbdnn.device import cpu_device
from nbdnn.dispatch import registry
from nbdnn.dispatch.database import Database, LayerChoice, Measurement
from nbdnn.dispatch.exchange import from_line, merge, read_all, to_line
from nbdnn.dispatch.measurement import utc_now
from nbdnn.dispatch.sqlite_file import SqliteFile

OTHER_PROBLEM = "conv_bwd_data:f32:n1c8h9w9:k4r3s3:p1x1:u1x1:d1x1:g1:cross:nchw"
KEYS = (
    "device, problem, candidate, config, median_us, spread, samples, workspace_bytes, deterministic, math, error, "
    "status, reason, candidate_version, cudnn_version, driver, measured_at"
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "db" / "tuning.db"


@pytest.fixture(scope="module")
def current() -> dict[str, str]:
    """The fields that make a record valid."""
    return {"candidate_version": registry.candidate("conv_fwd/cpu/direct").version}


@pytest.fixture
def db(path: Path, capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs ``nbdnn db --db <path> ...``: (exit code, standard output, standard error)."""

    def run(*arguments: object) -> tuple[int, str, str]:
        capfd.readouterr()
        code = cli.main(["db", "--db", str(path), *map(str, arguments)])
        return code, *capfd.readouterr()

    return run


def fill(path: Path, *records: Measurement | LayerChoice) -> None:
    merge(SqliteFile(path, writable=True), records)


def held(path: Path) -> list[Measurement | LayerChoice]:
    return SqliteFile(path, writable=False).find(read_all)


MANY = [
    measurement("8x6", 1 / 3),
    measurement("4x8", 1e-9, status="noisy", deterministic=False),
    measurement("", None, spread=None, error=None, status="failed", reason="\u2028'élan'\n\0 \"値\""),
    measurement(device="gpu/H200", candidate="conv_fwd/cudnn/winograd", cudnn_version=92700, driver="580.1"),
    measurement(problem=OTHER_PROBLEM, candidate="conv_bwd_data/cpu/direct"),
    layer_choice(),
    layer_choice("another"),
]


# Lines


def test_a_line_has_exactly_the_documented_keys() -> None:
    assert list(json.loads(to_line(MANY[0]))) == KEYS.split(", ")
    assert to_line(measurement("é\u2028")).isascii(), "no encoding and no line break can be misread"


def test_lines_round_trip() -> None:
    for record in MANY:
        assert "\n" not in to_line(record)
        assert from_line(to_line(record)) == record
        assert list(map(type, from_line(to_line(record)))) == list(map(type, record))


def test_another_spelling_of_a_problem_is_the_same_problem() -> None:
    record = measurement()
    spelled = record._replace(problem=f"{record.problem}:a16")
    assert from_line(to_line(spelled)) == record


def line(**changes: object) -> bytes:
    fields = {**measurement()._asdict(), **changes}
    return json.dumps({name: value for name, value in fields.items() if value is not ...}).encode()


BAD_LINES = [
    (b"{", "no JSON: Expecting"),
    (line(problem="hello world"), "unknown op 'hello world'"),
    (line(problem=measurement().problem.replace("f32", "f99")), "dtype 'f99' is not one of"),
    (line(candidate="foo"), "candidate 'foo' is none of conv_fwd"),
    (line(candidate="conv_bwd_data/cpu/direct"), "candidate 'conv_bwd_data/cpu/direct' is none of conv_fwd"),
    (b"[]", "object"),
    (b"3", "object"),
    (b"\xff", "utf-8"),
    (line(samples=...), "lacks samples"),
    (line(colour="red"), "unknown colour"),
    (line().replace(b'"samples": 9', b'"samples": 9, "samples": 8'), "repeats samples"),
    (line(median_us=float("nan")), "NaN"),
    (line(median_us="1"), "median_us is '1'"),
    (line(median_us=-1), "median_us is -1"),
    (line(deterministic=1), "deterministic is 1"),
    (line(status="fine"), "status is 'fine'"),
    (line(device=[]), "device is"),
    (line(measured_at="2025"), "measured_at is"),
    (line(layer="x"), "lacks chosen_at"),
    (b"[" * 100_000, "nested too deeply"),
]


@pytest.mark.parametrize(("bad", "words"), BAD_LINES)
def test_import_is_all_or_nothing_and_names_the_line(
    tmp_path: Path, path: Path, db: Callable[..., tuple[int, str, str]], bad: bytes, words: str
) -> None:
    lines = tmp_path / "lines"
    lines.write_bytes(b"\n".join([line(config="good"), b"", bad, line(config="also good")]))
    code, output, error = db("import", lines)
    assert (code, output) == (2, "")
    beginning = f"nbdnn: error: {lines}, line 3: "
    assert error.startswith(beginning) and words in error and error.count("\n") == 1
    assert "line" not in error.removeprefix(beginning), "one line is named"
    assert not path.exists()


def test_export_and_import_round_trip_exactly(
    tmp_path: Path, path: Path, db: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(path, *MANY)
    exported = db("export", "--choices")[1]
    assert exported.splitlines() == [*map(to_line, sorted(MANY[:5])), *map(to_line, sorted(MANY[5:]))]
    assert db("export", tmp_path / "lines", "--choices") == (0, "", "")
    assert (tmp_path / "lines").read_text(encoding="utf-8") == exported
    path.unlink()
    assert db("import", tmp_path / "lines") == (0, "7 of 7 records added or replaced\n", "")
    assert db("export", "--choices")[1] == exported
    assert held(path) == [*sorted(MANY[:5]), *sorted(MANY[5:])]
    assert "layer" not in db("export")[1]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(exported.encode())))
    assert db("import", "-")[1] == "0 of 7 records added or replaced\n"


# Merging


def test_the_newest_valid_record_wins(path: Path, current: dict[str, str]) -> None:
    old, new = "2025-01-01T00:00:00Z", "2025-06-01T00:00:00+00:00"
    for kind in (
        lambda when, **fields: measurement(measured_at=when, **fields),
        lambda when, **fields: layer_choice(chosen_at=when, **fields),
    ):
        ranked = [kind(old), kind(new), kind(old, **current), kind(new, **current)]
        for better, worse in ((1, 0), (2, 0), (2, 1), (3, 2), (3, 0)):
            for order in (ranked[better], ranked[worse]), (ranked[worse], ranked[better]):
                path.unlink(missing_ok=True)
                for record in order:
                    fill(path, record)
                assert held(path) == [ranked[better]]


def test_merging_is_the_same_in_any_order(tmp_path: Path, current: dict[str, str]) -> None:
    rng = random.Random(4)
    parts = [
        [
            measurement(
                str(rng.randrange(4)),
                float(rng.randrange(1, 4)),
                measured_at=f"2025-01-0{rng.randrange(1, 4)}T00:00:00Z",
                **rng.choice([current, {}]),
            )
            for _ in range(6)
        ]
        for _ in range(3)
    ]
    results = []
    for number, order in enumerate(permutations(parts)):
        path = tmp_path / str(number)
        for part in (*order, order[0]):
            fill(path, *part)
        results.append(held(path))
    assert all(result == results[0] for result in results)


def test_stale_rows_come_in_as_stale(path: Path, db: Callable[..., tuple[int, str, str]]) -> None:
    fill(path, measurement(candidate="conv_fwd/cpu/of_long_ago"))
    assert held(path) == [measurement(candidate="conv_fwd/cpu/of_long_ago")]
    code, output, _ = db("verify")
    assert code == 1 and "stale\t1\n" in output


def test_merge_takes_databases_and_exports(tmp_path: Path, path: Path, db: Callable[..., tuple[int, str, str]]) -> None:
    other, export = tmp_path / "other.db", tmp_path / "lines"
    fill(other, measurement("a"), layer_choice())
    export.write_text(to_line(measurement("b")))
    before = contents(tmp_path)
    assert db("merge", other)[0] == db("merge", export)[0] == 0
    assert held(path) == [measurement("a"), measurement("b"), layer_choice()]
    assert {name: content for name, content in contents(tmp_path).items() if name in before} == before
    assert db("merge", tmp_path / "nowhere")[0] == 2


def test_a_merge_keeps_what_a_damaged_row_had_hidden(path: Path) -> None:
    fill(path, measurement("a", measured_at="2030-01-01T00:00:00Z"))
    sql(path, "UPDATE measurement SET median_us = 'x'")
    fill(path, measurement("a"))
    assert held(path) == [measurement("a")]


def test_diff(tmp_path: Path, path: Path, db: Callable[..., tuple[int, str, str]]) -> None:
    other = tmp_path / "other.db"
    fill(path, measurement("a"), measurement("b"), layer_choice())
    fill(other, measurement("a"), measurement("b"))
    assert db("diff", other) == (0, "", "")
    assert db("diff", other, "--choices") == (1, f"- {to_line(layer_choice())}\n", "")
    fill(other, measurement("c"), measurement("b", 99.0, measured_at="2026-01-01T00:00:00Z"))
    changed = measurement("b", 99.0, measured_at="2026-01-01T00:00:00Z")
    code, output, _ = db("diff", other)
    assert code == 1
    assert output.splitlines() == [
        f"- {to_line(measurement('b'))}",
        f"+ {to_line(changed)}",
        f"+ {to_line(measurement('c'))}",
    ]


# Upkeep


def test_verify_and_prune(path: Path, db: Callable[..., tuple[int, str, str]], current: dict[str, str]) -> None:
    good = [measurement("a", **current), measurement("f", None, status="failed", **current), layer_choice(**current)]
    fill(path, *good)
    expected = f"path\t{path}\nintegrity\tok\nok\t1\nfailed\t1\nnoisy\t0\nchoices\t1\nstale\t0\ndamaged\t0\n"
    assert db("verify") == (0, expected, "")
    stale = [measurement("b"), measurement(candidate="conv_fwd/cpu/gone"), layer_choice("stale")]
    fill(path, *stale, measurement("d", **current), measurement("e", **current))
    sql(path, "UPDATE measurement SET samples = 99 WHERE config IN ('d', 'e')")
    code, output, _ = db("verify")
    assert code == 1 and output.endswith("choices\t2\nstale\t3\ndamaged\t2\n")
    assert db("export")[2] == f"nbdnn: {path}: 2 damaged rows left out\n"
    assert db("prune") == (0, "5 records removed\n", "")
    assert held(path) == good
    assert db("verify") == (0, expected, "")
    assert db("prune") == (0, "0 records removed\n", "")


def test_verify_names_what_is_wrong_with_the_file(path: Path, db: Callable[..., tuple[int, str, str]]) -> None:
    fill(path, *(measurement(str(number), reason="x" * 200) for number in range(300)))
    content = bytearray(path.read_bytes())
    content[-4096 * 3 : -4096 * 2] = content[-4096 * 5 : -4096 * 4]
    path.write_bytes(content)
    code, output, _ = db("verify")
    assert code == 1 and "integrity\t" in output and "integrity\tok" not in output


def test_prune_gives_the_space_back(path: Path, db: Callable[..., tuple[int, str, str]]) -> None:
    fill(path, *(measurement(str(number), reason="x" * 1000) for number in range(500)))
    before = path.stat().st_size
    assert db("prune")[1] == "500 records removed\n"
    SqliteFile(path, writable=True).close()
    assert path.stat().st_size < before / 10


@pytest.mark.parametrize(
    ("arguments", "left"),
    [
        ([PROBLEM], "other old"),
        (["--device", "cpu"], "gpu"),
        (["--device", "gpu/H200"], "cpu old other"),
        (["--device", "gpu/H2"], "cpu gpu old other"),
        (["--op", "conv_bwd_data"], "cpu gpu old"),
        (["--op", "conv_bwd_filter"], "cpu gpu old other"),
        (["--cudnn"], "cpu old other"),
        (["--cudnn", "92700"], "cpu old other"),
        (["--cudnn", "91000"], "cpu gpu old other"),
        (["--older-than", "30"], "cpu gpu other"),
        (["--older-than", "0.5", "--op", "conv_bwd_data"], "cpu gpu other"),
        ([PROBLEM, "--device", "cpu"], "gpu old other"),
    ],
)
def test_forget(path: Path, db: Callable[..., tuple[int, str, str]], arguments: list[str], left: str) -> None:
    named = {
        "cpu": measurement("cpu", measured_at=utc_now()),
        "gpu": MANY[3]._replace(config="gpu", measured_at=utc_now()),  # type: ignore[call-arg]
        "old": measurement("old", problem=f"{PROBLEM}:a4"),
        "other": measurement("other", problem=OTHER_PROBLEM, measured_at=utc_now()),
    }
    if "conv_bwd_data" in arguments and "--older-than" in arguments:
        named["old"] = named["old"]._replace(problem=f"{OTHER_PROBLEM}:a4")
    choices = [
        layer_choice(name, device=row.device, problem=row.problem, candidate=row.candidate, config=row.config)
        for name, row in named.items()
    ]
    fill(path, *named.values(), *choices)
    assert db("forget", *arguments) == (0, f"{4 - len(left.split())} measurements removed\n", "")
    records = held(path)
    assert {row.config for row in records if isinstance(row, Measurement)} == set(left.split())
    assert {row.layer for row in records if isinstance(row, LayerChoice)} == set(left.split()), "choices rest on rows"


def test_forget_needs_to_be_told_what(path: Path, db: Callable[..., tuple[int, str, str]]) -> None:
    fill(path, measurement())
    code, output, error = db("forget")
    assert (code, output) == (2, "") and error.startswith("nbdnn: error: forget needs a problem or one of --device")
    assert held(path) == [measurement()]


def test_verify_measures_a_sample_again(path: Path, db: Callable[..., tuple[int, str, str]]) -> None:
    from nbdnn.dispatch.selection import Filters
    from nbdnn.dispatch.tuner import tune
    from nbdnn.problem import parse

    problem = "conv_fwd:f32:n1c4h6w6:k4r3s3:p1x1:u1x1:d1x1:g1:cross:nchw"
    database = Database(path, shipped=None)
    tune(parse(problem), cpu_device(), database, filters=Filters(candidate="conv_fwd/cpu/direct"), budget_s=5)
    database.store([measurement("stale"), measurement("elsewhere", device="cpu/elsewhere")])
    (sound,) = (
        row for row in database.rows(cpu_device().fingerprint, problem) if row.candidate == "conv_fwd/cpu/direct"
    )
    database.store([sound._replace(problem="conv_sideways" + problem.removeprefix("conv_fwd"))])
    database.close()
    before = contents(path.parent)
    code, output, _ = db("verify", "--sample", 9)
    report = output.partition("\n\n")[2].splitlines()
    assert report[0].split("\t") == ["problem", "candidate", "config", "stored_us", "now_us", "ratio", "status"]
    (row,) = (line.split("\t") for line in report[1:])
    assert row[:2] == [problem, "conv_fwd/cpu/direct"] and row[6] in ("ok", "noisy")
    assert float(row[5]) == pytest.approx(float(row[4]) / float(row[3]), rel=1e-2)
    assert contents(path.parent) == before, "a sample is not stored"
    assert code == 1, "there is a stale row"


# Looking


def test_list(path: Path, db: Callable[..., tuple[int, str, str]]) -> None:
    fill(path, *MANY, measurement("z", reason="tab\there\nand there"))
    code, output, error = db("list")
    header, *lines = (line.split("\t") for line in output.splitlines())
    assert (code, error) == (0, "")
    assert header == ["device", "problem", "candidate", "config", "median_us", "spread", "status", "measured_at"]
    assert len(lines) == 6 and all(len(line) == len(header) for line in lines)
    assert "\x1b" not in output and "…" not in output and DEVICE in output and PROBLEM in output
    assert len(db("list", "--limit", 2)[1].splitlines()) == 3
    assert len(db("list", "--limit", 0)[1].splitlines()) == 1
    assert len(db("list", "--op", "conv_bwd_data")[1].splitlines()) == 2
    assert len(db("list", "--device", "gpu")[1].splitlines()) == 2
    assert len(db("list", "--device", DEVICE, "--op", "conv_fwd")[1].splitlines()) == 5


def test_show(path: Path, db: Callable[..., tuple[int, str, str]]) -> None:
    fill(path, *MANY, measurement("z", reason="tab\there\nand there"))
    code, output, _ = db("show", PROBLEM)
    rows, _, choices = output.partition("\n\n")
    header, *lines = (line.split("\t") for line in rows.splitlines())
    assert code == 0 and [line[2] for line in lines] == ["4x8", "8x6", "z", "", ""], "the fastest first, failed last"
    assert all(len(line) == len(header) for line in lines)
    assert "tab here and there" in rows
    assert choices.splitlines()[0].split("\t") == ["device", "layer", "candidate", "config", "chosen_at"]
    assert len(choices.splitlines()) == 3
    assert db("show", f"{PROBLEM}:a4")[2] == f"nbdnn: error: {path} holds no measurement of {PROBLEM}:a4\n"
    code, output, error = db("show", "conv_fwd:f32")
    assert (code, output) == (2, "") and "ends too soon" in error and error.count("\n") == 1


def test_columns_are_aligned_on_a_terminal(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(path, measurement("short"), measurement("a longer config"))
    controller, terminal = pty.openpty()
    with os.fdopen(terminal, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        assert cli.main(["db", "--db", str(path), "list"]) == 0
        stdout.flush()
        shown = b""
        while shown.count(b"\n") < 3:  # a terminal gives what it has so far
            shown += os.read(controller, 10_000)
    lines = shown.decode().splitlines()
    monkeypatch.undo()
    os.close(controller)
    assert len({line.index("12.5") for line in lines[1:]}) == 1 and lines[0].index("median_us") == lines[1].index(
        "12.5"
    )


def test_path(path: Path, db: Callable[..., tuple[int, str, str]]) -> None:
    assert db("path") == (0, f"{path}\n", "")
    assert not path.parent.exists()
    assert cli.main(["db", "path", "--db", "elsewhere.db"]) == 0, "--db may also stand behind the command"


LOOKING = [["list"], ["show", PROBLEM], ["export"], ["diff", "FILE"], ["verify"]]


@pytest.mark.parametrize("arguments", [*LOOKING, ["prune"], ["forget", "--op", "conv_fwd"]])
@pytest.mark.parametrize("fault", ["missing", "garbage", "newer", "folder", "foreign"])
def test_what_is_no_database_is_one_line_of_error(
    tmp_path: Path, path: Path, db: Callable[..., tuple[int, str, str]], arguments: list[str], fault: str
) -> None:
    path.parent.mkdir()
    if fault == "garbage":
        path.write_bytes(b"garbage" * 999)
    elif fault == "newer":
        sql(path, "CREATE TABLE measurement (a)", "PRAGMA user_version = 99")
    elif fault == "foreign":
        sql(path, "CREATE TABLE measurement (a)")
    elif fault == "folder":
        path.mkdir()
    (tmp_path / "lines").write_text(to_line(measurement()))
    before = contents(tmp_path)
    code, output, error = db(*(tmp_path / "lines" if word == "FILE" else word for word in arguments))
    assert (code, output) == (2, "")
    assert error.startswith("nbdnn: error: ") and str(path) in error and error.count("\n") == 1
    assert contents(tmp_path) == before, "the command line sets nothing aside, and leaves nothing"


@pytest.mark.parametrize("arguments", LOOKING)
def test_looking_changes_nothing(
    tmp_path: Path, path: Path, db: Callable[..., tuple[int, str, str]], arguments: list[str]
) -> None:
    fill(path, *MANY)
    SqliteFile(path, writable=True).close()
    (tmp_path / "lines").write_text(to_line(measurement()))
    before = contents(tmp_path)
    assert db(*(tmp_path / "lines" if word == "FILE" else word for word in arguments))[0] in (0, 1)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("mode", ["read-only", "off"])
@pytest.mark.parametrize("words", ["import FILE", "merge FILE", "prune", "forget --op conv_fwd"])
def test_what_tune_mode_forbids_to_write_is_not_written(
    tmp_path: Path, path: Path, db: Callable[..., tuple[int, str, str]], mode: str, words: str
) -> None:
    fill(path, measurement())
    (tmp_path / "lines").write_text(to_line(measurement("another")))
    with config.change(tune__mode=mode):
        code, output, error = db(*(tmp_path / "lines" if word == "FILE" else word for word in words.split()))
    assert (code, output, error) == (2, "", f"nbdnn: error: {path} may not be changed: tune.mode is {mode}\n")
    assert held(path) == [measurement()]


def test_importing_a_database_says_what_is_wanted(path: Path, db: Callable[..., tuple[int, str, str]]) -> None:
    fill(path, measurement())
    code, output, error = db("import", path)
    assert (code, output) == (2, "")
    assert error == f"nbdnn: error: {path} is a database: import takes what export wrote, merge takes databases\n"


def test_importing_into_an_impossible_place(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text(to_line(measurement()))
    assert cli.main(["db", "--db", str(tmp_path / "file" / "x.db"), "import", str(tmp_path / "file")]) == 2
    assert capfd.readouterr().err.startswith("nbdnn: error: ")
