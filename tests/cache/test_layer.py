from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from small_plans import files, set_age, small_plan

from dsa_planner.cache.layer import Layer, RecordingLayer, version_key
from dsa_planner.cache.planfile import MAX_BYTES
from dsa_planner.cache.search import SearchPath
from dsa_planner.cache.writable import WritableLayer

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


REASONS = {
    "huge": f"it has {MAX_BYTES + 1} bytes, more than {MAX_BYTES}",
    "folder": "it cannot be read (Is a directory)",
    "fifo": "it is not a regular file",
    "empty": "it has 0 bytes, too few",
    "another plan": "it holds plan",
    "another build": "it holds build",
    "dangling link": "it is a link that leads nowhere",
}


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
    "how", ["flipped", "truncated", "empty", "another plan", "another build", "folder", "fifo", "huge", "dangling link"]
)
def test_a_damaged_file_is_skipped_named_and_left_in_a_read_only_layer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    plan = small_plan()
    first, second = layer_with(tmp_path / "1", plan), layer_with(tmp_path / "2", plan)
    path = first.path_of(plan.plan_id, plan.build_id)
    damage(path, how)
    with caplog.at_level(logging.WARNING):
        search = SearchPath([first.root, second.root])
        found = search.find(plan.plan_id)
    assert found == (plan, search.layers[1])
    assert str(path) in caplog.text
    assert list(search.layers[0].damaged) == [path]
    assert REASONS.get(how, "") in search.layers[0].damaged[path]
    assert path.exists() or path.is_symlink()


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (Path.touch, "it is not a folder"),
        (os.mkfifo, "it is not a folder"),
        (lambda path: path.symlink_to("/nowhere"), "it is a link that leads nowhere"),
    ],
)
def test_what_lies_in_the_place_of_a_plans_folder_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, make: Callable[[Path], None], reason: str
) -> None:
    plan = small_plan()
    folder = layer_with(tmp_path, small_plan(1)).path_of(plan.plan_id, plan.build_id).parent
    make(folder)
    for search in (
        lambda layer: layer.find(plan.plan_id),
        lambda layer: layer.read(plan.plan_id, plan.build_id),
        lambda layer: [entry for entry in layer.entries() if entry.plan_id == plan.plan_id] or None,
    ):
        for layer in (Layer(tmp_path), RecordingLayer(tmp_path)):
            caplog.clear()
            assert search(layer) is None
            assert layer.damaged == {folder: reason}
            assert f"{folder}: {reason}; skipped" in caplog.text
    assert os.path.lexists(folder)


def test_a_link_that_leads_nowhere_is_among_the_entries(tmp_path: Path) -> None:
    plan = small_plan()
    layer = layer_with(tmp_path, plan)
    damage(layer.path_of(plan.plan_id, plan.build_id), "dangling link")
    assert [entry.plan_id for entry in layer.entries()] == [plan.plan_id]


def test_a_damaged_file_in_the_writable_layer_is_set_aside(tmp_path: Path) -> None:
    plan = small_plan()
    writable = WritableLayer(tmp_path, BIG)
    writable.publish(plan)
    path = writable.path_of(plan.plan_id, plan.build_id)
    damage(path, "flipped")
    assert writable.find(plan.plan_id) is None
    assert not path.exists()
    assert {name.partition("/")[0] for name in files(tmp_path)} == {"quarantine"}
    assert list(writable.quarantine().values()) == ["its digest does not match its content, so it is damaged"]
    assert writable.index.totals()["quarantined"] == 1
    writable.publish(plan)
    assert writable.find(plan.plan_id) == plan


def test_layers_are_searched_in_order(tmp_path: Path) -> None:
    one, two = small_plan(1), small_plan(2)
    layer_with(tmp_path / "a", one)
    layer_with(tmp_path / "b", one, two)
    search = SearchPath([tmp_path / "a", tmp_path / "b"])
    assert search.find(one.plan_id) == (one, search.layers[0])
    assert search.find(two.plan_id) == (two, search.layers[1])
    assert search.find("0" * 64) is None


def test_a_folder_that_is_named_twice_is_one_layer_and_the_writable_one_where_it_is_that(tmp_path: Path) -> None:
    plan = small_plan()
    layer_with(tmp_path / "a", plan)
    (tmp_path / "link").symlink_to(tmp_path / "a")
    writable = RecordingLayer(tmp_path / "b")
    search = SearchPath([tmp_path / "a", tmp_path / "link", tmp_path / "b", tmp_path / "a" / "."], writable)
    assert [layer.root for layer in search.layers] == [tmp_path / "a", tmp_path / "b"]
    assert search.layers[1] is writable


def test_of_several_builds_only_the_one_that_is_used_counts_as_used(tmp_path: Path) -> None:
    old, new = small_plan(build="f", version="4.8.1"), small_plan(build="a", version="4.10.0")
    layer_with(tmp_path, new, old)
    recording = RecordingLayer(tmp_path)
    paths = [recording.path_of(plan.plan_id, plan.build_id) for plan in (old, new)]
    for path in paths:
        os.utime(path, (1, 1))
    recording.find(old.plan_id)
    assert [path.stat().st_mtime > 1 for path in paths] == [False, True]


@pytest.mark.parametrize(
    ("version", "key"),
    [
        ("4.8.1", (4, 8, 1)), ("4.10.0", (4, 10, 0)), ("5.0.0rc1", (5, 0, 0)), ("4.8.1+cu13", (4, 8, 1)), ("", ()), ("x", ()),
        ("4.²", (4,)), ("4." + "9" * 5000, (4,)),
    ],
)  # fmt: skip
def test_versions_are_ordered_by_their_numbers(version: str, key: tuple[int, ...]) -> None:
    assert version_key(version) == key


def test_a_hit_in_a_read_only_layer_does_not_touch_the_writable_one(tmp_path: Path) -> None:
    plan = small_plan()
    image = layer_with(tmp_path / "image", plan)
    writable = tmp_path / "never" / "made"
    search = SearchPath([image.root], RecordingLayer(writable))
    assert search.find(plan.plan_id) == (plan, search.layers[0])
    assert search.find("0" * 64) is None
    assert not writable.parent.exists()
    assert not search.layers[1].damaged, "a writable layer need not exist"


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
    (tmp_path / "other").mkdir()
    roots = {
        tmp_path / "file": "it is not a folder",
        tmp_path / "missing": "there is no such folder",
        tmp_path / "other": "there is no such folder",
        Path("/dev/null/x"): "it cannot be read (Not a directory)",
        tmp_path / ("x" * 300): "it cannot be listed (File name too long)",
    }
    for root, reason in roots.items():
        caplog.clear()
        for layer in (Layer(root), RecordingLayer(root)):
            assert layer.find("0" * 64) is None
            assert layer.read("0" * 64, "0" * 64) is None
            assert list(layer.entries()) == []
        assert reason in caplog.text, root
        assert str(root) in caplog.text


def test_a_layer_that_may_not_be_read_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    if os.geteuid() != 0:
        pytest.skip("becoming another user needs root")
    plan = small_plan()
    layer_with(tmp_path / "layer", plan)
    (tmp_path / "layer" / "plans-v1").chmod(0o700)
    for folder in (*list(tmp_path.parents)[:-2], tmp_path):
        folder.chmod(folder.stat().st_mode | 0o055)
    script = (
        "import os, sys; from pathlib import Path; from dsa_planner.cache.layer import Layer\n"
        "os.setuid(65534); layer = Layer(Path(sys.argv[1]))\n"
        "assert layer.find(sys.argv[2]) is None and list(layer.entries()) == []; print(list(layer.damaged.values()))"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "layer"), plan.plan_id]
    environment = {"PYTHONPATH": os.pathsep.join(sys.path)}
    out = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert out.returncode == 0, out.stderr
    assert "it cannot be listed (Permission denied)" in out.stdout


def test_foreign_files_in_a_layer_are_ignored(tmp_path: Path) -> None:
    plan = small_plan()
    layer = layer_with(tmp_path, plan)
    folder = layer.path_of(plan.plan_id, plan.build_id).parent
    (folder / "README").touch()
    (folder / "x.dsaplan").touch()
    (folder.parent / "notes").mkdir()
    assert [entry.plan_id for entry in layer.entries()] == [plan.plan_id]
    assert layer.find(plan.plan_id) == plan
