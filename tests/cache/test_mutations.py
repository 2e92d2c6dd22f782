"""No mutated plan file is accepted by its old digest, none crashes a reader, and none gets past a signed list."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_mutations import GOOD, mutate, resealed, try_all, with_old_digest
from small_plans import elf_header, small_plan

from dsa_planner.cache import bundle, listing
from dsa_planner.cache.layer import Layer, Policy
from dsa_planner.cache.planfile import PlanFile, elf_arch
from dsa_planner.errors import PlanFileError
from dsa_planner.launch_record import LaunchRecord

CORPUS = json.loads((Path(__file__).parent / "corpus.json").read_text())


def test_of_a_hundred_thousand_damaged_files_none_is_accepted() -> None:
    reasons = try_all(100_000, 2, with_old_digest, accept=False)
    assert sum(reasons.values()) == 100_000
    assert len(reasons) >= 4


def test_of_a_hundred_thousand_forged_files_none_crashes_a_reader() -> None:
    reasons = try_all(100_000, 3, lambda data, good: resealed(data), accept=True)
    assert reasons["accepted"] > 1000, "the mutations do not reach the manifest"
    assert len(reasons) > 50


@settings(max_examples=2000, deadline=None)
@given(st.randoms(use_true_random=False), st.sampled_from(GOOD), st.booleans())
def test_the_smallest_file_that_is_accepted_or_crashes_a_reader(
    chance: random.Random, good: bytes, forged: bool
) -> None:
    """As above, with hypothesis, which makes what it finds smaller."""
    mutated = mutate(good, chance)
    data = resealed(mutated) if forged else with_old_digest(mutated, good)
    try:
        plan = PlanFile.decode(data, "here")
    except PlanFileError:
        return
    assert forged or data == good
    assert plan.encode() == data


def test_the_kept_files_are_refused_as_ever() -> None:
    assert len(CORPUS) > 50
    for reason, text in CORPUS.items():
        with pytest.raises(PlanFileError):
            PlanFile.decode(base64.b64decode(text), reason, small_plan(3).plan_id)


def test_of_a_thousand_forged_files_none_is_accepted_in_a_signed_layer(tmp_path: Path) -> None:
    policy = signed_layer(tmp_path)
    good = GOOD[2]
    plan = PlanFile.decode(good, "here")
    path = Layer(tmp_path / "layer").path_of(plan.plan_id, plan.build_id)
    assert Layer(tmp_path / "layer", policy).read(plan.plan_id, plan.build_id) == plan
    chance, would_be_accepted = random.Random(4), 0
    for _ in range(1000):
        data = resealed(mutate(good, chance))
        if data == good:
            continue
        path.write_bytes(data)
        would_be_accepted += Layer(tmp_path / "layer").read(plan.plan_id, plan.build_id) is not None
        assert Layer(tmp_path / "layer", policy).read(plan.plan_id, plan.build_id) is None
    assert would_be_accepted > 3, "the digest alone stops them all"


def test_of_a_thousand_mutated_lists_none_is_accepted_and_none_crashes(tmp_path: Path) -> None:
    policy = signed_layer(tmp_path)
    good = (tmp_path / "layer" / listing.LISTING).read_bytes()
    chance = random.Random(5)
    for _ in range(1000):
        data = mutate(good, chance)
        if data == good:
            continue
        (tmp_path / "layer" / listing.LISTING).write_bytes(data)
        layer = Layer(tmp_path / "layer", policy)
        assert list(layer.entries()) == []
        assert layer.admission().refusal is not None
        for number in range(3):  # without keys the plans are as good as ever
            assert Layer(tmp_path / "layer").find(small_plan(number).plan_id) is not None
        with contextlib.suppress(PlanFileError), bundle.open_bundle(tmp_path / "layer") as opened:
            bundle.verify_bundle(opened)


def signed_layer(tmp_path: Path) -> Policy:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.generate()
    public = key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    (tmp_path / "key.pub").write_bytes(public)
    bundle.export_bundle([small_plan(n, size=20 + 100 * n) for n in range(4)], tmp_path / "layer", key)
    return Policy(trusted_keys=(tmp_path / "key.pub",))


def test_a_forged_launch_record_or_kernel_table_is_refused_at_the_latest_when_it_is_loaded(compiled: PlanFile) -> None:
    """Of a real plan, whose launch record has everything that one can have."""
    chance, accepted = random.Random(6), 0
    good = compiled.without_ptx().encode()
    for _ in range(3000):
        try:
            plan = PlanFile.decode(resealed(mutate(good, chance)), "here")
        except PlanFileError:
            continue
        accepted += 1
        with contextlib.suppress(
            ValueError, KeyError, TypeError
        ):  # of which a plan makes a PlanFileError when it is loaded
            LaunchRecord.parse(plan.launch)
    assert accepted > 100


@pytest.mark.parametrize(
    ("sm", "suffix", "arch"),
    [(90, "a", "sm_90a"), (90, "", "sm_90"), (100, "a", "sm_100a"), (100, "", "sm_100"), (103, "a", "sm_103a")],
)
def test_the_arch_is_read_from_the_elf_header(sm: int, suffix: str, arch: str) -> None:
    assert elf_arch(elf_header(sm, suffix)) == arch


def test_the_elf_header_of_a_real_cubin_names_its_arch(compiled: PlanFile) -> None:
    assert elf_arch(compiled.cubin) == "sm_90a"
    assert elf_arch(b"") is None
    assert elf_arch(b"\x7fELF" + bytes(60)) is None


def test_a_plan_whose_machine_code_is_for_another_arch_is_refused() -> None:
    good = small_plan()
    other = PlanFile.build(
        good.manifest["identity"], good.manifest["build"], good.manifest["kernels"], {"cubin": elf_header(100)}
    ).encode()
    with pytest.raises(PlanFileError, match="its config is for sm_90a, its machine code is sm_100a"):
        PlanFile.decode(other, "here", good.plan_id)
    assert hashlib.sha256(other[:-32]).digest() == other[-32:]
