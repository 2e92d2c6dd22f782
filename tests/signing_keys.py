"""Key pairs in files, for tests of signed layers."""

from __future__ import annotations

from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey


def key_pair(folder: Path, name: str = "key", ssh: bool = False) -> tuple[Path, Path]:
    """A new pair in ``folder``: the files of the private and of the public key."""
    key = Ed25519PrivateKey.generate()
    private, public = folder / name, folder / f"{name}.pub"
    encoding = serialization.Encoding
    private.write_bytes(
        key.private_bytes(
            encoding.PEM,
            serialization.PrivateFormat.OpenSSH if ssh else serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    public.write_bytes(
        key.public_key().public_bytes(encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
        if ssh
        else key.public_key().public_bytes(encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    return private, public
