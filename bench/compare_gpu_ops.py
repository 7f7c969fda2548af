"""nbdnn beside PyTorch on a GPU, for the ops beyond convolution: device time of replayed graphs, operands cold.

    python bench/compare_gpu_ops.py [--family NAME]... [--rows TEXT]... [--compile] [--json FILE] [--markdown FILE]

A ratio is the peer's time over nbdnn's: above 1, nbdnn is faster. The peer is PyTorch in eager mode, and with --compile
also torch.compile(max-autotune-no-cudagraphs), on operands of the same layout; nbdnn runs what its tuner chose, and
beside it stands the best of its own kernels alone. Both are captured into graphs and replayed in turn, each call on the
next of several copies of the operands. The floor is a copy of as many bytes.

A family of ops has a module ``peers_<family>.py`` with ``rows()``, the texts of its problems, and ``peer(problem,
device)``, PyTorch's function of the problem's inputs; ``posed(problem)``, where a row is several problems, says which
they are on nbdnn's side. The JSON file keeps every row with the versions it was measured
with: a row that is there is not measured again, unless --again says so.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from datetime import date
from functools import partial
from importlib import import_module
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

import torch
from compare_gpu import COLUMNS, Peer, Result, cells, eager_us, markdown

import nbdnn
from nbdnn import driver, reference
from nbdnn.cli_output import print_table
from nbdnn.device import Gpu, gpu
from nbdnn.dispatch import dispatcher
from nbdnn.dispatch.benchmark import rotating
from nbdnn.dispatch.selection import Filters, Option, fastest, survey
from nbdnn.dispatch.timing import Samples
from nbdnn.dispatch.timing_gpu import GpuOperands
from nbdnn.dispatch.tuner import tune
from nbdnn.kernels.cuda.peaks import floor_us
from nbdnn.problem import Operand, Problem, parse
from nbdnn.problem_spatialtf import SpatialtfProblem

FAMILIES = sorted(path.stem.removeprefix("peers_") for path in Path(__file__).parent.glob("peers_*.py"))
_TORCH = {
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f32": torch.float32,
    "f64": torch.float64,
    "u8": torch.uint8,
    "i64": torch.int64,
}
_SAMPLES = 7
_MOST_COPIES = 256
Function = Callable[..., Any]


def tensor(operand: Operand) -> torch.Tensor:
    """Random contents in the operand's layout; ones where it is no tensor of numbers."""
    made = torch.empty_strided(operand.shape, operand.strides, dtype=_TORCH[operand.dtype], device="cuda")
    return made.normal_() if made.is_floating_point() else made.fill_(1)


def inputs_of(problem: Problem) -> list[torch.Tensor]:
    """Random operands; images are sampled at the places where nbdnn's own operands have them sampled."""
    made = {operand.name: tensor(operand) for operand in problem.operands if operand.role == "in"}
    if isinstance(problem, SpatialtfProblem):
        places = {name: made[name].float().cpu().numpy() for name in ("theta", "grid") if name in made}
        for name, value in reference.derived(problem, places).items():
            made[name].copy_(torch.from_numpy(value))
    return list(made.values())


def peers(problem: Problem, function: Function, copies: int, compiled: bool) -> dict[str, Peer]:
    """Every way of PyTorch, by name."""
    inputs = [inputs_of(problem) for _ in range(copies)]
    found = {"torch": Peer([partial(function, *given) for given in inputs])}
    if compiled:
        torch._dynamo.reset()
        fast = torch.compile(function, mode="max-autotune-no-cudagraphs", dynamic=False)
        try:
            found["torch.compile"] = Peer([partial(fast, *given) for given in inputs])
        except Exception as error:  # its compilers' errors have no other base
            reason, _, _ = str(error).partition("\n")
            print(f"torch.compile has no {problem}: {type(error).__name__}: {reason}")
    return found


Watches = dict[str, list[tuple[Option, Samples]]]


def watches_of(posed: dict[str, tuple[Problem, ...]], device: Gpu, budget_s: float) -> Watches:
    """Stopwatches of what the tuner chose for each of a row's problems, and of the best of nbdnn's own kernels; none
    where one of the problems has none."""
    found = {kind: [_watch(problem, device, budget_s, kind) for problem in each] for kind, each in posed.items()}
    return {kind: [w for w in watches if w] for kind, watches in found.items() if all(watches)}


def _watch(problem: Problem, device: Gpu, budget_s: float, kind: str) -> tuple[Option, Samples] | None:
    options, _ = survey(problem, device, Filters())
    if kind == "own":
        options = [option for option in options if option.candidate.provider == "numba"]
    if not options:
        return None
    option = fastest(options, tune(problem, device, dispatcher.database(), budget_s=budget_s).rows)
    if option is None:
        return None
    operands = rotating(problem, device, device.free_memory_bytes() // 4)
    assert isinstance(operands, GpuOperands)
    runner = option.candidate.prepare(problem, option.config, device)
    return option, operands.stopwatch(runner, problem.scalars, option.workspace_bytes)


class How(NamedTuple):
    """How rows are measured: seconds of tuning, whether torch.compile is a peer, and the versions of everything."""

    budget_s: float
    compiled: bool
    versions: str


def measure(
    problem: Problem, posed: dict[str, tuple[Problem, ...]], function: Function, device: Gpu, how: How
) -> Result:
    """Tune, then sample each side in turn."""
    own = watches_of(posed, device, how.budget_s)
    one_bytes = sum(operand.size_bytes for operand in problem.operands)
    copies = min(_MOST_COPIES, ceil(1.5 * device.l2_bytes / one_bytes))
    others = peers(problem, function, copies, how.compiled)
    for _ in range(_SAMPLES):
        for watch in [*(watch for watches in own.values() for _, watch in watches), *others.values()]:
            watch.sample()
    theirs = min(others, key=lambda name: others[name].median_us)
    names = {kind: " + ".join(str(option) for option, _ in watches) for kind, watches in own.items()}
    times_us = {kind: sum(watch.median_us for _, watch in watches) for kind, watches in own.items()}
    return Result(
        problem.op.partition("_")[0],
        str(problem),
        sum(floor_us(each, device) for each in posed["chosen"]),
        times_us["chosen"],
        max(watch.spread or 0.0 for _, watch in own["chosen"]),
        names["chosen"],
        times_us.get("own"),
        names.get("own", ""),
        others[theirs].median_us,
        others[theirs].spread or 0.0,
        theirs,
        how.versions,
        eager_us(others),
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", action="append", default=[], choices=FAMILIES)
    parser.add_argument("--rows", action="append", default=[], metavar="TEXT", help="only rows with this in their name")
    parser.add_argument("--budget", type=float, default=20.0, help="seconds of tuning a problem (default 20)")
    parser.add_argument("--compile", action="store_true", help="also torch.compile")
    parser.add_argument("--again", action="store_true", help="measure also what the JSON file has")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    torch.zeros(1, device="cuda")
    driver.use(0)
    device = gpu(0)
    environment = {
        "device": f"{device.fingerprint}, driver for CUDA {device.driver}",
        "nbdnn": nbdnn.__version__,
        "torch": f"{torch.__version__}, cuDNN {torch.backends.cudnn.version()}",
        "date": date.today().isoformat(),
    }
    versions = " ".join(environment[name] for name in ("device", "nbdnn", "torch"))
    how = How(args.budget, args.compile, versions)
    known: dict[str, Result] = {}
    if args.json and args.json.exists():
        stored = [Result(**fields) for fields in json.loads(args.json.read_text())]
        known = {result.name: result for result in stored if result.versions == versions}
    by_family: dict[str, list[Result]] = {}
    with torch.inference_mode():
        for family in args.family or FAMILIES:
            module = import_module(f"peers_{family}")
            for text in module.rows():
                if args.rows and not any(part in text for part in args.rows):
                    continue
                if args.again or text not in known:
                    problem = parse(text)
                    alone = {"chosen": (problem,), "own": (problem,)}
                    posed = module.posed(problem) if hasattr(module, "posed") else alone
                    known[text] = measure(problem, posed, module.peer(problem, "cuda"), device, how)
                    torch.cuda.empty_cache()
                    if args.json:
                        args.json.write_text(json.dumps([asdict(result) for result in known.values()], indent=1) + "\n")
                by_family.setdefault(family, []).append(known[text])
    for family, results in by_family.items():
        print_table(family, COLUMNS, cells(results), right=COLUMNS[1:7], footer=True)
    if args.markdown:
        args.markdown.write_text(markdown(by_family, environment))


if __name__ == "__main__":
    main()
