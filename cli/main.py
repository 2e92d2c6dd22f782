"""The ``dsa-plan`` command.

Only the answer goes to standard output: a table, or JSON with ``--json``. Progress, warnings and errors go to
standard error. An error is one line that says what was asked, which rule it broke and what to do next; a traceback is
a bug.

Exit codes:

=====  =============================================================
0      done
1      a plan failed to compile
2      the request is wrong: usage, or outside the support envelope
3      there is no such plan
4      the compiler is not installed
5      a layer cannot be read or written
6      the GPU or its driver is missing, or is another one
130    interrupted
=====  =============================================================

Heavy modules are imported inside the commands, so that ``dsa-plan --help`` answers at once.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Annotated

import typer

from dsa_planner import errors

__all__ = ["app", "exit_code", "main"]

app = typer.Typer(
    name="dsa-plan",
    help="Compile GPU kernel plans ahead of time, and look after them.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

INTERRUPTED = 130
_EXIT_CODES: tuple[tuple[type[errors.DsaPlannerError], int], ...] = (
    (errors.UnsupportedError, 2),
    (errors.PlanNotFoundError, 3),
    (errors.CompilerMissingError, 4),
    (errors.CompileError, 1),
    (errors.CacheError, 5),
    (errors.PlanFileError, 5),
    (errors.DeviceMismatchError, 6),
    (errors.DriverError, 6),
)

BackendOption = Annotated[
    str | None, typer.Option("--backend", help="Backends, separated by commas; every one of the envelope by default.")
]
ArchOption = Annotated[
    str | None, typer.Option("--arch", help="Arches, separated by commas; every one of the backend by default.")
]
DWeightsOption = Annotated[
    str | None,
    typer.Option("--d-weights", help="Dtypes of d_weights, bf16 or fp32; all that the backend takes by default."),
]
HeadsOption = Annotated[int, typer.Option("--heads", help="Indexer heads, H.")]
DeterministicOption = Annotated[
    bool, typer.Option("--deterministic", help="Plans whose d_index_k is bitwise reproducible.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def exit_code(error: errors.DsaPlannerError) -> int:
    """The exit code of an error."""
    return next((code for kind, code in _EXIT_CODES if isinstance(error, kind)), 1)


@app.command()
def precompile(
    topk: Annotated[str, typer.Option("--topk", help="Values of topk, separated by commas, or 'all'.")],
    backend: BackendOption = None,
    arch: ArchOption = None,
    d_weights: DWeightsOption = None,
    heads: HeadsOption = 64,
    deterministic: DeterministicOption = False,
    jobs: Annotated[
        int | None,
        typer.Option("--jobs", "-j", min=1, help="Compilations at a time; as many as processors by default."),
    ] = None,
    timeout: Annotated[float, typer.Option("--timeout", min=1.0, help="Seconds for one compilation.")] = 300.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be compiled.")] = False,
    json: JsonOption = False,
) -> None:
    """Compile the plans that are missing. Needs the compiler and no GPU.

    A plan goes into the writable layer (DSA_PLAN_CACHE_DIR), unless a layer already has it.
    """
    from dsa_planner.cli import render, request
    from dsa_planner.planner import Planner
    from dsa_planner.settings import Settings

    matrix = request.matrix(topk, backend, arch, d_weights, heads, deterministic)
    planner = Planner(Settings.from_environment())
    with render.progress(len(matrix.configs), enabled=not json and not dry_run) as advance:
        outcomes = planner.precompile(matrix.configs, jobs, timeout, dry_run, advance)
    render.outcomes(outcomes, matrix.not_available, planner, json)
    failures = [outcome.error for outcome in outcomes if outcome.error is not None]
    for failure in failures:
        typer.echo(f"dsa-plan: {failure}", err=True)
    if failures:
        raise typer.Exit(exit_code(failures[0]))


@app.command("list")
def list_plans(json: JsonOption = False) -> None:
    """List the plans of every layer."""
    from dsa_planner.cli import render
    from dsa_planner.locate import search_path
    from dsa_planner.settings import Settings

    render.listing(search_path(Settings.from_environment()), json)


@app.command()
def show(
    plan: Annotated[str, typer.Argument(help="A plan id, or the beginning of one.")],
    extract: Annotated[
        str | None, typer.Option("--extract", help="Write one section of the plan file: cubin or ptx.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Where --extract writes; standard output by default.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Show a plan: its config, its compiler, its kernels and their resources."""
    from dsa_planner.cli import render, request
    from dsa_planner.locate import search_path
    from dsa_planner.settings import Settings

    found, layer = request.plan_by_prefix(search_path(Settings.from_environment()), plan)
    if extract is None:
        render.plan(found, layer, json)
        return
    if extract not in found.sections:
        raise errors.UnsupportedError(
            f"--extract {extract}", f"this plan has the sections {' and '.join(found.sections)}", "name one of them"
        )
    render.section(found.sections[extract], output)


@app.command()
def explain(
    topk: Annotated[int | None, typer.Option("--topk", help="Selected keys of a query.")] = None,
    backend: BackendOption = None,
    arch: ArchOption = None,
    d_weights: DWeightsOption = None,
    heads: Annotated[int | None, typer.Option("--heads", help="Indexer heads, H.")] = None,
    head_dim: Annotated[int | None, typer.Option("--head-dim", help="Dimensions of a head, D.")] = None,
    deterministic: DeterministicOption = False,
    json: JsonOption = False,
) -> None:
    """Print the support envelope, or say whether a request lies in it.

    With --topk or any other field: the plan ids of the request and whether a layer has them, or why it is refused and
    what is nearest.
    """
    from dsa_planner.cli import render, request
    from dsa_planner.locate import search_path
    from dsa_planner.settings import Settings

    fields = {
        "topk": topk,
        "backend": backend,
        "arch": arch,
        "d_weights": d_weights,
        "heads": heads,
        "head_dim": head_dim,
    }
    given = {name: value for name, value in fields.items() if value is not None}
    if deterministic:
        given["deterministic"] = True
    if not given:
        render.envelope_table(json)
        return
    render.verdicts(request.verdicts(given), search_path(Settings.from_environment()), json)


def main() -> None:
    """Run the command; turn errors of this package into one line and an exit code."""
    logging.basicConfig(format="dsa-plan: %(message)s", level=logging.WARNING)
    try:
        app()
    except errors.DsaPlannerError as error:
        typer.echo(f"dsa-plan: {error}", err=True)
        sys.exit(exit_code(error))
    except SystemExit as end:
        if end.code == INTERRUPTED:  # typer turns Ctrl-C into this
            typer.echo("dsa-plan: interrupted; what was finished is kept, and nothing is half written", err=True)
        raise
    except BrokenPipeError:  # the reader of standard output went away
        sys.stderr.close()
        sys.exit(0)


if __name__ == "__main__":
    main()
