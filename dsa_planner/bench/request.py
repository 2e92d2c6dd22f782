"""What to measure: the options of ``dsa-plan bench``, checked before anything runs. Imports no torch."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from dsa_planner import envelope
from dsa_planner.errors import PackageMissingError, UnsupportedError, shown
from dsa_planner.options import integer, positive, words

__all__ = ["DEFAULTS", "HELP", "IDS", "Request", "Shape", "help_of", "parse", "require_packages"]

IDS: Mapping[str, str] = {
    "uniform": "topk distinct keys of each row, drawn evenly, in random order",
    "sorted": "the same, in ascending order",
    "window": "the topk keys before the query, which moves evenly over the keys",
    "shared": "as uniform, but 16 neighbouring rows share 80 % of their keys",
    "sinks": "as uniform, but the first topk / 8 keys, 128 at most, are in every row",
}
"""The distributions of topk_indices, by name. No row has a key twice."""
DEFAULTS: Mapping[str, str] = {
    "topk": "128,1024,2048",
    "backend": "default",
    "d_weights": "bf16",
    "d_index_k": "bf16",
    "heads": "64",
    "batch": "1",
    "s_q": "4096",
    "s_k": "4096",
    "ids": "uniform",
    "repeats": "7",
    "device": "0",
}
HELP: Mapping[str, str] = {
    "topk": "Values of topk, separated by commas.",
    "backend": "Backends, separated by commas.",
    "d_weights": "Dtype of d_weights: bf16 or fp32.",
    "d_index_k": "Dtype of d_index_k: bf16 or fp32.",
    "heads": "Indexer heads, H.",
    "batch": "B.",
    "s_q": "Values of S_q, separated by commas.",
    "s_k": "Values of S_k, separated by commas.",
    "ids": f"Distributions of topk_indices, separated by commas: {', '.join(IDS)}.",
    "repeats": "Rounds; in each, all take a turn.",
    "device": "Ordinal of the GPU.",
    "deterministic": "Plans whose d_index_k is bitwise reproducible.",
    "floor": "Nanoseconds of a pair at least, in place of measuring it.",
    "no_peer": "Leave cuDNN frontend's operator out, where it is installed.",
    "plot": "Also draw the times by topk into this PNG. Needs the extra 'plot'.",
}
"""The options, in the words of both command lines."""


def help_of(name: str) -> str:
    """An option in words, with its default."""
    return f"{HELP[name].rstrip('.')}; {DEFAULTS[name]} by default." if name in DEFAULTS else HELP[name]


@dataclass(frozen=True)
class Shape:
    """One call to measure: its extents and the distribution of its ids."""

    batch: int
    s_q: int
    s_k: int
    topk: int
    ids: str

    @property
    def pairs(self) -> int:
        """Pairs of a row and a slot; all slots are valid."""
        return self.batch * self.s_q * self.topk

    def __str__(self) -> str:
        return f"topk={self.topk} B={self.batch} S_q={self.s_q} S_k={self.s_k} {self.ids} ids"


@dataclass(frozen=True)
class Request:
    """What to measure: every backend with every shape, ``repeats`` rounds each."""

    backends: tuple[str, ...]
    topks: tuple[int, ...]
    shapes: tuple[Shape, ...]
    heads: int
    d_weights: str
    d_index_k: str
    deterministic: bool
    repeats: int
    device: int
    floor: float | None = None
    """ns of a pair, given by the user; None to measure it."""
    peer: bool = True
    plot: Path | None = None

    def plan_options(self, backend: str, topk: int) -> dict[str, Any]:
        """The arguments of ``load_plan`` for one of the plans."""
        return {
            "topk": topk, "backend": backend, "heads": self.heads, "d_weights": self.d_weights,
            "deterministic": self.deterministic,
        }  # fmt: skip


def parse(
    given: Mapping[str, str | None], deterministic: bool = False, no_peer: bool = False, plot: Path | None = None
) -> Request:
    """The request that the options mean.

    Args:
        given: text of each option of ``DEFAULTS`` and of ``floor``, by name; None or absent for its default.

    Raises:
        UnsupportedError: a malformed value, or one that no plan or no call takes.
        PackageMissingError: a picture is wanted and matplotlib is not installed.
    """
    text = {**DEFAULTS, **{name: value for name, value in given.items() if value is not None}}

    def number(name: str, least: int) -> int:
        return integer(_option(name), text[name], int(DEFAULTS[name]), least)

    def numbers(name: str, least: int) -> tuple[int, ...]:
        example = int(DEFAULTS[name].split(",")[-1])
        return tuple(integer(_option(name), word, example, least) for word in words(_option(name), text[name]))

    topks, backends = numbers("topk", 1), words("--backend", text["backend"])
    dtype = _one_of("d_index_k", text["d_index_k"], ("bf16", "fp32"))
    ids = tuple(_one_of("ids", word, tuple(IDS)) for word in words("--ids", text["ids"]))
    extents = numbers("s_q", 1), numbers("s_k", 1), topks, ids
    request = Request(
        backends=backends,
        topks=topks,
        shapes=tuple(Shape(number("batch", 1), *extent) for extent in product(*extents)),
        heads=number("heads", 1),
        d_weights=_one_of("d_weights", text["d_weights"], ("bf16", "fp32")),
        d_index_k=dtype,
        deterministic=deterministic,
        repeats=number("repeats", 1),
        device=number("device", 0),
        floor=None if text.get("floor") is None else positive("--floor", text["floor"], 0.141),
        peer=not no_peer,
        plot=plot,
    )
    for backend, topk in product(backends, topks):
        _require_plan(request.plan_options(backend, topk))
    for shape in request.shapes:
        _check_shape(shape, request.heads)
    if plot is not None:
        _check_plot(plot)
    return request


def require_packages() -> None:
    """See that torch is there.

    Raises:
        PackageMissingError: it is not.
    """
    _require_package("torch", "measuring", "torch")


def _require_plan(options: Mapping[str, Any]) -> None:
    """Raise the first refusal of a backend that takes no such plan for any arch."""
    refusals = []
    for row in envelope.rows_for(options["backend"]):
        try:
            envelope.plan_config({**options, "arch": row.arch})
            return
        except UnsupportedError as refusal:
            refusals.append(refusal)
    raise refusals[0]


def _check_shape(shape: Shape, heads: int) -> None:
    if shape.s_k < shape.topk:
        raise UnsupportedError(
            f"--s-k {shape.s_k} with --topk {shape.topk}",
            "the topk keys of a row are distinct, so there have to be as many",
            f"give for example --s-k {shape.topk}",
        )
    most = max(shape.batch * shape.s_q * heads, shape.batch * shape.s_k)
    if most > envelope.MAX_EXTENT:
        raise UnsupportedError(
            f"--batch {shape.batch} --s-q {shape.s_q} --s-k {shape.s_k}",
            f"B * S_q * H and B * S_k must be at most {envelope.MAX_EXTENT}",
            "give smaller ones",
        )


def _check_plot(path: Path) -> None:
    if path.suffix.lower() != ".png":
        raise UnsupportedError(f"--plot {path}", "the picture is a PNG", f"give for example --plot {path.stem}.png")
    if path.is_dir() or not path.parent.is_dir():
        reason = "it is a folder" if path.is_dir() else f"there is no folder {path.parent}"
        raise UnsupportedError(f"--plot {path}", reason, "name a file in a folder that exists")
    _require_package("matplotlib", "--plot", "plot")


def _require_package(package: str, purpose: str, extra: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise PackageMissingError(
            f"package {package}", f"{purpose} needs it and it is not installed", f"pip install 'dsa-planner[{extra}]'"
        )


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise UnsupportedError(
            f"{_option(name)} {shown(value)}",
            f"it has to be {envelope.describe(allowed)}",
            f"nearest is {envelope.nearest(value, allowed)}",
        )
    return value


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
