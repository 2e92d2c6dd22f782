"""The tensors of a call to measure: inputs of the usual sizes, and ids of a named distribution.

Ids are drawn in chunks of rows: a row of S_k random numbers, of which the topk largest win. So rows are distinct and
even, and memory is bounded for any S_k. What a distribution favours gets a number that no other key can have.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from dsa_planner.bench.request import Request, Shape

__all__ = ["CALLS", "HEAD_DIM", "Inputs", "bytes_of", "draw_ids", "make"]

HEAD_DIM = 128
CALLS = 10
"""Calls of a section, the time between two waits for the GPU."""
_FEWEST_CALLS = 2
_COPIES_BYTES = 4 << 30
_CHUNK = 1 << 24  # random numbers at a time
_NEIGHBOURS = 16
_SHARED = 0.8
_MOST_SINKS = 128


@dataclass(frozen=True)
class Inputs:
    """The tensors of one call, and buffers for its outputs.

    A call overwrites attn_score, and a second one of the same would add up other numbers, so there is a copy of it for
    each call of a section; ``restore`` makes them again.
    """

    index_q: torch.Tensor
    weights: torch.Tensor
    index_k: torch.Tensor
    attn_score: torch.Tensor
    index_score: torch.Tensor
    topk_indices: torch.Tensor
    grad_loss: torch.Tensor
    d_index_q: torch.Tensor
    d_weights: torch.Tensor
    d_index_k: torch.Tensor
    copies: tuple[torch.Tensor, ...]

    @property
    def calls(self) -> int:
        """Calls of a section."""
        return len(self.copies)

    def arguments(self, number: int) -> tuple[torch.Tensor, ...]:
        """The seven inputs of call ``number`` of a section, in order."""
        attn_score = self.copies[number % len(self.copies)]
        return (
            self.index_q, self.weights, self.index_k, attn_score, self.index_score, self.topk_indices, self.grad_loss,
        )  # fmt: skip

    def restore(self) -> None:
        for copy in self.copies:
            copy.copy_(self.attn_score)


def make(shape: Shape, request: Request, device: str, seed: int = 0) -> Inputs:
    """Draw a call."""
    g = torch.Generator(device=device).manual_seed(seed)

    def normal(*extents: int) -> torch.Tensor:
        return torch.randn(*extents, generator=g, device=device)

    batch, s_q, s_k, topk = shape.batch, shape.s_q, shape.s_k, shape.topk
    dtypes = {"bf16": torch.bfloat16, "fp32": torch.float32}
    index_q = (normal(batch, s_q, request.heads, HEAD_DIM) * 0.1).bfloat16()
    weights = (normal(batch, s_q, request.heads) * 0.5).bfloat16()
    index_k = (normal(batch, s_k, HEAD_DIM) * 0.1).bfloat16()
    attn_score = torch.softmax(normal(batch, s_q, topk), -1)
    return Inputs(
        index_q=index_q,
        weights=weights,
        index_k=index_k,
        attn_score=attn_score,
        index_score=torch.softmax(normal(batch, s_q, topk), -1),
        topk_indices=draw_ids(shape, g, device),
        grad_loss=torch.ones(1, device=device),
        d_index_q=torch.empty_like(index_q),
        d_weights=torch.empty_like(weights, dtype=dtypes[request.d_weights]),
        d_index_k=torch.empty_like(index_k, dtype=dtypes[request.d_index_k]),
        copies=tuple(attn_score.clone() for _ in range(_calls(shape))),
    )


def bytes_of(shape: Shape, heads: int) -> int:
    """Device memory that a call of this shape takes here, but for workspaces: an estimate, rather too large."""
    rows, keys = shape.batch * shape.s_q, shape.batch * shape.s_k
    scores = 4 * shape.pairs * (_calls(shape) + 5)
    # Outputs twice, since the peer makes its own; fp32 numbers are there while bf16 ones are drawn.
    return scores + rows * heads * HEAD_DIM * (2 + 2 + 2 + 4) + keys * HEAD_DIM * 14 + 6 * 4 * max(_CHUNK, shape.s_k)


def draw_ids(shape: Shape, generator: torch.Generator, device: str) -> torch.Tensor:
    """topk_indices, (B, S_q, topk) int32, local ids; the distributions are those of ``request.IDS``."""
    batch, s_q, s_k, topk = shape.batch, shape.s_q, shape.s_k, shape.topk
    rows = batch * s_q
    if shape.ids == "window":
        query = torch.arange(s_q, device=device)[:, None] * s_k // s_q
        ids = (query - torch.arange(topk, device=device)) % s_k
        return ids.to(torch.int32).expand(batch, s_q, topk).contiguous()
    favoured: torch.Tensor | None = None
    if shape.ids == "sinks":
        sinks = min(topk // 8, _MOST_SINKS)
        favoured = torch.arange(sinks, device=device).expand(rows, sinks)
    elif shape.ids == "shared":
        groups = -(-s_q // _NEIGHBOURS)
        common = _distinct(batch * groups, round(_SHARED * topk), s_k, generator, device).long()
        row = torch.arange(rows, device=device)
        favoured = common[row // s_q * groups + row % s_q // _NEIGHBOURS]
    ids = _distinct(rows, topk, s_k, generator, device, favoured)
    return (ids.sort(-1).values if shape.ids == "sorted" else ids).reshape(batch, s_q, topk).contiguous()


def _distinct(
    rows: int, count: int, s_k: int, generator: torch.Generator, device: str, favoured: torch.Tensor | None = None
) -> torch.Tensor:
    """(rows, count) int32: distinct keys of each row in random order, the favoured ones, and others evenly."""
    found = torch.empty(rows, count, dtype=torch.int32, device=device)
    step = max(1, _CHUNK // s_k)
    for start in range(0, rows, step):
        part = slice(start, min(start + step, rows))
        numbers = torch.rand(part.stop - start, s_k, generator=generator, device=device)
        order: Any = None
        if favoured is not None:
            numbers.scatter_(1, favoured[part], 2.0)
            order = torch.rand(part.stop - start, count, generator=generator, device=device).argsort(-1)
        keys = numbers.topk(count, -1).indices  # sorted by the random number, so in random order
        found[part] = keys if order is None else keys.gather(1, order)
    return found


def _calls(shape: Shape) -> int:
    return max(_FEWEST_CALLS, min(CALLS, _COPIES_BYTES // (4 * shape.pairs)))
