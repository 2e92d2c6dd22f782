"""Mutated plan files and lists: what a reader must refuse, whatever was done to them.

Run by tests/cache/test_mutations.py, and by hand for more::

    python tests/plan_mutations.py --count 100000 --corpus tests/cache/corpus.json

Two kinds: files with their old trailing digest, as accidents make them, of which none may be accepted; and files whose
digest was made right again, as a forger makes them, of which none may crash a reader, and none may be accepted in a
layer whose list is signed.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import random
import re
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from small_plans import small_plan

from dsa_planner.cache.planfile import PlanFile
from dsa_planner.errors import PlanFileError

GOOD = [small_plan(n, size=20 + 100 * n).encode() for n in range(4)]
_HEADER = 12
_DIGEST = 32
_SCALARS: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2**31, 2**63, -(2**70), 10**400, 0.5, "", "x", "\u00e9", "\0", "../x", "a" * 64, [], {}, [[]], {"a": 1},
)  # fmt: skip


def mutate(data: bytes, chance: random.Random) -> bytes:
    """A file that differs from ``data``: by bits, bytes, lengths, or the manifest's content."""
    kinds = (flip_bits, replace_bytes, cut, grow, swap, change_manifest, change_manifest, change_length)
    for _ in range(chance.choice((1, 1, 1, 2, 5))):
        changed = chance.choice(kinds)(data, chance)
        data = changed if changed else data
    return data


def flip_bits(data: bytes, chance: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 8))):
        if changed:
            changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def replace_bytes(data: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(len(data) + 1)
    return data[:at] + chance.randbytes(chance.randrange(40)) + data[at + chance.randrange(40) :]


def cut(data: bytes, chance: random.Random) -> bytes:
    return data[: chance.randrange(len(data) + 1)]


def grow(data: bytes, chance: random.Random) -> bytes:
    return data + chance.randbytes(chance.randrange(1, 80))


def swap(data: bytes, chance: random.Random) -> bytes:
    one, two = sorted((chance.randrange(len(data) + 1), chance.randrange(len(data) + 1)))
    size = chance.randrange(1, 60)
    return data[:one] + data[two : two + size] + data[one + size : two] + data[one : one + size] + data[two + size :]


def change_length(data: bytes, chance: random.Random) -> bytes:
    if len(data) < _HEADER:
        return data
    number = chance.choice((0, 1, 2**31, 2**32 - 1, chance.randrange(2**32), len(data)))
    return data[:8] + struct.pack("<I", number) + data[_HEADER:]


def change_manifest(data: bytes, chance: random.Random) -> bytes:
    """Change, remove or add something in the manifest, which stays JSON and mostly canonical."""
    try:
        (size,) = struct.unpack_from("<I", data, 8)
        manifest = json.loads(data[_HEADER : _HEADER + size])
    except (ValueError, struct.error, RecursionError):
        return data
    places: list[tuple[Any, Any]] = []
    collect(manifest, places)
    if not places:
        return data
    holder, key = chance.choice(places)
    action = chance.randrange(4)
    if action == 0:
        holder[key] = chance.choice(_SCALARS)
    elif action == 1:
        del holder[key]
    elif action == 2 and isinstance(holder, dict):
        holder[chance.choice(("", "id", "more", "arch", "kernels"))] = chance.choice(_SCALARS)
    elif isinstance(holder, list):
        holder.append(chance.choice((*_SCALARS, holder[0])))
    text = json.dumps(manifest, sort_keys=chance.random() < 0.95, separators=(",", ":")).encode()
    return data[:8] + struct.pack("<I", len(text)) + text + data[_HEADER + size :]


def collect(value: Any, places: list[tuple[Any, Any]]) -> None:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        places.append((value, key))
        collect(item, places)


def resealed(data: bytes) -> bytes:
    """The file with a right trailing digest."""
    body = data[:-_DIGEST]
    return body + hashlib.sha256(body).digest()


def with_old_digest(data: bytes, good: bytes) -> bytes:
    """The file with the trailing digest of the good one, unless it lost that."""
    return data if data.endswith(good[-_DIGEST:]) else data + good[-_DIGEST:]


def try_all(
    count: int, seed: int, seal: Callable[[bytes, bytes], bytes], accept: bool, corpus: dict[str, bytes] | None = None
) -> Counter[str]:
    """Mutate and read so many files; how often each reason was given.

    Args:
        count, seed: how many, and which.
        seal: what is done to the trailing digest of a mutated file, given it and the good one.
        accept: whether a reader may accept it.
        corpus: gets the shortest file for each reason.
    """
    chance = random.Random(seed)
    reasons: Counter[str] = Counter()
    done = 0
    while done < count:
        good = chance.choice(GOOD)
        data = seal(mutate(good, chance), good)
        if data == good:
            continue
        done += 1
        try:
            plan = PlanFile.decode(data, "here", small_plan(GOOD.index(good)).plan_id)
        except PlanFileError as error:
            reason = reason_of(error)
            reasons[reason] += 1
            if corpus is not None and len(data) < len(corpus.get(reason, data + b"x")):
                corpus[reason] = data
        else:
            assert accept, f"accepted: {data!r}"
            assert plan.encode() == data, "what was read is not what was there"
            reasons["accepted"] += 1
    return reasons


def reason_of(error: PlanFileError) -> str:
    """The rule that was broken, without its numbers."""
    text = error.rule.partition(" (")[2].rstrip(")") or error.rule
    return re.sub(r"[0-9a-f]{64}|\d+", "#", text)[:90]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--corpus", type=Path, help="keep the shortest file for each reason here, besides those of it")
    given = parser.parse_args()
    corpus: dict[str, bytes] = {}
    for name, seal, accept in (
        ("old digest", with_old_digest, False),
        ("right digest", lambda d, _: resealed(d), True),
    ):
        started = time.monotonic()
        reasons = try_all(given.count, given.seed, seal, accept, corpus)
        seconds = time.monotonic() - started
        print(f"{given.count} files with the {name}: {reasons.pop('accepted', 0)} accepted, no crash, {seconds:.0f} s")
        for reason, count in reasons.most_common(40):
            print(f"  {count:6} {reason}")
    if given.corpus is not None:
        kept = json.loads(given.corpus.read_text()) if given.corpus.exists() else {}
        kept |= {reason: base64.b64encode(data).decode() for reason, data in corpus.items() if reason not in kept}
        given.corpus.write_text(json.dumps(dict(sorted(kept.items())), indent=0) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
