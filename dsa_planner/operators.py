"""``indexer_backward``: the operator that training jobs call. Run side."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dsa_planner import envelope, streams
from dsa_planner.arguments import ArgumentCheck, dtype_name, require_tensor
from dsa_planner.driver import device as open_device
from dsa_planner.driver import start as start_driver
from dsa_planner.errors import (
    DeviceMismatchError,
    DriverError,
    DsaPlannerError,
    PlanNotFoundError,
    UnsupportedError,
    shown,
)
from dsa_planner.locate import find_plan
from dsa_planner.plan import Plan
from dsa_planner.settings import Settings

__all__ = ["indexer_backward", "load_plan"]

_plans: dict[tuple[Any, ...], Plan] = {}
_lock = threading.Lock()


def indexer_backward(
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
    d_index_q: torch.Tensor | None = None,
    d_weights: torch.Tensor | None = None,
    d_index_k: torch.Tensor | None = None,
    stream: Any = None,
    *,
    backend: str = "default",
    workspace: torch.Tensor | None = None,
    deterministic: bool = False,
    deterministic_dk_planes: int = 96,
) -> dict[str, torch.Tensor]:
    """Gradients of the DeepSeek-Sparse-Attention indexer's KL loss.

    With c = loss_coeff / (B * S_q) * grad_loss, m[t] = 1 where index_score[t] >= exp(-100), else 0, and for each
    query the slots t = 0 .. topk-1 with keys n = topk_indices[t]::

        gi[t]        = -max(attn_score[t], exp(-100)) * m[t] * c
        attn_score[t] <- g[t] = gi[t] - index_score[t] * sum(gi)
        S[t,h]       = sum_d index_k[n,d] index_q[h,d]
        A[t,h]       = sm_scale * g[t] * weights[h]   where S[t,h] > 0, else 0
        d_weights[h] = sum_t sm_scale * g[t] * max(S[t,h], 0)
        d_index_q[h] = sum_t A[t,h] index_k[n]
        d_index_k[n] += sum_h A[t,h] index_q[h]

    The call is asynchronous on ``stream``. It needs a compiled plan (``dsa-plan precompile``) and never compiles.

    Args:
        index_q: (B, S_q, H, D) bf16.
        weights: (B, S_q, H) bf16.
        index_k: (B, S_k, D) bf16.
        attn_score: (B, S_q, topk) fp32, target probabilities; **overwritten** with the score gradient g.
        index_score: (B, S_q, topk) fp32, predicted probabilities.
        topk_indices: (B, S_q, topk) int32 key ids, local to the batch element, or flat over B * S_k where
            ``topk_indices_global``. A slot whose id is negative or too large contributes nothing.
        grad_loss: (1,) fp32, read on the device.
        sm_scale: softmax scale, positive.
        loss_coeff: coefficient of the loss.
        block_I: tile of slots; 128.
        topk_indices_global: see ``topk_indices``.
        d_index_q: output, (B, S_q, H, D) bf16; allocated where None.
        d_weights: output, (B, S_q, H) bf16, or fp32 with a backend that takes it; allocated as bf16 where None.
        d_index_k: output, (B, S_k, D) bf16 or fp32; allocated as bf16 where None. Need not be zeroed.
        stream: None for torch's current stream, or any stream of the device.
        backend: see ``dsa-plan explain``.
        workspace: scratch of at least ``Plan.workspace_bytes`` bytes; allocated where None.
        deterministic: d_index_k bitwise reproducible, with a backend that takes it.
        deterministic_dk_planes: accepted for callers of cuDNN frontend's operator, and ignored: the deterministic mode
            here has no planes to choose.

    Returns:
        {"d_index_q": ..., "d_weights": ..., "d_index_k": ...}, in that order.

    Raises:
        UnsupportedError: a value, shape, dtype or stride outside the support envelope; attn_score is untouched.
        DeviceMismatchError: tensors on several devices, or on one that the backend does not run on.
        PlanNotFoundError: no layer holds the plan.
        DriverError: the driver is missing or refused a call.
    """
    del deterministic_dk_planes
    plan = None
    if type(deterministic) is bool:  # 0 and False are one key of a dictionary
        try:
            key = (
                backend, index_q.get_device(), index_q.shape[2:], topk_indices.shape[-1],
                None if d_weights is None else d_weights.dtype, deterministic,
            )  # fmt: skip
            plan = _plans.get(key)
        except (AttributeError, IndexError, TypeError, RuntimeError):  # the slow way says what is wrong
            pass
    # An output that is left out will look like the input that it is the gradient of, so that stands in for the checks.
    inputs = (index_q, weights, index_k, attn_score, index_score, topk_indices, grad_loss)
    looks = (
        *inputs,
        index_q if d_index_q is None else d_index_q,
        weights if d_weights is None else d_weights,
        index_k if d_index_k is None else d_index_k,
    )
    if plan is None:
        plan = _plan_for_call(
            looks, d_weights, backend, deterministic, (sm_scale, loss_coeff, block_I, topk_indices_global)
        )
    envelope.check_scalars(plan.row, sm_scale, loss_coeff, block_I, topk_indices_global)
    shape = plan.shape_of(looks, topk_indices_global)
    handle = streams.handle_of(stream, plan.device)
    if d_index_q is None or d_weights is None or d_index_k is None:
        with streams.allocating_on(handle, plan.device):
            d_index_q = torch.empty_like(index_q) if d_index_q is None else d_index_q
            d_weights = torch.empty_like(weights) if d_weights is None else d_weights
            d_index_k = torch.empty_like(index_k) if d_index_k is None else d_index_k
    tensors = (*inputs, d_index_q, d_weights, d_index_k)
    plan.launch_checked(shape, tensors, sm_scale, loss_coeff, workspace, handle)
    return {"d_index_q": d_index_q, "d_weights": d_weights, "d_index_k": d_index_k}


def load_plan(
    topk: int,
    *,
    backend: str = "default",
    device: int | str | torch.device = 0,
    heads: int = 64,
    head_dim: int = 128,
    d_weights: str = "bf16",
    deterministic: bool = False,
) -> Plan:
    """The plan for a device, from the layers; loaded once a process.

    Args:
        topk: selected keys of a query.
        backend: see ``dsa-plan explain``.
        device: the device, which decides the arch: its ordinal, "cuda:0", or a torch.device.
        heads: indexer heads, H.
        head_dim: dimensions of a head, D.
        d_weights: dtype of the d_weights output, "bf16" or "fp32".
        deterministic: d_index_k bitwise reproducible.

    Raises:
        UnsupportedError: outside the support envelope.
        DeviceMismatchError: the backend does not run on this device.
        PlanNotFoundError: no layer holds the plan.
        PlanFileError: the plan in the layer does not match its own cubin.
        DriverError: the driver is missing or refused a call.
    """
    request = {
        "backend": backend, "topk": topk, "heads": heads, "head_dim": head_dim, "d_weights": d_weights,
        "deterministic": deterministic,
    }  # fmt: skip
    return _load(request, _ordinal_of(device))


def _plan_for_call(
    tensors: Sequence[Any], d_weights: Any, backend: str, deterministic: bool, scalars: tuple[float, float, int, bool]
) -> Plan:
    """The plan that a call's tensors ask for, by the slow way: first every check that needs neither device nor plan.

    Args:
        tensors: in the order of ``TENSORS``, with stand-ins for the outputs that the caller left out.
        d_weights: as the caller gave it.
        backend: see ``indexer_backward``.
        deterministic: see ``indexer_backward``.
        scalars: sm_scale, loss_coeff, block_I and topk_indices_global.
    """
    index_q, topk_indices = tensors[0], tensors[5]
    for name, tensor, rank in (("index_q", index_q, 4), ("topk_indices", topk_indices, 3)):
        require_tensor(name, tensor)
        if len(tensor.shape) != rank:
            raise UnsupportedError(f"{name} of shape {tuple(tensor.shape)}", f"it is of rank {rank}", f"reshape {name}")
    heads, head_dim, topk = (int(extent) for extent in (*index_q.shape[2:], topk_indices.shape[-1]))
    d_weights_dtype = getattr(d_weights, "dtype", None)
    request = {
        "backend": backend,
        "topk": topk,
        "heads": heads,
        "head_dim": head_dim,
        "d_weights": "bf16" if d_weights_dtype is None else dtype_name(d_weights_dtype),
        "deterministic": deterministic,
    }
    ordinal = index_q.get_device()
    row = _first_row(request, ordinal)
    check = ArgumentCheck(row, {**request, "arch": row.arch}, ordinal)
    if not (check.inputs_ok(tensors) and check.outputs_ok(tensors)):
        check.explain(tensors)
    envelope.check_scalars(row, *scalars)
    if ordinal < 0:
        raise DeviceMismatchError(
            f"index_q on {index_q.device}", "the operator runs on CUDA devices", "move the tensors to a GPU"
        )
    plan = _load(request, ordinal)
    _plans[backend, ordinal, (heads, head_dim), topk, d_weights_dtype, deterministic] = plan
    return plan


def _ordinal_of(device: Any) -> int:
    """The ordinal of a device as callers name it.

    Raises:
        UnsupportedError: it is no CUDA device.
        DriverError: it is torch's current one, and torch has none.
    """
    if type(device) is int:
        return device
    try:
        named = torch.device(device)
    except (TypeError, RuntimeError):
        named = None
    if named is None or named.type != "cuda":
        raise UnsupportedError(
            f"device={shown(device)}", "it is no CUDA device", 'give its ordinal, or for example "cuda:0"'
        )
    return _current_ordinal(device) if named.index is None else named.index


def _current_ordinal(device: Any) -> int:
    """The ordinal of torch's current device, which ``device`` means.

    Raises:
        DriverError: torch has none.
    """
    try:
        return torch.cuda.current_device()
    except Exception as error:  # an AssertionError of a torch without CUDA; else a RuntimeError, or one of torch's own
        start_driver()  # no driver or no GPU is the same to every caller, whatever torch says of it
        reason = " ".join(str(error).split())
        raise DriverError(
            f"device={shown(device)}",
            f"torch has no current CUDA device ({reason[:200]})",
            "give the device's ordinal, or use a torch with CUDA",
        ) from error


def _first_row(request: Mapping[str, Any], ordinal: int) -> envelope.Support:
    """The first row of the backend that takes the request, of those for the device if it has any.

    Raises:
        UnsupportedError: no row does.
    """
    refusal: UnsupportedError | None = None
    for row in _rows_for_device(request["backend"], ordinal):
        try:
            envelope.plan_config({**request, "arch": row.arch})
            return row
        except UnsupportedError as error:
            refusal = refusal or error
    assert refusal is not None
    raise refusal


def _rows_for_device(backend: str, ordinal: int) -> tuple[envelope.Support, ...]:
    """The rows of a backend for a device; all of them where it has none, or where there is no such device."""
    rows = envelope.rows_for(backend)
    if ordinal < 0:
        return rows
    try:
        return envelope.rows_for_capability(backend, open_device(ordinal).capability) or rows
    except DsaPlannerError:  # a wrong value is refused all the same, and named before the device is
        return rows


def _load(request: Mapping[str, Any], ordinal: int) -> Plan:
    # Before the device and before any cache, so that a wrong value is refused the same way always.
    _first_row(request, ordinal)
    key = ("config", ordinal, *sorted(request.items()))
    with _lock:
        plan = _plans.get(key)
        if plan is None:
            plan = _plans[key] = _open(request, ordinal)
    return plan


def _open(request: Mapping[str, Any], ordinal: int) -> Plan:
    backend = request["backend"]
    target = open_device(ordinal)
    rows = envelope.rows_for_capability(backend, target.capability)
    if not rows:
        supported = sorted({capability for row in envelope.rows_for(backend) for capability in row.capabilities})
        raise DeviceMismatchError(
            f"backend {backend} on {target.name} (compute capability {target.capability[0]}.{target.capability[1]})",
            f"it runs on compute capability {', '.join(f'{a}.{b}' for a, b in supported)}",
            "use another backend or device",
        )
    settings = Settings.from_environment()
    missing: PlanNotFoundError | None = None
    for row in rows:  # the family target first, then an exact build of it
        try:
            file = find_plan(envelope.plan_config({**request, "arch": row.arch}), settings)
            return Plan(file, ordinal, settings.launch)
        except PlanNotFoundError as error:
            missing = missing or error
    assert missing is not None
    raise missing
