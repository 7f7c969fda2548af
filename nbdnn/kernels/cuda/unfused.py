"""An epilogue of its own, behind a forward that cannot fuse it: out = activation(out + bias + residual), in place.

The convolution before it leaves alpha*conv + beta*out, which every method can: so nothing is kept between the two but
the output itself. In 16 bits that is rounded once more than a fused epilogue would.

A thread finishes two quads of neighbours, which it loads before it stores one: of float32 and 16-bit data, where every
quad has one channel or four; else one element. Traffic: the output twice, most of it in the second-level cache, and
the residual. On an H200 bias and relu of 12.8 MB take 5.5 us more than the convolution alone. Source: own.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from math import ceil
from typing import NamedTuple

from nbdnn.cached import cached_property
from nbdnn.candidate import Candidate, Runner, Support
from nbdnn.device import Gpu
from nbdnn.kernels.cuda.compile import Source
from nbdnn.kernels.cuda.geometry import index_bits
from nbdnn.kernels.cuda.launch import Launch, Program, output_pointers
from nbdnn.kernels.cuda.peaks import copy_bytes_per_s
from nbdnn.kernels.cuda.quads import QUAD
from nbdnn.problem import DEFAULT_COMPUTE, ITEMSIZE
from nbdnn.problem_conv import ConvProblem

_THREADS = 256
_LAUNCH_US = 3.0


class _Variant(NamedTuple):
    """quads: whether a thread takes two quads, not one element; along_channels: whether a quad has four channels."""

    dtype: str
    epilogue: tuple[str, ...]
    quads: bool
    along_channels: bool
    bits: int


class _Fields(NamedTuple):
    """Element e belongs to channel e // inner % channels."""

    elements: int
    inner: int
    channels: int


class Unfused(Candidate[Hashable, Gpu]):
    """A forward candidate under its own name; an epilogue that it refuses, the kernel of this module does after it."""

    op = "conv_fwd"

    def __init__(self, base: Candidate) -> None:
        self.base = base
        self.provider, self.algorithm, self.algo = base.provider, base.algorithm, base.algo
        self.deterministic, self.math, self.by_name_only = base.deterministic, base.math, base.by_name_only

    @property
    def cudnn_version(self) -> int:
        return self.base.cudnn_version

    @cached_property
    def version(self) -> str:
        return f"{super().version}-{self.base.version}"

    def posed(self, problem: ConvProblem, device: Gpu) -> ConvProblem:
        """What the base computes: the problem itself, if it fuses all of it."""
        without = replace(problem, epilogue=("beta",) if "beta" in problem.epilogue else ())
        return problem if without == problem or self.base.supports(problem, device).ok else without

    def roundings(self, problem: ConvProblem, device: Gpu) -> int:
        return self.base.roundings(problem, device) + (self.posed(problem, device) != problem)

    def supports(self, problem: ConvProblem, device: Gpu) -> Support:
        return self.base.supports(self.posed(problem, device), device)

    def configs(self, problem: ConvProblem, device: Gpu) -> tuple[Hashable, ...]:
        return self.base.configs(self.posed(problem, device), device)

    def workspace_bytes(self, problem: ConvProblem, config: Hashable, device: Gpu) -> int:
        return self.base.workspace_bytes(self.posed(problem, device), config, device)

    def estimate(self, problem: ConvProblem, config: Hashable, device: Gpu) -> float:
        posed = self.posed(problem, device)
        us = self.base.estimate(posed, config, device)
        if posed == problem:
            return us
        moved_bytes = (3 if "res" in problem.epilogue else 2) * problem.operands[2].size_bytes
        return us + _LAUNCH_US + moved_bytes / copy_bytes_per_s(device) * 1e6

    def prepare(self, problem: ConvProblem, config: Hashable, device: Gpu) -> Runner:
        posed = self.posed(problem, device)
        convolve = self.base.prepare(posed, config, device)
        if posed == problem:
            return convolve
        finish, taken = Program([finish_launch(problem)], device), len(posed.operands)

        def run(pointers: tuple[int, ...], scalars: tuple[float, ...], workspace: int, stream: int, /) -> None:
            convolve(pointers[:taken], scalars, workspace, stream)
            finish(pointers, (), 0, stream)

        return run


def finish_launch(problem: ConvProblem) -> Launch:
    """Adds bias and residual to the output of a forward, and activates it."""
    out, tokens = problem.operands[2], tuple(token for token in problem.epilogue if token != "beta")
    fields = _Fields(out.size_elems, out.strides[1], problem.k)
    of_a_bias = problem.k if out.strides[1] == 1 else out.strides[1]
    whole = out.size_elems % QUAD == 0 and ("bias" not in tokens or of_a_bias % QUAD == 0)
    quads = whole and problem.dtype != "f64" and problem.align % (QUAD * ITEMSIZE[problem.dtype]) == 0
    variant = _Variant(
        problem.dtype, tokens, quads, quads and "bias" in tokens and out.strides[1] == 1, index_bits(problem, fields)
    )
    return Launch(
        source=Source(_finish_kernel, variant, _THREADS),
        grid=(ceil(out.size_elems / (_THREADS * (2 * QUAD if quads else 1))), 1, 1),
        pointers=output_pointers(problem),
        scalars="",
        integers=fields,
        integer_bits=variant.bits,
    )


def _finish_kernel(*specialised_on):
    from nbdnn.kernels.cuda import ptx

    variant = _Variant(*specialised_on)
    data = ptx.pointer(variant.dtype)
    kernel = _finish_quads(variant) if variant.quads else _finish_elements(variant)
    return kernel, (data, data, data, ptx.record(_Fields, variant.bits))


def _finish_quads(variant: _Variant):
    from nbdnn.kernels.cuda import ptx, quads

    integer, dtype, tokens = ptx.INTEGER[variant.bits], variant.dtype, variant.epilogue
    load, finish, one = quads.quad(dtype, False), quads.finish_quad(dtype, tokens), ptx.REAL["f32"](1.0)
    shift_of = quads.bias_quad(dtype, tokens, variant.along_channels)

    @ptx.inline
    def finished(v, out, at, bias, residual, f):
        rest, _ = ptx.divided(at, f.inner)
        _, channel = ptx.divided(rest, f.channels)
        finish(v, one, one, out, at, shift_of(bias, channel), residual)

    def finish_out(out, bias, residual, f):
        at = integer((integer(ptx.block_x()) * (2 * _THREADS) + ptx.thread_x()) * QUAD)
        later = integer(at + _THREADS * QUAD)
        if later < f.elements:
            first, second = load(out, at), load(out, later)
            finished(first, out, at, bias, residual, f)
            finished(second, out, later, bias, residual, f)
        elif at < f.elements:
            finished(load(out, at), out, at, bias, residual, f)

    return finish_out


def _finish_elements(variant: _Variant):
    from nbdnn.kernels.cuda import epilogue, ptx

    integer, widen = ptx.INTEGER[variant.bits], ptx.WIDEN[variant.dtype]
    store, one = epilogue.store(variant.dtype, variant.epilogue), ptx.REAL[DEFAULT_COMPUTE[variant.dtype]](1.0)

    def finish_out(out, bias, residual, f):
        at = integer(integer(ptx.block_x()) * _THREADS + ptx.thread_x())
        if at < f.elements:
            rest, _ = ptx.divided(at, f.inner)
            _, channel = ptx.divided(rest, f.channels)
            store(widen(out[at]), one, one, out, at, bias, channel, residual)

    return finish_out
