"""Loads and stores of every width, parameters, atomics, and matrices of 8 by 8."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

import numpy as np

from ptx_snippets.floating import encode, flush, value_of
from ptx_snippets.framework import MASK32, poison, program, s32

Array = Any
_BYTES = np.random.default_rng(41).integers(0, 256, 4096, np.uint8)
_SOURCE = {"source": _BYTES}
_AT = "ld.param.u64 %d0, [source];\nld.param.u64 %d1, [target];\n"


def _copied(count: int) -> Callable[[Mapping[str, Array]], Mapping[str, Array]]:
    return lambda buffers: {"target": buffers["source"][:count]}


# --- widths ----------------------------------------------------------------------------------------------------------

_SIGNED = np.array(
    [
        _BYTES[:32].astype(np.uint32),
        _BYTES[:32].view(np.int8).astype(np.int32).view(np.uint32),
        _BYTES[:64].view(np.uint16).astype(np.uint32),
        _BYTES[:64].view(np.int16).astype(np.int32).view(np.uint32),
        _BYTES[:128].view(np.uint32),
        _BYTES[:128].view(np.uint32),
        _BYTES[64:192].view(np.uint32),
    ]
)
program(
    "loads-extend-what-they-read",
    """
    ld.param.u64 %d0, [source];
    cvt.u64.u32 %d1, %thread;
    add.s64 %d2, %d0, %d1;
    ld.global.u8 %r0, [%d2];
    STORE 0, %r0;
    ld.global.s8 %r0, [%d2];
    STORE 1, %r0;
    mad.wide.u32 %d2, %thread, 2, %d0;
    ld.global.u16 %r0, [%d2];
    STORE 2, %r0;
    ld.global.s16 %r0, [%d2];
    STORE 3, %r0;
    mad.wide.u32 %d2, %thread, 4, %d0;
    ld.global.nc.u32 %r0, [%d2];
    STORE 4, %r0;
    ld.global.L1::no_allocate.s32 %r0, [%d2];
    STORE 5, %r0;
    add.s64 %d2, %d2, 128;
    ld.global.f32 %r0, [%d2 + -64];
    STORE 6, %r0;
    ld.global.u32 %d3, [%d2 + -128];
    shr.u64 %d4, %d3, 32;
    cvt.u32.u64 %r0, %d4;
    STORE 7, %r0;
    ld.global.s32 %d3, [%d2 + -128];
    shr.u64 %d4, %d3, 32;
    cvt.u32.u64 %r0, %d4;
    STORE 8, %r0;
    ld.global.s8 %h0, [%d2];
    cvt.u32.u16 %r0, %h0;
    STORE 9, %r0;
    ld.global.u8 %h0, [%d2];
    cvt.u32.u16 %r0, %h0;
    STORE 10, %r0;
    """,
    lambda buffers: {
        "out": np.array(
            [
                *_SIGNED,
                np.zeros(32, np.uint32),
                np.where(_SIGNED[5] >> 31, np.uint32(MASK32), np.uint32(0)),
                _BYTES[128:256:4].view(np.int8).astype(np.int16).view(np.uint16).astype(np.uint32),
                _BYTES[128:256:4].astype(np.uint32),
            ]
        )
    },
    holds=(
        "ld.global.u8", "ld.global.s8", "ld.global.u16", "ld.global.s16", "ld.global.nc.u32", "ld.global.f32",
        "ld.global.L1::no_allocate.s32", "ld.global.u32", "ld.global.s32",
    ),
    rows=11,
    inputs=_SOURCE,
)  # fmt: skip

_WIDTHS = [  # (type, registers, bytes of all)
    ("u8", ["%h0"], 1), ("b16", ["%h0"], 2), ("u32", ["%r0"], 4), ("b64", ["%d4"], 8),
    ("v2.u8", ["%h0", "%h1"], 2), ("v4.u8", ["%h0", "%h1", "%h2", "%h3"], 4), ("v2.u16", ["%h0", "%h1"], 4),
    ("v4.b16", ["%h0", "%h1", "%h2", "%h3"], 8), ("v2.f32", ["%r0", "%r1"], 8),
    ("v4.b32", ["%r0", "%r1", "%r2", "%r3"], 16), ("v2.b64", ["%d4", "%d5"], 16),
]  # fmt: skip


def _transfer(space: str, kind: str, registers: list[str], address: str, load: bool) -> str:
    fragment = f"{{{', '.join(registers)}}}" if len(registers) > 1 else registers[0]
    opcode = f"{'ld' if load else 'st'}{space}.{kind}"
    return f"{opcode} {fragment}, [{address}];" if load else f"{opcode} [{address}], {fragment};"


def _widths_body(through_shared: bool) -> tuple[str, list[str]]:
    """Copy 32 lanes' worth of bytes with every width, directly or by way of shared memory."""
    lines, opcodes, place = [_AT], [], 0
    if through_shared:
        lines.append(".shared .align 16 .b8 words[512];\nmov.u32 %r20, words;")
    for kind, registers, size in _WIDTHS:
        lines.append(f"mad.wide.u32 %d2, %thread, {size}, %d0;\nmad.wide.u32 %d3, %thread, {size}, %d1;")
        lines.append(_transfer(".global", kind, registers, f"%d2 + {place}", True))
        opcodes += [f"ld.global.{kind}", f"st.global.{kind}"]
        if through_shared:  # each lane reads what its neighbour has written, and the answer is the neighbour's
            lines.append(f"mad.lo.u32 %r21, %thread, {size}, %r20;\nxor.b32 %r22, %thread, 1;")
            lines.append(f"mad.lo.u32 %r22, %r22, {size}, %r20;")
            lines += [_transfer(".shared", kind, registers, "%r21", False), "bar.warp.sync -1;"]
            lines += [_transfer(".shared", kind, registers, "%r22", True), "bar.warp.sync -1;"]
            opcodes += [f"ld.shared.{kind}", f"st.shared.{kind}"]
        lines.append(_transfer(".global", kind, registers, f"%d3 + {place}", False))
        place += 32 * size
    return "\n".join(lines), opcodes


_TOTAL = 32 * sum(size for _, _, size in _WIDTHS)


def _swapped(buffers: Mapping[str, Array]) -> Mapping[str, Array]:
    parts, place = [], 0
    for _, _, size in _WIDTHS:
        lanes = buffers["source"][place : place + 32 * size].reshape(32, size)
        parts.append(lanes[np.arange(32) ^ 1].reshape(-1))
        place += 32 * size
    return {"target": np.concatenate(parts)}


for _name, _through, _answer in (("global", False, _copied(_TOTAL)), ("shared", True, _swapped)):
    _body, _held = _widths_body(_through)
    program(
        f"widths-{_name}", _body, _answer, holds=_held, inputs=_SOURCE,
        outputs={"out": poison(1), "target": poison(_TOTAL, np.uint8)},
    )  # fmt: skip

program(
    "generic-addresses",
    _AT
    + """
    .shared .align 16 .b8 words[256];
    mov.u64 %d5, words;
    cvta.shared.u64 %d6, %d5;
    cvta.to.shared.u64 %d7, %d6;
    cvta.to.global.u64 %d8, %d0;
    cvta.global.u64 %d9, %d8;
    mad.wide.u32 %d2, %thread, 4, %d9;
    mad.wide.u32 %d3, %thread, 4, %d1;
    mad.wide.u32 %d10, %thread, 8, %d6;
    mad.wide.u32 %d11, %thread, 8, %d7;
    ld.b32 %r0, [%d2];
    st.b32 [%d10 + 4], %r0;
    bar.warp.sync -1;
    ld.shared.b32 %r1, [%d11 + 4];
    add.u32 %r1, %r1, 1;
    st.shared.b32 [%d11], %r1;
    bar.warp.sync -1;
    mad.wide.u32 %d12, %thread, -8, %d6;
    xor.b32 %r2, %thread, 31;
    mad.wide.u32 %d12, %r2, 8, %d6;
    ld.v2.u32 {%r3, %r4}, [%d12];
    st.u32 [%d3], %r3;
    st.global.u32 [%d3 + 128], %r4;
    """.replace("    mad.wide.u32 %d12, %thread, -8, %d6;\n", ""),
    lambda buffers: {
        "target": np.stack([buffers["source"].view(np.uint32)[31::-1] + 1, buffers["source"].view(np.uint32)[31::-1]])
    },
    holds=(
        "cvta.shared.u64", "cvta.to.shared.u64", "cvta.to.global.u64", "cvta.global.u64", "ld.b32", "st.b32", "st.u32",
        "ld.v2.u32",
    ),
    inputs=_SOURCE,
    outputs={"out": poison(1), "target": poison((2, 32))},
)  # fmt: skip
program(
    "ordered-and-volatile-accesses",
    """
    .shared .align 4 .b8 words[128];
    shl.b32 %r1, %thread, 2;
    mov.u32 %r2, words;
    add.u32 %r1, %r1, %r2;
    st.volatile.shared.u32 [%r1], %thread;
    ld.volatile.shared.u32 %r3, [%r1];
    st.relaxed.gpu.global.u32 [%out], %r3;
    ld.acquire.gpu.global.u32 %r4, [%out];
    add.u32 %r4, %r4, 5;
    st.release.gpu.global.u32 [%out + 128], %r4;
    ld.relaxed.gpu.global.u32 %r5, [%out + 128];
    st.global.wt.u32 [%out + 256], %r5;
    """,
    lambda buffers: {"out": np.arange(32, dtype=np.uint32) + np.array([[0], [5], [5]], np.uint32)},
    holds=("st.volatile.shared.u32", "st.relaxed.gpu.global.u32", "ld.acquire.gpu.global.u32"),
    rows=3,
)

# --- parameters ------------------------------------------------------------------------------------------------------

_SCALARS: dict[str, tuple[str, int | bytes]] = {
    "byte": ("u8", 0x9C), "half": ("u16", 0xBEEF), "word": ("u32", 0x87654321), "long": ("u64", 0xFEDCBA9876543210),
    "number": ("f32", 0x40490FDB), "block": ("b8", bytes(range(100, 132))),
}  # fmt: skip
program(
    "parameters",
    """
    ld.param.u8 %r0, [byte];
    STORE 0, %r0;
    ld.param.s8 %r0, [byte];
    STORE 1, %r0;
    ld.param.u16 %r0, [half];
    STORE 2, %r0;
    ld.param.s16 %r0, [half];
    STORE 3, %r0;
    ld.param.b32 %r0, [word];
    STORE 4, %r0;
    ld.param.u32 %d0, [word];
    mov.b64 {%r0, %r1}, %d0;
    STORE 5, %r0;
    STORE 6, %r1;
    ld.param.s32 %d0, [word];
    mov.b64 {%r0, %r1}, %d0;
    STORE 7, %r0;
    STORE 8, %r1;
    ld.param.b64 %d0, [long];
    mov.b64 {%r0, %r1}, %d0;
    STORE 9, %r0;
    STORE 10, %r1;
    ld.param.f32 %r0, [number];
    STORE 11, %r0;
    ld.param.u32 %r0, [long + 4];
    STORE 12, %r0;
    ld.param.v4.u32 {%r0, %r1, %r2, %r3}, [block + 16];
    STORE 13, %r0;
    STORE 14, %r3;
    ld.param.v2.u64 {%d0, %d1}, [block];
    mov.b64 {%r0, %r1}, %d1;
    STORE 15, %r1;
    ld.param.u8 %h0, [block + 7];
    cvt.u32.u16 %r0, %h0;
    STORE 16, %r0;
    ld.param.s8 %d0, [byte];
    mov.b64 {%r0, %r1}, %d0;
    STORE 17, %r0;
    STORE 18, %r1;
    """,
    lambda buffers: {
        "out": np.repeat(
            np.array(
                [
                    0x9C, 0xFFFFFF9C, 0xBEEF, 0xFFFFBEEF, 0x87654321, 0x87654321, 0, 0x87654321, MASK32, 0x76543210,
                    0xFEDCBA98, 0x40490FDB, 0xFEDCBA98, 0x77767574, 0x83828180, 0x73727170, 107, 0xFFFFFF9C, MASK32,
                ],
                np.uint32,
            )[:, None],
            32,
            axis=1,
        )
    },
    holds=(
        "ld.param.u8", "ld.param.s8", "ld.param.u16", "ld.param.s16", "ld.param.b32", "ld.param.u32", "ld.param.s32",
        "ld.param.b64", "ld.param.f32", "ld.param.v4.u32", "ld.param.v2.u64",
    ),
    rows=19,
    scalars=_SCALARS,
)  # fmt: skip

# --- atomics ---------------------------------------------------------------------------------------------------------


def _add_f32(old: int, value: int) -> int:
    return encode(value_of(old) + value_of(value), (old & value) >> 31 == 1)


_ATOMICS: dict[str, Callable[[int, int], int]] = {
    "add.u32": lambda old, value: old + value & MASK32,
    "add.s32": lambda old, value: old + value & MASK32,
    "exch.b32": lambda old, value: value,
    "min.u32": min,
    "max.u32": max,
    "min.s32": lambda old, value: min(s32(old), s32(value)) & MASK32,
    "max.s32": lambda old, value: max(s32(old), s32(value)) & MASK32,
    "and.b32": lambda old, value: old & value,
    "or.b32": lambda old, value: old | value,
    "xor.b32": lambda old, value: old ^ value,
}
_OLD = np.random.default_rng(42).integers(0, 1 << 32, 32, np.uint64).astype(np.uint32)
_OLD[:6] = [0, MASK32, 0x80000000, 0x7FFFFFFF, 5, 0x80000001]
_NEW = np.roll(_OLD, 3) ^ np.uint32(0x11)
_NEW[6:9] = _OLD[6:9]
_FLOAT_OLD = np.array([0, 0x3F800000, 0x00000001, 0x00400000, 0x007FFFFF, 0x80000001, 0x00800000, 0x7F7FFFFF, 0xC0490FDB,
                       0x80000000, 0x00800001, 0x33800000, 0x4B800000, 0x00000000, 0x80800000, 0x3F800000] * 2, np.uint32)  # fmt: skip
_FLOAT_NEW = np.array([0x3F800000, 0x3F800000, 0x00000001, 0x00400000, 0x00000001, 0x80000001, 0x80400000, 0x7F7FFFFF,
                       0x40490FDB, 0x80000000, 0x80800000, 0x3F800000, 0x3F800000, 0x80000000, 0x00800001, 0xBF800001] * 2,
                      np.uint32)  # fmt: skip


def _applied(function: Callable[[int, int], int], old: Array, new: Array) -> Array:
    return np.array([function(int(o), int(n)) for o, n in zip(old, new, strict=True)], np.uint32)


def _atomics_body(space: str) -> tuple[str, list[str]]:
    """Each lane has a word of its own for each operation, and two rows of results: the old word and the new one."""
    lines, opcodes = [], []
    for row, name in enumerate([*_ATOMICS, "cas.b32", "add.f32"]):
        operation, kind = name.split(".")
        opcode = f"atom{space}.{operation}.{kind}"
        opcodes.append(opcode)
        old, new = ("%r11", "%r12") if kind == "f32" else ("%r0", "%r1")
        value = new
        if operation == "cas":  # an even lane expects what is there, an odd one does not
            lines.append("and.b32 %r5, %lane, 1;\nadd.u32 %r5, %r5, %r0;")
            value = "%r5, %r1"
        if space == ".shared":
            lines.append(f"st.shared.b32 [%r21], {old};\n{opcode} %r4, [%r21], {value};\nSTORE {row}, %r4;")
            lines.append(f"ld.shared.b32 %r4, [%r21];\nst.global.b32 [%d2 + {128 * row}], %r4;")
        else:
            lines.append(f"{opcode} %r4, [%d2 + {128 * row}], {value};\nSTORE {row}, %r4;")
    return "\n".join(lines), opcodes


def _atomics_answer(space: str) -> Callable[[Mapping[str, Array]], Mapping[str, Array]]:
    add = _add_f32 if space == ".shared" else lambda old, value: flush(_add_f32(flush(old), flush(value)))

    def answer(buffers: Mapping[str, Array]) -> Mapping[str, Array]:
        rows = [_applied(function, _OLD, _NEW) for function in _ATOMICS.values()]
        rows.append(np.where(np.arange(32) % 2 == 0, _NEW, _OLD))
        rows.append(_applied(add, _FLOAT_OLD, _FLOAT_NEW))
        return {"target": np.array(rows), "out": np.array([_OLD] * (len(rows) - 1) + [_FLOAT_OLD])}

    return answer


_COUNT = len(_ATOMICS) + 2
_WORDS = "".join(
    f"ld.param.u64 %d0, [{name}];\nmad.wide.u32 %d0, %thread, 4, %d0;\nld.global.b32 {register}, [%d0];\n"
    for name, register in (("old", "%r0"), ("new", "%r1"), ("float_old", "%r11"), ("float_new", "%r12"))
)
_OPERANDS = {"old": _OLD, "new": _NEW, "float_old": _FLOAT_OLD, "float_new": _FLOAT_NEW}
for _space in (".global", ".shared", ""):
    _body, _held = _atomics_body(_space)
    program(
        f"atomics-{_space[1:] or 'generic'}",
        _WORDS
        + "ld.param.u64 %d2, [target];\nmad.wide.u32 %d2, %thread, 4, %d2;\n"
        + (".shared .align 4 .b8 words[128];\nmov.u32 %r21, words;\nmad.lo.u32 %r21, %thread, 4, %r21;\n")
        + _body,
        _atomics_answer(_space),
        holds=_held,
        inputs=_OPERANDS,
        outputs={
            "out": poison((_COUNT, 32)),
            "target": poison((_COUNT, 32)) if _space == ".shared" else np.array([_OLD] * (_COUNT - 1) + [_FLOAT_OLD]),
        },
        reads_outputs=_space != ".shared",
    )

_CONTENDED = ("add.u32", "min.s32", "max.u32", "and.b32", "or.b32", "xor.b32")
program(  # many CTAs and lanes at one word: whatever the order, the result is the same
    "reductions-into-one-word",
    """
    ld.param.u64 %d0, [values];
    mov.u32 %r9, %ctaid.x;
    mad.lo.u32 %r9, %r9, 64, %thread;
    mad.wide.u32 %d0, %r9, 4, %d0;
    ld.global.b32 %r0, [%d0];
    ld.param.u64 %d1, [target];
    """
    + "\n".join(f"red.global.{name} [%d1 + {4 * n}], %r0;" for n, name in enumerate(_CONTENDED))
    + """
    cvt.u64.u32 %d3, %r0;
    red.global.add.u64 [%d1 + 32], %d3;
    atom.global.add.u64 %d4, [%d1 + 40], %d3;
    and.b32 %r1, %r0, 15;
    cvt.rn.f32.u32 %r2, %r1;
    neg.f32 %r3, %r2;
    red.global.add.f32 [%d1 + 48], %r2;
    red.global.add.v2.f32 [%d1 + 56], {%r2, %r3};
    red.global.add.v4.f32 [%d1 + 64], {%r2, %r3, %r3, %r2};
    red.relaxed.gpu.global.add.u32 [%d1 + 24], 3;
    """,
    lambda buffers: {"target": _contended(buffers["values"], buffers["target"])},
    holds=[f"red.global.{name}" for name in _CONTENDED]
    + ["red.global.add.u64", "atom.global.add.u64", "red.global.add.f32", "red.global.add.v2.f32",
       "red.global.add.v4.f32", "red.relaxed.gpu.global.add.u32"],
    inputs={"values": np.random.default_rng(43).integers(0, 1 << 32, 4 * 64, np.uint64).astype(np.uint32)},
    outputs={"out": poison(1), "target": np.array([7, 9, 11, MASK32, 1, 2, 4, 5] + [0] * 12, np.uint32)},
    reads_outputs=True,
    threads=64,
    grid=(4, 1, 1),
)  # fmt: skip


def _contended(values: Array, start: Array) -> Array:
    target = start.copy()
    numbers = [int(value) for value in values]
    for n, name in enumerate(_CONTENDED):
        word = int(start[n])
        for number in numbers:
            word = _ATOMICS[name](word, number)
        target[n] = word
    target[6] += np.uint32(3 * len(numbers))
    total = sum(numbers)
    target[8:12] = [total & MASK32, total >> 32] * 2
    small = sum(number & 15 for number in numbers)
    plus, minus = (encode(Fraction(value), False) for value in (small, -small))
    target[12] = plus
    target[14:16] = [plus, minus]
    target[16:20] = [plus, minus, minus, plus]
    return target


# --- matrices of 8 by 8 ----------------------------------------------------------------------------------------------

_PITCH = 48  # bytes from row to row: no multiple of a matrix's width
_MATRICES = np.random.default_rng(44).integers(0, 1 << 16, (32, 8), np.uint16)


def _fragment(matrix: Array, trans: bool) -> Array:
    """Lane l holds row l / 4, columns 2 (l % 4) and the next one; transposed, the same of the transposed matrix."""
    rows = (matrix.T if trans else matrix).astype(np.uint32)
    return np.array([rows[lane // 4, 2 * (lane % 4)] | rows[lane // 4, 2 * (lane % 4) + 1] << 16 for lane in range(32)])


_FILL = f"""
.shared .align 16 .b8 rows[{32 * _PITCH}];
mov.u32 %r20, rows;
mad.lo.u32 %r21, %lane, {_PITCH}, %r20;
"""
_FORMS = [(count, trans) for trans in (False, True) for count in (1, 2, 4)]


def _registers(count: int, first: int) -> str:
    return "{" + ", ".join(f"%r{first + n}" for n in range(count)) + "}"


program(
    "ldmatrix",
    _FILL
    + """
    ld.param.u64 %d0, [matrices];
    mad.wide.u32 %d0, %lane, 16, %d0;
    ld.global.v4.b32 {%r0, %r1, %r2, %r3}, [%d0];
    st.shared.v4.b32 [%r21], {%r0, %r1, %r2, %r3};
    bar.warp.sync -1;
    """
    + "\n".join(
        f"ldmatrix.sync.aligned.m8n8.x{count}{'.trans' if trans else ''}.shared.b16 {_registers(count, 4)}, [%r21];\n"
        + "\n".join(f"STORE {4 * row + n}, %r{4 + n};" for n in range(count))
        for row, (count, trans) in enumerate(_FORMS)
    ),
    lambda buffers: {
        "out": np.array(
            [
                _fragment(buffers["matrices"][8 * n : 8 * n + 8], trans) if n < count else poison(32)
                for count, trans in _FORMS
                for n in range(4)
            ]
        )
    },
    holds=[f"ldmatrix.sync.aligned.m8n8.x{count}{'.trans' if trans else ''}.shared.b16" for count, trans in _FORMS],
    rows=4 * len(_FORMS),
    inputs={"matrices": _MATRICES},
)
program(
    "stmatrix",
    _FILL
    + "".join(
        f"ld.param.u64 %d0, [fragments];\nmad.wide.u32 %d0, %lane, 4, %d0;\nld.global.b32 %r{n}, [%d0 + {128 * n}];\n"
        for n in range(4)
    )
    + "ld.param.u64 %d1, [target];\nmad.wide.u32 %d1, %lane, 16, %d1;\nmov.u32 %r10, -1;\n"
    + "\n".join(
        f"""
        st.shared.v4.b32 [%r21], {{%r10, %r10, %r10, %r10}};
        bar.warp.sync -1;
        stmatrix.sync.aligned.m8n8.x{count}{".trans" if trans else ""}.shared.b16 [%r21], {_registers(count, 0)};
        bar.warp.sync -1;
        ld.shared.v4.b32 {{%r4, %r5, %r6, %r7}}, [%r21];
        st.global.v4.b32 [%d1 + {512 * row}], {{%r4, %r5, %r6, %r7}};
        bar.warp.sync -1;
        """
        for row, (count, trans) in enumerate(_FORMS)
    ),
    lambda buffers: {
        "target": np.array(
            [
                np.where(np.arange(32)[:, None] < 8 * count, _transposed(_MATRICES) if trans else _MATRICES, 0xFFFF)
                for count, trans in _FORMS
            ],
            np.uint16,
        )
    },
    holds=[f"stmatrix.sync.aligned.m8n8.x{count}{'.trans' if trans else ''}.shared.b16" for count, trans in _FORMS],
    inputs={"fragments": np.array([_fragment(_MATRICES[8 * n : 8 * n + 8], False) for n in range(4)], np.uint32)},
    outputs={"out": poison(1), "target": poison((len(_FORMS), 32, 8), np.uint16)},
)


def _transposed(matrices: Array) -> Array:
    return np.concatenate([matrices[8 * n : 8 * n + 8].T for n in range(4)])
