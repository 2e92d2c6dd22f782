"""Check the tensors of a launch against the contract, before anything runs.

The check that runs on every call is one pass of comparisons that only answers yes or no. When it says no,
``explain`` looks again, slowly, and raises the error that names the tensor, its value, the rule and the remedy. A
launch with a wrong tensor therefore never touches attn_score.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from itertools import combinations
from operator import add, le, or_
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

from dsa_planner.envelope import MAX_EXTENT, Support, describe
from dsa_planner.errors import DeviceMismatchError, UnsupportedError
from dsa_planner.launch_record import TENSORS

if TYPE_CHECKING:
    import torch

__all__ = [
    "ArgumentCheck",
    "Tensors",
    "dtype_name",
    "explain_placement",
    "placement_ok",
    "require_tensor",
]

_SHAPES: Mapping[str, tuple[str, ...]] = {
    "index_q": ("B", "S_q", "H", "D"),
    "weights": ("B", "S_q", "H"),
    "index_k": ("B", "S_k", "D"),
    "attn_score": ("B", "S_q", "topk"),
    "index_score": ("B", "S_q", "topk"),
    "topk_indices": ("B", "S_q", "topk"),
    "grad_loss": ("1",),
    "d_index_q": ("B", "S_q", "H", "D"),
    "d_weights": ("B", "S_q", "H"),
    "d_index_k": ("B", "S_k", "D"),
}
_INPUT_DTYPES = {
    "index_q": ("bf16",),
    "weights": ("bf16",),
    "index_k": ("bf16",),
    "attn_score": ("fp32",),
    "index_score": ("fp32",),
    "topk_indices": ("int32",),
    "grad_loss": ("fp32",),
}
Tensors: TypeAlias = "Sequence[torch.Tensor]"
"""The tensors of a launch, in the order of ``launch_record.TENSORS``."""
_TORCH_NAMES = {"bfloat16": "bf16", "float32": "fp32", "float16": "fp16", "float64": "fp64"}
ALIGNMENT = 16
_NOT_AS_EXPECTED = (AttributeError, TypeError, ValueError, RuntimeError)
"""What asking a wrong argument raises: it is no tensor, has another rank, or is a tensor without such a property."""


def dtype_name(dtype: Any) -> str:
    """This project's name of a torch dtype: torch.bfloat16 -> "bf16"."""
    plain = str(dtype).removeprefix("torch.")
    return _TORCH_NAMES.get(plain, plain)


class ArgumentCheck:
    """The checks of one plan's launches.

    Args:
        row: the envelope row of the plan.
        config: the plan's config.
        device: the ordinal of its device.
    """

    def __init__(self, row: Support, config: Mapping[str, Any], device: int) -> None:
        import torch

        self.row = row
        self.heads: int = config["heads"]
        self.head_dim: int = config["head_dim"]
        self.topk: int = config["topk"]
        self.device = device
        self.dtypes = {
            **_INPUT_DTYPES,
            "d_index_q": row.d_index_q,
            "d_weights": (config["d_weights"],),
            "d_index_k": row.d_index_k,
        }
        self._bf16, self._fp32, self._int32 = torch.bfloat16, torch.float32, torch.int32
        self.uint8 = torch.uint8
        self.count_write = _write_counter(torch.autograd.graph.increment_version)
        """Tell autograd that tensors were written."""
        by_name = {"bf16": torch.bfloat16, "fp32": torch.float32}
        self._d_weights = by_name[config["d_weights"]]
        self.d_index_k_names = {by_name[name]: name for name in row.d_index_k}
        """torch dtype -> this project's name, for the dtypes of d_index_k that the row takes."""

    def inputs_ok(self, tensors: Tensors) -> bool:
        """Whether the seven inputs keep the contract."""
        index_q, weights, index_k, attn_score, index_score, topk_indices, grad_loss = tensors[:7]
        try:
            batch, s_q, heads, dims = index_q.shape
            key_batch, s_k, key_dims = index_k.shape
            scores = (batch, s_q, self.topk)
            bf16, fp32, device = self._bf16, self._fp32, self.device
            return (
                heads == self.heads
                and dims == key_dims == self.head_dim
                and key_batch == batch
                and max(batch, s_q, s_k, batch * s_q * heads, batch * s_k) <= MAX_EXTENT
                and weights.shape == (batch, s_q, heads)
                and attn_score.shape == scores
                and index_score.shape == scores
                and topk_indices.shape == scores
                and grad_loss.numel() == 1
                and index_q.dtype == weights.dtype == index_k.dtype == bf16
                and attn_score.dtype == index_score.dtype == grad_loss.dtype == fp32
                and topk_indices.dtype == self._int32
                and index_q.get_device() == weights.get_device() == index_k.get_device() == device
                and attn_score.get_device() == index_score.get_device() == device
                and topk_indices.get_device() == grad_loss.get_device() == device
                and index_q.is_contiguous()
                and weights.is_contiguous()
                and index_k.is_contiguous()
                and attn_score.is_contiguous()
                and index_score.is_contiguous()
                and topk_indices.is_contiguous()
                and not any(tensor.is_neg() for tensor in tensors)
            )
        except _NOT_AS_EXPECTED:  # explain() says what
            return False

    def outputs_ok(self, tensors: Tensors) -> bool:
        """Whether the three outputs fit inputs that have passed ``inputs_ok``."""
        index_q, weights, index_k = tensors[:3]
        d_index_q, d_weights, d_index_k = tensors[7:]
        try:
            device = self.device
            return (
                d_index_q.shape == index_q.shape
                and d_weights.shape == weights.shape
                and d_index_k.shape == index_k.shape
                and d_index_q.dtype == self._bf16
                and d_weights.dtype == self._d_weights
                and d_index_k.dtype in self.d_index_k_names
                and d_index_q.get_device() == d_weights.get_device() == d_index_k.get_device() == device
                and d_index_q.is_contiguous()
                and d_weights.is_contiguous()
                and d_index_k.is_contiguous()
            )
        except _NOT_AS_EXPECTED:
            return False

    def workspace_ok(self, workspace: torch.Tensor, needed_bytes: int) -> bool:
        """Whether a caller-supplied workspace serves."""
        try:
            return (
                workspace.get_device() == self.device and workspace.is_contiguous() and workspace.nbytes >= needed_bytes
            )
        except _NOT_AS_EXPECTED:
            return False

    def explain(self, tensors: Sequence[Any]) -> NoReturn:
        """Find what is wrong with tensors that a check refused.

        Raises:
            UnsupportedError: a value, shape, dtype or stride outside the contract.
            DeviceMismatchError: a tensor on another device.
        """
        given = dict(zip(TENSORS, tensors, strict=True))
        for name, tensor in given.items():
            self._explain_kind(name, tensor)
        extents = self._extents(given["index_q"], given["index_k"])
        for name, tensor in given.items():
            self._explain_shape(name, tensor, extents)
            self._explain_placement(name, tensor)
        batch, s_q, s_k = extents["B"], extents["S_q"], extents["S_k"]
        if max(batch, s_q, s_k, batch * s_q * extents["H"], batch * s_k) > MAX_EXTENT:
            raise UnsupportedError(
                f"B={batch}, S_q={s_q}, S_k={s_k}",
                f"B, S_q, S_k, B * S_q * H and B * S_k must be at most {MAX_EXTENT}",
                "split the batch or the queries",
            )
        raise AssertionError(f"a check refused arguments that look right: {tensors!r}")

    def explain_workspace(self, workspace: Any, needed_bytes: int) -> NoReturn:
        """Find what is wrong with a workspace that ``workspace_ok`` refused."""
        require_tensor("workspace", workspace)
        self._explain_placement("workspace", workspace)
        raise UnsupportedError(
            f"workspace of {workspace.nbytes} bytes",
            f"this launch needs {needed_bytes}",
            "allocate plan.workspace_bytes(...) bytes, or pass none",
        )

    def _explain_kind(self, name: str, tensor: Any) -> None:
        require_tensor(name, tensor)
        rank = len(_SHAPES[name])
        if len(tensor.shape) != rank and not (name == "grad_loss" and tensor.numel() == 1):
            raise UnsupportedError(
                f"{name} of shape {tuple(tensor.shape)}",
                f"its shape is ({', '.join(_SHAPES[name])}), of rank {rank}",
                f"reshape {name}",
            )
        allowed = self.dtypes[name]
        found = dtype_name(tensor.dtype)
        if found not in allowed:
            raise UnsupportedError(
                f"{name} of dtype {found}",
                f"backend {self.row.backend} for {self.row.arch} takes {name} in {describe(allowed)}",
                f"pass {name} in {allowed[0]}",
            )

    def _extents(self, index_q: Any, index_k: Any) -> dict[str, int]:
        batch, s_q, _, _ = index_q.shape
        return {
            "B": batch,
            "S_q": s_q,
            "H": self.heads,
            "D": self.head_dim,
            "S_k": index_k.shape[1],
            "topk": self.topk,
            "1": 1,
        }

    def _explain_shape(self, name: str, tensor: Any, extents: Mapping[str, int]) -> None:
        expected = tuple(extents[symbol] for symbol in _SHAPES[name])
        if tuple(tensor.shape) != expected and not (name == "grad_loss" and tensor.numel() == 1):
            meaning = ", ".join(_SHAPES[name])
            raise UnsupportedError(
                f"{name} of shape {tuple(tensor.shape)}",
                f"with this plan and these index_q and index_k it is ({meaning}) = {expected}",
                f"pass {name} of that shape",
            )

    def _explain_placement(self, name: str, tensor: Any) -> None:
        if tensor.get_device() != self.device:
            raise DeviceMismatchError(
                f"{name} on {tensor.device}",
                f"this launch runs on cuda:{self.device}",
                f"move {name} to cuda:{self.device}",
            )
        if tensor.is_neg():
            raise UnsupportedError(
                f"{name} with the negative bit", "its memory holds the negated values", f"pass {name}.resolve_neg()"
            )
        if not tensor.is_contiguous():
            raise UnsupportedError(
                f"{name} of strides {tuple(tensor.stride())}", "it must be contiguous", f"pass {name}.contiguous()"
            )


def _write_counter(increment: Callable[..., None]) -> Callable[[Tensors], None]:
    """torch's increment_version for several tensors, which it took one at a time in older versions."""

    def one_by_one(tensors: Tensors) -> None:
        for tensor in tensors:
            increment(tensor)

    try:
        increment(())
    except (AttributeError, TypeError, RuntimeError):
        return one_by_one
    return increment


def require_tensor(name: str, tensor: Any) -> None:
    """Refuse what is no plain strided tensor.

    Raises:
        UnsupportedError: it names the argument and its type.
    """
    try:
        tuple(tensor.shape), tensor.dtype, tensor.get_device(), tensor.is_contiguous(), tensor.is_neg(), tensor.nbytes
        tensor.data_ptr()
    except _NOT_AS_EXPECTED:
        raise UnsupportedError(
            f"{name} of type {type(tensor).__name__}", "it must be a dense torch tensor", "pass a torch.Tensor"
        ) from None


def placement_ok(addresses: Sequence[int], sizes: Sequence[int]) -> bool:
    """Whether memory is there, aligned and without overlap. A no may be wrong: then look closer."""
    starts, ends = sorted(addresses), sorted(map(add, addresses, sizes))
    return (
        starts[0] > 0
        and not reduce(or_, addresses) % ALIGNMENT
        # What does not overlap ends in the order in which it starts, each before the next one starts.
        and all(map(le, ends, starts[1:]))
    )


def explain_placement(
    names: Sequence[str], addresses: Sequence[int], sizes: Sequence[int], written: frozenset[str]
) -> None:
    """Find what is wrong with memory that ``placement_ok`` refused, if anything is.

    Args:
        names: of the launch's tensors and buffers.
        addresses: of their first bytes.
        sizes: in bytes; an empty tensor overlaps nothing.
        written: the names of those that the launch writes.

    Raises:
        UnsupportedError: a tensor has elements and no memory, as a fake one or the wrapper of a distributed one; an
            address is not aligned; two tensors share bytes, and at least one of them is written.
    """
    for name, address, size in zip(names, addresses, sizes, strict=True):
        if size and not address:
            raise UnsupportedError(
                f"{name} without memory", "it has elements and no address", f"pass a plain tensor: {name}.to_local()"
            )
    for name, address in zip(names, addresses, strict=True):
        alignment = 4 if name == "grad_loss" else ALIGNMENT
        if address % alignment:
            raise UnsupportedError(
                f"{name} at address {address:#x}", f"it must be aligned to {alignment} bytes", f"pass {name}.clone()"
            )
    spans = [(a, a + size, name) for name, a, size in zip(names, addresses, sizes, strict=True) if size]
    for (start, end, name), (other_start, other_end, other) in combinations(spans, 2):
        if start < other_end and other_start < end and (name in written or other in written):
            raise UnsupportedError(
                f"{name} and {other}", "they share memory, and the launch writes one of them", "pass separate buffers"
            )
