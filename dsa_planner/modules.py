"""The cubins that a process has loaded: one for each device and plan, within a limit of bytes. Run side.

Loading forces every kernel in, so that nothing is left to load lazily at the first launch, and compares the driver's
own account of the kernels' parameters with the manifest.

When the cubins of a device outgrow the limit, those launched least recently are unloaded, after their last launch has
ended; a plan whose cubin was unloaded loads it again when it is launched. Three kinds stay as long as the process: what
was launched under capture, because the graph goes on using it; what was launched on a stream that may be destroyed
before its work has ended (one of the caller's own, or the per-thread default stream), because its end cannot be seen;
and what is being launched. Nothing is unloaded by ``__del__`` or at exit: the driver frees all with the process.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from dsa_planner.cache.planfile import PlanFile
from dsa_planner.driver import Device, cu, invoke, name_of_failure, relaxed_capture
from dsa_planner.errors import PlanFileError
from dsa_planner.launch_record import PARAMETER_BYTES, KernelLaunch, LaunchRecord

__all__ = ["Module", "User", "module_of", "module_stats", "waits"]

log = logging.getLogger("dsa_planner")

_SUCCESS = cu.CUresult.CUDA_SUCCESS
_NO_SUCH_PARAMETER = cu.CUresult.CUDA_ERROR_INVALID_VALUE
_modules: dict[tuple[int, str], Module] = {}
_lock = threading.Lock()
_ticks = itertools.count(1)
_unloaded: dict[int, int] = {}
_waits = 0


class User(Protocol):
    """Who holds functions of a module, in graphs."""

    def forget_functions(self) -> None:
        """Free the graphs: the functions are about to go."""


class Module:
    """One cubin on one device. ``functions`` are those of the record's kernels, or None while it is not loaded.

    A launch enters itself in ``launching`` before it reads ``functions``, and leaves after it has put its graphs where
    ``forget_functions`` finds them; whoever unloads takes ``functions`` away before looking there. So no launch, and no
    graph, has functions of a cubin that is gone.
    """

    def __init__(self, file: PlanFile, record: LaunchRecord, target: Device, limit: int) -> None:
        self.functions: list[Any] | None = None
        self.launching: dict[object, None] = {}
        self.stays = False
        """Whether it may never be unloaded."""
        self.streams: set[int] = set()
        """Those it was launched on, all of which live as long as the process unless it stays."""
        self.users: weakref.WeakSet[Any] = weakref.WeakSet()
        self.used = 0
        self.bytes = len(file.cubin)
        self._plan_id, self._cubin = file.plan_id, file.cubin
        self._kernels = list(zip(record.kernels, _symbols(file, record), strict=True))
        self._target, self._limit = target, limit
        self._library: Any = None

    def touch(self) -> None:
        """Count a use now, for the order in which modules are unloaded."""
        self.used = next(_ticks)

    def load(self) -> list[Any]:
        """The functions, loaded if they are not; afterwards the device's other modules are held to the limit.

        Raises:
            PlanFileError: the cubin's parameters are not those of the manifest.
            DriverError: the driver refuses the cubin.
        """
        with _lock:
            if self.functions is None:
                with self._target.current(), relaxed_capture():
                    self._load()
                self.touch()
                self._hold_to_limit()
            assert self.functions is not None
            return self.functions

    def _load(self) -> None:
        what = f"loading plan {self._plan_id[:12]}"
        self._library = invoke(what, "cuLibraryLoadData", self._cubin, [], [], 0, [], [], 0)
        functions = []
        try:
            for kernel, (symbol, parameters) in self._kernels:
                handle = invoke(what, "cuLibraryGetKernel", self._library, symbol.encode())
                _check_parameters(self._plan_id, kernel, parameters, handle)
                if kernel.shared_bytes:
                    attribute = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                    invoke(what, "cuKernelSetAttribute", attribute, kernel.shared_bytes, handle, self._target.handle)
                functions.append(invoke(what, "cuKernelGetFunction", handle))
        except BaseException:
            cu.cuLibraryUnload(self._library)
            raise
        self.functions = functions

    def _hold_to_limit(self) -> None:
        loaded = [m for (ordinal, _), m in _modules.items() if ordinal == self._target.ordinal and m.functions]
        held = sum(module.bytes for module in loaded)
        for module in sorted(loaded, key=lambda module: module.used):
            if held <= self._limit:
                return
            if module is not self and module._unload():
                held -= module.bytes

    def settled(self) -> list[Any] | None:
        """The functions, or None, once nobody is deciding whether to unload."""
        with _lock:
            return self.functions

    def _unload(self) -> bool:
        """Unload it, unless it must stay. Whatever the driver refuses here is a reason to leave it loaded."""
        functions, self.functions = self.functions, None
        # In this order: a launch says that its module stays before it leaves.
        if self.launching or self.stays:
            self.functions = functions
            return False
        with self._target.current(), relaxed_capture():
            if not all(_has_ended(stream) for stream in self.streams):
                self.functions = functions
                return False
            for user in list(self.users):
                user.forget_functions()
            (status,) = cu.cuLibraryUnload(self._library)
        if status != _SUCCESS:
            log.warning("plan %s was not unloaded: %s", self._plan_id[:12], name_of_failure(status))
            self.functions = functions
            return False
        self._library = None
        self.streams.clear()
        _unloaded[self._target.ordinal] = _unloaded.get(self._target.ordinal, 0) + 1
        log.info("plan %s was unloaded from cuda:%d", self._plan_id[:12], self._target.ordinal)
        return True


def _has_ended(stream: int) -> bool:
    """Wait for what is on a stream now; False where that cannot be waited for, as under capture."""
    global _waits
    status, event = cu.cuEventCreate(cu.CUevent_flags.CU_EVENT_DISABLE_TIMING)
    if status != _SUCCESS:
        return False
    try:
        if _is_in_capture(stream) or cu.cuEventRecord(event, stream)[0] != _SUCCESS:
            return False
        # Another thread may have begun a capture in between, and to wait for an event of a capture would end it.
        if _is_in_capture(stream):
            return False
        _waits += 1
        return bool(cu.cuEventSynchronize(event)[0] == _SUCCESS)
    finally:
        cu.cuEventDestroy(event)


def _is_in_capture(stream: int) -> bool:
    """Whether a stream is captured, or is the default stream while one that waits for it is."""
    status, capture = cu.cuStreamIsCapturing(stream)
    return bool(status != _SUCCESS or capture != cu.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE)


def module_of(file: PlanFile, record: LaunchRecord, target: Device, limit: int) -> Module:
    """The module of a plan on a device; one a process.

    Args:
        file: the plan file.
        record: its launch record.
        target: the device.
        limit: bytes of cubins that the device is held to, as far as that is possible.

    Raises:
        ValueError, KeyError, TypeError: the manifest does not fit the record.
    """
    key = target.ordinal, hashlib.sha256(file.cubin).hexdigest()
    with _lock:
        if key not in _modules:
            _modules[key] = Module(file, record, target, limit)
        return _modules[key]


def module_stats(ordinal: int) -> dict[str, int]:
    """How many modules of a device are loaded, how many of these stay, their bytes, and how many have been unloaded."""
    loaded = [m for (device, _), m in list(_modules.items()) if device == ordinal and m.functions is not None]
    return {
        "modules": len(loaded),
        "modules_that_stay": sum(module.stays for module in loaded),
        "module_bytes": sum(module.bytes for module in loaded),
        "modules_unloaded": _unloaded.get(ordinal, 0),
    }


def waits() -> int:
    """How often this process has waited for a stream, in order to unload a module."""
    return _waits


def _symbols(file: PlanFile, record: LaunchRecord) -> list[tuple[str, list[tuple[int, int]]]]:
    """For each kernel of the record, its symbol and the (offset, size) of each parameter, from the manifest.

    Raises:
        ValueError, KeyError, TypeError: the manifest does not fit the record.
    """
    entries: Sequence[Mapping[str, Any]] = file.manifest["kernels"]
    if [entry["name"] for entry in entries] != [kernel.name for kernel in record.kernels]:
        raise ValueError("its kernels are not those of the manifest")
    return [(str(entry["symbol"]), [(int(at), int(size)) for at, size in entry["parameters"]]) for entry in entries]


def _check_parameters(plan_id: str, kernel: KernelLaunch, parameters: list[tuple[int, int]], handle: Any) -> None:
    """Refuse a cubin whose parameters, as the driver sees them, are not those of the manifest and the launch record."""
    found: list[tuple[int, int]] = []
    while (
        info := invoke("checking a plan", "cuKernelGetParamInfo", handle, len(found), end=_NO_SUCH_PARAMETER)
    ) is not None:
        found.append((int(info[0]), int(info[1])))
    sizes = [PARAMETER_BYTES[parameter.type] for parameter in kernel.parameters]
    if found != parameters or [size for _, size in found] != sizes:
        raise PlanFileError(
            f"plan {plan_id}",
            f"kernel {kernel.name} has parameters {found} (offset, size), not {parameters} with sizes {sizes}",
            "build it again",
        )
