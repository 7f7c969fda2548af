"""nbdnn beside PyTorch on a GPU: device time of replayed graphs, operands cold in the second-level cache.

    python bench/compare_gpu.py [--rows TEXT]... [--dtype DTYPE]... [--compile] [--json FILE] [--markdown FILE]

A ratio is the peer's time over nbdnn's: above 1, nbdnn is faster. The peer is PyTorch in eager mode with
cudnn.benchmark=True and benchmark_limit=0, in the faster of its contiguous and channels_last forms, and with --compile
also torch.compile(max-autotune-no-cudagraphs) where that can win (depthwise, fused). nbdnn counts in the faster layout
as well, with what its tuner chose; beside it stands the best of its own kernels alone. Both are captured into graphs
and replayed in turn, each call on the next of several copies of the operands, results included. The floor is what the
device could do at most.

The JSON file keeps every row with the versions it was measured with: a row that is there is not measured again, unless
--again says so.
"""

from __future__ import annotations

import argparse
import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from functools import partial
from itertools import cycle, islice
from math import ceil, exp, fsum, log
from pathlib import Path
from typing import Any

import torch

import nbdnn
from nbdnn import driver
from nbdnn.cli_output import print_table
from nbdnn.device import Gpu, gpu
from nbdnn.dispatch import dispatcher
from nbdnn.dispatch.benchmark import rotating
from nbdnn.dispatch.selection import Filters, Option, fastest, survey
from nbdnn.dispatch.timing import Samples
from nbdnn.dispatch.timing_gpu import GpuOperands, GpuStopwatch
from nbdnn.dispatch.tuner import tune
from nbdnn.kernels.cuda.peaks import floor_us
from nbdnn.problem import parse
from nbdnn.problem_conv import ConvProblem

# (group, geometry, passes, dtypes): the text of a problem without op, dtype, mode and layout.
FWD, DATA, FILTER = "conv_fwd", "conv_bwd_data", "conv_bwd_filter"
ALL = (FWD, DATA, FILTER)
EVERY = ("f32", "tf32", "f16", "bf16")
PLAIN = ("f32", "f16", "bf16")  # where nobody rounds to TF32: depthwise
ROWS: tuple[tuple[str, str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("stem", "n32c3h224w224:k64r7s7:p3x3:u2x2:d1x1:g1", (FWD, FILTER), EVERY),
    ("stem", "n64c3h224w224:k32r3s3:p1x1:u2x2:d1x1:g1", (FWD, FILTER), EVERY),
    ("resnet 3x3", "n32c64h56w56:k64r3s3:p1x1:u1x1:d1x1:g1", ALL, EVERY),
    ("resnet 3x3", "n32c128h28w28:k128r3s3:p1x1:u1x1:d1x1:g1", ALL, EVERY),
    ("resnet 3x3", "n32c256h14w14:k256r3s3:p1x1:u1x1:d1x1:g1", ALL, EVERY),
    ("resnet 3x3", "n32c512h7w7:k512r3s3:p1x1:u1x1:d1x1:g1", ALL, EVERY),
    ("resnet 1x1", "n32c64h56w56:k256r1s1:p0x0:u1x1:d1x1:g1", ALL, EVERY),
    ("resnet 1x1", "n32c256h56w56:k64r1s1:p0x0:u1x1:d1x1:g1", ALL, EVERY),
    ("resnet 1x1", "n32c1024h14w14:k256r1s1:p0x0:u1x1:d1x1:g1", ALL, EVERY),
    ("resnet 1x1", "n32c2048h7w7:k512r1s1:p0x0:u1x1:d1x1:g1", ALL, EVERY),
    ("narrow 1x1", "n32c32h112w112:k16r1s1:p0x0:u1x1:d1x1:g1", ALL, EVERY),
    ("narrow 1x1", "n32c16h112w112:k96r1s1:p0x0:u1x1:d1x1:g1", ALL, EVERY),
    ("narrow 1x1", "n32c24h56w56:k144r1s1:p0x0:u1x1:d1x1:g1", ALL, EVERY),
    ("narrow 1x1", "n32c144h56w56:k24r1s1:p0x0:u1x1:d1x1:g1", ALL, EVERY),
    ("narrow 1x1", "n32c192h28w28:k32r1s1:p0x0:u1x1:d1x1:g1", ALL, EVERY),
    ("batch 1", "n1c64h56w56:k64r3s3:p1x1:u1x1:d1x1:g1", (FWD,), EVERY),
    ("batch 1", "n1c256h14w14:k256r3s3:p1x1:u1x1:d1x1:g1", (FWD,), EVERY),
    ("batch 1", "n1c512h7w7:k512r3s3:p1x1:u1x1:d1x1:g1", (FWD,), EVERY),
    ("batch 1", "n1c1024h14w14:k256r1s1:p0x0:u1x1:d1x1:g1", (FWD,), EVERY),
    ("depthwise 3x3", "n32c32h112w112:k32r3s3:p1x1:u1x1:d1x1:g32", ALL, PLAIN),
    ("depthwise 3x3", "n32c144h56w56:k144r3s3:p1x1:u1x1:d1x1:g144", ALL, PLAIN),
    ("depthwise 3x3", "n32c144h56w56:k144r3s3:p1x1:u2x2:d1x1:g144", ALL, PLAIN),
    ("depthwise 3x3", "n32c576h14w14:k576r3s3:p1x1:u2x2:d1x1:g576", ALL, PLAIN),
    ("depthwise 3x3", "n32c960h7w7:k960r3s3:p1x1:u1x1:d1x1:g960", ALL, PLAIN),
    ("depthwise 5x5", "n32c672h14w14:k672r5s5:p2x2:u1x1:d1x1:g672", ALL, PLAIN),
    ("depthwise 7x7", "n32c384h14w14:k384r7s7:p3x3:u1x1:d1x1:g384", ALL, PLAIN),
    ("grouped", "n32c256h28w28:k256r3s3:p1x1:u1x1:d1x1:g32", ALL, EVERY),
    ("dilated", "n8c256h33w33:k256r3s3:p12x12:u1x1:d12x12:g1", ALL, EVERY),
    ("alexnet", "n128c3h224w224:k64r11s11:p2x2:u4x4:d1x1:g1", (FWD, FILTER), EVERY),
    ("alexnet", "n128c64h27w27:k192r5s5:p2x2:u1x1:d1x1:g1", ALL, EVERY),
    ("vgg", "n16c64h224w224:k64r3s3:p1x1:u1x1:d1x1:g1", ALL, EVERY),
    ("3-D", "n4c64d16h56w56:k128t3r3s3:p1x1x1:u1x1x1:d1x1x1:g1", ALL, EVERY),
    ("3-D", "n1c32d64h64w64:k32t3r3s3:p1x1x1:u1x1x1:d1x1x1:g1", ALL, EVERY),
    ("3-D", "n2c64d64h64w64:k64t3r3s3:p1x1x1:u1x1x1:d1x1x1:g1", ALL, ("f32",)),
    ("3-D depthwise", "n4c64d16h56w56:k64t3r3s3:p1x1x1:u1x1x1:d1x1x1:g64", ALL, PLAIN),
    ("videos", "n4c64d16h56w56:k144t1r3s3:p0x1x1:u1x1x1:d1x1x1:g1", ALL, EVERY),
    ("videos", "n4c144d16h56w56:k64t3r1s1:p1x0x0:u1x1x1:d1x1x1:g1", ALL, EVERY),
    ("few filters", "n8c64h256w256:k3r3s3:p1x1:u1x1:d1x1:g1", ALL, EVERY),
    ("few filters", "n8c32h256w256:k1r5s5:p2x2:u1x1:d1x1:g1", ALL, EVERY),
    ("few filters", "n4c64h256w256:k3r7s7:p3x3:u1x1:d1x1:g1", ALL, EVERY),
    ("few filters", "n2c16d64h64w64:k2t1r1s1:p0x0x0:u1x1x1:d1x1x1:g1", ALL, EVERY),
    ("few channels", "n32c3h224w224:k64r3s3:p1x1:u1x1:d1x1:g1", (DATA,), EVERY),
    ("few channels", "n2c3d32h224w224:k64t7r7s7:p3x3x3:u2x2x2:d1x1x1:g1", (FWD, FILTER), EVERY),
    ("patches", "n32c3h224w224:k768r16s16:p0x0:u16x16:d1x1:g1", ALL, EVERY),
    ("patches", "n32c3h224w224:k96r4s4:p0x0:u4x4:d1x1:g1", ALL, EVERY),
    ("ways up", "n8c64h128w128:k128r2s2:p0x0:u2x2:d1x1:g1", ALL, EVERY),
    ("ways up", "n2c32d64h64w64:k64t2r2s2:p0x0x0:u2x2x2:d1x1x1:g1", ALL, EVERY),
    ("ways up", "n16c64h64w64:k128r4s4:p1x1:u2x2:d1x1:g1", ALL, EVERY),
    ("odd channels", "n128c20h12w12:k50r5s5:p0x0:u1x1:d1x1:g1", ALL, EVERY),
    ("odd channels", "n16c35h60w60:k51r3s3:p1x1:u1x1:d1x1:g1", ALL, EVERY),
    ("fused", "n32c64h56w56:k64r3s3:p1x1:u1x1:d1x1:g1:e:bias+relu", (FWD,), EVERY),
)
_TORCH = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}
_FORMS = {
    (2, False): torch.contiguous_format,
    (2, True): torch.channels_last,
    (3, False): torch.contiguous_format,
    (3, True): torch.channels_last_3d,
}
_SAMPLES = 7
_REPLAY_US = 1500.0


@dataclass(frozen=True)
class Row:
    """One problem in one arithmetic ('tf32' is float32 data with TF32 allowed)."""

    group: str
    problem: ConvProblem  # in NCHW
    arithmetic: str

    @property
    def name(self) -> str:
        return f"{self.problem}".replace(":f32:", f":{self.arithmetic}:", 1)

    def forms(self) -> list[ConvProblem]:
        layouts = ("nchw", "nhwc") if self.problem.ndim == 2 else ("ncdhw", "ndhwc")
        return [replace(self.problem, layout=layout, w_layout="", y_layout="") for layout in layouts]


@dataclass(frozen=True)
class Result:
    """Times in microseconds of device time; spreads relative. eager_us: of PyTorch without torch.compile."""

    group: str
    name: str
    floor_us: float
    nbdnn_us: float
    nbdnn_spread: float
    chosen: str
    own_us: float | None
    own: str
    peer_us: float
    peer_spread: float
    peer: str
    versions: str
    eager_us: float

    @property
    def ratio(self) -> float:
        return self.peer_us / self.nbdnn_us


def rows(texts: Sequence[str], arithmetics: Sequence[str]) -> list[Row]:
    found = []
    for group, geometry, passes, dtypes in ROWS:
        for op in passes:
            for arithmetic in dtypes:
                dtype = "f32" if arithmetic == "tf32" else arithmetic
                shape, _, epilogue = geometry.partition(":e:")
                layout = "ncdhw" if "d" in shape.partition(":")[0] else "nchw"
                text = f"{op}:{dtype}:{shape}:cross:{layout}" + (f":e:{epilogue}" if epilogue else "")
                row = Row(group, parse(text), arithmetic)
                named = not texts or any(part in f"{group} {row.name}" for part in texts)
                if named and (not arithmetics or arithmetic in arithmetics):
                    found.append(row)
    return found


class Peer(Samples):
    """Samples of calls of PyTorch, captured into a graph as nbdnn's are."""

    def __init__(self, calls: Sequence[Callable[[], Any]]) -> None:
        super().__init__()
        self._calls_alive = calls  # and with them their tensors, which the graph does not keep
        for call in calls[:1] * 3:  # cudnn.benchmark measures, compilers compile
            call()
        torch.cuda.synchronize()
        self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        once_us = self._timed(lambda: [call() for call in calls]) / len(calls)
        self._calls = ceil(max(1.0, _REPLAY_US / once_us) / len(calls)) * len(calls)
        self._graph = torch.cuda.CUDAGraph()
        # So many results live at a time: each copy has its own, as on nbdnn's side. A single one would stay in cache.
        results: deque[Any] = deque(maxlen=len(calls))
        with torch.cuda.graph(self._graph):
            for call in islice(cycle(calls), self._calls):
                results.append(call())
        self._timed(self._graph.replay)

    def sample(self) -> None:
        self.samples_us.append(self._timed(self._graph.replay) / self._calls)
        self.disturbed.append(False)

    def _timed(self, work: Callable[[], Any]) -> float:
        self._begin.record()
        work()
        self._end.record()
        self._end.synchronize()
        return self._begin.elapsed_time(self._end) * 1e3


def peer_call(problem: ConvProblem, tensors: Sequence[torch.Tensor]) -> Callable[[], Any]:
    """PyTorch's call for one copy of the problem's inputs."""
    pad, stride, dilation = [before for before, _ in problem.pad], list(problem.stride), list(problem.dilation)
    groups, zeros = problem.groups, [0] * problem.ndim
    if problem.op == FWD:
        x, w, *bias = tensors
        if "relu" in problem.epilogue:
            return lambda: torch.cudnn_convolution_relu(x, w, bias[0], stride, pad, dilation, groups)
        return lambda: torch.convolution(x, w, None, stride, pad, dilation, False, zeros, groups)
    first, second = tensors
    form = _FORMS[problem.ndim, problem.channels_last]
    empty = torch.empty(
        problem.x_shape if problem.op == DATA else problem.w_shape, dtype=first.dtype, device="cuda"
    ).contiguous(memory_format=form)
    x, w, dy = (empty, first, second) if problem.op == DATA else (first, empty, second)
    mask = [problem.op == DATA, problem.op == FILTER, False]
    backward = torch.ops.aten.convolution_backward
    return lambda: backward(dy, x, w, None, stride, pad, dilation, False, zeros, groups, mask)


def peers(row: Row, copies: int, compiled: bool) -> dict[str, Peer]:
    """Every way of PyTorch, by name."""
    found = {}
    for form in row.forms():
        memory = _FORMS[form.ndim, form.channels_last]
        inputs = []
        for _ in range(copies):
            tensors = [
                torch.randn(o.shape, device="cuda").to(_TORCH[form.dtype]) for o in form.operands if o.role == "in"
            ]
            inputs.append([t.contiguous(memory_format=memory) if t.ndim > 1 else t for t in tensors])
        found[f"torch {form.layout}"] = Peer([peer_call(form, tensors) for tensors in inputs])
        if compiled and row.problem.op == FWD and (row.problem.is_depthwise or row.problem.epilogue):
            fast = _compiled(form)
            found[f"torch.compile {form.layout}"] = Peer([partial(fast, *tensors) for tensors in inputs])
    return found


def _compiled(problem: ConvProblem) -> Callable[..., Any]:
    pad, stride, dilation = [before for before, _ in problem.pad], list(problem.stride), list(problem.dilation)

    def forward(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        y = torch.convolution(x, w, bias, stride, pad, dilation, False, [0] * problem.ndim, problem.groups)
        return torch.relu(y) if "relu" in problem.epilogue else y

    torch._dynamo.reset()
    return torch.compile(forward, mode="max-autotune-no-cudagraphs", dynamic=False)


def stopwatch(form: ConvProblem, option: Option, device: Gpu) -> GpuStopwatch:
    operands = rotating(form, device, device.free_memory_bytes() // 4)
    assert isinstance(operands, GpuOperands)
    candidate, option_config, workspace_bytes = option
    runner = candidate.prepare(form, option_config, device)
    return operands.stopwatch(runner, (1.0, 0.0), workspace_bytes)


def measure(row: Row, device: Gpu, budget_s: float, compiled: bool, versions: str) -> Result:
    """Tune both layouts, then sample the best of each side in turn."""
    filters = Filters(allow_tf32=row.arithmetic == "tf32")
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = row.arithmetic == "tf32"
    best: dict[str, tuple[float, ConvProblem, Option]] = {}
    for form in row.forms():
        result = tune(form, device, dispatcher.database(), filters=filters, budget_s=budget_s)
        options, _ = survey(form, device, filters)
        own = [option for option in options if option.candidate.provider == "numba"]
        for kind, option in (("chosen", result.best), ("own", fastest(own, result.rows))):
            if option is not None and (us := result.rows[option.key].median_us):
                best[kind] = min(best.get(kind, (us, form, option)), (us, form, option), key=lambda entry: entry[0])
    watches: dict[str, Samples] = {kind: stopwatch(form, option, device) for kind, (_, form, option) in best.items()}
    one_bytes = sum(operand.size_bytes for operand in row.problem.operands)
    watches |= peers(row, min(256, ceil(1.5 * device.l2_bytes / one_bytes)), compiled)
    for _ in range(_SAMPLES):
        for watch in watches.values():
            watch.sample()
    theirs = min((name for name in watches if name.startswith("torch")), key=lambda name: watches[name].median_us)
    own_entry = best.get("own")
    return Result(
        row.group,
        row.name,
        floor_us(row.problem, device, row.arithmetic == "tf32"),
        watches["chosen"].median_us,
        watches["chosen"].spread or 0.0,
        f"{best['chosen'][2]}, {best['chosen'][1].layout}",
        watches["own"].median_us if own_entry else None,
        f"{own_entry[2]}, {own_entry[1].layout}" if own_entry else "",
        watches[theirs].median_us,
        watches[theirs].spread or 0.0,
        theirs,
        versions,
        eager_us(watches),
    )


COLUMNS = ("problem", "floor", "nbdnn", "peer", "ratio", "of floor", "own kernel", "chosen", "peer was", "own was")


def cells(results: Sequence[Result]) -> list[tuple[str, ...]]:
    def short(chosen: str) -> str:
        return chosen.partition("/")[2]

    lines = [
        (
            r.name,
            f"{r.floor_us:.1f}",
            f"{r.nbdnn_us:.1f}",
            f"{r.peer_us:.1f}",
            f"{r.ratio:.2f}",
            f"{r.nbdnn_us / r.floor_us:.2f}",
            f"{r.own_us:.1f}" if r.own_us else "-",
            short(r.chosen),
            r.peer.removeprefix("torch "),
            short(r.own),
        )
        for r in results
    ]
    mean = exp(fsum(log(r.ratio) for r in results) / len(results))
    eager = exp(fsum(log(r.eager_us / r.nbdnn_us) for r in results) / len(results))
    of_eager = f" (of eager PyTorch {eager:.2f})" if any(r.eager_us > r.peer_us for r in results) else ""
    name = f"geometric mean of {len(results)}{of_eager}"
    return [*lines, (name, "", "", "", f"{mean:.2f}", "", "", "", "", "")]


def eager_us(watches: Mapping[str, Samples]) -> float:
    """The fastest of PyTorch's without torch.compile."""
    eager = (name for name in watches if name.startswith("torch") and not name.startswith("torch.compile"))
    return min(watches[name].median_us for name in eager)


def markdown(by_group: dict[str, list[Result]], environment: dict[str, str]) -> str:
    parts = ["# nbdnn beside PyTorch on a GPU\n", *(f"* {name}: {value}" for name, value in environment.items()), ""]
    parts += ["Times in microseconds of device time (graphs replayed, operands cold); a ratio is peer / nbdnn.", ""]
    for group, results in by_group.items():
        parts += [f"## {group}\n", f"| {' | '.join(COLUMNS)} |", "|---|--:|--:|--:|--:|--:|--:|---|---|---|"]
        parts += [f"| {' | '.join(line)} |" for line in cells(results)] + [""]
    return "\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", action="append", default=[], metavar="TEXT", help="only rows with this in their name")
    parser.add_argument("--dtype", action="append", default=[], choices=EVERY)
    parser.add_argument("--budget", type=float, default=20.0, help="seconds of tuning a problem (default 20)")
    parser.add_argument("--compile", action="store_true", help="also torch.compile, where it can win")
    parser.add_argument("--again", action="store_true", help="measure also what the JSON file has")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    args = parser.parse_args()

    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.benchmark_limit = 0
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
    known: dict[str, Result] = {}
    if args.json and args.json.exists():
        stored = [Result(**fields) for fields in json.loads(args.json.read_text())]
        known = {result.name: result for result in stored if result.versions == versions}
    by_group: dict[str, list[Result]] = {}
    with torch.inference_mode():
        for row in rows(args.rows, args.dtype):
            if args.again or row.name not in known:
                known[row.name] = measure(row, device, args.budget, args.compile, versions)
                torch.cuda.empty_cache()
                if args.json:
                    args.json.write_text(json.dumps([asdict(result) for result in known.values()], indent=1) + "\n")
            by_group.setdefault(row.group, []).append(known[row.name])
    for group, results in by_group.items():
        print_table(group, COLUMNS, cells(results), right=COLUMNS[1:7], footer=True)
    if args.markdown:
        args.markdown.write_text(markdown(by_group, environment))


if __name__ == "__main__":
    main()
