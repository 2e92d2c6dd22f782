from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from small_plans import files, small_plan

from dsa_planner import planner
from dsa_planner.cache import locks
from dsa_planner.cache.writable import WritableLayer
from dsa_planner.compiler import Compiled
from dsa_planner.settings import Settings

BIG = 1 << 30
PLAN = small_plan()
IDS = (PLAN.plan_id, PLAN.build_id)


def build_once(root: str, marks: str, start: Any) -> None:
    """As the planner does it: take the lock, look, compile, publish."""
    layer = WritableLayer(Path(root), BIG)
    layer.prepare()
    start.wait()
    with layer.only_builder(*IDS, seconds=30) as alone:
        assert alone
        if layer.read(*IDS) is None:
            (Path(marks) / str(os.getpid())).touch()
            time.sleep(0.3)
            layer.publish(PLAN)
    assert layer.read(*IDS) == PLAN


def test_sixteen_processes_that_miss_one_plan_compile_it_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    (tmp_path / "marks").mkdir()
    start = context.Event()
    arguments = (str(tmp_path / "layer"), str(tmp_path / "marks"), start)
    processes = [context.Process(target=build_once, args=arguments) for _ in range(16)]
    for process in processes:
        process.start()
    time.sleep(2)
    start.set()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0] * 16
    assert len(os.listdir(tmp_path / "marks")) == 1
    assert os.listdir(tmp_path / "layer" / "locks") == [], "nobody needs the lock of a plan that is there"


def hold(root: str, ready: Any) -> None:
    layer = WritableLayer(Path(root), BIG)
    with layer.only_builder(*IDS, seconds=30):
        ready.set()
        time.sleep(600)


@pytest.fixture
def holder(tmp_path: Path) -> Any:
    """A process that builds the plan, and does not get on."""
    WritableLayer(tmp_path, BIG).prepare()
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    process = context.Process(target=hold, args=(str(tmp_path), ready))
    process.start()
    assert ready.wait(60)
    yield process
    process.kill()
    process.join()


def test_a_builder_that_dies_is_replaced(tmp_path: Path, holder: Any) -> None:
    threading.Timer(0.3, lambda: os.kill(holder.pid, signal.SIGKILL)).start()
    started = time.monotonic()
    layer = WritableLayer(tmp_path, BIG)
    with layer.only_builder(*IDS, seconds=60) as alone:
        assert alone
        assert 0.2 < time.monotonic() - started < 20
        layer.publish(PLAN)
    assert layer.read(*IDS) == PLAN


def test_a_wait_has_a_limit_and_the_plan_is_published_once(tmp_path: Path, holder: Any) -> None:
    layer = WritableLayer(tmp_path, BIG)
    with layer.only_builder(*IDS, seconds=0.2) as alone:
        assert not alone
        assert layer.publish(PLAN).new
    assert layer.publish(PLAN).new is False, "the one that was waited for finds the plan there"
    assert (tmp_path / "locks").exists()
    assert os.listdir(tmp_path / "locks"), "the lock is the other one's"


def test_a_long_wait_is_told_once(
    tmp_path: Path, holder: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(locks, "PATIENCE", 0.1)
    with WritableLayer(tmp_path, BIG).only_builder(*IDS, seconds=0.5):
        pass
    assert caplog.text.count("another process builds what this one needs; waiting for it up to 0.5 seconds") == 1


def test_a_wait_ends_when_it_is_called_off(tmp_path: Path, holder: Any) -> None:
    stop = threading.Event()
    threading.Timer(0.2, stop.set).start()
    started = time.monotonic()
    with WritableLayer(tmp_path, BIG).only_builder(*IDS, seconds=60, give_up=stop.is_set) as alone:
        assert not alone
    assert time.monotonic() - started < 20


def test_the_loser_of_a_race_leaves_the_winners_file_alone(tmp_path: Path) -> None:
    layer = WritableLayer(tmp_path, BIG)
    first = layer.publish(PLAN)
    inode = first.entry.path.stat().st_ino
    second = layer.publish(PLAN.without_ptx())
    assert (first.new, second.new) == (True, False)
    assert first.entry.path.stat().st_ino == inode
    assert len(files(tmp_path)) == 1


def test_a_damaged_file_under_the_name_gives_way(tmp_path: Path) -> None:
    layer = WritableLayer(tmp_path, BIG)
    path = layer.publish(PLAN).entry.path
    path.write_bytes(b"damaged")
    assert layer.publish(PLAN).new
    assert layer.read(*IDS) == PLAN
    assert list(layer.quarantine().values()) == ["it has 7 bytes, too few for a plan file"]


def test_a_failed_build_leaves_the_lock_to_those_who_wait(tmp_path: Path) -> None:
    layer = WritableLayer(tmp_path, BIG)
    layer.prepare()
    with pytest.raises(ZeroDivisionError), layer.only_builder(*IDS, seconds=1):
        raise ZeroDivisionError
    assert len(os.listdir(tmp_path / "locks")) == 1
    with layer.only_builder(*IDS, seconds=1) as alone:
        assert alone


def test_a_file_system_without_locks_builds_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import filelock

    def acquire(self: object, *arguments: object, **keywords: object) -> None:
        raise NotImplementedError("FileSystem does not appear to support flock")

    layer = WritableLayer(tmp_path, BIG)
    layer.prepare()
    monkeypatch.setattr(filelock.FileLock, "acquire", acquire)
    with layer.only_builder(*IDS, seconds=1) as alone:
        assert not alone
        layer.publish(PLAN)
    assert layer.read(*IDS) == PLAN


def test_a_planner_takes_the_plan_that_another_built_while_it_waited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: Any, config: dict[str, object]
) -> None:
    """The other one publishes between this one's search and its turn."""
    real = WritableLayer.only_builder

    def slow(self: WritableLayer, *arguments: Any) -> Any:
        WritableLayer(tmp_path, BIG).publish(compiled)
        return real(self, *arguments)

    def never(config: Mapping[str, Any], timeout: float, stop: threading.Event) -> Compiled:
        raise AssertionError("compiled twice")

    monkeypatch.setattr(WritableLayer, "only_builder", slow)
    monkeypatch.setattr(planner, "compile_plan", never)
    (outcome,) = planner.Planner(Settings((), tmp_path, BIG)).precompile([config])
    assert (outcome.status, outcome.plan) == ("hit", compiled)
