"""Canonical JSON, the byte form from which every id is derived.

One value has one form: object keys sorted, no spaces, strings of printable ASCII, and no floating-point numbers (two
writers could spell one number differently). Standard library only.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any, NoReturn

__all__ = ["canonical_json", "digest", "parse_canonical"]

_PRINTABLE = bytes(range(0x20, 0x7F))
_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
_ESCAPE = re.compile(rb'\\["\\]')  # printable ASCII needs no other


def canonical_json(value: Any) -> bytes:
    """Encode JSON-like data (str of printable ASCII, int, bool, None, list, tuple, dict with str keys).

    Raises:
        TypeError: for anything else; the message names the place in the value.
    """
    _check(value, "value")
    return _encoded(value)


def parse_canonical(text: bytes) -> tuple[Any, dict[str, bytes]]:
    """Decode canonical JSON, and refuse any other form of the same value. Fast: a reader does this at every load.

    Returns:
        The value and, if it is an object, the canonical JSON of each of its members.

    Raises:
        ValueError: it is no JSON, or not canonical.
        RecursionError: it is nested too deeply.
    """
    if text.translate(None, _PRINTABLE):
        raise ValueError("it is not in canonical form: a character that is not printable ASCII")
    if b"\\" in text and b"\\" in _ESCAPE.sub(b"", text):
        raise ValueError("it is not in canonical form: an escape of a character that needs none")
    value = json.loads(text, parse_float=_refuse_number, parse_constant=_refuse_number)
    members: dict[str, bytes] = {}
    if isinstance(value, dict):
        members = {name: _encoded(value[name]) for name in sorted(value)}
        again = b"{" + b",".join(_encoded(name) + b":" + member for name, member in members.items()) + b"}"
    else:
        again = _encoded(value)
    if again != text:
        raise ValueError("it is not in canonical form")
    return value, members


def _encoded(value: Any) -> bytes:
    return _ENCODER.encode(value).encode()


def _refuse_number(text: str) -> NoReturn:
    raise ValueError(f"it is not in canonical form: the number {text[:40]}")


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
