"""The support envelope as data: which plans exist, and which launches a plan takes.

One table, ``ENVELOPE``, read by all: PlanConfig, the CLI, the run side and the documentation
(docs/support-envelope.md is generated from it). A request is checked once, here, and is served exactly or refused;
nothing is rounded, converted or replaced. A refusal names the value, the rule and the nearest supported choice.

Standard library only: the run side checks against the same table without pydantic.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from dsa_planner.errors import UnsupportedError, shown

__all__ = [
    "ARCHES",
    "DEFAULTS",
    "ENVELOPE",
    "PLAN_FIELDS",
    "Arch",
    "Support",
    "arches",
    "backends",
    "check_scalars",
    "plan_config",
    "refusal",
    "rows_for",
    "rows_for_capability",
    "support_of",
]

MAX_EXTENT = 2**30
"""Bound of batch, S_q, S_k, batch * S_q * heads and batch * S_k: kernels count in 32 bits, with room to step over."""
FLOAT32_MIN, FLOAT32_MAX = 2.0**-126, (2 - 2.0**-23) * 2.0**127


@dataclass(frozen=True)
class Arch:
    """A compilation target and the devices that run it, as (major, minor) compute capabilities."""

    name: str
    capabilities: tuple[tuple[int, int], ...]
    sm: int
    suffix: str
    """"a" for an exact target, "f" for a family target."""


ARCHES = {
    arch.name: arch
    for arch in (
        Arch("sm_90a", ((9, 0),), 90, "a"),
        Arch("sm_100f", ((10, 0), (10, 3)), 100, "f"),
        Arch("sm_100a", ((10, 0),), 100, "a"),
    )
}


@dataclass(frozen=True)
class Support:
    """One row of the envelope: what one backend takes on one arch.

    ``kernel`` names the entry of ``dsa_planner.kernels``. ``preferred`` rows are what a request without an arch means;
    the others are built only when named.
    """

    backend: str
    arch: str
    kernel: str
    heads: tuple[int, ...]
    d_weights: tuple[str, ...]
    deterministic: tuple[bool, ...] = (False,)
    operator: str = "indexer_backward"
    head_dim: tuple[int, ...] = (128,)
    topk: range = field(default_factory=lambda: range(128, 2048 + 1, 128))
    d_index_q: tuple[str, ...] = ("bf16",)
    d_index_k: tuple[str, ...] = ("bf16", "fp32")
    block_I: tuple[int, ...] = (128,)
    preferred: bool = True

    @property
    def capabilities(self) -> tuple[tuple[int, int], ...]:
        return ARCHES[self.arch].capabilities


_BOTH = ("bf16", "fp32")
_EITHER = (False, True)
_SM90 = "indexer_backward_sm90"
_SM100 = "indexer_backward_sm100"

ENVELOPE: tuple[Support, ...] = (
    Support("default", "sm_90a", _SM90, heads=(64, 32), d_weights=("bf16",)),
    Support("default", "sm_100f", _SM100, heads=(64, 32), d_weights=("bf16",)),
    Support("default", "sm_100a", _SM100, heads=(64, 32), d_weights=("bf16",), preferred=False),
    Support("sm100_v2", "sm_100f", _SM100, heads=(64,), d_weights=_BOTH, deterministic=_EITHER),
    Support("sm100_v2", "sm_100a", _SM100, heads=(64,), d_weights=_BOTH, deterministic=_EITHER, preferred=False),
    Support("sm90_v2", "sm_90a", _SM90, heads=(64,), d_weights=_BOTH, deterministic=_EITHER),
)

PLAN_FIELDS = ("operator", "backend", "arch", "heads", "head_dim", "topk", "d_weights", "deterministic")
DEFAULTS: Mapping[str, Any] = {
    "operator": "indexer_backward",
    "backend": "default",
    "heads": 64,
    "head_dim": 128,
    "d_weights": "bf16",
    "deterministic": False,
}


def backends() -> tuple[str, ...]:
    """The backends that the envelope names, in table order."""
    return tuple(dict.fromkeys(row.backend for row in ENVELOPE))


def arches(backend: str, every: bool = False) -> tuple[str, ...]:
    """The arches of a backend: the preferred ones, or ``every`` one."""
    return tuple(row.arch for row in ENVELOPE if row.backend == backend and (every or row.preferred))


def rows_for(backend: str) -> tuple[Support, ...]:
    """The rows of a backend.

    Raises:
        UnsupportedError: the envelope names no such backend.
    """
    if type(backend) is not str or backend not in backends():
        raise refusal("backend", backend, "it is not a backend", backends())
    return tuple(row for row in ENVELOPE if row.backend == backend)


def rows_for_capability(backend: str, capability: tuple[int, int]) -> tuple[Support, ...]:
    """The rows of a backend that a device of this compute capability can run; may be empty."""
    return tuple(row for row in rows_for(backend) if capability in row.capabilities)


def plan_config(request: Mapping[str, Any]) -> dict[str, Any]:
    """The complete plan config that a request means: defaults filled in, every field checked, in field order.

    Raises:
        UnsupportedError: no mapping of fields, an unknown field, or a value outside the envelope.
    """
    try:
        given = dict(request)
    except (TypeError, ValueError):
        raise UnsupportedError(
            f"plan config {shown(request)}",
            "it is no mapping of config fields",
            'give for example {"arch": "sm_90a", "topk": 1024}',
        ) from None
    for name in given:
        if name not in PLAN_FIELDS:
            raise refusal("field", name, "a plan config has no such field", PLAN_FIELDS)
    config = {**DEFAULTS, **given}
    for name in ("arch", "topk"):
        if name not in config:
            raise UnsupportedError(f"plan config without {name}", f"{name} has no default", f"give {name}")
    _check_types(config)
    row = support_of(config)
    for name in ("heads", "head_dim", "topk", "d_weights", "deterministic"):
        _check_value(name, config[name], getattr(row, name), row)
    return {name: config[name] for name in PLAN_FIELDS}


def support_of(config: Mapping[str, Any]) -> Support:
    """The row for a config's operator, backend and arch.

    Raises:
        UnsupportedError: there is none.
    """
    operators = tuple(dict.fromkeys(row.operator for row in ENVELOPE))
    if config["operator"] not in operators:
        raise refusal("operator", config["operator"], "it is not an operator", operators)
    rows = rows_for(config["backend"])
    if config["arch"] not in ARCHES:
        raise refusal("arch", config["arch"], "it is not an arch", tuple(ARCHES))
    for row in rows:
        if row.arch == config["arch"]:
            return row
    raise refusal(
        "arch",
        config["arch"],
        f"backend {config['backend']} is not built for it",
        arches(config["backend"], every=True),
    )


def check_scalars(row: Support, sm_scale: float, loss_coeff: float, block_I: int, topk_indices_global: bool) -> None:
    """Check the scalar arguments of a launch. The kernels take them in fp32, so they must be there what they are here.

    Raises:
        UnsupportedError: sm_scale is not a positive fp32 number, loss_coeff not an fp32 number, either of them would
            become subnormal, infinite or zero in fp32, block_I is not supported, or topk_indices_global is no bool.
    """
    if (
        type(sm_scale) is type(loss_coeff) is float
        and FLOAT32_MIN <= sm_scale <= FLOAT32_MAX
        and (FLOAT32_MIN <= loss_coeff <= FLOAT32_MAX or -FLOAT32_MAX <= loss_coeff <= -FLOAT32_MIN)
        and type(block_I) is int
        and block_I in row.block_I
        and type(topk_indices_global) is bool
    ):
        return
    for name, value in (("sm_scale", sm_scale), ("loss_coeff", loss_coeff)):
        if type(value) not in (float, int):
            raise UnsupportedError(f"{name}={shown(value)}", f"{name} must be a Python number", f"pass float({name})")
    limits = f"{FLOAT32_MIN:.4g} and {FLOAT32_MAX:.4g}"
    if not FLOAT32_MIN <= sm_scale <= FLOAT32_MAX:
        raise UnsupportedError(
            f"sm_scale={shown(sm_scale)}", f"sm_scale must be positive, between {limits}", "use for example 1.0"
        )
    if loss_coeff != 0 and not FLOAT32_MIN <= abs(loss_coeff) <= FLOAT32_MAX:
        raise UnsupportedError(
            f"loss_coeff={shown(loss_coeff)}",
            f"loss_coeff must be 0, or of a size between {limits}",
            "use for example 1.0",
        )
    if type(block_I) is not int or block_I not in row.block_I:
        raise refusal(
            "block_I",
            block_I,
            f"backend {row.backend} for {row.arch} takes block_I {describe(row.block_I)}",
            row.block_I,
        )
    if type(topk_indices_global) is not bool:
        raise UnsupportedError(
            f"topk_indices_global={shown(topk_indices_global)}",
            "it must be True or False",
            "pass bool(topk_indices_global)",
        )


def describe(allowed: Iterable[Any]) -> str:
    """A set of allowed values in words."""
    if isinstance(allowed, range):
        return f"a multiple of {allowed.step} from {allowed.start} to {allowed[-1]}"
    values = [str(value).lower() if isinstance(value, bool) else str(value) for value in allowed]
    return values[0] if len(values) == 1 else ", ".join(values[:-1]) + " or " + values[-1]


def nearest(value: Any, allowed: Iterable[Any]) -> Any:
    """The allowed value closest to ``value``: by distance for numbers, by spelling for strings."""
    choices = list(allowed)
    if isinstance(value, (int, float)) and not isinstance(value, bool) and all(type(c) is int for c in choices):
        return min(choices, key=lambda choice: (abs(choice - value), -choice))
    return next(
        iter(
            difflib.get_close_matches(
                value if isinstance(value, str) else shown(value), [str(c) for c in choices], 1, 0.0
            )
        ),
        choices[0],
    )


def _check_types(config: Mapping[str, Any]) -> None:
    for name, value in config.items():
        expected = (
            int if name in ("heads", "head_dim", "topk") else bool if name == "deterministic" else str
        )  # fmt: skip
        if type(value) is not expected:
            kind = {int: "an integer", bool: "true or false", str: "a string"}[expected]
            raise UnsupportedError(f"{name}={shown(value)}", f"{name} must be {kind}", f"give {name} as {kind}")


def _check_value(name: str, value: Any, allowed: Any, row: Support) -> None:
    if value not in allowed:
        raise refusal(name, value, f"backend {row.backend} for {row.arch} takes {name} {describe(allowed)}", allowed)


def refusal(name: str, value: Any, rule: str, allowed: Iterable[Any]) -> UnsupportedError:
    """The error for a value outside a set of allowed ones, naming the nearest."""
    choices = tuple(allowed)
    best = nearest(value, choices)
    others = "" if isinstance(allowed, range) or len(choices) < 2 else f" (there are {describe(choices)})"
    asked = f"field {shown(value)}" if name == "field" else f"{name}={shown(value)}"
    return UnsupportedError(asked, rule, f"nearest is {describe([best])}{others}")


def table() -> list[dict[str, str]]:
    """The envelope as rows of text, for the CLI and the documentation."""
    rows = []
    for row in ENVELOPE:
        cells = {"operator": row.operator, "backend": row.backend, "arch": row.arch}
        cells["capability"] = ", ".join(f"{major}.{minor}" for major, minor in row.capabilities)
        for item in fields(row):
            if item.name in (
                "heads",
                "head_dim",
                "topk",
                "d_index_q",
                "d_weights",
                "d_index_k",
                "deterministic",
                "block_I",
            ):
                cells[item.name] = describe(getattr(row, item.name))
        rows.append(cells)
    return rows
