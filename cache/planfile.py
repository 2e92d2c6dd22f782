"""The plan file: one compiled plan with all that is needed to check and launch it.

Layout, all integers little-endian::

    offset  bytes  content
    0       8      magic: b"DSAPLAN" and the format version, 0x01
    8       4      M, the length of the manifest
    12      M      the manifest, canonical JSON
    12+M    ...    the sections, back to back, in the order and with the lengths that the manifest gives
    end-32  32     SHA-256 of all bytes before

The invariant that everything rests on: **a plan is a pure function of its content.** No time, host, user or path is in
it, so building it twice gives the same bytes, and the file is either exactly what was built or refused: a reader checks
the trailing digest, the lengths, that the plan id computed from the manifest is the one that it asked for, and that the
cubin's ELF header names the arch that the config does (tests/cache/test_planfile.py). The digest catches damage, not
forgery: who can write the file can write a new digest. Only a signed list of digests (``listing``) stops a forger.

The manifest::

    identity   config, sources, options, launch     their digest is the plan id (see ``plan_id``)
    build      id, packages                         the compiler that made it; the id is the build id
    kernels    name, symbol, registers, ...         what the compiler reported for each kernel of the launch record
    sections   name, bytes                          "cubin" always; "ptx" unless it was stripped

Nothing is ever unpickled. Standard library only.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import chain
from typing import Any

from dsa_planner.cache.canonical import canonical_json, digest, parse_canonical
from dsa_planner.errors import PlanFileError

__all__ = ["MAX_BYTES", "SUFFIX", "PlanFile", "elf_arch", "plan_id"]

SUFFIX = ".dsaplan"
MAGIC = b"DSAPLAN\x01"
MAX_BYTES = 64 << 20  # far above any plan; a bound for readers
_HEADER = struct.Struct("<8sI")
_DIGEST_BYTES = 32
_MANIFEST_KEYS = {"identity", "build", "kernels", "sections"}
_IDENTITY_KEYS = {"config", "sources", "options", "launch"}
_KERNEL_FIELDS = {
    "name": str,
    "symbol": str,
    "registers": int,
    "stack_bytes": int,
    "spill_store_bytes": int,
    "spill_load_bytes": int,
    "static_shared_bytes": int,
    "dynamic_shared_bytes": int,
    "parameters": list,
}
_ELF = struct.Struct("<4s4xB7xHHI24xI")  # magic, ABI version, type, machine, version, flags
_EM_CUDA = 190
_ABI_OF_FLAGS_V1 = 7  # up to sm_90 the SM number is in byte 0 of the flags; from ABI version 8 on, in byte 1
_REMEDY = "build it again with dsa-plan precompile"


def plan_id(identity: Mapping[str, Any]) -> str:
    """The plan id: what a plan is, whoever built it. 64 hexadecimal digits.

    Args:
        identity: ``config`` (the plan config), ``sources`` (digest of the kernel sources), ``options`` (of the
            compiler) and ``launch`` (the launch record).
    """
    if set(identity) != _IDENTITY_KEYS:
        raise TypeError(f"a plan's identity has the keys {sorted(_IDENTITY_KEYS)}, not {sorted(identity)}")
    return digest(dict(identity))


@dataclass(frozen=True)
class PlanFile:
    """A plan file in memory: its manifest and its sections."""

    manifest: Mapping[str, Any]
    sections: Mapping[str, bytes]

    @property
    def plan_id(self) -> str:
        return plan_id(self.manifest["identity"])

    @property
    def build_id(self) -> str:
        return str(self.manifest["build"]["id"])

    @property
    def config(self) -> Mapping[str, Any]:
        return dict(self.manifest["identity"]["config"])

    @property
    def launch(self) -> Mapping[str, Any]:
        return dict(self.manifest["identity"]["launch"])

    @property
    def cubin(self) -> bytes:
        return self.sections["cubin"]

    @classmethod
    def build(
        cls,
        identity: Mapping[str, Any],
        build: Mapping[str, Any],
        kernels: Sequence[Mapping[str, Any]],
        sections: Mapping[str, bytes],
    ) -> PlanFile:
        """Put a plan together; the section table is derived, in name order."""
        ordered = {name: sections[name] for name in sorted(sections)}
        table = [{"name": name, "bytes": len(data)} for name, data in ordered.items()]
        return cls({"identity": identity, "build": build, "kernels": list(kernels), "sections": table}, ordered)

    def encode(self) -> bytes:
        """The bytes of the file."""
        manifest = canonical_json(self.manifest)
        body = b"".join([_HEADER.pack(MAGIC, len(manifest)), manifest, *self.sections.values()])
        return body + hashlib.sha256(body).digest()

    @classmethod
    def decode(
        cls, data: bytes, place: str, expected_plan_id: str | None = None, expected_sha256: str | None = None
    ) -> PlanFile:
        """Read a plan file and check it.

        Args:
            data: the whole file.
            place: where it came from, for the message.
            expected_plan_id: the id under which it was found; None accepts any.
            expected_sha256: the digest of the whole file by a list that is trusted, "" if that does not list it; None
                where there is no such list. Compared before anything of the file is interpreted.

        Raises:
            PlanFileError: the file is damaged, of another format, or not the plan that its name says.
        """

        def refuse(rule: str, remedy: str = _REMEDY) -> PlanFileError:
            return PlanFileError(f"plan file {place}", rule, remedy)

        if len(data) < _HEADER.size + _DIGEST_BYTES:
            raise refuse(f"it has {len(data)} bytes, too few for a plan file")
        magic, manifest_bytes = _HEADER.unpack_from(data)
        if magic != MAGIC:
            if magic[:7] == MAGIC[:7]:
                raise refuse(f"it has format version {magic[7]}, this version reads {MAGIC[7]}")
            raise refuse("it does not begin as a plan file does")
        body = memoryview(data)[:-_DIGEST_BYTES]
        content = hashlib.sha256(body)
        if content.digest() != data[-_DIGEST_BYTES:]:
            raise refuse("its digest does not match its content, so it is damaged")
        if expected_sha256 is not None:
            content.update(data[-_DIGEST_BYTES:])
            if not expected_sha256:
                raise refuse("the signed list of its layer does not name it", "export the layer again")
            if content.hexdigest() != expected_sha256:
                raise refuse("it is not the file that the signed list of its layer names", "export the layer again")
        start = _HEADER.size + manifest_bytes
        if start > len(body):
            raise refuse("its manifest is longer than the file")
        try:
            pinned = ("identity",) if expected_plan_id is not None else ()
            manifest, members = parse_canonical(bytes(body[_HEADER.size : start]), pinned)
            sections = _split(manifest, data, start)
            found = hashlib.sha256(members["identity"]).hexdigest()  # as ``plan_id`` does
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise refuse(f"its manifest cannot be read ({type(error).__name__}: {error})") from None
        if expected_plan_id is not None and found != expected_plan_id:
            raise refuse(f"it holds plan {found}, not plan {expected_plan_id} as its name says", "remove or rename it")
        arch, built_for = manifest["identity"]["config"]["arch"], elf_arch(sections.head("cubin", _ELF.size))
        if built_for != arch.removesuffix("f"):  # a family's target: the ELF file has no mark for it
            raise refuse(f"its config is for {arch}, its machine code is {built_for or 'no CUDA ELF file'}")
        return cls(manifest, sections)

    def without_ptx(self) -> PlanFile:
        """The same plan, its PTX left out: smaller, and it cannot be verified without a GPU."""
        left = {name: data for name, data in self.sections.items() if name != "ptx"}
        manifest = self.manifest
        return PlanFile.build(manifest["identity"], manifest["build"], manifest["kernels"], left)


def elf_arch(cubin: bytes) -> str | None:
    """The arch that a cubin's ELF header names, such as "sm_90a"; None if it is no CUDA ELF file."""
    if len(cubin) < _ELF.size:
        return None
    magic, abi, _, machine, _, flags = _ELF.unpack_from(cubin)
    if magic != b"\x7fELF" or machine != _EM_CUDA:
        return None
    if abi <= _ABI_OF_FLAGS_V1:
        return f"sm_{flags & 0xFF}{'a' if flags & 0x800 else ''}"
    return f"sm_{flags >> 8 & 0xFF}{'a' if flags & 0x8 else ''}"


class _Sections(Mapping[str, bytes]):
    """The sections of a file that was read, each cut out when it is asked for: a job needs the cubin alone."""

    def __init__(self, data: bytes, spans: Mapping[str, tuple[int, int]]) -> None:
        self._data = data
        self._spans = spans

    def __getitem__(self, name: str) -> bytes:
        start, end = self._spans[name]
        return self._data[start:end]

    def head(self, name: str, size: int) -> bytes:
        """The first bytes of a section."""
        start, end = self._spans[name]
        return self._data[start : min(end, start + size)]

    def __iter__(self) -> Iterator[str]:
        return iter(self._spans)

    def __len__(self) -> int:
        return len(self._spans)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mapping) and dict(self) == dict(other)

    def __repr__(self) -> str:
        return f"<sections {', '.join(f'{name}: {end - start} bytes' for name, (start, end) in self._spans.items())}>"


def _split(manifest: Any, data: bytes, start: int) -> _Sections:
    """The sections that the manifest lists, which must fill the file exactly up to its trailing digest, once the
    manifest is what it must be.
    """
    _require_object(manifest, "the manifest", _MANIFEST_KEYS)
    identity, build, kernels = manifest["identity"], manifest["build"], manifest["kernels"]
    _require_object(identity, "identity", _IDENTITY_KEYS)
    _require_object(identity["config"], "identity.config")
    _require(isinstance(identity["options"], str), "identity.options is a string")
    _require_object(identity["launch"], "identity.launch")
    _require(all(type(value) in (str, int, bool) for value in identity["config"].values()), "identity.config is flat")
    _require(isinstance(identity["config"].get("arch"), str), "identity.config.arch is a string")
    _require_object(build, "build", {"id", "packages"})
    _require_object(build["packages"], "build.packages")
    _require(isinstance(build["id"], str), "build.id is a string")
    _require(all(isinstance(version, str) for version in build["packages"].values()), "build.packages maps to strings")
    _require(isinstance(kernels, list), "kernels is a list")
    for kernel in kernels:
        _require_object(kernel, "an entry of kernels", _KERNEL_FIELDS.keys())
        wrong = [(name, kind) for name, kind in _KERNEL_FIELDS.items() if type(kernel[name]) is not kind]
        _require(not wrong, " and ".join(f"kernels.{name} is of type {kind.__name__}" for name, kind in wrong))
        parameters = kernel["parameters"]
        pairs = all(type(pair) is list and len(pair) == 2 for pair in parameters)
        _require(pairs and set(map(type, chain(*parameters))) <= {int}, "kernels.parameters has offsets and sizes")
    expected = [kernel["name"] for kernel in identity["launch"]["kernels"]]
    _require(
        [kernel["name"] for kernel in kernels] == expected, "kernels has an entry for each kernel of the launch record"
    )
    spans: dict[str, tuple[int, int]] = {}
    for entry in manifest["sections"]:
        _require_object(entry, "an entry of sections", {"name", "bytes"})
        name, size = entry["name"], entry["bytes"]
        _require(isinstance(name, str) and name not in spans, "a section has a name of its own")
        _require(type(size) is int and size >= 0, "a section has a size")
        spans[name] = (start, start + size)
        start += size
    end = len(data) - _DIGEST_BYTES
    _require(start == end, f"the sections end where the file does: {start} is not {end}")
    _require("cubin" in spans, "there is a section cubin")
    return _Sections(data, spans)


def _require(condition: bool, rule: str) -> None:
    if not condition:
        raise ValueError(f"it breaks the rule that {rule}")


def _require_object(value: Any, name: str, keys: Set[str] | None = None) -> None:
    if not isinstance(value, dict):
        _require(False, f"{name} is an object")
    elif keys is not None and value.keys() != keys:
        _require(False, f"{name} has the members {', '.join(sorted(keys))}")
