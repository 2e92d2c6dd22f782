"""The planner: make sure that plans exist. Build side.

For each config: plan id -> layers -> hit, or compile -> check -> publish. Compilations run side by side, each in a
process of its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsa_planner import toolchain
from dsa_planner.cache.index import Index
from dsa_planner.cache.layer import SearchPath, read_only_layers
from dsa_planner.cache.planfile import PlanFile
from dsa_planner.cache.writable import WritableLayer
from dsa_planner.compiler import DEFAULT_TIMEOUT, compile_plan
from dsa_planner.errors import CompileError, DsaPlannerError
from dsa_planner.identity import plan_id_of
from dsa_planner.settings import Settings

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
    note: str = ""


class Planner:
    """Finds plans in the layers that the settings name, and builds the missing ones into the writable layer."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.writable = (
            WritableLayer(settings.cache_dir, settings.cache_bytes) if settings.cache_dir is not None else None
        )
        layers = read_only_layers(settings.read_only)
        self.search = SearchPath([*layers, self.writable] if self.writable is not None else layers)

    def precompile(
        self,
        configs: Iterable[Mapping[str, Any]],
        jobs: int | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        dry_run: bool = False,
        progress: Callable[[Outcome], None] = lambda outcome: None,
    ) -> list[Outcome]:
        """Make sure that the plans of complete configs exist, and say what became of each, in the order given.

        Args:
            configs: complete configs (see ``envelope.plan_config``); repeated ones are served once.
            jobs: compilations at a time; None for the number of processors.
            timeout: seconds for one compilation.
            dry_run: only look.
            progress: called from this thread with each outcome as it comes.

        Raises:
            CompilerMissingError: there is no compiler; nothing was done.
            CacheError: a plan is missing and there is no writable layer.
        """
        todo = list({plan_id_of(config): config for config in configs}.items())
        build_id = toolchain.installed().build_id
        outcomes: dict[str, Outcome] = {}
        missing = []
        for plan_id, config in todo:
            outcome = self._look(config, plan_id, build_id, dry_run)
            if outcome is None:
                missing.append((plan_id, config))
            else:
                outcomes[plan_id] = outcome
                progress(outcome)
        if missing:
            self.settings.require_cache_dir()
            if self.writable is not None:
                self.writable.prepare()
            for outcome in self._build_all(missing, jobs or available_processors(), timeout):
                outcomes[outcome.plan_id] = outcome
                progress(outcome)
        return [outcomes[plan_id] for plan_id, _ in todo]

    def _look(self, config: Mapping[str, Any], plan_id: str, build_id: str, dry_run: bool) -> Outcome | None:
        found = self.search.find(plan_id, build_id)
        if found is not None:
            plan, layer = found
            return Outcome(config, plan_id, "hit", plan, layer.root, len(plan.encode()))
        return Outcome(config, plan_id, "missing") if dry_run else None

    def _build_all(self, missing: list[tuple[str, Mapping[str, Any]]], jobs: int, timeout: float) -> Iterable[Outcome]:
        with ThreadPoolExecutor(max_workers=max(1, min(jobs, len(missing)))) as pool:
            pending: set[Future[Outcome]] = {
                pool.submit(self._build, config, plan_id, timeout) for plan_id, config in missing
            }
            try:
                while pending:
                    done, pending = wait(pending, return_when=FIRST_COMPLETED)
                    for future in done:
                        yield future.result()
            except BaseException:
                for future in pending:
                    future.cancel()
                raise

    def _build(self, config: Mapping[str, Any], plan_id: str, timeout: float) -> Outcome:
        assert self.writable is not None
        index = Index(self.writable.root / "index")
        build_id = toolchain.installed().build_id
        try:
            compiled = compile_plan(config, timeout)
            published = self.writable.publish(compiled.plan)
        except DsaPlannerError as error:
            if isinstance(error, CompileError) and self.writable.root.is_dir():
                index.record_failure(plan_id, build_id, str(error))
            return Outcome(config, plan_id, "failed", error=error)
        size = len(compiled.plan.encode()) if published.entry is None else published.entry.bytes
        index.record_build(plan_id, build_id, compiled.seconds, size)
        for entry in published.evicted:
            index.forget(entry.plan_id, entry.build_id)
        layer = None if published.entry is None else self.writable.root
        return Outcome(
            config, plan_id, "built", compiled.plan, layer, size, compiled.seconds, note=published.note
        )  # fmt: skip


def available_processors() -> int:
    """Processors that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1
