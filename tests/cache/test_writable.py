from __future__ import annotations

import errno
import multiprocessing
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from small_plans import files, set_age, small_plan

from dsa_planner.cache.layer import Layer
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
    assert published.entry is not None
    assert published.entry.path.read_bytes() == plan.encode()
    assert files(layer.root) == [f"plans-v1/{plan.plan_id}/{plan.build_id}.dsaplan"]
    assert (layer.root / "CACHEDIR.TAG").read_bytes().startswith(b"Signature: 8a477f597d28d172789f06886806bc55")


def test_publishing_again_changes_nothing(tmp_path: Path) -> None:
    layer = WritableLayer(tmp_path, BIG)
    layer.publish(small_plan())
    layer.publish(small_plan())
    assert len(files(tmp_path)) == 1


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


def test_a_plan_larger_than_the_limit_is_kept_out_with_a_message(tmp_path: Path) -> None:
    layer = WritableLayer(tmp_path, 1000)
    layer.publish(small_plan(1, size=10))
    published = layer.publish(small_plan(2, size=5000))
    assert published.entry is None
    assert "more than the layer's limit of 1000" in published.note
    assert present(layer) == {1}


def test_the_plan_just_published_is_not_evicted_for_itself(tmp_path: Path) -> None:
    size = len(small_plan().encode())
    layer = WritableLayer(tmp_path, size)
    layer.publish(small_plan(1))
    os.utime(paths(layer, 1)[0], ns=(2**62, 2**62))  # the clock was once ahead
    layer.publish(small_plan(2))
    assert present(layer) == {2}


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO])
@pytest.mark.parametrize("step", ["write", "fsync", "replace"])
def test_a_failing_file_system_is_named_and_leaves_nothing_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, number: int
) -> None:
    layer = WritableLayer(tmp_path, BIG)
    layer.publish(small_plan(1))

    def fail(*arguments: object, **keywords: object) -> None:
        raise OSError(number, os.strerror(number))

    if step == "write":
        monkeypatch.setattr("dsa_planner.cache.writable._write_synced", fail)
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
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(tmp_path)]
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
