"""The operators ``dsa_planner::indexer_backward`` and ``dsa_planner::indexer_loss`` of torch. Run side.

Importing this module registers them, for torch.compile, autograd, CUDA graphs, activation checkpointing and DDP.

``indexer_backward`` overwrites attn_score, and torch gives no autograd to an operator that mutates its input: it is for
training code that has its own backward. ``indexer_loss`` is functional: its forward is the reference of ``loss``, and
its backward gives the first operator a private copy of attn_score.
"""

from __future__ import annotations

from typing import Any

import torch

from dsa_planner import envelope, loss, operators
from dsa_planner.arguments import dtype_name, require_tensor
from dsa_planner.errors import DeviceMismatchError, UnsupportedError

__all__ = ["indexer_loss"]

_LIBRARY: Any = torch.library.Library("dsa_planner", "DEF")  # type: ignore[no-untyped-call]
_TAGS = (torch.Tag.pt2_compliant_tag,)
_LIBRARY.define(
    "indexer_backward(Tensor index_q, Tensor weights, Tensor index_k, Tensor(a!) attn_score, Tensor index_score, "
    "Tensor topk_indices, Tensor grad_loss, float sm_scale=1.0, float loss_coeff=1.0, int block_I=128, "
    'bool topk_indices_global=False, *, str backend="default", bool deterministic=False, '
    "ScalarType? d_weights_dtype=None, ScalarType? d_index_k_dtype=None) "
    "-> (Tensor d_index_q, Tensor d_weights, Tensor d_index_k)",
    tags=_TAGS,
)
_LIBRARY.define(
    "indexer_loss(Tensor index_q, Tensor weights, Tensor index_k, Tensor attn_score, Tensor topk_indices, "
    "float sm_scale=1.0, float loss_coeff=1.0, bool topk_indices_global=False, *, "
    'str backend="default", bool deterministic=False) -> (Tensor loss, Tensor index_score)',
    tags=_TAGS,
)
_SHAPES = {
    "index_q": ("B", "S_q", "H", "D"),
    "weights": ("B", "S_q", "H"),
    "index_k": ("B", "S_k", "D"),
    "attn_score": ("B", "S_q", "topk"),
    "topk_indices": ("B", "S_q", "topk"),
}
_DTYPES = {
    "index_q": ("bf16",),
    "weights": ("bf16", "fp32"),
    "index_k": ("bf16", "fp32"),
    "attn_score": ("fp32",),
    "topk_indices": ("int32",),
}


def indexer_loss(
    index_q: torch.Tensor,
    weights: torch.Tensor,
    index_k: torch.Tensor,
    attn_score: torch.Tensor,
    topk_indices: torch.Tensor,
    sm_scale: float = 1.0,
    loss_coeff: float = 1.0,
    topk_indices_global: bool = False,
    *,
    backend: str = "default",
    deterministic: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The KL loss that trains the indexer of DeepSeek Sparse Attention, with gradients from a compiled plan.

    What is computed, and in which precision, says ``dsa_planner.loss``. Weights and index_k may be fp32: they are
    rounded to bf16 inside, and their gradients come back in fp32, without the rounding that a cast outside would add.
    Needs ``loss.CHUNK_BYTES`` (256 MiB) of memory beyond inputs and results, and in the backward a copy of attn_score.
    Tensors that are not contiguous are copied.

    Args:
        index_q: (B, S_q, H, D) bf16.
        weights: (B, S_q, H) bf16, or fp32 with a backend whose d_weights can be fp32.
        index_k: (B, S_k, D) bf16 or fp32.
        attn_score: (B, S_q, topk) fp32, target probabilities; it gets no gradient.
        topk_indices: (B, S_q, topk) int32 key ids; see ``indexer_backward``.
        sm_scale: softmax scale, positive.
        loss_coeff: coefficient of the loss.
        topk_indices_global: whether ids are flat over B * S_k.
        backend: of the gradients; see ``dsa-plan explain``.
        deterministic: a bitwise reproducible gradient of index_k, with a backend that takes it; those of index_q and
            weights always are.

    Returns:
        loss: of no dimension, fp32.
        index_score: (B, S_q, topk) fp32, the predicted probabilities; it carries no gradient.

    Raises:
        UnsupportedError: a value, shape or dtype outside the support envelope.
        DeviceMismatchError: tensors on several devices, or on one that the backend does not run on.
        PlanNotFoundError: a gradient will be needed, and no layer holds the plan.
        CaptureError: under capture, and the plan is not loaded yet.
    """
    if not torch.compiler.is_compiling():
        tensors = (index_q, weights, index_k, attn_score, topk_indices)
        _check_call(tensors, (sm_scale, loss_coeff, topk_indices_global), backend, deterministic)
    result: tuple[torch.Tensor, torch.Tensor] = torch.ops.dsa_planner.indexer_loss(
        index_q, weights, index_k, attn_score, topk_indices, sm_scale, loss_coeff, topk_indices_global,
        backend=backend, deterministic=deterministic,
    )  # fmt: skip
    if not torch.compiler.is_compiling() and result[0].requires_grad and index_q.is_cuda:
        # A missing plan is better met here than in the backward.
        request = _request(weights, index_q, topk_indices, backend, deterministic)
        operators.plan_for(request, index_q.get_device(), None)
    return result


@torch.library.impl(_LIBRARY, "indexer_backward", "CompositeExplicitAutograd")
def _indexer_backward(
    index_q: torch.Tensor,
    weights: torch.Tensor,
    index_k: torch.Tensor,
    attn_score: torch.Tensor,
    index_score: torch.Tensor,
    topk_indices: torch.Tensor,
    grad_loss: torch.Tensor,
    sm_scale: float = 1.0,
    loss_coeff: float = 1.0,
    block_I: int = 128,
    topk_indices_global: bool = False,
    *,
    backend: str = "default",
    deterministic: bool = False,
    d_weights_dtype: torch.dtype | None = None,
    d_index_k_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    found = operators.indexer_backward(
        index_q, weights, index_k, attn_score, index_score, topk_indices, grad_loss,
        sm_scale, loss_coeff, block_I, topk_indices_global,
        d_weights=None if d_weights_dtype is None else torch.empty_like(weights, dtype=d_weights_dtype),
        d_index_k=None if d_index_k_dtype is None else torch.empty_like(index_k, dtype=d_index_k_dtype),
        backend=backend, deterministic=deterministic,
    )  # fmt: skip
    return found["d_index_q"], found["d_weights"], found["d_index_k"]


@torch.library.register_fake("dsa_planner::indexer_backward", lib=_LIBRARY)  # type: ignore[untyped-decorator]
def _indexer_backward_fake(
    index_q: torch.Tensor, weights: torch.Tensor, index_k: torch.Tensor, *rest: Any, **options: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    d_weights, d_index_k = options.get("d_weights_dtype"), options.get("d_index_k_dtype")
    return (
        torch.empty_like(index_q),
        torch.empty_like(weights, dtype=weights.dtype if d_weights is None else d_weights),
        torch.empty_like(index_k, dtype=index_k.dtype if d_index_k is None else d_index_k),
    )


@torch.library.impl(_LIBRARY, "indexer_loss", "CompositeExplicitAutograd")
def _indexer_loss(
    index_q: torch.Tensor,
    weights: torch.Tensor,
    index_k: torch.Tensor,
    attn_score: torch.Tensor,
    topk_indices: torch.Tensor,
    sm_scale: float = 1.0,
    loss_coeff: float = 1.0,
    topk_indices_global: bool = False,
    *,
    backend: str = "default",
    deterministic: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    tensors = (index_q, weights, index_k, attn_score, topk_indices)
    _check_call(tensors, (sm_scale, loss_coeff, topk_indices_global), backend, deterministic)
    return loss.forward(
        index_q, weights.bfloat16(), index_k.bfloat16(), attn_score, topk_indices,
        sm_scale, loss_coeff, topk_indices_global,
    )  # fmt: skip


@torch.library.register_fake("dsa_planner::indexer_loss", lib=_LIBRARY)  # type: ignore[untyped-decorator]
def _indexer_loss_fake(
    index_q: torch.Tensor, weights: torch.Tensor, index_k: torch.Tensor, attn_score: torch.Tensor, *rest: Any,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    return attn_score.new_empty(()), torch.empty_like(attn_score, memory_format=torch.contiguous_format)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any) -> None:
    index_q, weights, index_k, attn_score, topk_indices, *scalars = inputs
    ctx.save_for_backward(index_q, weights, index_k, attn_score, output[1], topk_indices)
    ctx.scalars, ctx.options = scalars, keyword_only_inputs
    ctx.mark_non_differentiable(output[1])


def _indexer_loss_backward(ctx: Any, grad_loss: torch.Tensor, grad_index_score: torch.Tensor | None) -> tuple[Any, ...]:
    index_q, weights, index_k, attn_score, index_score, topk_indices = ctx.saved_tensors
    sm_scale, loss_coeff, topk_indices_global = ctx.scalars
    gradients = torch.ops.dsa_planner.indexer_backward(
        index_q.contiguous(), weights.bfloat16().contiguous(), index_k.bfloat16().contiguous(),
        attn_score.clone(memory_format=torch.contiguous_format), index_score, topk_indices.contiguous(),
        grad_loss.reshape(1), sm_scale, loss_coeff, 128, topk_indices_global,
        d_weights_dtype=weights.dtype, d_index_k_dtype=index_k.dtype, **ctx.options,
    )  # fmt: skip
    return *gradients, None, None, None, None, None


torch.library.register_autograd(
    "dsa_planner::indexer_loss", _indexer_loss_backward, setup_context=_save_for_backward, lib=_LIBRARY
)


def _request(
    weights: torch.Tensor, index_q: torch.Tensor, topk_indices: torch.Tensor, backend: str, deterministic: bool
) -> dict[str, Any]:
    """The plan request of the gradients."""
    return {
        "backend": backend,
        "topk": topk_indices.shape[2],
        "heads": index_q.shape[2],
        "head_dim": index_q.shape[3],
        "d_weights": dtype_name(weights.dtype),
        "deterministic": deterministic,
    }


def _check_call(
    tensors: tuple[torch.Tensor, ...], scalars: tuple[float, float, bool], backend: str, deterministic: bool
) -> None:
    """Refuse a call of the loss whose gradients no plan would give."""
    _check(tensors)
    index_q, weights, _, _, topk_indices = tensors
    request = _request(weights, index_q, topk_indices, backend, deterministic)
    row = operators.row_for(request, index_q.get_device())
    sm_scale, loss_coeff, topk_indices_global = scalars
    envelope.check_scalars(row, sm_scale, loss_coeff, row.block_I[0], topk_indices_global)


def _check(tensors: tuple[torch.Tensor, ...]) -> None:
    """Refuse tensors whose shape, dtype or device does not fit the others'."""
    extents: dict[str, int] = {}
    for (name, symbols), tensor in zip(_SHAPES.items(), tensors, strict=True):
        require_tensor(name, tensor)
        if tensor.dim() != len(symbols):
            raise UnsupportedError(
                f"{name} of shape {tuple(tensor.shape)}",
                f"its shape is ({', '.join(symbols)}), of rank {len(symbols)}",
                f"reshape {name}",
            )
        expected = tuple(extents.setdefault(s, size) for s, size in zip(symbols, tensor.shape, strict=True))
        if tuple(tensor.shape) != expected:
            raise UnsupportedError(
                f"{name} of shape {tuple(tensor.shape)}",
                f"with the tensors before it, it is ({', '.join(symbols)}) = {expected}",
                f"pass {name} of that shape",
            )
        found = dtype_name(tensor.dtype)
        if found not in _DTYPES[name]:
            raise envelope.refusal(
                f"dtype of {name}", found, f"indexer_loss takes {name} in {envelope.describe(_DTYPES[name])}",
                _DTYPES[name],
            )  # fmt: skip
        if tensor.device != tensors[0].device:
            raise DeviceMismatchError(
                f"{name} on {tensor.device}",
                f"index_q is on {tensors[0].device}",
                f"move {name} to {tensors[0].device}",
            )
