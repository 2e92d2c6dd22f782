"""``python -m dsa_planner.bench``: ``dsa-plan bench`` for machines that have what launches a plan, and no more.

The options are those of ``dsa-plan bench``, but for ``--json``, which names a file that the answer goes to as well. An
error is one line; exit code 2 if the request is wrong, else 1.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from dsa_planner.bench import request as requests
from dsa_planner.errors import DsaPlannerError, UnsupportedError

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m dsa_planner.bench", description="Measure plans on the GPU.")
    for name in (*requests.DEFAULTS, "floor"):
        parser.add_argument(_flag(name), metavar="VALUE", help=_help(name))
    for name in ("deterministic", "no_peer"):
        parser.add_argument(_flag(name), action="store_true", help=_help(name))
    parser.add_argument("--plot", metavar="FILE", type=Path, help=_help("plot"))
    parser.add_argument("--json", metavar="FILE", type=Path, help="Also write the answer as JSON.")
    options = vars(parser.parse_args(arguments))
    try:
        _measure(options)
    except DsaPlannerError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2 if isinstance(error, UnsupportedError) else 1
    except OSError as error:
        print(f"bench: cannot use {error.filename or 'standard output'}: {error.strerror}", file=sys.stderr)
        return 1
    return 0


def _measure(options: dict[str, object]) -> None:
    flags = {name: bool(options.pop(name)) for name in ("deterministic", "no_peer")}
    plot, target = (_path(options.pop(name)) for name in ("plot", "json"))
    texts = {name: None if value is None else str(value) for name, value in options.items()}
    request = requests.parse(texts, plot=plot, **flags)
    if target is not None and not target.parent.is_dir():
        raise UnsupportedError(f"--json {target}", f"there is no folder {target.parent}", "name a file in one that is")
    requests.require_packages()
    from dsa_planner.bench import report
    from dsa_planner.bench.run import measure

    found = measure(request, _Progress())
    if target is not None:
        target.write_text(json.dumps(report.as_json(found), indent=2) + "\n")
    for rows in (report.table(found), report.host_table(found)):
        print(_aligned(rows), end="\n\n")
    print("\n".join(report.lines(found)))
    for note in found.notes:
        print(f"bench: {note}", file=sys.stderr)
    if plot is not None:
        from dsa_planner.bench.plot import draw

        draw(found, plot)


class _Progress:
    """A line on standard error for each new thing that is measured."""

    def __init__(self) -> None:
        self._last = ""

    def __call__(self, done: int, total: int, what: str) -> None:
        if what != self._last:
            print(f"bench: {done} of {total} done; {what}", file=sys.stderr)
        self._last = what


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    """Columns two spaces apart, to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _path(value: object) -> Path | None:
    return value if isinstance(value, Path) else None


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _help(name: str) -> str:
    return requests.help_of(name).replace("%", "%%")


if __name__ == "__main__":
    sys.exit(main())
