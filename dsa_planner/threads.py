"""Tasks side by side in threads, which end as soon as their caller does. Standard library only."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

__all__ = ["available_processors", "worker_threads"]


@contextmanager
def worker_threads(count: int, on_abort: Callable[[], object] = lambda: None) -> Iterator[ThreadPoolExecutor]:
    """A pool for the block. An exception that leaves the block, or a signal's, drops the tasks that have not begun.

    Submit inside the block: a signal may come between two submissions too.

    Args:
        count: threads at most.
        on_abort: called then, to end the tasks that run.
    """
    with ThreadPoolExecutor(count) as pool:
        try:
            yield pool
        except BaseException:
            on_abort()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def available_processors() -> int:
    """Processors that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1
