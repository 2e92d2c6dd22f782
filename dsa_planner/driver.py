"""The CUDA driver as the runtime uses it: devices, and calls that raise.

Importing this module imports cuda.bindings and touches no driver. Only driver functions of CUDA 12.4 or older are used.

CUDA does not survive a fork. In a child that was forked after the driver was started, everything here is refused,
before a lock is waited for that another thread of the parent may have held.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from cuda.bindings import driver as cu

from dsa_planner.errors import DeviceMismatchError, DriverError, shown

__all__ = [
    "Device",
    "call",
    "cu",
    "device",
    "invoke",
    "name_of_failure",
    "open_devices",
    "refuse_fork",
    "relaxed_capture",
    "start",
]

_SUCCESS = cu.CUresult.CUDA_SUCCESS
_NO_DRIVER = "install the NVIDIA driver, or run this on a machine with a GPU"
_devices: dict[int, Device] = {}
_lock = threading.Lock()
_started_by = 0
"""The process that started the driver; 0 for none."""


def call(what: str, result: tuple[Any, ...]) -> Any:
    """The value of a driver call.

    Raises:
        DriverError: the call failed.
    """
    status, *values = result
    if status != _SUCCESS:
        raise DriverError(
            what, f"the CUDA driver answered {name_of_failure(status)}", "see the CUDA driver's error codes"
        )
    return values[0] if len(values) == 1 else tuple(values)


def invoke(what: str, function: str, *arguments: Any, end: Any = None) -> Any:
    """Call a driver function by name; its value, or None where it answers ``end``.

    Raises:
        DriverError: the driver has no such function, or the call failed.
    """
    try:
        result = getattr(cu, function)(*arguments)
    except RuntimeError as error:  # cuda.bindings found no such function in the driver
        raise DriverError(
            what, f"the driver has no {function}, so it is older than CUDA 12.4", "update the NVIDIA driver"
        ) from error
    return None if end is not None and result[0] == end else call(what, result)


def name_of_failure(status: Any) -> str:
    """The name of a CUresult."""
    return str(getattr(status, "name", status))


@dataclass(frozen=True)
class Device:
    """A CUDA device and its primary context, which this process keeps from the first use on.

    The primary context is the one that torch uses. It is never made current here for longer than a ``with`` block.
    """

    ordinal: int
    name: str
    capability: tuple[int, int]
    multiprocessors: int
    handle: Any
    context: Any
    context_address: int

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make the device's primary context current, and put back what was current before, on errors too."""
        if int(call("reading the current context", cu.cuCtxGetCurrent())) == self.context_address:
            yield
            return
        call("making a context current", cu.cuCtxPushCurrent(self.context))
        try:
            yield
        finally:
            call("restoring the current context", cu.cuCtxPopCurrent())


def device(ordinal: int) -> Device:
    """The device of an ordinal, as CUDA_VISIBLE_DEVICES leaves it.

    Raises:
        DriverError: there is no driver, or it refuses.
        DeviceMismatchError: there is no such device.
    """
    refuse_fork()
    found = _devices.get(ordinal)
    if found is None:
        with _lock:
            found = _devices.get(ordinal)
            if found is None:
                found = _devices[ordinal] = _open(ordinal)
    return found


def open_devices() -> list[Device]:
    """The devices that this process has used so far, by ordinal."""
    return [found for _, found in sorted(_devices.items())]


def refuse_fork() -> None:
    """Refuse to go on in a process that was forked after the driver was started.

    Raises:
        DriverError: it was.
    """
    if _started_by and _started_by != os.getpid():
        raise _forked(f"process {_started_by} started CUDA and then forked this one")


def _forked(how: str) -> DriverError:
    return DriverError(
        f"CUDA in process {os.getpid()}",
        f"{how}, and CUDA does not survive a fork",
        'start workers with the method "spawn" or "forkserver" of multiprocessing, or fork before CUDA is first used',
    )


@contextmanager
def relaxed_capture() -> Iterator[None]:
    """Within it, calls that a capture under way forbids to its thread, or to all threads, are allowed: loading and
    allocating, which touch no captured stream. Without it they would end the capture.
    """
    mode = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    before = call("allowing calls beside a capture", cu.cuThreadExchangeStreamCaptureMode(mode))
    try:
        yield
    finally:
        cu.cuThreadExchangeStreamCaptureMode(before)


def start() -> None:
    """Start the driver. It opens no device.

    Raises:
        DriverError: there is no driver or no GPU, it refuses, or the process was forked after it was started.
    """
    global _started_by
    refuse_fork()
    try:
        status = cu.cuInit(0)
    except RuntimeError as error:  # cuda.bindings could not load libcuda
        raise DriverError("starting CUDA", "there is no NVIDIA driver on this machine", _NO_DRIVER) from error
    if status[0] in (cu.CUresult.CUDA_ERROR_NO_DEVICE, cu.CUresult.CUDA_ERROR_STUB_LIBRARY):
        raise DriverError("starting CUDA", f"there is no GPU ({name_of_failure(status[0])})", _NO_DRIVER)
    if status[0] == cu.CUresult.CUDA_ERROR_NOT_INITIALIZED:  # the parent did not start it through this module
        raise _forked("the process that forked this one had started CUDA")
    call("starting CUDA", status)
    _started_by = os.getpid()


def _open(ordinal: int) -> Device:
    start()
    count = call("counting devices", cu.cuDeviceGetCount())
    if not 0 <= ordinal < count:
        raise DeviceMismatchError(
            f"device {shown(ordinal)}", f"this process sees {count} devices", "check CUDA_VISIBLE_DEVICES"
        )
    handle = call("opening a device", cu.cuDeviceGet(ordinal))
    attribute = cu.CUdevice_attribute
    values = [
        call("reading a device attribute", cu.cuDeviceGetAttribute(name, handle))
        for name in (
            attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
            attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
            attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
        )
    ]
    name = call("reading a device's name", cu.cuDeviceGetName(128, handle)).split(b"\0")[0].decode()
    context = call("opening the primary context", cu.cuDevicePrimaryCtxRetain(handle))
    return Device(ordinal, name, (values[0], values[1]), values[2], handle, context, int(context))
