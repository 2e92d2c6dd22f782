from __future__ import annotations

import hashlib
import io
import os
import shutil
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from signing_keys import key_pair
from small_plans import files, set_age, small_plan

from dsa_planner.cache import bundle, listing
from dsa_planner.cache.bundle import export_bundle, import_bundle, open_bundle, verify_bundle
from dsa_planner.cache.layer import Layer, Policy
from dsa_planner.cache.planfile import PlanFile
from dsa_planner.cache.writable import WritableLayer
from dsa_planner.errors import CacheError, PackageMissingError, PlanFileError, UnsupportedError

BIG = 1 << 30
PLANS = [small_plan(n, size=100 * n) for n in range(3)]
TARGETS = ("out", "out.tar")


def report_of(place: Path, *trusted: Path) -> bundle.Report:
    with open_bundle(place) as opened:
        return verify_bundle(opened, trusted)


def import_from(place: Path, layer: WritableLayer, *trusted: Path) -> list[bundle.Imported]:
    with open_bundle(place) as opened:
        return import_bundle(opened, layer, trusted)


def problems(place: Path, *trusted: Path) -> str:
    return "\n".join(map(str, report_of(place, *trusted).problems))


def damaged_tar(
    source: Path, target: Path, change: Callable[[tarfile.TarInfo, bytes], tuple[tarfile.TarInfo, bytes]]
) -> None:
    with tarfile.open(source) as old, tarfile.open(target, "w") as new:
        for member in old:
            file = old.extractfile(member)
            member, data = change(member, file.read() if file else b"")
            member.size = len(data)
            new.addfile(member, io.BytesIO(data))


# --- export -----------------------------------------------------------------------------------------------------------


def test_a_bundle_is_a_layer(tmp_path: Path) -> None:
    done = export_bundle(PLANS, tmp_path / "out")
    assert (done.plans, done.bytes, done.key) == (3, sum(len(plan.encode()) for plan in PLANS), None)
    layer = Layer(tmp_path / "out")
    assert [layer.find(plan.plan_id) for plan in PLANS] == PLANS
    assert files(tmp_path / "out") == sorted(
        ["layer.json", *(f"plans-v1/{plan.plan_id}/{plan.build_id}.dsaplan" for plan in PLANS)]
    )
    assert os.listdir(tmp_path) == ["out"]


def state(folder: Path) -> list[tuple[str, int, int, bytes]]:
    """Names, modes, times and contents of all below a folder."""
    found = []
    for path in sorted(folder.rglob("*")):
        info = path.stat()
        found.append(
            (str(path.relative_to(folder)), info.st_mode, info.st_mtime_ns, b"" if path.is_dir() else path.read_bytes())
        )
    return found


def test_the_same_plans_give_the_same_bytes_in_whatever_order_mask_and_folder(tmp_path: Path) -> None:
    private, _ = key_pair(tmp_path)
    key = listing.read_private_key(private)
    (tmp_path / "elsewhere").mkdir()
    export_bundle(PLANS, tmp_path / "one", key)
    export_bundle(PLANS, tmp_path / "one.tar", key)
    mask = os.umask(0o077)
    try:
        export_bundle(PLANS[::-1], tmp_path / "elsewhere" / "two", key)
        export_bundle(PLANS[::-1], tmp_path / "elsewhere" / "two.tar", key)
    finally:
        os.umask(mask)
    assert state(tmp_path / "one") == state(tmp_path / "elsewhere" / "two")
    assert (tmp_path / "one.tar").read_bytes() == (tmp_path / "elsewhere" / "two.tar").read_bytes()
    with tarfile.open(tmp_path / "one.tar") as archive:
        assert {(m.mtime, m.uid, m.gid, m.uname, m.gname) for m in archive} == {(0, 0, 0, "", "")}
        archive.extractall(tmp_path / "extracted", filter="data")
    assert [(n, d) for n, _, _, d in state(tmp_path / "extracted")] == [
        (n, d) for n, _, _, d in state(tmp_path / "one")
    ]


def test_everybody_may_read_a_bundle_and_its_owner_alone_may_write_it(tmp_path: Path) -> None:
    mask = os.umask(0o077)
    try:
        export_bundle(PLANS, tmp_path / "out")
    finally:
        os.umask(mask)
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "out").rglob("*") if path.is_file()}
    folders = {
        path.stat().st_mode & 0o777 for path in (tmp_path / "out", *(tmp_path / "out").rglob("*")) if path.is_dir()
    }
    assert (modes, folders) == ({0o644}, {0o755})


@pytest.mark.parametrize("name", TARGETS)
def test_an_export_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    target = tmp_path / name
    if name == "out.tar":
        export_bundle(PLANS[:1], target)
    before = target.read_bytes() if target.exists() else None

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CacheError, match=f"cannot export to {target}: No space left on device; name a place"):
        export_bundle(PLANS, target)
    assert (target.read_bytes() if target.exists() else None) == before
    assert os.listdir(tmp_path) == ([name] if before else [])


def test_an_export_replaces_a_tar_file_and_an_empty_folder_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    for _ in range(2):
        export_bundle(PLANS, tmp_path / "out.tar")
    export_bundle(PLANS, tmp_path / "out")
    with pytest.raises(UnsupportedError, match="it is there and not an empty folder; name a new folder"):
        export_bundle(PLANS, tmp_path / "out")
    (tmp_path / "file").touch()
    with pytest.raises(UnsupportedError, match="not an empty folder"):
        export_bundle(PLANS, tmp_path / "file")
    (tmp_path / "folder.tar").mkdir()
    with pytest.raises(UnsupportedError, match="not a regular file"):
        export_bundle(PLANS, tmp_path / "folder.tar")


def test_what_killed_exports_left_goes_when_it_is_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (".out.77.0123abcd.tmp", ".other.77.0123abcd.tmp"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "plan").touch()
    export_bundle(PLANS, tmp_path / "out")
    assert len(os.listdir(tmp_path)) == 3, "an hour has not passed"
    monkeypatch.setattr(bundle, "TEMPORARY_SECONDS", -1)
    shutil.rmtree(tmp_path / "out")
    export_bundle(PLANS, tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == [".other.77.0123abcd.tmp", "out"]


def test_of_several_builds_the_chosen_one_is_used_whatever_the_compilers_version(tmp_path: Path) -> None:
    old, new = small_plan(build="f", version="4.8.1"), small_plan(build="a", version="4.10.0")
    export_bundle([old, new], tmp_path / "newest")
    export_bundle([old, new], tmp_path / "chosen", chosen={old.plan_id: old.build_id})
    assert Layer(tmp_path / "newest").find(old.plan_id) == new
    assert Layer(tmp_path / "chosen").find(old.plan_id) == old
    assert Layer(tmp_path / "chosen", Policy(refused_builds=("f" * 12,))).find(old.plan_id) == new
    (tmp_path / "chosen" / "layer.json").write_bytes(b"damaged")
    assert Layer(tmp_path / "chosen").find(old.plan_id) == new


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for one small plan."""
    place = tmp_path / "full"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=48k,mode=700", "none", str(place)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("mounting a tmpfs needs root")
    yield place
    subprocess.run(["umount", str(place)], check=True)


@pytest.mark.parametrize("name", TARGETS)
def test_an_export_to_a_full_file_system_leaves_nothing(full: Path, name: str) -> None:
    with pytest.raises(CacheError, match="No space left on device; name a place that can be written"):
        export_bundle([small_plan(1), small_plan(2, size=200_000)], full / name)
    assert os.listdir(full) == []


def test_an_import_into_a_full_file_system_keeps_what_is_there(full: Path, tmp_path: Path) -> None:
    layer = WritableLayer(full / "layer", BIG)
    layer.publish(small_plan(9))
    export_bundle([small_plan(1, size=200_000)], tmp_path / "out")
    with pytest.raises(CacheError, match="No space left on device; free some space"):
        import_from(tmp_path / "out", layer)
    assert layer.find(small_plan(9).plan_id) == small_plan(9)
    assert os.listdir(layer.root / "tmp") == []


# --- checks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TARGETS)
def test_an_intact_bundle_has_no_fault(tmp_path: Path, name: str) -> None:
    private, public = key_pair(tmp_path)
    key = listing.read_private_key(private)
    export_bundle(PLANS, tmp_path / name, key)
    report = report_of(tmp_path / name, public)
    assert report.problems == ()
    assert len(report.plans) == 3
    assert report.signed_by == listing.key_id(key.public_key())
    assert report_of(tmp_path / name).signed_by is None, "nobody asked"


def test_keys_of_openssh_sign_and_check_too(tmp_path: Path) -> None:
    private, public = key_pair(tmp_path, ssh=True)
    export_bundle(PLANS, tmp_path / "out", listing.read_private_key(private))
    assert report_of(tmp_path / "out", public).problems == ()


def test_the_wrong_key_is_named(tmp_path: Path) -> None:
    private, public = key_pair(tmp_path)
    _, other = key_pair(tmp_path, "other")
    for path, read, rule in (
        (public, listing.read_private_key, "it is not an ed25519 private key"),
        (private, listing.read_public_key, "it is not an ed25519 public key"),
        (tmp_path / "none", listing.read_public_key, "it cannot be read (No such file or directory)"),
    ):
        with pytest.raises(UnsupportedError) as error:
            read(path)
        assert str(error.value).startswith(f"key {path}: {rule}; give an ed25519 p")
    key = listing.read_private_key(private)
    export_bundle(PLANS, tmp_path / "out", key)
    mine = listing.key_id(key.public_key())
    assert f"it is signed by key {mine}, which is not one of the trusted keys" in problems(tmp_path / "out", other)
    assert problems(tmp_path / "out", other, public) == ""


def test_an_encrypted_or_an_rsa_key_is_refused(tmp_path: Path) -> None:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ed25519, rsa

    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    secret = serialization.BestAvailableEncryption(b"secret")
    for name, data in {
        "encrypted": ed25519.Ed25519PrivateKey.generate().private_bytes(pem, pkcs8, secret),
        "rsa": rsa.generate_private_key(65537, 2048).private_bytes(pem, pkcs8, serialization.NoEncryption()),
    }.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(UnsupportedError, match=r"it is not an ed25519 private key; give .* unencrypted"):
            listing.read_private_key(tmp_path / name)


def test_without_the_cryptography_package_nothing_passes_as_signed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    private, public = key_pair(tmp_path)
    export_bundle(PLANS, tmp_path / "out", listing.read_private_key(private))
    import sys

    for name in [name for name in sys.modules if name.startswith("cryptography")]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(PackageMissingError, match=r"pip install 'dsa-planner\[sign\]'"):
        report_of(tmp_path / "out", public)
    layer = Layer(tmp_path / "out", Policy(trusted_keys=(public,)))
    assert layer.find(PLANS[0].plan_id) is None
    assert "cryptography" in (layer.admission().refusal or "")


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a flipped byte": (
        lambda path: path.write_bytes(path.read_bytes()[:-40] + b"\xee" + path.read_bytes()[-39:]),
        "it is not the file that layer.json lists",
    ),
    "a missing file": (lambda path: path.unlink(), "layer.json lists it, and it is not there"),
    "another plan under the name": (
        lambda path: path.write_bytes(small_plan(9).encode()), "it is not the file that layer.json lists",
    ),
    "a plan that nobody listed": (
        lambda path: (path.parent.parent / ("9" * 64)).mkdir()
        or (path.parent.parent / ("9" * 64) / path.name).write_bytes(b""),
        f"plans-v1/{'9' * 64}/{'b' * 64}.dsaplan of bundle ",
    ),
    "a link": (lambda path: (path.parent / "link").symlink_to("/etc"), "/link of bundle "),
    "a list that is not canonical": (
        lambda path: (path.parents[2] / "layer.json").write_bytes(b" " + (path.parents[2] / "layer.json").read_bytes()),
        "it is not in canonical form",
    ),
    "a list of another format": (
        lambda path: (path.parents[2] / "layer.json").write_bytes(b'{"chosen":{},"format":2,"plans":{}}'),
        "it is not of format 1",
    ),
    "a list with a path": (
        lambda path: (path.parents[2] / "layer.json").write_bytes(
            listing.Listing({"../../etc/passwd": "0" * 64}, {}).encode()
        ),
        "it names something else than plan and build ids",
    ),
    "a list that chooses what it lacks": (
        lambda path: (path.parents[2] / "layer.json").write_bytes(listing.Listing({}, {"a" * 64: "b" * 64}).encode()),
        "it chooses a build that it does not list",
    ),
    "no list": (lambda path: (path.parents[2] / "layer.json").unlink(), "it has no layer.json"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_folder_is_named_and_nothing_of_it_is_imported(tmp_path: Path, fault: str) -> None:
    change, reason = FAULTS[fault]
    export_bundle(PLANS, tmp_path / "out")
    change(Layer(tmp_path / "out").path_of(PLANS[1].plan_id, PLANS[1].build_id))
    layer = WritableLayer(tmp_path / "layer", BIG)
    with pytest.raises(PlanFileError) as error:
        import_from(tmp_path / "out", layer)
    assert reason in str(error.value)
    assert not layer.root.exists()


def test_a_forger_who_makes_digests_and_list_right_is_stopped_by_the_signature_alone(tmp_path: Path) -> None:
    private, public = key_pair(tmp_path)
    export_bundle(PLANS, tmp_path / "out", listing.read_private_key(private))
    forged = PlanFile.build(
        PLANS[1].manifest["identity"], PLANS[1].manifest["build"], PLANS[1].manifest["kernels"],
        {"cubin": PLANS[1].cubin + b"evil"},
    )  # fmt: skip
    path = Layer(tmp_path / "out").path_of(forged.plan_id, forged.build_id)
    path.write_bytes(forged.encode())
    assert Layer(tmp_path / "out").find(forged.plan_id) == forged, "the digest is no signature"
    policy = Policy(trusted_keys=(public,))
    layer = Layer(tmp_path / "out", policy)
    assert layer.find(forged.plan_id) is None
    assert layer.damaged == {path: "it is not the file that the signed list of its layer names"}
    assert layer.find(PLANS[0].plan_id) == PLANS[0], "the others are as good as ever"
    digests = {
        f"{p.plan_id}/{p.build_id}": hashlib.sha256(p.encode()).hexdigest() for p in (PLANS[0], forged, PLANS[2])
    }
    (tmp_path / "out" / "layer.json").write_bytes(listing.Listing(digests, {}).encode())
    layer = Layer(tmp_path / "out", policy)
    assert [layer.find(plan.plan_id) for plan in PLANS] == [None] * 3
    assert layer.damaged == {tmp_path / "out": "its signature is not that of its layer.json"}
    assert "its signature is not that of its layer.json" in problems(tmp_path / "out", public)
    assert problems(tmp_path / "out") == "", "without keys nobody can tell"


def test_a_plan_added_to_a_signed_layer_is_inert(tmp_path: Path) -> None:
    private, public = key_pair(tmp_path)
    export_bundle(PLANS[:2], tmp_path / "out", listing.read_private_key(private))
    layer = Layer(tmp_path / "out", Policy(trusted_keys=(public,)))
    path = layer.path_of(PLANS[2].plan_id, PLANS[2].build_id)
    path.parent.mkdir()
    path.write_bytes(PLANS[2].encode())
    assert layer.find(PLANS[2].plan_id) is None
    assert layer.damaged == {path: "the signed list of its layer does not name it"}


@pytest.mark.parametrize(
    ("remove", "reason"),
    [
        ("layer.sig", "it is not signed, it has no layer.sig, and DSA_PLAN_TRUSTED_KEYS is set"),
        ("layer.json", "it is not signed, it has no layer.json, and DSA_PLAN_TRUSTED_KEYS is set"),
    ],
)
def test_an_unsigned_layer_is_inert_and_named(tmp_path: Path, remove: str, reason: str) -> None:
    private, public = key_pair(tmp_path)
    export_bundle(PLANS, tmp_path / "out", listing.read_private_key(private))
    (tmp_path / "out" / remove).unlink()
    layer = Layer(tmp_path / "out", Policy(trusted_keys=(public,)))
    assert layer.find(PLANS[0].plan_id) is None
    assert layer.read(PLANS[0].plan_id, PLANS[0].build_id) is None
    assert list(layer.entries()) == []
    assert layer.damaged == {tmp_path / "out": reason}


@pytest.mark.parametrize("content", [b"", b"{}", b'{"key":1,"signature":""}', b'{"key":"a","signature":"?"}', b"\xff"])
def test_a_malformed_signature_makes_a_layer_inert(tmp_path: Path, content: bytes) -> None:
    private, public = key_pair(tmp_path)
    export_bundle(PLANS, tmp_path / "out", listing.read_private_key(private))
    (tmp_path / "out" / "layer.sig").write_bytes(content)
    layer = Layer(tmp_path / "out", Policy(trusted_keys=(public,)))
    assert layer.find(PLANS[0].plan_id) is None
    assert "its layer.sig cannot be read" in (layer.admission().refusal or "")


def test_a_trusted_key_that_cannot_be_read_lets_nothing_pass(tmp_path: Path) -> None:
    private, _ = key_pair(tmp_path)
    export_bundle(PLANS, tmp_path / "out", listing.read_private_key(private))
    layer = Layer(tmp_path / "out", Policy(trusted_keys=(tmp_path / "none",)))
    assert layer.find(PLANS[0].plan_id) is None
    assert f"key {tmp_path / 'none'}: it cannot be read" in (layer.admission().refusal or "")


# --- tar --------------------------------------------------------------------------------------------------------------


def member(name: str, kind: bytes = tarfile.REGTYPE) -> tarfile.TarInfo:
    found = tarfile.TarInfo(name)
    found.type = kind
    found.linkname = "/etc/passwd"
    return found


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        (member("../evil"), "it has the file '../evil', which no bundle has"),
        (member("/etc/evil"), "it has the file '/etc/evil', which no bundle has"),
        (member("plans-v1/x/y.dsaplan"), "it has the file 'plans-v1/x/y.dsaplan', which no bundle has"),
        (member(f"plans-v1/{'a' * 64}/../../evil"), "which no bundle has"),
        (member("layer.json"), "it has the file 'layer.json' twice"),
        (member("evil", tarfile.DIRTYPE), "it has the folder 'evil', which no bundle has"),
        (member("layer.sig", tarfile.SYMTYPE), "its member 'layer.sig' is not a regular file"),
        (member("layer.sig", tarfile.LNKTYPE), "its member 'layer.sig' is not a regular file"),
        (member("layer.sig", tarfile.FIFOTYPE), "its member 'layer.sig' is not a regular file"),
    ],
)  # fmt: skip
def test_what_no_bundle_has_in_a_tar_file_is_named_and_nothing_is_imported(
    tmp_path: Path, extra: tarfile.TarInfo, reason: str
) -> None:
    export_bundle(PLANS, tmp_path / "out.tar")
    with tarfile.open(tmp_path / "out.tar", "a") as archive:
        archive.addfile(extra)
    layer = WritableLayer(tmp_path / "below" / "layer", BIG)
    with pytest.raises(PlanFileError) as error:
        import_from(tmp_path / "out.tar", layer)
    assert str(error.value).startswith(f"bundle {tmp_path / 'out.tar'}: ")
    assert reason in str(error.value)
    assert os.listdir(tmp_path) == ["out.tar"]


def test_a_tar_file_that_another_program_made_is_a_bundle_too(tmp_path: Path) -> None:
    export_bundle(PLANS, tmp_path / "out")
    with tarfile.open(tmp_path / "pax.tar", "w", format=tarfile.PAX_FORMAT) as archive:
        archive.add(tmp_path / "out", ".")
    assert report_of(tmp_path / "pax.tar").problems == ()


def test_any_truncation_or_flipped_byte_of_a_tar_file_is_noticed(tmp_path: Path) -> None:
    """A flipped byte in a header's times or owners is no fault of the bundle: nothing is taken from there."""
    export_bundle(PLANS, tmp_path / "good.tar")
    good = (tmp_path / "good.tar").read_bytes()
    path = tmp_path / "bad.tar"
    end = len(good.rstrip(b"\0"))
    noticed = 0
    for at in range(0, end, 97):
        for data in (good[:at], good[:at] + bytes([good[at] ^ 4]) + good[at + 1 :]):
            path.write_bytes(data)
            try:
                report = report_of(path)
            except (PlanFileError, UnsupportedError):
                noticed += 1
            else:
                noticed += bool(report.problems)
                assert report.problems or len(report.plans) == 3
                assert len(data) == len(good) or report.problems, "truncated"
    assert noticed > end // 97


@pytest.mark.parametrize(
    ("make", "kind", "rule"),
    [
        (lambda path: None, UnsupportedError, "there is no such file or folder"),
        (lambda path: path.write_bytes(b"x" * 10_000), PlanFileError, "it is no folder and no tar file"),
        (lambda path: path.touch(), PlanFileError, "it is no folder and no tar file"),
        (lambda path: path.mkdir(), PlanFileError, "it has no layer.json; make bundles with dsa-plan export"),
        (lambda path: tarfile.open(path, "w").close(), PlanFileError, "it has no layer.json"),
        (lambda path: path.symlink_to(path), UnsupportedError, "it cannot be read (Too many levels"),
    ],
)
def test_what_is_no_bundle_is_named(
    tmp_path: Path, make: Callable[[Path], object], kind: type[Exception], rule: str
) -> None:
    path = tmp_path / "x"
    make(path)
    with pytest.raises(kind) as error:
        report_of(path)
    assert str(error.value).startswith(f"bundle {path}: {rule}")


# --- import -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TARGETS)
def test_an_import_publishes_every_plan_once(tmp_path: Path, name: str) -> None:
    export_bundle(PLANS, tmp_path / name)
    layer = WritableLayer(tmp_path / "layer", BIG)
    layer.publish(PLANS[1])
    done = import_from(tmp_path / name, layer)
    assert sorted((each.config["topk"], each.status) for each in done) == [(0, "imported"), (1, "hit"), (2, "imported")]
    assert [layer.find(plan.plan_id) for plan in PLANS] == PLANS
    assert layer.index.totals() == {"built": 0, "imported": 3, "evicted": 0, "quarantined": 0}


def test_an_import_evicts_others_and_never_its_own(tmp_path: Path) -> None:
    size = sum(len(plan.encode()) for plan in PLANS)
    export_bundle(PLANS, tmp_path / "out")
    layer = WritableLayer(tmp_path / "layer", size)
    layer.publish(small_plan(9))
    set_age(layer.path_of(small_plan(9).plan_id, "b" * 64), 100)
    import_from(tmp_path / "out", layer)
    assert layer.find(small_plan(9).plan_id) is None
    assert [layer.find(plan.plan_id) for plan in PLANS] == PLANS
    small = WritableLayer(tmp_path / "small", size - 1)
    with pytest.raises(CacheError) as error:
        import_from(tmp_path / "out", small)
    assert str(error.value) == (
        f"3 plans of {size} bytes together: they do not fit into the layer's limit of {size - 1} bytes; "
        f"set DSA_PLAN_CACHE_BYTES to {size} or more"
    )
    assert not small.root.exists()


def test_an_import_asks_for_a_signature_where_keys_are_trusted(tmp_path: Path) -> None:
    _, public = key_pair(tmp_path)
    export_bundle(PLANS, tmp_path / "out.tar")
    layer = WritableLayer(tmp_path / "layer", BIG)
    with pytest.raises(PlanFileError, match=r"it is not signed; export it again with --sign"):
        import_from(tmp_path / "out.tar", layer, public)
    assert not layer.root.exists()


def test_an_import_leaves_refused_builds_out(tmp_path: Path) -> None:
    old, new = small_plan(build="f"), small_plan(build="a")
    export_bundle([old, new], tmp_path / "out")
    layer = WritableLayer(tmp_path / "layer", BIG, Policy(refused_builds=("f" * 12,)))
    done = import_from(tmp_path / "out", layer)
    assert {(each.build_id[0], each.status) for each in done} == {("f", "refused"), ("a", "imported")}
    assert layer.builds(old.plan_id) == [new.build_id]
