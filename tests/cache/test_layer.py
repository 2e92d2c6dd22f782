from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
from small_plans import files, set_age, small_plan

from dsa_planner.cache.layer import Layer, SearchPath, read_only_layers
from dsa_planner.cache.planfile import MAX_BYTES
from dsa_planner.cache.writable import RecordingLayer, WritableLayer

BIG = 1 << 30


def layer_with(root: Path, *plans: object) -> Layer:
    for plan in plans:
        WritableLayer(root, BIG).publish(plan)  # type: ignore[arg-type]
    return Layer(root)


def test_a_published_plan_is_found_by_its_ids(tmp_path: Path) -> None:
    plan = small_plan()
    layer = layer_with(tmp_path, plan)
    assert layer.read(plan.plan_id, plan.build_id) == plan
    assert layer.find(plan.plan_id) == plan
    assert layer.read(plan.plan_id, "0" * 64) is None
    assert layer.find("0" * 64) is None


def test_several_builds_lie_side_by_side_and_the_newest_compiler_wins(tmp_path: Path) -> None:
    old, new = small_plan(build="f", version="4.8.1"), small_plan(build="a", version="4.10.0")
    layer = layer_with(tmp_path, new, old)
    assert old.plan_id == new.plan_id
    assert layer.find(old.plan_id) == new
    assert layer.read(old.plan_id, old.build_id) == old
    assert {entry.build_id for entry in layer.entries()} == {"f" * 64, "a" * 64}


def test_equal_versions_are_ordered_by_build_id_so_that_all_hosts_agree(tmp_path: Path) -> None:
    layer = layer_with(tmp_path, small_plan(build="1"), small_plan(build="2"))
    found = layer.find(small_plan().plan_id)
    assert found is not None
    assert found.build_id == "2" * 64


@pytest.mark.parametrize("bad", ["", "../x", "A" * 64, "a" * 63, "a" * 64 + "/", "/" + "a" * 63, "." * 64, "é" * 64])
def test_only_an_id_becomes_part_of_a_path(tmp_path: Path, bad: str) -> None:
    layer = Layer(tmp_path)
    for action in (lambda: layer.builds(bad), lambda: layer.read("a" * 64, bad), lambda: layer.find(bad)):
        with pytest.raises(ValueError, match="64 hexadecimal digits"):
            action()


def damage(path: Path, how: str) -> None:
    data = path.read_bytes()
    path.unlink()
    if how == "flipped":
        path.write_bytes(data[:20] + bytes([data[20] ^ 1]) + data[21:])
    elif how == "truncated":
        path.write_bytes(data[:-7])
    elif how == "empty":
        path.touch()
    elif how == "another plan":
        path.write_bytes(small_plan(9).encode())
    elif how == "another build":
        path.write_bytes(small_plan(build="c").encode())
    elif how == "folder":
        path.mkdir()
    elif how == "fifo":
        os.mkfifo(path)
    elif how == "huge":
        with path.open("wb") as file:
            file.truncate(MAX_BYTES + 1)
    elif how == "dangling link":
        path.symlink_to("/nowhere")


@pytest.mark.parametrize(
    "how", ["flipped", "truncated", "empty", "another plan", "another build", "folder", "fifo", "huge"]
)
def test_a_damaged_file_is_skipped_named_and_left_in_a_read_only_layer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    plan = small_plan()
    first, second = layer_with(tmp_path / "1", plan), layer_with(tmp_path / "2", plan)
    path = first.path_of(plan.plan_id, plan.build_id)
    damage(path, how)
    with caplog.at_level(logging.WARNING):
        found = SearchPath([first, second]).find(plan.plan_id)
    assert found == (plan, second)
    assert str(path) in caplog.text
    assert path in first.damaged
    assert path.exists()


def test_a_link_that_leads_nowhere_is_a_miss(tmp_path: Path) -> None:
    plan = small_plan()
    layer = layer_with(tmp_path, plan)
    damage(layer.path_of(plan.plan_id, plan.build_id), "dangling link")
    assert layer.find(plan.plan_id) is None


def test_a_damaged_file_in_the_writable_layer_is_set_aside(tmp_path: Path) -> None:
    plan = small_plan()
    writable = WritableLayer(tmp_path, BIG)
    writable.publish(plan)
    path = writable.path_of(plan.plan_id, plan.build_id)
    damage(path, "flipped")
    assert writable.find(plan.plan_id) is None
    assert not path.exists()
    assert [name.partition("/")[0] for name in files(tmp_path)] == ["quarantine"]
    writable.publish(plan)
    assert writable.find(plan.plan_id) == plan


def test_layers_are_searched_in_order_and_hits_counted(tmp_path: Path) -> None:
    one, two = small_plan(1), small_plan(2)
    first, second = layer_with(tmp_path / "a", one), layer_with(tmp_path / "b", one, two)
    search = SearchPath([first, second])
    assert search.find(one.plan_id) == (one, first)
    assert search.find(two.plan_id) == (two, second)
    assert search.find("0" * 64) is None
    assert (dict(search.hits), search.misses) == ({str(first.root): 1, str(second.root): 1}, 1)


def test_a_hit_in_a_read_only_layer_does_not_touch_the_writable_one(tmp_path: Path) -> None:
    plan = small_plan()
    image = layer_with(tmp_path / "image", plan)
    writable = tmp_path / "never" / "made"
    assert SearchPath([image, RecordingLayer(writable)]).find(plan.plan_id) == (plan, image)
    assert SearchPath([image, RecordingLayer(writable)]).find("0" * 64) is None
    assert not writable.parent.exists()


def test_a_hit_in_the_writable_layer_is_recorded_in_the_mtime_alone(tmp_path: Path) -> None:
    plan = small_plan()
    layer_with(tmp_path, plan)
    path = Layer(tmp_path).path_of(plan.plan_id, plan.build_id)
    set_age(path, 1000)
    before = path.stat().st_mtime_ns
    Layer(tmp_path).find(plan.plan_id)
    assert path.stat().st_mtime_ns == before
    RecordingLayer(tmp_path).read(plan.plan_id, plan.build_id, record_use=False)
    assert path.stat().st_mtime_ns == before
    RecordingLayer(tmp_path).find(plan.plan_id)
    assert path.stat().st_mtime_ns > before + 900 * 10**9


def test_a_layer_that_is_no_folder_or_missing_is_a_miss_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    roots = (tmp_path / "file", tmp_path / "missing", Path("/dev/null/x"))
    for layer in read_only_layers(roots):
        assert layer.find("0" * 64) is None
        assert layer.read("0" * 64, "0" * 64) is None
        assert list(layer.entries()) == []
    assert [record.args for record in caplog.records] == [(root,) for root in roots]


def test_foreign_files_in_a_layer_are_ignored(tmp_path: Path) -> None:
    plan = small_plan()
    layer = layer_with(tmp_path, plan)
    folder = layer.path_of(plan.plan_id, plan.build_id).parent
    (folder / "README").touch()
    (folder / "x.dsaplan").touch()
    (folder.parent / "notes").mkdir()
    assert [entry.plan_id for entry in layer.entries()] == [plan.plan_id]
    assert layer.find(plan.plan_id) == plan
