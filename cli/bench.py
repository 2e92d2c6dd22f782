"""``dsa-plan bench``: measure, and print what came of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from dsa_planner.bench import report
from dsa_planner.bench.request import Request
from dsa_planner.bench.run import Advance, measure
from dsa_planner.cli.render import console, print_json, table

__all__ = ["answer", "run"]

_WORDS = frozenset({"plan", "backend", "ids", "host"})


def run(request: Request, json: bool) -> tuple[str, ...]:
    """Measure and print the answer; the notes on it."""
    with _progress(enabled=not json) as advance:
        found = measure(request, advance)
    answer(found, json)
    if request.plot is not None:
        from dsa_planner.bench.plot import draw

        draw(found, request.plot)
    return found.notes


def answer(found: report.Report, json: bool) -> None:
    """Print it: two tables and what holds for both, or JSON."""
    if json:
        print_json(report.as_json(found))
        return
    out = console()
    for rows in (report.table(found), report.host_table(found)):
        _print(rows)
        out.print()
    for line in report.lines(found):
        out.print(line)


def _print(rows: Sequence[Sequence[str]]) -> None:
    header, *body = rows
    grid = table(*header, right=[name for name in header if name not in _WORDS])
    for row in body:
        grid.add_row(*row)
    console().print(grid)


@contextmanager
def _progress(enabled: bool) -> Iterator[Advance]:
    """A progress bar on standard error, where that is a terminal."""
    out = console(stderr=True)
    columns = (TextColumn("measuring"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(
        *columns,
        TextColumn("{task.description}"),
        console=out,
        transient=True,
        disable=not (enabled and out.is_terminal),
    ) as bar:
        task = bar.add_task("")

        def advance(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total, description=what)

        yield advance
