"""Streams as callers name them, and memory from torch's allocator on a launch stream. Run side."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from dsa_planner.errors import DeviceMismatchError, UnsupportedError, shown

__all__ = ["LEGACY_STREAM", "allocating_on", "current_handle", "handle_of"]

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
        DeviceMismatchError: a torch stream of another device.
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
        raise DeviceMismatchError(
            f"stream of {owner}", f"this launch runs on cuda:{device}", f"pass a stream of cuda:{device}"
        )
    return handle


def _named_handle(stream: Any) -> int | None:
    """The handle that an object names, or None if it is no stream."""
    if type(stream) is int:
        return stream
    if isinstance(handle := getattr(stream, "cuda_stream", None), int):
        return handle
    if callable(protocol := getattr(stream, "__cuda_stream__", None)):
        answer = protocol()
        return answer[1] if isinstance(answer, tuple) and len(answer) == 2 and type(answer[1]) is int else None
    return int(stream) if type(stream).__module__.startswith("cuda.bindings") else None


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


def allocating_on(handle: int, device: int) -> AbstractContextManager[None]:
    """Within it, torch's allocator serves the stream of this handle, so that reuse of what it gives is ordered after
    the launch.

    Raises:
        UnsupportedError: the handle is the per-thread default stream, whose reuse torch cannot order.
    """
    if handle == PER_THREAD_STREAM:
        raise UnsupportedError(
            "stream 2, the per-thread default stream",
            "memory for it cannot come from torch's allocator, which knows one stream of that handle, not one a thread",
            "pass d_index_q, d_weights, d_index_k and workspace, or launch on another stream",
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
