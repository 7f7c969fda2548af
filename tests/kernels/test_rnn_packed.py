"""What recurrent networks with packed weights stand on: formulas on vectors, tiles, crews of threads."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from math import ceil

import numba
import numpy as np
import pytest
from cells import check
from numba import njit

from nbdnn.device import Cpu
from nbdnn.dispatch import registry
from nbdnn.kernels.cpu.compile import DEVICE, compile_task
from nbdnn.kernels.cpu.crew import crew_bytes, first_patience, take_step
from nbdnn.kernels.cpu.exponential import power, sigmoid, tanh
from nbdnn.kernels.cpu.formula import relu, row_formula
from nbdnn.kernels.cpu.launch import Phase, Program
from nbdnn.kernels.cpu.rnn_product import tile_for, tile_of_columns
from nbdnn.kernels.cpu.rnn_split import Split
from nbdnn.kernels.cpu.vector import pointer
from nbdnn.problem import parse
from nbdnn.rnn_parameters import GATES

_FUNCTIONS = {
    "exp": (power, np.exp),
    "sigmoid": (sigmoid, lambda x: 1 / (1 + np.exp(-x))),
    "tanh": (tanh, np.tanh),
    "relu": (relu, lambda x: np.maximum(x, 0)),
}
_NUMPY = {"f32": np.float32, "f64": np.float64}


@cache
def _formula_task(name: str, dtype: str, vl: int):
    function = _FUNCTIONS[name][0]
    run, i64 = row_formula(lambda x: (function(x),), 1, 1, dtype, vl), pointer("i64")

    def task(args, ctx, index, worker):
        run(i64(ctx)[0], i64(args)[0])

    return compile_task(task, (name, dtype, vl))


def applied(name: str, x: np.ndarray, device: Cpu) -> np.ndarray:
    dtype = "f32" if x.dtype == np.float32 else "f64"
    y = np.full(x.size + 1, 77, x.dtype)
    table = np.array([x.ctypes.data, y.ctypes.data], np.int64)
    task = _formula_task(name, dtype, device.lanes(dtype))
    Program([Phase(task, 1, np.array([x.size], np.int64))])((table.ctypes.data,), ())
    assert y[-1] == 77
    return y[:-1]


@pytest.mark.parametrize("name", _FUNCTIONS)
@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_functions_of_vectors_are_good_to_a_few_eps(name: str, dtype: str, device: Cpu) -> None:
    rng = np.random.default_rng(0)
    parts = [rng.standard_normal(2000) * scale for scale in (1e-6, 0.1, 1, 10, 25)]
    x = np.concatenate([*parts, [0.0, -0.0, 0.625, -0.625, 80, -80]]).astype(_NUMPY[dtype])
    expected = _FUNCTIONS[name][1](x.astype(np.longdouble))
    error = abs(applied(name, x, device) - expected) / (np.finfo(x.dtype).eps * np.maximum(abs(expected), 1e-37))
    assert error.max() < 4


@pytest.mark.parametrize("name", _FUNCTIONS)
def test_what_is_no_number_stays_so_and_ends_are_reached(name: str, device: Cpu) -> None:
    x = np.array([np.nan, np.inf, -np.inf, 200, -200] * 4, np.float32)
    y = applied(name, x, device)[:5]
    assert np.isnan(y[0])
    ends = {"exp": (np.inf, 0), "sigmoid": (1, 1e-37), "tanh": (1, -1), "relu": (200, 0)}[name]
    for high in (y[1], y[3]):
        assert high >= ends[0]
    for low in (y[2], y[4]):
        assert ends[1] - 1e-37 <= low <= ends[1]


@pytest.mark.parametrize("length", [1, 15, 16, 17, 40])
def test_rows_of_any_length(length: int, device: Cpu) -> None:
    x = np.random.default_rng(0).standard_normal(length).astype(np.float32)
    assert np.array_equal(applied("relu", x, device), np.maximum(x, 0))


@pytest.mark.parametrize("isa", ["avx512", "avx2"])
def test_tiles_share_rows_so_that_none_lacks_more_than_one(isa: str, device: Cpu) -> None:
    """The kernel has a tile of mr rows and one of mr - 1, for as many rows as the tile was made for, or one less."""
    on = replace(device, isa=isa, vector_bytes=64 if isa == "avx512" else 32)
    for rows in range(1, 120):
        for vectors in range(1, 40):
            columns = vectors * on.lanes("f32")
            for tile in (tile_for(vectors, rows, "f32", on), tile_of_columns(columns, rows, "f32", on)):
                for count in {rows, max(1, rows - 1)}:
                    tiles = ceil(count / tile.mr)
                    assert tile.mr - 1 <= count // tiles and ceil(count / tiles) <= tile.mr, (rows, vectors)
            assert vectors % tile_for(vectors, rows, "f32", on).nv == 0


@cache
def _crew_task():
    """Each part of a step adds up what all parts of the step before have left, and counts how often it ran."""
    i64 = pointer("i64")

    @njit(**DEVICE)
    def part_of_step(step, part, address):
        sums, counts, parts = i64(address)[0], i64(address)[1], i64(address)[2]
        total = 1
        if step:
            for other in range(parts):
                total += i64(sums)[(step - 1) * parts + other]
        for _ in range(part * 50):
            total += i64(sums)[step * parts + part]
        i64(sums)[step * parts + part] = total % 1_000_003
        i64(counts)[step * parts + part] += 1

    take = take_step(part_of_step)

    def run(args, ctx, index, worker):
        parts, steps, crew = i64(ctx)[2], i64(ctx)[3], i64(ctx)[4]
        patience = first_patience()
        for step in range(steps):
            patience = take(crew, parts, index, step, patience, ctx)

    return compile_task(run, ())


@pytest.mark.parametrize("parts", [2, 3, 5])
@pytest.mark.parametrize("alone", [False, True])
def test_a_crew_takes_every_step_once_and_in_order(parts: int, alone: bool) -> None:
    """Also where its threads are fewer than its parts, or come one after the other."""
    steps = 3000
    for _ in range(1 if alone else 5):
        sums, counts = np.zeros((steps, parts), np.int64), np.zeros((steps, parts), np.int64)
        crew = np.zeros(crew_bytes(parts) // 8, np.int64)
        ctx = np.array([sums.ctypes.data, counts.ctypes.data, parts, steps, crew.ctypes.data], np.int64)
        Program([Phase(_crew_task(), parts, ctx, alone)])((), ())
        expected = 1
        for step in range(steps):
            assert (sums[step] == expected).all(), step
            expected = (1 + parts * expected) % 1_000_003
        assert (counts == 1).all()


@pytest.mark.parametrize(
    "text", ["rnn_fwd:f32:t9b2i5h40l1:lstm:uni:linear:train", "rnn_bwd:f32:t9b2i5h40l1:gru:bi:linear"]
)
def test_one_thread_may_do_the_parts_of_all(text: str, device: Cpu) -> None:
    problem = parse(text)
    candidate = registry.candidate(f"{problem.op}/cpu/packed")
    threads = numba.get_num_threads()
    numba.set_num_threads(1)
    try:
        check(candidate, problem, Split(1, 3), device)
    finally:
        numba.set_num_threads(threads)


@pytest.mark.parametrize("split", [Split(1, 2), Split(1, 4), Split(3, 1), Split(1, 1)], ids=str)
@pytest.mark.parametrize("mode", GATES)
def test_a_machine_of_more_threads(split: Split, mode: str, device: Cpu) -> None:
    """Its splits run on any."""
    for op in ("rnn_fwd", "rnn_bwd"):
        check(registry.candidate(f"{op}/cpu/packed"), parse(f"{op}:f32:t5b4i6h50l2:{mode}:bi:linear"), split, device)


def test_splits_give_every_thread_something_to_do(device: Cpu) -> None:
    on, packed = replace(device, threads=4), registry.candidate("rnn_fwd/cpu/packed")

    def names(text: str) -> set[str]:
        return {str(config) for config in packed.configs(parse(text), on)}

    assert names("rnn_fwd:f32:t9b8i5h256l1:lstm:uni:linear") == {"none", "batch4", "units4"}
    assert names("rnn_fwd:f32:t9b1i5h256l1:lstm:uni:linear") == {"none", "units4"}
    assert names("rnn_fwd:f32:t9b1i5h8l1:lstm:uni:linear") == {"none"}
    two = replace(device, threads=2)
    assert [str(c) for c in packed.configs(parse("rnn_fwd:f32:t9b8i5h256l1:lstm:bi:linear"), two)] == ["none"]


@pytest.mark.parametrize("narrow", [("avx2", 32), ("neon", 16)], ids=lambda narrow: narrow[0])
@pytest.mark.parametrize("mode", GATES)
def test_kernels_for_narrower_vectors(mode: str, narrow: tuple[str, int], device: Cpu) -> None:
    isa, vector_bytes = narrow
    narrower = replace(device, isa=isa, vector_bytes=min(vector_bytes, device.vector_bytes))
    for op in ("rnn_fwd", "rnn_bwd"):
        problem = parse(f"{op}:f32:t3b7i6h21l1:{mode}:uni:linear")
        for candidate in registry.candidates(op):
            check(candidate, problem, candidate.configs(problem, narrower)[0], narrower)
