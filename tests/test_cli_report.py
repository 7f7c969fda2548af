"""The page that `nbdnn report` writes: nothing that was measured is missing, and a browser reads it as it was meant."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import pytest

from nbdnn.cli import main
from nbdnn.dispatch import registry
from nbdnn.dispatch.database import Database
from nbdnn.dispatch.measurement import Measurement

CONV = "conv_fwd:f32:n1c8h10w12:k8r3s3:p1x1:u1x1:d1x1:g1:cross:nchw"
SOFTMAX = "softmax_fwd:f32:n2c3h1w1:accurate:channel:nchw"
UNKNOWN = "conv_fwd:f8:<b>&"


def row(
    device: str, problem: str, candidate: str, config: str, median_us: float | None, status: str = "ok"
) -> Measurement:
    known = dict.fromkeys(Measurement._fields, "") | {
        "spread": 0.01,
        "samples": 7,
        "workspace_bytes": 2048,
        "error": 0.1,
    }
    known |= {"deterministic": True, "math": "fma", "cudnn_version": 0, "measured_at": "2026-11-20T10:00:00Z"}
    reason = "8 > 7 & worse" if status == "failed" else ""
    if "gone" not in candidate:
        known["candidate_version"] = registry.candidate(candidate).version
    given = {"device": device, "problem": problem, "candidate": candidate, "config": config, "median_us": median_us}
    return Measurement(**known | given | {"status": status, "reason": reason})  # type: ignore[arg-type]


ROWS = [
    row("cpu/one", CONV, "conv_fwd/cpu/direct", "", 40.0),
    row("cpu/one", CONV, "conv_fwd/cpu/im2col", "", 10.0),
    row("cpu/one", CONV, "conv_fwd/cpu/pixel_gemm", "6x2", 5.0),
    row("cpu/one", CONV, "conv_fwd/cpu/pixel_gemm", "4x3", 6.0),
    row("cpu/one", CONV, "conv_fwd/cpu/winograd_2x2", "", None, "failed"),
    row("cpu/one", CONV, "conv_fwd/cpu/fft", "", 6.5, "noisy"),
    row("cpu/one", CONV, "conv_fwd/cpu/gone", "", 4.0),
    row("cpu/one", SOFTMAX, "softmax_fwd/cpu/rows", "", 2.0),
    row("gpu <1>", CONV, "conv_fwd/cudnn/gone", "", None, "failed"),
    row("gpu <1>", UNKNOWN, "conv_fwd/numba/gone", "", 3.0),
]


class Page(HTMLParser):
    """Rows of cells as texts, and the dots as (class, place, title)."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.dots: list[dict[str, str]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag == "circle":
            self.dots.append({name: value or "" for name, value in attrs} | {"title": ""})

    def handle_data(self, data: str) -> None:
        self.text += data
        if self.rows and self.rows[-1]:
            self.rows[-1][-1] += data
        if self.dots and self.dots[-1]["title"] == "":
            self.dots[-1]["title"] = data


@pytest.fixture
def db(tmp_path: Path) -> str:
    database = Database(str(tmp_path / "tuning.db"))
    database.store(ROWS)
    database.close()
    return str(tmp_path / "tuning.db")


def reported(db: str, tmp_path: Path, *arguments: str) -> Page:
    path = tmp_path / "report.html"
    assert main(["report", "--db", db, "-o", str(path), *arguments]) == 0
    return Page(path.read_text())


def test_every_measurement_is_told(db: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = reported(db, tmp_path)
    assert capsys.readouterr().out == f"{tmp_path / 'report.html'}: problems: 4\n"
    listed = [cells[:2] for cells in page.rows]
    for each in ROWS:
        assert [each.candidate.partition("/")[2], each.config] in listed
    for told in (
        "cpu/one2 problems, 8 measurements (1 failed, 1 noisy, 1 stale), 2026-11-20 to 2026-11-20",
        "gpu <1>2 problems, 2 measurements (2 stale), ",
        "f8:<b>&",
    ):
        assert told in page.text.replace("\n", "")
    (failed,) = (cells for cells in page.rows if cells[0] == "cpu/winograd_2x2")
    assert failed[2:5] == ["-", "1.0%", "2.0 KiB"]
    assert failed[5].startswith("failed, 8 > 7 & worse")


def test_the_fastest_is_first_and_the_others_lie_where_their_times_say(db: str, tmp_path: Path) -> None:
    page = reported(db, tmp_path, "--device", "cpu", "--op", "conv_fwd")
    first, *others = sorted(page.dots, key=lambda dot: dot["class"])
    assert (first["class"], first["title"]) == ("first", "cpu/pixel_gemm 6x2: 5.00 us")
    assert [dot["title"] for dot in others] == [
        "cpu/direct: 40.0 us",
        "cpu/im2col: 10.0 us",
        "cpu/fft: 6.50 us",
        "cpu/gone: 4.00 us",
    ]
    places = [float(dot["cx"]) for dot in (first, others[1], others[0])]
    assert places[2] - places[0] == pytest.approx(3 * (places[1] - places[0]), abs=0.3)  # 8 times and 2 times as long
    assert ["cpu/gone", "", "4.00 us", "1.0%", "2.0 KiB", "stale"] in page.rows
    assert "27.6" in page.text  # 138,240 operations in 5 us


def test_what_is_not_there_is_an_error(db: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = str(tmp_path / "empty.db")
    Path(empty).touch()
    for arguments, message in (
        (["--db", str(tmp_path / "none.db")], f"{tmp_path / 'none.db'}: no database yet; `nbdnn autotune` writes one"),
        (["--db", db, "--op", "pool_fwd"], f"{db} holds no measurement of that kind"),
        (["--db", empty], f"{empty} holds no measurement: nbdnn autotune makes them"),
        (["--db", db, "-o", "/nowhere/report.html"], "/nowhere/report.html: No such file or directory"),
    ):
        assert main(["report", *arguments]) == 2
        assert capsys.readouterr().err == f"nbdnn: error: {message}\n"
