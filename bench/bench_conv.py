"""Each convolution algorithm, with its default config, on the kinds of layers that networks are made of."""

from __future__ import annotations

import pytest

from nbdnn.device import cpu_device
from nbdnn.dispatch import registry, workspace
from nbdnn.dispatch.timing import Operands
from nbdnn.problem import parse
from nbdnn.problem_conv import CONV_OPS

SHAPES = {
    "3x3": "n1c128h28w28:k128r3s3:p1x1:u1x1:d1x1:g1:cross:nchw",
    "3x3 nhwc": "n1c128h28w28:k128r3s3:p1x1:u1x1:d1x1:g1:cross:nhwc",
    "1x1": "n1c256h28w28:k128r1s1:p0x0:u1x1:d1x1:g1:cross:nchw",
    "3x3 stride 2": "n1c128h56w56:k128r3s3:p1x1:u2x2:d1x1:g1:cross:nchw",
    "7x7 first": "n1c3h224w224:k64r7s7:p3x3:u2x2:d1x1:g1:cross:nchw",
    "5x5": "n1c64h28w28:k64r5s5:p2x2:u1x1:d1x1:g1:cross:nchw",
    "depthwise": "n1c192h28w28:k192r3s3:p1x1:u1x1:d1x1:g192:cross:nchw",
    "depthwise nhwc": "n1c192h28w28:k192r3s3:p1x1:u1x1:d1x1:g192:cross:nhwc",
    "grouped": "n1c128h28w28:k128r3s3:p1x1:u1x1:d1x1:g32:cross:nchw",
    "3-D": "n1c32d8h28w28:k32t3r3s3:p1x1x1:u1x1x1:d1x1x1:g1:cross:ncdhw",
}
DEVICE = cpu_device()
CASES = [
    pytest.param(candidate, parse(f"{op}:f32:{shape}"), id=f"{candidate.id}-{name}")
    for op in CONV_OPS
    for name, shape in SHAPES.items()
    for candidate in registry.candidates(op)
    if candidate.supports(parse(f"{op}:f32:{shape}"), DEVICE).ok
]


@pytest.mark.parametrize(("candidate", "problem"), CASES)
def bench_convolution(benchmark, candidate, problem) -> None:
    config = candidate.configs(problem, DEVICE)[0]
    memory = workspace.take(candidate.workspace_bytes(problem, config, DEVICE))
    runner = candidate.prepare(problem, config, DEVICE)
    operands = Operands(problem, copies=1)
    benchmark.group = str(problem)
    benchmark(runner, operands.pointers[0], (1.0, 0.0), memory.address, 0)
    benchmark.extra_info["gflops"] = problem.flops / benchmark.stats["median"] / 1e9
