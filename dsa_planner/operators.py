"""``indexer_backward``: the operator that training jobs call. Run side."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dsa_planner import dlpack, envelope, streams
from dsa_planner.arguments import ArgumentCheck, dtype_name, require_tensor
from dsa_planner.cache.planfile import PlanFile
from dsa_planner.driver import device as open_device
from dsa_planner.driver import refuse_fork
from dsa_planner.errors import (
    CaptureError,
    DeviceMismatchError,
    DsaPlannerError,
    PlanNotFoundError,
    UnsupportedError,
)
from dsa_planner.launch_graph import is_captured
from dsa_planner.launch_record import TENSORS
from dsa_planner.locate import find_plan
from dsa_planner.plan import Plan
from dsa_planner.settings import Settings

__all__ = ["indexer_backward", "load_plan", "plan_for", "plans", "row_for"]

_SCALARS = ("sm_scale", "loss_coeff", "block_I", "topk_indices_global")
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
    audit: bool | None = None,
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

    The call is asynchronous on ``stream``. It needs a compiled plan (``dsa-plan precompile``), and compiles only with
    DSA_PLAN_COMPILE=missing. Under stream capture it becomes part of the graph, and each replay consumes the attn_score
    that it finds. Inputs may be CUDA arrays of any library with DLPack; what is written, of torch or CuPy.

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
        workspace: scratch of at least ``Plan.workspace_bytes`` bytes; None for the stream's own.
        deterministic: d_index_k bitwise reproducible, with a backend that takes it.
        deterministic_dk_planes: accepted for callers of cuDNN frontend's operator, and ignored: the deterministic mode
            here has no planes to choose.
        audit: see ``Plan.launch``.

    Returns:
        {"d_index_q": ..., "d_weights": ..., "d_index_k": ...}, in that order.

    Raises:
        UnsupportedError: a value, shape, dtype or stride outside the support envelope; attn_score is untouched.
        DeviceMismatchError: tensors on several devices, or on one that the backend does not run on.
        PlanNotFoundError: no layer holds the plan.
        CaptureError: under capture, what a replay could not repeat: loading the plan, for one.
        AuditError: see ``Plan.launch``.
        DriverError: the driver is missing or refused a call, or the process was forked after CUDA was started.
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
    scalars = (sm_scale, loss_coeff, block_I, topk_indices_global)
    try:
        if plan is None:
            plan = _plan_for_call(looks, d_weights, backend, deterministic, scalars, stream)
        envelope.check_scalars(plan.row, *scalars)
        shape = plan.shape_of(looks, topk_indices_global)
    except UnsupportedError:
        if not dlpack.has_foreign(looks, workspace):
            raise
        given = {"d_index_q": d_index_q, "d_weights": d_weights, "d_index_k": d_index_k}
        options = {"backend": backend, "deterministic": deterministic, "audit": audit}
        return _with_foreign_arrays(inputs, given, workspace, stream, scalars, options)
    handle = streams.handle_of(stream, plan.device)
    if d_index_q is None or d_weights is None or d_index_k is None:
        refuse_fork()
        with streams.allocating_on(handle, plan.device):
            d_index_q = torch.empty_like(index_q) if d_index_q is None else d_index_q
            d_weights = torch.empty_like(weights) if d_weights is None else d_weights
            d_index_k = torch.empty_like(index_k) if d_index_k is None else d_index_k
    tensors = (*inputs, d_index_q, d_weights, d_index_k)
    plan.launch_checked(shape, tensors, sm_scale, loss_coeff, workspace, handle, audit)
    return {"d_index_q": d_index_q, "d_weights": d_weights, "d_index_k": d_index_k}


def _with_foreign_arrays(
    inputs: Sequence[Any],
    given: Mapping[str, Any],
    workspace: Any,
    stream: Any,
    scalars: Sequence[Any],
    options: Mapping[str, Any],
) -> dict[str, Any]:
    """``indexer_backward`` once more, with arrays of other libraries as torch tensors.

    Args:
        inputs: the seven.
        given: outputs that the caller brought, or None.
        workspace: or None.
        stream: as given.
        scalars: sm_scale, loss_coeff, block_I and topk_indices_global.
        options: the other keyword arguments.

    Returns:
        the outputs; those that the caller brought as they are.
    """
    ordinal = dlpack.ordinal_of(inputs[0])
    handle = streams.LEGACY_STREAM if ordinal < 0 else streams.handle_of(stream, ordinal)
    tensors, workspace = dlpack.as_tensors((*inputs, *given.values()), workspace, handle)
    arguments = dict(zip((*TENSORS, *_SCALARS), (*tensors, *scalars), strict=True))
    found = indexer_backward(**arguments, stream=stream, workspace=workspace, **options)
    return {name: found[name] if output is None else output for name, output in given.items()}


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
    return _load(request, streams.ordinal_of(device))


def plans() -> list[Plan]:
    """The plans that this process has loaded, each once."""
    return list({id(plan): plan for plan in list(_plans.values())}.values())


def _plan_for_call(
    tensors: Sequence[Any],
    d_weights: Any,
    backend: str,
    deterministic: bool,
    scalars: tuple[float, float, int, bool],
    stream: Any,
) -> Plan:
    """The plan that a call's tensors ask for, by the slow way: first every check that needs neither device nor plan.

    Args:
        tensors: in the order of ``TENSORS``, with stand-ins for the outputs that the caller left out.
        d_weights: as the caller gave it.
        backend: see ``indexer_backward``.
        deterministic: see ``indexer_backward``.
        scalars: sm_scale, loss_coeff, block_I and topk_indices_global.
        stream: as the caller gave it.
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
    row = row_for(request, ordinal)
    check = ArgumentCheck(row, {**request, "arch": row.arch}, ordinal)
    if not (check.inputs_ok(tensors) and check.outputs_ok(tensors)):
        check.explain(tensors)
    envelope.check_scalars(row, *scalars)
    if ordinal < 0:
        raise DeviceMismatchError(
            f"index_q on {index_q.device}", "the operator runs on CUDA devices", "move the tensors to a GPU"
        )
    plan = plan_for(request, ordinal, stream)
    _plans[backend, ordinal, (heads, head_dim), topk, d_weights_dtype, deterministic] = plan
    return plan


def plan_for(request: Mapping[str, Any], ordinal: int, stream: Any) -> Plan:
    """The plan of a request, for a launch on a stream.

    Raises:
        CaptureError: it is not loaded yet, and the stream is being captured.
        others: as ``load_plan``.
    """
    plan = _loaded(request, ordinal)
    if plan is not None:
        return plan
    handle = streams.handle_of(stream, ordinal)
    with open_device(ordinal).current():  # handle 2 is that of the current context
        captured = is_captured(handle)
    if captured:
        backend, topk = request["backend"], request["topk"]
        raise CaptureError(
            f"indexer_backward with backend {backend} and topk {topk} on captured stream {handle:#x}",
            "its plan is not loaded yet, and a replay could not repeat that",
            f"call dsa_planner.load_plan({topk}, backend={backend!r}), or the operator once, before the capture",
        )
    return _load(request, ordinal)


def row_for(request: Mapping[str, Any], ordinal: int) -> envelope.Support:
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


def _loaded(request: Mapping[str, Any], ordinal: int) -> Plan | None:
    """The plan of a request, if it was loaded before."""
    return _plans.get(_key(request, ordinal))


def _key(request: Mapping[str, Any], ordinal: int) -> tuple[Any, ...]:
    return ("config", ordinal, *sorted(request.items()))


def _load(request: Mapping[str, Any], ordinal: int) -> Plan:
    # Before the device and before any cache, so that a wrong value is refused the same way always.
    row_for(request, ordinal)
    refuse_fork()
    with _lock:
        plan = _loaded(request, ordinal)
        if plan is None:
            plan = _plans[_key(request, ordinal)] = _open(request, ordinal)
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
    # The family target first, then an exact build of it.
    file = _find([envelope.plan_config({**request, "arch": row.arch}) for row in rows], settings)
    return Plan(file, ordinal, settings.launch, settings.audit, settings.module_bytes)


def _find(configs: Sequence[Mapping[str, Any]], settings: Settings) -> PlanFile:
    """The first of some plans that a layer has; if none has one, the first, compiled, if the settings say so."""
    missing: PlanNotFoundError | None = None
    for config in configs:
        try:
            return find_plan(config, settings)
        except PlanNotFoundError as error:
            missing = missing or error
    assert missing is not None
    if settings.compile == "never":
        raise missing
    from dsa_planner.planner import Planner  # the build side: pydantic and the compiler

    (outcome,) = Planner(settings).precompile([configs[0]])
    if outcome.error is not None:
        raise outcome.error
    return find_plan(configs[0], settings)
