"""Recurrent networks' kernels for GPUs: what they need when compiled, and what they compute, in plain Python."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import emulated
import emulated_ptx
import pytest
from budget import ARCHITECTURES, assert_lean, device_of, launched
from emulated import Memory
from gpus import H200
from guarded import values

import nbdnn.kernels.cuda
from nbdnn.candidate import NoConfig
from nbdnn.device import Gpu
from nbdnn.dispatch import registry
from nbdnn.kernels.cuda import rnn_fma_product
from nbdnn.kernels.cuda.rnn_grid_plan import Config
from nbdnn.kernels.cuda.rnn_passing import HELPERS, registers_of
from nbdnn.kernels.cuda.rnn_product import Kind, product_kernel
from nbdnn.problem import ITEMSIZE, parse
from nbdnn.problem_rnn import RnnProblem

OPS = ("rnn_fwd", "rnn_bwd")
CANDIDATES = launched(OPS)
NETWORKS = (
    "f32:t512b1i64h64l1:gru:uni:linear",
    "f32:t50b32i128h128l2:lstm:bi:linear",
    "f16:t1000b8i32h32l1:lstm:uni:linear",
    "bf16:t9b3i96h96l1:rnn_tanh:uni:skip",
    "f64:t9b3i7h9l2:gru:bi:linear:a8",
    "f32:t20000b200i32h600l1:rnn_relu:uni:linear",  # 64-bit integers
    "f16:t9b7i33h35l2:gru:bi:linear",
    "f32:t50b64i512h512l1:lstm:uni:linear",
    "f16:t50b12i520h520l1:gru:bi:linear",
    "f32:t50b60i300h300l1:rnn_tanh:bi:linear",  # of 12 and 16 warps
)


def kernels(op: str, text: str, arch: str, of: int = 1) -> None:
    """Of one config in so many."""
    device, problem = device_of(arch), parse(f"{op}:{text}")
    for candidate in CANDIDATES[op]:
        if not candidate.supports(problem, device).ok:
            continue
        for config in candidate.configs(problem, device)[::of]:
            few = {launch.source: launch for launch in candidate.launches(problem, config, device)}
            for launch in few.values():
                kernel = assert_lean(launch, problem, arch, f"{candidate.id}, {config}")
                if isinstance(config, Config) and launch.cooperative:
                    # Those that compute would wait for ever for registers that others do not have.
                    compiled, given = registers_of(launch.source.threads // 32 - HELPERS)
                    assert given <= compiled or kernel.registers == compiled, (candidate.id, config, kernel.registers)


@pytest.mark.usefixtures("numba_cuda")
@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("text", NETWORKS)
@pytest.mark.parametrize("op", OPS)
def test_kernels_stay_within_their_means(op: str, text: str, arch: str) -> None:
    kernels(op, text, arch)


@pytest.mark.usefixtures("numba_cuda")
@pytest.mark.parametrize("op", OPS)
def test_a_sample_of_the_kernels(op: str) -> None:
    kernels(op, NETWORKS[2], "sm_90a", 2)


# ---- arithmetic ------------------------------------------------------------------------------------------------------


def _load_shared(words: Any):
    def of(dtype: str, lanes: int):
        def load(array: list, place: int, address: int) -> None:
            array[place : place + lanes] = words.LOAD_SHARED[lanes](address)

        return load

    return of


def _load(words: Any):
    def of(dtype: str, lanes: int):
        def load(array: list, place: int, base: Memory, index: int) -> None:
            if lanes == 1:
                array[place] = words.WIDEN[dtype](base[index])
            elif dtype == "f32":
                array[place : place + lanes] = words.LOAD[lanes](base, index)
            else:
                found = words.LOAD[lanes // 2](base, index)
                array[place : place + lanes] = [value for word in found for value in words.UNPACK[dtype](word)]

        return load

    return of


def _store(words: Any):
    def of(dtype: str, lanes: int):
        def store(base: Memory, index: int, array: list, place: int) -> None:
            values = array[place : place + lanes]
            if lanes == 1:
                base[index] = words.NARROW[dtype](*values)
            elif dtype == "f32":
                words.STORE[lanes](base, index, values)
            else:
                words.STORE[lanes // 2](base, index, words.PACK[dtype](*values))

        return store

    return of


def _exp2(x: float) -> float:
    return 2.0**x if x < 128 else math.inf


def _moved(address: tuple[Memory, int], distance: int) -> tuple[Memory, int]:
    base, index = address
    size_bytes = ITEMSIZE[base.dtype] if base else 4
    assert distance % size_bytes == 0
    return base, index + distance // size_bytes


def _store_at(address: tuple[Memory, int], value: float) -> None:
    base, index = address
    base[index] = value


WORDS = SimpleNamespace(
    given=lambda base: int(base is not None),
    exp2=_exp2,
    reciprocal=lambda x: 1 / x,
    select=lambda condition, value, other: value if condition else other,
    moved=_moved,
    store_at=_store_at,
)


def _rows_by_images(words: Any):
    def of(units: int, gates: int, quads: int, images: int, pitch_bytes: int):
        def multiply(weights: list, found: list, address: int) -> None:
            for unit, image, gate in product(range(units), range(images), range(gates)):
                total, row = 0.0, (unit * gates + gate) * quads
                for quad in range(quads):
                    values = words.LOAD_SHARED[4](address + image * pitch_bytes + quad * 512)
                    total += sum(weights[(row + quad) * 4 + j] * value for j, value in enumerate(values))
                found[(unit * images + image) * gates + gate] = total

        return multiply

    return of


def run(
    problem: RnnProblem,
    candidate: Any,
    config: Any,
    monkeypatch: pytest.MonkeyPatch,
    device: Gpu = H200,
    early: bool = False,
) -> None:
    """All launches in plain Python, thread by thread; the outputs are the reference's. early: copies are."""
    block = emulated_ptx.install(monkeypatch)
    block.early = early
    package = nbdnn.kernels.cuda.__dict__
    words = package["ptx"]
    local = SimpleNamespace(
        load_shared=_load_shared(words),
        load=_load(words),
        store=_store(words),
        spread=lambda count: lambda array, values: array.__setitem__(slice(count), values),
    )
    monkeypatch.setitem(package, "ptx_local", local)
    monkeypatch.setitem(package, "ptx_rnn", WORDS)
    products = SimpleNamespace(
        rows_by_images=_rows_by_images(words), outer_products=words.outer_products, Factor=words.Factor
    )
    monkeypatch.setitem(package, "ptx_products", products)
    monkeypatch.setitem(package, "ptx_cluster", SimpleNamespace())  # one block at a time has none
    emulated.assert_near(candidate, problem, config, values(problem, "normal"), device, block)


SMALL = (
    "f32:t3b2i5h6l2:lstm:bi:linear",
    "f16:t2b5i3h9l1:gru:bi:linear",
    "bf16:t2b1i4h4l1:rnn_tanh:uni:skip",
    "f32:t4b3i6h6l1:gru:uni:skip",
    "f32:t2b2i3h33l1:rnn_relu:uni:linear",
)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("text", SMALL)
def test_kernels_compute_what_the_reference_does(op: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = parse(f"{op}:{text}")
    assert isinstance(problem, RnnProblem)
    for candidate in CANDIDATES[op]:
        # Blocks run one after the other here, so those of a cluster never meet.
        alone = [config for config in candidate.configs(problem, H200) if getattr(config, "cluster", 1) == 1]
        for config in alone[:3]:
            run(problem, candidate, config, monkeypatch)
            if op == "rnn_fwd":
                run(replace(problem, training=True), candidate, config, monkeypatch)


# Units of a warp (of a warpgroup back), warps of a block, pieces of its images: of every mode and dtype, with groups
# that are not full; and multiprocessors, where they are too few for all images at once.
GRIDS = {
    "rnn_fwd": (
        ("f32:t5b3i5h6l2:lstm:bi:linear", (1, 2, 1)),
        ("f32:t5b9i4h7l1:lstm:uni:linear", (2, 2, 2)),
        ("f16:t3b11i3h9l1:gru:bi:linear", (4, 1, 4)),
        ("bf16:t4b9i4h4l1:rnn_tanh:uni:skip", (1, 1, 2)),
        ("f32:t7b2i3h131l1:gru:uni:linear", (4, 8, 1)),
        ("f32:t1b5i3h10l1:rnn_relu:uni:linear", (2, 1, 2)),
        ("f32:t3b11i4h7l1:lstm:bi:linear", (2, 2, 1), 8),
    ),
    "rnn_bwd": (
        ("f32:t5b3i5h6l2:lstm:bi:linear", (8, 4, 1)),
        ("f32:t5b9i4h7l1:lstm:uni:linear", (4, 4, 2)),
        ("f16:t3b11i3h9l1:gru:bi:linear", (16, 4, 4)),
        ("bf16:t4b9i4h5l1:rnn_tanh:uni:linear", (8, 4, 2)),
        ("f32:t7b2i3h131l1:gru:uni:linear", (16, 8, 1)),
        ("f32:t1b5i3h10l1:rnn_relu:uni:linear", (4, 4, 2)),
        ("f32:t3b11i4h7l1:lstm:bi:linear", (8, 4, 1), 4),
    ),
}


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize(("op", "case"), [(op, case) for op, cases in GRIDS.items() for case in cases])
def test_blocks_pass_what_a_step_needs(op: str, case: tuple, early: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    text, config, *sms = case
    device = replace(H200, sms=sms[0]) if sms else H200
    problem, candidate = parse(f"{op}:{text}"), registry.candidate(f"{op}/numba/persistent_grid")
    assert isinstance(problem, RnnProblem)
    for each in (problem, replace(problem, training=True)) if op == "rnn_fwd" else (problem,):
        run(each, candidate, Config(*config), monkeypatch, device, early)


# Several tiles and stages of products; loaded four elements at once, one by one, and as the operand allows.
MATRICES = (
    "f16:t3b7i20h24l2:gru:bi:linear",
    "bf16:t3b6i19h23l2:gru:bi:linear",
    "f16:t3b6i8h68l1:rnn_tanh:uni:linear:a4",
)


# The same on the FMA units, of a tile and a part; copied four at once, and one by one.
TILES = (
    ("f32:t5b14i20h24l2:gru:bi:linear", 2),
    ("f32:t3b23i19h23l1:lstm:uni:linear", 1),
    ("f32:t3b23i24h24l1:rnn_tanh:bi:skip:a4", 0),
    ("f32:t3b46i20h20l1:lstm:uni:linear", 0),
    ("f32:t3b23i19h23l1:gru:uni:linear", 1),
)


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("text", "tile"), TILES)
def test_tiles_of_the_fma_units(op: str, text: str, tile: int, early: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """tile: the one that is taken, whatever the product."""
    monkeypatch.setattr(rnn_fma_product, "TILES", rnn_fma_product.TILES[tile : tile + 1])
    problem = parse(f"{op}:{text}")
    assert isinstance(problem, RnnProblem)
    run(replace(problem, training=op == "rnn_fwd"), CANDIDATES[op][-1], NoConfig(), monkeypatch, early=early)


@pytest.mark.parametrize("inputs", [100_000, 3_000_000])
def test_parts_of_wide_inputs_have_32_bit_indices(inputs: int) -> None:
    problem = parse(f"rnn_bwd:f32:t100b64i{inputs}h64l1:lstm:bi:linear")
    assert isinstance(problem, RnnProblem)
    direct = CANDIDATES["rnn_bwd"][-1]
    for launch in direct.launches(problem, NoConfig(), H200):
        if launch.source.builder is rnn_fma_product.product_kernel:
            f = rnn_fma_product.Fields(*launch.integers)
            assert launch.grid[1] * f.out_direction < 2**31


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("text", MATRICES)
def test_matrix_units_multiply_what_is_16_bits(op: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = parse(f"{op}:{text}")
    assert isinstance(problem, RnnProblem)
    run(replace(problem, training=op == "rnn_fwd"), CANDIDATES[op][-1], NoConfig(), monkeypatch)


@pytest.mark.parametrize(
    ("text", "roundings", "matrix"),
    [
        ("rnn_fwd:f16:t3b2i4h8l1:lstm:uni:linear", 1, True),
        ("rnn_fwd:bf16:t3b2i4h8l2:lstm:uni:linear", 2, True),
        ("rnn_bwd:f16:t3b2i4h8l1:lstm:uni:linear", 2, True),
        ("rnn_bwd:f32:t3b2i4h8l2:lstm:uni:linear", 1, False),
        ("rnn_bwd:f64:t3b2i4h8l2:lstm:uni:linear", 1, False),
    ],
)
def test_nothing_but_16_bits_is_rounded_to_tf32(text: str, roundings: int, matrix: bool) -> None:
    problem = parse(text)
    for device in (H200, replace(H200, capability=(7, 5))):
        new_enough = device == H200
        for candidate in CANDIDATES[problem.op]:
            if not candidate.supports(problem, device).ok:
                continue
            assert candidate.roundings(problem, device) == (roundings if new_enough else 1)
            launches = candidate.launches(problem, candidate.configs(problem, device)[0], device)
            kinds = [each.source.specialised_on for each in launches if each.source.builder is product_kernel]
            by_tiles = problem.dtype == "f32" and new_enough
            assert bool(kinds) != by_tiles
            assert {Kind(*kind).matrix for kind in kinds} == (set() if by_tiles else {matrix and new_enough})
