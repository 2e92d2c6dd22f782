"""Print answers: a table for a person, JSON for a program."""

from __future__ import annotations

import json as json_module
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from dsa_planner import envelope
from dsa_planner.cache.layer import Layer, SearchPath
from dsa_planner.cache.planfile import PlanFile
from dsa_planner.cli.request import NotAvailable
from dsa_planner.errors import CacheError, UnsupportedError
from dsa_planner.identity import plan_id_of
from dsa_planner.planner import Outcome, Planner

SHORT = 12  # digits of an id in a table
_PIPE_WIDTH = 240  # columns where the output is no terminal, so that nothing is cut


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH, highlight=False, soft_wrap=False)


def _print_json(value: Any) -> None:
    print(json_module.dumps(value, indent=2))


def _table(*columns: str, right: Sequence[str] = ()) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", no_wrap=True)
    return table


@contextmanager
def progress(total: int, enabled: bool) -> Iterator[Callable[[Outcome], None]]:
    """A progress bar on standard error, where that is a terminal."""
    console = Console(stderr=True)
    columns = (
        TextColumn("compiling"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console, transient=True, disable=not (enabled and console.is_terminal)) as bar:
        task = bar.add_task("", total=total)

        def advance(outcome: Outcome) -> None:
            config = outcome.config
            bar.update(task, advance=1, description=f"{config['backend']} {config['arch']} topk={config['topk']}")

        yield advance


def resources(plan: PlanFile) -> dict[str, int]:
    """The largest register count and shared memory (bytes) of a plan's kernels, and all their spills (bytes)."""
    kernels = plan.manifest["kernels"]
    return {
        "registers": max(kernel["registers"] for kernel in kernels),
        "spill_bytes": sum(kernel["spill_store_bytes"] + kernel["spill_load_bytes"] for kernel in kernels),
        "shared_bytes": max(kernel["static_shared_bytes"] + kernel["dynamic_shared_bytes"] for kernel in kernels),
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
                "note": o.note or None,
            }
            for o in found
        ]
        rest = [{"backend": n.backend, "arch": n.arch, "reason": n.reason} for n in not_available]
        _print_json({"plans": rows, "not_available": rest, "counts": counts})
        return
    table = _table(
        "plan", "backend", "arch", "topk", "d_weights", "registers", "spills", "shared", "bytes", "seconds", "status",
        right=("topk", "registers", "spills", "shared", "bytes", "seconds"),
    )  # fmt: skip
    for o in found:
        used = {name: str(value) for name, value in resources(o.plan).items()} if o.plan else {}
        table.add_row(
            o.plan_id[:SHORT], o.config["backend"], o.config["arch"], str(o.config["topk"]), o.config["d_weights"],
            used.get("registers", "-"), used.get("spill_bytes", "-"), used.get("shared_bytes", "-"),
            str(o.bytes) if o.bytes else "-", f"{o.seconds:.1f}" if o.seconds else "-", o.status,
        )  # fmt: skip
    for n in not_available:
        table.add_row("-", n.backend, n.arch, *["-"] * 7, n.reason)
    console = _console()
    console.print(table)
    words = [f"{count} {status}" for status, count in counts.items() if count]
    if not_available:
        words.append(f"{len(not_available)} not available")
    place = planner.writable.root if planner.writable is not None else "no writable layer"
    console.print(f"{', '.join(words)}; layer {place}", soft_wrap=True)
    for o in found:
        if o.note:
            console.print(o.note, soft_wrap=True)


def listing(search: SearchPath, json: bool) -> None:
    """Every plan file of every layer, damaged ones included."""
    rows = []
    for layer in search.layers:
        for entry in layer.entries():
            plan = layer.read(entry.plan_id, entry.build_id, record_use=False)
            rows.append((layer, entry, plan))
    if json:
        _print_json(
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
                    "problem": layer.damaged.get(entry.path),
                }
                for layer, entry, plan in rows
            ]
        )
        return
    table = _table(
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
    now = time.time()
    for layer, entry, plan in rows:
        config = plan.config if plan else {}
        table.add_row(
            entry.plan_id[:SHORT], entry.build_id[:SHORT],
            *(str(config.get(name, "?")) for name in ("backend", "arch", "topk", "d_weights")),
            str(entry.bytes), _age(now - entry.used_ns / 1e9), str(layer.root),
            "intact" if plan else layer.damaged.get(entry.path, "gone"),
        )  # fmt: skip
    console = _console()
    if rows:
        console.print(table)
    console.print(f"{len(rows)} plans in {search.describe()}", soft_wrap=True)


def plan(found: PlanFile, layer: Layer, json: bool) -> None:
    """One plan."""
    if json:
        _print_json({"plan_id": found.plan_id, "layer": str(layer.root), "manifest": found.manifest})
        return
    console = _console()
    facts = _table("", "")
    facts.show_header = False
    facts.add_row("plan", found.plan_id)
    facts.add_row("build", found.build_id)
    facts.add_row("file", str(layer.path_of(found.plan_id, found.build_id)))
    for name in envelope.PLAN_FIELDS:
        value = found.config.get(name)
        facts.add_row(name, str(value).lower() if isinstance(value, bool) else str(value))
    packages = found.manifest["build"].get("packages", {})
    facts.add_row("compiler", ", ".join(f"{name} {version}" for name, version in packages.items()))
    facts.add_row("sections", ", ".join(f"{name} {len(data)} bytes" for name, data in found.sections.items()))
    console.print(facts, soft_wrap=True)
    console.print()
    names = (
        "registers",
        "stack_bytes",
        "spill_store_bytes",
        "spill_load_bytes",
        "static_shared_bytes",
        "dynamic_shared_bytes",
    )
    table = _table(
        "kernel", "registers", "stack", "spill stores", "spill loads", "static shared", "dynamic shared", "symbol"
    )
    for column in table.columns[1:7]:
        column.justify = "right"
    for kernel in found.manifest["kernels"]:
        table.add_row(kernel["name"], *(str(kernel[name]) for name in names), kernel["symbol"])
    console.print(table)


def section(data: bytes, output: Path | None) -> None:
    """Write a section of a plan file.

    Raises:
        CacheError: the file cannot be written.
        UnsupportedError: standard output is a terminal and the section is binary.
    """
    if output is not None:
        try:
            output.write_bytes(data)
        except OSError as error:
            raise CacheError(f"cannot write {output}", str(error.strerror), "choose another --output") from None
        return
    if sys.stdout.isatty() and b"\0" in data:
        raise UnsupportedError("--extract to a terminal", "the section is binary", "give --output FILE, or redirect")
    sys.stdout.buffer.write(data)


def envelope_table(json: bool) -> None:
    """The support envelope."""
    rows = envelope.table()
    if json:
        _print_json(rows)
        return
    table = _table(*rows[0])
    for row in rows:
        table.add_row(*row.values())
    _console().print(table)


def verdicts(
    found: Sequence[tuple[dict[str, Any] | None, UnsupportedError | None]], search: SearchPath, json: bool
) -> None:
    """Whether requests lie in the envelope.

    Raises:
        UnsupportedError: none does; the first refusal.
    """
    rows = []
    for config, refusal in found:
        if config is not None:
            plan_id = plan_id_of(config)
            hit = search.find(plan_id)
            rows.append(
                {"config": config, "plan_id": plan_id, "layer": str(hit[1].root) if hit else None, "refused": None}
            )
        else:
            rows.append({"config": None, "plan_id": None, "layer": None, "refused": str(refusal)})
    if json:
        _print_json(rows)
    else:
        console = _console()
        for row in rows:
            accepted = row["config"]
            if isinstance(accepted, dict):
                fields = " ".join(f"{name}={value}" for name, value in accepted.items())
                where = f"in {row['layer']}" if row["layer"] else "not compiled yet"
                console.print(f"supported: {fields}; plan {row['plan_id']}; {where}", soft_wrap=True)
            else:
                console.print(f"refused: {row['refused']}", soft_wrap=True)
    if all(config is None for config, _ in found):
        first = found[0][1]
        assert first is not None
        raise first


def _age(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{int(seconds // size)} {unit} ago"
    return f"{max(0, int(seconds))} s ago"
