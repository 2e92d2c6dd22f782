"""Integer arithmetic, logic, shifts and bit fields, each as the ISA defines it, on Python ints."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np

from ptx_snippets.framework import MASK32, MASK64, crossed, elementwise, s32, s64

_RANDOM = [int(value) for value in np.random.default_rng(7).integers(0, 1 << 32, 12, np.uint64)]
EDGES32 = [0, 1, 2, 7, 31, 32, 33, 255, 256, 0x7FFF, 0x8000, 0xFFFF, 0x10000, 0x12345678, 0x55555555, 0x7FFFFFFE,
           0x7FFFFFFF, 0x80000000, 0x80000001, 0xFFFFFFFE, 0xFFFFFFFF, *_RANDOM[:11]]  # fmt: skip
COUNTS = [0, 1, 3, 8, 15, 16, 17, 24, 31, 32, 33, 40, 63, 64, 65, 127, 255, 256, 257, 0x7FFFFFFF, 0x80000000, MASK32]
_RANDOM64 = [(high << 32) | low for low, high in itertools.pairwise(_RANDOM)]
EDGES64 = [0, 1, 2, 3, 63, 64, MASK32, 1 << 32, (1 << 32) + 1, (1 << 63) - 1, 1 << 63, (1 << 63) + 1, MASK64 - 1,
           MASK64, 0x80000000, 0xFFFFFFFF80000000, *_RANDOM64[:11]]  # fmt: skip
SMALL_EDGES16 = [0, 1, 2, 3, 15, 16, 17, 0x7F, 0x80, 0xFF, 0x100, 0x1234, 0x7FFF, 0x8000, 0x8001, 0xFFFF]

_A, _B, _C = crossed(np.uint32, EDGES32, EDGES32, EDGES32)
_OPERANDS = {"a": _A, "b": _B, "c": _C}


def _bit_at(value: int, at: int) -> int:
    return value >> at & 1


def _quotient(a: int, b: int) -> int:
    """Towards zero."""
    return abs(a) // abs(b) * (-1 if (a < 0) != (b < 0) else 1)


def _remainder(a: int, b: int) -> int:
    return a - b * _quotient(a, b)


elementwise(
    "integer-32",
    _OPERANDS,
    [
        ("add.s32 %d, %a, %b;", lambda a, b, c: (a + b) & MASK32),
        ("add.u32 %d, %a, -7;", lambda a, b, c: (a - 7) & MASK32),
        ("sub.s32 %d, %a, %b;", lambda a, b, c: (a - b) & MASK32),
        ("sub.u32 %d, 5, %b;", lambda a, b, c: (5 - b) & MASK32),
        ("mul.lo.s32 %d, %a, %b;", lambda a, b, c: a * b & MASK32),
        ("mul.lo.u32 %d, %a, 0x10001;", lambda a, b, c: a * 0x10001 & MASK32),
        ("mul.hi.s32 %d, %a, %b;", lambda a, b, c: s32(a) * s32(b) >> 32 & MASK32),
        ("mul.hi.u32 %d, %a, %b;", lambda a, b, c: a * b >> 32),
        ("mad.hi.s32 %d, %a, %b, %c;", lambda a, b, c: (s32(a) * s32(b) >> 32) + c & MASK32),
        ("mad.hi.u32 %d, %a, %b, %c;", lambda a, b, c: (a * b >> 32) + c & MASK32),
        ("mad.lo.s32 %d, %a, %b, %c;", lambda a, b, c: (a * b + c) & MASK32),
        ("mad.lo.u32 %d, %a, %b, %c;", lambda a, b, c: (a * b + c) & MASK32),
        ("min.s32 %d, %a, %b;", lambda a, b, c: min(s32(a), s32(b)) & MASK32),
        ("max.s32 %d, %a, %b;", lambda a, b, c: max(s32(a), s32(b)) & MASK32),
        ("min.u32 %d, %a, %b;", lambda a, b, c: min(a, b)),
        ("max.u32 %d, %a, %b;", lambda a, b, c: max(a, b)),
        ("neg.s32 %d, %a;", lambda a, b, c: -a & MASK32),
        ("abs.s32 %d, %a;", lambda a, b, c: abs(s32(a)) & MASK32),
    ],
)

_TABLES = (0xF0, 0xCC, 0xAA, 0x80, 0xFE, 0x96, 0xE8, 0xCA, 0x1B, 0x00, 0xFF, 0x42)


def _lop3(table: int) -> Callable[[int, int, int], int]:
    def result(a: int, b: int, c: int) -> int:
        return sum((table >> (4 * _bit_at(a, n) + 2 * _bit_at(b, n) + _bit_at(c, n)) & 1) << n for n in range(32))

    return result


elementwise(
    "logic-32",
    {"a": _A[::4].copy(), "b": _B[::4].copy(), "c": _C[::4].copy()},
    [
        ("and.b32 %d, %a, %b;", lambda a, b, c: a & b),
        ("or.b32 %d, %a, %b;", lambda a, b, c: a | b),
        ("xor.b32 %d, %a, %b;", lambda a, b, c: a ^ b),
        ("and.b32 %d, %a, -256;", lambda a, b, c: a & 0xFFFFFF00),
        ("not.b32 %d, %a;", lambda a, b, c: a ^ MASK32),
        *((f"lop3.b32 %d, %a, %b, %c, {table:#x};", _lop3(table)) for table in _TABLES),
    ],
)


def _prmt(a: int, b: int, selector: int) -> int:
    pool = a.to_bytes(4, "little") + b.to_bytes(4, "little")
    result = bytearray(4)
    for n in range(4):
        nibble = selector >> 4 * n & 15
        byte = pool[nibble & 7]
        result[n] = (0xFF if byte & 0x80 else 0) if nibble & 8 else byte
    return int.from_bytes(result, "little")


elementwise(
    "bits-32",
    _OPERANDS,
    [
        ("popc.b32 %d, %a;", lambda a, b, c: a.bit_count()),
        ("clz.b32 %d, %a;", lambda a, b, c: 32 - a.bit_length()),
        ("brev.b32 %d, %a;", lambda a, b, c: int(f"{a:032b}"[::-1], 2)),
        ("bfind.u32 %d, %a;", lambda a, b, c: a.bit_length() - 1 & MASK32),
        ("prmt.b32 %d, %a, %b, %c;", _prmt),
        ("prmt.b32 %d, %a, %b, 0x5410;", lambda a, b, c: _prmt(a, b, 0x5410)),
        ("prmt.b32 %d, %a, %b, 0x7632;", lambda a, b, c: _prmt(a, b, 0x7632)),
        ("prmt.b32 %d, %a, %b, 0xFB30;", lambda a, b, c: _prmt(a, b, 0xFB30)),
    ],
)


def _arithmetic_shift(a: int, n: int) -> int:
    return s32(a) >> min(n, 31) & MASK32


def _funnel_left(a: int, b: int, n: int) -> int:
    return (b << n | a >> 32 - n) & MASK32


def _funnel_right(a: int, b: int, n: int) -> int:
    return (b << 32 - n | a >> n) & MASK32


_SA, _SC, _SB = crossed(np.uint32, EDGES32, COUNTS, EDGES32)
elementwise(
    "shifts-32",
    {"a": _SA, "b": _SB, "c": _SC},
    [
        ("shl.b32 %d, %a, %c;", lambda a, b, c: a << c & MASK32 if c < 32 else 0),
        ("shr.u32 %d, %a, %c;", lambda a, b, c: a >> c if c < 32 else 0),
        ("shr.b32 %d, %a, %c;", lambda a, b, c: a >> c if c < 32 else 0),
        ("shr.s32 %d, %a, %c;", lambda a, b, c: _arithmetic_shift(a, c)),
        ("shl.b32 %d, %a, 32;", lambda a, b, c: 0),
        ("shr.s32 %d, %a, 40;", lambda a, b, c: _arithmetic_shift(a, 40)),
        ("shf.l.wrap.b32 %d, %a, %b, %c;", lambda a, b, c: _funnel_left(a, b, c & 31)),
        ("shf.l.clamp.b32 %d, %a, %b, %c;", lambda a, b, c: _funnel_left(a, b, min(c, 32))),
        ("shf.r.wrap.b32 %d, %a, %b, %c;", lambda a, b, c: _funnel_right(a, b, c & 31)),
        ("shf.r.clamp.b32 %d, %a, %b, %c;", lambda a, b, c: _funnel_right(a, b, min(c, 32))),
    ],
)


def _bfe(a: int, position: int, length: int, *, is_signed: bool) -> int:
    position, length = position & 255, length & 255
    sign = _bit_at(a, min(position + length - 1, 31)) if is_signed and length else 0
    return sum((_bit_at(a, position + n) if n < length and position + n <= 31 else sign) << n for n in range(32))


def _bfi(a: int, b: int, position: int, length: int) -> int:
    position, length = position & 255, length & 255
    for n in range(min(length, 32)):
        if position + n <= 31:
            b = b & ~(1 << position + n) | _bit_at(a, n) << position + n
    return b


_POSITIONS, _LENGTHS, _FA, _FB = crossed(np.uint32, COUNTS, COUNTS, EDGES32, EDGES32, seed=3)
elementwise(
    "bit-fields-32",
    {"a": _FA, "b": _FB, "e": _POSITIONS, "f": _LENGTHS},
    [
        ("bfe.u32 %d, %a, %e, %f;", lambda a, b, e, f: _bfe(a, e, f, is_signed=False)),
        ("bfe.s32 %d, %a, %e, %f;", lambda a, b, e, f: _bfe(a, e, f, is_signed=True)),
        ("bfe.u32 %d, %a, 8, 12;", lambda a, b, e, f: a >> 8 & 0xFFF),
        ("bfi.b32 %d, %a, %b, %e, %f;", _bfi),
        ("bfi.b32 %d, %a, %b, 16, 8;", lambda a, b, e, f: _bfi(a, b, 16, 8)),
    ],
)

_DIVISORS = [value for value in EDGES32 if value]
_NA, _NB = crossed(np.uint32, EDGES32, _DIVISORS)
_DEFINED = (_NA != 0x80000000) | (_NB != MASK32)  # that quotient does not fit
_NA = np.where(_DEFINED, _NA, np.uint32(100))
elementwise(
    "division-32",
    {"a": _NA, "b": _NB},
    [
        ("div.s32 %d, %a, %b;", lambda a, b: _quotient(s32(a), s32(b)) & MASK32),
        ("div.u32 %d, %a, %b;", lambda a, b: a // b),
        ("rem.s32 %d, %a, %b;", lambda a, b: _remainder(s32(a), s32(b)) & MASK32),
        ("rem.u32 %d, %a, %b;", lambda a, b: a % b),
        ("div.u32 %d, %a, 10;", lambda a, b: a // 10),
        ("rem.s32 %d, %a, -3;", lambda a, b: _remainder(s32(a), -3) & MASK32),
    ],
)
_NA64, _NB64 = crossed(np.uint64, EDGES64, [value for value in EDGES64 if value])
_NA64 = np.where((_NA64 != 1 << 63) | (_NB64 != MASK64), _NA64, np.uint64(100))
elementwise(
    "division-64",
    {"a": _NA64, "b": _NB64},
    [
        ("div.s64 %d, %a, %b;", lambda a, b: _quotient(s64(a), s64(b)) & MASK64),
        ("div.u64 %d, %a, %b;", lambda a, b: a // b),
        ("rem.s64 %d, %a, %b;", lambda a, b: _remainder(s64(a), s64(b)) & MASK64),
        ("rem.u64 %d, %a, %b;", lambda a, b: a % b),
    ],
    result=64,
)

_A64, _B64, _C64 = crossed(np.uint64, EDGES64, EDGES64, EDGES64)
elementwise(
    "integer-64",
    {"a": _A64, "b": _B64, "c": _C64},
    [
        ("add.s64 %d, %a, %b;", lambda a, b, c: (a + b) & MASK64),
        ("add.u64 %d, %a, -9;", lambda a, b, c: (a - 9) & MASK64),
        ("sub.s64 %d, %a, %b;", lambda a, b, c: (a - b) & MASK64),
        ("mul.lo.s64 %d, %a, %b;", lambda a, b, c: a * b & MASK64),
        ("mul.lo.u64 %d, %a, 0x100000001;", lambda a, b, c: a * 0x100000001 & MASK64),
        ("mul.hi.s64 %d, %a, %b;", lambda a, b, c: s64(a) * s64(b) >> 64 & MASK64),
        ("mul.hi.u64 %d, %a, %b;", lambda a, b, c: a * b >> 64),
        ("mul.hi.u64 %d, %a, 0xCCCCCCCCCCCCCCCD;", lambda a, b, c: a * 0xCCCCCCCCCCCCCCCD >> 64),
        ("mul.hi.s64 %d, %a, -3;", lambda a, b, c: s64(a) * -3 >> 64 & MASK64),
        ("mad.lo.s64 %d, %a, %b, %c;", lambda a, b, c: (a * b + c) & MASK64),
        ("mad.hi.s64 %d, %a, %b, %c;", lambda a, b, c: (s64(a) * s64(b) >> 64) + c & MASK64),
        ("mad.hi.u64 %d, %a, %b, %c;", lambda a, b, c: (a * b >> 64) + c & MASK64),
        ("min.s64 %d, %a, %b;", lambda a, b, c: min(s64(a), s64(b)) & MASK64),
        ("max.s64 %d, %a, %b;", lambda a, b, c: max(s64(a), s64(b)) & MASK64),
        ("min.u64 %d, %a, %b;", lambda a, b, c: min(a, b)),
        ("max.u64 %d, %a, %b;", lambda a, b, c: max(a, b)),
        ("neg.s64 %d, %a;", lambda a, b, c: -a & MASK64),
        ("and.b64 %d, %a, %b;", lambda a, b, c: a & b),
        ("or.b64 %d, %a, %b;", lambda a, b, c: a | b),
        ("xor.b64 %d, %a, %b;", lambda a, b, c: a ^ b),
        ("not.b64 %d, %a;", lambda a, b, c: a ^ MASK64),
        ("mov.b64 %d, %a;", lambda a, b, c: a),
        ("mov.u64 %d, 0x123456789ABCDEF0;", lambda a, b, c: 0x123456789ABCDEF0),
    ],
    result=64,
)
_SA64 = np.repeat(np.array(EDGES64, np.uint64), 32)[: len(EDGES64) * 32]
_SC64 = np.tile(np.array([*COUNTS, 2, 4, 5, 6, 30, 34, 48, 60, 62, 128], np.uint32), len(EDGES64))
elementwise(
    "shifts-64",
    {"a": _SA64, "c": _SC64},
    [
        ("shl.b64 %d, %a, %c;", lambda a, c: a << c & MASK64 if c < 64 else 0),
        ("shr.u64 %d, %a, %c;", lambda a, c: a >> c if c < 64 else 0),
        ("shr.b64 %d, %a, %c;", lambda a, c: a >> c if c < 64 else 0),
        ("shr.s64 %d, %a, %c;", lambda a, c: s64(a) >> min(c, 63) & MASK64),
        ("shr.s64 %d, %a, 33;", lambda a, c: s64(a) >> 33 & MASK64),
    ],
    result=64,
)
elementwise(
    "wide-products",
    {"a": _A, "b": _B, "w": np.random.default_rng(5).choice(np.array(EDGES64, np.uint64), len(_A))},
    [
        ("mul.wide.s32 %d, %a, %b;", lambda a, b, w: s32(a) * s32(b) & MASK64),
        ("mul.wide.u32 %d, %a, %b;", lambda a, b, w: a * b),
        ("mul.wide.s32 %d, %a, -12;", lambda a, b, w: s32(a) * -12 & MASK64),
        ("mad.wide.s32 %d, %a, %b, %w;", lambda a, b, w: (s32(a) * s32(b) + w) & MASK64),
        ("mad.wide.u32 %d, %a, %b, %w;", lambda a, b, w: (a * b + w) & MASK64),
        ("mad.wide.s32 %d, %a, 4, %w;", lambda a, b, w: (s32(a) * 4 + w) & MASK64),
    ],
    result=64,
)

_A16, _B16 = crossed(np.uint16, SMALL_EDGES16, SMALL_EDGES16)
_C16 = np.tile(np.array(COUNTS[:16], np.uint32), len(_A16) // 16)
_OUT16 = " cvt.u32.u16 %d, %h;"
elementwise(
    "integer-16",
    {"a": _A16, "b": _B16, "c": _C16},
    [
        ("add.s16 %h, %a, %b;" + _OUT16, lambda a, b, c: (a + b) & 0xFFFF),
        ("add.u16 %h, %a, -3;" + _OUT16, lambda a, b, c: (a - 3) & 0xFFFF),
        ("sub.s16 %h, %a, %b;" + _OUT16, lambda a, b, c: (a - b) & 0xFFFF),
        ("mul.lo.s16 %h, %a, %b;" + _OUT16, lambda a, b, c: a * b & 0xFFFF),
        ("mul.lo.u16 %h, %a, %b;" + _OUT16, lambda a, b, c: a * b & 0xFFFF),
        ("and.b16 %h, %a, %b;" + _OUT16, lambda a, b, c: a & b),
        ("or.b16 %h, %a, %b;" + _OUT16, lambda a, b, c: a | b),
        ("xor.b16 %h, %a, %b;" + _OUT16, lambda a, b, c: a ^ b),
        ("shl.b16 %h, %a, %c;" + _OUT16, lambda a, b, c: a << c & 0xFFFF if c < 16 else 0),
        ("shr.u16 %h, %a, %c;" + _OUT16, lambda a, b, c: a >> c if c < 16 else 0),
        ("mov.b16 %h, %a;" + _OUT16, lambda a, b, c: a),
    ],
)
