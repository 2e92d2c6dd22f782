from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from small_plans import elf_header, files, kernel_entry

from dsa_planner import (
    CacheError,
    CompileError,
    CompilerMissingError,
    PlanConfig,
    Planner,
    UnsupportedError,
    envelope,
    planner,
    toolchain,
)
from dsa_planner.cache.index import Index
from dsa_planner.cache.planfile import PlanFile
from dsa_planner.compiler import Compiled
from dsa_planner.identity import identity_of, plan_id_of
from dsa_planner.settings import Settings

BIG = 1 << 30


def config(topk: int) -> dict[str, Any]:
    return envelope.plan_config({"arch": "sm_90a", "topk": topk})


def settings(tmp_path: Path, *read_only: Path, limit: int = BIG) -> Settings:
    return Settings(read_only, tmp_path / "layer", limit)


class StandIn:
    """A compiler that takes no time, or as long as a test wants, and remembers what it was asked."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.asked: list[int] = []
        self.running = self.most_running = 0
        self.failures: set[int] = set()
        self.faults: set[int] = set()
        self._lock = threading.Lock()

    def __call__(self, config: Mapping[str, Any], timeout: float, stop: threading.Event) -> Compiled:
        with self._lock:
            self.asked.append(config["topk"])
            self.running += 1
            self.most_running = max(self.most_running, self.running)
        time.sleep(self.seconds)
        with self._lock:
            self.running -= 1
        if config["topk"] in self.failures:
            raise CompileError(f"plan topk={config['topk']}", "it broke", "mend it")
        if config["topk"] in self.faults:
            raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")
        tools = toolchain.installed()
        build = {"id": tools.build_id, "packages": tools.packages}
        cubin = elf_header() + f"cubin of {config['topk']:4}".encode()
        identity = identity_of(config)
        kernels = [kernel_entry(kernel["name"]) for kernel in identity["launch"]["kernels"]]
        return Compiled(PlanFile.build(identity, build, kernels, {"cubin": cubin}), 1.5)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    stand_in = StandIn()
    monkeypatch.setattr(planner, "compile_plan", stand_in)
    monkeypatch.setattr(toolchain, "verify", lambda: None)
    return stand_in


def test_missing_plans_are_built_and_then_found(tmp_path: Path, stand_in: StandIn) -> None:
    configs = [config(topk) for topk in (128, 256, 384)]
    first = Planner(settings(tmp_path)).precompile(configs)
    assert [(o.status, o.plan_id, o.seconds) for o in first] == [("built", plan_id_of(c), 1.5) for c in configs]
    assert {o.layer for o in first} == {tmp_path / "layer"}
    again = Planner(settings(tmp_path)).precompile(configs)
    assert [(o.status, o.bytes) for o in again] == [("hit", o.bytes) for o in first]
    assert sorted(stand_in.asked) == [128, 256, 384]


def test_outcomes_come_in_the_order_asked_and_repeated_configs_once(tmp_path: Path, stand_in: StandIn) -> None:
    found = Planner(settings(tmp_path)).precompile([config(384), config(128), config(384)])
    assert [o.config["topk"] for o in found] == [384, 128]
    assert len(stand_in.asked) == 2


def test_a_read_only_layer_serves_without_touching_the_writable_one(tmp_path: Path, stand_in: StandIn) -> None:
    image = tmp_path / "image"
    Planner(Settings((), image, BIG)).precompile([config(128)])
    found = Planner(settings(tmp_path, image)).precompile([config(128)])
    assert (found[0].status, found[0].layer) == ("hit", image)
    assert not (tmp_path / "layer").exists()
    Planner(settings(tmp_path, image)).precompile([config(128), config(256)])
    assert len(files(tmp_path / "layer")) == 1, "only what the image lacks is built"


def test_another_compilers_build_is_not_used_and_not_replaced(
    tmp_path: Path, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    Planner(settings(tmp_path)).precompile([config(128)])
    other = toolchain.Toolchain("e" * 64, {"nvidia-cutlass-dsl": "9.9.9"}, {})
    monkeypatch.setattr(toolchain, "installed", lambda: other)
    assert Planner(settings(tmp_path)).precompile([config(128)])[0].status == "built"
    assert len(files(tmp_path / "layer")) == 2


def test_a_damaged_plan_is_built_again(tmp_path: Path, stand_in: StandIn) -> None:
    (built,) = Planner(settings(tmp_path)).precompile([config(128)])
    assert built.plan is not None
    path = next((tmp_path / "layer").rglob("*.dsaplan"))
    path.write_bytes(path.read_bytes()[:-1])
    assert Planner(settings(tmp_path)).precompile([config(128)])[0].status == "built"
    assert path.read_bytes() == built.plan.encode()


def test_a_dry_run_only_looks(tmp_path: Path, stand_in: StandIn) -> None:
    found = Planner(settings(tmp_path)).precompile([config(128)], dry_run=True)
    assert found[0].status == "missing"
    assert stand_in.asked == []
    assert not (tmp_path / "layer").exists()
    Planner(settings(tmp_path)).precompile([config(128), config(256)], jobs=1)
    damaged, good = sorted((tmp_path / "layer").rglob("*.dsaplan"), key=lambda path: path.stat().st_mtime_ns)
    damaged.write_bytes(damaged.read_bytes()[:-1])
    for path in (damaged, good):
        os.utime(path, (1, 1))
    before = {path: (path.read_bytes(), path.stat().st_mtime) for path in (damaged, good)}
    again = Planner(settings(tmp_path)).precompile([config(128), config(256)], dry_run=True)
    assert [outcome.status for outcome in again] == ["missing", "hit"]
    assert {path: (path.read_bytes(), path.stat().st_mtime) for path in before} == before


def test_one_failure_does_not_stop_the_others_and_is_remembered(tmp_path: Path, stand_in: StandIn) -> None:
    stand_in.failures = {256}
    found = Planner(settings(tmp_path)).precompile([config(128), config(256), config(384)])
    assert [o.status for o in found] == ["built", "failed", "built"]
    assert str(found[1].error) == "plan topk=256: it broke; mend it"
    index = Index(tmp_path / "layer" / "index")
    build_id = toolchain.installed().build_id
    assert index.failure(found[1].plan_id) == "plan topk=256: it broke; mend it"
    assert index.build(found[0].plan_id, build_id) == {"seconds": 1.5, "bytes": found[0].bytes}
    stand_in.failures = set()
    Planner(settings(tmp_path)).precompile([config(256)])
    assert index.failure(found[1].plan_id) is None


@pytest.mark.parametrize("jobs", [1, 2, 4])
def test_jobs_bound_the_compilations_at_a_time(tmp_path: Path, stand_in: StandIn, jobs: int) -> None:
    stand_in.seconds = 0.05
    Planner(settings(tmp_path)).precompile([config(128 * n) for n in range(1, 9)], jobs=jobs)
    assert stand_in.most_running == jobs


def test_progress_is_told_of_each_outcome(tmp_path: Path, stand_in: StandIn) -> None:
    Planner(settings(tmp_path)).precompile([config(128)])
    told: list[tuple[int, str]] = []
    Planner(settings(tmp_path)).precompile(
        [config(128), config(256)], progress=lambda o: told.append((o.config["topk"], o.status))
    )
    assert told == [(128, "hit"), (256, "built")]


def test_the_limit_evicts_the_oldest_and_forgets_it(tmp_path: Path, stand_in: StandIn) -> None:
    size = Planner(settings(tmp_path)).precompile([config(128)])[0].bytes
    found = Planner(settings(tmp_path, limit=size + 100)).precompile([config(256)])
    assert found[0].status == "built"
    assert len(files(tmp_path / "layer")) == 1
    assert Index(tmp_path / "layer" / "index").build(plan_id_of(config(128)), toolchain.installed().build_id) is None


def test_plans_of_one_request_are_never_evicted_for_each_other(tmp_path: Path, stand_in: StandIn) -> None:
    size = Planner(settings(tmp_path)).precompile([config(128)])[0].bytes
    found = Planner(settings(tmp_path, limit=2 * size + 100)).precompile([config(n) for n in (128, 256, 384)], jobs=1)
    assert [o.status for o in found] == ["hit", "built", "failed"]
    assert isinstance(found[2].error, CacheError)
    assert "it does not fit into the layer's limit" in str(found[2].error)
    again = Planner(settings(tmp_path)).precompile([config(n) for n in (128, 256)])
    assert [o.status for o in again] == ["hit", "hit"]


def test_a_fault_that_nobody_foresaw_costs_one_plan(tmp_path: Path, stand_in: StandIn) -> None:
    stand_in.faults = {128}
    found = Planner(settings(tmp_path)).precompile([config(128), config(256)], jobs=1)
    assert [o.status for o in found] == ["failed", "built"]
    assert "an unforeseen fault, UnicodeDecodeError: " in str(found[0].error)


def test_a_config_is_checked_and_completed(tmp_path: Path, stand_in: StandIn) -> None:
    made = Planner(settings(tmp_path)).precompile(
        [{"arch": "sm_90a", "topk": 128}, PlanConfig(arch="sm_90a", topk=128)]
    )
    assert [o.config for o in made] == [config(128)]
    for bad in ({**config(128), "topk": 1000}, {**config(128), "deterministic": 0}, {"arch": "sm_90a"}):
        with pytest.raises(UnsupportedError):
            Planner(settings(tmp_path)).precompile([config(256), bad])
    assert stand_in.asked == [128]


def test_a_config_that_is_no_mapping_is_refused_by_name(tmp_path: Path, stand_in: StandIn) -> None:
    for configs, value in ((["sm_90a"], "'sm_90a'"), ([7], "7"), (config(128), "'operator'")):
        with pytest.raises(UnsupportedError, match=f"^plan config {value}: it is no mapping of config fields; "):
            Planner(settings(tmp_path)).precompile(configs)  # type: ignore[arg-type]
    assert stand_in.asked == []


def test_a_compiler_that_was_changed_is_an_error_before_anything_is_built(
    tmp_path: Path, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    def changed() -> None:
        raise CompileError("compiler file x", "it is not the one that was installed", "install it")

    Planner(settings(tmp_path)).precompile([config(128)])
    monkeypatch.setattr(toolchain, "verify", changed)
    assert Planner(settings(tmp_path)).precompile([config(128)])[0].status == "hit"
    with pytest.raises(CompileError, match="not the one that was installed"):
        Planner(settings(tmp_path)).precompile([config(256)])
    assert stand_in.asked == [128]


def test_no_writable_layer_is_an_error_only_when_a_plan_is_missing(tmp_path: Path, stand_in: StandIn) -> None:
    image = tmp_path / "image"
    Planner(Settings((), image, BIG)).precompile([config(128)])
    assert Planner(Settings((image,), None, BIG)).precompile([config(128)])[0].status == "hit"
    with pytest.raises(CacheError, match="no writable layer"):
        Planner(Settings((image,), None, BIG)).precompile([config(256)])


def test_a_layer_that_cannot_be_written_is_an_error_before_anything_is_compiled(
    tmp_path: Path, stand_in: StandIn
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CacheError, match=r"cannot write .*/file.*: .*; set DSA_PLAN_CACHE_DIR"):
        Planner(Settings((), tmp_path / "file", BIG)).precompile([config(128)])
    assert stand_in.asked == []


def test_no_compiler_is_an_error_before_anything_is_done(
    tmp_path: Path, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> toolchain.Toolchain:
        raise CompilerMissingError("package x", "it is not installed", "install it")

    monkeypatch.setattr(toolchain, "installed", missing)
    with pytest.raises(CompilerMissingError):
        Planner(settings(tmp_path)).precompile([config(128)])
    assert not (tmp_path / "layer").exists()


def test_an_interruption_drops_what_has_not_begun_and_stops_what_runs(
    tmp_path: Path, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    stops: list[bool] = []

    def build(config: Mapping[str, Any], timeout: float, stop: threading.Event) -> Compiled:
        if config["topk"] > 128:
            stops.append(stop.wait(30))
        return stand_in(config, timeout, stop)

    def interrupt(outcome: planner.Outcome) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(planner, "compile_plan", build)
    with pytest.raises(KeyboardInterrupt):
        Planner(settings(tmp_path)).precompile([config(128 * n) for n in range(1, 13)], jobs=2, progress=interrupt)
    assert set(stops) == {True}
    assert len(stops) <= 3
    assert all(path.endswith(".dsaplan") for path in files(tmp_path / "layer"))
