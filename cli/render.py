"""Print answers: a table for a person, JSON for a program."""

from __future__ import annotations

import json as json_module
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from dsa_planner import envelope
from dsa_planner.cache.index import Index
from dsa_planner.cache.layer import Entry, Layer
from dsa_planner.cache.planfile import PlanFile
from dsa_planner.cache.search import SearchPath
from dsa_planner.cli.request import NotAvailable, Verdict
from dsa_planner.errors import CacheError, UnsupportedError, remedy_of
from dsa_planner.identity import plan_id_of
from dsa_planner.nearest import nearest
from dsa_planner.planner import Outcome, Planner

SHORT = 12  # digits of an id in a table
_WIDTH = 10_000  # columns: a line that is too long for the terminal wraps there, and nothing is cut


def console(stderr: bool = False) -> Console:
    """Where answers (or, on standard error, progress) are printed, as they are."""
    return Console(width=None if stderr else _WIDTH, highlight=False, markup=False, emoji=False, stderr=stderr)


def print_json(value: Any) -> None:
    print(json_module.dumps(value, indent=2))


def table(*columns: str, right: Sequence[str] = ()) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", no_wrap=True)
    return table


@contextmanager
def progress(total: int, enabled: bool) -> Iterator[Callable[[Outcome], None]]:
    """A progress bar on standard error, where that is a terminal."""
    out = console(stderr=True)
    columns = (
        TextColumn("compiling"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=out, transient=True, disable=not (enabled and out.is_terminal)) as bar:
        task = bar.add_task("", total=total)

        def advance(outcome: Outcome) -> None:
            config = outcome.config
            bar.update(task, advance=1, description=f"{config['backend']} {config['arch']} topk={config['topk']}")

        yield advance


def resources(plan: PlanFile) -> dict[str, int]:
    """The largest register count and shared memory (bytes) of a plan's kernels, and all their spills (bytes)."""
    kernels = plan.manifest["kernels"]
    return {
        "registers": max((kernel["registers"] for kernel in kernels), default=0),
        "spill_bytes": sum(kernel["spill_store_bytes"] + kernel["spill_load_bytes"] for kernel in kernels),
        "shared_bytes": max((k["static_shared_bytes"] + k["dynamic_shared_bytes"] for k in kernels), default=0),
    }


def outcomes(found: Sequence[Outcome], not_available: Sequence[NotAvailable], planner: Planner, json: bool) -> None:
    """What ``precompile`` did."""
    counts = {status: sum(o.status == status for o in found) for status in ("hit", "built", "missing", "failed")}
    if json:
        rows = [
            {
                "plan_id": o.plan_id,
                "build_id": o.plan.build_id if o.plan else None,
                "config": dict(o.config),
                "status": o.status,
                "bytes": o.bytes,
                "seconds": round(o.seconds, 3),
                "layer": str(o.layer) if o.layer else None,
                "kernels": o.plan.manifest["kernels"] if o.plan else [],
                "error": str(o.error) if o.error else None,
            }
            for o in found
        ]
        rest = [{"backend": n.backend, "arch": n.arch, "reason": n.reason} for n in not_available]
        print_json({"plans": rows, "not_available": rest, "counts": counts})
        return
    grid = table(
        "plan", "backend", "arch", "topk", "d_weights", "registers", "spills", "shared", "bytes", "seconds", "status",
        right=("topk", "registers", "spills", "shared", "bytes", "seconds"),
    )  # fmt: skip
    for o in found:
        used = {name: str(value) for name, value in resources(o.plan).items()} if o.plan else {}
        grid.add_row(
            o.plan_id[:SHORT], o.config["backend"], o.config["arch"], str(o.config["topk"]), o.config["d_weights"],
            used.get("registers", "-"), used.get("spill_bytes", "-"), used.get("shared_bytes", "-"),
            str(o.bytes) if o.bytes else "-", f"{o.seconds:.1f}" if o.seconds else "-", o.status,
        )  # fmt: skip
    for n in not_available:
        grid.add_row("-", n.backend, n.arch, *["-"] * 7, n.reason)
    out = console()
    out.print(grid)
    words = [f"{count} {status}" for status, count in counts.items() if count]
    if not_available:
        words.append(f"{len(not_available)} not available")
    place = f"layer {planner.writable.root}" if planner.writable is not None else "no writable layer"
    out.print(f"{', '.join(words)}; {place}")


def listing(search: SearchPath, json: bool) -> None:
    """Every plan file of every layer, damaged ones included."""
    rows = []
    for layer in search.layers:
        for entry in layer.entries():
            plan = layer.read(entry.plan_id, entry.build_id, record_use=False)
            rows.append((layer, entry, plan))
    if json:
        print_json(
            [
                {
                    "plan_id": entry.plan_id,
                    "build_id": entry.build_id,
                    "config": dict(plan.config) if plan else None,
                    "packages": plan.manifest["build"].get("packages") if plan else None,
                    "bytes": entry.bytes,
                    "used": round(entry.used_ns / 1e9, 3),
                    "layer": str(layer.root),
                    "writable": layer.writable,
                    "problem": problem_of(layer, entry),
                }
                for layer, entry, plan in rows
            ]
        )
        return
    grid = table(
        "plan",
        "build",
        "backend",
        "arch",
        "topk",
        "d_weights",
        "bytes",
        "used",
        "layer",
        "state",
        right=("topk", "bytes"),
    )
    for layer, entry, plan in rows:
        config = plan.config if plan else {}
        grid.add_row(
            entry.plan_id[:SHORT], entry.build_id[:SHORT],
            *(str(config.get(name, "?")) for name in ("backend", "arch", "topk", "d_weights")),
            str(entry.bytes), age(entry.used_ns), str(layer.root),
            "intact" if plan else problem_of(layer, entry) or "gone",
        )  # fmt: skip
    out = console()
    if rows:
        out.print(grid)
    intact = sum(plan is not None for _, _, plan in rows)
    words = [f"{intact} plan{'' if intact == 1 else 's'}"]
    refused = sum(entry.path in layer.refused for layer, entry, _ in rows)
    if intact + refused < len(rows):
        words.append(f"{len(rows) - intact - refused} damaged")
    if refused:
        words.append(f"{refused} refused")
    out.print(f"{', '.join(words)} in {search.describe()}")


def plan(found: PlanFile, layer: Layer, json: bool) -> None:
    """One plan."""
    noted = Index(layer.root / "index").build(found.plan_id, found.build_id) if layer.writable else None
    seconds = noted.get("seconds") if noted else None
    if json:
        print_json({"plan_id": found.plan_id, "layer": str(layer.root), "seconds": seconds, "manifest": found.manifest})
        return
    out = console()
    facts = table("", "")
    facts.show_header = False
    facts.add_row("plan", found.plan_id)
    facts.add_row("build", found.build_id)
    facts.add_row("file", str(layer.path_of(found.plan_id, found.build_id)))
    for name in envelope.PLAN_FIELDS:
        value = found.config.get(name)
        facts.add_row(name, str(value).lower() if isinstance(value, bool) else str(value))
    packages = found.manifest["build"].get("packages", {})
    facts.add_row("compiler", ", ".join(f"{name} {version}" for name, version in packages.items()))
    facts.add_row("compiled in", "unknown" if seconds is None else f"{seconds} s")
    facts.add_row("sections", ", ".join(f"{name} {len(data)} bytes" for name, data in found.sections.items()))
    out.print(facts)
    out.print()
    names = (
        "registers",
        "stack_bytes",
        "spill_store_bytes",
        "spill_load_bytes",
        "static_shared_bytes",
        "dynamic_shared_bytes",
    )
    grid = table(
        "kernel", "registers", "stack", "spill stores", "spill loads", "static shared", "dynamic shared", "symbol"
    )
    for column in grid.columns[1:7]:
        column.justify = "right"
    for kernel in found.manifest["kernels"]:
        grid.add_row(kernel["name"], *(str(kernel[name]) for name in names), kernel["symbol"])
    out.print(grid)


def section(data: bytes, output: Path | None) -> None:
    """Write a section of a plan file; a regular file is there whole or not at all.

    Raises:
        CacheError: the file cannot be written.
        UnsupportedError: standard output is a terminal and the section is binary.
    """
    if output is None:
        if sys.stdout.isatty() and b"\0" in data:
            raise UnsupportedError(
                "--extract to a terminal", "the section is binary", "give --output FILE, or redirect"
            )
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
        return
    target = Path(os.path.realpath(output))
    temporary = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    try:
        if target.exists() and not target.is_file():  # a pipe or a device is written into, never replaced
            target.write_bytes(data)
            return
        temporary.write_bytes(data)
        temporary.replace(target)
    except OSError as error:
        remedy = remedy_of(error, "choose another --output")
        raise CacheError(f"cannot write {output}", str(error.strerror), remedy) from None
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def envelope_table(json: bool) -> None:
    """The support envelope."""
    rows = envelope.table()
    if json:
        print_json(rows)
        return
    grid = table(*rows[0])
    for row in rows:
        grid.add_row(*row.values())
    console().print(grid)


def verdicts(found: Sequence[Verdict], search: SearchPath, miss: bool, json: bool) -> None:
    """Whether requests lie in the envelope, whether a layer has their plans, and, for a ``miss``, why none has.

    Raises:
        UnsupportedError: none does; the first refusal.
    """
    indices = [Index(layer.root / "index") for layer in search.layers if layer.writable]
    out = console()
    rows: list[dict[str, Any]] = []
    for v in found:
        row: dict[str, Any] = {"backend": v.backend, "arch": v.arch, "config": v.config, "plan_id": None}
        row |= {"layer": None, "last_failure": None, "refused": str(v.refusal) if v.refusal else None}
        rows.append(row)
        if v.config is None:
            if not json:
                out.print(f"refused: {v.refusal}")
            continue
        plan_id = row["plan_id"] = plan_id_of(v.config)
        hit = search.find(plan_id)
        row["layer"] = str(hit[1].root) if hit else None
        row["last_failure"] = next((text for i in indices if not hit and (text := i.failure(plan_id))), None)
        near = nearest(v.config, search) if miss and not hit else []
        if miss:
            row["unusable"] = [] if hit else search.unusable()
            row["nearest"] = [
                {
                    "plan_id": each.plan.plan_id,
                    "layer": str(each.layer.root),
                    "differences": [vars(difference) for difference in each.differences],
                }
                for each in near
            ]
        if not json:
            fields = " ".join(f"{name}={envelope.describe([value])}" for name, value in v.config.items())
            where = f"in {row['layer']}" if hit else "in no layer" if miss else "not compiled yet"
            where += f"; the last attempt failed: {row['last_failure']}" if row["last_failure"] else ""
            out.print(f"supported: {fields}; plan {plan_id}; {where}")
            for problem in row.get("unusable", ()):
                out.print(f"  unusable: {problem}")
            for each in near:
                differences = ", ".join(map(str, each.differences))
                out.print(f"  nearest: plan {each.plan.plan_id[:SHORT]} in {each.layer.root}: {differences}")
            if miss and not hit and not near:
                out.print(f"  there is no other plan in {search.describe()}")
    if json:
        print_json(rows)
    refusals = [verdict.refusal for verdict in found if verdict.refusal is not None]
    if len(refusals) == len(found):
        raise refusals[0]


def age(used_ns: int) -> str:
    """How long ago a plan was last used; "-" for the time that every file of a bundle has."""
    if used_ns == 0:
        return "-"
    seconds = time.time() - used_ns / 1e9
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{int(seconds // size)} {unit} ago"
    return f"{max(0, int(seconds))} s ago"


def problem_of(layer: Layer, entry: Entry) -> str | None:
    """Why a plan file could not be used."""
    return layer.damaged.get(entry.path) or layer.refused.get(entry.path)
