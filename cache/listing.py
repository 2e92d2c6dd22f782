"""The list of a bundle's files, ``layer.json``, and its signature, ``layer.sig``. Both sides.

``layer.json`` is canonical JSON::

    format   1
    chosen   plan id -> build id, for each plan of several builds: the one that jobs use
    plans    "<plan id>/<build id>" -> SHA-256 of the plan file

``layer.sig`` is canonical JSON too: ``key``, the SHA-256 of the public key's 32 bytes, and ``signature``, 64 bytes in
base64: ed25519 over ``CONTEXT`` and the bytes of ``layer.json``. A reader checks the signature before it reads the
list.

The ``cryptography`` package is imported only where there is something to sign or to check; all else is standard
library.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsa_planner.cache.canonical import canonical_json, parse_canonical
from dsa_planner.errors import PackageMissingError, PlanFileError, UnsupportedError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

__all__ = ["LISTING", "SIGNATURE", "Listing", "read_private_key", "sign", "signer"]

LISTING = "layer.json"
SIGNATURE = "layer.sig"
FORMAT = 1
CONTEXT = b"dsa-planner layer 1\n"  # so that no signature of something else fits
MAX_KEY_BYTES = 1 << 16
_REMEDY = "export the bundle again"


@dataclass(frozen=True)
class Listing:
    """What ``layer.json`` says."""

    plans: Mapping[str, str]
    """"<plan id>/<build id>" -> SHA-256 of the plan file, in hexadecimal digits."""
    chosen: Mapping[str, str]

    def encode(self) -> bytes:
        return canonical_json({"format": FORMAT, "chosen": dict(self.chosen), "plans": dict(self.plans)})

    @classmethod
    def decode(cls, data: bytes, place: str) -> Listing:
        """Read a list, quickly: a signed one is read by every job, and may name thousands of plans.

        Raises:
            PlanFileError: it is none, or of another format.
        """
        try:
            found = json.loads(data)
            listing = cls(found["plans"], found["chosen"])
            if found["format"] != FORMAT or type(listing.plans) is not dict or type(listing.chosen) is not dict:
                raise ValueError(f"it is not of format {FORMAT}")
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise PlanFileError(place, f"it cannot be read ({type(error).__name__}: {error})", _REMEDY) from None
        return listing

    @classmethod
    def decode_strictly(cls, data: bytes, place: str) -> Listing:
        """Read a list and hold every entry of it to the format.

        Raises:
            PlanFileError: as for ``decode``, or it is not as ``encode`` writes it.
        """
        listing = cls.decode(data, place)
        try:
            parse_canonical(data)
            same = listing.encode() == data
        except (ValueError, TypeError):
            same = False
        if not same:
            raise PlanFileError(place, "it is not in canonical form", _REMEDY)
        ids = [tuple(name.split("/")) for name in listing.plans]
        if not all(len(pair) == 2 and _is_digest(pair[0]) and _is_digest(pair[1]) for pair in ids):
            raise PlanFileError(place, "it names something else than plan and build ids", _REMEDY)
        if not all(isinstance(digest, str) and _is_digest(digest) for digest in listing.plans.values()):
            raise PlanFileError(place, "a digest in it is not 64 hexadecimal digits", _REMEDY)
        if not all(f"{plan}/{build}" in listing.plans for plan, build in listing.chosen.items()):
            raise PlanFileError(place, "it chooses a build that it does not list", _REMEDY)
        return listing


def _is_digest(text: str) -> bool:
    return len(text) == 64 and not set(text) - set("0123456789abcdef")


# --- signatures -------------------------------------------------------------------------------------------------------


def sign(listing: bytes, key: Ed25519PrivateKey) -> bytes:
    """The content of ``layer.sig`` for that of ``layer.json``."""
    signature = base64.b64encode(key.sign(CONTEXT + listing)).decode()
    return canonical_json({"key": key_id(key.public_key()), "signature": signature})


def signer(listing: bytes, signature: bytes, trusted: Sequence[Path]) -> str:
    """The id of the trusted key that signed a list.

    Args:
        listing: the content of ``layer.json``.
        signature: that of ``layer.sig``.
        trusted: files of public keys.

    Raises:
        PlanFileError: the signature is malformed, of a key that is not trusted, or not of these bytes.
        UnsupportedError: a file of ``trusted`` is no public key.
        PackageMissingError: the cryptography package is not installed.
    """
    from_file = {key_id(key): key for key in map(read_public_key, trusted)}
    try:
        found, _ = parse_canonical(signature)
        name, raw = found["key"], base64.b64decode(found["signature"], validate=True)
        if set(found) != {"key", "signature"} or not isinstance(name, str):
            raise ValueError("it has other members")
    except (ValueError, TypeError, KeyError, RecursionError, binascii.Error) as error:
        raise _unsigned(f"its {SIGNATURE} cannot be read ({type(error).__name__}: {error})") from None
    if name not in from_file:
        raise _unsigned(f"it is signed by key {name[:64]}, which is not one of the trusted keys")
    from cryptography.exceptions import InvalidSignature

    try:
        from_file[name].verify(raw, CONTEXT + listing)
    except InvalidSignature:
        raise _unsigned(f"its signature is not that of its {LISTING}") from None
    return name


def _unsigned(rule: str) -> PlanFileError:
    return PlanFileError("layer", rule, "export it again with --sign")


def key_id(key: Ed25519PublicKey) -> str:
    """SHA-256 of a public key's 32 bytes, in hexadecimal digits."""
    return hashlib.sha256(key.public_bytes_raw()).hexdigest()


def read_private_key(path: Path) -> Ed25519PrivateKey:
    """An ed25519 private key from a file, PEM or OpenSSH.

    Raises:
        UnsupportedError: it cannot be read, or is something else.
        PackageMissingError: the cryptography package is not installed.
    """
    serialization, ed25519 = _cryptography("signing")
    load = (
        lambda data: serialization.load_pem_private_key(data, None),
        lambda data: serialization.load_ssh_private_key(data, None),
    )
    make = "openssl genpkey -algorithm ed25519, or ssh-keygen -t ed25519 -N ''"
    key: Ed25519PrivateKey = _read_key(path, load, ed25519.Ed25519PrivateKey, "private", make)
    return key


def read_public_key(path: Path) -> Ed25519PublicKey:
    """An ed25519 public key from a file, PEM or OpenSSH; errors as ``read_private_key``."""
    serialization, ed25519 = _cryptography("checking a signature")
    load = (serialization.load_pem_public_key, serialization.load_ssh_public_key)
    make = "openssl pkey -in KEY -pubout, or ssh-keygen"
    key: Ed25519PublicKey = _read_key(path, load, ed25519.Ed25519PublicKey, "public", make)
    return key


def _read_key(path: Path, loaders: Sequence[Any], kind: type, word: str, make: str) -> Any:
    asked, remedy = f"key {path}", f"give an ed25519 {word} key, unencrypted, as made by {make}"
    try:
        with path.open("rb") as file:
            data = file.read(MAX_KEY_BYTES)
    except OSError as error:
        raise UnsupportedError(asked, f"it cannot be read ({error.strerror})", remedy) from None
    for load in loaders:
        try:
            key = load(data)
        except Exception:  # each library of the package raises errors of its own for what it cannot read
            continue
        if isinstance(key, kind):
            return key
    raise UnsupportedError(asked, f"it is not an ed25519 {word} key", remedy)


def _cryptography(what: str) -> tuple[Any, Any]:
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError:
        raise PackageMissingError(
            "package cryptography", f"{what} needs it and it is not installed", "pip install 'dsa-planner[sign]'"
        ) from None
    return serialization, ed25519
