"""Who is measured: plans of this project, and the peer, cuDNN frontend's operator of the same arguments.

A contender makes calls of given inputs, and knows what its kernels are called. Every one gets the same inputs.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

import torch

from dsa_planner import operators
from dsa_planner.bench.inputs import HEAD_DIM, Inputs
from dsa_planner.bench.request import Request
from dsa_planner.locate import find_plan

__all__ = ["PEER", "Contender", "Peer", "PlanContender", "find_peer"]

PEER = "cuDNN frontend"
_SM_SCALE = HEAD_DIM**-0.5


class Contender:
    """One who takes turns.

    ``name`` is the backend's, or the peer's; ``stages`` maps the symbol of a kernel to its name in the plan.
    """

    name: str
    plan_id: str | None = None
    build_id: str | None = None
    stages: Mapping[str, str] = {}

    def prepare(self, inputs: Inputs) -> Callable[[int], Any]:
        """A function that launches call ``number`` of a section; what it needs is allocated now."""
        raise NotImplementedError

    def host_calls(self, inputs: Inputs) -> dict[str, Callable[[int], Any]]:
        """By name, the functions whose host time is measured."""
        raise NotImplementedError


class PlanContender(Contender):
    """A plan, from the layers.

    Raises:
        DsaPlannerError: as from ``load_plan``.
    """

    def __init__(self, request: Request, backend: str, topk: int) -> None:
        self.name = backend
        self._options = {"backend": backend, "deterministic": request.deterministic}
        self._d_weights, self._d_index_k = request.d_weights, request.d_index_k
        self.plan = operators.load_plan(**request.plan_options(backend, topk), device=request.device)
        self.plan_id, self.build_id = self.plan.plan_id, self.plan.build_id
        kernels = find_plan(self.plan.config).manifest["kernels"]
        self.stages = {str(kernel["symbol"]): str(kernel["name"]) for kernel in kernels}

    def workspace_bytes(self, batch: int, s_k: int) -> int:
        return self.plan.workspace_bytes(batch, s_k, self._d_index_k)

    def prepare(self, inputs: Inputs) -> Callable[[int], Any]:
        bytes_needed = max(1, self.workspace_bytes(inputs.index_k.shape[0], inputs.index_k.shape[1]))
        outputs = {
            "d_index_q": inputs.d_index_q,
            "d_weights": inputs.d_weights,
            "d_index_k": inputs.d_index_k,
            "workspace": torch.empty(bytes_needed, dtype=torch.uint8, device=inputs.index_q.device),
        }
        return _numbered(self.plan.launch, inputs, outputs)

    def host_calls(self, inputs: Inputs) -> dict[str, Callable[[int], Any]]:
        """``plan.launch`` into given buffers, and ``indexer_backward``, which allocates those of the default dtype.

        Each with the buffers of the call before, and "moved": with another attn_score than the call before.
        """
        outputs: dict[str, Any] = {}
        if self._d_weights == "fp32":
            outputs["d_weights"] = inputs.d_weights
        if self._d_index_k == "fp32":
            outputs["d_index_k"] = inputs.d_index_k
        operator = _numbered(operators.indexer_backward, inputs, {**outputs, **self._options})
        return {**_with_moved("launch", self.prepare(inputs)), **_with_moved("indexer_backward", operator)}


class Peer(Contender):
    """The peer, as it is by default, with a d_index_k of the same dtype; its d_weights are bf16."""

    name = PEER

    def __init__(self, wrapper: Callable[..., Any]) -> None:
        self._wrapper = wrapper

    def prepare(self, inputs: Inputs) -> Callable[[int], Any]:
        outputs = {"d_index_k": inputs.d_index_k} if inputs.d_index_k.dtype == torch.float32 else {}
        return _numbered(self._wrapper, inputs, outputs)

    def host_calls(self, inputs: Inputs) -> dict[str, Callable[[int], Any]]:
        return _with_moved("indexer_backward", self.prepare(inputs))


def _numbered(function: Callable[..., Any], inputs: Inputs, options: Mapping[str, Any]) -> Callable[[int], Any]:
    """A function that makes call ``number`` of a section, and does as little else as it can: its host time counts."""
    arguments = [inputs.arguments(number) for number in range(inputs.calls)]
    count = len(arguments)

    def call(number: int) -> None:
        function(*arguments[number % count], sm_scale=_SM_SCALE, **options)

    return call


def _with_moved(name: str, call: Callable[[int], Any]) -> dict[str, Callable[[int], Any]]:
    return {name: lambda number: call(0), f"{name}_moved": call}


def find_peer() -> Peer | str:
    """The peer, or in one line why it is left out."""
    if importlib.util.find_spec("cudnn") is None:
        return f"{PEER} is not installed, so it is not measured beside the plans (pip install nvidia-cudnn-frontend)"
    try:
        from cudnn import DSA

        return Peer(DSA.indexer_backward_wrapper)
    except Exception as error:  # whatever an import of somebody else's package raises
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        return f"{PEER} cannot be imported, so it is not measured beside the plans ({reason})"
