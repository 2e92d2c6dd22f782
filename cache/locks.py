"""Locks between processes: one for the writers of a layer, one for the builders of each plan. Build side.

They are the kernel's (flock, by filelock), so they go with the process that holds them. Reading takes none.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import filelock

from dsa_planner.errors import CacheError

__all__ = ["only_builder", "only_writer"]

MODE = 0o664
WRITER_SECONDS = 10
PATIENCE = 5.0  # seconds of waiting for a builder before that is worth a word
_POLL_SECONDS = 0.02
log = logging.getLogger("dsa_planner.cache")


@contextlib.contextmanager
def only_writer(path: Path) -> Iterator[None]:
    """For the block, be the one who publishes and evicts.

    Where the file system has no locks the block runs all the same: two evictors at once may then take more than they
    need.

    Raises:
        CacheError: another process has held it for too long.
        OSError: there can be no such file.
    """
    lock = filelock.FileLock(path, timeout=WRITER_SECONDS, mode=MODE)
    try:
        lock.acquire()
    except filelock.Timeout:
        raise CacheError(
            f"the lock {path}",
            f"another process has held it for {WRITER_SECONDS} seconds",
            "end that process, or set DSA_PLAN_CACHE_DIR to another folder",
        ) from None
    except NotImplementedError:
        yield
        return
    try:
        yield
    finally:
        _release(lock)


@contextlib.contextmanager
def only_builder(path: Path, product: Path, seconds: float, give_up: Callable[[], bool]) -> Iterator[bool]:
    """For the block, be the one process and thread of the host that builds something.

    Args:
        path: the lock file. It is removed with the lock once there is a product: whoever waits finds that, and needs
            it no more. Without a product it stays, for those who wait on it.
        product: what is built.
        seconds: how long to wait for another builder.
        give_up: ends the wait when it answers True.

    Yields:
        Whether nobody else is in such a block. False after the wait, and where the file system has no locks.
    """
    lock = filelock.FileLock(path, mode=MODE)
    alone = _acquired(lock, seconds, give_up)
    try:
        yield alone
    finally:
        if alone:
            if os.path.exists(product):
                with contextlib.suppress(OSError):
                    path.unlink()
            _release(lock)


def _acquired(lock: filelock.BaseFileLock, seconds: float, give_up: Callable[[], bool]) -> bool:
    started = time.monotonic()
    told = False
    while True:
        try:
            lock.acquire(timeout=0)
            return True
        except filelock.Timeout:
            waited = time.monotonic() - started
            if waited >= seconds or give_up():
                log.info("%s: another process held it for %.0f seconds", lock.lock_file, waited)
                return False
            if waited > PATIENCE and not told:
                told = True
                log.warning(
                    "another process builds what this one needs; waiting for it up to %g seconds (%s)",
                    seconds, lock.lock_file,
                )  # fmt: skip
            time.sleep(_POLL_SECONDS)
        except (OSError, NotImplementedError) as error:
            log.info("%s: it cannot be locked (%s)", lock.lock_file, error)
            return False


def _release(lock: filelock.BaseFileLock) -> None:
    """Release a lock; what was done under it stays done, whatever the file system says to that."""
    try:
        lock.release()
    except OSError as error:
        log.warning("%s: it cannot be released (%s)", lock.lock_file, error.strerror)
