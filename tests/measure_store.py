"""Times of the store, beside diskcache as a store of blobs and beside plain files, in one run::

    python tests/measure_store.py

* get: one plan of 250 KB by its id, from a warm page cache; ours includes the check of its digest, its ids, its manifest
  and its arch.
* open: a new search path over a layer of 10,000 plans, and one plan from it; signed, the list of all its files and the
  signature are checked too.
* publish: one plan of 250 KB, on the disk when it returns.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import diskcache
from signing_keys import key_pair
from small_plans import small_plan

from dsa_planner.cache.bundle import export_bundle
from dsa_planner.cache.layer import Layer, Policy
from dsa_planner.cache.listing import read_private_key
from dsa_planner.cache.search import SearchPath
from dsa_planner.cache.writable import WritableLayer

SIZE = 250_000
BIG = 1 << 34


def times(action: Callable[[], object], repeats: int) -> tuple[float, float]:
    """p50 and p90 of an action, in ms."""
    found = []
    for _ in range(repeats):
        started = time.perf_counter()
        action()
        found.append((time.perf_counter() - started) * 1e3)
    return statistics.median(found), statistics.quantiles(found, n=10)[8]


def measure(folder: Path, plans: int, repeats: int) -> list[tuple[str, float, float]]:
    rows: list[tuple[str, float, float]] = []

    def row(name: str, action: Callable[[], object], count: int = repeats) -> None:
        action()
        rows.append((name, *times(action, count)))

    plan = small_plan(1, size=SIZE)
    data, ids = plan.encode(), (plan.plan_id, plan.build_id)
    layer = WritableLayer(folder / "layer", BIG)
    layer.publish(plan)
    reader, path = Layer(folder / "layer"), layer.path_of(*ids)
    blobs = diskcache.Cache(str(folder / "diskcache"))
    blobs[ids[0]] = data
    row("get, a plan of 250 KB", lambda: reader.read(*ids))
    row("get, plain file", path.read_bytes)
    row("get, plain file and SHA-256", lambda: hashlib.sha256(path.read_bytes()).digest())
    row("get, diskcache", lambda: blobs[ids[0]])
    row("get, diskcache and SHA-256", lambda: hashlib.sha256(blobs[ids[0]]).digest())

    many = [small_plan(n, size=100) for n in range(plans)]
    private, public = key_pair(folder)
    export_bundle(many, folder / "many", read_private_key(private))
    wanted = many[plans // 2].plan_id
    signed = Policy(trusted_keys=(public,))
    row(f"open, {plans} plans", lambda: SearchPath([folder / "many"]).find(wanted))
    row(f"open, {plans} plans, signed", lambda: SearchPath([folder / "many"], None, signed).find(wanted), 20)
    with diskcache.Cache(str(folder / "many-blobs")) as cache, cache.transact():
        for each in many:
            cache[each.plan_id] = each.encode()

    def open_blobs() -> None:
        with diskcache.Cache(str(folder / "many-blobs")) as cache:
            assert cache[wanted]

    row(f"open, {plans} plans, diskcache", open_blobs, 50)

    number = iter(range(10**6, 2 * 10**6))
    target = WritableLayer(folder / "target", BIG)
    row("publish, a plan of 250 KB", lambda: target.publish(small_plan(next(number), size=SIZE)), 30)
    row("publish, diskcache", lambda: blobs.set(str(next(number)), data), 30)

    def plain() -> None:
        with open(folder / str(next(number)), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

    row("publish, plain file, synced", plain, 30)
    blobs.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=500)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        rows = measure(Path(name), given.plans, given.repeats)
    print(f"{'':34} {'p50 ms':>8} {'p90 ms':>8}")
    for label, p50, p90 in rows:
        print(f"{label:34} {p50:8.3f} {p90:8.3f}")


if __name__ == "__main__":
    main()
