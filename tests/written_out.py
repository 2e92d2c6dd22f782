"""The loss of ``dsa_planner.indexer_loss``, written out as its documentation says it, for autograd in fp64.

No chunks, no shortcuts. ``Oracle`` is the same loss with the fp64 oracle's gradients as its backward, for gradcheck.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from dsa_planner.kernels import oracle

EPS = math.exp(-100.0)


def loss(
    index_q: torch.Tensor,
    weights: torch.Tensor,
    index_k: torch.Tensor,
    attn_score: torch.Tensor,
    topk_indices: torch.Tensor,
    sm_scale: float = 1.0,
    loss_coeff: float = 1.0,
    topk_indices_global: bool = False,
) -> torch.Tensor:
    """The loss; differentiable with respect to index_q, weights and index_k."""
    score = index_score(index_q, weights, index_k, topk_indices, sm_scale, topk_indices_global)
    counts = score.detach() >= EPS
    target = attn_score.double().clamp(min=EPS)
    terms = target * (target.log() - score.masked_fill(~counts, 1.0).log())
    batch, s_q = index_q.shape[:2]
    return loss_coeff / (batch * s_q) * (terms * counts).sum()


def index_score(
    index_q: torch.Tensor,
    weights: torch.Tensor,
    index_k: torch.Tensor,
    topk_indices: torch.Tensor,
    sm_scale: float = 1.0,
    topk_indices_global: bool = False,
) -> torch.Tensor:
    """The predicted probabilities, 0 in invalid slots."""
    batch, s_k = index_k.shape[:2]
    ids = topk_indices.long()
    valid = (ids >= 0) & (ids < (batch * s_k if topk_indices_global else s_k))
    if not topk_indices_global:
        ids = ids + torch.arange(batch, device=ids.device)[:, None, None] * s_k
    keys = index_k.reshape(batch * s_k, -1)[ids.masked_fill(~valid, 0)]
    logits = sm_scale * (torch.einsum("bqtd,bqhd->bqth", keys, index_q).relu() * weights[:, :, None, :]).sum(-1)
    score = logits.masked_fill(~valid, -math.inf).softmax(-1)
    return torch.where(valid, score, 0.0)


class Oracle(torch.autograd.Function):
    """The same loss; its backward is the oracle's."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> torch.Tensor:
        ctx.save_for_backward(*arguments[:5])
        ctx.scalars = arguments[5:]
        return loss(*arguments)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        index_q, weights, index_k, attn_score, topk_indices = ctx.saved_tensors
        sm_scale, loss_coeff, flat = ctx.scalars
        score = index_score(index_q, weights, index_k, topk_indices, sm_scale, flat)
        score_grad = oracle.score_gradient(attn_score, score, float(grad), loss_coeff)
        found = oracle.gradients(index_q, weights, index_k, score_grad, topk_indices, sm_scale, flat)
        return found.d_index_q, found.d_weights, found.d_index_k, None, None, None, None, None
