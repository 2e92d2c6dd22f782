"""The ``dsa-plan`` command.

Only the answer goes to standard output: a table, or JSON with ``--json``. Progress, warnings and errors go to standard
error. An error is one line that says what was asked, which rule it broke and what to do next; a traceback is a bug.

Exit codes:

=====  =============================================================================================
0      done
1      a plan failed to compile, or the answer could not be written
2      the request is wrong: usage, outside the support envelope, or PTX that the machine refuses
3      there is no such plan
4      the compiler, or what verifies, measures, plots or signs, is not installed
5      a layer cannot be read or written, is damaged, or does not hold what was built
6      the GPU or its driver is missing, or is another one
7      a plan failed its verification
130    interrupted; 128 + N: ended by signal N
=====  =============================================================================================

Heavy modules are imported inside the commands, so that ``dsa-plan --help`` answers at once.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from dsa_planner import __version__, errors
from dsa_planner.bench.request import help_of as bench_help
from dsa_planner.cli import store
from dsa_planner.cli.options import ArchFilter, BackendFilter, JsonOption, PlansArgument, TopkFilter

__all__ = ["app", "exit_code", "main"]

app = typer.Typer(
    name="dsa-plan",
    help="Compile GPU kernel plans ahead of time, and look after them.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_CACHE_EXIT = 5
_VERIFY_EXIT = 7
_EXIT_CODES: tuple[tuple[type[errors.DsaPlannerError], int], ...] = (
    (errors.UnsupportedError, 2),
    (errors.PlanNotFoundError, 3),
    (errors.CompilerMissingError, 4),
    (errors.VerifierMissingError, 4),
    (errors.PackageMissingError, 4),
    (errors.CompileError, 1),
    (errors.CacheError, _CACHE_EXIT),
    (errors.PlanFileError, _CACHE_EXIT),
    (errors.DeviceMismatchError, 6),
    (errors.DriverError, 6),
)
_KEPT = "what was finished is kept, and nothing is half written"

BackendOption = Annotated[
    str | None, typer.Option("--backend", help="Backends, separated by commas; every one of the envelope by default.")
]
ArchOption = Annotated[
    str | None, typer.Option("--arch", help="Arches, separated by commas; every one of the backend by default.")
]
DeterministicOption = Annotated[
    bool, typer.Option("--deterministic", help="Plans whose d_index_k is bitwise reproducible.")
]


class Ended(BaseException):
    """A signal that asks the process to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def exit_code(error: errors.DsaPlannerError) -> int:
    """The exit code of an error."""
    return next((code for kind, code in _EXIT_CODES if isinstance(error, kind)), 1)


def _complain(text: object) -> None:
    """One line on standard error, whatever the text holds."""
    typer.echo("dsa-plan: " + " ".join(str(text).split("\n")), err=True)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"dsa-plan {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Compile GPU kernel plans ahead of time, and look after them."""


@app.command()
def precompile(
    topk: Annotated[str, typer.Option("--topk", help="Values of topk, separated by commas, or 'all'.")],
    backend: BackendOption = None,
    arch: ArchOption = None,
    d_weights: Annotated[
        str | None,
        typer.Option("--d-weights", help="Dtypes of d_weights, bf16 or fp32, separated by commas; all by default."),
    ] = None,
    heads: Annotated[str, typer.Option("--heads", help="Indexer heads, H.")] = "64",
    deterministic: DeterministicOption = False,
    jobs: Annotated[
        str | None, typer.Option("--jobs", "-j", help="Compilations at a time; as many as processors by default.")
    ] = None,
    timeout: Annotated[str, typer.Option("--timeout", help="Seconds for one compilation.")] = "300",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be compiled.")] = False,
    json: JsonOption = False,
) -> None:
    """Compile the plans that are missing. Needs the compiler and no GPU.

    A plan goes into the writable layer (DSA_PLAN_CACHE_DIR), unless a layer already has it.
    """
    from dsa_planner.cli import render, request
    from dsa_planner.planner import Planner
    from dsa_planner.settings import Settings

    matrix = request.matrix(topk, backend, arch, d_weights, request.integer("--heads", heads, 64, 1), deterministic)
    at_once = None if jobs is None else request.integer("--jobs", jobs, 4, 1)
    seconds = request.integer("--timeout", timeout, 300, 1)
    planner = Planner(Settings.from_environment())
    with render.progress(len(matrix.configs), enabled=not json and not dry_run) as advance:
        outcomes = planner.precompile(matrix.configs, at_once, seconds, dry_run, advance)
    render.outcomes(outcomes, matrix.not_available, planner, json)
    for outcome in outcomes:
        if outcome.error is not None:
            _complain(outcome.error)
    failures = [outcome.error for outcome in outcomes if outcome.error is not None]
    if failures:
        raise typer.Exit(exit_code(failures[0]))


@app.command("list")
def list_plans(json: JsonOption = False) -> None:
    """List the plans of every layer. Exit code 5 if a file is damaged or a layer cannot be read."""
    from dsa_planner.cli import render
    from dsa_planner.locate import search_path
    from dsa_planner.settings import Settings

    layers = search_path(Settings.from_environment(), trust_writable=True)
    render.listing(layers, json)
    if any(layer.damaged for layer in layers.layers):
        raise typer.Exit(_CACHE_EXIT)


@app.command()
def show(
    plan: Annotated[str, typer.Argument(help="A plan id, or the beginning of one.")],
    build: Annotated[
        str | None, typer.Option("--build", help="A build id, or the beginning of one, where there are several.")
    ] = None,
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

    if extract is None and output is not None:
        raise errors.UnsupportedError(f"--output {output}", "only --extract writes a file", "add --extract cubin")
    if extract is not None and json:
        raise errors.UnsupportedError(f"--extract {extract} --json", "a section is not JSON", "leave one of them out")
    found, layer = request.plan_by_prefix(search_path(Settings.from_environment(), trust_writable=True), plan, build)
    if extract is None:
        render.plan(found, layer, json)
        return
    if extract not in found.sections:
        raise errors.UnsupportedError(
            f"--extract {extract}", f"this plan has the sections {' and '.join(found.sections)}", "name one of them"
        )
    render.section(found.sections[extract], output)


@app.command()
def verify(
    plans: PlansArgument = None,
    topk: TopkFilter = None,
    backend: BackendFilter = None,
    arch: ArchFilter = None,
    schedules: Annotated[
        str, typer.Option("--schedules", help="inorder, random:SEED and late:SEED, separated by commas.")
    ] = "inorder,random:1,late:1",
    cases: Annotated[
        str, typer.Option("--cases", help="usual, or pairwise: all factors of a call combined.")
    ] = "usual",
    rows: Annotated[str, typer.Option("--rows", help="Queries of the largest case.")] = "12",
    seed: Annotated[str, typer.Option("--seed", help="Seed of the inputs.")] = "0",
    ptx: Annotated[
        Path | None, typer.Option("--ptx", help="Execute this PTX in place of that of the plan, which is one.")
    ] = None,
    device: Annotated[bool, typer.Option("--device", help="Also run the cases on the GPU at hand.")] = False,
    rebuild: Annotated[bool, typer.Option("--rebuild", help="Also compile again and compare digests.")] = False,
    profile: Annotated[bool, typer.Option("--profile", help="Count instructions and bytes, by warp.")] = False,
    jobs: Annotated[str | None, typer.Option("--jobs", "-j", help="Runs at a time.")] = None,
    json: JsonOption = False,
) -> None:
    """Prove plans without a GPU: execute their PTX under adversarial schedules and compare with the oracle.

    Exit code 7 if a run differs from the oracle or breaks a rule of the memory model. Needs the extra 'verify'.
    """
    from dsa_planner import verify as verifier
    from dsa_planner.cli import proof, request
    from dsa_planner.locate import search_path
    from dsa_planner.settings import Settings

    verifier.require_verifier()
    settings = Settings.from_environment()
    chosen = request.chosen_plans(search_path(settings, trust_writable=True), plans or [], topk, backend, arch)
    if ptx is not None:
        text = request.content("--ptx", ptx, most=1 << 24)
        chosen = [verifier.with_ptx(request.only_plan(chosen, "--ptx"), text)]
    wanted = [verifier.parse_schedule(word) for word in request.words("--schedules", schedules)]
    make = verifier.parse_cases(cases)
    size = (request.integer("--rows", rows, 12, 1), request.integer("--seed", seed, 0, 0))
    at_once = None if jobs is None else request.integer("--jobs", jobs, 4, 1)
    for plan in chosen:  # a refusal is to come at once, not after the runs of other plans
        verifier.require_executable(plan, ptx)
    calls = [(plan, case) for plan in chosen for case in make(plan.config, *size)]
    passed = proof.run(calls, wanted, device, rebuild, profile, at_once, json, settings)
    if not passed:
        raise typer.Exit(_VERIFY_EXIT)


@app.command()
def bench(
    topk: Annotated[str | None, typer.Option("--topk", help=bench_help("topk"))] = None,
    backend: Annotated[str | None, typer.Option("--backend", help=bench_help("backend"))] = None,
    d_weights: Annotated[str | None, typer.Option("--d-weights", help=bench_help("d_weights"))] = None,
    d_index_k: Annotated[str | None, typer.Option("--d-index-k", help=bench_help("d_index_k"))] = None,
    heads: Annotated[str | None, typer.Option("--heads", help=bench_help("heads"))] = None,
    deterministic: DeterministicOption = False,
    batch: Annotated[str | None, typer.Option("--batch", help=bench_help("batch"))] = None,
    s_q: Annotated[str | None, typer.Option("--s-q", help=bench_help("s_q"))] = None,
    s_k: Annotated[str | None, typer.Option("--s-k", help=bench_help("s_k"))] = None,
    ids: Annotated[str | None, typer.Option("--ids", help=bench_help("ids"))] = None,
    repeats: Annotated[str | None, typer.Option("--repeats", help=bench_help("repeats"))] = None,
    device: Annotated[str | None, typer.Option("--device", help=bench_help("device"))] = None,
    floor: Annotated[str | None, typer.Option("--floor", help=bench_help("floor"))] = None,
    no_peer: Annotated[bool, typer.Option("--no-peer", help=bench_help("no_peer"))] = False,
    plot: Annotated[Path | None, typer.Option("--plot", help=bench_help("plot"))] = None,
    json: JsonOption = False,
) -> None:
    """Measure plans on the GPU at hand, beside its limits and beside cuDNN frontend's operator.

    The plans come from the layers; nothing is compiled. Needs torch.
    """
    from dsa_planner.bench import request as requests

    given = {
        "topk": topk, "backend": backend, "d_weights": d_weights, "d_index_k": d_index_k, "heads": heads,
        "batch": batch, "s_q": s_q, "s_k": s_k, "ids": ids, "repeats": repeats, "device": device, "floor": floor,
    }  # fmt: skip
    request = requests.parse(given, deterministic, no_peer, plot)
    requests.require_packages()
    from dsa_planner.cli import bench as measurement

    for note in measurement.run(request, json):
        _complain(note)


@app.command()
def explain(
    topk: Annotated[str | None, typer.Option("--topk", help="Selected keys of a query; one value.")] = None,
    backend: BackendOption = None,
    arch: ArchOption = None,
    d_weights: Annotated[str | None, typer.Option("--d-weights", help="Dtype of d_weights: bf16 or fp32.")] = None,
    heads: Annotated[str | None, typer.Option("--heads", help="Indexer heads, H.")] = None,
    head_dim: Annotated[str | None, typer.Option("--head-dim", help="Dimensions of a head, D.")] = None,
    deterministic: DeterministicOption = False,
    miss: Annotated[
        bool, typer.Option("--miss", help="Where no layer has the plan: what is unusable, and the nearest plans.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Print the support envelope, or say whether a request lies in it.

    With --topk: for each backend and arch the plan id of the request and whether a layer has it, or why it is refused
    and what is nearest. With --miss also why no layer has it, as a job would see the layers. Needs no compiler.
    """
    from dsa_planner.cli import render, request
    from dsa_planner.locate import search_path
    from dsa_planner.settings import Settings

    given: dict[str, Any] = {
        name: request.integer("--" + name.replace("_", "-"), text, example)
        for name, text, example in (("topk", topk, 1024), ("heads", heads, 64), ("head_dim", head_dim, 128))
        if text is not None
    }
    for name, text in (("backend", backend), ("arch", arch), ("d_weights", d_weights)):
        if text is not None:
            request.words("--" + name.replace("_", "-"), text)  # refuses an empty one
            given[name] = text
    if deterministic:
        given["deterministic"] = True
    if not given and not miss:
        render.envelope_table(json)
        return
    if "topk" not in given:
        raise errors.UnsupportedError("explain without --topk", "a request needs a topk", "add for example --topk 1024")
    search = search_path(Settings.from_environment(), trust_writable=not miss)
    render.verdicts(request.verdicts(given), search, miss, json)


store.register(app)


def _end(number: int, frame: object) -> None:
    raise Ended(number)


def main() -> None:
    """Run the command; turn errors of this package into one line and an exit code."""
    for stream in ("stdout", "stderr"):
        if getattr(sys, stream) is None:  # closed by the caller
            setattr(sys, stream, open(os.devnull, "w"))  # noqa: SIM115 - for the life of the process
        getattr(sys, stream).reconfigure(errors="backslashreplace")
    logging.basicConfig(format="dsa-plan: %(message)s", level=logging.WARNING)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _end)
    sys.exit(_run())


def _run() -> int:
    """Run the command and see that its answer is written; the exit code."""
    try:
        code = _run_command()
        sys.stdout.flush()
        return code
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is buffered cannot be written either
        if isinstance(error, BrokenPipeError):  # the reader has all that it wants; click sees it so too
            return 1
        place = "standard output" if error.filename is None else str(error.filename)
        remedy = errors.remedy_of(error, "mend that, or name another place")
        _complain(f"cannot use {place}: {error.strerror or error}; {remedy}")
        return 1


def _run_command() -> int:
    try:
        code = app(standalone_mode=False)
    except errors.DsaPlannerError as error:
        _complain(error)
        return exit_code(error)
    except Ended as end:
        _complain(f"ended by {signal.Signals(end.number).name}; {_KEPT}")
        return 128 + end.number
    except Exception as error:
        if not hasattr(error, "format_message"):  # a usage error of typer, which keeps its own copy of click
            raise
        text = error.format_message()
        if "\n" in text:  # the help that a bare "dsa-plan" prints
            typer.echo(text, err=True)
        else:
            context = getattr(error, "ctx", None)
            path = getattr(context, "command_path", "dsa-plan")
            _complain(f"{text.rstrip('.?')}; see {path} --help")
        return 2
    if code == 130:
        _complain(f"interrupted; {_KEPT}")
    return int(code or 0)


if __name__ == "__main__":
    main()
