"""Who may compute a problem, who may not and why, what is known of their times, and who is chosen now."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from nbdnn import config
from nbdnn.device import Device, named
from nbdnn.dispatch import dispatcher, policy, registry
from nbdnn.dispatch.selection import Filters, Option, Rows, fastest, ranked, survey, valid_rows
from nbdnn.errors import InvalidType, UnsupportedProblem
from nbdnn.problem import Problem, parse


class Explained(NamedTuple):
    """One candidate on one problem.

    supported: whether it may be chosen under the flags of now; else `reason` says why not. config: its best one, by
    measurements or else by the cost model. time_us: measured, else None. source: 'measured', 'noisy', 'failed' (the
    reason says how) or 'cost model'.
    """

    candidate: str
    config: str
    supported: bool
    reason: str
    workspace_bytes: int | None
    deterministic: bool
    math: str
    time_us: float | None
    source: str
    chosen: bool


@dataclass(frozen=True)
class Explanation:
    """What `explain` found; ``str()`` is a table."""

    problem: Problem
    device: Device
    policy: str
    rows: tuple[Explained, ...]

    def __str__(self) -> str:
        cells = [("", "candidate", "time", "workspace", "source", "math", "notes")]
        for row in self.rows:
            notes = ", ".join(filter(None, ("" if row.deterministic else "nondeterministic", row.reason)))
            time = "-" if row.time_us is None else f"{row.time_us:.2f} us"
            memory = "-" if row.workspace_bytes is None else f"{row.workspace_bytes} B"
            name = " ".join(filter(None, (row.candidate, row.config)))
            cells.append(("*" if row.chosen else "", name, time, memory, row.source, row.math, notes))
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]
        return "\n".join([f"{self.problem} on {self.device.fingerprint}, {self.policy}:", *map(str.rstrip, lines)])


def explain(problem: Problem | str, *, device: Device | str | None = None) -> Explanation:
    """Say of every candidate whether it may compute `problem`, and which one is chosen now. Nothing is measured.

    Parameters
    ----------
    problem : Problem or str
        A problem, or its text, such as ``conv_fwd:f32:n32c64h56w56:k64r3s3:p1x1:u1x1:d1x1:g1:cross:nchw``.
    device : str or Device, optional
        ``'cuda'``, ``'cuda:1'``, or such as ``nbdnn.device.gpu(0)``. Default: this machine's CPU.

    Returns
    -------
    Explanation
        ``.rows``, in registry order, and a readable ``str()``.

    Raises
    ------
    InvalidProblem
        A text that names no problem, or no device (a ValueError); it says what was expected where.
    CudaError
        There is no such GPU.
    """
    problem = parse(problem) if isinstance(problem, str) else problem
    if not isinstance(problem, Problem):
        raise InvalidType(f"problem is {problem!r}, expected a problem or its text")
    if device is None or isinstance(device, str):
        device = named(device or "cpu")
    if not isinstance(device, Device):
        raise InvalidType(f"device is {device!r}, expected 'cpu', 'cuda', 'cuda:N' or a device")
    database = dispatcher.database()
    request = _request_of_flags(problem)
    unnamed = request.filters.unnamed()
    options, refused = survey(problem, device, unnamed)
    rows = valid_rows(problem, device, database)
    try:
        chosen = policy.would_choose(problem, device, database, request).option.key
    except UnsupportedProblem:
        chosen = ("", "")
    reasons = {candidate.id: reason for candidate, reason in refused}
    explained = []
    for candidate in registry.candidates(problem.op, kind=device.kind):
        its_options = [option for option in options if option.candidate is candidate]
        if its_options:
            preferred = next((option for option in its_options if option.key == chosen), None)
            option = preferred or fastest(its_options, rows) or ranked(its_options, problem, device)[0]
            explained.append(_explained(option, rows, chosen))
        else:
            explained.append(
                Explained(
                    candidate.id, "", False, reasons[candidate.id], None,
                    candidate.deterministic, candidate.math, None, "", False,
                )
            )  # fmt: skip
    return Explanation(problem, device, request.filters.by_name or request.policy, tuple(explained))


def _explained(option: Option, rows: Rows, chosen: tuple[str, str]) -> Explained:
    candidate, config_, workspace_bytes = option
    row = rows.get(option.key)
    source = "cost model" if row is None else "measured" if row.status == "ok" else row.status
    return Explained(
        candidate.id,
        str(config_),
        True,
        row.reason if row else "",
        workspace_bytes,
        candidate.deterministic,
        candidate.math,
        row.median_us if row else None,
        source,
        option.key == chosen,
    )


def _request_of_flags(problem: Problem) -> policy.Request:
    settings = config.current()
    family, _, direction = problem.op.partition("_")
    flag = f"dnn.conv.algo_{direction}" if family == "conv" else "dnn.policy"
    algo = settings[flag] if family == "conv" else policy.policy_of_flag(problem.op)
    by_policy, by_id = algo in config.POLICIES, "/" in algo and bool(registry.candidate(algo, f"flag {flag}"))
    filters = Filters(
        settings["dnn.deterministic"],
        settings["dnn.allow_tf32"],
        settings["dnn.workspace_limit"],
        method="" if by_policy or by_id else algo,
        candidate=algo if by_id else "",
    )
    return policy.Request(algo if by_policy else "guess_on_shape_change", filters)
