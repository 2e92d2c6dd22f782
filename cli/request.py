"""From command-line options to plan configs and plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dsa_planner import envelope
from dsa_planner.cache.layer import Layer, SearchPath
from dsa_planner.cache.planfile import PlanFile
from dsa_planner.errors import PlanNotFoundError, UnsupportedError

__all__ = ["Matrix", "NotAvailable", "matrix", "plan_by_prefix", "verdicts"]


@dataclass(frozen=True)
class NotAvailable:
    """A combination that the request covers by default and that cannot be built, with the reason."""

    backend: str
    arch: str
    reason: str


@dataclass(frozen=True)
class Matrix:
    """The complete configs of a precompile request, and what it covers but cannot have."""

    configs: tuple[dict[str, Any], ...]
    not_available: tuple[NotAvailable, ...]


def matrix(
    topk: str, backend: str | None, arch: str | None, d_weights: str | None, heads: int, deterministic: bool
) -> Matrix:
    """The configs that the options of ``precompile`` mean.

    What the user names is built or refused; what only a default covers and cannot be built is listed, never dropped.

    Raises:
        UnsupportedError: a malformed list, a value outside the envelope, or nothing of the request can be built.
    """
    topks = _topks(topk)
    backends = _words("--backend", backend) if backend is not None else envelope.backends()
    named_arches = _words("--arch", arch) if arch is not None else None
    dtypes = _words("--d-weights", d_weights) if d_weights is not None else None
    for name in named_arches or ():
        if name not in envelope.ARCHES:
            raise envelope.refusal("arch", name, "it is not an arch", tuple(envelope.ARCHES))
    configs: dict[tuple[Any, ...], dict[str, Any]] = {}
    missing: list[NotAvailable] = []
    refusals: list[tuple[envelope.Support, UnsupportedError]] = []
    for row in (row for name in backends for row in envelope.rows_for(name)):
        if row.arch not in (named_arches or envelope.arches(row.backend)):
            continue
        request = {"backend": row.backend, "arch": row.arch, "heads": heads, "deterministic": deterministic}
        try:
            complete = [
                envelope.plan_config({**request, "topk": value, "d_weights": dtype})
                for value in topks
                for dtype in dtypes or row.d_weights
            ]
            envelope.require_built(row)
        except UnsupportedError as refusal:
            refusals.append((row, refusal))
            missing.append(NotAvailable(row.backend, row.arch, refusal.rule if row.kernel else "not built yet"))
            continue
        for config in complete:
            configs[tuple(config.values())] = config
    _refuse_what_was_named(configs, refusals, named_arches or (), backends if backend is not None else ())
    return Matrix(tuple(configs.values()), tuple(missing))


def _refuse_what_was_named(
    configs: Mapping[Any, Mapping[str, Any]],
    refusals: Sequence[tuple[envelope.Support, UnsupportedError]],
    arches: Sequence[str],
    backends: Sequence[str],
) -> None:
    """Raise if an arch or a backend that the user named would get no plan at all, or nothing would."""
    unserved_arches = set(arches) - {config["arch"] for config in configs.values()}
    unserved_backends = set(backends) - {config["backend"] for config in configs.values()}
    for row, refusal in refusals:
        if not configs or row.arch in unserved_arches or row.backend in unserved_backends:
            raise refusal
    if unserved_arches or unserved_backends:
        raise UnsupportedError(
            f"--backend {','.join(backends) or 'any'} --arch {','.join(arches) or 'any'}",
            "the envelope has no such pair",
            "see dsa-plan explain",
        )


def verdicts(given: Mapping[str, Any]) -> list[tuple[dict[str, Any] | None, UnsupportedError | None]]:
    """For each row of the envelope that a request could mean: its complete config, or why it is refused.

    Args:
        given: the fields that the user named; topk may be missing, then the smallest one stands for it.
    """
    backends = _words("--backend", given["backend"]) if "backend" in given else envelope.backends()
    for name in _words("--arch", given["arch"]) if "arch" in given else ():
        if name not in envelope.ARCHES:
            raise envelope.refusal("arch", name, "it is not an arch", tuple(envelope.ARCHES))
    found: list[tuple[dict[str, Any] | None, UnsupportedError | None]] = []
    for backend in backends:
        arches = _words("--arch", given["arch"]) if "arch" in given else envelope.arches(backend)
        for arch in arches:
            request = {"topk": 128, **given, "backend": backend, "arch": arch}
            try:
                config = envelope.plan_config(request)
                envelope.require_built(envelope.support_of(config))
                found.append((config, None))
            except UnsupportedError as refusal:
                found.append((None, refusal))
    return found


def plan_by_prefix(search: SearchPath, prefix: str) -> tuple[PlanFile, Layer]:
    """The one plan whose id begins so.

    Raises:
        PlanNotFoundError: there is none, or several.
    """
    matches = {
        entry.plan_id
        for layer in search.layers
        for entry in layer.entries()
        if entry.plan_id.startswith(prefix.lower())
    }
    if len(matches) > 1:
        shown = ", ".join(sorted(match[:16] for match in matches)[:8])
        raise PlanNotFoundError(f"plan {prefix}", f"{len(matches)} plans begin so ({shown})", "give more digits")
    found = search.find(matches.pop()) if matches else None
    if found is None:
        raise PlanNotFoundError(
            f"plan {prefix}", f"no intact plan in {search.describe()} begins so", "see dsa-plan list"
        )
    return found


def _words(option: str, text: str) -> tuple[str, ...]:
    words = tuple(dict.fromkeys(word.strip() for word in text.split(",")))
    if not all(words):
        raise UnsupportedError(
            f"{option} {text!r}", "it is a list separated by commas, without empty entries", "remove the comma"
        )
    return words


def _topks(text: str) -> tuple[int, ...]:
    every = sorted({value for row in envelope.ENVELOPE for value in row.topk})
    if text == "all":
        return tuple(every)
    values = []
    for word in _words("--topk", text):
        if not (word.isascii() and word.isdigit()):
            raise UnsupportedError(
                f"--topk {text!r}",
                f"{word!r} is not a number",
                "give numbers separated by commas, for example 128,1024,2048",
            )
        values.append(int(word))
    return tuple(values)
