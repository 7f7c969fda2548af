"""Recurrent networks' kernels for GPUs: what they need when compiled, and what they compute, in plain Python."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import emulated
import emulated_ptx
import pytest
from budget import ARCHITECTURES, assert_lean, device_of, launched
from emulated import Memory
from gpus import H200
from guarded import values
from libraries import library

import nbdnn.kernels.cuda
from nbdnn.kernels.cuda.launch import chained
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
)


def kernels(op: str, text: str, arch: str) -> None:
    device, problem = device_of(arch), parse(f"{op}:{text}")
    for candidate in CANDIDATES[op]:
        if not candidate.supports(problem, device).ok:
            continue
        for config in candidate.configs(problem, device):
            few = {each.source: each for each in chained(candidate.launches(problem, config, device), device)}
            for launch in few.values():
                assert_lean(launch, problem, arch, f"{candidate.id}, {config}")


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("text", NETWORKS)
@pytest.mark.parametrize("op", OPS)
def test_kernels_stay_within_their_means(op: str, text: str, arch: str) -> None:
    library("numba_cuda")
    kernels(op, text, arch)


@pytest.mark.parametrize("op", OPS)
def test_a_sample_of_the_kernels(op: str) -> None:
    library("numba_cuda")
    kernels(op, NETWORKS[2], "sm_90a")


# ---- arithmetic ------------------------------------------------------------------------------------------------------


def _load_shared(words: Any):
    def of(dtype: str, lanes: int):
        def load(array: list, place: int, address: int) -> None:
            array[place : place + lanes] = words.LOAD_SHARED[lanes](address)

        return load

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


def run(problem: RnnProblem, candidate: Any, config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """All launches in plain Python, thread by thread; the outputs are the reference's."""
    block = emulated_ptx.install(monkeypatch)
    package = nbdnn.kernels.cuda.__dict__
    monkeypatch.setitem(package, "ptx_local", SimpleNamespace(load_shared=_load_shared(package["ptx"])))
    monkeypatch.setitem(package, "ptx_rnn", WORDS)
    monkeypatch.setitem(package, "ptx_cluster", SimpleNamespace())  # one block at a time has none
    emulated.assert_near(candidate, problem, config, values(problem, "normal"), H200, block)


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
