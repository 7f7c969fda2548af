"""Problems of any size: every candidate says at once whether it takes them, with which configs, how long and how."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from gpus import H200

from nbdnn.device import Device, cpu_device
from nbdnn.dispatch import registry
from nbdnn.errors import InvalidProblem
from nbdnn.kernels.cuda.launch import LaunchedCandidate
from nbdnn.problem import Problem, parse

_MOST_BYTES = 2**36  # of an operand
_PROBLEMS = 150  # of each kind
EXTENTS = (1, 2, 3, 5, 7, 8, 14, 28, 31, 33, 56, 112, 127, 129, 224, 255, 257, 300, 513, 1000, 1920, 4096)
FEW = (1, 2, 3, 4, 7, 9, 16, 33, 64)
CHANNELS = (1, 2, 3, 4, 5, 8, 12, 17, 32, 64, 100, 128, 192, 256, 513, 1024, 3000)
IMAGES = (1, 2, 3, 8, 32, 100, 256)
DTYPES = ("f32", "f16", "bf16", "f64")
LAYOUTS = {2: ("nchw", "nhwc"), 3: ("ncdhw", "ndhwc")}


class Draw(random.Random):
    """Random problems as texts; some are none."""

    def image(self, axes: int) -> str:
        extents = (self.choice(FEW if axes == 3 else EXTENTS) for _ in range(axes))
        return "".join(f"{name}{extent}" for name, extent in zip("dhw"[-axes:], extents, strict=True))

    def each(self, axes: int, *values: int) -> list[int]:
        return [self.choice(values) for _ in range(axes)]

    def start(self, *ops: str) -> str:
        return f"{self.choice(ops)}:{self.choice(DTYPES)}:n{self.choice(IMAGES)}"

    def conv(self) -> str:
        axes, c = self.choice((2, 2, 3)), self.choice(CHANNELS)
        taps, dilation = self.each(axes, 1, 1, 2, 3, 3, 5, 7, 11, 31), self.each(axes, 1, 1, 1, 2, 3, 12)
        stride, groups = self.each(axes, 1, 1, 1, 2, 3), self.choice((1, 1, 1, 2, 4, c))
        c = max(c // groups, 1) * groups
        k = c if groups == c else max(self.choice(CHANNELS) // groups, 1) * groups
        pad = [self.choice((0, 1, (r - 1) * d // 2)) for r, d in zip(taps, dilation, strict=True)]
        filters = "".join(f"{name}{r}" for name, r in zip("trs"[-axes:], taps, strict=True))
        fields = (
            f"{name}{'x'.join(map(str, values))}" for name, values in (("p", pad), ("u", stride), ("d", dilation))
        )
        start = self.start("conv_fwd", "conv_bwd_data", "conv_bwd_filter")
        mode, layout = self.choice(("cross", "conv")), self.choice(LAYOUTS[axes])
        return f"{start}c{c}{self.image(axes)}:k{k}{filters}:{':'.join(fields)}:g{groups}:{mode}:{layout}"

    def pool(self) -> str:
        axes = self.choice((2, 2, 3))
        window, stride, pad = self.each(axes, 1, 2, 3, 7, 13), self.each(axes, 1, 2, 3), self.each(axes, 0, 0, 1)
        windows = "".join(f"{name}{r}" for name, r in zip("trs"[-axes:], window, strict=True))
        places = f"p{'x'.join(map(str, pad))}:u{'x'.join(map(str, stride))}"
        mode, layout = self.choice(("max", "average_exc_pad", "sum")), self.choice(LAYOUTS[axes])
        start = self.start("pool_fwd", "pool_bwd")
        return f"{start}c{self.choice(CHANNELS)}{self.image(axes)}:{windows}:{places}:{mode}:{layout}"

    def bn(self) -> str:
        axes = self.choice((2, 2, 3))
        start, mode = self.start("bn_train", "bn_infer", "bn_bwd", "bn_infer_bwd"), ("spatial", "per-activation")
        return f"{start}c{self.choice(CHANNELS)}{self.image(axes)}:{self.choice(mode)}:{self.choice(LAYOUTS[axes])}"

    def softmax(self) -> str:
        start, c = self.start("softmax_fwd", "softmax_bwd"), self.choice((*CHANNELS, 4097, 32000, 131072, 300000))
        algorithm, mode = self.choice(("fast", "accurate", "log")), self.choice(("channel", "instance"))
        return f"{start}c{c}{self.image(2)}:{algorithm}:{mode}:{self.choice(LAYOUTS[2])}"

    def spatialtf(self) -> str:
        start = self.start("spatialtf_fwd", "spatialtf_bwd", "spatialtf_sampler_fwd", "spatialtf_sampler_bwd")
        out = "x".join(map(str, self.each(2, *EXTENTS)))
        return f"{start}c{self.choice(CHANNELS)}{self.image(2)}:o{out}:{self.choice(LAYOUTS[2])}"

    def rnn(self) -> str:
        start = f"{self.choice(('rnn_fwd', 'rnn_bwd'))}:{self.choice(DTYPES)}:t{self.choice((1, 2, 50, 1000))}"
        units = (self.choice((1, 3, 16, 33, 64, 100, 128, 300, 512, 1024, 2048)) for _ in range(2))
        sizes = f"b{self.choice((1, 2, 3, 16, 33, 128, 1000))}i{next(units)}h{next(units)}l{self.choice((1, 2, 3, 8))}"
        mode = self.choice(("lstm", "gru", "rnn_tanh", "rnn_relu"))
        return f"{start}{sizes}:{mode}:{self.choice(('uni', 'bi'))}:linear"


def problems(kind: str) -> list[Problem]:
    """Those that are problems, none of whose operands is too large for a GPU."""
    draw, found = Draw(kind), []
    text: Callable[[], str] = getattr(draw, kind)
    while len(found) < _PROBLEMS:
        try:
            problem = parse(text())
        except InvalidProblem:
            continue
        if max(operand.size_bytes for operand in problem.operands) < _MOST_BYTES:
            found.append(problem)
    return found


@pytest.mark.parametrize("device", [cpu_device(), H200], ids=["cpu", "cuda"])
@pytest.mark.parametrize("kind", ["conv", "pool", "bn", "softmax", "spatialtf", "rnn"])
def test_every_candidate_knows_what_it_would_do(kind: str, device: Device) -> None:
    """And one of them takes each problem."""
    for problem in problems(kind):
        candidates = [c for c in registry.candidates(problem.op, kind=device.kind) if c.provider != "cudnn"]
        taking = [candidate for candidate in candidates if candidate.supports(problem, device).ok]
        assert taking, str(problem)
        for candidate in taking:
            configs = candidate.configs(problem, device)
            assert configs, f"{candidate.id}, {problem}"
            for config in configs:
                what = f"{candidate.id} {config}, {problem}"
                assert 0 < candidate.estimate(problem, config, device) < 1e15, what
                assert candidate.workspace_bytes(problem, config, device) >= 0, what
                for launch in (
                    candidate.launches(problem, config, device) if isinstance(candidate, LaunchedCandidate) else ()
                ):
                    (x, y, z), end = launch.grid, 2 ** (launch.integer_bits - 1)
                    assert x < 2**31 and y < 2**16 and z < 2**16, what
                    assert all(-end <= integer < end for integer in launch.integers), f"{what}: {launch.source.label}"
