"""Options that several commands have."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["ArchFilter", "BackendFilter", "JsonOption", "PlansArgument", "TopkFilter"]

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
PlansArgument = Annotated[
    list[str] | None, typer.Argument(metavar="[PLAN]...", help="Plan ids, or beginnings of them; all by default.")
]
TopkFilter = Annotated[str | None, typer.Option("--topk", help="Only plans of these values of topk.")]
BackendFilter = Annotated[str | None, typer.Option("--backend", help="Only plans of these backends.")]
ArchFilter = Annotated[str | None, typer.Option("--arch", help="Only plans of these arches.")]
