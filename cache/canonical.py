"""Canonical JSON, the byte form from which every id is derived.

One value has one form: object keys sorted, no spaces, strings of printable ASCII, and no floating-point numbers (two
writers could spell one number differently). Standard library only.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

__all__ = ["canonical_json", "digest"]


def canonical_json(value: Any) -> bytes:
    """Encode JSON-like data (str of printable ASCII, int, bool, None, list, tuple, dict with str keys).

    Raises:
        TypeError: for anything else; the message names the place in the value.
    """
    _check(value, "value")
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()


def digest(value: Any) -> str:
    """SHA-256 of the canonical JSON, as 64 hexadecimal digits."""
    return hashlib.sha256(canonical_json(value)).hexdigest()


def _check(value: Any, place: str) -> None:
    if value is None or isinstance(value, (bool, int)):
        return
    if isinstance(value, str):
        if not (value.isascii() and value.isprintable()):
            raise TypeError(f"{place} is {value!r}; canonical JSON takes strings of printable ASCII only")
        return
    if isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            _check(item, f"{place}[{index}]")
        return
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"{place} has the key {key!r}; canonical JSON takes string keys only")
            _check(key, f"a key of {place}")
            _check(item, f"{place}[{key!r}]")
        return
    raise TypeError(
        f"{place} is {value!r}; canonical JSON takes str, int, bool, None, lists and dicts, no {type(value).__name__}"
    )
