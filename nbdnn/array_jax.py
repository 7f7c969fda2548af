"""Arrays of JAX on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cached_property, partial
from typing import Any

import jax
import numpy as np

from nbdnn.array import NumPy, View, empty_on_line, numpy_dtype
from nbdnn.errors import InvalidType


class Jax(NumPy):
    """JAX on the CPU, through the NumPy array that every JAX array can be seen as without a copy."""

    def read(self, array: Any) -> tuple[int, Hashable]:
        pointer, key = super().read(self._as_numpy(array))
        return pointer, ("jax", key)

    def view(self, array: Any) -> View:
        return super().view(self._as_numpy(array))

    def allocator(
        self, shape: tuple[int, ...], channels_last: bool, dtype: str, gpu: int = -1
    ) -> Callable[[], np.ndarray]:
        # JAX shares a buffer of NumPy only where it lies on a line, as its own do.
        return partial(empty_on_line, shape, numpy_dtype(dtype))

    def copy(self, target: np.ndarray, source: Any) -> None:
        super().copy(target, self._as_numpy(source))

    def given(self, array: np.ndarray) -> Any:
        if array.dtype.name == "bfloat16":  # NumPy exports no bfloat16 by DLPack
            return jax.dlpack.from_dlpack(array.view(np.uint16)).view(jax.numpy.bfloat16)
        return jax.dlpack.from_dlpack(array)

    @cached_property
    def _cpu_only(self) -> bool:
        return jax.default_backend() == "cpu"

    def _as_numpy(self, array: Any) -> np.ndarray:
        if not self._cpu_only and any(device.platform != "cpu" for device in array.devices()):
            raise InvalidType(f"a JAX array on {array.devices()}: only CPU arrays are supported")
        return np.asarray(array)


JAX = Jax()
