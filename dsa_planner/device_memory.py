"""Memory on a device that launches without a workspace use: row counters, and scratch. Run side.

It belongs to a *stream*, never to a handle or a thread: handles are used again once their stream is destroyed, and
handle 2 names another stream in every thread. A stream's name is its id (cuStreamGetId), which no other stream of the
process ever has. What one stream owns is safe without waiting, because a stream runs its launches one after the other.

* **Counters** lie in one slab a device, 16 bytes each, a stream's first launch taking the next one. The launch zeroes
  it.
* **Scratch** of up to 128 MiB is kept for the 16 streams that came first; it is replaced by larger scratch in the
  stream's own order.
* Everything else (further streams once the slab is given out, further or larger scratch) is **lent** for one launch:
  taken from a pool of the driver and given back in the order of the stream, so that it is never in two launches at
  once.

Counters and scratch are never taken away from a stream. It may be gone while its last launch still runs, and nothing
but a synchronisation of the device would tell; but that ends every capture under way in the process, whichever
thread's.

torch's allocator is not used here: it knows streams by handle. Under capture memory comes from torch's allocator
(``captured_scratch``), which then serves from the graph's own pool.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dsa_planner import streams
from dsa_planner.driver import Device, call, cu, invoke, name_of_failure, relaxed_capture
from dsa_planner.errors import CaptureError, DriverError

if TYPE_CHECKING:
    import torch

log = logging.getLogger("dsa_planner")

__all__ = ["COUNTERS", "DeviceMemory", "StreamMemory", "captured_scratch", "memory_of"]

COUNTERS = 65_536
"""Counters of a device's slab: as many streams own one."""
COUNTER_BYTES = 16
KEEPING_STREAMS = 16
"""Streams of a device that keep their scratch."""
MOST_KEPT_BYTES = 128 << 20
"""Of scratch, for a stream."""
_IDLE_POOL_BYTES = (
    1280 << 20
)  # that the pool keeps when the device is synchronised: a reproducible d_index_k takes 1 GiB
_SUCCESS = cu.CUresult.CUDA_SUCCESS
_OUT_OF_MEMORY = cu.CUresult.CUDA_ERROR_OUT_OF_MEMORY
_LEGACY = -1  # in the place of an id: the default stream, whichever handle names it


class StreamMemory:
    """What a stream owns. ``lock`` is held from the moment an address is read until the launch that uses it is under
    way, so that another thread does not replace the scratch in between.

    ``counter`` is 0 where the slab was given out; ``scratch`` is 0 where there is none, of ``scratch_bytes``.
    """

    __slots__ = ("counter", "keeps", "lock", "scratch", "scratch_bytes")

    def __init__(self, counter: int, keeps: bool) -> None:
        self.lock = threading.Lock()
        self.counter = counter
        self.keeps = keeps
        self.scratch = 0
        self.scratch_bytes = 0


class DeviceMemory:
    """The memory of one device: a slab, a pool, and who owns what. All methods need the device's context current."""

    def __init__(self, target: Device) -> None:
        self._target = target
        self._lock = threading.Lock()
        self._streams: dict[int, StreamMemory] = {}
        self._slab = 0
        self._pool: Any = None
        self.lent = 0
        """Launches whose memory was lent; from several threads at once, roughly."""

    def prepare(self) -> None:
        """Take the slab and make the pool, unless that is done.

        Raises:
            DriverError: the driver refused.
        """
        if self._slab:
            return
        with self._lock, relaxed_capture():
            if self._pool is None:
                self._pool = self._new_pool()
            if not self._slab:
                needed = COUNTERS * COUNTER_BYTES
                self._slab = self._allocated("row counters", needed, lambda: cu.cuMemAlloc(needed))

    def of(self, stream: int) -> StreamMemory:
        """What the stream of a handle owns.

        Raises:
            DriverError: the driver does not know the stream, or has no memory.
        """
        owner = _LEGACY
        if stream > streams.LEGACY_STREAM:
            status, owner = cu.cuStreamGetId(stream)
            if status != _SUCCESS:
                raise DriverError(
                    f"stream {stream:#x}",
                    f"the CUDA driver answered {name_of_failure(status)}",
                    "pass a stream of this device that has not been destroyed",
                )
            owner = int(owner)
        found = self._streams.get(owner)
        return self._welcome(owner) if found is None else found

    def kept(self, memory: StreamMemory, needed: int, stream: int) -> int:
        """The address of a stream's own scratch of at least so many bytes, or 0 if it is not one to keep them.

        Raises:
            DriverError: there is no memory.
        """
        if memory.scratch_bytes >= needed:
            return memory.scratch
        if not memory.keeps or needed > MOST_KEPT_BYTES:
            return 0
        with relaxed_capture():
            larger = self._take(needed, stream)
            if memory.scratch:
                call("giving scratch back", cu.cuMemFreeAsync(memory.scratch, stream))
        memory.scratch, memory.scratch_bytes = larger, needed
        return larger

    def lend(self, needed: int, stream: int) -> int:
        """The address of memory for one launch, to be given back after it.

        Raises:
            DriverError: there is no memory.
        """
        with relaxed_capture():
            address = self._take(needed, stream)
        self.lent += 1
        return address

    def give_back(self, address: int, stream: int) -> None:
        """Give back what was lent, in the order of the stream."""
        with relaxed_capture():
            cu.cuMemFreeAsync(address, stream)

    def stats(self) -> dict[str, int]:
        """What is owned and held now, in numbers of streams and in bytes."""
        owners = list(self._streams.values())
        return {
            "streams": len(owners),
            "counters": sum(owner.counter != 0 for owner in owners),
            "slab_bytes": COUNTERS * COUNTER_BYTES if self._slab else 0,
            "scratch_streams": sum(owner.scratch != 0 for owner in owners),
            "scratch_bytes": sum(owner.scratch_bytes for owner in owners),
            "launches_on_lent_memory": self.lent,
        }

    def _welcome(self, owner: int) -> StreamMemory:
        """Give a stream that has not launched before what it will own.

        Once the slab is given out, nothing is remembered of further streams: they are lent what they need.
        """
        self.prepare()
        with self._lock:
            found = self._streams.get(owner)
            if found is None:
                number = len(self._streams)
                if number >= COUNTERS:
                    return StreamMemory(0, False)
                found = StreamMemory(self._slab + COUNTER_BYTES * number, number < KEEPING_STREAMS)
                self._streams[owner] = found
        return found

    def _take(self, needed: int, stream: int) -> int:
        return self._allocated("scratch", needed, lambda: cu.cuMemAllocFromPoolAsync(needed, self._pool, stream))

    def _allocated(self, what: str, needed: int, allocate: Callable[[], tuple[Any, Any]]) -> int:
        """The address of an allocation; where there is no memory, it is tried again without torch's cache."""
        status, address = allocate()
        if status == _OUT_OF_MEMORY:
            _empty_torchs_cache()
            status, address = allocate()
        if status != _SUCCESS:
            raise DriverError(
                f"{what} of {needed} bytes on cuda:{self._target.ordinal}",
                f"the CUDA driver answered {name_of_failure(status)}",
                "free memory, or pass a workspace of plan.workspace_bytes(...) bytes",
            )
        return int(address)

    def _new_pool(self) -> Any:
        what = "making a memory pool"
        properties = cu.CUmemPoolProps()
        properties.allocType = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = self._target.ordinal
        pool = invoke(what, "cuMemPoolCreate", properties)
        attribute = cu.CUmemPool_attribute
        for name, value in (
            (attribute.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, cu.cuuint64_t(_IDLE_POOL_BYTES)),
            # Or the driver would have one stream wait for another in order to take over its memory.
            (attribute.CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES, 0),
        ):
            invoke(what, "cuMemPoolSetAttribute", pool, name, value)
        return pool


_memories: dict[int, DeviceMemory] = {}
_lock = threading.Lock()


def memory_of(target: Device) -> DeviceMemory:
    """The memory of a device; one a process."""
    with _lock:
        return _memories.setdefault(target.ordinal, DeviceMemory(target))


def captured_scratch(needed: int, like: torch.Tensor, stream: int, device: int) -> torch.Tensor:
    """Memory for one launch under capture, from the pool of the graph: what is captured may run beside any stream.

    Args:
        needed: bytes.
        like: a tensor of the device.
        stream: the captured one.
        device: its ordinal.

    Raises:
        CaptureError: the capture is not one of torch's, so that torch's allocator would give the memory away again
            while the graph still uses it.
    """
    import torch

    def refused(why: str) -> CaptureError:
        return CaptureError(
            f"a launch without workspace on captured stream {stream:#x}",
            why,
            "pass a workspace that lives as long as the graph, or capture with torch.cuda.graph",
        )

    if stream == streams.PER_THREAD_STREAM:
        raise refused("torch's allocator knows that handle, not each thread's stream")
    try:
        with relaxed_capture(), streams.allocating_on(stream, device):
            scratch = like.new_empty(needed, dtype=torch.uint8)
    except RuntimeError as error:
        raise refused(f"torch's allocator gave no memory ({' '.join(str(error).split())[:200]})") from error
    capture = _id_of_capture(stream)
    if _private_captures.get(device) != capture:
        if not _is_private(scratch.data_ptr(), device):
            raise refused("the capture was not begun by torch, so the scratch would not stay with the graph")
        _private_captures[device] = capture
    return scratch


_private_captures: dict[int, int] = {}
"""By device, the id of a capture whose memory has been seen to come from a pool of its own: looking takes 0.3 ms."""


def _id_of_capture(stream: int) -> int:
    return int(call("looking at a capture", cu.cuStreamGetCaptureInfo(stream))[1])


def _is_private(address: int, device: int) -> bool:
    """Whether memory of torch's allocator lies in the pool of a graph, or in one that the caller chose."""
    import torch

    try:
        segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
    except RuntimeError:  # the allocator of cudaMallocAsync, whose memory is the graph's in any capture, and others
        return True
    for segment in segments:
        start = segment["address"]
        if segment["device"] == device and start <= address < start + segment["total_size"]:
            return tuple(segment.get("segment_pool_id", (0, 0))) != (0, 0)
    return True  # another allocator than torch's own, whose ways are not known here


def _empty_torchs_cache() -> None:
    import torch

    try:
        torch.cuda.empty_cache()
    except RuntimeError as error:  # some versions cannot beside a capture of another thread
        log.warning("torch's cache could not be emptied: %s", error)
