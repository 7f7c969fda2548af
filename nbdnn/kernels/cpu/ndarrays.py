"""Whether NumPy arrays are like those of an earlier call: their C structs, compared by one compiled function.

What a call depends on are six attributes of each array, which cost Python more than a small kernel takes: 1 us an
array, and as much again to look them up. The struct is NumPy's stable ABI; that objects and tuples lie as CPython lays
them out is tried on some before anything is recognised.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
from numba import njit, types

from nbdnn.array import Recogniser
from nbdnn.kernels.cpu.compile import DEVICE, compile_entry
from nbdnn.kernels.cpu.vector import pointer, stack

MOST_ARRAYS, MOST_AXES = 12, 8  # no call but a gradient of LSTMs has more
_OTHERS = -1  # instead of the first address: arrays that are not alike

# Where an object has its type, and a tuple its length and its items. An ndarray goes on, as PyArrayObject_fields, with
# char *data; int nd; npy_intp *dimensions, *strides; PyObject *base; PyArray_Descr *descr; int flags.
_HEAD = object.__basicsize__
_TYPE, _LENGTH, _ITEMS = _HEAD - 8, _HEAD, tuple.__basicsize__
_DATA, _AXES, _SHAPE, _STRIDES, _DTYPE, _FLAGS = (_HEAD + offset for offset in (0, 8, 16, 24, 40, 48))
_WRITEABLE = 0x0400

# Facts, of int64: their number, and the addresses of `tuple`, `ndarray` and None; then a row for each array: whether
# there is one, the address of its dtype, whether it may be written, its number of axes, its shape and its strides.
_COMMON, _ROW = 4, 4 + 2 * MOST_AXES

_i32, _i64 = pointer("i32"), pointer("i64")
_stack = stack(8 * MOST_ARRAYS)


@njit(**DEVICE)
def _are_alike(arrays, facts, found):
    """Whether a tuple of arrays is as the facts have it; their addresses, 0 of None, are then what was found."""
    if _i64(arrays + _TYPE)[0] != facts[1] or _i64(arrays + _LENGTH)[0] != facts[0]:
        return False
    for place in range(facts[0]):
        array, row = _i64(arrays + _ITEMS)[place], _COMMON + _ROW * place
        found[place] = 0
        if facts[row] == 0:
            if array != facts[3]:
                return False
            continue
        if _i64(array + _TYPE)[0] != facts[2] or _i64(array + _DTYPE)[0] != facts[row + 1]:
            return False
        if _i32(array + _FLAGS)[0] & _WRITEABLE != facts[row + 2] or _i32(array + _AXES)[0] != facts[row + 3]:
            return False
        shape, strides = _i64(_i64(array + _SHAPE)[0]), _i64(_i64(array + _STRIDES)[0])
        for axis in range(facts[row + 3]):
            if shape[axis] != facts[row + 4 + axis] or strides[axis] != facts[row + 4 + MOST_AXES + axis]:
                return False
        found[place] = _i64(array + _DATA)[0]
    return True


def _read(arrays, facts):
    found = _i64(_stack())
    if not _are_alike(arrays, _i64(facts), found):
        found[0] = _OTHERS
    return (
        *(found[0], found[1], found[2], found[3], found[4], found[5]),
        *(found[6], found[7], found[8], found[9], found[10], found[11]),
    )


_SIGNATURE = types.UniTuple(types.int64, 12)(types.int64, types.int64)


@cache
def _compiled() -> Callable[[int, int], tuple[int, ...]]:
    return compile_entry(_read, (_TYPE, _LENGTH, _ITEMS), _SIGNATURE)


def recogniser(arrays: Sequence[Any]) -> Recogniser | None:
    """As `Library.recogniser`, of a tuple of NumPy's arrays alone; None of others, of many axes or of dtypes that are
    not the ones that NumPy has of their kind."""
    present = [array for array in arrays if array is not None]
    if not (_is_laid_out_as_here() and len(arrays) <= MOST_ARRAYS and all(type(a) is np.ndarray for a in present)):
        return None
    # One object is float32; but what pickle makes is float32 as well, and another one each time.
    if any(array.ndim > MOST_AXES or array.dtype is not np.dtype(array.dtype.type) for array in present):
        return None
    facts = np.zeros(_COMMON + _ROW * len(arrays), np.int64)
    facts[:_COMMON] = len(arrays), id(tuple), id(np.ndarray), id(None)
    for array, row in zip(arrays, facts[_COMMON:].reshape(len(arrays), _ROW), strict=True):
        if array is not None:
            row[:4] = 1, id(array.dtype), array.flags.writeable * _WRITEABLE, array.ndim
            row[4 : 4 + array.ndim] = array.shape
            row[4 + MOST_AXES : 4 + MOST_AXES + array.ndim] = array.strides
    read, count, address = _compiled(), len(arrays), facts.ctypes.data
    alive = facts, [array.dtype for array in present]  # no other dtype comes to lie where one of these does

    def recognise(others: Sequence[Any], _alive: Any = alive) -> list[int] | None:
        found = read(id(others), address)
        return list(found[:count]) if found[0] >= 0 else None

    return recognise


@cache
def _is_laid_out_as_here() -> bool:
    """Whether an array and a tuple of this interpreter have their parts where this module looks for them."""
    if sys.implementation.name != "cpython" or ctypes.sizeof(ctypes.c_void_p) != 8:
        return False
    array = np.zeros((2, 3, 4), np.float32)[:, ::2]
    both = array, None
    word, number = ctypes.c_int64.from_address, ctypes.c_int32.from_address
    found = [word(id(both) + at).value for at in (_TYPE, _LENGTH, _ITEMS, _ITEMS + 8)]
    found += [word(id(array) + at).value for at in (_TYPE, _DATA, _DTYPE)]
    found += [number(id(array) + _AXES).value, number(id(array) + _FLAGS).value & _WRITEABLE]
    wanted = [id(tuple), 2, id(array), id(None), id(np.ndarray), array.ctypes.data, id(array.dtype), 3, _WRITEABLE]
    if found != wanted:
        return False
    lists = [(ctypes.c_int64 * 3).from_address(word(id(array) + at).value) for at in (_SHAPE, _STRIDES)]
    return [tuple(each) for each in lists] == [array.shape, array.strides]
