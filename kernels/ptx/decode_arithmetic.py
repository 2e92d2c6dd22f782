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
    operands,
    plain,
)
from dsa_planner.kernels.ptx.program import OPCODES, Insn
from dsa_planner.kernels.ptx.syntax import (
    Instruction,
    PtxError,
    Register,
    Vector,
    spelled,
)

_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan")
_UNSIGNED_COMPARISONS = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}


@opcode("add", "sub")
def _add(d: Operands, i: Instruction, words: list[str]) -> Any:
    name = i.opcode.split(".")[0].upper()
    kind = words[-1]
    if kind == "f32":
        only(words[:-1], "rn", "ftz")
        return plain(d, i, f"F{name}", "f32 f32 f32", FTZ if "ftz" in words else 0)
    if kind == "f32x2":
        only(words[:-1], "rn", "ftz")
        return plain(d, i, f"F{name}2", "f32x2 f32x2 f32x2", FTZ if "ftz" in words else 0)
    if kind not in ("s16", "u16", "s32", "u32", "s64", "u64"):
        raise PtxError(f"type .{kind} is not known")
    only(words[:-1])
    return plain(d, i, f"{name}{bits_of(kind)}", f"{kind} {kind} {kind}")


@opcode("mul")
def _mul(d: Operands, i: Instruction, words: list[str]) -> Any:
    kind = words[-1]
    if kind in ("f32", "f32x2"):
        only(words[:-1], "rn", "ftz")
        op = "FMUL" if kind == "f32" else "FMUL2"
        return plain(d, i, op, f"{kind} {kind} {kind}", FTZ if "ftz" in words else 0)
    exactly(i, words, *_PRODUCTS)
    if words[0] == "lo":
        return plain(d, i, f"MUL{bits_of(kind)}", f"{kind} {kind} {kind}")
    if words[0] == "hi":
        return plain(d, i, f"MULHI_{kind.upper()}", f"{kind} {kind} {kind}")
    return plain(d, i, f"MULWIDE_{kind.upper()}", f"{_WIDE[kind]} {kind} {kind}")


_WIDE = {"s32": "s64", "u32": "u64"}
_PRODUCTS = (
    *(f"lo.{kind}" for kind in ("s16", "u16", "s32", "u32", "s64", "u64")),
    *(f"hi.{kind}" for kind in ("s32", "u32", "s64", "u64")),
    *(f"wide.{kind}" for kind in _WIDE),
)


@opcode("mad", "fma")
def _mad(d: Operands, i: Instruction, words: list[str]) -> Any:
    kind = words[-1]
    if kind in ("f32", "f32x2"):
        only(words[:-1], "rn", "ftz")
        op = "FFMA" if kind == "f32" else "FFMA2"
        return plain(d, i, op, f"{kind} {kind} {kind} {kind}", FTZ if "ftz" in words else 0)
    exactly(i, words, *(product for product in _PRODUCTS if not product.endswith("16")))
    if i.opcode.startswith("fma"):
        raise PtxError(f"opcode {i.opcode} is not known")
    if words[0] == "lo":
        return plain(d, i, f"MAD{bits_of(kind)}", f"{kind} {kind} {kind} {kind}")
    if words[0] == "hi":
        return plain(d, i, f"MADHI_{kind.upper()}", f"{kind} {kind} {kind} {kind}")
    return plain(d, i, f"MADWIDE_{kind.upper()}", f"{_WIDE[kind]} {kind} {kind} {_WIDE[kind]}")


@opcode("div", "rem")
def _div(d: Operands, i: Instruction, words: list[str]) -> Any:
    name, kind = i.opcode.split(".")[0].upper(), words[-1]
    if name == "DIV" and kind == "f32":
        only(words[:-1], "rn", "ftz", "full", "approx")
        return plain(d, i, "FDIV", "f32 f32 f32", FTZ if "ftz" in words else 0)
    only(words[:-1])
    return plain(d, i, f"{name}_{integer(kind).upper()}", f"{kind} {kind} {kind}")


@opcode("min", "max")
def _min(d: Operands, i: Instruction, words: list[str]) -> Any:
    name, kind = i.opcode.split(".")[0].upper(), words[-1]
    if kind == "f32":
        only(words[:-1], "NaN", "ftz")
        mod = (FTZ if "ftz" in words else 0) | (NAN if "NaN" in words else 0)
        if len(i.operands) == 4:
            raise PtxError("three operands are not known")
        return plain(d, i, f"F{name}", "f32 f32 f32", mod)
    if kind not in ("s32", "u32", "s64", "u64"):
        raise PtxError(f"type .{kind} is not known")
    only(words[:-1])
    return plain(d, i, f"{name}_{kind.upper()}", f"{kind} {kind} {kind}")


@opcode("neg", "abs")
def _neg(d: Operands, i: Instruction, words: list[str]) -> Any:
    name, kind = i.opcode.split(".")[0].upper(), words[-1]
    if kind == "f32":
        only(words[:-1], "ftz")
        return plain(d, i, f"F{name}", "f32 f32", FTZ if "ftz" in words else 0)
    only(words[:-1])
    if (name, kind) not in (("NEG", "s32"), ("NEG", "s64"), ("ABS", "s32")):
        raise PtxError(f"type .{kind} is not known")
    return plain(d, i, f"{name}{bits_of(kind)}", f"{kind} {kind}")


@opcode("rcp", "sqrt", "rsqrt", "ex2", "lg2")
def _special_function(d: Operands, i: Instruction, words: list[str]) -> Any:
    only(words[:-1], "approx", "rn", "ftz")
    if words[-1] != "f32":
        raise PtxError(f"type .{words[-1]} is not known")
    return plain(d, i, f"F{i.opcode.split('.')[0].upper()}", "f32 f32", FTZ if "ftz" in words else 0)


@opcode("and", "or", "xor", "not")
def _logic(d: Operands, i: Instruction, words: list[str]) -> Any:
    name, kind = i.opcode.split(".")[0].upper(), words[-1]
    kinds = f"{kind} {kind}" if name == "NOT" else f"{kind} {kind} {kind}"
    only(words[:-1])
    if kind == "pred":
        return plain(d, i, f"P{name}", kinds)
    bits = bits_of(integer(kind, widths=(16, 32, 64), signs="b"))
    if name == "NOT" and bits == 16:
        raise PtxError("not.b16 is not known")
    return plain(d, i, f"{name}{64 if bits == 64 else 32}", kinds)


@opcode("shl", "shr")
def _shift(d: Operands, i: Instruction, words: list[str]) -> Any:
    name, kind = i.opcode.split(".")[0], words[-1]
    integer(kind, widths=(16, 32, 64), signs="b" if name == "shl" else "bsu")
    only(words[:-1])
    if name == "shl":
        return plain(d, i, f"SHL{bits_of(kind)}", f"{kind} {kind} u32")
    if kind == "s16":
        raise PtxError("shr.s16 is not known")
    sign = "S" if kind.startswith("s") else "U"
    return plain(d, i, f"SHR_{sign}{bits_of(kind)}", f"{kind} {kind} u32")


@opcode("shf")
def _funnel(d: Operands, i: Instruction, words: list[str]) -> Any:
    exactly(i, words, "l.wrap.b32", "l.clamp.b32", "r.wrap.b32", "r.clamp.b32")
    return plain(d, i, f"SHF_{words[0].upper()}", "b32 b32 b32 u32", 1 if "clamp" in words else 0)


@opcode("popc", "clz", "brev", "bfind", "bfe", "bfi", "prmt")
def _bit_operation(d: Operands, i: Instruction, words: list[str]) -> Any:
    name, kind = i.opcode.split(".")[0].upper(), words[-1]
    only(words[:-1])
    integer(kind, widths=(32,), signs={"BFIND": "u", "BFE": "su"}.get(name, "b"))
    op = {"BFIND": "BFIND_U32", "BFE": f"BFE_{kind.upper()}", "PRMT": "PRMT"}.get(name, f"{name}32")
    return plain(d, i, op, _BIT_OPERATIONS[name])


_BIT_OPERATIONS = {
    "POPC": "u32 b32", "CLZ": "u32 b32", "BREV": "b32 b32", "BFIND": "u32 u32", "BFE": "u32 u32 u32 u32",
    "BFI": "b32 b32 b32 u32 u32", "PRMT": "b32 b32 b32 b32",
}  # fmt: skip
"""The types of the result and of the sources."""


@opcode("lop3")
def _lop3(d: Operands, i: Instruction, words: list[str]) -> Any:
    exactly(i, words, "b32")
    target, a, b, c, table = operands(i, 5)
    s0, s1, s2 = (d.value(o, "b32") for o in (a, b, c))
    return Insn("LOP3", i, d0=d.result(target, "b32"), s0=s0, s1=s1, s2=s2, imm=d.literal(table, 0, 255))


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
    target, a, b, *rest = operands(i, 4 if logic else 3)
    first, second = d.two_results(target, "pred", "pred")
    return Insn(
        op, i, d0=first, d1=second, s0=d.value(a, kind), s1=d.value(b, kind),
        s2=d.value(rest[0], "pred") if logic else (1, 1), mod=mod, imm={None: 0, "and": 1, "or": 2, "xor": 3}[logic],
    )  # fmt: skip


@opcode("selp")
def _selp(d: Operands, i: Instruction, words: list[str]) -> Any:
    only(words[:-1])
    kind = words[-1]
    if kind not in _MOVED or kind == "f64":
        raise PtxError(f"type .{kind} is not known")
    target, a, b, condition = operands(i, 4)
    return Insn(
        "SELP64" if bits_of(kind) == 64 else "SELP32", i, d0=d.result(target, kind), s0=d.value(a, kind),
        s1=d.value(b, kind), s2=d.value(condition, "pred"),
    )  # fmt: skip


_MOVED = ("b16", "u16", "s16", "b32", "u32", "s32", "f32", "b64", "u64", "s64", "f64")


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
    two = kinds[0] in ("bf16x2", "f16x2")
    target, *sources = operands(i, 3 if two else 2)
    for o, kind in [(target, kinds[0]), *((source, kinds[1]) for source in sources)]:
        if d.is_wide(o) and not kind.endswith("64"):
            raise PtxError(f"register {spelled(o)} has more bits than the machine knows for .{kind}")
    found = [d.value(o, kinds[1], wider=True) for o in sources]
    to = d.result(target, kinds[0], wider=kinds[0] != "s16")  # the machine does not extend its sign
    return Insn(op, i, d0=to, mod=mod, **dict(zip(("s0", "s1"), found, strict=False)))


@opcode("mov")
def _mov(d: Operands, i: Instruction, words: list[str]) -> Any:
    kind = words[-1]
    target, source = operands(i, 2)
    only(words[:-1])
    if kind == "pred":
        return Insn("PMOV", i, d0=d.result(target, kind), s0=d.value(source, kind))
    if kind not in _MOVED:
        raise PtxError(f"type .{kind} is not known")
    bits = bits_of(kind)
    if isinstance(source, Vector):
        return _pack(d, i, kind, source)
    if isinstance(target, Vector):
        half = _half(kind, target)
        low, high = d.results(target, half)
        return Insn(f"UNPACK{bits}", i, d0=low, d1=high, s0=d.value(source, kind))
    if isinstance(source, Register) and source.name in SPECIAL:
        number = d.special(source, bits)
        if bits == 16 or kind[0] == "f":
            raise PtxError(f"{source.name} stands where a value of type .{kind} is due")
        return Insn("MOV_SPECIAL", i, d0=d.result(target, kind), imm=number, mod=int(bits == 64))
    if isinstance(source, Register) and source.name.startswith("%") and source.name not in d.kernel.registers:
        raise PtxError(f"special register {source.name} is not known")
    return Insn("MOV64" if bits == 64 else "MOV32", i, d0=d.result(target, kind), s0=d.value(source, kind))


def _half(kind: str, vector: Vector) -> str:
    """The type of an element of a vector that is moved as a whole."""
    if kind not in ("b32", "b64") or len(vector.elements) != 2:
        raise PtxError("vectors are known of two elements, moved as .b32 or .b64")
    return {"b32": "b16", "b64": "b32"}[kind]


def _pack(d: Operands, i: Instruction, kind: str, source: Vector) -> Insn:
    low, high = d.values(source, _half(kind, source))
    return Insn(f"PACK{bits_of(kind)}", i, d0=d.result(i.operands[0], kind), s0=low, s1=high)


@opcode("cvta")
def _cvta(d: Operands, i: Instruction, words: list[str]) -> Any:
    spaces = ("shared", "shared::cta", "global", "param", "const")
    exactly(i, words, *(f"{to}{space}.u64" for to in ("", "to.") for space in spaces))
    target, source = operands(i, 2)
    insn = Insn("MOV64", i, d0=d.result(target, "u64"), s0=d.value(source, "u64"))
    if "shared" in words or "shared::cta" in words:
        insn.op, insn.s1 = "SUB64" if words[0] == "to" else "ADD64", (64, SHARED_WINDOW)
    return insn
