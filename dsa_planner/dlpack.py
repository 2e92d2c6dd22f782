"""Arrays of other libraries as arguments of a launch. Run side.

An input may be any object with ``__dlpack__`` and ``__dlpack_device__`` on a CUDA device: it becomes a torch tensor
over the same memory, nothing is copied. As DLPack asks, its library is told the launch stream, so that what produces
the array comes before the launch. What a launch writes (attn_score, the outputs and the workspace) must be a torch
tensor or a CuPy
array: other libraries promise their users that arrays do not change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dsa_planner import streams
from dsa_planner.errors import DeviceMismatchError, UnsupportedError
from dsa_planner.launch_record import TENSORS

if TYPE_CHECKING:
    import torch

__all__ = ["as_tensor", "as_tensors", "has_foreign", "ordinal_of"]

WRITTEN = frozenset({"attn_score", "d_index_q", "d_weights", "d_index_k", "workspace"})
_WRITABLE = ("torch", "cupy")
_CUDA = 2  # kDLCUDA


def has_foreign(tensors: Sequence[Any], workspace: Any) -> bool:
    """Whether one of these is an array of another library than torch."""
    return any(_is_foreign(array) for array in (*tensors, workspace))


def _is_foreign(array: Any) -> bool:
    import torch

    return hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__") and not isinstance(array, torch.Tensor)


def ordinal_of(array: Any) -> int:
    """The ordinal of an array's device; -1 where that cannot be told or is no CUDA device."""
    try:
        device, ordinal = array.__dlpack_device__()
        return int(ordinal) if int(device) == _CUDA else -1
    except Exception:  # whatever another library raises; as_tensor will say so
        return -1


def as_tensors(tensors: Sequence[Any], workspace: Any, stream: int) -> tuple[list[Any], Any]:
    """The arguments of a launch as torch tensors; what is no array is left for the checks, which say so.

    Args:
        tensors: in the order of ``TENSORS``.
        workspace: or None.
        stream: handle of the launch stream.

    Raises:
        UnsupportedError: a library refused, or what the launch writes is neither a torch tensor nor a CuPy array.
        DeviceMismatchError: an array that is not on a CUDA device.
    """
    found = [as_tensor(name, tensor, stream) for name, tensor in zip(TENSORS, tensors, strict=True)]
    return found, as_tensor("workspace", workspace, stream)


def as_tensor(name: str, array: Any, stream: int) -> torch.Tensor | Any:
    """One argument as a torch tensor; errors as ``as_tensors``."""
    import torch

    if not _is_foreign(array):
        return array
    kind = f"{type(array).__module__.partition('.')[0]}.{type(array).__name__}"
    if name in WRITTEN and not kind.startswith(tuple(f"{library}." for library in _WRITABLE)):
        raise UnsupportedError(
            f"{name} of type {kind}",
            "the launch writes it, and its library does not expect that of its arrays",
            f"pass {name} as a torch tensor or a CuPy array",
        )
    try:
        device, ordinal = array.__dlpack_device__()
        if int(device) != _CUDA:
            raise DeviceMismatchError(
                f"{name} of type {kind} on DLPack device ({int(device)}, {ordinal})",
                "the operator runs on CUDA devices",
                f"move {name} to a GPU",
            )
        # DLPack's names of streams: 0 is nobody's, and the default stream is 1.
        capsule = array.__dlpack__(stream=stream or streams.LEGACY_STREAM)
        return torch.utils.dlpack.from_dlpack(capsule)
    except (DeviceMismatchError, UnsupportedError):
        raise
    except Exception as error:  # whatever another library raises
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise UnsupportedError(
            f"{name} of type {kind}", f"it does not come through DLPack ({reason})", f"pass {name} as a torch tensor"
        ) from error
