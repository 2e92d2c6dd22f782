"""Train an indexer against a fixed attention target: once with a compiled plan, once with plain torch.

A toy of DeepSeek Sparse Attention: tokens with hidden states, a target distribution over the selected keys of each
query (here made by a hidden indexer, so that it can be met), and an indexer of three linear maps that learns it by the
KL loss. Both runs start from the same weights and see the same data. It needs a GPU of sm_90 or sm_100, torch, the
plan of topk 256, and matplotlib for the plot::

    python docs/training_loop.py --plot docs/training.png
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable

import torch
from torch import nn

import dsa_planner

BATCH, S_Q, S_K, HEADS, HEAD_DIM, TOPK, HIDDEN = 2, 512, 2048, 64, 128, 256, 256
SM_SCALE = HEAD_DIM**-0.5
Loss = Callable[..., torch.Tensor]


class Indexer(nn.Module):
    """Hidden states to index_q (bf16), weights (fp32) and index_k (fp32)."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.q = nn.Linear(HIDDEN, HEADS * HEAD_DIM, bias=False)
        self.w = nn.Linear(HIDDEN, HEADS, bias=False)
        self.k = nn.Linear(HIDDEN, HEAD_DIM, bias=False)

    def forward(self, queries: torch.Tensor, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        index_q = self.q(queries).unflatten(-1, (HEADS, HEAD_DIM)).bfloat16()
        return index_q, self.w(queries) * HEADS**-0.5, self.k(keys)


def index_score(
    index_q: torch.Tensor, weights: torch.Tensor, index_k: torch.Tensor, topk_indices: torch.Tensor
) -> torch.Tensor:
    """Predicted probabilities of the selected keys, by plain torch in fp32; every id is valid here."""
    batch = torch.arange(index_k.shape[0], device=index_k.device)[:, None, None]
    selected = index_k.bfloat16().float()[batch, topk_indices.long()]
    scores = torch.einsum("bqtd,bqhd->bqth", selected, index_q.float()).relu()
    return (scores * weights.bfloat16().float()[:, :, None, :]).sum(-1).mul(SM_SCALE).softmax(-1)


def torch_loss(
    index_q: torch.Tensor,
    weights: torch.Tensor,
    index_k: torch.Tensor,
    attn_score: torch.Tensor,
    topk_indices: torch.Tensor,
) -> torch.Tensor:
    """The KL loss by plain torch and its autograd."""
    predicted = index_score(index_q, weights, index_k, topk_indices)
    eps = math.exp(-100.0)
    target = attn_score.clamp(min=eps)
    return (target * (target.log() - predicted.clamp(min=eps).log())).sum() / (BATCH * S_Q)


def plan_loss(backend: str) -> Loss:
    """The same loss, with its gradient from a compiled plan."""

    def loss(*tensors: torch.Tensor) -> torch.Tensor:
        return dsa_planner.indexer_loss(*tensors, SM_SCALE, backend=backend)[0]

    return loss


def train(loss_of: Loss, steps: int, device: str) -> tuple[list[float], float]:
    """The loss of every step, and milliseconds a step."""
    teacher, student = Indexer(1).to(device), Indexer(2).to(device)
    optimizer = torch.optim.AdamW(student.parameters(), lr=2e-3)
    generator = torch.Generator(device=device).manual_seed(0)
    losses = []
    start = time.perf_counter()
    for _ in range(steps):
        queries = torch.randn(BATCH, S_Q, HIDDEN, generator=generator, device=device)
        keys = torch.randn(BATCH, S_K, HIDDEN, generator=generator, device=device)
        order = torch.rand(BATCH, S_Q, S_K, generator=generator, device=device)
        topk_indices = order.topk(TOPK).indices.to(torch.int32)
        with torch.no_grad():
            q, w, k = teacher(queries, keys)
            attn_score = index_score(q, 8.0 * w, k, topk_indices)
        loss = loss_of(*student(queries, keys), attn_score, topk_indices)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    torch.cuda.synchronize()
    elapsed = time.perf_counter() - start
    return [float(loss) for loss in losses], elapsed / steps * 1e3


def plot(curves: dict[str, list[float]], path: str) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for (name, losses), style in zip(curves.items(), ({"lw": 3, "alpha": 0.4}, {"lw": 1}), strict=True):
        axes.plot(losses, label=name, **style)
    axes.set(xlabel="step", ylabel="KL loss", yscale="log")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--backend", help="of the plan; the v2 backend of the GPU by default")
    parser.add_argument("--plot", help="write the two curves to this file")
    parser.add_argument("--json", help="write the losses to this file")
    options = parser.parse_args()
    major = torch.cuda.get_device_capability()[0]
    backend = options.backend or {9: "sm90_v2", 10: "sm100_v2"}[major]
    dsa_planner.require([{"topk": TOPK, "backend": backend, "d_weights": "fp32"}])
    curves = {}
    for name, loss in (("plain torch", torch_loss), (f"dsa_planner, {backend}", plan_loss(backend))):
        curves[name], milliseconds = train(loss, options.steps, "cuda")
        print(f"{name}: {curves[name][0]:.4f} to {curves[name][-1]:.4f}, {milliseconds:.1f} ms a step")
    one, other = curves.values()
    apart = max(abs(a - b) / a for a, b in zip(one, other, strict=True))
    print(f"the curves are at most {apart:.1e} apart, relative to the loss")
    if options.plot:
        plot(curves, options.plot)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(curves, file)


if __name__ == "__main__":
    main()
