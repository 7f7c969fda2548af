"""What kernels call: linked into each as it was written, optimised and made machine code only there.

Numba does both for every function by itself, too, and then again for each that calls it, three or four times what is
several calls away. Nobody runs these functions but kernels: compiling takes a third less so (3x3 by Winograd 7.3 s
instead of 11, gradients of maxima in planes 3.9 instead of 6; Zen 3).

An argument that is a literal has a type of its own, for which Numba compiles the function once more. Where that is
long, and another call has a variable there, the literal is written `int64(0)`.
"""

from __future__ import annotations

from typing import Any

from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler


class _Linked(JITCodeLibrary):
    """The code of one function and of all that it calls, which no engine knows."""

    @property
    def codegen(self) -> _Linked:
        return self

    def set_env(self, name: str, environment: Any) -> None:
        """Only machine code has the place where the environment would go."""

    def get_pointer_to_function(self, name: str) -> int:
        self._ensure_finalized()
        return 0

    def _optimize_final_module(self) -> None:
        """In the kernels."""

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._finalized = True


class LinkedCompiler(Compiler):
    """Numba's compiler; its results are linked into kernels and do not run by themselves."""

    def compile_extra(self, func: Any) -> Any:
        self.state.library = _Linked(self.state.targetctx.codegen(), func.__qualname__)
        return super().compile_extra(func)
