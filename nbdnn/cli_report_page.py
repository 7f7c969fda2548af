"""The page of `nbdnn report`: for each device who is fastest how often, then every problem with all that was timed.

A problem's dots are its candidates, each with its fastest config, by how many times longer than the fastest they take.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from html import escape
from itertools import groupby
from operator import attrgetter
from pathlib import Path

import nbdnn
from nbdnn.cli_output import duration, size
from nbdnn.dispatch.measurement import Measurement, is_current, utc_now
from nbdnn.errors import InvalidProblem
from nbdnn.problem import parse

_STYLE = """
:root { color-scheme: light dark; --ink: #1c1c1e; --faint: #8a8a8e; --rule: #d9d9de; --paper: #fff; --mark: #d4490b; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8e8ea; --rule: #3a3a3f; --paper: #17171a; --mark: #ff8a4c; } }
body { font: 15px/1.45 system-ui, sans-serif; color: var(--ink); background: var(--paper);
       max-width: 76rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 2.5rem; } h3 { font-size: 1rem; margin-top: 1.8rem; }
p, .faint { color: var(--faint); }
table { border-collapse: collapse; width: 100%; }
td, th { padding: .25rem .9rem .25rem 0; text-align: left; border-bottom: 1px solid var(--rule); font-weight: normal;
         vertical-align: top; }
th { color: var(--faint); } .right { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
code, summary { font: 13px/1.4 ui-monospace, monospace; overflow-wrap: anywhere; } summary { cursor: pointer; }
.problems { table-layout: fixed; } .problems > * > tr > th:nth-child(1) { width: 40%; }
.problems > * > tr > th:nth-child(2) { width: 18%; } .problems > * > tr > th:nth-child(5) { width: 24%; }
details table { margin: .4rem 0 .8rem 1rem; width: calc(100% - 1rem); font-size: 13px; }
svg { display: block; } .bar, .first { fill: var(--mark); } .other { fill: var(--faint); opacity: .75; }
.line { stroke: var(--rule); } text { fill: var(--faint); font: 11px system-ui, sans-serif; text-anchor: middle; }
"""
_STRIP, _STRIP_HEIGHT, _MARGIN = 280, 18, 10  # pixels
_SLOWEST = 32  # times the fastest; what took longer is drawn there


def page(rows: Sequence[Measurement], path: Path) -> str:
    """The whole document."""
    devices = _grouped(rows, lambda row: row.device)
    about = f"{path}, {utc_now()}, nbdnn {nbdnn.__version__}"
    body = "".join(_device(name, of_device) for name, of_device in devices)
    return (
        '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>nbdnn: what was measured</title>\n<style>{_STYLE}</style>\n"
        f"<h1>What was measured</h1>\n<p>{escape(about)}</p>\n{body}</html>\n"
    )


def _device(name: str, rows: Sequence[Measurement]) -> str:
    problems = _grouped(rows, lambda row: row.problem)
    counts = Counter("stale" if not is_current(row) else row.status for row in rows)
    told = ", ".join(f"{counts[kind]} {kind}" for kind in ("failed", "noisy", "stale") if counts[kind])
    dates = sorted(row.measured_at[:10] for row in rows)
    summary = (
        f"{len(problems)} problems, {len(rows)} measurements{f' ({told})' if told else ''}, {dates[0]} to {dates[-1]}"
    )
    ops = groupby(problems, key=lambda problem: problem[0].partition(":")[0])
    sections = "".join(_op(op, list(of_op)) for op, of_op in ops)
    return f"<h2>{escape(name)}</h2>\n<p>{summary}</p>\n{_winners(problems)}{sections}"


def _winners(problems: Iterable[tuple[str, list[Measurement]]]) -> str:
    """How often each candidate is the fastest."""
    won = Counter(timed[0].candidate for _, rows in problems if (timed := _timed(rows)))
    if not won:
        return ""
    most = max(won.values())
    lines = "".join(
        f'<tr><td><code>{escape(candidate)}</code><td class="right">{count}<td width="50%">'
        f'<svg width="{_STRIP}" height="10"><rect class="bar" width="{_STRIP * count / most:.0f}" height="10"/></svg>'
        for candidate, count in won.most_common()
    )
    return f'<table><tr><th>fastest<th class="right">problems<th>{lines}</table>\n'


def _op(op: str, problems: Sequence[tuple[str, list[Measurement]]]) -> str:
    lines, unit = "".join(_problem(text, rows) for text, rows in problems), "GFLOP/s" if _computes(op) else "GB/s"
    return (
        f'<h3>{escape(op)}</h3>\n<table class="problems"><tr><th>problem<th>fastest<th class="right">time'
        f'<th class="right">{unit}<th>{_axis()}{lines}</table>\n'
    )


def _problem(text: str, rows: Sequence[Measurement]) -> str:
    timed = _timed(rows)
    every = "".join(map(_measurement, [*timed, *(row for row in rows if row not in timed)]))
    listed = (
        f"<details><summary>{escape(text.partition(':')[2])}</summary><table><tr><th>candidate<th>config"
        f'<th class="right">time<th class="right">spread<th class="right">workspace<th>{every}</table></details>'
    )
    if not timed:
        return f'<tr><td>{listed}<td class="faint">nobody<td><td><td>'
    return (
        f"<tr><td>{listed}<td><code>{escape(_named(timed[0]))}</code>"
        f'<td class="right">{duration(timed[0].median_us)}<td class="right">{_rate(text, timed[0])}<td>{_strip(timed)}'
    )


def _measurement(row: Measurement) -> str:
    spread = "" if row.spread is None else f"{row.spread:.1%}"
    marks = "" if row.status == "ok" else row.status, "" if is_current(row) else "stale", row.reason
    told = ", ".join(filter(None, marks))
    return (
        f"<tr><td>{escape(row.candidate.partition('/')[2])}<td>{escape(row.config)}"
        f'<td class="right">{duration(row.median_us)}<td class="right">{spread}'
        f'<td class="right">{size(row.workspace_bytes)}<td class="faint">{escape(told)}'
    )


def _strip(timed: Sequence[Measurement]) -> str:
    """A dot for each candidate, the fastest on top."""
    best = {row.candidate: row for row in reversed(timed)}
    fastest_us, dots = timed[0].median_us or 1.0, ""
    for row in sorted(best.values(), key=lambda row: -(row.median_us or 0)):
        kind, x = "first" if row is timed[0] else "other", _place((row.median_us or 0) / fastest_us)
        told = f"<title>{escape(_named(row))}: {duration(row.median_us)}</title>"
        dots += f'<circle class="{kind}" cx="{x:.1f}" cy="{_STRIP_HEIGHT // 2}" r="4">{told}</circle>'
    return f'<svg width="{_STRIP}" height="{_STRIP_HEIGHT}">{_rules(_STRIP_HEIGHT)}{dots}</svg>'


def _axis() -> str:
    marks = "".join(f'<text x="{_place(times):.1f}" y="12">{times}x</text>' for times in _ticks())
    return f'<svg width="{_STRIP}" height="16">{marks}</svg>'


def _rules(height: int) -> str:
    return "".join(f'<line class="line" x1="{x:.1f}" x2="{x:.1f}" y2="{height}"/>' for x in map(_place, _ticks()))


def _ticks() -> list[int]:
    return [2**power for power in range(int(math.log2(_SLOWEST)) + 1)]


def _place(times: float) -> float:
    share = math.log2(min(max(times, 1.0), _SLOWEST)) / math.log2(_SLOWEST)
    return _MARGIN + share * (_STRIP - 2 * _MARGIN)


def _timed(rows: Iterable[Measurement]) -> list[Measurement]:
    """What has a time, the fastest first; stale rows, which are not selected any more, come after all others."""
    good = [row for row in rows if row.status != "failed" and row.median_us]
    return sorted(good, key=lambda row: (not is_current(row), row.median_us))


def _named(row: Measurement) -> str:
    return f"{row.candidate.partition('/')[2]} {row.config}".strip()


def _rate(text: str, row: Measurement) -> str:
    """Operations, or bytes that are moved at least, a nanosecond; nothing for a problem of another version of nbdnn."""
    try:
        problem = parse(text)
    except InvalidProblem:
        return ""
    amount = problem.flops if _computes(problem.op) else problem.min_bytes
    return f"{amount / (row.median_us or math.inf) / 1e3:.1f}"


def _computes(op: str) -> bool:
    """Whether arithmetic bounds it, not memory."""
    return op.startswith(("conv", "rnn"))


def _grouped(rows: Sequence[Measurement], key: Callable[[Measurement], str]) -> list[tuple[str, list[Measurement]]]:
    ordered = sorted(rows, key=attrgetter("device", "problem"))
    return [(name, list(group)) for name, group in groupby(ordered, key=key)]
