"""Devices and streams as callers name them, and memory from torch's allocator on a stream. Run side."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from dsa_planner.driver import call, cu, start
from dsa_planner.driver import device as open_device
from dsa_planner.errors import DeviceMismatchError, DriverError, UnsupportedError, shown

__all__ = [
    "LEGACY_STREAM",
    "PER_THREAD_STREAM",
    "allocating_on",
    "current_handle",
    "handle_of",
    "is_permanent",
    "ordinal_of",
]

LEGACY_STREAM = 1
"""cudaStreamLegacy: another name of the default stream, handle 0."""
PER_THREAD_STREAM = 2
"""cudaStreamPerThread: one handle, another stream in every host thread."""


def handle_of(stream: Any, device: int) -> int:
    """The handle of a stream.

    Args:
        stream: None for torch's current stream on the device; a torch.cuda.Stream; anything that has the
            ``__cuda_stream__`` protocol; a driver stream; or a handle.
        device: ordinal of the device.

    Raises:
        UnsupportedError: it is none of these.
        DeviceMismatchError: a stream of another device.
        DriverError: the driver does not know the stream.
    """
    if stream is None:
        return current_handle(device)
    handle = _named_handle(stream)
    if handle is None or not 0 <= handle < 2**64:
        raise UnsupportedError(
            f"stream {shown(stream)}" if type(stream) is int else f"stream of type {type(stream).__name__}",
            "it is neither a torch stream, nor a driver stream, nor a handle",
            "pass torch.cuda.current_stream(), or None for it",
        )
    owner = getattr(stream, "device", None)
    if owner is not None and getattr(owner, "index", device) not in (device, None):
        raise _of_another_device(f"stream of {owner}", device)
    identity = getattr(stream, "stream_id", None)
    if identity is None or identity == handle:  # not one that torch made, so nothing has said whose it is
        if handle > PER_THREAD_STREAM and not _is_of_device(handle, device):
            raise _of_another_device(f"stream {handle:#x} of another context", device)
    else:
        _permanent.setdefault(device, set()).add(handle)
    return handle


def _of_another_device(asked: str, device: int) -> DeviceMismatchError:
    return DeviceMismatchError(asked, f"this launch runs on cuda:{device}", f"pass a stream of cuda:{device}")


def _is_of_device(handle: int, device: int) -> bool:
    """Whether a stream is of a device's primary context, or at least, where the driver can tell, of the device."""
    target = open_device(device)
    if int(call(f"looking at stream {handle:#x}", cu.cuStreamGetCtx(handle))) == target.context_address:
        return True
    try:  # of CUDA 12.8; a green context is another context of the same device
        status, found = cu.cuStreamGetDevice(handle)
    except (AttributeError, RuntimeError):
        return False
    return bool(status == cu.CUresult.CUDA_SUCCESS and int(found) == int(target.handle))


_permanent: dict[int, set[int]] = {}
"""By device, handles of torch's own streams, which it never destroys."""


def is_permanent(handle: int, device: int) -> bool:
    """Whether the stream of a handle surely lives, and keeps the handle, as long as the process."""
    if handle <= LEGACY_STREAM or handle in _permanent.get(device, ()):
        return True
    import torch

    current = torch.cuda.current_stream(device)
    # The id of a stream that torch did not make is its handle.
    if handle == PER_THREAD_STREAM or current.cuda_stream != handle or current.stream_id == handle:
        return False
    _permanent.setdefault(device, set()).add(handle)
    return True


def _named_handle(stream: Any) -> int | None:
    """The handle that an object names, or None if it is no stream."""
    if type(stream) is int:
        return stream
    if isinstance(handle := getattr(stream, "cuda_stream", None), int):
        return handle
    if callable(protocol := getattr(stream, "__cuda_stream__", None)):
        try:
            answer = protocol()
        except Exception:  # whatever another library raises
            return None
        return answer[1] if isinstance(answer, tuple) and len(answer) == 2 and type(answer[1]) is int else None
    kind = type(stream)
    is_stream = kind.__module__.startswith("cuda.bindings") and kind.__name__ in ("CUstream", "cudaStream_t")
    return int(stream) if is_stream else None


def _find_current_handle() -> Callable[[int], int]:
    import torch

    # A tenth of the time of torch.cuda.current_stream(device).cuda_stream; not part of torch's documented interface.
    raw: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    if raw is not None:
        return raw
    return lambda device: int(torch.cuda.current_stream(device).cuda_stream)


_current_handle: Callable[[int], int] | None = None


def current_handle(device: int) -> int:
    """The handle of torch's current stream on a device."""
    global _current_handle
    if _current_handle is None:
        _current_handle = _find_current_handle()
    return _current_handle(device)


def ordinal_of(device: Any) -> int:
    """The ordinal of a device as callers name it.

    Raises:
        UnsupportedError: it is no CUDA device.
        DriverError: it is torch's current one, and torch has none.
    """
    if type(device) is int:
        return device
    import torch

    try:
        named = torch.device(device)
    except (TypeError, RuntimeError):
        named = None
    if named is None or named.type != "cuda":
        raise UnsupportedError(
            f"device={shown(device)}", "it is no CUDA device", 'give its ordinal, or for example "cuda:0"'
        )
    return _current_ordinal(device) if named.index is None else named.index


def _current_ordinal(device: Any) -> int:
    """The ordinal of torch's current device, which ``device`` means.

    Raises:
        DriverError: torch has none.
    """
    import torch

    try:
        return torch.cuda.current_device()
    except Exception as error:  # an AssertionError of a torch without CUDA; else a RuntimeError, or one of torch's own
        start()  # no driver or no GPU is the same to every caller, whatever torch says of it
        reason = " ".join(str(error).split())
        raise DriverError(
            f"device={shown(device)}",
            f"torch has no current CUDA device ({reason[:200]})",
            "give the device's ordinal, or use a torch with CUDA",
        ) from error


def allocating_on(handle: int, device: int) -> AbstractContextManager[None]:
    """Within it, torch's allocator serves the stream of this handle, so that reuse of what it gives is ordered after
    the launch.

    Raises:
        UnsupportedError: the handle is the per-thread default stream, whose reuse torch cannot order.
    """
    if handle == PER_THREAD_STREAM:
        raise UnsupportedError(
            "stream 2, the per-thread default stream",
            "outputs for it cannot come from torch's allocator, which knows that handle, not each thread's stream",
            "pass d_index_q, d_weights and d_index_k, or launch on another stream",
        )
    handle = 0 if handle == LEGACY_STREAM else handle
    return _NOTHING if handle == current_handle(device) else _on_stream(handle, device)


_NOTHING: AbstractContextManager[None] = nullcontext()


@contextmanager
def _on_stream(handle: int, device: int) -> Iterator[None]:
    import torch

    # Not ExternalStream(0): torch takes 0 for "make a new stream", and memory would be reused in that one's order.
    own = torch.cuda.ExternalStream
    stream = own(handle, device=device) if handle else torch.cuda.default_stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        yield
