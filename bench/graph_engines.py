"""cuDNN's graph engines for batch normalisation and pooling beside what nbdnn chooses: do they win anywhere?

    python bench/graph_engines.py [--rows TEXT]... [--most N]

No candidate takes these engines. Of each problem the first N engine configs that cuDNN proposes (default 4) are
planned, run once and compared with what nbdnn's choice computes, and replayed in turns with it; a config that does not
plan or run is printed with the reason. Each problem has a process of its own: an engine that reads where it must not
ends no other's. A ratio is nbdnn / cuDNN: above 1 an engine wins, and is worth a candidate.
"""

from __future__ import annotations

import argparse
import ctypes
from collections.abc import Iterator
from multiprocessing import get_context
from typing import NamedTuple

import numpy as np

from nbdnn import driver
from nbdnn.cudnn.api import call
from nbdnn.cudnn.descriptors import DATA_TYPE, Backend
from nbdnn.cudnn.enums import Attribute, AttributeType, DescriptorType
from nbdnn.cudnn.graph import EngineConfig, Packs, Plan, operation_graph, plan, proposals
from nbdnn.cudnn.handle import Handle, handle, property_descriptor
from nbdnn.device import Gpu, gpu
from nbdnn.dispatch import dispatcher
from nbdnn.dispatch.benchmark import rotating
from nbdnn.dispatch.selection import Filters, fastest, survey
from nbdnn.dispatch.timing_gpu import GpuOperands
from nbdnn.dispatch.tuner import tune
from nbdnn.errors import CudaError, CudnnError
from nbdnn.problem import Problem, dense_strides, parse
from nbdnn.problem_bn import BnProblem
from nbdnn.problem_pool import PoolProblem

_BN_SHAPES = "n32c256h56w56", "n32c512h7w7", "n4c64d16h56w56"
_POOLS = (
    "n32c64h112w112:r3s3:p1x1:u2x2:max",
    "n16c64h224w224:r2s2:p0x0:u2x2:max",
    "n32c256h28w28:r3s3:p1x1:u1x1:average_inc_pad",
    "n4c64d16h112w112:t2r2s2:p0x0x0:u2x2x2:max",
)
# cuDNN's numbers of what only this asks for (cudnn_graph.h).
_RESAMPLE, _RESAMPLE_FWD, _RESAMPLE_BWD, _NORM_FWD, _NORM_BWD = 24, 25, 26, 29, 30
_RESAMPLE_MODE, _PADDING_MODE, _FRACTION, _NORM_MODE, _NORM_PHASE = 21, 22, 26, 27, 28
_BY_VALUE = 908
_BATCH_NORM, _TRAINING = 2, 1
_MODES = {"max": 3, "average_inc_pad": 2, "average_exc_pad": 4}
_ZERO_PAD, _LEAST_PAD = 0, 1
# Attributes of operations by operand; of a norm's forward also epsilon.
_OPERANDS = {
    "bn_train": {"x": 2002, "mean": 2003, "invstd": 2004, "gamma": 2005, "beta": 2006, "y": 2013},
    "bn_bwd": {
        "x": 2101, "mean": 2102, "invstd": 2103, "dy": 2104, "gamma": 2105, "dgamma": 2107, "dbeta": 2108, "dx": 2109
    },
    "pool_fwd": {"x": 1710, "y": 1711},
    "pool_bwd": {"dx": 1720, "dy": 1721, "x": 1726, "y": 1727},
}  # fmt: skip
_EPSILON, _EPSILON_ID = 2007, 99
_SAMPLES = 7


def rows() -> list[str]:
    """The texts of the problems."""
    bn = [
        f"{op}:{dtype}:{shape}:spatial:{layout}{parameters}"
        for op in ("bn_train", "bn_bwd")
        for shape in _BN_SHAPES
        for layout in (("ndhwc", "ncdhw") if "d" in shape else ("nhwc", "nchw"))
        for dtype, parameters in (("f32", ""), ("f16", ":pf32"), ("bf16", ":pf32"))
    ]
    pools = [
        f"{op}:{dtype}:{shape}:{layout}"
        for op in ("pool_fwd", "pool_bwd")
        for shape in _POOLS
        for layout in (("ndhwc", "ncdhw") if "d16" in shape else ("nhwc", "nchw"))
        for dtype in ("f32", "bf16")
    ]
    return bn + pools


class _Fraction(ctypes.Structure):
    _fields_ = (("numerator", ctypes.c_int64), ("denominator", ctypes.c_int64))


def _tensor(number: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: str, by_value: bool) -> Backend:
    made = Backend(DescriptorType.TENSOR)
    made.set(Attribute.TENSOR_UNIQUE_ID, [number])
    made.set(Attribute.TENSOR_DATA_TYPE, [DATA_TYPE[dtype]], AttributeType.DATA_TYPE)
    made.set(Attribute.TENSOR_DIMENSIONS, shape).set(Attribute.TENSOR_STRIDES, strides)
    made.set(Attribute.TENSOR_BYTE_ALIGNMENT, [16])
    if by_value:
        made.set(_BY_VALUE, [True], AttributeType.BOOLEAN)
    return made.finalize()


def _linked(operation: Backend, problem: Problem) -> Backend:
    """With the problem's operands, which have their place and 1 as ids."""
    attributes = _OPERANDS[problem.op]
    for place, operand in enumerate(problem.operands):
        tensor = _tensor(place + 1, operand.shape, operand.strides, operand.dtype, False)
        operation.link(attributes[operand.name], tensor)
    return operation


def _normalisation(problem: BnProblem) -> Backend:
    forward = problem.op == "bn_train"
    made = Backend(_NORM_FWD if forward else _NORM_BWD)
    made.set(2000 if forward else 2100, [_BATCH_NORM], _NORM_MODE)
    if forward:
        made.set(2001, [_TRAINING], _NORM_PHASE)
        one = (1,) * len(problem.shape)
        made.link(_EPSILON, _tensor(_EPSILON_ID, one, dense_strides(one, False), "f32", True))
    return _linked(made, problem).finalize()


def _pooling(problem: PoolProblem) -> Backend:
    forward, axes = problem.op == "pool_fwd", len(problem.spatial)
    windows = Backend(_RESAMPLE)
    windows.set(1700, [_MODES[problem.mode]], _RESAMPLE_MODE)
    windows.set(1701, [DATA_TYPE["f32"]], AttributeType.DATA_TYPE).set(1702, [axes])
    windows.set(1708, [_LEAST_PAD if problem.is_max else _ZERO_PAD], _PADDING_MODE)
    for attribute, values in ((1703, problem.pad), (1704, problem.pad), (1705, problem.stride), (1706, problem.window)):
        array = (_Fraction * axes)(*(_Fraction(value, 1) for value in values))
        call("cudnnBackendSetAttribute", windows.address, attribute, _FRACTION, axes, array)
    made = Backend(_RESAMPLE_FWD if forward else _RESAMPLE_BWD)
    made.link(1716 if forward else 1725, windows.finalize())
    return _linked(made, problem).finalize()


def graph(problem: Problem, where: Handle | None = None) -> Backend:
    """The problem as a graph; with a handle, one whose plans run."""
    operation = _normalisation(problem) if isinstance(problem, BnProblem) else _pooling(problem)
    return operation_graph([operation], where)


class _Runner:
    def __init__(self, problem: Problem, config: EngineConfig, device: Gpu) -> None:
        self.handle = handle(device)
        self.plan: Plan = plan(self.handle, graph(problem, self.handle), config)
        tensors = [(place + 1, place) for place in range(len(problem.operands))]
        self.epsilon = ctypes.c_float(problem.scalars[0]) if problem.op == "bn_train" else None
        if self.epsilon is not None:
            tensors.append((_EPSILON_ID, len(problem.operands)))
        own = () if self.epsilon is None else (ctypes.addressof(self.epsilon),)
        self.packs = Packs(tensors, own)

    def __call__(self, pointers: tuple[int, ...], scalars: tuple[float, ...], workspace: int, stream: int, /) -> None:
        self.handle.use(stream)
        pack = self.packs(pointers, workspace)
        call("cudnnBackendExecute", self.handle.address, self.plan.descriptor.address, pack.address)


class _Measured(NamedTuple):
    name: str
    us: float
    apart: float


def _results(operands: GpuOperands, problem: Problem) -> list[np.ndarray]:
    pairs = zip(operands.arrays(), problem.operands, strict=True)
    return [array.astype(np.float64) for array, operand in pairs if operand.role == "out" and operand.dtype == "f32"]


def measured(problem: Problem, device: Gpu, most: int) -> Iterator[_Measured]:
    """nbdnn's choice, then the engine configs. apart: the largest difference of float32 results, of their largest."""
    options, _ = survey(problem, device, Filters())
    option = fastest(options, tune(problem, device, dispatcher.database()).rows)
    assert option is not None
    operands = rotating(problem, device, device.free_memory_bytes() // 4)
    assert isinstance(operands, GpuOperands)
    runners = {str(option): (option.candidate.prepare(problem, option.config, device), option.workspace_bytes)}
    for proposal in proposals(graph(problem), property_descriptor(device))[:most]:
        try:
            made = _Runner(problem, proposal.config, device)
            runners[str(proposal.config)] = made, made.plan.workspace_bytes
        except (CudnnError, CudaError) as error:
            print(f"  {proposal.config}: {error}")
    watches, expected, apart = {}, None, {}
    for name, (runner, workspace_bytes) in runners.items():
        try:
            operands.run(runner, problem.scalars, workspace_bytes)
        except (CudnnError, CudaError) as error:
            print(f"  {name}: {error}")
            continue
        found = _results(operands, problem)
        expected = expected or found
        pairs = zip(found, expected, strict=True)
        apart[name] = max((float(np.abs(a - b).max() / np.abs(b).max()) for a, b in pairs), default=float("nan"))
        watches[name] = operands.stopwatch(runner, problem.scalars, workspace_bytes)
    for _ in range(_SAMPLES):
        for watch in watches.values():
            watch.sample()
    return (_Measured(name, watch.median_us, apart[name]) for name, watch in watches.items())


def report(text: str, most: int) -> None:
    """Print what was measured of one problem."""
    driver.use(0)
    own, *others = measured(parse(text), gpu(0), most)
    print(f"{text}: {own.name} {own.us:.1f} us")
    for other in others:
        ratio = own.us / other.us
        print(f"  cudnn {other.name} {other.us:.1f} us, ratio {ratio:.2f}, results {other.apart:.1e} apart")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", action="append", default=[], metavar="TEXT", help="only rows with this in their name")
    parser.add_argument("--most", type=int, default=4, metavar="N", help="engine configs of a problem (default 4)")
    args = parser.parse_args()
    for text in rows():
        if not args.rows or any(part in text for part in args.rows):
            process = get_context("spawn").Process(target=report, args=(text, args.most))
            process.start()
            process.join()
            if process.exitcode:
                print(f"{text}: its process ended with {process.exitcode}")


if __name__ == "__main__":
    main()
