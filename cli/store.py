"""The commands that look after layers and bundles: export, import, verify-bundle, prune and stats."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dsa_planner.cli.options import ArchFilter, BackendFilter, JsonOption, PlansArgument, TopkFilter

if TYPE_CHECKING:
    from dsa_planner.cache.layer import Layer
    from dsa_planner.cache.planfile import PlanFile
    from dsa_planner.cache.search import SearchPath
    from dsa_planner.settings import Settings

__all__ = ["register"]

_FAULTY = 5  # the exit code of layers and bundles that cannot be used


def register(app: typer.Typer) -> None:
    """Add the commands to the app."""
    app.command("export")(export_plans)
    app.command("import")(import_plans)
    app.command("verify-bundle")(verify_bundle)
    app.command("prune")(prune)
    app.command("stats")(stats)


def export_plans(
    target: Annotated[Path, typer.Argument(help="A new folder, or a file whose name ends in .tar.")],
    plans: PlansArgument = None,
    topk: TopkFilter = None,
    backend: BackendFilter = None,
    arch: ArchFilter = None,
    all_builds: Annotated[
        bool, typer.Option("--all-builds", help="Every build of each plan, not only the one that jobs would use.")
    ] = False,
    ptx: Annotated[bool, typer.Option("--ptx/--no-ptx", help="Keep the PTX, which verify executes.")] = True,
    sign: Annotated[
        Path | None, typer.Option("--sign", metavar="KEY", help="Sign with this ed25519 private key, PEM or OpenSSH.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Write plans of the layers as a bundle: a layer for an image, that does not change any more.

    The same plans give the same bytes. The folder or file is there whole or not at all.
    """
    from dsa_planner.cache import bundle, listing
    from dsa_planner.cli import render, request

    key = None if sign is None else listing.read_private_key(sign)
    search = _layers()
    chosen = request.chosen_plans(search, plans or [], topk, backend, arch)
    every = [build for plan in chosen for build in _builds(search, plan)] if all_builds else chosen
    several = {plan.plan_id: plan.build_id for plan in chosen if sum(p.plan_id == plan.plan_id for p in every) > 1}
    files = every if ptx else [plan.without_ptx() for plan in every]
    done = bundle.export_bundle(files, target, key, several)
    if json:
        rows = [{"plan_id": p.plan_id, "build_id": p.build_id, "config": dict(p.config)} for p in files]
        render.print_json({"bundle": str(target), "plans": rows, "bytes": done.bytes, "signed_by": done.key})
        return
    signed = f"signed by key {done.key}" if done.key else "not signed"
    render.console().print(f"{_count(done.plans, 'plan')} of {done.bytes} bytes exported to {target}; {signed}")


def _builds(search: SearchPath, plan: PlanFile) -> list[PlanFile]:
    """Every good build of a plan, each from the first layer that has it."""
    found: dict[str, PlanFile] = {}
    for layer in search.layers:
        for build_id in sorted(layer.builds(plan.plan_id)):
            build = None if build_id in found else layer.read(plan.plan_id, build_id, record_use=False)
            if build is not None:
                found[build_id] = build
    return list(found.values())


def import_plans(
    source: Annotated[Path, typer.Argument(help="A bundle: a folder, or a tar file.")],
    json: JsonOption = False,
) -> None:
    """Copy the plans of a bundle into the writable layer (DSA_PLAN_CACHE_DIR), after a check of every one.

    With DSA_PLAN_TRUSTED_KEYS set, one of the keys must have signed the bundle.
    """
    from dsa_planner.cache import bundle
    from dsa_planner.cache.writable import WritableLayer
    from dsa_planner.cli import render

    settings = _settings()
    layer = WritableLayer(settings.require_cache_dir(), settings.cache_bytes, settings.policy)
    with bundle.open_bundle(source) as opened:
        done = bundle.import_bundle(opened, layer, settings.policy.trusted_keys)
    if json:
        render.print_json({"layer": str(layer.root), "plans": [vars(each) for each in done]})
        return
    counts = {status: sum(each.status == status for each in done) for status in ("imported", "hit", "refused")}
    words = [f"{count} {status}" for status, count in counts.items() if count]
    render.console().print(f"{', '.join(words) or 'no plans'}; layer {layer.root}")


def verify_bundle(
    source: Annotated[Path, typer.Argument(help="A bundle: a folder, or a tar file.")],
    key: Annotated[
        list[Path] | None,
        typer.Option("--key", help="A public key that may have signed it; DSA_PLAN_TRUSTED_KEYS by default."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Check every file of a bundle, and who signed it. Exit code 5 if anything is wrong.

    With keys, of --key or DSA_PLAN_TRUSTED_KEYS, an unsigned bundle is wrong too.
    """
    from dsa_planner.cache import bundle
    from dsa_planner.cli import render

    trusted = tuple(key) if key else _settings().policy.trusted_keys
    with bundle.open_bundle(source) as opened:
        report = bundle.verify_bundle(opened, trusted)
    if json:
        render.print_json(
            {
                "bundle": str(source),
                "plans": [dict(zip(("plan_id", "build_id"), name.split("/"), strict=True)) for name in report.plans],
                "bytes": report.bytes,
                "signature": report.signature,
                "signed_by": report.signed_by,
                "problems": [str(problem) for problem in report.problems],
            }
        )
    else:
        out = render.console()
        for problem in report.problems:
            out.print(str(problem))
        if report.signed_by is not None:
            signed = f"signed by key {report.signed_by}"
        elif report.signature:
            signed = "signed, by nobody who is trusted" if trusted else "signed, and no key was given to check it"
        else:
            signed = "not signed"
        faults = _count(len(report.problems), "fault") if report.problems else "no fault"
        out.print(f"{_count(len(report.plans), 'intact plan')} of {report.bytes} bytes, {faults}; {signed}")
    if report.problems:
        raise typer.Exit(_FAULTY)


def prune(
    limit: Annotated[
        str | None,
        typer.Option("--bytes", help="What the plan files may have together; DSA_PLAN_CACHE_BYTES by default."),
    ] = None,
    quarantine: Annotated[
        bool, typer.Option("--quarantine", help="Also remove every damaged file that was set aside.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    json: JsonOption = False,
) -> None:
    """Evict the writable layer's least recently used plans down to a limit, and remove what killed writers left."""
    from dsa_planner.cache.writable import QUARANTINED, WritableLayer
    from dsa_planner.cli import render, request

    settings = _settings()
    layer = WritableLayer(settings.require_cache_dir(), settings.cache_bytes, settings.policy)
    most = settings.cache_bytes if limit is None else request.integer("--bytes", limit, 1073741824, 0, longest=18)
    done = layer.prune(most, 0 if quarantine else QUARANTINED, dry_run)
    entries = list(layer.entries())
    gone = {entry.path for entry in done.evicted} if dry_run else set()
    kept = [entry for entry in entries if entry.path not in gone]
    left = {"plans": len(kept), "bytes": sum(entry.bytes for entry in kept)}
    if json:
        evicted = [
            {"plan_id": e.plan_id, "build_id": e.build_id, "bytes": e.bytes, "used": round(e.used_ns / 1e9, 3)}
            for e in done.evicted
        ]
        leftovers = [{"file": str(e.path), "bytes": e.bytes, "origin": e.origin} for e in done.leftovers]
        render.print_json(
            {
                "layer": str(layer.root),
                "dry_run": dry_run,
                "evicted": evicted,
                "leftovers": leftovers,
                "freed_bytes": done.bytes,
                "left": left,
            }
        )
        return
    out = render.console()
    if done.evicted or done.leftovers:
        grid = render.table("what", "bytes", "used", "why", right=("bytes",))
        for entry in done.evicted:
            grid.add_row(
                f"plan {entry.plan_id[: render.SHORT]} build {entry.build_id[: render.SHORT]}",
                str(entry.bytes), render.age(entry.used_ns), "least recently used",
            )  # fmt: skip
        for leftover in done.leftovers:
            grid.add_row(str(leftover.path.relative_to(layer.root)), str(leftover.bytes), "-", leftover.origin)
        out.print(grid)
    verb = "would be freed" if dry_run else "freed"
    out.print(f"{done.bytes} bytes {verb}; {_count(left['plans'], 'plan')} of {left['bytes']} bytes in {layer.root}")


def stats(json: JsonOption = False) -> None:
    """Count what each layer holds, and what became of it.

    Of the writable layer also what was built, imported, evicted and quarantined since its index was made.
    """
    from dsa_planner.cli import render

    settings = _settings()
    rows = [_stats_of(layer, settings) for layer in _layers(settings).layers]
    if json:
        render.print_json(rows)
        return
    out = render.console()
    for number, row in enumerate(rows):
        grid = render.table("", "")
        grid.show_header = False
        for name, value in row.items():
            grid.add_row(name.replace("_", " "), "-" if value is None else str(value))
        if number:
            out.print()
        out.print(grid)
    if not rows:
        out.print("no layer")


def _stats_of(layer: Layer, settings: Settings) -> dict[str, Any]:
    """A layer in numbers. Every plan file is read, as a job would."""
    from dsa_planner.cache.layer import Layer as ReadOnlyLayer
    from dsa_planner.cache.writable import WritableLayer

    reader = ReadOnlyLayer(layer.root, layer.policy)
    entries = list(reader.entries())
    good = [entry for entry in entries if reader.read(entry.plan_id, entry.build_id) is not None]
    found: dict[str, Any] = {
        "layer": str(layer.root),
        "mode": "writable" if layer.writable else "read-only",
        "plans": len({entry.plan_id for entry in good}),
        "builds": len(good),
        "bytes": sum(entry.bytes for entry in good),
        "damaged": sum(entry.path in reader.damaged for entry in entries),
        "refused": len(reader.refused),
        "unusable": reader.admission().refusal,
    }
    if layer.writable:
        own = WritableLayer(layer.root, settings.cache_bytes, settings.policy)
        leftovers = [leftover for leftover in own.leftovers() if leftover.origin != "a damaged file"]
        found |= {
            "limit_bytes": settings.cache_bytes,
            "quarantine": len(own.quarantine()),
            "leftovers": len(leftovers),
            **own.index.totals(),
        }
    return found


def _settings() -> Settings:
    from dsa_planner.settings import Settings

    return Settings.from_environment()


def _layers(settings: Settings | None = None) -> SearchPath:
    from dsa_planner.locate import search_path

    return search_path(settings or _settings(), trust_writable=True)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
