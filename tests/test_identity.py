from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dsa_planner import PlanConfig, UnsupportedError, envelope
from dsa_planner.cache.planfile import plan_id
from dsa_planner.identity import identity_of, plan_id_of
from dsa_planner.kernels import catalogue

CONFIG = envelope.plan_config({"arch": "sm_90a", "topk": 1024})


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if isinstance(value, dict):
        for key in value:
            yield from leaves(value[key], (*path, key))
    elif isinstance(value, (list, tuple)):
        for index in range(len(value)):
            yield from leaves(value[index], (*path, index))
    else:
        yield path


def changed(value: Any, path: tuple[Any, ...]) -> Any:
    """A copy of ``value`` with the leaf at ``path`` changed, keeping its type."""
    result = copy.deepcopy(value)
    place = result
    for step in path[:-1]:
        place = place[step]
    old = place[path[-1]]
    place[path[-1]] = not old if isinstance(old, bool) else old + 1 if isinstance(old, int) else old + "x"
    return result


def test_every_field_of_the_identity_changes_the_plan_id() -> None:
    """Each config field, compile option, launch-record entry, and the source digest."""
    identity = identity_of(CONFIG)
    found = list(leaves(identity))
    assert {path[0] for path in found} == {"config", "sources", "options", "launch"}
    assert {path[1] for path in found if path[0] == "config"} == set(envelope.PLAN_FIELDS)
    assert len(found) > 70
    ids = {plan_id(changed(identity, path)) for path in found}
    assert len(ids) == len(found)
    assert plan_id(identity) not in ids


def test_order_matters_in_a_list_and_not_in_an_object() -> None:
    identity = identity_of(CONFIG)
    backwards = json.loads(json.dumps(identity), object_pairs_hook=lambda pairs: dict(reversed(pairs)))
    assert list(backwards) == list(reversed(identity))
    assert plan_id(backwards) == plan_id(identity)
    swapped = copy.deepcopy(identity)
    swapped["launch"]["kernels"][0]["parameters"].reverse()
    assert plan_id(swapped) != plan_id(identity)


def test_every_byte_of_every_source_changes_the_digest() -> None:
    kernel = catalogue.load("indexer_backward_sm90")
    folder = Path(catalogue.__file__).parent
    contents = {name: (folder / name).read_bytes() for name in kernel.sources}
    assert contents == kernel.sources
    seen = {catalogue.digest_sources(contents)}
    assert seen == {kernel.source_digest}
    count = 1
    for name, content in contents.items():
        changed = bytearray(content)
        for position in range(len(content)):
            changed[position] ^= 1
            seen.add(catalogue.digest_sources({**contents, name: bytes(changed)}))
            changed[position] ^= 1
            count += 1
    assert count > 20_000
    assert len(seen) == count


def test_bytes_cannot_move_between_sources_unnoticed() -> None:
    """Even where the bytes that move look like the beginning of the next source."""
    assert catalogue.digest_sources({"a": b"xy", "b": b"z"}) != catalogue.digest_sources({"a": b"x", "b": b"yz"})
    assert catalogue.digest_sources({"a": b"", "b": b"z"}) != catalogue.digest_sources({"a": b"z", "b": b""})
    for length in ("", "1\0"):
        inside = {"a": b"x" + f"b\0{length}".encode() + b"z"}
        assert catalogue.digest_sources(inside) != catalogue.digest_sources({"a": b"x", "b": b"z"})


def test_the_id_is_the_same_in_every_process(tmp_path: Path) -> None:
    root = Path(catalogue.__file__).resolve().parents[1]
    script = (
        "from dsa_planner import envelope, identity;"
        "print(identity.plan_id_of(envelope.plan_config({'topk': 1024, 'arch': 'sm_90a'})))"
    )
    for seed in ("0", "1", "4242"):
        environment = {"PYTHONHASHSEED": seed, "PYTHONPATH": str(root), "LC_ALL": "C", "TZ": "Asia/Tokyo"}
        out = subprocess.run(
            [sys.executable, "-c", script], env=environment, cwd=tmp_path, capture_output=True, text=True, check=True
        )
        assert out.stdout.strip() == plan_id_of(CONFIG)


def test_a_config_is_checked_and_completed_before_it_is_named() -> None:
    assert plan_id_of({"topk": 1024, "arch": "sm_90a"}) == plan_id_of(CONFIG)
    assert plan_id_of(PlanConfig(topk=1024, arch="sm_90a")) == plan_id_of(CONFIG)  # type: ignore[arg-type]
    for bad in ({"topk": 1000}, {"deterministic": 0}, {"B": 1}, {"S_q": 4096}, {"sm_scale": 1.0}):
        with pytest.raises(UnsupportedError):
            plan_id_of({**CONFIG, **bad})
