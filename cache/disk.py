"""Files read with a bound, and written so that they stay. Both sides; standard library only."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable
from io import BufferedWriter
from pathlib import Path

from dsa_planner.cache.planfile import MAX_BYTES
from dsa_planner.errors import PlanFileError

__all__ = ["ANYONES", "read_bounded", "sync_folders", "write_synced"]

ANYONES = "everybody may write it, and DSA_PLAN_PERMISSIONS is strict"


def read_bounded(path: Path | str, anyone_may_write: bool = True) -> bytes:
    """The content of a regular file of at most MAX_BYTES.

    O_NONBLOCK keeps a FIFO of that name from blocking the open for ever.

    Raises:
        OSError: it cannot be read.
        PlanFileError: it is something else than a regular file, too large, or everybody may write it.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        found = os.fstat(descriptor)
        rule = None
        if stat.S_ISDIR(found.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(found.st_mode):
            rule = "it is not a regular file"
        elif found.st_size > MAX_BYTES:
            rule = f"it has {found.st_size} bytes, more than {MAX_BYTES}"
        elif found.st_mode & stat.S_IWOTH and not anyone_may_write:
            rule = ANYONES
        if rule is not None:
            raise PlanFileError(f"plan file {path}", rule, "remove it")
        # In one piece, mostly: a longer read would first make room for all of it, and a copy costs as much as the read.
        data = os.read(descriptor, found.st_size + 1)
        while len(data) < found.st_size and (more := os.read(descriptor, found.st_size - len(data))):
            data += more
        return data
    finally:
        os.close(descriptor)


def write_synced(path: Path, write: Callable[[BufferedWriter], object], mode: int, time_ns: int) -> None:
    """Write a new file, and have it on the disk with its mode and time before it gets its name.

    Without the sync, a crash soon after the file got its name can leave it empty.

    Args:
        path: a temporary name, which is not taken.
        write: writes the content.
        mode: of the file, as far as the umask allows.
        time_ns: its modification time.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    with open(descriptor, "wb") as file:
        write(file)
        file.flush()
        os.utime(descriptor, ns=(time_ns, time_ns))
        os.fsync(descriptor)


def sync_folders(*folders: Path | str) -> None:
    """Have the names in some folders on the disk, best effort: some file systems cannot sync a folder."""
    for folder in folders:
        with contextlib.suppress(OSError):
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
