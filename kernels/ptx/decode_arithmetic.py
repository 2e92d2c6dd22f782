"""Arithmetic, comparison, conversion and movement."""

from __future__ import annotations

from typing import Any

from dsa_planner.kernels.ptx.operands import (
    FTZ,
    NAN,
    RELU,
    SHARED_WINDOW,
    SPECIAL,
    Operands,
    bits_of,
    exactly,
    integer,
    only,
    opcode,
    plain,
    result,
)
from dsa_planner.kernels.ptx.parser import (
    Immediate,
    Instruction,
    Pair,
    PtxError,
    Register,
    Vector,
)
from dsa_planner.kernels.ptx.program import OPCODES, Insn

_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan")
_UNSIGNED_COMPARISONS = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}


@opcode("add", "sub")
def _add(d: Operands, i: Instruction, words: list[str]) -> Any:
    name = i.opcode.split(".")[0].upper()
    kind = words[-1]
    if kind == "f32":
        only(words[:-1], "rn", "ftz")
        return plain(d, i, f"F{name}", 32, FTZ if "ftz" in words else 0)
    if kind == "f32x2":
        only(words[:-1], "rn", "ftz")
        return plain(d, i, f"F{name}2", 64, FTZ if "ftz" in words else 0)
    if kind not in ("s16", "u16", "s32", "u32", "s64", "u64"):
        raise PtxError(f"type .{kind} is not known")
    only(words[:-1])
    return plain(d, i, f"{name}{bits_of(kind)}", bits_of(kind))


@opcode("mul")
def _mul(d: Operands, i: Instruction, words: list[str]) -> Any:
    kind = words[-1]
    if kind in ("f32", "f32x2"):
        only(words[:-1], "rn", "ftz")
        return plain(
            d,
            i,
            "FMUL" if kind == "f32" else "FMUL2",
            bits_of(kind[:3]) * (1 if kind == "f32" else 2),
            FTZ if "ftz" in words else 0,
        )
    only(words[1:-1])
    if words[0] == "lo":
        return plain(d, i, f"MUL{bits_of(integer(kind, widths=(16, 32, 64)))}", bits_of(kind))
    if words[0] == "hi" and kind in ("s32", "u32"):
        return plain(d, i, f"MULHI_{kind.upper()}", 32)
    if words[0] == "wide" and kind in ("s32", "u32"):
        return plain(d, i, f"MULWIDE_{kind.upper()}", 32)
    raise PtxError(f"opcode {i.opcode} is not known")


@opcode("mad", "fma")
def _mad(d: Operands, i: Instruction, words: list[str]) -> Any:
    kind = words[-1]
    if kind in ("f32", "f32x2"):
        only(words[:-1], "rn", "ftz")
        return plain(
            d, i, "FFMA" if kind == "f32" else "FFMA2", 32 if kind == "f32" else 64, FTZ if "ftz" in words else 0
        )
    only(words[1:-1])
    if words[0] == "lo" and kind in ("s32", "u32", "s64", "u64"):
        return plain(d, i, f"MAD{bits_of(kind)}", bits_of(kind))
    if words[0] == "wide" and kind in ("s32", "u32"):
        insn = plain(d, i, f"MADWIDE_{kind.upper()}", 32)
        insn.s2 = d.value(i.operands[3], 64)
        return insn
    raise PtxError(f"opcode {i.opcode} is not known")


@opcode("div", "rem")
def _div(d: Operands, i: Instruction, words: list[str]) -> Any:
    name, kind = i.opcode.split(".")[0].upper(), words[-1]
    if name == "DIV" and kind == "f32":
        only(words[:-1], "rn", "ftz", "full", "approx")
        return plain(d, i, "FDIV", 32, FTZ if "ftz" in words else 0)
    only(words[:-1])
    return plain(d, i, f"{name}_{integer(kind).upper()}", bits_of(kind))


@opcode("min", "max")
def _min(d: Operands, i: Instruction, words: list[str]) -> Any:
    name, kind = i.opcode.split(".")[0].upper(), words[-1]
    if kind == "f32":
        only(words[:-1], "NaN", "ftz")
        mod = (FTZ if "ftz" in words else 0) | (NAN if "NaN" in words else 0)
        if len(i.operands) == 4:
            raise PtxError("three operands are not known")
        return plain(d, i, f"F{name}", 32, mod)
    if kind not in ("s32", "u32", "s64", "u64"):
        raise PtxError(f"type .{kind} is not known")
    only(words[:-1])
    return plain(d, i, f"{name}_{kind.upper()}", bits_of(kind))


@opcode("neg", "abs")
def _neg(d: Operands, i: Instruction, words: list[str]) -> Any:
    name, kind = i.opcode.split(".")[0].upper(), words[-1]
    if kind == "f32":
        only(words[:-1], "ftz")
        return plain(d, i, f"F{name}", 32, FTZ if "ftz" in words else 0)
    if (name, kind) not in (("NEG", "s32"), ("NEG", "s64"), ("ABS", "s32")):
        raise PtxError(f"type .{kind} is not known")
    return plain(d, i, f"{name}{bits_of(kind)}", bits_of(kind))


@opcode("rcp", "sqrt", "rsqrt", "ex2", "lg2")
def _special_function(d: Operands, i: Instruction, words: list[str]) -> Any:
    only(words, "approx", "rn", "ftz", "f32")
    return plain(d, i, f"F{i.opcode.split('.')[0].upper()}", 32, FTZ if "ftz" in words else 0)


@opcode("and", "or", "xor", "not")
def _logic(d: Operands, i: Instruction, words: list[str]) -> Any:
    name, kind = i.opcode.split(".")[0].upper(), words[-1]
    if kind == "pred":
        return plain(d, i, f"P{name}", 1)
    bits = bits_of(integer(kind, widths=(16, 32, 64), signs="b"))
    only(words[:-1])
    insn = plain(d, i, f"{name}{64 if bits == 64 else 32}", bits)
    if name == "NOT" and bits == 16:
        raise PtxError("not.b16 is not known")
    return insn


@opcode("shl", "shr")
def _shift(d: Operands, i: Instruction, words: list[str]) -> Any:
    name, kind = i.opcode.split(".")[0], words[-1]
    integer(kind, widths=(16, 32, 64), signs="b" if name == "shl" else "bsu")
    only(words[:-1])
    if name == "shl":
        return plain(d, i, f"SHL{bits_of(kind)}", bits_of(kind), shift=True)
    if kind == "s16":
        raise PtxError("shr.s16 is not known")
    sign = "S" if kind.startswith("s") else "U"
    return plain(d, i, f"SHR_{sign}{bits_of(kind)}", bits_of(kind), shift=True)


@opcode("shf")
def _funnel(d: Operands, i: Instruction, words: list[str]) -> Any:
    exactly(i, words, "l.wrap.b32", "l.clamp.b32", "r.wrap.b32", "r.clamp.b32")
    return plain(d, i, f"SHF_{words[0].upper()}", 32, 1 if "clamp" in words else 0)


@opcode("popc", "clz", "brev", "bfind", "bfe", "bfi", "prmt")
def _bit_operation(d: Operands, i: Instruction, words: list[str]) -> Any:
    name, kind = i.opcode.split(".")[0].upper(), words[-1]
    only(words[:-1])
    integer(kind, widths=(32,), signs={"BFIND": "u", "BFE": "su"}.get(name, "b"))
    op = {"BFIND": "BFIND_U32", "BFE": f"BFE_{kind.upper()}", "PRMT": "PRMT"}.get(name, f"{name}32")
    return plain(d, i, op, 32)


@opcode("lop3")
def _lop3(d: Operands, i: Instruction, words: list[str]) -> Any:
    only(words, "b32")
    table = i.operands[4]
    assert isinstance(table, Immediate)
    a, b, c = (d.value(o) for o in i.operands[1:4])
    return Insn("LOP3", i, d0=result(i.operands[0]), s0=a, s1=b, s2=c, imm=table.bits)


# --- comparison, conversion, movement --------------------------------------------------------------------------------


@opcode("setp")
def _setp(d: Operands, i: Instruction, words: list[str]) -> Any:
    kind = words[-1]
    comparison = words[0]
    logic = next((w for w in words[1:-1] if w in ("and", "or", "xor")), None)
    only(words[1:-1], "and", "or", "xor", *(["ftz"] if kind == "f32" else []))
    known = {"b": _COMPARISONS[:2], "s": _COMPARISONS[:6], "u": (*_COMPARISONS[:6], *_UNSIGNED_COMPARISONS)}
    if comparison not in known.get(kind[0], _COMPARISONS):
        raise PtxError(f"comparison .{comparison} of .{kind} is not known")
    comparison = _UNSIGNED_COMPARISONS.get(comparison, comparison)
    mod = _COMPARISONS.index(comparison) | (16 if "ftz" in words else 0)
    op = "SETP_" + {"b16": "U16", "b32": "U32", "b64": "U64"}.get(kind, kind.upper())
    if op not in OPCODES:
        raise PtxError(f"type .{kind} is not known")
    target = i.operands[0]
    first, second = (target.first, target.second) if isinstance(target, Pair) else (target, None)
    bits = bits_of(kind)
    return Insn(
        op, i, d0=result(first), d1=result(second) if second is not None else None,
        s0=d.value(i.operands[1], bits), s1=d.value(i.operands[2], bits),
        s2=d.value(i.operands[3], 1) if logic else (1, 1), mod=mod,
        imm={None: 0, "and": 1, "or": 2, "xor": 3}[logic],
    )  # fmt: skip


@opcode("selp")
def _selp(d: Operands, i: Instruction, words: list[str]) -> Any:
    only(words[:-1])
    bits = bits_of(words[-1])
    a, b = d.value(i.operands[1], bits), d.value(i.operands[2], bits)
    return Insn(
        "SELP64" if bits == 64 else "SELP32", i, d0=result(i.operands[0]), s0=a, s1=b, s2=d.value(i.operands[3], 1)
    )


_CONVERSIONS = {
    ("u64", "u32"): "CVT_U64_U32", ("s64", "u32"): "CVT_U64_U32", ("s64", "s32"): "CVT_S64_S32",
    ("u64", "s32"): "CVT_S64_S32", ("u32", "u64"): "CVT_U32_U64", ("s32", "s64"): "CVT_U32_U64",
    ("u32", "s64"): "CVT_U32_U64", ("s32", "u64"): "CVT_U32_U64", ("u32", "u16"): "CVT_U32_U16",
    ("s32", "u16"): "CVT_U32_U16", ("s32", "s16"): "CVT_S32_S16", ("u32", "s16"): "CVT_S32_S16",
    ("u32", "u8"): "CVT_U32_U8", ("s32", "s8"): "CVT_S32_S8", ("u64", "u16"): "CVT_U64_U16",
    ("u16", "u32"): "CVT_U16_U32", ("s16", "s32"): "CVT_U16_U32", ("u16", "s32"): "CVT_U16_U32",
    ("s16", "u32"): "CVT_U16_U32", ("f32", "bf16"): "CVT_F32_BF16", ("bf16", "f32"): "CVT_BF16_F32",
    ("bf16x2", "f32"): "CVT_BF16X2_F32", ("f32", "f16"): "CVT_F32_F16", ("f16", "f32"): "CVT_F16_F32",
    ("f16x2", "f32"): "CVT_F16X2_F32", ("f32", "s32"): "CVT_F32_S32", ("f32", "u32"): "CVT_F32_U32",
    ("s32", "f32"): "CVT_S32_F32", ("u32", "f32"): "CVT_U32_F32",
}  # fmt: skip
_ROUNDINGS = {"rzi": 0, "rni": 1, "rmi": 2, "rpi": 3}


@opcode("cvt")
def _cvt(d: Operands, i: Instruction, words: list[str]) -> Any:
    kinds, modifiers = words[-2:], words[:-2]
    op = _CONVERSIONS.get((kinds[0], kinds[1]))
    if op is None:
        raise PtxError(f"conversion .{kinds[0]}.{kinds[1]} is not known")
    to_float, from_float = kinds[0][0] in "fb", kinds[1][0] in "fb"
    needed: tuple[str, ...] = ()
    if not to_float and from_float:
        needed = tuple(_ROUNDINGS)
        only(modifiers, *needed, "ftz")
    elif to_float and (not from_float or kinds[1] == "f32"):
        needed = ("rn",)
        only(modifiers, "rn", *(["relu"] if from_float else []), *(["ftz"] if kinds[0].startswith("f16") else []))
    else:
        only(modifiers, *(["ftz"] if kinds[1] == "f16" else []))
    if sum(modifier in needed for modifier in modifiers) != bool(needed):
        raise PtxError(f"one rounding is expected of {', '.join(f'.{name}' for name in needed)}")
    mod = (RELU if "relu" in modifiers else 0) | (FTZ if "ftz" in modifiers else 0)
    for name, value in _ROUNDINGS.items():
        if name in modifiers:
            mod |= value << 4
    return plain(d, i, op, 64 if kinds[1].endswith("64") else 32, mod)


@opcode("mov")
def _mov(d: Operands, i: Instruction, words: list[str]) -> Any:
    kind = words[-1]
    target, source = i.operands
    only(words[:-1])
    if kind == "pred":
        return Insn("PMOV", i, d0=result(target), s0=d.value(source, 1))
    bits = bits_of(kind)
    if bits not in (16, 32, 64):
        raise PtxError(f"type .{kind} is not known")
    if isinstance(source, Vector):
        return _pack(d, i, bits, source)
    if isinstance(target, Vector):
        parts = [result(o) for o in target.elements]
        if len(parts) != 2:
            raise PtxError("only two elements are known")
        return Insn(f"UNPACK{bits}", i, d0=parts[0], d1=parts[1], s0=d.value(source, bits))
    if isinstance(source, Register) and source.name in SPECIAL:
        return Insn("MOV_SPECIAL", i, d0=result(target), imm=SPECIAL[source.name], mod=int(bits == 64))
    if isinstance(source, Register) and source.name.startswith("%") and source.name not in d.kernel.registers:
        raise PtxError(f"special register {source.name} is not known")
    return Insn("MOV64" if bits == 64 else "MOV32", i, d0=result(target), s0=d.value(source, bits))


def _pack(d: Operands, i: Instruction, bits: int, source: Vector) -> Insn:
    if len(source.elements) != 2:
        raise PtxError("only two elements are known")
    low, high = (d.value(o, bits // 2) for o in source.elements)
    low, high = ((32, o[1]) if isinstance(o, tuple) else o for o in (low, high))
    return Insn(f"PACK{bits}", i, d0=result(i.operands[0]), s0=low, s1=high)


@opcode("cvta")
def _cvta(d: Operands, i: Instruction, words: list[str]) -> Any:
    spaces = ("shared", "shared::cta", "global", "param", "const")
    exactly(i, words, *(f"{to}{space}.u64" for to in ("", "to.") for space in spaces))
    if "shared" in words or "shared::cta" in words:
        op = "SUB64" if words[0] == "to" else "ADD64"
        return Insn(op, i, d0=result(i.operands[0]), s0=d.value(i.operands[1], 64), s1=(64, SHARED_WINDOW))
    return Insn("MOV64", i, d0=result(i.operands[0]), s0=d.value(i.operands[1], 64))
