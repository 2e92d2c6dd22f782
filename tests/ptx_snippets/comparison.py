"""Comparisons into predicates, selection, and moves between registers of different widths."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ptx_snippets.floating import NANS, NUMBERS, flush
from ptx_snippets.framework import MASK32, crossed, elementwise, s32, s64
from ptx_snippets.integer import EDGES32, EDGES64, SMALL_EDGES16

_ORDERINGS: dict[str, Callable[[Any, Any], bool]] = {
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge,
    "lo": operator.lt, "ls": operator.le, "hi": operator.gt, "hs": operator.ge,
}  # fmt: skip
_LOGIC: dict[str, Callable[[bool, bool], bool]] = {"and": operator.and_, "or": operator.or_, "xor": operator.xor}
_PREPARE = "and.b32 %x, %c, 1;\nsetp.ne.b32 %r, %x, 0;"


def _forms(
    kind: str, comparisons: Sequence[str], compare: Callable[[str, int, int], bool], modifier: str = ""
) -> list[tuple[str, Callable[[int, int, int], int]]]:
    """Each comparison plainly, and with a logical operation into two predicates; p + 2 q is the result."""

    def plain(comparison: str) -> Callable[[int, int, int], int]:
        return lambda a, b, c: int(compare(comparison, a, b))

    def combined(comparison: str, logic: str, negated: bool) -> Callable[[int, int, int], int]:
        def result(a: int, b: int, c: int) -> int:
            holds, other = compare(comparison, a, b), bool(c & 1) != negated
            return int(_LOGIC[logic](holds, other)) + 2 * int(_LOGIC[logic](not holds, other))

        return result

    found = []
    for number, comparison in enumerate(comparisons):
        opcode = f"setp.{comparison}{modifier}.{kind}"
        found.append((f"{opcode} %p, %a, %b; selp.b32 %d, 1, 0, %p;", plain(comparison)))
        logic, negated = ("and", "or", "xor")[number % 3], number % 2 == 1
        opcode = f"setp.{comparison}.{logic}{modifier}.{kind}"
        found.append(
            (
                f"{opcode} %p|%q, %a, %b, {'!' if negated else ''}%r; selp.b32 %d, 1, 0, %p;\n"
                "selp.b32 %x, 2, 0, %q; or.b32 %d, %d, %x;",
                combined(comparison, logic, negated),
            )
        )
    return found


def _integers(read: Callable[[int], int]) -> Callable[[str, int, int], bool]:
    return lambda comparison, a, b: _ORDERINGS[comparison](read(a), read(b))


def _s16(value: int) -> int:
    return value - 0x10000 if value >> 15 else value


_SIX = ("eq", "ne", "lt", "le", "gt", "ge")
_A, _B, _C = crossed(np.uint32, EDGES32, EDGES32, [0, 1])
elementwise(
    "setp-32",
    {"a": _A, "b": _B, "c": _C},
    [
        *_forms("s32", _SIX, _integers(s32)),
        *_forms("u32", (*_SIX, "lo", "ls", "hi", "hs"), _integers(int)),
        *_forms("b32", ("eq", "ne"), _integers(int)),
        ("setp.lt.s32 %p, %a, -5; selp.b32 %d, 1, 0, %p;", lambda a, b, c: int(s32(a) < -5)),
    ],
    prepare=_PREPARE,
)
_A64, _B64 = crossed(np.uint64, EDGES64, EDGES64)
elementwise(
    "setp-64",
    {"a": _A64, "b": _B64, "c": np.arange(len(_A64), dtype=np.uint32) // 3},
    [
        *_forms("s64", _SIX, _integers(s64)),
        *_forms("u64", (*_SIX, "lo", "hs"), _integers(int)),
        *_forms("b64", ("eq", "ne"), _integers(int)),
        ("setp.gt.s64 %p, %a, -1; selp.b32 %d, 1, 0, %p;", lambda a, b, c: int(s64(a) > -1)),
    ],
    prepare=_PREPARE,
)
_A16, _B16 = crossed(np.uint16, SMALL_EDGES16, SMALL_EDGES16)
elementwise(
    "setp-16",
    {"a": _A16, "b": _B16, "c": np.arange(len(_A16), dtype=np.uint32) // 3},
    [
        *_forms("s16", _SIX, _integers(_s16)),
        *_forms("u16", _SIX, _integers(int)),
        *_forms("b16", ("eq", "ne"), _integers(int)),
    ],
    prepare=_PREPARE,
)


def _floats(ftz: bool) -> Callable[[str, int, int], bool]:
    def compare(comparison: str, a: int, b: int) -> bool:
        x, y = (float(np.array([flush(v) if ftz else v], np.uint32).view(np.float32)[0]) for v in (a, b))
        unordered = math.isnan(x) or math.isnan(y)
        if comparison in ("num", "nan"):
            return unordered == (comparison == "nan")
        if unordered:
            return comparison.endswith("u")
        return _ORDERINGS[comparison[:2]](x, y)

    return compare


_FLOATS = (*_SIX, "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan")
_FA, _FB, _FC = crossed(np.uint32, [*NUMBERS, *NANS], [*NUMBERS[::3], *NANS], [0, 1])
elementwise(
    "setp-f32",
    {"a": _FA, "b": _FB, "c": _FC},
    [
        *_forms("f32", _FLOATS, _floats(False)),
        *_forms("f32", ("eq", "lt", "neu", "geu"), _floats(True), ".ftz"),
        ("setp.gt.f32 %p, %a, 0f3F800000; selp.b32 %d, 1, 0, %p;", lambda a, b, c: int(_floats(False)("gt", a, 0x3F800000))),
    ],
    prepare=_PREPARE,
)  # fmt: skip

_SELECT = "setp.ne.b32 %p, %c, 0; "
elementwise(
    "selection-and-predicates",
    {"a": _A, "b": _B, "c": _C},
    [
        (_SELECT + "selp.b32 %d, %a, %b, %p;", lambda a, b, c: a if c else b),
        (_SELECT + "selp.u32 %d, 17, %b, %p;", lambda a, b, c: 17 if c else b),
        (_SELECT + "selp.s32 %d, %a, -3, %p;", lambda a, b, c: a if c else MASK32 - 2),
        (_SELECT + "selp.f32 %d, %a, 0f3F800000, %p;", lambda a, b, c: a if c else 0x3F800000),
        (
            "setp.lt.u32 %p, %a, %b; setp.ne.b32 %q, %c, 0; and.pred %s, %p, %q; selp.b32 %d, 1, 0, %s;",
            lambda a, b, c: int(a < b and c != 0),
        ),
        (
            "setp.lt.u32 %p, %a, %b; setp.ne.b32 %q, %c, 0; or.pred %s, %p, %q; selp.b32 %d, 1, 0, %s;",
            lambda a, b, c: int(a < b or c != 0),
        ),
        (
            "setp.lt.u32 %p, %a, %b; setp.ne.b32 %q, %c, 0; xor.pred %s, %p, %q; selp.b32 %d, 1, 0, %s;",
            lambda a, b, c: int((a < b) != (c != 0)),
        ),
        ("setp.lt.u32 %p, %a, %b; not.pred %s, %p; selp.b32 %d, 1, 0, %s;", lambda a, b, c: int(a >= b)),
        ("setp.lt.u32 %p, %a, %b; mov.pred %s, %p; selp.b32 %d, 1, 0, %s;", lambda a, b, c: int(a < b)),
        ("mov.u32 %d, %a; setp.lt.u32 %p, %a, %b; @%p mov.u32 %d, 1; @!%p add.u32 %d, %d, 1;",
         lambda a, b, c: 1 if a < b else (a + 1) & MASK32),
        ("mov.u32 %d, 0; setp.lt.u32 %p, %a, %b; @%p setp.eq.u32 %p, %c, 1; @%p mov.u32 %d, 5;",
         lambda a, b, c: 5 if a < b and c == 1 else 0),
    ],
)  # fmt: skip
elementwise(
    "selection-64",
    {"a": _A64, "b": _B64, "c": np.arange(len(_A64), dtype=np.uint32) & np.uint32(1)},
    [
        (_SELECT + "selp.b64 %d, %a, %b, %p;", lambda a, b, c: a if c else b),
        (_SELECT + "selp.s64 %d, %a, -3, %p;", lambda a, b, c: a if c else (1 << 64) - 3),
    ],
    result=64,
)
elementwise(
    "moves-32",
    {"a": _A, "b": _B, "w": (_A.astype(np.uint64) << np.uint64(32)) | _B},
    [
        ("mov.b32 %d, %a;", lambda a, b, w: a),
        ("mov.u32 %d, -1;", lambda a, b, w: MASK32),
        ("mov.b64 {%d, %x}, %w;", lambda a, b, w: w & MASK32),
        ("mov.b64 {%x, %d}, %w;", lambda a, b, w: w >> 32),
        ("mov.b64 {%d, _}, %w;", lambda a, b, w: w & MASK32),
        ("mov.b64 {_, %d}, %w;", lambda a, b, w: w >> 32),
        ("mov.b64 {%x, %y}, %w; sub.u32 %d, %x, %y;", lambda a, b, w: (w - (w >> 32)) & MASK32),
        ("mov.b32 {%h, %i}, %a; mov.b32 %d, {%i, %h};", lambda a, b, w: (a >> 16 | a << 16) & MASK32),
        ("mov.b32 {%h, _}, %a; cvt.u32.u16 %d, %h;", lambda a, b, w: a & 0xFFFF),
        ("mov.b32 {_, %h}, %a; cvt.u32.u16 %d, %h;", lambda a, b, w: a >> 16),
    ],
    holds=("mov.b32", "mov.u32", "mov.b64"),
)
elementwise(
    "moves-64",
    {"a": _A, "b": _B},
    [
        ("mov.b64 %d, {%a, %b};", lambda a, b: b << 32 | a),
        ("mov.b64 %d, {%b, %b};", lambda a, b: b << 32 | b),
        ("mov.f64 %d, 0d3FF8000000000000;", lambda a, b: 0x3FF8000000000000),
    ],
    result=64,
)
