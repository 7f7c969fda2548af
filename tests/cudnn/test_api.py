"""The enumerators are the header's, and a refused call says what cuDNN says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from ctypes import byref, c_void_p
from enum import IntEnum
from functools import cache
from pathlib import Path

import pytest

from nbdnn.cudnn import api, enums
from nbdnn.cudnn.api import StatusError, call, naming
from nbdnn.cudnn.enums import PREFIXES, Status
from nbdnn.cudnn.library import library
from nbdnn.errors import CudnnError
from nbdnn.problem import parse


@cache
def headers() -> list[Path]:
    found = sorted(library().path.parent.parent.glob("include/cudnn*.h"))
    assert found, f"no headers beside {library().path}"
    return found


@cache
def text_of(header: Path) -> str:
    return re.sub(r"/\*.*?\*/|//[^\n]*", "", header.read_text(errors="replace"), flags=re.DOTALL)


def enumerators() -> Iterator[tuple[str, str, int]]:
    """(type, name, value) of every enumerator in the headers of the installed cuDNN."""
    for header in headers():
        for body, name in re.findall(
            r"typedef enum\s*\w*\s*\{([^}]*)\}\s*(\w+)(?:\s+CUDNN_DEPRECATED)?\s*;", text_of(header)
        ):
            known: dict[str, int] = {}
            last = -1
            for word, value in re.findall(r"(CUDNN_\w+)(?:\s+CUDNN_DEPRECATED_ENUM)?\s*(?:=\s*(\w+))?\s*(?:,|$)", body):
                number = last + 1 if not value else known.get(value)
                last = known[word] = int(value.rstrip("U"), 0) if number is None else number
                yield name, word, last


@pytest.fixture(scope="module")
def header() -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for kind, name, value in enumerators():
        found.setdefault(kind, {})[name] = value
    return found


def test_every_enumeration_is_compared() -> None:
    own = {each for each in vars(enums).values() if isinstance(each, type) and issubclass(each, IntEnum)} - {IntEnum}
    assert own == set(PREFIXES)


@pytest.mark.parametrize("own", PREFIXES, ids=lambda own: own.__name__)
def test_enumerators_are_the_headers(own: type[IntEnum], header: dict[str, dict[str, int]]) -> None:
    kind, begin, end = PREFIXES[own]
    theirs = header[kind]
    assert {f"{begin}{each.name}{end}": each.value for each in own} == {
        f"{begin}{each.name}{end}": theirs.get(f"{begin}{each.name}{end}") for each in own
    }


def declared(name: str) -> str:
    """The parameters of a function, as a header declares them."""
    for path in headers():
        if found := re.search(rf"cudnnStatus_t CUDNNWINAPI\s+{name}\((.*?)\);", text_of(path), re.DOTALL):
            return found[1]
    raise AssertionError(f"no header declares {name}")


def c_kind(parameter: str) -> str:
    """What a parameter is for the calling convention."""
    if re.search(r"\*|\[\]|cudnn\w*Descriptor_t|cudnnHandle_t|cudaStream_t", parameter):
        return "pointer"
    return {"size_t": "size_t", "int64_t": "int64", "double": "double"}.get(parameter.split()[-2], "int")


@pytest.mark.parametrize("name", api._PROTOTYPES)
def test_prototypes_are_the_headers(name: str) -> None:
    kinds = {
        api.c_void_p: "pointer",
        api.c_size_t: "size_t",
        api.c_int64: "int64",
        api.c_double: "double",
        api.c_int: "int",
    }
    assert [kinds.get(given, "pointer") for given in api.function(name).argtypes] == [
        c_kind(parameter) for parameter in declared(name).split(",")
    ]


def test_a_refusal_names_the_function_the_status_and_cudnns_words() -> None:
    slot = c_void_p()
    call("cudnnCreateTensorDescriptor", byref(slot))
    negative, ones = (api.c_int * 4)(2, -3, 8, 8), (api.c_int * 4)(1, 1, 1, 1)
    with pytest.raises(StatusError) as caught:
        call("cudnnSetTensorNdDescriptor", slot, 0, 4, negative, ones)
    call("cudnnDestroyTensorDescriptor", slot)
    assert isinstance(caught.value, CudnnError) and caught.value.kind == Status.BAD_PARAM
    assert re.match(r"cudnnSetTensorNdDescriptor -> CUDNN_STATUS_BAD_PARAM\w* \(20\d\d\): \S", str(caught.value))


def test_an_error_names_the_problem() -> None:
    problem = parse("conv_fwd:f32:n1c2h8w8:k3r3s3:p1x1:u1x1:d1x1:g1:cross:nchw")
    with pytest.raises(StatusError, match=f"cudnnCreate -> .*; {problem}") as caught, naming(problem):
        raise StatusError("cudnnCreate -> CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED (4004)", 4004)
    assert caught.value.kind == Status.INTERNAL_ERROR
