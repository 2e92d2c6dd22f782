"""The planner: make sure that plans exist. Build side.

For each config: plan id -> layers -> hit, or wait for whoever compiles it, or compile -> check -> publish. Compilations
run side by side, each in a process of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsa_planner import envelope, toolchain
from dsa_planner.cache.layer import Layer
from dsa_planner.cache.planfile import PlanFile
from dsa_planner.cache.search import SearchPath
from dsa_planner.cache.writable import WritableLayer
from dsa_planner.compiler import DEFAULT_TIMEOUT, compile_plan
from dsa_planner.errors import CompileError, DsaPlannerError
from dsa_planner.identity import plan_id_of
from dsa_planner.settings import Settings
from dsa_planner.threads import available_processors, worker_threads

__all__ = ["Outcome", "Planner"]


@dataclass(frozen=True)
class Outcome:
    """What became of one config.

    ``status`` is "hit", "built", "failed", or, for a dry run, "missing". ``layer`` is the folder that holds the plan,
    or None where it is in none; ``seconds`` is the time to compile, 0 for a hit.
    """

    config: Mapping[str, Any]
    plan_id: str
    status: str
    plan: PlanFile | None = None
    layer: Path | None = None
    bytes: int = 0
    seconds: float = 0.0
    error: DsaPlannerError | None = None


class Planner:
    """Finds plans in the layers that the settings name, and builds the missing ones into the writable layer."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.writable: WritableLayer | None = None
        if settings.cache_dir is not None:
            self.writable = WritableLayer(settings.cache_dir, settings.cache_bytes, settings.policy)

    def precompile(
        self,
        configs: Iterable[Mapping[str, Any]],
        jobs: int | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        dry_run: bool = False,
        progress: Callable[[Outcome], None] = lambda outcome: None,
    ) -> list[Outcome]:
        """Make sure that the plans of some configs exist, and say what became of each, in the order given.

        No plan of the request is evicted for another one of it.

        Args:
            configs: mappings of config fields, or ``PlanConfig``; repeated ones are served once.
            jobs: compilations at a time; None for the number of processors.
            timeout: seconds for one compilation, and for waiting for another process that compiles the same plan; after
                that it is compiled here too.
            dry_run: only look; nothing is changed, not even the record of use.
            progress: called from this thread with each outcome as it comes.

        Raises:
            UnsupportedError: a config lies outside the envelope; nothing was done.
            CompilerMissingError: there is no compiler; nothing was done.
            CompileError: the compiler is not the one that was installed, or the settings refuse its builds; nothing was
            built.
            CacheError: a plan is missing and the writable layer is too, or cannot be written.
        """
        complete = (envelope.plan_config(config) for config in configs)
        todo = {plan_id_of(config): config for config in complete}
        build_id = toolchain.installed().build_id
        search = self._layers(look_only=dry_run)
        outcomes: dict[str, Outcome] = {}
        for plan_id, config in todo.items():
            found = search.find(plan_id, build_id)
            if found is not None:
                plan, layer = found
                outcomes[plan_id] = Outcome(config, plan_id, "hit", plan, layer.root, len(plan.encode()))
            elif dry_run:
                outcomes[plan_id] = Outcome(config, plan_id, "missing")
            else:
                continue
            progress(outcomes[plan_id])
        missing = [(plan_id, config) for plan_id, config in todo.items() if plan_id not in outcomes]
        if missing:
            self._require_welcome_compiler(build_id)
            toolchain.verify()
            self.settings.require_cache_dir()
            assert self.writable is not None
            self.writable.prepare()
            keep = frozenset(self.writable.path_of(plan_id, build_id) for plan_id in todo)

            def built(outcome: Outcome) -> None:
                outcomes[outcome.plan_id] = outcome
                progress(outcome)

            self._build_all(missing, jobs or available_processors(), timeout, keep, built)
        return [outcomes[plan_id] for plan_id in todo]

    def _layers(self, look_only: bool) -> SearchPath:
        """The layers; if they are only looked at, every one is read-only."""
        writable: Layer | None = self.writable
        if look_only and writable is not None:
            writable = Layer(writable.root, writable.policy) if writable.root.is_dir() else None
        return SearchPath(self.settings.read_only, writable, self.settings.policy)

    def _require_welcome_compiler(self, build_id: str) -> None:
        if self.settings.policy.refuses(build_id):
            raise CompileError(
                f"compiler build {build_id[:16]}",
                "DSA_PLAN_REFUSED_BUILDS refuses it, so its plans would not be used",
                f"install another version of {toolchain.PACKAGE}",
            )

    def _build_all(
        self,
        missing: Sequence[tuple[str, Mapping[str, Any]]],
        jobs: int,
        timeout: float,
        keep: frozenset[Path],
        built: Callable[[Outcome], None],
    ) -> None:
        stop = threading.Event()  # ends the compilations that run
        with worker_threads(max(1, min(jobs, len(missing))), on_abort=stop.set) as pool:
            pending: set[Future[Outcome]] = {
                pool.submit(self._build, config, plan_id, timeout, stop, keep) for plan_id, config in missing
            }
            while pending:
                done, pending = wait(pending, return_when=FIRST_COMPLETED)
                for future in done:
                    built(future.result())

    def _build(
        self, config: Mapping[str, Any], plan_id: str, timeout: float, stop: threading.Event, keep: frozenset[Path]
    ) -> Outcome:
        assert self.writable is not None
        build_id = toolchain.installed().build_id
        try:
            with self.writable.only_builder(plan_id, build_id, timeout, stop.is_set):
                plan = self.writable.read(plan_id, build_id)
                if plan is not None:  # another process was faster
                    return Outcome(config, plan_id, "hit", plan, self.writable.root, len(plan.encode()))
                compiled = compile_plan(config, timeout, stop)
                published = self.writable.publish(compiled.plan, keep, compiled.seconds)
        except Exception as fault:  # one plan's trouble must not lose what became of the others
            error = fault if isinstance(fault, DsaPlannerError) else _unforeseen(config, fault)
            if isinstance(error, CompileError) and not stop.is_set():
                self.writable.index.record_failure(plan_id, build_id, str(error))
            return Outcome(config, plan_id, "failed", error=error)
        return Outcome(
            config, plan_id, "built", compiled.plan, self.writable.root, published.entry.bytes, compiled.seconds
        )


def _unforeseen(config: Mapping[str, Any], fault: Exception) -> CompileError:
    label = f"plan {config['backend']} {config['arch']} topk={config['topk']}"
    return CompileError(label, f"an unforeseen fault, {type(fault).__name__}: {fault}", "report it")
