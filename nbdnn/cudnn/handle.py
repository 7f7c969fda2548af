"""cuDNN's handles, one for each thread and GPU, and the properties of a GPU that graphs are planned for.

A handle costs 4 ms and, with the context, about 0.6 GB of the GPU: it is made when the first call needs it.
"""

from __future__ import annotations

import threading

from nbdnn import driver
from nbdnn.cudnn.api import call
from nbdnn.cudnn.descriptors import Backend, Owned
from nbdnn.cudnn.enums import Attribute, AttributeType, DescriptorType
from nbdnn.device import Gpu


class Handle(Owned):
    """A handle of the calling thread. Setting the stream costs 1-2 us, so `stream` remembers the last one."""

    def __init__(self, device: Gpu) -> None:
        with driver.Current(device.index):
            super().__init__("cudnnCreate", "cudnnDestroy")
        self.stream = 0  # what cudnnCreate sets

    def use(self, stream: int) -> None:
        """What is called from now on goes to `stream`."""
        if stream != self.stream:
            self.stream = -1  # of none, should this be interrupted
            call("cudnnSetStream", self.address, stream)
            self.stream = stream


class _Thread(threading.local):
    def __init__(self) -> None:
        self.handles: dict[int, Handle] = {}


_thread = _Thread()
_described: dict[str, bytes] = {}
_absent: set[str] = set()


def handle(device: Gpu) -> Handle:
    """The calling thread's handle on a GPU; StatusError where cuDNN cannot use it."""
    found = _thread.handles.get(device.index)
    if found is None:
        found = _thread.handles[device.index] = Handle(device)
    return found


def describe(device: Gpu, properties: bytes) -> None:
    """Plan for a GPU that is not here: `properties` is cuDNN's JSON of such a device."""
    _described[device.fingerprint] = properties
    _absent.add(device.fingerprint)


def properties(device: Gpu) -> bytes:
    """cuDNN's JSON of a GPU: what its heuristics and plans depend on."""
    if device.fingerprint not in _described:
        asked = Backend(DescriptorType.DEVICEPROP)
        with driver.Current(device.index):
            asked.set(Attribute.DEVICEPROP_HANDLE, [handle(device).address], AttributeType.HANDLE).finalize()
        _described[device.fingerprint] = asked.get_text(Attribute.DEVICEPROP_JSON_REPRESENTATION)
    return _described[device.fingerprint]


def planner(device: Gpu) -> Handle | Backend:
    """What plans are made with: the thread's handle, or the properties of a GPU that is not here."""
    return property_descriptor(device) if device.fingerprint in _absent else handle(device)


def property_descriptor(device: Gpu) -> Backend:
    """The GPU as heuristics and plans without a handle take it."""
    made = Backend(DescriptorType.DEVICEPROP)
    made.set(Attribute.DEVICEPROP_JSON_REPRESENTATION, properties(device), AttributeType.CHAR)
    return made.finalize()
