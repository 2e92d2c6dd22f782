"""A CUDA driver made of Python, for testing the runtime without a GPU.

Its devices are alike. It keeps what it is asked to load and launch, and reads the launch parameters from memory as the real
driver does, so that a test sees the values that a kernel would see. Types and enumerations are those of cuda.bindings.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from cuda.bindings import driver as real

from dsa_planner import cubin as cubin_reader
from dsa_planner.launch_record import LaunchRecord

SUCCESS = real.CUresult.CUDA_SUCCESS
CONTEXT = 0xC0
Pair = tuple[int, int]


@dataclass(frozen=True)
class Launch:
    """One launch: kernel symbol, grid, block, dynamic shared memory, stream handle, and the bytes of each parameter."""

    symbol: str
    grid: int
    block: int
    shared_bytes: int
    stream: int
    parameters: tuple[bytes, ...]

    def ints(self) -> list[int]:
        """The parameters as unsigned integers."""
        return [int.from_bytes(value, "little") for value in self.parameters]


class FakeDriver:
    """Stands in for the module ``cuda.bindings.driver``."""

    def __init__(self, capability: tuple[int, int] = (9, 0), multiprocessors: int = 132, devices: int = 1) -> None:
        self.capability = capability
        self.multiprocessors = multiprocessors
        self.devices = devices
        self.current_context = CONTEXT
        self.pushed: list[int] = []
        self.kernels: dict[int, cubin_reader.CubinKernel] = {}
        self.launches: list[Launch] = []
        self.launch_contexts: list[int] = []
        self.encodes: list[tuple[Any, ...]] = []
        self.moves: list[int] = []
        self.shared_limits: dict[str, int] = {}
        self.launch_status = SUCCESS
        self.capturing: set[int] = set()
        self.stream_ids: dict[int, int] = {}
        self.capture_mode = real.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
        self.graph_status = SUCCESS
        self.graphs: list[Any] = []
        self.executables: dict[int, list[Launch]] = {}
        self.graph_launches: list[int] = []
        self.permanent = {0, 1}
        """Streams that torch made."""
        self.pool: dict[int, tuple[int, int]] = {}
        """Address -> (bytes, stream) of what is allocated from the pool now."""
        self.pool_history: list[tuple[str, int, int]] = []
        self.out_of_memory = 0  # how many allocations will fail
        self.slabs: list[int] = []
        self.contexts: dict[int, int] = {}
        self.unloaded = 0
        self.events: dict[int, int] = {}
        self.unfinished: set[int] = set()
        """Streams that never end what is on them."""
        self.synchronised: list[int] = []
        self.change_parameters: Callable[[str, list[tuple[int, int]]], list[tuple[int, int]]] = lambda symbol, found: (
            found
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("cu") and name[2:3].isupper() and name not in ("cuuint32_t", "cuuint64_t"):
            raise AssertionError(f"the runtime called {name}, which the fake driver does not have")
        return getattr(real, name)

    def cuInit(self, flags: int) -> tuple[Any, ...]:
        return (SUCCESS if self.devices else real.CUresult.CUDA_ERROR_NO_DEVICE,)

    def cuDeviceGetCount(self) -> tuple[Any, ...]:
        return SUCCESS, self.devices

    def cuDeviceGet(self, ordinal: int) -> tuple[Any, ...]:
        return SUCCESS, ordinal

    def cuDeviceGetName(self, size: int, device: int) -> tuple[Any, ...]:
        return SUCCESS, b"Fake GPU\0"

    def cuDeviceGetAttribute(self, attribute: Any, device: int) -> tuple[Any, ...]:
        kind = real.CUdevice_attribute
        return SUCCESS, {
            kind.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: self.capability[0],
            kind.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: self.capability[1],
            kind.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: self.multiprocessors,
        }[attribute]

    def cuDevicePrimaryCtxRetain(self, device: int) -> tuple[Any, ...]:
        return SUCCESS, CONTEXT + device

    def cuCtxGetCurrent(self) -> tuple[Any, ...]:
        return SUCCESS, self.current_context

    def cuCtxPushCurrent(self, context: int) -> tuple[Any, ...]:
        self.pushed.append(self.current_context)
        self.current_context = context
        return (SUCCESS,)

    def cuCtxPopCurrent(self) -> tuple[Any, ...]:
        popped, self.current_context = self.current_context, self.pushed.pop()
        return SUCCESS, popped

    def _require_context(self) -> None:
        assert 0 <= self.current_context - CONTEXT < self.devices, "the driver needs a context of a device"

    def cuLibraryLoadData(self, code: bytes, *options: Any) -> tuple[Any, ...]:
        return SUCCESS, cubin_reader.inspect(code)

    def cuLibraryGetKernel(self, library: cubin_reader.Cubin, symbol: bytes) -> tuple[Any, ...]:
        for kernel in library.kernels:
            if kernel.symbol.encode() == symbol:
                handle = 0x1000 + len(self.kernels)
                self.kernels[handle] = kernel
                return SUCCESS, handle
        return real.CUresult.CUDA_ERROR_NOT_FOUND, None

    def cuKernelGetParamInfo(self, handle: int, index: int) -> tuple[Any, ...]:
        kernel = self.kernels[handle]
        parameters = self.change_parameters(kernel.symbol, list(kernel.parameters))
        if index >= len(parameters):
            return real.CUresult.CUDA_ERROR_INVALID_VALUE, None, None
        return SUCCESS, *parameters[index]

    def cuKernelSetAttribute(self, attribute: Any, value: int, handle: int, device: int) -> tuple[Any, ...]:
        self.shared_limits[self.kernels[handle].symbol] = value
        return (SUCCESS,)

    def cuKernelGetFunction(self, handle: int) -> tuple[Any, ...]:
        self._require_context()
        return SUCCESS, handle

    def cuTensorMapEncodeTiled(
        self, element: Any, rank: int, address: int, extents: Any, *rest: Any
    ) -> tuple[Any, ...]:
        self._require_context()
        self.encodes.append((element, rank, address, [int(extent) for extent in extents], *rest))
        encoded = real.CUtensorMap()
        ctypes.memmove(encoded.getPtr(), struct.pack("<QQ112x", address, len(self.encodes)), 128)
        return SUCCESS, encoded

    def cuTensorMapReplaceAddress(self, encoded: Any, address: int) -> tuple[Any, ...]:
        self.moves.append(address)
        ctypes.memmove(encoded.getPtr(), struct.pack("<Q", address), 8)
        return (SUCCESS,)

    def read(self, function: int, grid: int, block: int, shared_bytes: int, parameters: int) -> Launch:
        """What a launch would be of, with the parameters that memory holds now."""
        kernel = self.kernels[function]
        assert shared_bytes <= max(48 << 10, self.shared_limits.get(kernel.symbol, 0)), (
            "shared memory was not asked for"
        )
        pointers = (ctypes.c_void_p * len(kernel.parameters)).from_address(parameters)
        values = tuple(
            ctypes.string_at(pointer, size) for pointer, (_, size) in zip(pointers, kernel.parameters, strict=True)
        )
        return Launch(kernel.symbol, grid, block, shared_bytes, 0, values)

    def cuLaunchKernelEx(self, config: Any, function: int, parameters: int, extra: int) -> tuple[Any, ...]:
        self._require_context()
        launch = self.read(function, config.gridDimX, config.blockDimX, config.sharedMemBytes, parameters)
        if self.launch_status == SUCCESS:
            self.launches.append(replace(launch, stream=int(config.hStream)))
            self.launch_contexts.append(self.current_context)
        return (self.launch_status,)

    def cuMemPoolCreate(self, properties: Any) -> tuple[Any, ...]:
        return SUCCESS, 0xB00

    def cuMemPoolSetAttribute(self, pool: int, attribute: Any, value: Any) -> tuple[Any, ...]:
        return (SUCCESS,)

    def cuMemAlloc(self, size: int) -> tuple[Any, ...]:
        self._require_relaxed()
        self.slabs.append(size)
        return SUCCESS, 0x7_0000_0000 * len(self.slabs)

    def cuMemAllocFromPoolAsync(self, size: int, pool: int, stream: int) -> tuple[Any, ...]:
        self._require_relaxed()
        if self.out_of_memory:
            self.out_of_memory -= 1
            return real.CUresult.CUDA_ERROR_OUT_OF_MEMORY, None
        taken = sorted(self.pool)
        address = 0x5_0000_0000 if not taken else taken[-1] + (1 << 31)
        self.pool[address] = (size, stream)
        self.pool_history.append(("take", address, stream))
        return SUCCESS, address

    def cuMemFreeAsync(self, address: int, stream: int) -> tuple[Any, ...]:
        self._require_relaxed()
        assert self.pool.pop(address)[1] == stream, "it is given back in the order of its own stream"
        self.pool_history.append(("give", address, stream))
        return (SUCCESS,)

    def cuStreamGetCtx(self, stream: int) -> tuple[Any, ...]:
        return SUCCESS, self.contexts.get(stream, CONTEXT)

    def cuStreamGetDevice(self, stream: int) -> tuple[Any, ...]:
        raise RuntimeError('Function "cuStreamGetDevice" not found')

    def cuStreamGetCaptureInfo(self, stream: int) -> tuple[Any, ...]:
        return SUCCESS, self.cuStreamIsCapturing(stream)[1], 12, None, None, None, 0

    def cuLibraryUnload(self, library: Any) -> tuple[Any, ...]:
        self.unloaded += 1
        return (SUCCESS,)

    def cuEventCreate(self, flags: Any) -> tuple[Any, ...]:
        self.events[len(self.events) + 1] = 0
        return SUCCESS, len(self.events)

    def cuEventRecord(self, event: int, stream: int) -> tuple[Any, ...]:
        self._require_relaxed()
        assert stream not in self.capturing
        self.events[event] = stream
        return (SUCCESS,)

    def cuEventQuery(self, event: int) -> tuple[Any, ...]:
        self._require_relaxed()
        return (real.CUresult.CUDA_ERROR_NOT_READY if self.events[event] in self.unfinished else SUCCESS,)

    def cuEventSynchronize(self, event: int) -> tuple[Any, ...]:
        self._require_relaxed()
        self.synchronised.append(self.events[event])
        return (SUCCESS,)

    def cuEventDestroy(self, event: int) -> tuple[Any, ...]:
        assert event in self.events
        return (SUCCESS,)

    def _require_relaxed(self) -> None:
        relaxed = real.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        assert self.capture_mode == relaxed, "it would end a capture of any thread"

    def cuStreamGetId(self, stream: int) -> tuple[Any, ...]:
        return SUCCESS, self.stream_ids.get(stream, stream)

    def cuStreamIsCapturing(self, stream: int) -> tuple[Any, ...]:
        status = real.CUstreamCaptureStatus
        captured = stream in self.capturing
        return SUCCESS, status.CU_STREAM_CAPTURE_STATUS_ACTIVE if captured else status.CU_STREAM_CAPTURE_STATUS_NONE

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> tuple[Any, ...]:
        before, self.capture_mode = self.capture_mode, mode
        return SUCCESS, before

    def cuGraphCreate(self, flags: int) -> tuple[Any, ...]:
        relaxed = real.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        assert self.capture_mode == relaxed, "a graph is made so that another thread's capture survives it"
        self.graphs.append([])
        return SUCCESS, len(self.graphs) - 1

    def cuGraphAddKernelNode(self, graph: int, before: list[Pair], count: int, node: Any) -> tuple[Any, ...]:
        nodes = self.graphs[graph]
        assert before == [(graph, len(nodes) - 1)][: len(nodes)], "each kernel follows the last"
        assert count == len(before)
        nodes.append(self._node(node))
        return SUCCESS, (graph, len(nodes) - 1)

    def cuGraphInstantiate(self, graph: int, flags: int) -> tuple[Any, ...]:
        self.executables[graph] = list(self.graphs[graph])
        return self.graph_status, graph

    def cuGraphExecKernelNodeSetParams(self, executable: int, node: Pair, parameters: Any) -> tuple[Any, ...]:
        assert node[0] == executable, "the node is one of this graph"
        self.executables[executable][node[1]] = self._node(parameters)
        return (self.graph_status,)

    def cuGraphLaunch(self, executable: int, stream: int) -> tuple[Any, ...]:
        self._require_context()
        assert stream not in self.capturing
        if self.launch_status == SUCCESS:
            self.launches += [replace(launch, stream=stream) for launch in self.executables[executable]]
            self.launch_contexts += [self.current_context] * len(self.executables[executable])
            self.graph_launches.append(executable)
        return (self.launch_status,)

    def cuGraphExecDestroy(self, executable: int) -> tuple[Any, ...]:
        del self.executables[executable]
        return (SUCCESS,)

    def cuGraphDestroy(self, graph: int) -> tuple[Any, ...]:
        assert self.graphs[graph] is not None
        self.graphs[graph] = None
        return (SUCCESS,)

    def _node(self, node: Any) -> Launch:
        assert [node.gridDimY, node.gridDimZ, node.blockDimY, node.blockDimZ] == [1] * 4
        return self.read(int(node.func), node.gridDimX, node.blockDimX, node.sharedMemBytes, node.kernelParams)


def install(monkeypatch: pytest.MonkeyPatch, fake: FakeDriver) -> None:
    """Put a fake driver in the place of the real one, with tensors of the CPU counting as those of device 0."""
    import torch

    from dsa_planner import audit, device_memory, driver, launch_block, launch_graph, modules, operators, plan, streams

    for module in (audit, device_memory, driver, launch_block, launch_graph, modules, plan, streams):
        monkeypatch.setattr(module, "cu", fake)
    for module, name in (
        (driver, "_devices"), (device_memory, "_memories"), (device_memory, "_private_captures"),
        (modules, "_modules"), (modules, "_unloaded"), (audit, "_in_flight"), (streams, "_permanent"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, {})
    monkeypatch.setattr(driver, "_started_by", 0)
    monkeypatch.setattr(modules, "_waits", 0)
    monkeypatch.setattr(streams, "is_permanent", lambda handle, device: handle in fake.permanent)
    monkeypatch.setattr(operators, "_plans", {})
    monkeypatch.setattr(streams, "_current_handle", lambda device: 0)
    monkeypatch.setattr(torch.Tensor, "get_device", lambda tensor: 0)


def by_name(launch: Launch, record: LaunchRecord) -> dict[str, Any]:
    """The parameter values of a launch under their names in the record; a tensor map as (address, number of its encoding)."""
    kernel = next(kernel for kernel in record.kernels if f"dsa_{kernel.name}_" in launch.symbol)
    forms = {"pointer": "<Q", "int32": "<i", "float32": "<f", "tensor_map": "<QQ112x"}
    values: dict[str, Any] = {}
    for parameter, data in zip(kernel.parameters, launch.parameters, strict=True):
        unpacked = struct.unpack(forms[parameter.type], data)
        values[parameter.name] = unpacked if parameter.type == "tensor_map" else unpacked[0]
    return values
