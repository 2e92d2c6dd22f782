"""``indexer_backward`` in fp64, straight from its definition: the reference that every kernel is compared with.

It takes numpy arrays or torch tensors, on whatever device they live, and gives back the same kind in float64. Rows
(queries) are computed in chunks, so that beside inputs and outputs it holds at most ``max_bytes``. It shares no code
and no shortcut with the kernels: ids are masked, rows gathered, and the formulas written out as in the documentation
of ``dsa_planner.indexer_backward``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["EPS", "Gradients", "gradients", "indexer_backward", "rms_error", "score_gradient"]

EPS = math.exp(-100.0)
DEFAULT_MAX_BYTES = 256 << 20


@dataclass(frozen=True)
class Gradients:
    """d_index_q (B, S_q, H, D), d_weights (B, S_q, H) and d_index_k (B, S_k, D), in float64."""

    d_index_q: Any
    d_weights: Any
    d_index_k: Any


def score_gradient(
    attn_score: Any, index_score: Any, grad_loss: float, loss_coeff: float = 1.0, max_bytes: int = DEFAULT_MAX_BYTES
) -> Any:
    """Stage 1: the gradient of the loss with respect to the index scores.

    Args:
        attn_score: (B, S_q, topk), target probabilities.
        index_score: (B, S_q, topk), predicted probabilities.
        grad_loss: the incoming gradient of the loss.
        loss_coeff: coefficient of the loss.
        max_bytes: bound of the temporaries.

    Returns:
        (B, S_q, topk) float64.
    """
    xp = _namespace(attn_score)
    batch, s_q, topk = attn_score.shape
    result = xp.zeros((batch, s_q, topk), like=attn_score)
    scale = loss_coeff * float(grad_loss) / (batch * s_q) if batch * s_q else 0.0
    for b, rows in _chunks(batch, s_q, 5 * 8 * topk, max_bytes):
        target, predicted = xp.float64(attn_score[b, rows]), xp.float64(index_score[b, rows])
        gi = xp.where(predicted >= EPS, -xp.maximum(target, EPS) * scale, 0.0)
        result[b, rows] = gi - predicted * gi.sum(-1)[:, None]
    return result


def gradients(
    index_q: Any,
    weights: Any,
    index_k: Any,
    score_grad: Any,
    topk_indices: Any,
    sm_scale: float = 1.0,
    topk_indices_global: bool = False,
    max_bytes: int = DEFAULT_MAX_BYTES,
    round_a: Callable[[Any], Any] | None = None,
) -> Gradients:
    """Stages 2 and 3: the gradients, from a given score gradient (the exact one or a kernel's).

    Args:
        index_q: (B, S_q, H, D).
        weights: (B, S_q, H).
        index_k: (B, S_k, D).
        score_grad: (B, S_q, topk), the result of stage 1, not scaled by sm_scale.
        topk_indices: (B, S_q, topk) integer ids, local to the batch element or flat over B * S_k; a slot whose id is
            negative or too large contributes nothing.
        sm_scale: softmax scale.
        topk_indices_global: whether the ids are flat.
        max_bytes: bound of the temporaries.
        round_a: applied to A, to model a backend that rounds it: its result is then exact but for accumulation.
    """
    xp = _namespace(index_q)
    batch, s_q, heads, dims = index_q.shape
    s_k, topk = index_k.shape[1], topk_indices.shape[2]
    d_index_q = xp.zeros((batch, s_q, heads, dims), like=index_q)
    d_weights = xp.zeros((batch, s_q, heads), like=index_q)
    d_keys = xp.zeros((batch * s_k, dims), like=index_q)
    keys = index_k.reshape(batch * s_k, dims)
    row_bytes = 8 * (3 * topk * dims + 4 * topk * heads + 2 * heads * dims + 4 * topk)
    for b, rows in _chunks(batch, s_q, row_bytes, max_bytes):
        ids = xp.integer(topk_indices[b, rows])
        limit = batch * s_k if topk_indices_global else s_k
        valid = (ids >= 0) & (ids < limit)
        if limit == 0:
            continue
        ids = xp.where(valid, ids, 0) + (0 if topk_indices_global else b * s_k)
        q, w = xp.float64(index_q[b, rows]), xp.float64(weights[b, rows])
        k = xp.where(valid[:, :, None], xp.float64(keys[ids]), 0.0)  # (rows, topk, D)
        grad = xp.where(valid, xp.float64(score_grad[b, rows]) * sm_scale, 0.0)
        s = k @ xp.transpose(q)  # (rows, topk, H)
        d_weights[b, rows] = (grad[:, :, None] * xp.maximum(s, 0.0)).sum(1)
        a = xp.where(s > 0.0, grad[:, :, None] * w[:, None, :], 0.0)
        del s
        if round_a is not None:
            a = xp.float64(round_a(a))
        d_index_q[b, rows] = xp.transpose(a) @ k
        del k
        xp.add_at(d_keys, ids.reshape(-1), (a @ q).reshape(-1, dims))
    return Gradients(d_index_q, d_weights, d_keys.reshape(batch, s_k, dims))


def indexer_backward(
    index_q: Any,
    weights: Any,
    index_k: Any,
    attn_score: Any,
    index_score: Any,
    topk_indices: Any,
    grad_loss: float,
    sm_scale: float = 1.0,
    loss_coeff: float = 1.0,
    topk_indices_global: bool = False,
    max_bytes: int = DEFAULT_MAX_BYTES,
) -> tuple[Any, Gradients]:
    """All stages; returns the score gradient and the gradients. attn_score is left as it is."""
    score_grad = score_gradient(attn_score, index_score, grad_loss, loss_coeff, max_bytes)
    return score_grad, gradients(
        index_q, weights, index_k, score_grad, topk_indices, sm_scale, topk_indices_global, max_bytes
    )  # fmt: skip


def rms_error(value: Any, reference: Any) -> float:
    """The root mean square of the difference, relative to that of the reference. A NaN anywhere gives NaN."""
    xp = _namespace(reference)
    difference = xp.float64(value) - reference
    squares = float((reference * reference).sum())
    error = float((difference * difference).sum())
    return math.sqrt(error / squares) if squares > 0.0 else math.sqrt(error)


def _chunks(batch: int, s_q: int, row_bytes: int, max_bytes: int) -> list[tuple[int, slice]]:
    """(batch element, rows) in order, with as many rows as fit."""
    step = max(1, max_bytes // max(1, row_bytes))
    return [(b, slice(s, min(s + step, s_q))) for b in range(batch) for s in range(0, s_q, step)]


class _Numpy:
    """The few operations that numpy and torch spell differently."""

    def __init__(self) -> None:
        import numpy

        self.np = numpy
        self.where = numpy.where
        self.maximum = numpy.maximum

    def zeros(self, shape: tuple[int, ...], like: Any) -> Any:
        return self.np.zeros(shape, self.np.float64)

    def float64(self, value: Any) -> Any:
        return self.np.asarray(value).astype(self.np.float64)

    def integer(self, value: Any) -> Any:
        return self.np.asarray(value).astype(self.np.int64)

    def transpose(self, value: Any) -> Any:
        return value.swapaxes(-1, -2)

    def add_at(self, target: Any, ids: Any, rows: Any) -> None:
        """target[ids] += rows, with repeated ids: sort by id, then sum each run."""
        if ids.size == 0:
            return
        order = self.np.argsort(ids, kind="stable")
        ordered = ids[order]
        starts = self.np.flatnonzero(self.np.r_[True, ordered[1:] != ordered[:-1]])
        target[ordered[starts]] += self.np.add.reduceat(rows[order], starts, axis=0)


class _Torch:
    def __init__(self) -> None:
        import torch

        self.torch = torch

    def zeros(self, shape: tuple[int, ...], like: Any) -> Any:
        return self.torch.zeros(shape, dtype=self.torch.float64, device=like.device)

    def float64(self, value: Any) -> Any:
        return value.to(self.torch.float64)

    def integer(self, value: Any) -> Any:
        return value.to(self.torch.int64)

    def where(self, condition: Any, value: Any, other: Any) -> Any:
        return self.torch.where(condition, value, other)

    def maximum(self, value: Any, bound: float) -> Any:
        return value.clamp(min=bound)

    def transpose(self, value: Any) -> Any:
        return value.transpose(-1, -2)

    def add_at(self, target: Any, ids: Any, rows: Any) -> None:
        target.index_add_(0, ids, rows)


def _namespace(value: Any) -> Any:
    return _Torch() if type(value).__module__.partition(".")[0] == "torch" else _Numpy()
