"""Seeded calls of ``indexer_backward`` for proofs: inputs that leave no doubt about the right answer.

A relu gate at a score near zero may fall the other way in fp32 than in fp64, and then a whole term of the gradients
differs. So a slot that has any head with 0 < |S| < ``GATE_MARGIN`` gets the id -1, in the inputs themselves: no
tolerance has to allow for it. Scores that are exactly zero stay, since there both agree.

bf16 arrays are held as their bits, uint16. Needs numpy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy

__all__ = ["GATE_MARGIN", "Call", "Case", "bf16_bits", "bf16_values", "make"]

GATE_MARGIN = 2e-6
"""Scores here are of the order of 0.1, and fp32 sums of 128 products err by less than 1e-6."""


@dataclass(frozen=True)
class Case:
    """What to draw.

    ``ids`` is "local" or "global"; ``d_index_k`` is "bf16" or "fp32"; ``unused_keys``, those that no valid slot
    selects, are "finite" or "nan": NaN shows whether a kernel lets a key through that has no part in the answer.
    ``invalid_ids`` says whether there are any but those that settle gates. ``multiprocessors`` are the SMs of the
    machine.
    """

    batch: int
    s_q: int
    s_k: int
    ids: str = "local"
    d_index_k: str = "fp32"
    sm_scale: float = 0.7
    loss_coeff: float = 1.3
    seed: int = 0
    unused_keys: str = "finite"
    invalid_ids: bool = True
    multiprocessors: int = 2

    def __str__(self) -> str:
        unused = ", NaN in unused keys" if self.unused_keys == "nan" else ""
        valid = "" if self.invalid_ids else "valid "
        return f"B={self.batch} S_q={self.s_q} S_k={self.s_k} {valid}{self.ids} ids, {self.d_index_k} d_index_k{unused}"


@dataclass(frozen=True)
class Call:
    """The arrays of one call, by argument name, with shapes as in the documentation of the operation."""

    case: Case
    arrays: dict[str, Any]

    def values(self, name: str) -> Any:
        """An input as numbers: bf16 bits become float32."""
        array = self.arrays[name]
        return bf16_values(array) if array.dtype == numpy.uint16 else array


def bf16_bits(values: Any) -> Any:
    """Round to bf16, to nearest even; the bits."""
    bits = numpy.ascontiguousarray(values, numpy.float32).view(numpy.uint32).astype(numpy.uint64)
    rounded = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(numpy.uint16)
    return numpy.where((bits & 0x7FFFFFFF) > 0x7F800000, numpy.uint16(0x7FFF), rounded)


def bf16_values(bits: Any) -> Any:
    """bf16 bits as float32."""
    return (bits.astype(numpy.uint32) << 16).view(numpy.float32)


def make(case: Case, topk: int, heads: int, head_dim: int) -> Call:
    """Draw a call.

    Among the ids are repeated ones and, unless all are to be valid, -1, very negative ones, S_k and beyond (valid in a
    later batch element, were they not masked first) and INT32_MAX; some keys and heads are zero; some index_score are 0
    or next to the threshold exp(-100) on either side; some attn_score are 0.
    """
    g = numpy.random.default_rng(case.seed)
    keys = case.s_k * (case.batch if case.ids == "global" else 1)
    shape = (case.batch, case.s_q, topk)
    ids = g.integers(0, max(keys, 1), shape)
    kind = g.random(shape) + (0 if case.invalid_ids else 1)
    ids = numpy.select(
        [kind < 0.10, kind < 0.12, kind < 0.14, kind < 0.15, kind < 0.16],
        [-1, keys, keys + g.integers(0, 50, shape), -(2**31), 2**31 - 1],
        ids,
    )
    predicted = _softmax(g.standard_normal(shape))
    threshold = numpy.float32(2.0**-149) * 26  # exp(-100) lies between 26 and 27 times the smallest subnormal
    kind = g.random(shape)
    predicted = numpy.select(
        [kind < 0.04, kind < 0.05, kind < 0.06], [0.0, threshold, threshold + numpy.float32(2.0**-149)], predicted
    )
    target = numpy.where(g.random(shape) < 0.05, 0.0, _softmax(g.standard_normal(shape)))
    index_q = g.standard_normal((case.batch, case.s_q, heads, head_dim)) * 0.1
    index_k = g.standard_normal((case.batch, case.s_k, head_dim)) * 0.1
    index_q[g.random(index_q.shape[:3]) < 0.03] = 0.0
    index_k[g.random(index_k.shape[:2]) < 0.03] = 0.0
    call = Call(
        case,
        {
            "index_q": bf16_bits(index_q),
            "weights": bf16_bits(g.standard_normal((case.batch, case.s_q, heads)) * 0.5),
            "index_k": bf16_bits(index_k),
            "attn_score": target.astype(numpy.float32),
            "index_score": predicted.astype(numpy.float32),
            "topk_indices": ids.astype(numpy.int32),
            "grad_loss": numpy.full(1, 0.75, numpy.float32),
        },
    )
    _settle_gates(call)
    if case.unused_keys == "nan":
        call.arrays["index_k"].reshape(-1, head_dim)[~_selected_keys(call)] = 0x7FFF
    return call


def _softmax(values: Any) -> Any:
    e = numpy.exp(values - values.max(-1, keepdims=True)) if values.size else values
    return (e / e.sum(-1, keepdims=True)).astype(numpy.float32)


def _selected_keys(call: Call) -> Any:
    """For each of the B * S_k keys, whether a valid slot selects it."""
    case, ids = call.case, call.arrays["topk_indices"].astype(numpy.int64)
    flat = case.ids == "global"
    offsets = 0 if flat else case.s_k * numpy.arange(case.batch)[:, None, None]
    valid = (ids >= 0) & (ids < case.s_k * (case.batch if flat else 1))
    selected = numpy.zeros(case.batch * case.s_k, bool)
    selected[(ids + offsets)[valid]] = True
    return selected


def _settle_gates(call: Call) -> None:
    """Give the id -1 to slots with a score whose sign is in doubt."""
    case, ids = call.case, call.arrays["topk_indices"]
    q, k = call.values("index_q").astype(numpy.float64), call.values("index_k").astype(numpy.float64)
    keys = k.reshape(-1, k.shape[-1])
    limit = len(keys) if case.ids == "global" else case.s_k
    for b in range(case.batch if limit else 0):
        for row in range(case.s_q):
            valid = (ids[b, row] >= 0) & (ids[b, row] < limit)
            flat = numpy.where(valid, ids[b, row] + (0 if case.ids == "global" else b * case.s_k), 0)
            scores = numpy.abs(keys[flat] @ q[b, row].T)
            doubtful = ((scores > 0) & (scores < GATE_MARGIN)).any(-1)
            ids[b, row][valid & doubtful] = -1
