"""Canonical JSON, the byte form from which every id is derived.

One value has one form: object keys sorted, no spaces, strings of printable ASCII, and no floating-point numbers (two
writers could spell one number differently). Standard library only.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection
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


def parse_canonical(text: bytes, pinned: Collection[str] = ()) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Decode the canonical JSON of an object, and refuse any other form of it. Fast: a reader does this at every load.

    Args:
        text: the bytes.
        pinned: members whose form is not examined, because the caller compares their digest with a known one.

    Returns:
        The object, and the text of each member.

    Raises:
        ValueError: it is no JSON object, or not canonical.
        RecursionError: it is nested too deeply.
    """
    if text.translate(None, _PRINTABLE):
        raise ValueError("it is not in canonical form: a character that is not printable ASCII")
    if b"\\" in text and b"\\" in _ESCAPE.sub(b"", text):
        raise ValueError("it is not in canonical form: an escape of a character that needs none")
    characters = text.decode("ascii")
    value: dict[str, Any] = {}
    members: dict[str, bytes] = {}
    at, last = 1, ""
    if characters == "{}":
        return value, members
    while characters[at - 1 : at] == ("," if members else "{"):
        name, end = _DECODER.raw_decode(characters, at)
        if not isinstance(name, str) or (members and name <= last) or characters[end : end + 1] != ":":
            raise ValueError("it is not in canonical form: it is no object, or its members are not in order")
        value[name], at = _DECODER.raw_decode(characters, end + 1)
        members[name] = text[end + 1 : at]
        if name not in pinned and _encoded(value[name]) != members[name]:
            raise ValueError(f"it is not in canonical form: {name}")
        at, last = at + 1, name
    if at != len(text) or not text.endswith(b"}"):
        raise ValueError("it is not in canonical form: it does not end where its last member does")
    return value, members


def _encoded(value: Any) -> bytes:
    return _ENCODER.encode(value).encode()


def _refuse_number(text: str) -> NoReturn:
    raise ValueError(f"it is not in canonical form: the number {text[:40]}")


_DECODER = json.JSONDecoder(parse_float=_refuse_number, parse_constant=_refuse_number)


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
