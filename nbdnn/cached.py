"""`cached_property` as functools has it from Python 3.12 on: a property that is worked out once an instance.

Before that it has a lock for all instances and threads of a process: a child that is forked while another thread holds
it waits for ever. Without it two threads may work the same value out, and one of them is kept.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING or sys.version_info >= (3, 12):
    from functools import cached_property
else:

    class cached_property:
        def __init__(self, work_out: Callable[[Any], Any]) -> None:
            self.work_out, self.__doc__ = work_out, work_out.__doc__

        def __set_name__(self, owner: type, name: str) -> None:
            self.name = name

        def __get__(self, instance: Any, owner: type | None = None) -> Any:
            if instance is None:
                return self
            # Only until it is there: an instance's own attributes come before what has no __set__. What a base class
            # has put there under the same name, asked by super(), makes way.
            instance.__dict__[self.name] = value = self.work_out(instance)
            return value


__all__ = ["cached_property"]
