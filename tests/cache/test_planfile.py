from __future__ import annotations

import copy
import hashlib
import json
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_plans import elf_header, kernel_entry

from dsa_planner.cache.canonical import canonical_json
from dsa_planner.cache.planfile import MAGIC, PlanFile, plan_id
from dsa_planner.errors import PlanFileError

IDENTITY = {
    "config": {"arch": "sm_90a", "topk": 128, "backend": "default", "deterministic": False},
    "sources": "s" * 64,
    "options": "--opt-level 3",
    "launch": {"kernels": [{"name": "k"}]},
}
CUBIN = elf_header()
BUILD = {"id": "b" * 64, "packages": {"nvidia-cutlass-dsl": "4.8.1"}}


def sample() -> PlanFile:
    return PlanFile.build(IDENTITY, BUILD, [kernel_entry("k")], {"ptx": b".version 8.8\n", "cubin": CUBIN})


def with_manifest(change: Any) -> bytes:
    """A file with a changed manifest and a right digest: what a forger writes."""
    manifest = copy.deepcopy(dict(sample().manifest))
    change(manifest)
    return sealed(canonical_json(manifest), b"".join(sample().sections.values()))


def sealed(manifest: bytes, sections: bytes) -> bytes:
    body = MAGIC + struct.pack("<I", len(manifest)) + manifest + sections
    return body + hashlib.sha256(body).digest()


def test_a_file_gives_back_what_went_in() -> None:
    plan = PlanFile.decode(sample().encode(), "here", sample().plan_id)
    assert plan == sample()
    assert plan.cubin == CUBIN
    assert plan.config == IDENTITY["config"]
    assert plan.build_id == "b" * 64


def test_bytes_do_not_depend_on_the_order_of_sections_or_keys() -> None:
    one = PlanFile.build(IDENTITY, BUILD, [], {"cubin": b"a", "ptx": b"b"})
    other = PlanFile.build(
        dict(reversed(IDENTITY.items())), dict(reversed(BUILD.items())), [], {"ptx": b"b", "cubin": b"a"}
    )
    assert one.encode() == other.encode()


def test_the_layout_is_the_documented_one() -> None:
    data = sample().encode()
    assert data[:8] == b"DSAPLAN\x01"
    (size,) = struct.unpack_from("<I", data, 8)
    manifest = json.loads(data[12 : 12 + size])
    assert [entry["name"] for entry in manifest["sections"]] == ["cubin", "ptx"]
    assert data[12 + size : -32] == CUBIN + b".version 8.8\n"
    assert data[-32:] == hashlib.sha256(data[:-32]).digest()


def test_the_plan_id_ignores_who_built_it() -> None:
    other = PlanFile.build(IDENTITY, {"id": "c" * 64, "packages": {}}, [], {"cubin": b"other"})
    assert other.plan_id == sample().plan_id == plan_id(IDENTITY)


@given(st.data())
def test_any_flipped_bit_is_noticed(data: st.DataObject) -> None:
    good = bytearray(sample().encode())
    position = data.draw(st.integers(0, len(good) - 1))
    good[position] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(PlanFileError, match="plan file here"):
        PlanFile.decode(bytes(good), "here", sample().plan_id)


@given(st.integers(0, len(sample().encode()) - 1))
def test_any_truncation_is_noticed(size: int) -> None:
    with pytest.raises(PlanFileError):
        PlanFile.decode(sample().encode()[:size], "here")


def test_appended_bytes_are_noticed() -> None:
    with pytest.raises(PlanFileError):
        PlanFile.decode(sample().encode() + b"\0", "here")


def test_a_plan_under_another_id_is_refused_by_name() -> None:
    with pytest.raises(PlanFileError, match=f"it holds plan {sample().plan_id}, not plan {'0' * 64}"):
        PlanFile.decode(sample().encode(), "here", "0" * 64)


def test_another_format_version_is_named() -> None:
    data = bytearray(sample().encode())
    data[7] = 2
    with pytest.raises(PlanFileError, match="format version 2, this version reads 1"):
        PlanFile.decode(bytes(data), "here")


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.pop("build"),
        lambda m: m.update(extra=1),
        lambda m: m.update(identity=[]),
        lambda m: m["identity"].pop("launch"),
        lambda m: m["identity"].update(more=1),
        lambda m: m["build"].update(id=7),
        lambda m: m["build"].update(packages=["x"]),
        lambda m: m["build"]["packages"].update({"nvidia-cutlass-dsl": 4}),
        lambda m: m["identity"].update(options={}),
        lambda m: m["identity"].update(launch=7),
        lambda m: m["identity"].update(config=7),
        lambda m: m["identity"]["config"].update(topk=[1]),
        lambda m: m["identity"]["launch"].update(kernels=7),
        lambda m: m["identity"]["launch"].pop("kernels"),
        lambda m: m["identity"]["launch"]["kernels"].append({"name": "another"}),
        lambda m: m.update(kernels=[]),
        lambda m: m.update(kernels=[7]),
        lambda m: m["kernels"][0].update(name="other"),
        lambda m: m["kernels"][0].pop("registers"),
        lambda m: m["kernels"][0].update(colour=1),
        lambda m: m["kernels"][0].update(registers="7"),
        lambda m: m["kernels"][0].update(registers=True),
        lambda m: m["kernels"][0].update(parameters=[[0]]),
        lambda m: m["kernels"][0].update(parameters=[7]),
        lambda m: m.update(kernels={}),
        lambda m: m.update(sections=[]),
        lambda m: m["sections"].reverse() or m["sections"][0].update(bytes=-1),
        lambda m: m["sections"][0].update(bytes=True),
        lambda m: m["sections"][0].update(bytes=10**9),
        lambda m: m["sections"][0].update(name="ptx"),
        lambda m: m["sections"].append({"name": "more", "bytes": 0, "name2": 1}) or m["sections"][2].pop("bytes"),
    ],
)
def test_a_malformed_manifest_with_a_right_digest_is_refused(change: Any) -> None:
    with pytest.raises(PlanFileError, match="plan file here: its manifest cannot be read"):
        PlanFile.decode(with_manifest(change), "here")


@pytest.mark.parametrize(
    "manifest", [b"", b"{", b"[]", b"null", b"\xff", b"[" * 100_000, b'{"a":1e999}', b'"' + b"x" * 99]
)
def test_a_manifest_that_is_no_object_is_refused(manifest: bytes) -> None:
    with pytest.raises(PlanFileError):
        PlanFile.decode(sealed(manifest, b""), "here")


def test_a_plan_without_machine_code_is_refused() -> None:
    data = PlanFile.build(IDENTITY, BUILD, [kernel_entry("k")], {"ptx": b"x"}).encode()
    with pytest.raises(PlanFileError, match="there is a section cubin"):
        PlanFile.decode(data, "here")


def test_a_manifest_that_is_not_canonical_is_refused() -> None:
    loose = json.dumps(dict(sample().manifest), indent=1).encode()
    with pytest.raises(PlanFileError, match="canonical"):
        PlanFile.decode(sealed(loose, b"".join(sample().sections.values())), "here")


def test_a_manifest_length_beyond_the_file_is_refused() -> None:
    body = MAGIC + struct.pack("<I", 2**32 - 1) + b"{}"
    with pytest.raises(PlanFileError, match="longer than the file"):
        PlanFile.decode(body + hashlib.sha256(body).digest(), "here")


def test_nothing_of_time_host_user_or_path_is_in_a_real_plan(compiled: PlanFile) -> None:
    import getpass
    import os
    import socket
    import tempfile

    data = compiled.encode()
    for secret in (socket.gethostname(), os.getcwd(), tempfile.gettempdir(), os.path.expanduser("~"), "dsa-plan-"):
        assert len(secret) < 4 or secret.encode() not in data, secret
    assert getpass.getuser() == "root" or getpass.getuser().encode() not in data
