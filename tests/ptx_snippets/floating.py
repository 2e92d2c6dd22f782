"""fp32 arithmetic and conversions. Rounding is done on fractions, so it owes nothing to the CPU's own."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np

from ptx_snippets.framework import MASK32, crossed, elementwise, s32

NAN = 0x7FFFFFFF  # the canonical one
INF, NEGATIVE = 0x7F800000, 0x80000000
FINITE_EDGES = [0, 1, 2, 0x007FFFFF, 0x00800000, 0x00800001, 0x00C00000, 0x01000000, 0x33800000, 0x34000000, 0x3F000000,
                0x3F7FFFFF, 0x3F800000, 0x3F800001, 0x3FC00000, 0x40490FDB, 0x4B000001, 0x4B800000, 0x5F000000, 0x7F000000,
                0x7F7FFFFF]  # fmt: skip
_RANDOM = [int(v) for v in np.random.default_rng(11).integers(0x30000000, 0x50000000, 8)]
NUMBERS = [*FINITE_EDGES, INF, *_RANDOM]
NUMBERS += [NEGATIVE | value for value in NUMBERS]
NANS = [0x7FC00000, NAN, 0xFFC00001, 0x7FA00000]


def is_nan(bits: int) -> bool:
    return bits & 0x7FFFFFFF > INF


def value_of(bits: int) -> Fraction:
    """The number that a finite fp32 is."""
    exponent, mantissa = bits >> 23 & 255, bits & 0x7FFFFF
    magnitude = Fraction(mantissa, 1) / (1 << 149)
    if exponent:
        magnitude = Fraction(mantissa | 1 << 23) * Fraction(2) ** (exponent - 150)
    return -magnitude if bits >> 31 else magnitude


def encode(value: Fraction, negative: bool, exponent_bits: int = 8, mantissa_bits: int = 23) -> int:
    """The nearest number of a binary format, ties to even. ``negative`` is the sign of a zero."""
    sign = int(value < 0 or (value == 0 and negative)) << exponent_bits + mantissa_bits
    magnitude = abs(value)
    if not magnitude:
        return sign
    lowest = 2 - (1 << exponent_bits - 1)  # exponent of the smallest normal number
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    while Fraction(2) ** exponent > magnitude:
        exponent -= 1
    while Fraction(2) ** (exponent + 1) <= magnitude:
        exponent += 1
    exponent = max(exponent, lowest)
    bits = (exponent - lowest << mantissa_bits) + round(magnitude / Fraction(2) ** (exponent - mantissa_bits))
    return sign | min(bits, (1 << exponent_bits) - 1 << mantissa_bits)


def flush(bits: int) -> int:
    """.ftz: a subnormal is a zero of its sign."""
    return bits if bits & INF else bits & NEGATIVE


def _binary(
    exact: Callable[[Fraction, Fraction], Fraction], limit: Callable[[float, float], float]
) -> Callable[..., int]:
    """An fp32 operation: exact and then rounded where the operands are finite, else as infinities go."""

    def result(a: int, b: int) -> int:
        if is_nan(a) or is_nan(b):
            return NAN
        special = limit(_float(a), _float(b))
        if INF in (a & 0x7FFFFFFF, b & 0x7FFFFFFF) or not math.isfinite(special):
            return NAN if math.isnan(special) else _bits(special)
        return encode(exact(value_of(a), value_of(b)), math.copysign(1, special) < 0)

    return result


def _float(bits: int) -> float:
    return float(np.array([bits], np.uint32).view(np.float32)[0])


def _bits(value: float) -> int:
    return NAN if math.isnan(value) else int(np.array([value], np.float32).view(np.uint32)[0])


def _divide(a: float, b: float) -> float:
    if b:
        return a / b
    return math.nan if a == 0 else math.copysign(math.inf, math.copysign(1, a) * math.copysign(1, b))


_sum = _binary(lambda a, b: a + b, lambda a, b: a + b)
_difference = _binary(lambda a, b: a - b, lambda a, b: a - b)
_product = _binary(lambda a, b: a * b, lambda a, b: a * b)
_ratio = _binary(lambda a, b: a / b, _divide)


def _fma(a: int, b: int, c: int) -> int:
    if is_nan(a) or is_nan(b) or is_nan(c):
        return NAN
    special = _float(a) * _float(b)  # exact, or infinite or NaN as it should be
    if not math.isfinite(special + _float(c)) and INF in (x & 0x7FFFFFFF for x in (a, b, c)):
        return _bits(special + _float(c))
    product, addend = value_of(a) * value_of(b), value_of(c)
    negative_product = (a ^ b) >> 31 == 1
    negative = negative_product if not product and not addend and negative_product == (c >> 31 == 1) else False
    return encode(product + addend, negative)


def _square_root(a: int) -> int:
    if is_nan(a) or (a >> 31 and a != NEGATIVE):
        return NAN
    if a in (NEGATIVE, INF):
        return a
    # An integer root with 40 more bits than needed, made odd where it is not exact, rounds as the real one does.
    value = value_of(a) * Fraction(4) ** 200
    root = math.isqrt(math.floor(value))
    exact = root * root == value
    return encode(Fraction(2 * root + (not exact), 2) / Fraction(2) ** 200, False)


def _ftz(function: Callable[..., int]) -> Callable[..., int]:
    return lambda *operands: flush(function(*map(flush, operands)))


def _ftz_product(function: Callable[..., int]) -> Callable[..., int]:
    """A product (with an addend) is flushed where it is below 2^-126 when rounded as if exponents had no bound.

    So does an H200, where rounding a subnormal to its own grid would have given 2^-126.
    """

    def result(a: int, b: int, c: int | None = None) -> int:
        operands = [flush(x) for x in ((a, b) if c is None else (a, b, c))]
        rounded = flush(function(*operands))
        if any(x & 0x7F800000 == 0x7F800000 for x in operands):
            return rounded
        exact = value_of(operands[0]) * value_of(operands[1]) + (value_of(operands[2]) if c is not None else 0)
        scaled = value_of(encode(abs(exact) * 2**64, False))
        return rounded & NEGATIVE if 0 < scaled < Fraction(1, 2**62) else rounded

    return result


def _extreme(a: int, b: int, *, largest: bool, nan: bool = False) -> int:
    if is_nan(a) or is_nan(b):
        return NAN if nan or (is_nan(a) and is_nan(b)) else b if is_nan(a) else a
    order = lambda bits: (_float(bits), bits >> 31 == 0)  # noqa: E731  (+0 is above -0)
    return (max if largest else min)(a, b, key=order)


def _minimum(a: int, b: int) -> int:
    return _extreme(a, b, largest=False)


def _maximum(a: int, b: int) -> int:
    return _extreme(a, b, largest=True)


def _minimum_nan(a: int, b: int) -> int:
    return _extreme(a, b, largest=False, nan=True)


def _maximum_nan(a: int, b: int) -> int:
    return _extreme(a, b, largest=True, nan=True)


def _of(function: Callable[..., int], *names: str) -> Callable[..., int]:
    """The function of some of the operands a, b, c."""
    places = ["abc".index(name) for name in names]
    return lambda *operands: function(*(operands[place] for place in places))


_A, _B, _C = crossed(np.uint32, [*NUMBERS, *NANS], [*NUMBERS[::2], *NANS[::2]], [*NUMBERS, *NANS])
elementwise(
    "arithmetic-f32",
    {"a": _A, "b": _B, "c": _C},
    [
        ("add.f32 %d, %a, %b;", _of(_sum, *"ab")),
        ("add.rn.f32 %d, %a, 0f3F800000;", lambda a, b, c: _sum(a, 0x3F800000)),
        ("add.rn.ftz.f32 %d, %a, %b;", _of(_ftz(_sum), *"ab")),
        ("sub.rn.f32 %d, %a, %b;", _of(_difference, *"ab")),
        ("sub.ftz.f32 %d, %a, %b;", _of(_ftz(_difference), *"ab")),
        ("mul.rn.f32 %d, %a, %b;", _of(_product, *"ab")),
        ("mul.ftz.f32 %d, %a, %b;", _of(_ftz_product(_product), *"ab")),
        ("fma.rn.f32 %d, %a, %b, %c;", _fma),
        ("fma.rn.ftz.f32 %d, %a, %b, %c;", _ftz_product(_fma)),
        ("mad.rn.f32 %d, %a, %b, %c;", _fma),
        ("div.rn.f32 %d, %a, %b;", _of(_ratio, *"ab")),
        ("div.rn.ftz.f32 %d, %a, %b;", _of(_ftz(_ratio), *"ab")),
        ("rcp.rn.f32 %d, %a;", lambda a, b, c: _ratio(0x3F800000, a)),
        ("rcp.rn.ftz.f32 %d, %a;", lambda a, b, c: _ftz(_ratio)(0x3F800000, a)),
        ("sqrt.rn.f32 %d, %a;", _of(_square_root, "a")),
        ("sqrt.rn.ftz.f32 %d, %a;", _of(_ftz(_square_root), "a")),
        ("min.f32 %d, %a, %b;", _of(_minimum, *"ab")),
        ("max.f32 %d, %a, %b;", _of(_maximum, *"ab")),
        ("min.ftz.f32 %d, %a, %b;", _of(_ftz(_minimum), *"ab")),
        ("max.ftz.f32 %d, %a, %b;", _of(_ftz(_maximum), *"ab")),
        ("min.NaN.f32 %d, %a, %b;", _of(_minimum_nan, *"ab")),
        ("max.NaN.f32 %d, %a, %b;", _of(_maximum_nan, *"ab")),
    ],
)
_SIGN_A = np.array([*NUMBERS, *NUMBERS[-(-len(NUMBERS) % 32) :]], np.uint32)
elementwise(  # of a NaN they give an unspecified one
    "signs-f32",
    {"a": _SIGN_A},
    [
        ("neg.f32 %d, %a;", lambda a: a ^ NEGATIVE),
        ("neg.ftz.f32 %d, %a;", lambda a: flush(a) ^ NEGATIVE),
        ("abs.f32 %d, %a;", lambda a: a & ~NEGATIVE),
        ("abs.ftz.f32 %d, %a;", lambda a: flush(a) & ~NEGATIVE),
        ("mov.f32 %d, %a;", lambda a: a),
        ("mov.f32 %d, 0f80000000;", lambda a: NEGATIVE),
        ("mov.f32 %d, 0f7FC00001;", lambda a: 0x7FC00001),
    ],
)

_POSITIVE = [0, INF, 0x7FC00000, *(0x3F800000 + n * 0x00800000 for n in (-6, -4, -2, 2, 4, 6)),
             *(int(v) for v in np.random.default_rng(12).integers(0x3C000000, 0x3EFFFFFF, 12)),
             *(int(v) for v in np.random.default_rng(13).integers(0x40100000, 0x42000000, 11))]  # fmt: skip
_APPROXIMATE = np.array([*_POSITIVE, *(NEGATIVE | value for value in _POSITIVE)], np.uint32)
_APPROXIMATE_B = np.roll(np.array([value if value & INF not in (0, INF) else 0x40200000 for value in _APPROXIMATE]), 7)


def _approximate(function: Callable[[float], float]) -> Callable[..., int]:
    def result(a: int, b: int) -> int:
        value = _float(a)
        return NAN if math.isnan(value) else _bits(function(value))

    return result


def _reciprocal_root(a: float) -> float:
    return math.nan if a < 0 else _divide(1.0, math.sqrt(a) if a else a)


def _logarithm(a: float) -> float:
    return math.nan if a < 0 else -math.inf if a == 0 else math.log2(a)


elementwise(
    "approximations-f32",
    {"a": _APPROXIMATE, "b": _APPROXIMATE_B.astype(np.uint32)},
    [
        ("rcp.approx.f32 %d, %a;", _approximate(lambda a: _divide(1.0, a))),
        ("rcp.approx.ftz.f32 %d, %a;", _approximate(lambda a: _divide(1.0, a))),
        ("sqrt.approx.f32 %d, %a;", _approximate(lambda a: math.nan if a < 0 else math.sqrt(a) if a else a)),
        ("rsqrt.approx.f32 %d, %a;", _approximate(_reciprocal_root)),
        ("rsqrt.approx.ftz.f32 %d, %a;", _approximate(_reciprocal_root)),
        ("ex2.approx.f32 %d, %a;", _approximate(lambda a: 2.0**a)),
        ("ex2.approx.ftz.f32 %d, %a;", _approximate(lambda a: 2.0**a)),
        ("lg2.approx.f32 %d, %a;", _approximate(_logarithm)),
        ("div.approx.f32 %d, %a, %b;", lambda a, b: _ratio(a, b)),
        ("div.full.f32 %d, %a, %b;", lambda a, b: _ratio(a, b)),
    ],
    tolerance=2.0**-20,
    any_nan=True,
)

# --- packed: sm_100 --------------------------------------------------------------------------------------------------

_P, _Q, _R = (
    np.ascontiguousarray((x.astype(np.uint64) << np.uint64(32) | y.astype(np.uint64))[:1024])
    for x, y in ((_A, _C), (_B, _A), (_C, _B))
)


def _halves(function: Callable[..., int], operands: int) -> Callable[..., int]:
    def result(*values: int) -> int:
        used = values[:operands]
        return function(*(v & MASK32 for v in used)) | function(*(v >> 32 for v in used)) << 32

    return result


elementwise(
    "packed-f32x2",
    {"a": _P, "b": _Q, "c": _R},
    [
        ("add.rn.f32x2 %d, %a, %b;", _halves(_sum, 2)),
        ("sub.rn.f32x2 %d, %a, %b;", _halves(_difference, 2)),
        ("mul.rn.f32x2 %d, %a, %b;", _halves(_product, 2)),
        ("fma.rn.f32x2 %d, %a, %b, %c;", _halves(_fma, 3)),
        ("add.rn.ftz.f32x2 %d, %a, %b;", _halves(_ftz(_sum), 2)),
        ("sub.rn.ftz.f32x2 %d, %a, %b;", _halves(_ftz(_difference), 2)),
        ("mul.rn.ftz.f32x2 %d, %a, %b;", _halves(_ftz_product(_product), 2)),
        ("fma.rn.ftz.f32x2 %d, %a, %b, %c;", _halves(_ftz_product(_fma), 3)),
    ],
    result=64,
    target="sm_100a",
)

# --- conversions -----------------------------------------------------------------------------------------------------


def _to_integer(bits: int, rounding: str, lowest: int, highest: int, *, ftz: bool = False) -> int:
    if is_nan(bits):
        return 0
    if bits & 0x7FFFFFFF == INF:
        return (lowest if bits >> 31 else highest) & MASK32
    value = value_of(flush(bits) if ftz else bits)
    whole = {"rzi": math.trunc, "rni": round, "rmi": math.floor, "rpi": math.ceil}[rounding](value)
    return min(max(whole, lowest), highest) & MASK32


_HALVES = [_bits(n / 2) for n in (1, 3, 5, 7, -1, -3, -5, -7, 2**24 + 1, 2**24 + 3)]
_LIMITS = [0x4EFFFFFF, 0x4F000000, 0x4F7FFFFF, 0x4F800000, 0xCF000000, 0xCF000001, 0x4B7FFFFF, 0x5A000000]
_TO_INTEGERS = [*NUMBERS, *NANS, *_HALVES, *_LIMITS]
_INTEGER_INPUTS = np.array([*_TO_INTEGERS, *([0] * (-len(_TO_INTEGERS) % 32))], np.uint32)


def _converted(kind: str, rounding: str, ftz: bool) -> tuple[str, Callable[..., int]]:
    lowest, highest = (-(1 << 31), (1 << 31) - 1) if kind == "s32" else (0, MASK32)
    return (
        f"cvt.{rounding}{'.ftz' if ftz else ''}.{kind}.f32 %d, %a;",
        lambda a: _to_integer(a, rounding, lowest, highest, ftz=ftz),
    )


elementwise(
    "f32-to-integers",
    {"a": _INTEGER_INPUTS},
    [
        _converted(kind, rounding, ftz)
        for kind in ("s32", "u32")
        for rounding in ("rzi", "rni", "rmi", "rpi")
        for ftz in (False, True)
    ],
)
_WHOLE = [0, 1, 2, 3, 0xFFFFFF, 0x1000000, 0x1000001, 0x1000003, 0x1000005, 0x7FFFFFBF, 0x7FFFFFC0, 0x7FFFFFFF, NEGATIVE,
          0x80000001, 0x80000040, 0x80000080, 0xFEFFFFFF, 0xFFFFFF7F, 0xFFFFFF80, 0xFFFFFFFE, MASK32,
          *(int(v) for v in np.random.default_rng(14).integers(0, 1 << 32, 11))]  # fmt: skip
elementwise(
    "integers-to-f32",
    {"a": np.array(_WHOLE, np.uint32)},
    [
        ("cvt.rn.f32.s32 %d, %a;", lambda a: encode(Fraction(s32(a)), False)),
        ("cvt.rn.f32.u32 %d, %a;", lambda a: encode(Fraction(a), False)),
    ],
)


def narrow(bits: int, exponent_bits: int, mantissa_bits: int, *, relu: bool = False) -> int:
    """fp32 to a 16-bit format, to nearest even; 65520 and its like become infinities, NaN the canonical one."""
    if is_nan(bits):
        return 0x7FFF
    if bits & 0x7FFFFFFF == INF:
        result = bits >> 16 & 0x8000 | (1 << exponent_bits) - 1 << mantissa_bits
    else:
        result = encode(value_of(bits), bits >> 31 == 1, exponent_bits, mantissa_bits)
    return 0 if relu and result >> 15 else result


def _f16(bits: int) -> int:
    return narrow(bits, 5, 10)


def _bf16(bits: int) -> int:
    return narrow(bits, 8, 7)


_TIES16 = [0x3F801000, 0x3F803000, 0x3F801001, 0x3F800FFF, 0x477FE000, 0x477FEFFF, 0x477FF000, 0x47800000, 0x33000000,
           0x33000001, 0x33800000, 0x33C00000, 0x387FC000, 0x387FE000, 0x38800000, 0x387FF000]  # fmt: skip
_TIESB16 = [0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0x7F7F7FFF, 0x7F7F8000, 0x00008000, 0x00018000, 0x007FFFFF]
_NARROW = [*NUMBERS, *NANS, *_TIES16, *_TIESB16, *(NEGATIVE | value for value in _TIES16 + _TIESB16)]
_NARROW_A = np.array([*_NARROW, *([0] * (-len(_NARROW) % 32))], np.uint32)
_NARROW_B = np.roll(_NARROW_A, 13)
_OUT16 = " cvt.u32.u16 %d, %h;"
elementwise(
    "f32-to-halves",
    {"a": _NARROW_A, "b": _NARROW_B},
    [
        ("cvt.rn.f16.f32 %h, %a;" + _OUT16, lambda a, b: _f16(a)),
        ("cvt.rn.bf16.f32 %h, %a;" + _OUT16, lambda a, b: _bf16(a)),
        ("cvt.rn.f16x2.f32 %d, %a, %b;", lambda a, b: _f16(a) << 16 | _f16(b)),
        ("cvt.rn.bf16x2.f32 %d, %a, %b;", lambda a, b: _bf16(a) << 16 | _bf16(b)),
    ],
)
_RELU_A = _NARROW_A[_NARROW_A != NEGATIVE]  # the ISA does not say which zero .relu makes of -0
_RELU_A = _RELU_A[: len(_RELU_A) // 32 * 32]
elementwise(
    "f32-to-halves-relu",
    {"a": _RELU_A, "b": _RELU_A[::-1].copy()},
    [
        ("cvt.rn.relu.f16.f32 %h, %a;" + _OUT16, lambda a, b: narrow(a, 5, 10, relu=True)),
        ("cvt.rn.relu.bf16.f32 %h, %a;" + _OUT16, lambda a, b: narrow(a, 8, 7, relu=True)),
        ("cvt.rn.relu.f16x2.f32 %d, %a, %b;", lambda a, b: narrow(a, 5, 10, relu=True) << 16 | narrow(b, 5, 10, relu=True)),
        ("cvt.rn.relu.bf16x2.f32 %d, %a, %b;", lambda a, b: narrow(a, 8, 7, relu=True) << 16 | narrow(b, 8, 7, relu=True)),
    ],
)  # fmt: skip


def widen(half: int, exponent_bits: int, mantissa_bits: int) -> int:
    """A 16-bit format to fp32, exactly."""
    top = (1 << exponent_bits) - 1
    sign, exponent, mantissa = half >> 15, half >> mantissa_bits & top, half & (1 << mantissa_bits) - 1
    if exponent == top:
        return NAN if mantissa else sign << 31 | INF
    scale = Fraction(2) ** (max(exponent, 1) - (1 << exponent_bits - 1) + 1 - mantissa_bits)
    value = (mantissa | (1 << mantissa_bits if exponent else 0)) * scale
    return encode(-value if sign else value, sign == 1)


_ALL16 = np.arange(0, 1 << 16, 61, np.uint32).astype(np.uint16)
_ALL16 = np.concatenate(
    [_ALL16, np.array([0x7C00, 0xFC00, 0x7F80, 0xFF80, 0x8000, 1, 0x3FF, 0x400, 0x7FFF], np.uint16)]
)
_ALL16 = _ALL16[: len(_ALL16) // 32 * 32]
elementwise(
    "halves-to-f32",
    {"a": _ALL16},
    [
        ("cvt.f32.f16 %d, %a;", lambda a: widen(a, 5, 10)),
        ("cvt.f32.bf16 %d, %a;", lambda a: widen(a, 8, 7)),
    ],
    any_nan=True,
)
_INTEGERS = np.array([0, 1, 0x7F, 0x80, 0xFF, 0x100, 0x7FFF, 0x8000, 0xFFFF, 0x10000, 0x7FFFFFFF, NEGATIVE, MASK32,
                      0x12345678, 0x89ABCDEF, 0xFEDCBA98] * 2, np.uint32)  # fmt: skip
_HALF = "cvt.u16.u32 %h, %a; "


def _sign_extended(value: int, bits: int) -> int:
    value &= (1 << bits) - 1
    return (value - (1 << bits) if value >> bits - 1 else value) & 0xFFFFFFFFFFFFFFFF


elementwise(
    "integer-widths-32",
    {"a": _INTEGERS, "w": (_INTEGERS.astype(np.uint64) << np.uint64(20)) + np.uint64(0x8000000080000001)},
    [
        ("cvt.u32.u64 %d, %w;", lambda a, w: w & MASK32),
        ("cvt.s32.s64 %d, %w;", lambda a, w: w & MASK32),
        ("cvt.u32.s64 %d, %w;", lambda a, w: w & MASK32),
        ("cvt.s32.u64 %d, %w;", lambda a, w: w & MASK32),
        (_HALF + "cvt.u32.u16 %d, %h;", lambda a, w: a & 0xFFFF),
        (_HALF + "cvt.s32.u16 %d, %h;", lambda a, w: a & 0xFFFF),
        (_HALF + "cvt.s32.s16 %d, %h;", lambda a, w: _sign_extended(a, 16) & MASK32),
        (_HALF + "cvt.u32.s16 %d, %h;", lambda a, w: _sign_extended(a, 16) & MASK32),
        ("cvt.s16.s32 %h, %a; cvt.u32.u16 %d, %h;", lambda a, w: a & 0xFFFF),
        ("cvt.u16.s32 %h, %a; cvt.u32.u16 %d, %h;", lambda a, w: a & 0xFFFF),
        ("cvt.s16.u32 %h, %a; cvt.u32.u16 %d, %h;", lambda a, w: a & 0xFFFF),
        ("cvt.u32.u8 %d, %a;", lambda a, w: a & 0xFF),
        (_HALF + "cvt.u32.u8 %d, %h;", lambda a, w: a & 0xFF),
        ("cvt.s32.s8 %d, %a;", lambda a, w: _sign_extended(a, 8) & MASK32),
    ],
)
elementwise(
    "integer-widths-64",
    {"a": _INTEGERS},
    [
        ("cvt.u64.u32 %d, %a;", lambda a: a),
        ("cvt.s64.u32 %d, %a;", lambda a: a),
        ("cvt.s64.s32 %d, %a;", lambda a: _sign_extended(a, 32)),
        ("cvt.u64.s32 %d, %a;", lambda a: _sign_extended(a, 32)),
        (_HALF + "cvt.u64.u16 %d, %h;", lambda a: a & 0xFFFF),
    ],
    result=64,
)
