"""The oracle is held to autograd of the loss, to a plain loop, and to its memory bound."""

from __future__ import annotations

import math
import tracemalloc

import numpy as np
import pytest

from dsa_planner.kernels import oracle

torch = pytest.importorskip("torch")


def draw(seed: int, batch: int, s_q: int, s_k: int, heads: int, dims: int, topk: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {
        "q": torch.randn(batch, s_q, heads, dims, generator=g, dtype=torch.float64),
        "w": torch.randn(batch, s_q, heads, generator=g, dtype=torch.float64),
        "k": torch.randn(batch, s_k, dims, generator=g, dtype=torch.float64),
        "target": torch.softmax(torch.randn(batch, s_q, topk, generator=g, dtype=torch.float64), -1),
        "ids": torch.randint(0, s_k, (batch, s_q, topk), generator=g),
    }


def test_the_gradients_are_those_of_the_kl_loss_by_autograd() -> None:
    """The whole operation: logits from q, w and k, their softmax, the KL divergence to the target, and its gradients."""
    d = draw(0, 2, 5, 9, 4, 6, 7)
    q, w, k = (d[name].requires_grad_() for name in "qwk")
    sm_scale, loss_coeff, grad_loss = 0.6, 1.7, -1.3
    gathered = torch.stack([k[b][d["ids"][b]] for b in range(2)])
    s = torch.einsum("bstd,bshd->bsth", gathered, q)
    logits = sm_scale * torch.einsum("bsth,bsh->bst", s.clamp(min=0), w)
    log_p = torch.log_softmax(logits, -1)
    loss = loss_coeff * (d["target"] * (d["target"].log() - log_p)).sum(-1).mean()
    logits.retain_grad()
    (loss * grad_loss).backward()
    score_grad, found = oracle.indexer_backward(
        q.detach(), w.detach(), k.detach(), d["target"], log_p.detach().exp(), d["ids"], grad_loss, sm_scale, loss_coeff
    )
    torch.testing.assert_close(score_grad, logits.grad, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(found.d_index_q, q.grad, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(found.d_weights, w.grad, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(found.d_index_k, k.grad, rtol=1e-12, atol=1e-14)


def loop(q, w, k, grad, ids, sm_scale, flat):  # type: ignore[no-untyped-def]
    """The definition, slot by slot."""
    batch, s_q, heads, _ = q.shape
    s_k, topk = k.shape[1], ids.shape[2]
    dq, dw, dk = np.zeros(q.shape), np.zeros(w.shape), np.zeros(k.shape)
    for b in range(batch):
        for s in range(s_q):
            for t in range(topk):
                n = int(ids[b, s, t])
                if not 0 <= n < (batch * s_k if flat else s_k):
                    continue
                kb, kn = (n // s_k, n % s_k) if flat else (b, n)
                g = grad[b, s, t] * sm_scale
                for h in range(heads):
                    score = float(k[kb, kn] @ q[b, s, h])
                    dw[b, s, h] += g * max(score, 0.0)
                    if score > 0.0:
                        dq[b, s, h] += g * w[b, s, h] * k[kb, kn]
                        dk[kb, kn] += g * w[b, s, h] * q[b, s, h]
    return dq, dw, dk


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("flat", [False, True], ids=["local", "global"])
@pytest.mark.parametrize("max_bytes", [1, 20_000, 1 << 30])
def test_ids_batches_and_chunks_agree_with_a_plain_loop(kind: str, flat: bool, max_bytes: int) -> None:
    d = draw(1, 3, 4, 5, 2, 3, 6)
    g = torch.Generator().manual_seed(2)
    ids = torch.randint(-3, 3 * 5 + 3 if flat else 9, (3, 4, 6), generator=g)
    grad = torch.randn(3, 4, 6, generator=g, dtype=torch.float64)
    arrays = [d["q"], d["w"], d["k"], grad, ids]
    want = loop(*(a.numpy() for a in arrays), 0.7, flat)
    given = [a.numpy() for a in arrays] if kind == "numpy" else arrays
    found = oracle.gradients(*given, 0.7, flat, max_bytes)
    for value, reference in zip((found.d_index_q, found.d_weights, found.d_index_k), want, strict=True):
        assert isinstance(value, np.ndarray if kind == "numpy" else torch.Tensor)
        np.testing.assert_allclose(np.asarray(value), reference, rtol=1e-12, atol=1e-14)


def test_the_threshold_of_stage_1_is_exp_of_minus_100() -> None:
    below, above = np.nextafter(np.float32(oracle.EPS), np.float32(0)), np.float32(oracle.EPS)
    predicted = np.array([[[0.0, below, above, 0.5]]], np.float32)
    assert predicted[0, 0, 1] < oracle.EPS <= predicted[0, 0, 2], "fp32 subnormals on both sides of eps"
    target = np.array([[[0.25, 0.25, 0.25, 0.0]]], np.float32)
    gi = np.array([0.0, 0.0, -0.25, -oracle.EPS])
    want = gi - predicted[0, 0].astype(np.float64) * gi.sum()
    np.testing.assert_allclose(oracle.score_gradient(target, predicted, 1.0)[0, 0], want, rtol=1e-12, atol=0)


def test_invalid_slots_contribute_nothing_whatever_lies_there() -> None:
    """An id that is out of range, NaN in the key that it might be taken for, and NaN in its own gradient."""
    d = draw(4, 1, 2, 3, 2, 4, 3)
    d["k"][0, 0] = math.nan
    ids = torch.tensor([[[-1, 1, 3], [1, 2, -7]]])
    grad = torch.tensor([[[math.nan, 1.0, math.inf], [1.0, 1.0, math.nan]]], dtype=torch.float64)
    found = oracle.gradients(d["q"], d["w"], d["k"], grad, ids)
    assert all(torch.isfinite(value).all() for value in (found.d_index_q, found.d_weights, found.d_index_k))


def test_a_masked_slot_has_no_target_and_a_nan_elsewhere_shows() -> None:
    predicted = np.array([[[0.0, 0.5, 0.5], [0.5, 0.5, np.nan]]], np.float32)
    target = np.array([[[np.inf, 0.5, 0.5], [0.5, 0.5, 0.5]]], np.float32)
    found = oracle.score_gradient(target, predicted, 1.0)
    assert np.isfinite(found[0, 0]).all()
    assert np.isnan(found[0, 1]).tolist() == [False, False, True]
    target[0, 0, 1] = np.nan
    assert np.isnan(oracle.score_gradient(target, predicted, 1.0)[0, 0]).all()


def test_inputs_are_left_as_they_are() -> None:
    d = draw(3, 1, 2, 3, 2, 4, 3)
    before = {name: value.clone() for name, value in d.items()}
    oracle.indexer_backward(d["q"], d["w"], d["k"], d["target"], d["target"], d["ids"], 1.0)
    assert all(torch.equal(d[name], before[name]) for name in d)


def test_empty_extents() -> None:
    for batch, s_q, s_k in ((0, 2, 3), (1, 0, 3), (1, 2, 0)):
        found = oracle.gradients(
            np.zeros((batch, s_q, 2, 4)),
            np.zeros((batch, s_q, 2)),
            np.zeros((batch, s_k, 4)),
            np.zeros((batch, s_q, 5)),
            np.zeros((batch, s_q, 5), int),
        )
        assert found.d_index_k.shape == (batch, s_k, 4)
        assert not found.d_index_q.any()


def test_rms_error_notices_nan_and_is_relative() -> None:
    reference = np.array([3.0, 4.0])
    assert oracle.rms_error(np.array([3.0, 4.5]), reference) == pytest.approx(0.1)
    assert math.isnan(oracle.rms_error(np.array([3.0, np.nan]), reference))
    assert oracle.rms_error(np.zeros(2), np.zeros(2)) == 0.0


def test_temporaries_stay_within_the_bound() -> None:
    batch, s_q, s_k, heads, dims, topk = 1, 96, 512, 64, 128, 512
    rng = np.random.default_rng(0)
    q = rng.standard_normal((batch, s_q, heads, dims))
    w, k = rng.standard_normal((batch, s_q, heads)), rng.standard_normal((batch, s_k, dims))
    grad, ids = rng.standard_normal((batch, s_q, topk)), rng.integers(0, s_k, (batch, s_q, topk))
    outputs = q.nbytes + w.nbytes + k.nbytes
    for max_bytes in (8 << 20, 32 << 20):
        tracemalloc.start()
        oracle.gradients(q, w, k, grad, ids, max_bytes=max_bytes)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak <= outputs + max_bytes, f"{peak} bytes with a bound of {max_bytes}"
