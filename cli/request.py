"""From command-line options to plan configs and plans."""

from __future__ import annotations

import logging
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsa_planner import envelope
from dsa_planner.cache.layer import Layer
from dsa_planner.cache.planfile import PlanFile
from dsa_planner.cache.search import SearchPath
from dsa_planner.errors import PlanFileError, PlanNotFoundError, UnsupportedError, shown
from dsa_planner.options import integer, words

__all__ = [
    "Matrix",
    "NotAvailable",
    "Verdict",
    "chosen_plans",
    "content",
    "integer",
    "matrix",
    "only_plan",
    "plan_by_prefix",
    "verdicts",
    "words",
]


@dataclass(frozen=True)
class NotAvailable:
    """A row of the envelope that the request covers by default and gets no plan for, with the reason."""

    backend: str
    arch: str
    reason: str


@dataclass(frozen=True)
class Matrix:
    """The complete configs of a precompile request, and what it covers but does not get."""

    configs: tuple[dict[str, Any], ...]
    not_available: tuple[NotAvailable, ...]


@dataclass(frozen=True)
class Verdict:
    """Whether a request lies in a row of the envelope: its complete config, or why it is refused."""

    backend: str
    arch: str
    config: dict[str, Any] | None
    refusal: UnsupportedError | None


def matrix(
    topk: str, backend: str | None, arch: str | None, d_weights: str | None, heads: int, deterministic: bool
) -> Matrix:
    """The configs that the options of ``precompile`` mean.

    What the user names is built or refused; what only a default covers and cannot be built is listed, never dropped.

    Raises:
        UnsupportedError: a malformed list, a value outside the envelope, or nothing of the request can be built.
    """
    topks = _topks(topk)
    backends, arches = _backends(backend), _arches(arch)
    dtypes = words("--d-weights", d_weights) if d_weights is not None else None
    configs: dict[tuple[Any, ...], dict[str, Any]] = {}
    missing: list[NotAvailable] = []
    refusals: list[tuple[envelope.Support, UnsupportedError]] = []
    for row in (row for name in backends or envelope.backends() for row in envelope.rows_for(name)):
        if arches and row.arch not in arches:
            continue
        try:
            complete = [
                envelope.plan_config(
                    {
                        "backend": row.backend,
                        "arch": row.arch,
                        "heads": heads,
                        "deterministic": deterministic,
                        "topk": value,
                        "d_weights": dtype,
                    }
                )
                for value in topks
                for dtype in dtypes or row.d_weights
            ]
        except UnsupportedError as refusal:
            refusals.append((row, refusal))
            missing.append(NotAvailable(row.backend, row.arch, refusal.rule))
            continue
        if not arches and not row.preferred:
            missing.append(NotAvailable(row.backend, row.arch, f"only with --arch {row.arch}"))
            continue
        for config in complete:
            configs[tuple(config.values())] = config
    _refuse_what_was_named(configs, refusals, arches, backends)
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
        raise _no_such_pair(backends, arches)


def verdicts(given: Mapping[str, Any]) -> list[Verdict]:
    """The verdict of each row of the envelope that a request could mean.

    Args:
        given: the fields that the user named; topk is one of them.

    Raises:
        UnsupportedError: an unknown backend or arch, or a pair that the envelope does not have.
    """
    backends, arches = _backends(given.get("backend")), _arches(given.get("arch"))
    found = []
    for row in (row for name in backends or envelope.backends() for row in envelope.rows_for(name)):
        if arches and row.arch not in arches:
            continue
        try:
            config = envelope.plan_config({**given, "backend": row.backend, "arch": row.arch})
            found.append(Verdict(row.backend, row.arch, config, None))
        except UnsupportedError as refusal:
            found.append(Verdict(row.backend, row.arch, None, refusal))
    if not found:
        raise _no_such_pair(backends, arches)
    return found


def plan_by_prefix(search: SearchPath, prefix: str, build: str | None = None) -> tuple[PlanFile, Layer]:
    """The one plan whose id begins so, in the best build or in the one whose id begins with ``build``.

    Raises:
        UnsupportedError: a beginning of no digit.
        PlanNotFoundError: there is none, or several.
        PlanFileError: there is one, and every file of it is damaged.
    """
    for name, text in (("plan", prefix), ("--build", build)):
        if text == "":
            raise UnsupportedError(
                f"{name} ''", "it needs one digit of an id at least", "give digits that dsa-plan list shows"
            )
    what = f"plan {shown(prefix)}" if build is None else f"plan {shown(prefix)} of build {shown(build)}"
    damaged: dict[Path, str] = {}
    with _warnings_but_of(damaged):
        entries = [entry for layer in search.layers for entry in layer.entries()]
        plans = {entry.plan_id for entry in entries if entry.plan_id.startswith(prefix.lower())}
        builds: set[str | None] = {None}
        if build is not None:
            builds = {e.build_id for e in entries if e.plan_id in plans and e.build_id.startswith(build.lower())}
        for kind, matches in (("plans", plans), ("builds", builds)):
            if len(matches) > 1:
                some = ", ".join(sorted(str(match)[:16] for match in matches)[:8])
                raise PlanNotFoundError(what, f"{len(matches)} {kind} begin so ({some})", "give more digits")
        found = search.find(plans.pop(), builds.pop()) if plans and builds else None
        if found is not None:
            return found
        damaged |= _damaged(search, prefix.lower(), (build or "").lower())
    if damaged:
        raise PlanFileError(
            what,
            " and ".join(f"{path} cannot be used ({reason})" for path, reason in damaged.items()),
            "mend or delete it, and dsa-plan precompile builds the plan again",
        )
    if not search.layers:
        raise PlanNotFoundError(what, "there is no layer to look in", "set DSA_PLAN_PATH or DSA_PLAN_CACHE_DIR")
    raise PlanNotFoundError(what, f"no intact plan in {search.describe()} begins so", "see dsa-plan list")


def _damaged(search: SearchPath, plan: str, build: str) -> dict[Path, str]:
    """Of the plans and builds whose ids begin so: what could not be used, and why."""
    found = {}
    for layer in search.layers:
        for path, reason in layer.damaged.items():
            _, *ids = path.relative_to(layer.root).parts or ("",)  # the layer's own folders are no plan's
            if ids and ids[0].startswith(plan) and ids[-1].startswith(build if len(ids) > 1 else ""):
                found[path] = reason
    return found


def chosen_plans(
    search: SearchPath, prefixes: Sequence[str], topk: str | None, backend: str | None, arch: str | None
) -> list[PlanFile]:
    """The plans whose ids begin so, or all of the layers, that the filters leave; each once, ordered by config.

    Raises:
        PlanNotFoundError: a prefix fits none or several, or nothing is left.
        UnsupportedError: a filter names what there is not.
    """
    wanted = {"topk": _topks(topk) if topk is not None else (), "backend": _backends(backend), "arch": _arches(arch)}
    if prefixes:
        found = [plan_by_prefix(search, prefix)[0] for prefix in prefixes]
    else:
        ids = dict.fromkeys(entry.plan_id for layer in search.layers for entry in layer.entries())
        found = [hit[0] for hit in map(search.find, ids) if hit is not None]
    kept = {p.plan_id: p for p in found if all(not v or p.config.get(name) in v for name, v in wanted.items())}
    if not kept:
        what = " ".join(f"--{name} {','.join(map(str, values))}" for name, values in wanted.items() if values)
        raise PlanNotFoundError(
            f"plans{' of ' + what if what else ''}", f"there are none in {search.describe()}", "see dsa-plan list"
        )
    order = ("backend", "arch", "topk", "d_weights")
    return sorted(kept.values(), key=lambda plan: tuple(plan.config[name] for name in order))


def only_plan(plans: Sequence[PlanFile], option: str) -> PlanFile:
    """The one plan of a list.

    Raises:
        UnsupportedError: there are several.
    """
    if len(plans) != 1:
        raise UnsupportedError(f"{option} with {len(plans)} plans", "it is about one plan", "name a plan")
    return plans[0]


def content(option: str, path: Path, most: int) -> bytes:
    """What a file holds that an option names, of so many bytes at most.

    Raises:
        UnsupportedError: it cannot be read, or is larger.
    """
    try:
        with path.open("rb") as file:
            found = file.read(most + 1)
    except OSError as error:
        raise UnsupportedError(
            f"{option} {path}", f"it cannot be read ({error.strerror})", "name a file that can"
        ) from None
    if len(found) > most:
        raise UnsupportedError(f"{option} {path}", f"it has more than {most:,} bytes", "name a smaller file")
    return found


@contextmanager
def _warnings_but_of(said: Container[Path]) -> Iterator[None]:
    """Keep the layers' warnings back until it is known which of them an error says, and give the others then."""
    held: list[logging.LogRecord] = []

    def hold(record: logging.LogRecord) -> bool:
        held.append(record)
        return False

    log = logging.getLogger("dsa_planner.cache")
    log.addFilter(hold)
    try:
        yield
    finally:
        log.removeFilter(hold)
        for record in held:
            if not (isinstance(record.args, tuple) and record.args[0] in said):
                log.handle(record)


def _no_such_pair(backends: Sequence[str], arches: Sequence[str]) -> UnsupportedError:
    return UnsupportedError(
        f"--backend {','.join(backends) or 'any'} --arch {','.join(arches) or 'any'}",
        "the envelope has no such pair",
        "see dsa-plan explain",
    )


def _backends(text: str | None) -> tuple[str, ...]:
    """The backends that the user named; none for no option."""
    names = words("--backend", text) if text is not None else ()
    for name in names:
        envelope.rows_for(name)
    return names


def _arches(text: str | None) -> tuple[str, ...]:
    """The arches that the user named; none for no option."""
    names = words("--arch", text) if text is not None else ()
    for name in names:
        if name not in envelope.ARCHES:
            raise envelope.refusal("arch", name, "it is not an arch", tuple(envelope.ARCHES))
    return names


def _topks(text: str) -> tuple[int, ...]:
    found = words("--topk", text)
    if found == ("all",):
        return tuple(sorted({value for row in envelope.ENVELOPE for value in row.topk}))
    if "all" in found:
        raise UnsupportedError(
            f"--topk {shown(text)}", "'all' means every topk, so it stands alone", "give --topk all, or numbers only"
        )
    return tuple(integer("--topk", word, 1024) for word in found)
