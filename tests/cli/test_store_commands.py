from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import Command
from signing_keys import key_pair
from small_plans import files, set_age

from dsa_planner.cache.planfile import PlanFile
from dsa_planner.cache.writable import WritableLayer

KILLED = "0123456789abcdef.77.0123456789abcdef"  # the name of a temporary file


@pytest.fixture
def command(tmp_path: Path) -> Command:
    return Command(tmp_path)


@pytest.fixture
def filled(command: Command, compiled: PlanFile) -> Command:
    """With one plan in its writable layer."""
    WritableLayer(command.layer, 1 << 30).publish(compiled, seconds=2.0)
    return command


def other_build(plan: PlanFile, digit: str) -> PlanFile:
    """The plan as another compiler might have made it."""
    packages = dict(plan.manifest["build"]["packages"], **{"nvidia-cutlass-dsl": "4.0.0"})
    build = {"id": digit * 64, "packages": packages}
    return PlanFile.build(plan.manifest["identity"], build, plan.manifest["kernels"], plan.sections)


def test_a_plan_goes_through_a_signed_bundle_to_another_machine(filled: Command, compiled: PlanFile) -> None:
    private, public = key_pair(filled.home)
    out = filled("export", "bundle", "--sign", str(private))
    assert out.stdout.startswith(f"1 plan of {len(compiled.encode())} bytes exported to bundle; signed by key ")
    key = out.stdout.split()[-1]
    out = filled("verify-bundle", "bundle", "--key", str(public))
    assert out.stdout == f"1 intact plan of {len(compiled.encode())} bytes, no fault; signed by key {key}\n"
    other = str(filled.home / "other")
    out = filled("import", "bundle", DSA_PLAN_CACHE_DIR=other, DSA_PLAN_TRUSTED_KEYS=str(public))
    assert out.stdout == f"1 imported; layer {other}\n"
    out = filled("import", "bundle", "--json", DSA_PLAN_CACHE_DIR=other)
    (plan,) = json.loads(out.stdout)["plans"]
    assert (plan["plan_id"], plan["status"], plan["config"]) == (compiled.plan_id, "hit", compiled.config)
    out = filled("precompile", "--topk", "128", "--arch", "sm_90a", "--backend", "default", DSA_PLAN_CACHE_DIR=other)
    assert "1 hit" in out.stdout


def test_with_trusted_keys_jobs_use_signed_layers_alone(filled: Command, compiled: PlanFile) -> None:
    private, public = key_pair(filled.home)
    filled("export", "bundle", "--sign", str(private))
    filled("export", "unsigned")
    script = (
        "from dsa_planner.locate import find_plan; from dsa_planner import envelope\n"
        "find_plan(envelope.plan_config({'topk': 128, 'arch': 'sm_90a'}))"
    )
    for path, found in (("bundle", True), ("unsigned", False), ("", False)):
        out = filled.python(script, DSA_PLAN_PATH=path, DSA_PLAN_TRUSTED_KEYS=str(public))
        assert (out.returncode == 0) == found, out.stderr
        assert f"{filled.layer}: it is not signed" in out.stderr or found
    out = filled("list", DSA_PLAN_TRUSTED_KEYS=str(public))
    assert "1 plan in" in out.stdout, "one's own layer needs no signature for its owner's commands"


def test_a_tar_without_ptx_is_smaller_and_says_what_verify_then_lacks(filled: Command, compiled: PlanFile) -> None:
    filled("export", "all.tar")
    filled("export", "lean.tar", "--no-ptx")
    assert (filled.home / "lean.tar").stat().st_size < (filled.home / "all.tar").stat().st_size / 2
    lean = str(filled.home / "lean")
    filled("import", "lean.tar", DSA_PLAN_CACHE_DIR=lean)
    (row,) = json.loads(filled("list", "--json", DSA_PLAN_CACHE_DIR=lean).stdout)
    assert (row["plan_id"], row["problem"]) == (compiled.plan_id, None)
    line = filled.refused("verify", code=2, DSA_PLAN_CACHE_DIR=lean)
    assert "its file has no PTX to execute; " in line


def test_export_takes_the_filters_of_verify(filled: Command, compiled: PlanFile) -> None:
    filled("export", "one", compiled.plan_id[:12])
    assert "there are none in" in filled.refused("export", "two", "--topk", "256", code=3)
    assert not (filled.home / "two").exists()
    out = filled("export", "three", "--topk", "128", "--arch", "sm_90a", "--json")
    answer = json.loads(out.stdout)
    assert [plan["plan_id"] for plan in answer["plans"]] == [compiled.plan_id]
    assert (answer["bundle"], answer["signed_by"], answer["bytes"]) == ("three", None, len(compiled.encode()))


def test_export_takes_the_build_that_jobs_use_or_all_of_them(filled: Command, compiled: PlanFile) -> None:
    older = other_build(compiled, "f")
    WritableLayer(filled.layer, 1 << 30).publish(older)
    filled("export", "best")
    assert files(filled.home / "best")[1:] == [f"plans-v1/{compiled.plan_id}/{compiled.build_id}.dsaplan"]
    filled("export", "all", "--all-builds")
    assert len(files(filled.home / "all")) == 3
    assert json.loads((filled.home / "all" / "layer.json").read_text())["chosen"] == {
        compiled.plan_id: compiled.build_id
    }
    out = filled("export", "older", "--json", DSA_PLAN_REFUSED_BUILDS=compiled.build_id[:12])
    assert [plan["build_id"] for plan in json.loads(out.stdout)["plans"]] == [older.build_id]


def test_export_refuses_what_is_there_and_wrong_keys(filled: Command) -> None:
    (filled.home / "there").mkdir()
    (filled.home / "there" / "precious").touch()
    line = filled.refused("export", "there", code=2)
    assert line.endswith("/there: it is there and not an empty folder; name a new folder")
    line = filled.refused("export", "new", "--sign", "none", code=2)
    assert line.startswith("key none: it cannot be read (No such file or directory); give an ed25519 private key")
    assert not (filled.home / "new").exists()
    assert "cannot export to /proc/new" in filled.refused("export", "/proc/new", code=5)


def test_a_faulty_bundle_is_exit_code_5_and_every_fault_is_named(filled: Command) -> None:
    filled("export", "bundle")
    path = next((filled.home / "bundle").rglob("*.dsaplan"))
    path.write_bytes(path.read_bytes()[:-1])
    (filled.home / "bundle" / "more").touch()
    out = filled("verify-bundle", "bundle", code=5)
    first, second, last = out.stdout.splitlines()
    assert f"{path.relative_to(filled.home / 'bundle')} of bundle bundle: it is not the file that layer.json" in first
    assert second == "more of bundle bundle: layer.json does not list it; remove it"
    assert last == "0 intact plans of 0 bytes, 2 faults; not signed"
    assert len(json.loads(filled("verify-bundle", "bundle", "--json", code=5).stdout)["problems"]) == 2
    line = filled.refused("import", "bundle", code=5, DSA_PLAN_CACHE_DIR=str(filled.home / "new"))
    assert "(and 1 more); export the bundle again" in line
    assert not (filled.home / "new").exists()
    assert "there is no such file" in filled.refused("verify-bundle", "none", code=2)
    assert "there is no such file" in filled.refused("import", "none", code=2)
    assert "no writable layer" in filled.refused("import", "bundle", code=5, DSA_PLAN_CACHE_DIR="none")


def test_an_unsigned_bundle_is_a_fault_where_keys_are_given(filled: Command) -> None:
    _, public = key_pair(filled.home)
    filled("export", "bundle")
    for arguments, environment in (
        (("--key", str(public)), {}),
        ((), {"DSA_PLAN_TRUSTED_KEYS": str(public)}),
    ):
        out = filled("verify-bundle", "bundle", *arguments, code=5, **environment)
        assert out.stdout.startswith("bundle bundle: it is not signed; export it again with --sign\n")


def test_prune_says_first_and_then_does(filled: Command, compiled: PlanFile) -> None:
    size = len(compiled.encode())
    (filled.layer / "tmp" / KILLED).write_bytes(b"12345")
    set_age(filled.layer / "tmp" / KILLED, 7200)
    before = files(filled.layer)
    out = filled("prune", "--bytes", "0", "--dry-run")
    assert f"{size + 5} bytes would be freed; 0 plans of 0 bytes in {filled.layer}" in out.stdout
    assert "least recently used" in out.stdout
    assert f"tmp/{KILLED}" in out.stdout
    assert files(filled.layer) == before
    answer = json.loads(filled("prune", "--bytes", "0", "--dry-run", "--json").stdout)
    assert (answer["freed_bytes"], answer["left"]) == (size + 5, {"plans": 0, "bytes": 0})
    assert files(filled.layer) == before
    out = filled("prune")
    assert out.stdout.splitlines()[-1] == f"5 bytes freed; 1 plan of {size} bytes in {filled.layer}"
    answer = json.loads(filled("prune", "--bytes", "0", "--json").stdout)
    assert [plan["plan_id"] for plan in answer["evicted"]] == [compiled.plan_id]
    assert files(filled.layer) == []
    assert "it has to be a whole number of at least 0" in filled.refused("prune", "--bytes", "1G", code=2)
    assert filled("prune", DSA_PLAN_CACHE_DIR=str(filled.home / "none")).stdout.startswith("0 bytes freed; 0 plans")


def test_prune_removes_what_was_set_aside_when_told(filled: Command, compiled: PlanFile) -> None:
    layer = WritableLayer(filled.layer, 1 << 30)
    path = layer.path_of(compiled.plan_id, compiled.build_id)
    path.write_bytes(b"damaged")
    assert layer.find(compiled.plan_id) is None
    assert filled("prune").stdout.startswith("0 bytes freed")
    out = filled("prune", "--quarantine")
    assert "a damaged file" in out.stdout
    assert files(filled.layer) == []


def test_stats_count_what_a_layer_holds_and_what_became_of_it(filled: Command, compiled: PlanFile) -> None:
    filled("export", "image")
    layer = WritableLayer(filled.layer, 1 << 30)
    layer.publish(other_build(compiled, "f"))
    path = layer.path_of(compiled.plan_id, "f" * 64)
    path.write_bytes(b"damaged")
    image, own = json.loads(filled("stats", "--json", DSA_PLAN_PATH="image").stdout)
    size = len(compiled.encode())
    assert image == {
        "layer": str(filled.home / "image"), "mode": "read-only", "plans": 1, "builds": 1, "bytes": size,
        "damaged": 0, "refused": 0, "unusable": None,
    }  # fmt: skip
    assert own == {
        "layer": str(filled.layer), "mode": "writable", "plans": 1, "builds": 1, "bytes": size, "damaged": 1, "refused": 0,
        "unusable": None, "limit_bytes": 1 << 30, "quarantine": 0, "leftovers": 0,
        "built": 1, "imported": 1, "evicted": 0, "quarantined": 0,
    }  # fmt: skip
    assert path.read_bytes() == b"damaged", "looking changes nothing"
    assert layer.read(compiled.plan_id, "f" * 64) is None
    (own,) = json.loads(filled("stats", "--json").stdout)
    assert (own["damaged"], own["quarantine"], own["quarantined"]) == (0, 1, 1)
    out = filled("stats")
    assert "quarantined  1" in out.stdout
    assert filled("stats", DSA_PLAN_CACHE_DIR="none").stdout == "no layer\n"


def test_a_miss_is_explained_by_the_nearest_plans_and_what_is_unusable(filled: Command, compiled: PlanFile) -> None:
    hopper = ("--arch", "sm_90a", "--backend", "default")
    out = filled("explain", "--miss", "--topk", "256", *hopper)
    assert "; in no layer" in out.stdout
    assert f"  nearest: plan {compiled.plan_id[:12]} in {filled.layer}: topk is 128, not 256" in out.stdout
    answer = json.loads(filled("explain", "--miss", "--topk", "256", "--json", *hopper).stdout)
    (near,) = answer[0]["nearest"]
    assert near["differences"] == [{"field": "topk", "asked": 256, "found": 128}]
    out = filled("explain", "--miss", "--topk", "128", *hopper)
    assert f"in {filled.layer}" in out.stdout
    assert "nearest" not in out.stdout
    filled.layer.chmod(0o777)
    out = filled("explain", "--miss", "--topk", "128", *hopper)
    assert f"  unusable: {filled.layer}: everybody may write it" in out.stdout
    assert "  there is no other plan in" in out.stdout
    out = filled("explain", "--miss", "--topk", "128", *hopper, DSA_PLAN_CACHE_DIR="none")
    assert "there is no other plan in no layer" in out.stdout
    assert "add for example --topk 1024" in filled.refused("explain", "--miss", code=2)


def test_a_plan_of_another_version_of_the_kernels_is_explained_as_that(filled: Command, compiled: PlanFile) -> None:
    identity = dict(compiled.manifest["identity"], sources="0" * 64)
    old = PlanFile.build(identity, compiled.manifest["build"], compiled.manifest["kernels"], compiled.sections)
    layer = str(filled.home / "old")
    WritableLayer(Path(layer), 1 << 30).publish(old)
    out = filled(
        "explain", "--miss", "--topk", "128", "--arch", "sm_90a", "--backend", "default", DSA_PLAN_CACHE_DIR=layer
    )
    assert (
        f"  nearest: plan {old.plan_id[:12]} in {layer}: "
        "the kernel's sources are those of another version of dsa-planner"
    ) in out.stdout


def test_a_refused_build_is_shown_and_not_used(filled: Command, compiled: PlanFile) -> None:
    refused = {"DSA_PLAN_REFUSED_BUILDS": compiled.build_id[:12]}
    out = filled("list", **refused)
    assert "DSA_PLAN_REFUSED_BUILDS refuses its build" in out.stdout
    assert "0 plans, 1 refused in" in out.stdout
    line = filled.refused("precompile", "--topk", "256", "--arch", "sm_90a", code=1, **refused)
    assert line.startswith(f"compiler build {compiled.build_id[:16]}: DSA_PLAN_REFUSED_BUILDS refuses it")
    line = filled.refused("list", code=2, DSA_PLAN_REFUSED_BUILDS="abc")
    assert line.startswith("DSA_PLAN_REFUSED_BUILDS='abc': an entry is a build id, or its first 12 or more")
    line = filled.refused("list", code=2, DSA_PLAN_PERMISSIONS="loose")
    assert line == "DSA_PLAN_PERMISSIONS='loose': it has to be strict or any; unset it for the default"
