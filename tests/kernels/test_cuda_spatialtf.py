"""The spatial transformer's kernels for GPUs: what they need when compiled, and what they compute, in plain Python."""

from __future__ import annotations

import sys
from collections import Counter
from math import ceil
from types import SimpleNamespace
from typing import Any

import emulated
import emulated_ptx
import numpy as np
import pytest
from budget import ARCHITECTURES, assert_lean, device_of, launched
from emulated import Memory
from gpus import H200
from guarded import values

import nbdnn.kernels.cuda
from nbdnn.kernels.cuda import (
    spatialtf_binned,
    spatialtf_gradient,
    spatialtf_held,
    spatialtf_staged,
    spatialtf_staged_gradient,
)
from nbdnn.kernels.cuda.compile import ptx_text
from nbdnn.kernels.cuda.launch import Launch
from nbdnn.kernels.cuda.spatialtf_binned import Config
from nbdnn.problem import FAMILIES, ITEMSIZE, parse
from nbdnn.problem_spatialtf import SpatialtfProblem

OPS = FAMILIES["spatialtf"]
CANDIDATES = launched(OPS)
IMAGES = (
    "f32:n64c3h224w224:o224x224:nchw",
    "f32:n64c64h56w56:o56x56:nhwc",
    "bf16:n64c64h56w56:o56x56:nhwc:pf32",
    "f16:n64c64h56w56:o56x56:nchw",
    "f32:n64c3h224w224:o224x224:nhwc:a4",
    "f32:n64c3h224w224:o224x224:nhwc",
    "bf16:n64c3h224w224:o224x224:nhwc:pf32",
    "f64:n8c16h33w31:o31x33:nhwc",
    "f32:n256c1h28w28:o28x28:nchw",
    "f16:n16c256h28w28:o28x28:nchw",
    "f32:n1200c64h200w200:o200x200:nchw",  # 64-bit integers
)
# What more threads are worth: channels-last 64x64x56x56 63.9 us, not 71.7; planar in 16 bits, forward, 28.9, not 30.9;
# sampled channels-last, backward, 78 us with 1024 threads, 98 with 800.
_SPILLED_BYTES = {
    "spatialtf_gather-gather_kernel": 160,
    "spatialtf_direct-forward_kernel": 16,
    "spatialtf_binned-kernel": 32,
}
GRIDS = "f32:n64:o224x224", "bf16:n3:o7x9"


def kernels(op: str, text: str, arch: str) -> None:
    device, problem = device_of(arch), parse(f"{op}:{text}")
    for candidate in CANDIDATES[op]:
        if not candidate.supports(problem, device).ok:
            continue
        for launch in candidate.launches(problem, candidate.configs(problem, device)[0], device):
            narrow = problem.dtype != "f64" and launch.integer_bits == 32
            most = _SPILLED_BYTES.get(launch.source.label, 0) if narrow else 0
            kernel = assert_lean(launch, problem, arch, candidate.id, spilled_bytes=most)
            assert kernel.registers is None or kernel.registers <= 128, f"{arch}, {problem}, {kernel.registers}"


def texts(op: str) -> tuple[str, ...]:
    return GRIDS if op.startswith("spatialtf_grid") else IMAGES


@pytest.mark.usefixtures("numba_cuda")
@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(("op", "text"), [(op, text) for op in OPS for text in texts(op)])
def test_kernels_stay_within_their_means(op: str, text: str, arch: str) -> None:
    kernels(op, text, arch)


@pytest.mark.usefixtures("numba_cuda")
@pytest.mark.parametrize("op", OPS)
def test_a_sample_of_the_kernels(op: str) -> None:
    kernels(op, texts(op)[1], "sm_90a")


@pytest.mark.usefixtures("numba_cuda")
def test_vectors_are_moved_and_added_whole() -> None:
    for op, algorithm, wanted in (
        ("fwd", "direct", "ld.global.nc.v4"),
        ("fwd", "staged", "cp.async.cg.shared.global"),
        ("bwd", "atomic", "red.global.add.v4.f32"),
    ):
        problem = parse(f"spatialtf_{op}:f32:n64c{3 if algorithm == 'staged' else 64}h56w56:o56x56:nhwc")
        (candidate,) = (each for each in CANDIDATES[problem.op] if each.algorithm == algorithm)
        launches = candidate.launches(problem, candidate.configs(problem, H200)[0], H200)
        assert any(wanted in ptx_text(launch.source, "sm_90a") for launch in launches)


# ---- arithmetic ------------------------------------------------------------------------------------------------------


def _load(words: Any):
    def of(dtype: str, lanes: int):
        def load(array: list, place: int, base: Memory, index: int) -> None:
            assert index % lanes == 0
            for i in range(lanes):
                array[place + i] = words.WIDEN[dtype](base[index + i])

        return load

    return of


def _store(words: Any):
    def of(dtype: str, lanes: int):
        def store(base: Memory, index: int, array: list, place: int) -> None:
            assert index % lanes == 0
            for i in range(lanes):
                base[index + i] = words.NARROW[dtype](array[place + i])

        return store

    return of


def _add(compute: str, lanes: int, vectors: bool):
    def add(base: Memory, index: int, array: list, place: int, weight: float) -> None:
        for i in range(lanes):
            base[index + i] = base[index + i] + weight * array[place + i]

    return add


def _add_row(count: int):
    def add(base: Memory, index: int, values: tuple[float, ...]) -> None:
        begin, end = index // 4 * 4, -(-(index + count) // 4) * 4
        for at in range(begin, end):
            value = values[at - index] if index <= at < index + count else 0.0
            base[at] = base[at] + value

    return add


def _load_shared(block: emulated.Block, words: Any):
    def of(dtype: str, lanes: int):
        def load(array: list, place: int, address: int) -> None:
            for i in range(lanes):
                array[place + i] = _in_shared(block, words, dtype, address + i * ITEMSIZE[dtype])

        return load

    return of


def _copy_to_shared(block: emulated.Block, words: Any):
    def of(dtype: str, lanes: int):
        size_bytes = lanes * ITEMSIZE[dtype]

        def copy_half(address: int, base: Memory, index: int) -> None:
            at, shift = block.place_of(address & -4, 1), 8 * (address & 2)
            before = block.shared[at]
            kept = 0 if type(before) is float else before & 0xFFFF0000 >> shift
            block.shared[at] = kept | int(base[index]) << shift

        def copy(address: int, base: Memory, index: int) -> None:
            words.COPY_ASYNC[size_bytes](address, (base, index), size_bytes)

        return copy if size_bytes > 2 else copy_half

    return of


class Clusters:
    """Stands in for `ptx_cluster`, for the launches that pass through `cooperative`."""

    def __init__(self, block: emulated.Block) -> None:
        self._block, self._launch, self._arrived, self._shared = block, None, Counter(), {}
        self.LOAD_OF_BLOCK = {"f32": self._load}

    def cooperative(self, launch: Launch) -> Launch:
        self._launch = launch
        self._arrived.clear()
        return launch._replace(cooperative=launch.cluster > 1)

    def _first(self) -> int:
        return self._block.place[0] // self._launch.cluster * self._launch.cluster

    def arrive(self) -> None:
        self._shared[self._block.place[0]] = self._block.shared
        self._arrived[self._first()] += 1
        self._block.moved = True
        self._block.now.met = getattr(self._block.now, "met", 0) + 1

    def wait(self) -> None:
        every = self._block.now.met * self._launch.cluster * self._launch.source.threads
        while self._arrived[self._first()] < every:
            self._block.now.wait("turn")

    def _load(self, address: int, rank: int) -> float:
        return emulated.float_of(self._shared[self._first() + rank][self._block.place_of(address, 1)])


def _in_shared(block: emulated.Block, words: Any, dtype: str, address: int) -> float:
    size = ITEMSIZE[dtype]
    assert address % size == 0
    word = block.shared[block.place_of(address & -4, 1)]
    return float(word) if size == 4 else words.WIDEN[dtype](word >> 8 * (address & 2) & 0xFFFF)


def _meet(block: emulated.Block):
    def of(elems: int, width: int):
        def give(sums: list, pixel: list, moments: list, address: int, *place: float) -> None:
            right, down, column, row = place
            at = block.place_of(address, width)
            top = block.shared[at : at + elems]
            left, above = 1 - abs(right), 1 - abs(down)
            if left > 0 and above > 0:
                sums[:] = [total + left * above * each for total, each in zip(sums, top, strict=False)]
            product = sum(a * b for a, b in zip(top, pixel, strict=False))
            for first, share, distance in ((0, above, right), (3, left, down)):
                if share > 0 and -1 <= distance < 1:
                    slope = share * product if distance < 0 else -share * product
                    for k, by in enumerate((1.0, column, row)):
                        moments[first + k] += by * slope

        return give

    return of


def _change_shared(block: emulated.Block, operation: Any):
    def change(address: int, value: int) -> int:
        at = block.place_of(address, 1)
        before = block.shared[at]
        block.shared[at] = operation(before, value)
        return before

    return change


def _weighted(block: emulated.Block, words: Any):
    def of(dtype: str, offsets_bytes: tuple[int, ...], next_bytes: int, step: int):
        def sum_up(array: list, place: int, upper: int, lower: int, *weights: float) -> None:
            for i, offset in enumerate(offsets_bytes):
                places = [row + offset + side for row in (upper, lower) for side in (0, next_bytes)]
                pixels = (_in_shared(block, words, dtype, at) for at in places)
                array[place + i * step] = sum(w * pixel for w, pixel in zip(weights, pixels, strict=True) if w)

        return sum_up

    return of


INF, NAN = float("inf"), float("nan")
WEIGHTS = SimpleNamespace(
    add_lanes=_add,
    add_row=_add_row,
    size=abs,
    larger=lambda a, b: a if a > b else b,
    smaller=lambda a, b: a if a < b else b,
    hat=lambda d: max(0.0, 1 - abs(d)),
    narrow_hat=lambda d: max(0.0, 1 - abs(d)),
    slope=lambda d: -1.0 if 0 <= d < 1 else 1.0 if -1 <= d < 0 else 0.0,
    used=lambda weight, value: weight * value if weight else 0.0,
    with_pixel=lambda total, weight, value: total + weight * value if weight else total,
    whole=lambda value: int(max(min(value, 2.0**31 - 1), -(2.0**31))) if value == value else 0,
    ceiling=lambda value: ceil(max(min(value, 2.0**31 - 1), -(2.0**31))) if value == value else 0,
    most=lambda a, b: b if a != a else a if b != b else max(a, b),
    least=lambda a, b: b if a != a else a if b != b else min(a, b),
    up=ceil,
    reciprocal=lambda value: 1 / value if value else INF,
    near=lambda right, down: -1 <= right < 1 and -1 <= down < 1,
    prefetch=lambda address: None,
    against=lambda distance, value: value if distance < 0 else -value,
)


def run(
    problem: SpatialtfProblem, candidate: Any, given: dict[str, np.ndarray], monkeypatch: Any, most_configs: int = 1
) -> None:
    """All launches in plain Python, thread by thread; the outputs are the reference's."""
    block = emulated_ptx.install(monkeypatch)
    package = nbdnn.kernels.cuda.__dict__
    words = package["ptx"]
    of_shared = {"load_shared": _load_shared(block, words), "copy_to_shared": _copy_to_shared(block, words)}
    moves = SimpleNamespace(load=_load(words), store=_store(words), **of_shared)
    monkeypatch.setitem(package, "ptx_local", moves)
    block.collectives["least"] = lambda brought: [min(brought)] * 32
    of_block = {
        "weighted": _weighted(block, words),
        "meet": _meet(block),
        "least_of_warp": lambda value: block.now.wait("least", value),
        "SHARED": {"add": _change_shared(block, int.__add__), "max": _change_shared(block, max)},
    }
    monkeypatch.setitem(package, "ptx_spatialtf", SimpleNamespace(**vars(WEIGHTS), **of_block))
    clusters, launches = Clusters(block), candidate.launches
    monkeypatch.setitem(package, "ptx_cluster", clusters)
    monkeypatch.setattr(candidate, "launches", lambda *args: list(map(clusters.cooperative, launches(*args))))
    for config in candidate.configs(problem, H200)[:most_configs]:
        emulated.assert_near(candidate, problem, config, given, H200, block)


SMALL = (
    "f32:n2c3h7w9:o8x11:nchw",
    "f32:n2c8h7w6:o5x7:nhwc",
    "bf16:n1c8h6w1:o1x5:nhwc:pf32",
    "f32:n1c2h1w5:o20x19:nchw",
    "f32:n2c3h6w7:o9x8:nhwc",  # two pixels at once, also of what is added
    "f16:n2c10h4w7:o9x8:nchw",  # two turns of five channels
    "bf16:n4c3h2w9:o5x6:nhwc:pf32",
    "f32:n1c17h3w4:o6x5:nchw",  # up to eight threads an output, of which some have no channel left in the second turn
    "f32:n2c5h3w4:o6x5:nhwc",  # pixels that are no whole vectors, of more than one
    "f32:n1c3h5w7:o9x8:nhwc",  # one by one: the last vector would end behind the image
    "f16:n1c10h4w8:o9x11:nchw",  # planes that come while others are sampled, and pairs of columns without a second
    "bf16:n1c2h6w10:o34x36:nhwc:pf32",  # several tiles
    "f32:n1c3h60w70:o5x9:nchw",  # tiles whose pixels lie too far apart to be held at once
)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("text", SMALL)
def test_kernels_compute_what_the_reference_does(op: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if op.startswith("spatialtf_grid"):
        dtype, dims, out, *_ = text.split(":")
        text = ":".join((dtype, dims.partition("c")[0], out))
    problem = parse(f"{op}:{text}")
    assert isinstance(problem, SpatialtfProblem)
    for candidate in CANDIDATES[op]:
        if candidate.supports(problem, H200).ok:
            # Which share outputs, and planes, in different ways.
            most = 8 if candidate.algorithm in ("turned", "staged", "held", "binned") else 1
            run(problem, candidate, values(problem, "normal"), monkeypatch, most)


@pytest.mark.parametrize(
    "theta",
    [
        [[1, 0, 0], [0, 1, 0]],  # pixels to the last bit
        [[-0.7, 0.9, 0.1], [-0.9, -0.7, 0]],
        [[1, 0, 9], [0, 1, 0]],  # outside of the image
        [[NAN, 0, 0], [0, 1, 0]],
        [[1, 0, 0], [0, INF, 0]],
        [[1, -INF, 0], [INF, 1, INF]],
        [[3e38, 3e38, 0], [-3e38, 0, 1]],  # positions beyond float32
    ],
)
def test_a_tile_holds_every_pixel_of_its_outputs(theta: list, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = parse("spatialtf_fwd:f32:n1c3h6w9:o34x35:nchw")
    assert isinstance(problem, SpatialtfProblem)
    given = values(problem, "normal") | {"theta": np.array([theta], np.float32)}
    with np.errstate(all="ignore"):
        run(problem, spatialtf_staged.FWD, given, monkeypatch)


THETAS = (
    [[1, 0, 0], [0, 1, 0]],
    [[0, 1, 0], [-1, 0, 0.1]],
    [[0.1, 0, 0.3], [0, 0.2, 0]],  # many outputs near a pixel
    [[3, 0.5, 0], [0, 2, 0]],  # few
    [[0, 0, 0.2], [0, 0, -0.1]],  # all of them
    [[1, 1, 0], [1, 1, 0]],  # on a line
    [[1, 1, 0], [1, 1.001, 0]],  # nearly
    [[1, 0, 9], [0, 1, 0]],  # none
)


@pytest.mark.parametrize("theta", THETAS)
def test_a_pixel_finds_every_output_near_it(theta: list, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = parse("spatialtf_bwd:f32:n1c2h6w9:o10x7:nchw")
    assert isinstance(problem, SpatialtfProblem)
    given = values(problem, "normal") | {"theta": np.array([theta], np.float32)}
    for candidate in (spatialtf_gradient.GATHER, spatialtf_staged_gradient.BWD):
        run(problem, candidate, given, monkeypatch)


@pytest.mark.parametrize(("boxes", "other_way"), [({4: 32 << 10, 2: 32 << 10}, "gather_pixel"), ({2: 400}, "meet")])
def test_tiles_go_one_way_each(boxes: dict, other_way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the outputs in shared memory, unless these are too many."""

    def never(*args: Any, **kwargs: Any) -> Any:
        def fails(*args: Any) -> None:
            raise AssertionError(f"{other_way} was called")

        return fails

    problem = parse("spatialtf_bwd:f16:n1c3h34w40:o35x37:nhwc:pf32")
    assert isinstance(problem, SpatialtfProblem)
    monkeypatch.setattr(spatialtf_staged_gradient, "_BOX_BYTES", boxes)
    if other_way == "meet":
        monkeypatch.setattr(sys.modules[__name__], "_meet", lambda block: never)
    else:
        monkeypatch.setattr(spatialtf_staged_gradient, other_way, never)
    given = values(problem, "normal") | {"theta": np.array([[[0.9, 0.3, 0.1], [-0.3, 1.1, 0]]], np.float32)}
    run(problem, spatialtf_staged_gradient.BWD, given, monkeypatch, most_configs=2)


@pytest.mark.parametrize("theta", THETAS)
def test_outputs_that_meet_at_a_pixel_store_in_layers_or_wait(theta: list, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = parse("spatialtf_bwd:f32:n1c2h6w9:o10x17:nchw")  # with two outputs a thread
    assert isinstance(problem, SpatialtfProblem)
    given = values(problem, "normal") | {"theta": np.array([theta], np.float32)}
    run(problem, spatialtf_held.BWD, given, monkeypatch, most_configs=2)


@pytest.mark.parametrize(("channels", "buffers", "places"), [(16, 1, "normal"), (16, 1, "one"), (34, 2, "normal")])
def test_bins_hold_many_outputs_and_channels_come_in_parts(
    channels: int, buffers: int, places: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = parse(f"spatialtf_sampler_bwd:f16:n1c{channels}h6w9:o10x14:nchw:pf32")
    assert isinstance(problem, SpatialtfProblem)
    given = values(problem, "normal")
    if places == "one":
        given["grid"][:] = 0.1
    # What a plan of that size takes, and dy of four channels.
    monkeypatch.setattr(spatialtf_binned, "shared_bytes", lambda device: (2 << 10) + 4300 + 4 * 2 * 140)
    (launch,) = spatialtf_binned.SAMPLER_BWD.launches(problem, Config(1, 2, 128), H200)
    assert launch.source.specialised_on.buffers == buffers
    run(problem, spatialtf_binned.SAMPLER_BWD, given, monkeypatch, most_configs=3)
