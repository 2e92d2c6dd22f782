"""PlanConfig: what one plan is compiled for. Build side; the run side uses ``envelope.plan_config`` directly."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from dsa_planner import envelope
from dsa_planner.identity import plan_id_of

__all__ = ["PlanConfig"]


class PlanConfig(BaseModel):
    """A validated, immutable plan config.

    Only ``arch`` and ``topk`` have no default. Every field is checked against the support envelope; shapes of a
    launch are not part of it.

    Raises:
        UnsupportedError: an unknown field, or a value outside the envelope; it names the nearest supported one.

    Example:
        >>> PlanConfig(arch="sm_90a", topk=1024).backend
        'default'
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    operator: str = Field(default="indexer_backward", description="the operation")
    backend: str = Field(default="default", description="the implementation of it")
    arch: str = Field(description="compilation target, for example sm_90a")
    heads: int = Field(default=64, description="indexer heads, H")
    head_dim: int = Field(default=128, description="dimensions of a head, D")
    topk: int = Field(description="selected keys of a query")
    d_weights: str = Field(default="bf16", description="dtype of the d_weights output")
    deterministic: bool = Field(default=False, description="d_index_k bitwise reproducible")

    def __init__(self, **request: Any) -> None:
        super().__init__(**envelope.plan_config(request))

    @property
    def plan_id(self) -> str:
        """The plan id, 64 hexadecimal digits.

        Raises:
            UnsupportedError: this version does not build the config's backend and arch yet.
        """
        return plan_id_of(self.model_dump())
