"""Seeded inputs for tests and their comparison with the oracle. Needs torch; works on any device."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from dsa_planner.kernels import oracle

HEADS, HEAD_DIM = 64, 128
GATE_MARGIN = 2e-6
"""Below this |S|, fp32 and fp64 may disagree about its sign, and then about a whole term of the gradients. With these
inputs S is of the order of 0.1, and fp32 sums of 128 products err by less than 1e-6."""

BELOW_EPS, ABOVE_EPS = (count * 2.0**-149 for count in (26, 27))
"""The two fp32 numbers next to exp(-100), which lies between them."""


@dataclass(frozen=True)
class Case:
    """The inputs of one call. ``ids`` says how topk_indices were drawn (see ``make``)."""

    index_q: torch.Tensor
    weights: torch.Tensor
    index_k: torch.Tensor
    attn_score: torch.Tensor
    index_score: torch.Tensor
    topk_indices: torch.Tensor
    grad_loss: torch.Tensor
    sm_scale: float
    loss_coeff: float
    topk_indices_global: bool

    def inputs(self) -> dict[str, torch.Tensor]:
        """The tensors by argument name; attn_score is a fresh copy, since a call overwrites it."""
        names = ("index_q", "weights", "index_k", "attn_score", "index_score", "topk_indices", "grad_loss")
        tensors = {name: getattr(self, name) for name in names}
        tensors["attn_score"] = self.attn_score.clone()
        return tensors

    def scalars(self) -> dict[str, float | bool]:
        return {
            "sm_scale": self.sm_scale,
            "loss_coeff": self.loss_coeff,
            "topk_indices_global": self.topk_indices_global,
        }

    def valid(self) -> torch.Tensor:
        """Which slots have a key."""
        batch, s_k = self.index_k.shape[:2]
        return (self.topk_indices >= 0) & (self.topk_indices < s_k * (batch if self.topk_indices_global else 1))

    def as_global(self) -> Case:
        """The same call with flat ids: a local id gets its batch offset, an invalid one becomes one of several."""
        assert not self.topk_indices_global
        batch, s_k = self.index_k.shape[:2]
        offset = torch.arange(batch, device=self.topk_indices.device, dtype=torch.int32)[:, None, None] * s_k
        invalid = torch.tensor([-1, batch * s_k, batch * s_k + 7, -(2**31), 2**31 - 1], device=offset.device)
        spread = torch.arange(self.topk_indices.numel(), device=offset.device).view_as(self.topk_indices) % 5
        ids = torch.where(self.valid(), self.topk_indices + offset, invalid[spread]).to(torch.int32)
        return replace(self, topk_indices=ids, topk_indices_global=True)


def make(
    batch: int,
    s_q: int,
    s_k: int,
    topk: int,
    seed: int = 0,
    device: str = "cpu",
    heads: int = HEADS,
    ids: str = "mixed",
    sm_scale: float = 1.0,
    loss_coeff: float = 1.0,
) -> Case:
    """Draw a call in which no gate is in doubt: a slot with a head whose |S| is below GATE_MARGIN gets the id -1, unless
    the key or the head is zero throughout.

    Args:
        ids: "valid" draws keys with repetition; "distinct" without (s_k >= topk); "mixed" also draws invalid ids: -1,
            very negative, S_k and beyond (valid in a later batch element, were they not masked first), INT32_MAX;
            "flat" is "mixed" with flat ids into the keys of every batch element.

    Some keys and some heads of index_q are zero, where S is exactly 0 and the gate is shut. Some index_score are 0 or at
    the threshold exp(-100), one representable number above it or below; some attn_score are 0.
    """
    g = torch.Generator(device=device).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g, device=device)

    def draw(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=g, device=device, dtype=torch.int32)

    keys = s_k * batch if ids == "flat" else s_k
    if ids == "distinct":
        order = torch.rand(batch, s_q, s_k, generator=g, device=device).argsort(-1)[..., :topk]
        indices = order.to(torch.int32).contiguous()
    else:
        indices = draw(0, max(keys, 1), batch, s_q, topk)
    if ids in ("mixed", "flat"):
        kind = torch.rand(batch, s_q, topk, generator=g, device=device)
        indices = torch.where(kind < 0.10, -1, indices)
        indices = torch.where((kind >= 0.10) & (kind < 0.14), keys + draw(0, 50, batch, s_q, topk), indices)
        indices = torch.where((kind >= 0.14) & (kind < 0.15), -(2**31), indices)
        indices = torch.where((kind >= 0.15) & (kind < 0.16), 2**31 - 1, indices)
        indices = indices.to(torch.int32)
    predicted = torch.softmax(normal(batch, s_q, topk), -1)
    kind = torch.rand(predicted.shape, generator=g, device=device)
    for share, value in ((0.05, 0.0), (0.06, BELOW_EPS), (0.07, ABOVE_EPS)):
        predicted = torch.where((kind < share) & (kind >= share - 0.01), value, predicted)
    predicted = torch.where(kind < 0.04, 0.0, predicted)
    target = torch.softmax(normal(batch, s_q, topk), -1)
    index_q, index_k = normal(batch, s_q, heads, HEAD_DIM) * 0.1, normal(batch, s_k, HEAD_DIM) * 0.1
    index_q[torch.rand(batch, s_q, heads, generator=g, device=device) < 0.03] = 0.0
    index_k[torch.rand(batch, s_k, generator=g, device=device) < 0.03] = 0.0
    case = Case(
        index_q=index_q.bfloat16(),
        weights=(normal(batch, s_q, heads) * 0.5).bfloat16(),
        index_k=index_k.bfloat16(),
        attn_score=torch.where(torch.rand(target.shape, generator=g, device=device) < 0.05, 0.0, target),
        index_score=predicted,
        topk_indices=indices,
        grad_loss=torch.full((1,), 0.75, device=device),
        sm_scale=sm_scale,
        loss_coeff=loss_coeff,
        topk_indices_global=ids == "flat",
    )
    return replace(case, topk_indices=_without_doubtful_gates(case))


def _without_doubtful_gates(case: Case) -> torch.Tensor:
    batch, s_q, _ = case.topk_indices.shape
    s_k = case.index_k.shape[1]
    ids, valid = case.topk_indices.clone(), case.valid()
    flat = case.index_k.reshape(batch * s_k, HEAD_DIM)
    for b in range(batch if s_k else 0):
        offset = 0 if case.topk_indices_global else b * s_k
        for start in range(0, s_q, 16):
            rows = slice(start, start + 16)
            keys = flat[torch.where(valid[b, rows], ids[b, rows].long() + offset, 0)].double()
            heads = case.index_q[b, rows].double()
            s = keys @ heads.transpose(-1, -2)
            not_all_zero = (keys != 0).any(-1)[..., None] & (heads != 0).any(-1)[:, None]
            doubtful = valid[b, rows] & ((s.abs() < GATE_MARGIN) & not_all_zero).any(-1)
            ids[b, rows] = torch.where(doubtful, -1, ids[b, rows])
    return ids


def outputs(
    case: Case, dk_dtype: torch.dtype = torch.float32, dw_dtype: torch.dtype = torch.bfloat16
) -> dict[str, torch.Tensor]:
    """Buffers for the gradients, full of NaN."""
    nan = float("nan")
    return {
        "d_index_q": torch.full_like(case.index_q, nan),
        "d_weights": torch.full_like(case.weights, nan, dtype=dw_dtype),
        "d_index_k": torch.full_like(case.index_k, nan, dtype=dk_dtype),
    }


def expected_score_gradient(case: Case) -> torch.Tensor:
    """Stage 1 of a case, in float64."""
    return oracle.score_gradient(case.attn_score, case.index_score, float(case.grad_loss), case.loss_coeff)


def expected_gradients(case: Case, score_grad: torch.Tensor, bf16_a: bool = False) -> oracle.Gradients:
    """Stages 2 and 3 of a case from a given score gradient, in float64; ``bf16_a`` for a backend that rounds A."""
    return oracle.gradients(
        case.index_q,
        case.weights,
        case.index_k,
        score_grad,
        case.topk_indices,
        case.sm_scale,
        case.topk_indices_global,
        round_a=(lambda a: a.to(torch.bfloat16)) if bf16_a else None,
    )
