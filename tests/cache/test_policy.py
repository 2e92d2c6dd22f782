"""What a reader refuses though it is intact: what everybody may write, refused builds, another user's folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from small_plans import files, small_plan

from dsa_planner.cache.layer import Layer, Policy, RecordingLayer
from dsa_planner.cache.search import SearchPath, layer_counts
from dsa_planner.cache.writable import WritableLayer
from dsa_planner.errors import CacheError

BIG = 1 << 30
PLAN = small_plan()
ANYONES = "everybody may write it, and DSA_PLAN_PERMISSIONS is strict"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    WritableLayer(tmp_path / "layer", BIG).publish(PLAN)
    return tmp_path / "layer"


def test_a_new_layer_is_its_owners_alone(root: Path) -> None:
    assert root.stat().st_mode & 0o777 == 0o700


def test_nothing_is_made_for_everybody_to_write_whatever_the_mask(tmp_path: Path) -> None:
    mask = os.umask(0)
    try:
        layer = WritableLayer(tmp_path / "layer", BIG)
        layer.publish(PLAN)
        layer.path_of(PLAN.plan_id, PLAN.build_id).write_bytes(b"damaged")
        layer.read(PLAN.plan_id, PLAN.build_id)
        with layer.only_builder(PLAN.plan_id, PLAN.build_id, 1):
            layer.publish(PLAN)
    finally:
        os.umask(mask)
    assert layer.find(PLAN.plan_id) == PLAN
    assert [path for path in layer.root.rglob("*") if path.stat().st_mode & 0o002] == []


@pytest.mark.parametrize("place", [".", "plans-v1"])
@pytest.mark.parametrize("kind", [Layer, RecordingLayer])
def test_a_layer_that_everybody_may_write_is_not_used_unless_told(root: Path, place: str, kind: type[Layer]) -> None:
    folder = root / place
    folder.chmod(0o777)
    layer = kind(root)
    assert layer.find(PLAN.plan_id) is None
    assert layer.read(PLAN.plan_id, PLAN.build_id) is None
    assert list(layer.entries()) == []
    assert layer.damaged == {folder: ANYONES}
    assert kind(root, Policy(anyone_may_write=True)).find(PLAN.plan_id) == PLAN


def test_a_plans_folder_or_file_that_everybody_may_write_is_not_used_unless_told(root: Path) -> None:
    path = Layer(root).path_of(PLAN.plan_id, PLAN.build_id)
    for place, mode in ((path, 0o666), (path.parent, 0o777)):
        before = place.stat().st_mode
        place.chmod(mode)
        layer = Layer(root)
        assert layer.find(PLAN.plan_id) is None
        assert layer.damaged == {path: ANYONES}
        assert Layer(root, Policy(anyone_may_write=True)).find(PLAN.plan_id) == PLAN
        place.chmod(before)
    assert Layer(root).find(PLAN.plan_id) == PLAN


def test_nothing_is_written_into_a_layer_that_everybody_may_write_unless_told(root: Path) -> None:
    root.chmod(0o777)
    before = files(root)
    layer = WritableLayer(root, BIG)
    for action in (layer.prepare, lambda: layer.publish(small_plan(1)), lambda: layer.prune(0)):
        with pytest.raises(CacheError) as error:
            action()
        assert str(error.value) == (
            f"cannot write {root}: {ANYONES}; set DSA_PLAN_CACHE_DIR to a new folder inside it, or "
            "DSA_PLAN_PERMISSIONS=any if it is to be shared"
        )
    assert files(root) == before
    WritableLayer(root, BIG, Policy(anyone_may_write=True)).publish(small_plan(1))
    WritableLayer(root / "inside", BIG).publish(small_plan(1))


def test_another_users_layer_is_read_and_never_written(root: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("becoming another user needs root")
    for path in (root, *root.rglob("*")):
        os.chown(path, 65533, 65533)
        path.chmod(0o775 if path.is_dir() else 0o664)
    for folder in list(root.parents)[:-2]:
        folder.chmod(folder.stat().st_mode | 0o055)
    damaged = root / "plans-v1" / ("0" * 64)
    damaged.write_bytes(b"in the place of a plan's folder")
    before = [(path, path.stat().st_mtime_ns) for path in sorted(root.rglob("*"))]
    script = (
        "import os, sys; from pathlib import Path; from dsa_planner.cache.writable import WritableLayer\n"
        "from dsa_planner.errors import CacheError; from small_plans import small_plan\n"
        "os.setgroups([]); os.setgid(65533); os.setuid(65534)\n"
        "layer = WritableLayer(Path(sys.argv[1]), 1 << 30)\n"
        "assert layer.find(small_plan().plan_id) == small_plan(); assert layer.find('0' * 64) is None\n"
        "for action in (layer.prepare, lambda: layer.publish(small_plan(1)), lambda: layer.prune(0)):\n"
        "    try: action()\n"
        "    except CacheError as error: print(error)\n"
    )
    out = subprocess.run(
        [sys.executable, "-c", script, str(root)],
        capture_output=True, text=True, env={"PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert out.returncode == 0, out.stderr
    assert [line.partition("; ")[0] for line in out.stdout.splitlines()] == [
        f"cannot write {root}: it belongs to user 65533, not to 65534"
    ] * 3
    plan_file = Layer(root).path_of(PLAN.plan_id, PLAN.build_id)
    after = [(path, path.stat().st_mtime_ns) for path in sorted(root.rglob("*"))]
    assert [entry for entry in after if entry[0] != plan_file] == [entry for entry in before if entry[0] != plan_file]


def test_a_refused_build_is_never_used_and_named(root: Path) -> None:
    other = small_plan(build="a", version="4.8.0")
    WritableLayer(root, BIG).publish(other)
    policy = Policy(refused_builds=("b" * 12,))
    layer = Layer(root, policy)
    assert layer.find(PLAN.plan_id) == other
    assert layer.read(PLAN.plan_id, PLAN.build_id) is None
    assert layer.damaged == {}
    assert layer.refused == {layer.path_of(PLAN.plan_id, PLAN.build_id): "DSA_PLAN_REFUSED_BUILDS refuses its build"}
    search = SearchPath([root], None, Policy(refused_builds=("a" * 12, "b" * 64)))
    assert search.find(PLAN.plan_id) is None
    assert len(search.unusable()) == 2
    assert WritableLayer(root, BIG, policy).find(PLAN.plan_id) == other
    assert len(files(root)) == 2, "a refused build is intact, and stays"


def test_what_a_process_asked_of_each_layer_is_counted(root: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    WritableLayer(other, BIG).publish(small_plan(1))
    WritableLayer(other, BIG).publish(small_plan(2))
    Layer(other).path_of(small_plan(2).plan_id, "b" * 64).write_bytes(b"damaged")
    for number, times in ((0, 3), (1, 2), (2, 1), (3, 1)):
        for _ in range(times):
            SearchPath([root, other]).find(small_plan(number).plan_id)
    counts = layer_counts()
    assert counts[str(root)] == {"hits": 3, "misses": 4, "skipped": 0}
    assert counts[str(other)] == {"hits": 2, "misses": 2, "skipped": 1}
