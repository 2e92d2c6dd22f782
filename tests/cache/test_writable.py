from __future__ import annotations

import errno
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from small_plans import files, set_age, small_plan

from dsa_planner.cache import locks, writable
from dsa_planner.cache.layer import Layer, Policy
from dsa_planner.cache.writable import WritableLayer
from dsa_planner.errors import CacheError

BIG = 1 << 30


def paths(layer: Layer, *numbers: int) -> list[Path]:
    return [layer.path_of(small_plan(n).plan_id, "b" * 64) for n in numbers]


def present(layer: Layer) -> set[int]:
    found = (layer.read(entry.plan_id, entry.build_id, record_use=False) for entry in layer.entries())
    return {plan.config["topk"] for plan in found if plan is not None}


def test_publish_leaves_the_plan_and_nothing_else(tmp_path: Path) -> None:
    layer = WritableLayer(tmp_path / "new" / "layer", BIG)
    plan = small_plan()
    published = layer.publish(plan)
    assert published.entry.path.read_bytes() == plan.encode()
    assert [published.entry] == list(layer.entries())
    assert files(layer.root) == [f"plans-v1/{plan.plan_id}/{plan.build_id}.dsaplan"]
    assert (layer.root / "CACHEDIR.TAG").read_bytes().startswith(b"Signature: 8a477f597d28d172789f06886806bc55")


def test_publishing_again_changes_nothing(tmp_path: Path) -> None:
    layer = WritableLayer(tmp_path, BIG)
    layer.publish(small_plan())
    layer.publish(small_plan())
    assert len(files(tmp_path)) == 1


@pytest.mark.parametrize("content", [b"", b"Signature: 8a47", b"something else", None])
def test_a_tag_that_a_full_disk_cut_short_is_replaced(tmp_path: Path, content: bytes | None) -> None:
    layer, tag = WritableLayer(tmp_path, BIG), tmp_path / "CACHEDIR.TAG"
    layer.publish(small_plan())
    whole = tag.read_bytes()
    tag.unlink()
    if content is None:
        tag.symlink_to(tmp_path / "nowhere")
    else:
        tag.write_bytes(content)
    layer.prepare()
    assert tag.read_bytes() == whole
    tag.write_bytes(whole[:43] + b"\n# of somebody else\n")
    layer.prepare()
    assert tag.read_bytes().endswith(b"# of somebody else\n"), "a good tag is left alone"


def test_a_tag_is_there_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, tag = WritableLayer(tmp_path, BIG), tmp_path / "CACHEDIR.TAG"

    def full(path: Path, data: bytes) -> int:
        path.touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(writable, "_write", full)
    layer.prepare()
    assert not tag.exists()
    assert os.listdir(tmp_path / "tmp") == []
    monkeypatch.undo()
    tag.mkdir()  # what cannot be replaced costs no plan
    layer.publish(small_plan())
    assert present(layer) == {0}


def test_eviction_takes_the_least_recently_used_and_no_more_than_needed(tmp_path: Path) -> None:
    size = len(small_plan().encode())
    layer = WritableLayer(tmp_path, 4 * size)
    for number in range(4):
        layer.publish(small_plan(number))
    for age, path in zip((400, 100, 300, 200), paths(layer, 0, 1, 2, 3), strict=True):
        set_age(path, age)
    assert layer.find(small_plan(0).plan_id) is not None  # used just now
    published = layer.publish(small_plan(4))
    assert [entry.path for entry in published.evicted] == paths(layer, 2)
    assert present(layer) == {0, 1, 3, 4}
    assert sum(entry.bytes for entry in layer.entries()) == 4 * size


def test_eviction_is_exact_when_the_index_is_lost(tmp_path: Path) -> None:
    size = len(small_plan().encode())
    layer = WritableLayer(tmp_path, BIG)
    for number in range(6):
        layer.publish(small_plan(number))
        set_age(paths(layer, number)[0], 100 - number)
    evicted = WritableLayer(tmp_path, BIG).evict(2 * size)
    assert [entry.path for entry in evicted] == paths(layer, 0, 1, 2, 3)


def test_a_dry_run_says_what_would_go_and_removes_nothing(tmp_path: Path) -> None:
    size = len(small_plan().encode())
    layer = WritableLayer(tmp_path, BIG)
    for number in range(3):
        layer.publish(small_plan(number))
        set_age(paths(layer, number)[0], 100 - number)
    assert [entry.path for entry in layer.evict(size, dry_run=True)] == paths(layer, 0, 1)
    assert present(layer) == {0, 1, 2}


def test_a_plan_larger_than_the_limit_is_refused_and_nothing_is_evicted_for_it(tmp_path: Path) -> None:
    layer = WritableLayer(tmp_path, 1000)
    layer.publish(small_plan(1, size=10))
    plan = small_plan(2, size=5000)
    size = len(plan.encode())
    with pytest.raises(CacheError) as error:
        layer.publish(plan)
    assert str(error.value) == (
        f"plan {plan.plan_id[:12]} of {size} bytes: it does not fit into the layer's limit of 1000 bytes; "
        f"set DSA_PLAN_CACHE_BYTES to {size} or more"
    )
    assert present(layer) == {1}
    assert len(files(tmp_path)) == 1


def test_a_plan_is_never_evicted_for_one_that_it_goes_with(tmp_path: Path) -> None:
    size = len(small_plan().encode())
    layer = WritableLayer(tmp_path, 2 * size)
    keep = frozenset(paths(layer, 1, 2, 3))
    layer.publish(small_plan(0))
    for number in (1, 2):
        layer.publish(small_plan(number), keep)
    assert present(layer) == {1, 2}
    with pytest.raises(CacheError, match=f"beside {2 * size} bytes of plans that go with it; set .* to {3 * size} or"):
        layer.publish(small_plan(3), keep)
    assert present(layer) == {1, 2}
    layer.publish(small_plan(1), keep)
    assert present(layer) == {1, 2}, "publishing again needs no more room"


def test_what_cannot_be_evicted_is_a_warning_and_the_next_goes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    size = len(small_plan().encode())
    layer = WritableLayer(tmp_path, 2 * size + 5000)
    folder = paths(layer, 0)[0]
    folder.mkdir(parents=True)
    os.utime(folder, (1, 1))
    layer.publish(small_plan(1))
    layer.publish(small_plan(2))
    layer.limit_bytes = folder.stat().st_size + 2 * size
    assert [entry.path for entry in layer.publish(small_plan(3)).evicted] == paths(layer, 1)
    assert f"{folder}: it cannot be evicted" in caplog.text
    assert present(layer) == {2, 3}


def hold_lock(path: Path) -> subprocess.Popen[str]:
    script = (
        "import fcntl, sys, time; file = open(sys.argv[1], 'w'); fcntl.flock(file, fcntl.LOCK_EX)\n"
        "print('held', flush=True); time.sleep(600)"
    )
    holder = subprocess.Popen([sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    return holder


def test_a_lock_that_is_never_released_costs_the_eviction_and_not_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(locks, "WRITER_SECONDS", 0.2)
    layer = WritableLayer(tmp_path, len(small_plan().encode()))
    layer.publish(small_plan(1))
    holder = hold_lock(tmp_path / "lock")
    try:
        assert layer.publish(small_plan(2)).evicted == ()
        assert present(layer) == {1, 2}
        assert "another process has held it for 0.2 seconds; end that process" in caplog.text
        with pytest.raises(CacheError, match="the lock"):
            layer.evict(0)
    finally:
        holder.kill()
        holder.communicate()
    layer.publish(small_plan(3))
    assert present(layer) == {3}


def test_a_file_system_without_locks_still_evicts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import filelock

    def acquire(self: object, *arguments: object, **keywords: object) -> None:
        raise NotImplementedError("FileSystem does not appear to support flock")

    monkeypatch.setattr(filelock.FileLock, "acquire", acquire)
    layer = WritableLayer(tmp_path, len(small_plan().encode()))
    layer.publish(small_plan(1))
    layer.publish(small_plan(2))
    assert present(layer) == {2}


def test_a_layer_is_shared_by_users_who_may_all_write_it(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("becoming other users needs root")
    for folder in (*list(tmp_path.parents)[:-2], tmp_path):
        folder.chmod(folder.stat().st_mode | 0o055)
    root = tmp_path / "layer"
    root.mkdir()
    os.chown(root, 0, 100)
    root.chmod(0o2777)
    script = (
        "import os, sys; from pathlib import Path; from dsa_planner.cache.layer import Policy\n"
        "from dsa_planner.cache.writable import WritableLayer; from small_plans import small_plan\n"
        "os.umask(0); os.setgid(100); os.setuid(int(sys.argv[2])); size = len(small_plan().encode())\n"
        "layer = WritableLayer(Path(sys.argv[1]), 2 * size, Policy(anyone_may_write=True))\n"
        "for n in sys.argv[3:]: layer.publish(small_plan(int(n)))"
    )
    for user, numbers in (("65534", "123"), ("65533", "456"), ("65534", "78")):
        command = [sys.executable, "-c", script, str(root), user, *numbers]
        out = subprocess.run(command, capture_output=True, text=True, env={"PYTHONPATH": os.pathsep.join(sys.path)})
        assert (out.returncode, out.stderr) == (0, "")
    assert present(Layer(root, Policy(anyone_may_write=True))) == {7, 8}
    assert not [path for path in root.rglob("*") if path.stat().st_mode & 0o002], "nothing is for everybody to write"


def test_a_new_plans_folder_that_an_evictor_removes_at_once_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, plan = WritableLayer(tmp_path, BIG), small_plan()
    layer.prepare()
    link, removals = os.link, 3

    def evictor_first(source: Path, target: Path) -> None:
        nonlocal removals
        if removals:
            removals -= 1
            target.parent.rmdir()
        link(source, target)

    monkeypatch.setattr(os, "link", evictor_first)
    layer.publish(plan)
    assert layer.find(plan.plan_id) == plan


def test_the_rename_reaches_the_disk_before_publish_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    fsync = os.fsync

    def record(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    plan = small_plan()
    layer = WritableLayer(tmp_path, BIG)
    layer.prepare()
    monkeypatch.setattr(os, "fsync", record)
    published = layer.publish(plan)
    file, *folders = synced
    assert file.startswith(str(tmp_path / "tmp"))
    assert folders == [str(published.entry.path.parent), str(published.entry.path.parent.parent)]


def test_prepare_finds_out_what_cannot_be_written_and_tidies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = WritableLayer(tmp_path, BIG)
    layer.publish(small_plan())
    (tmp_path / "quarantine").mkdir()
    names = [f"{number:064x}.{'b' * 64}.dsaplan.{number:08x}" for number in range(30)]
    for number, name in enumerate(names):
        (tmp_path / "quarantine" / name).touch()
        os.utime(tmp_path / "quarantine" / name, (number, number))
    old, new = "0123456789abcdef.77.0123456789abcdef", "0123456789abcdef.78.0123456789abcdef"
    for name, age in ((old, 7200), (new, 60)):
        (tmp_path / "tmp" / name).touch()
        set_age(tmp_path / "tmp" / name, age)
    layer.prepare()
    assert os.listdir(tmp_path / "tmp") == [new]
    assert sorted(os.listdir(tmp_path / "quarantine")) == names[14:]
    assert present(layer) == {0}
    touch = Path.touch
    for folder in ("tmp", "plans-v1"):

        def refuse(path: Path, folder: str = folder) -> None:
            if path.parent.name == folder:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            touch(path)

        monkeypatch.setattr(Path, "touch", refuse)
        with pytest.raises(CacheError, match="Permission denied"):
            layer.prepare()


def test_files_of_others_are_left_alone_in_a_folder_that_was_there(tmp_path: Path) -> None:
    """As when DSA_PLAN_CACHE_DIR names a home folder or a project."""
    names = [
        f"{folder}/{name}" for folder in ("tmp", "locks", "quarantine", "plans-v1") for name in ("precious", "x.1.2")
    ]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("precious")
        set_age(tmp_path / name, 10**7)
    (tmp_path / "plans-v1" / "empty").mkdir()
    layer = WritableLayer(tmp_path, BIG)
    layer.publish(small_plan())
    layer.prepare()
    done = layer.prune(0, quarantined=0)
    assert [entry.path for entry in done.evicted] == paths(layer, 0)
    assert done.leftovers == ()
    assert all((tmp_path / name).read_text() == "precious" for name in names)
    assert (tmp_path / "plans-v1" / "empty").is_dir()


def test_the_plan_just_published_is_not_evicted_for_itself(tmp_path: Path) -> None:
    size = len(small_plan().encode())
    layer = WritableLayer(tmp_path, size)
    layer.publish(small_plan(1))
    os.utime(paths(layer, 1)[0], ns=(2**62, 2**62))  # the clock was once ahead
    layer.publish(small_plan(2))
    assert present(layer) == {2}


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO])
@pytest.mark.parametrize("step", ["write", "fsync", "link"])
def test_a_failing_file_system_is_named_and_leaves_nothing_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, number: int
) -> None:
    layer = WritableLayer(tmp_path, BIG)
    layer.publish(small_plan(1))

    def fail(*arguments: object, **keywords: object) -> None:
        raise OSError(number, os.strerror(number))

    if step == "write":
        monkeypatch.setattr("dsa_planner.cache.writable._write", fail)
    else:
        monkeypatch.setattr(os, step, fail)
    with pytest.raises(CacheError) as error:
        layer.publish(small_plan(2))
    monkeypatch.undo()
    assert os.strerror(number) in str(error.value)
    assert "DSA_PLAN_CACHE_DIR" in str(error.value)
    assert files(tmp_path) == [str(path.relative_to(tmp_path)) for path in paths(layer, 1)]


def test_a_full_file_system(tmp_path: Path) -> None:
    """A real one, where this machine lets a test mount one."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k,mode=700", "none", str(tmp_path)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("mounting a tmpfs needs root")
    try:
        layer = WritableLayer(tmp_path, BIG)
        layer.publish(small_plan(1, size=1000))
        with pytest.raises(CacheError, match="No space left on device"):
            layer.publish(small_plan(2, size=200_000))
        assert present(layer) == {1}
        assert len(files(tmp_path)) == 1
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_an_unwritable_folder_is_refused() -> None:
    """As another user where this one is root, who may write anywhere."""
    folder = tempfile.mkdtemp()
    os.chmod(folder, 0o555)
    script = (
        "import os, sys; from pathlib import Path\n"
        "from dsa_planner.cache.writable import WritableLayer; from small_plans import small_plan\n"
        "import filelock\n"
        "if os.geteuid() == 0: os.setuid(65534)\n"
        "WritableLayer(Path(sys.argv[1]) / 'layer', 1 << 30).publish(small_plan())"
    )
    environment = {"PYTHONPATH": os.pathsep.join(sys.path)}
    out = subprocess.run([sys.executable, "-c", script, folder], capture_output=True, text=True, env=environment)
    os.rmdir(folder)
    assert out.returncode == 1
    assert f"cannot write {folder}/layer/" in out.stderr
    assert "Permission denied; set DSA_PLAN_CACHE_DIR to a folder that can be written" in out.stderr


def test_a_layer_in_the_place_of_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CacheError, match=r"Not a directory|File exists"):
        WritableLayer(tmp_path / "file", BIG).publish(small_plan())


@pytest.mark.parametrize("name", ["tmp", "plans-v1"])
@pytest.mark.parametrize(
    "make", [Path.touch, lambda path: path.symlink_to(path.with_name("nowhere"))], ids=["file", "link"]
)
def test_a_file_in_the_place_of_a_folder_of_the_layer_is_named(
    tmp_path: Path, name: str, make: Callable[[Path], None]
) -> None:
    make(tmp_path / name)
    layer = WritableLayer(tmp_path, BIG)
    for action in (layer.prepare, lambda: layer.publish(small_plan())):
        with pytest.raises(CacheError) as error:
            action()
        assert str(error.value).endswith(
            f": {tmp_path / name} is not a folder; remove it, or set DSA_PLAN_CACHE_DIR to another folder"
        )


def test_a_folder_in_the_place_of_the_lock_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "lock").mkdir()
    layer = WritableLayer(tmp_path, len(small_plan().encode()))
    for number in (1, 2):
        layer.publish(small_plan(number))
    assert f"cannot lock {tmp_path / 'lock'}: Is a directory; " in caplog.text
    assert present(layer) == {1, 2}


def test_a_file_in_the_place_of_a_plans_folder_is_set_aside(tmp_path: Path) -> None:
    layer, plan = WritableLayer(tmp_path, BIG), small_plan()
    folder = layer.path_of(plan.plan_id, plan.build_id).parent
    for find in (lambda: layer.find(plan.plan_id), lambda: layer.read(plan.plan_id, plan.build_id)):
        folder.parent.mkdir(exist_ok=True)
        folder.touch()
        assert find() is None
        assert layer.damaged == {folder: "it is not a folder"}
        assert not folder.exists()
    layer.publish(plan)
    assert layer.find(plan.plan_id) == plan
    assert list(layer.quarantine().values()) == ["it is not a folder"] * 2


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.EMFILE, "raise the limit of open files (ulimit -n)"),
        (errno.ENFILE, "raise the system's limit of open files (sysctl fs.file-max)"),
        (errno.EFBIG, "raise the limit of a file's size (ulimit -f)"),
    ],
)
def test_a_limit_that_is_met_is_what_the_remedy_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, remedy: str
) -> None:
    def fail(*arguments: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(writable, "_write", fail)
    with pytest.raises(CacheError) as error:
        WritableLayer(tmp_path, BIG).publish(small_plan())
    assert str(error.value).endswith(f": {os.strerror(number)}; {remedy}")


def _publish_many(root: str, seed: int) -> None:
    layer = WritableLayer(Path(root), 6 * len(small_plan().encode()))
    for step in range(60):
        layer.publish(small_plan((seed * 7 + step) % 12))
        layer.find(small_plan(step % 12).plan_id)


def test_publishers_and_evictors_in_several_processes_do_not_disturb_each_other(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_publish_many, args=(str(tmp_path), seed)) for seed in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0, 0, 0, 0]
    layer = WritableLayer(tmp_path, BIG)
    assert sum(entry.bytes for entry in layer.entries()) <= 6 * len(small_plan().encode())
    assert present(layer)
    assert not layer.damaged
    assert not [name for name in files(tmp_path) if not name.startswith("plans-v1/")]
