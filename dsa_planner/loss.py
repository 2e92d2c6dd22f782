"""The loss that ``indexer_backward`` is the gradient of, as a torch reference in chunks of rows. Run side.

For each query, over its valid slots t (whose key exists), with head scores S[t,h] = sum_d index_k[n,d] index_q[h,d]::

    logit[t]       = sm_scale * sum_h weights[h] * max(S[t,h], 0)
    index_score[t] = softmax(logit)[t]                    0 in invalid slots
    p[t]           = max(attn_score[t], exp(-100))
    loss           = loss_coeff / (B * S_q) * sum over queries and slots of p[t] * (log p[t] - log index_score[t])

A slot whose index_score is below exp(-100) is left out of the sum, as it is of the gradient. All is computed in fp32,
the sum over queries in fp64.
"""

from __future__ import annotations

import torch

from dsa_planner.kernels.oracle import EPS

__all__ = ["CHUNK_BYTES", "forward", "rows_of_a_chunk"]

CHUNK_BYTES = 256 << 20
"""Bound of the memory that ``forward`` takes beyond its inputs and results, as long as one row fits into it."""


def rows_of_a_chunk(topk: int, heads: int, head_dim: int) -> int:
    """How many queries are computed at a time."""
    # A slot takes its key in bf16 and fp32, its head scores in fp32, and a dozen numbers of 4 to 8 bytes.
    return max(1, CHUNK_BYTES // (max(topk, 1) * (6 * head_dim + 4 * heads + 64)))


def forward(
    index_q: torch.Tensor,
    weights: torch.Tensor,
    index_k: torch.Tensor,
    attn_score: torch.Tensor,
    topk_indices: torch.Tensor,
    sm_scale: float,
    loss_coeff: float,
    topk_indices_global: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss and the predicted probabilities.

    Args:
        index_q: (B, S_q, H, D), bf16.
        weights: (B, S_q, H), bf16.
        index_k: (B, S_k, D), bf16.
        attn_score: (B, S_q, topk), fp32, target probabilities.
        topk_indices: (B, S_q, topk), int32, as for ``indexer_backward``.
        sm_scale: see above.
        loss_coeff: see above.
        topk_indices_global: whether ids are flat over B * S_k.

    Returns:
        loss: of no dimension, fp32.
        index_score: (B, S_q, topk), fp32.
    """
    with torch.autocast(index_q.device.type, enabled=False):  # or products would be rounded to its dtype
        batch, s_q, heads, head_dim = index_q.shape
        s_k, topk = index_k.shape[1], topk_indices.shape[2]
        index_score = torch.zeros(attn_score.shape, dtype=torch.float32, device=attn_score.device)
        total = torch.zeros((), dtype=torch.float64, device=index_q.device)
        rows, keys = batch * s_q, index_k.reshape(-1, head_dim)
        if rows and keys.shape[0]:
            flat_q, flat_w = index_q.reshape(rows, heads, head_dim), weights.reshape(rows, heads)
            flat_target, flat_score = attn_score.reshape(rows, topk), index_score.view(rows, topk)
            flat_ids = topk_indices.reshape(rows, topk)
            step = rows_of_a_chunk(topk, heads, head_dim)
            for start in range(0, rows, step):
                chunk = slice(start, min(start + step, rows))
                ids = flat_ids[chunk].long()
                valid = (ids >= 0) & (ids < (keys.shape[0] if topk_indices_global else s_k))
                if not topk_indices_global:
                    row = torch.arange(chunk.start, chunk.stop, device=ids.device)
                    ids = ids + (row // s_q * s_k)[:, None]
                selected = keys[ids.masked_fill_(~valid, 0)].float()
                # Products of bf16 numbers are exact in fp32, and in TF32, should the caller allow it.
                scores = torch.bmm(selected, flat_q[chunk].float().transpose(1, 2))
                del selected
                logits = scores.relu_().mul_(flat_w[chunk].float()[:, None, :]).sum(-1).mul_(sm_scale)
                del scores
                log_score = logits.masked_fill_(~valid, -torch.inf).log_softmax(-1)
                score = torch.where(valid, log_score.exp(), 0.0)
                target = flat_target[chunk].clamp(min=EPS)
                # What is not a number shows: it is not below eps.
                terms = torch.where(valid & ~(score < EPS), target * (target.log() - log_score), 0.0)
                flat_score[chunk] = score
                total += terms.sum(-1, dtype=torch.float64).sum()
        loss = (total * (loss_coeff / rows if rows else 0.0)).float()
        return loss, index_score
