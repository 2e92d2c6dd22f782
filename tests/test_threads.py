from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from dsa_planner.threads import worker_threads


class EndedError(BaseException):
    """What a handler of a signal raises."""


def test_a_signal_between_two_submissions_drops_what_waits_and_stops_what_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stop, begun = threading.Event(), []
    submit = ThreadPoolExecutor.submit

    def interrupted(pool: ThreadPoolExecutor, *call: Any) -> Any:
        if len(begun) == 1:
            raise EndedError
        future = submit(pool, *call)
        while not begun:
            time.sleep(0.001)
        return future

    monkeypatch.setattr(ThreadPoolExecutor, "submit", interrupted)

    def task() -> None:
        begun.append(None)
        assert stop.wait(30)

    def submit_all() -> None:
        with worker_threads(1, on_abort=stop.set) as pool:
            for _ in range(100):
                pool.submit(task)

    started = time.monotonic()
    with pytest.raises(EndedError):
        submit_all()
    assert time.monotonic() - started < 20
    assert len(begun) == 1


def test_tasks_that_wait_are_dropped_when_the_block_ends_by_an_exception() -> None:
    done = []

    def task() -> None:
        time.sleep(0.05)
        done.append(None)

    def submit_and_end() -> None:
        with worker_threads(1) as pool:
            for _ in range(50):
                pool.submit(task)
            raise EndedError

    with pytest.raises(EndedError):
        submit_and_end()
    assert len(done) <= 2
