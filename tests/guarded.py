"""Operands in memory as unkind as a caller's: no better aligned than promised, with NaN before, behind and inside."""

from __future__ import annotations

from zlib import crc32

import ml_dtypes
import numpy as np

from nbdnn import driver, reference
from nbdnn.problem import ANY_ITEMSIZE, ITEMSIZE, Operand, Problem

NUMPY_DTYPE = {
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "f32": np.float32,
    "f64": np.float64,
    "u8": np.uint8,
    "i64": np.int64,
}
_GUARD_BYTES = 4096
_NAN_BYTE = 0xFF  # repeated, it is a NaN of every floating-point type


class Buffer:
    """`size_bytes` between guards, at an address that is a multiple of `align` and of nothing larger."""

    def __init__(self, size_bytes: int, align: int) -> None:
        self._raw = np.full(size_bytes + 2 * _GUARD_BYTES + 2 * align, _NAN_BYTE, np.uint8)
        base = self._base()
        address = -(-(base + _GUARD_BYTES) // (2 * align)) * (2 * align) + align
        self._start, self._stop = address - base, address - base + size_bytes
        self.address = address

    def _base(self) -> int:
        """Address of the first guard."""
        return self._raw.ctypes.data

    def send(self) -> None:
        """Bring what was written on the host to where kernels run."""

    def fetch(self) -> None:
        """Bring what kernels wrote to the host."""

    def array(self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: str) -> np.ndarray:
        """The array of logical `shape` with `strides` in elements that fills the buffer."""
        numpy_dtype = np.dtype(NUMPY_DTYPE[dtype])
        strides_bytes = tuple(stride * numpy_dtype.itemsize for stride in strides)
        return np.ndarray(shape, numpy_dtype, self._raw, self._start, strides_bytes)

    def poison(self) -> None:
        """NaN everywhere, as before anything was written."""
        self._raw[self._start : self._stop] = _NAN_BYTE

    def is_guarded(self) -> bool:
        """Whether nobody wrote outside."""
        return bool((self._raw[: self._start] == _NAN_BYTE).all() and (self._raw[self._stop :] == _NAN_BYTE).all())


class GpuBuffer(Buffer):
    """The same in the memory of a GPU; the host has an image of it."""

    def _base(self) -> int:
        self._memory = driver.Memory(0, self._raw.nbytes)
        return self._memory.address

    def send(self) -> None:
        driver.upload(self._memory.address, self._raw)

    def fetch(self) -> None:
        driver.call("cuCtxSynchronize")
        driver.download(self._raw, self._memory.address)


BUFFERS = {"cpu": Buffer, "cuda": GpuBuffer}


class Operands:
    """A buffer and an array for each operand of a problem; outputs hold NaN, or data where they are read."""

    def __init__(self, problem: Problem, values: dict[str, np.ndarray], kind: str = "cpu") -> None:
        self._values = values
        self.buffers = {o.name: BUFFERS[kind](o.size_bytes, operand_align(problem, o)) for o in problem.operands}
        self.arrays = {o.name: self.buffers[o.name].array(o.shape, o.strides, o.dtype) for o in problem.operands}
        self.pointers = tuple(self.buffers[o.name].address for o in problem.operands)
        self._outs = [o.name for o in problem.operands if o.role == "out"]
        for name, value in values.items():
            self.arrays[name][...] = value
        for buffer in self.buffers.values():
            buffer.send()

    @property
    def outs(self) -> dict[str, np.ndarray]:
        return {name: self.arrays[name] for name in self._outs}

    def reset(self) -> None:
        """The outputs as before the first run."""
        for name in self._outs:
            self.buffers[name].poison()
            if name in self._values:
                self.arrays[name][...] = self._values[name]
            self.buffers[name].send()

    def keep(self, *names: str) -> None:
        """Take inputs that a kernel wrote for what they are."""
        self.fetch()
        self._values |= {name: self.arrays[name].copy() for name in names}

    def fetch(self) -> None:
        """See on the host what kernels wrote."""
        for buffer in self.buffers.values():
            buffer.fetch()

    def assert_only_outs_were_written(self) -> None:
        for name, buffer in self.buffers.items():
            assert buffer.is_guarded(), f"wrote outside of {name}"
            if name not in self._outs:
                assert np.array_equal(self.arrays[name], self._values[name], equal_nan=True), f"wrote into {name}"


def operand_align(problem: Problem, operand: Operand) -> int:
    """Bytes that the operand's address is a multiple of: what the problem promises of tensors, or its own type's."""
    own = ANY_ITEMSIZE[operand.dtype]
    return max(problem.align, own) if operand.dtype in ITEMSIZE else own


def values(problem: Problem, kind: str) -> dict[str, np.ndarray]:
    """Contents for each operand that is read: 'integers' (-3..3 without 0) or 'normal' (zero mean, if any)."""
    rng = np.random.default_rng(crc32(f"{kind} {problem}".encode()))
    filled = {}
    for operand in (o for o in problem.operands if o.is_read):
        if operand.dtype not in ITEMSIZE:
            value = rng.integers(0, 256, operand.shape)
        elif kind == "integers":
            value = rng.integers(1, 4, operand.shape) * rng.choice([-1, 1], operand.shape)
        else:
            value = rng.standard_normal(operand.shape) * operand.scale
        if operand.positive:
            value = abs(value) + 0.5
        filled[operand.name] = value.astype(NUMPY_DTYPE[operand.dtype])
    for name, value in reference.derived(problem, filled).items():
        filled[name] = value.astype(filled[name].dtype)
    return filled
