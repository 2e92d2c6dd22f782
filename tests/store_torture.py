"""Processes that are killed, system calls that fail, and many processes at once: what a layer must survive.

Run by tests/cache/test_torture.py for a short while, and by hand for long::

    python tests/store_torture.py kills --rounds 1000
    python tests/store_torture.py faults
    python tests/store_torture.py mixed --processes 8 --seconds 60

Each command works in a temporary folder, prints what it did, and exits with 1 and the reason if a rule was broken:

* what a reader is given is exactly what was published, and no file under a plan's name is ever damaged;
* an operation succeeds, or ends with an error of this package, and then loses nothing that was there;
* what killed processes leave behind is bounded, and goes once it is old.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import logging
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import NoReturn

from small_plans import set_age, small_plan

from dsa_planner.cache import bundle, writable
from dsa_planner.cache.layer import Entry, Layer
from dsa_planner.cache.planfile import PlanFile
from dsa_planner.cache.writable import WritableLayer
from dsa_planner.errors import DsaPlannerError

PLANS = 24
BIG = 1 << 30
CLEAR, UNCLEAR = 3, 4  # exit codes: an error of this package; anything else
ERRORS = ("ENOSPC", "EIO", "EROFS")
CALLS = [
    "openat",
    "open",
    "creat",
    "mkdir",
    "mkdirat",
    "link",
    "linkat",
    "rename",
    "renameat",
    "renameat2",
    "unlink",
    "unlinkat",
    "rmdir",
    "write",
    "pwrite64",
    "fsync",
    "fdatasync",
    "ftruncate",
    "utimensat",
    "flock",
    "fcntl",
    "fchmod",
    "fchmodat",
    "chmod",
    "close",
    "stat",
    "lstat",
    "fstat",
    "newfstatat",
    "statx",
    "getdents64",
    "read",
    "pread64",
    "lseek",
    "access",
    "faccessat",
    "faccessat2",
    "readlink",
    "readlinkat",
    "ioctl",
    "getcwd",
]


def plan(number: int) -> PlanFile:
    return small_plan(number, size=500 + 4000 * (number % 5))


class BrokenRuleError(Exception):
    """A rule of this module was broken."""


def require(condition: object, rule: str) -> None:
    if not condition:
        raise BrokenRuleError(rule)


def served(root: Path) -> set[int]:
    """The plans of a layer, each checked against what was published under its name."""
    layer = Layer(root)
    numbers = set()
    for entry in layer.entries():
        found = layer.read(entry.plan_id, entry.build_id)
        if found is None and not entry.path.exists():
            continue  # evicted since it was listed
        require(found is not None, f"{entry.path} is damaged: {layer.damaged.get(entry.path)}")
        assert found is not None
        number = found.config["topk"]
        require(found == plan(number), f"{entry.path} is not what was published")
        numbers.add(number)
    return numbers


# --- kills ------------------------------------------------------------------------------------------------------------


def kills(folder: Path, rounds: int, seed: int) -> str:
    """Kill a process that publishes, evicts, imports and exports, at random moments."""
    root, source = folder / "layer", folder / "source.tar"
    bundle.export_bundle([plan(n) for n in range(PLANS)], source)
    chance = random.Random(seed)
    most_left = exports = 0
    for number in range(rounds):
        child = os.fork()
        if child == 0:
            work_until_killed(root, source, folder, chance.randrange(1 << 30) + number)
        time.sleep(chance.uniform(0, 0.06))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        require(os.WIFSIGNALED(status), f"the process ended by itself ({status})")
        if root.exists():
            served(root)
        for target in folder.glob("out*"):
            with bundle.open_bundle(target) as opened:
                require(not bundle.verify_bundle(opened).problems, f"{target} is half written")
            shutil.rmtree(target) if target.is_dir() else target.unlink()
            exports += 1
        most_left = max(most_left, len(leftovers(folder)))
    require(most_left <= 2 * rounds, f"{most_left} files were left by {rounds} kills")
    left = leftovers(folder)
    for path in left:
        set_age(path, 2 * writable.LOCK_FILE_SECONDS)
    layer = WritableLayer(root, BIG)
    layer.prepare()
    staying = [path for name in ("tmp", "locks") for path in (root / name).iterdir()]
    require(not staying, f"what killed processes left does not go with age: {staying}")
    layer.publish(plan(0))
    require(0 in served(root), "the layer cannot be used any more")
    unfinished = len(list(folder.glob(".out*.tmp")))  # these go with the next export to their target
    return (
        f"{rounds} kills, {exports} exports: nothing torn or wrong; {len(left)} files left, all gone once old, "
        f"and {unfinished} unfinished exports"
    )


def leftovers(folder: Path) -> list[Path]:
    return [path for name in ("tmp", "locks") for path in (folder / "layer" / name).glob("*")]


def work_until_killed(root: Path, source: Path, folder: Path, seed: int) -> NoReturn:
    chance = random.Random(seed)
    size = len(plan(4).encode())
    while True:
        layer = WritableLayer(root, chance.choice((3 * size, BIG)))
        action = chance.randrange(6)
        with contextlib.suppress(DsaPlannerError):  # no room for a bundle, for example
            if action == 0:
                with layer.only_builder(small_plan().plan_id, "b" * 64, 1):
                    layer.publish(plan(chance.randrange(PLANS)), seconds=1.0)
            elif action == 1:
                layer.publish(plan(chance.randrange(PLANS)))
            elif action == 2:
                layer.prune(chance.randrange(4 * size))
            elif action == 3:
                with bundle.open_bundle(source) as opened:
                    bundle.import_bundle(opened, WritableLayer(root, BIG))
            else:
                name = f"out{chance.randrange(1 << 30)}" + ("" if action == 4 else ".tar")
                bundle.export_bundle([plan(n) for n in range(PLANS)], folder / name)


# --- faults -----------------------------------------------------------------------------------------------------------


def faults(folder: Path, share: float, seed: int) -> str:
    """Have each system call of each operation fail in turn, by strace.

    Args:
        folder: where to work.
        share: how many of the positions to try, 1.0 for all.
        seed: of that choice.
    """
    chance = random.Random(seed)
    done: collections.Counter[str] = collections.Counter()
    for name, operation in OPERATIONS.items():
        counts = positions(folder, operation)
        for call, count in counts.items():
            for error in ERRORS:
                for when in range(1, count + 1):
                    if chance.random() < share:
                        try_fault(folder, name, operation, call, error, when)
                        done[name] += 1
    words = ", ".join(f"{name} {count}" for name, count in done.items())
    return f"{sum(done.values())} faults ({words}): every answer right or its error clear, nothing lost"


def filled(folder: Path) -> Path:
    """A layer with some plans, and a bundle, as new."""
    model, work = folder / "model", folder / "work"
    if not model.exists():
        layer = WritableLayer(model / "layer", BIG)
        for number in range(4):
            layer.publish(plan(number), seconds=1.0)
            set_age(layer.path_of(plan(number).plan_id, "b" * 64), 100 - number)
        bundle.export_bundle([plan(10), plan(11)], model / "source.tar")
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(model, work)
    return work


def publish(work: Path) -> None:
    layer = WritableLayer(work / "layer", BIG)
    with layer.only_builder(plan(9).plan_id, "b" * 64, 1):
        layer.publish(plan(9), seconds=1.0)


def publish_and_evict(work: Path) -> None:
    layer = WritableLayer(work / "layer", sum(len(plan(n).encode()) for n in (2, 3, 9)))
    layer.publish(plan(9), seconds=1.0)


def record_failure(work: Path) -> None:
    WritableLayer(work / "layer", BIG).index.record_failure(plan(9).plan_id, "b" * 64, "it broke")


def prune(work: Path) -> None:
    WritableLayer(work / "layer", BIG).prune(len(plan(3).encode()))


def export(work: Path) -> None:
    bundle.export_bundle([plan(0), plan(1)], work / "out")


def export_tar(work: Path) -> None:
    bundle.export_bundle([plan(0), plan(1)], work / "out.tar")


def import_(work: Path) -> None:
    with bundle.open_bundle(work / "source.tar") as opened:
        bundle.import_bundle(opened, WritableLayer(work / "layer", BIG))


OPERATIONS: dict[str, Callable[[Path], None]] = {
    "publish": publish,
    "publish-and-evict": publish_and_evict,
    "index": record_failure,
    "prune": prune,
    "export": export,
    "export-tar": export_tar,
    "import": import_,
}
LEFT = {"publish-and-evict": 3, "prune": 1}  # plans that there is room for: where the oldest cannot go, others do
MADE = {"publish": {9}, "publish-and-evict": {9}, "import": {10, 11}}  # what a success must have made


def positions(folder: Path, operation: Callable[[Path], None]) -> dict[str, int]:
    """How often an operation makes each system call."""
    work = filled(folder)
    log = folder / "calls"
    with waiting(operation, work) as child, traced(child, "-o", str(log), "-e", f"trace={','.join(CALLS)}"):
        pass
    require(child.code == 0, f"{operation.__name__} fails by itself")
    return dict(collections.Counter(re.findall(r"^(?:\d+ +)?(\w+)\(", log.read_text(), re.M)))


def try_fault(folder: Path, name: str, operation: Callable[[Path], None], call: str, error: str, when: int) -> None:
    work = filled(folder)
    options = ("-o", os.devnull, "-e", f"trace={call}", "-e", f"inject={call}:error={error}:when={when}")
    with waiting(operation, work) as child, traced(child, *options):
        pass
    what = f"{name} with {error} at call {when} of {call}"
    try:
        require(child.code in (0, CLEAR), f"an unclear end ({child.code}):\n{(work / 'log').read_text()}")
        there = served(work / "layer")
        lost = len(there) < LEFT[name] if name in LEFT else not there >= {0, 1, 2, 3}
        require(not lost, f"plans were lost, {sorted(there)} are left")
        require(child.code or there >= MADE.get(name, set()), f"a success without its plan, {sorted(there)}")
        for target in (work / "out", work / "out.tar"):
            if target.exists():
                with bundle.open_bundle(target) as opened:
                    require(not bundle.verify_bundle(opened).problems, f"{target} is half written")
            elif name.startswith("export") and target.suffix == (".tar" if name.endswith("tar") else ""):
                require(child.code, "a success without its bundle")
        WritableLayer(work / "layer", BIG).publish(plan(20))
        require(20 in served(work / "layer"), "the layer cannot be used any more")
    except BrokenRuleError as broken:
        raise BrokenRuleError(f"{what}: {broken}") from None


class Child:
    """A forked process that waits for SIGCONT, and then does an operation."""

    code: int | None = None

    def __init__(self, pid: int) -> None:
        self.pid = pid


@contextlib.contextmanager
def waiting(operation: Callable[[Path], None], work: Path) -> Iterator[Child]:
    pid = os.fork()
    if pid == 0:
        log = os.open(work / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        code = UNCLEAR
        os.kill(os.getpid(), signal.SIGSTOP)
        try:
            operation(work)
            code = 0
        except DsaPlannerError as error:
            code = CLEAR if str(error).count("; ") else UNCLEAR
        except BaseException:
            os.write(log, traceback.format_exc().encode())
        finally:
            os._exit(code)
    os.waitpid(pid, os.WUNTRACED)
    child = Child(pid)
    yield child
    _, status = os.waitpid(pid, 0)
    child.code = os.waitstatus_to_exitcode(status)


@contextlib.contextmanager
def traced(child: Child, *options: str) -> Iterator[None]:
    """strace on a process that waits; then let it go, and wait for the end of both."""
    tracer = subprocess.Popen(
        ["strace", "-f", *options, "-p", str(child.pid)], stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True
    )
    assert tracer.stderr is not None
    line = tracer.stderr.readline()
    require("attached" in line, f"strace cannot attach: {line}")
    os.kill(child.pid, signal.SIGCONT)
    yield
    tracer.communicate()


# --- many processes ---------------------------------------------------------------------------------------------------


def mixed(folder: Path, processes: int, seconds: float) -> str:
    """Processes that get, publish and evict at once, under a limit of six plans."""
    root = folder / "layer"
    size = len(plan(4).encode())
    limit = 6 * size
    children = []
    for number in range(processes):
        child = os.fork()
        if child == 0:
            end_as(lambda number=number: use(root, limit, number, seconds))  # type: ignore[misc]
        children.append(child)
    most, looks = 0, 0
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if root.exists():
            most = max(most, sum(entry.bytes for entry in Layer(root).entries()))
            looks += 1
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    require(codes == [0] * processes, f"exit codes {codes}")
    require(most <= limit + size, f"the layer had {most} bytes, its limit is {limit} and a plan has {size}")
    served(root)
    require(not list((root / "tmp").iterdir()), "temporary files were left")
    require(not list((root / "quarantine").glob("*")), "good files were set aside")
    counts = WritableLayer(root, limit).index.totals()
    return (
        f"{processes} processes, {seconds:g} s: no error, no wrong bytes; at most {most} bytes (limit {limit}, a plan {size}) "
        f"in {looks} looks; {counts['built']} published, {counts['evicted']} evicted"
    )


class SlowLayer(WritableLayer):
    """One that takes a moment between a plan's name and the eviction, so that a missing lock shows."""

    def _evict(self, limit_bytes: int, keep: Collection[Path], dry_run: bool) -> list[Entry]:
        time.sleep(0.002)
        return super()._evict(limit_bytes, keep, dry_run)


def use(root: Path, limit: int, seed: int, seconds: float) -> None:
    chance = random.Random(seed)
    layer = SlowLayer(root, limit)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        number = chance.randrange(PLANS)
        action = chance.random()
        if action < 0.2:
            layer.publish(plan(number), seconds=0.1)
        elif action < 0.25:
            layer.evict(chance.randrange(limit))
        else:
            found = layer.find(plan(number).plan_id)
            require(found in (None, plan(number)), "wrong bytes")
        require(not layer.damaged, f"damage: {layer.damaged}")


def end_as(action: Callable[[], None]) -> NoReturn:
    code = 1
    try:
        action()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("kills", "faults", "mixed"))
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--share", type=float, default=1.0)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=60)
    given = parser.parse_args()
    logging.getLogger("dsa_planner.cache").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            if given.what == "kills":
                print(kills(folder, given.rounds, given.seed))
            elif given.what == "faults":
                print(faults(folder, given.share, given.seed))
            else:
                print(mixed(folder, given.processes, given.seconds))
        except BrokenRuleError as broken:
            print(broken)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
