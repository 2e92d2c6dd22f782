"""PTX instructions to the machine's: each operand and modifier given a meaning.

An opcode is split at its dots, and a function for its first word reads the rest. What a function does not understand is
an error that names the line: nothing is skipped.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from dsa_planner.kernels.ptx.contract import contract
from dsa_planner.kernels.ptx.parser import (
    Immediate,
    Instruction,
    Kernel,
    Memory,
    Operand,
    Pair,
    PtxError,
    Register,
    Symbol,
    Vector,
)
from dsa_planner.kernels.ptx.program import OPCODES, REGISTER_WIDTHS, Insn, Program, assemble

__all__ = ["decode"]

PARAM_WINDOW = 0x0600000000000000
SHARED_WINDOW = 0x0500000000000000

_FTZ, _NAN, _RELU, _SAT = 1, 2, 4, 8
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan")
_UNSIGNED_COMPARISONS = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
_SPECIAL = {
    "%tid.x": 0, "%laneid": 1, "%ctaid.x": 2, "%nctaid.x": 3, "%ntid.x": 4, "%warpid": 5, "%tid.y": 6, "%tid.z": 6,
    "%ntid.y": 7, "%ntid.z": 7, "%clock": 8, "%clock64": 8, "%globaltimer": 8, "%globaltimer_lo": 8,
    "%dynamic_smem_size": 9, "%total_smem_size": 10, "%lanemask_lt": 12, "%lanemask_le": 13, "%lanemask_eq": 14,
    "%lanemask_ge": 15, "%lanemask_gt": 16, "%ctaid.y": 17, "%ctaid.z": 18, "%nctaid.y": 19, "%nctaid.z": 20,
    # A cluster is one CTA.
    "%cluster_ctarank": 6, "%cluster_nctarank": 7, "%clusterid.x": 2, "%clusterid.y": 17, "%clusterid.z": 18,
    "%nclusterid.x": 3, "%cluster_ctaid.x": 6, "%cluster_ctaid.y": 6, "%cluster_ctaid.z": 6, "%cluster_nctaid.x": 7,
    "%cluster_nctaid.y": 7, "%cluster_nctaid.z": 7,
}  # fmt: skip


def decode(kernel: Kernel) -> Program:
    """Decode a kernel.

    Raises:
        PtxError: an instruction that the machine does not know; the message quotes its line.
    """
    return _Decoder(kernel).program()


class _Decoder:
    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.parameters = {parameter.name: parameter for parameter in kernel.parameters}
        self.shared: dict[str, int] = {}
        self.shared_static = 0
        for variable in sorted(kernel.shared, key=lambda v: v.bytes == 0):
            self.shared_static = -(-self.shared_static // variable.align) * variable.align
            self.shared[variable.name] = self.shared_static
            self.shared_static += variable.bytes
        self.granules = {"shared": 4, "global": 4}

    # --- operands ---

    def kind(self, register: Register) -> str:
        kind = self.kernel.registers.get(register.name)
        if kind is None:
            raise PtxError(f"register {register.name} is not declared")
        return kind

    def is_wide(self, operand: Operand) -> bool:
        return (
            isinstance(operand, Register) and operand.name not in _SPECIAL and REGISTER_WIDTHS[self.kind(operand)] == 2
        )

    def value(self, operand: Operand, bits: int = 32) -> Any:
        """A readable operand: a register, or a constant (bits, value)."""
        if isinstance(operand, Register):
            if operand.name in _SPECIAL or operand.name == "_":
                raise PtxError(f"{operand.name} has to be moved to a register first")
            return operand
        if isinstance(operand, Immediate):
            return (bits, operand.bits & ((1 << bits) - 1))
        if isinstance(operand, Symbol):
            return (bits, self.symbol(operand))
        raise PtxError(f"{operand} is not a value")

    def symbol(self, symbol: Symbol) -> int:
        if symbol.name in self.shared:
            return self.shared[symbol.name] + symbol.offset
        if symbol.name in self.parameters:
            return PARAM_WINDOW + self.parameters[symbol.name].offset + symbol.offset
        raise PtxError(f"{symbol.name} is not known")

    def address(self, operand: Operand) -> tuple[Any, int, int]:
        """(base, offset, 1 if the base is 64 bits wide) of a memory operand."""
        if not isinstance(operand, Memory):
            raise PtxError(f"{operand} is not an address")
        if isinstance(operand.base, Register):
            return operand.base, operand.offset, int(self.is_wide(operand.base))
        base = self.value(operand.base, 32)
        return base, operand.offset, 0

    # --- the whole kernel ---

    def check_registers(self, insn: Insn) -> None:
        operands = (insn.d0, insn.d1, insn.s0, insn.s1, insn.s2, insn.s3, insn.predicate, insn.source.guard, *insn.list)
        for operand in operands:
            if isinstance(operand, Register) and operand.name != "_":
                self.kind(operand)

    def program(self) -> Program:
        instructions: list[Insn] = []
        starts: list[int] = []
        for source in self.kernel.instructions:
            starts.append(len(instructions))
            words = source.opcode.split(".")
            decoder = _DECODERS.get(words[0])
            try:
                if decoder is None:
                    raise PtxError(f"opcode {source.opcode} is not known")
                decoded = decoder(self, source, words[1:])
                found = [decoded] if isinstance(decoded, Insn) else decoded
                for insn in found:
                    self.check_registers(insn)
            except PtxError as error:
                raise PtxError(f"line {source.line}: {error}: {source.text}") from None
            except (IndexError, KeyError, ValueError) as error:
                raise PtxError(
                    f"line {source.line}: {source.opcode} is not understood ({error!r}): {source.text}"
                ) from None
            instructions.extend(found)
        starts.append(len(instructions))
        instructions.append(Insn("RET", Instruction(0, "ret", (), None, "the end of the kernel")))
        labels = {name: starts[index] for name, index in self.kernel.labels.items()}
        for insn in instructions:
            if isinstance(insn.target, Symbol):
                if insn.target.name not in labels:
                    raise PtxError(
                        f"line {insn.source.line}: label {insn.target.name} is not known: {insn.source.text}"
                    )
                insn.target = labels[insn.target.name]
        leaders = {*labels.values(), *(n + 1 for n, insn in enumerate(instructions) if insn.op == "BRA")}
        return assemble(self.kernel, contract(instructions, leaders), self.granules, self.shared_static)


_Decode = Callable[[_Decoder, Instruction, list[str]], Any]
_DECODERS: dict[str, _Decode] = {}


def _opcode(*names: str) -> Callable[[_Decode], _Decode]:
    def register(function: _Decode) -> _Decode:
        for name in names:
            _DECODERS[name] = function
        return function

    return register


def _bits(kind: str) -> int:
    return int(re.sub(r"\D", "", kind))


def _only(words: list[str], *known: str) -> None:
    unknown = [word for word in words if word not in known]
    if unknown:
        raise PtxError(f"modifier .{unknown[0]} is not known")


def _exactly(i: Instruction, words: list[str], *forms: str) -> None:
    """The words after an opcode's first have to be one of these, dots between them."""
    if ".".join(words) not in forms:
        raise PtxError(f"opcode {i.opcode} is not known")


def _integer(kind: str, *, widths: tuple[int, ...] = (32, 64), signs: str = "su") -> str:
    """An integer type, which has to be one of these."""
    if kind not in {f"{sign}{width}" for sign in signs for width in widths}:
        raise PtxError(f"type .{kind} is not known")
    return kind


def _plain(d: _Decoder, i: Instruction, op: str, bits: int, mod: int = 0, shift: bool = False) -> Insn:
    """d = op(a, b, c, ...), all of one width; a shift count is 32 bits wide."""
    sources = [d.value(o, 32 if shift and n else bits) for n, o in enumerate(i.operands[1:])]
    names = ("s0", "s1", "s2", "s3")
    return Insn(op, i, d0=_result(i.operands[0]), mod=mod, **dict(zip(names, sources, strict=False)))


def _result(operand: Operand) -> Register:
    if not isinstance(operand, Register) or operand.negated:
        raise PtxError(f"{operand} cannot take a result")
    return operand


# --- arithmetic ------------------------------------------------------------------------------------------------------


@_opcode("add", "sub")
def _add(d: _Decoder, i: Instruction, words: list[str]) -> Any:
    name = i.opcode.split(".")[0].upper()
    kind = words[-1]
    if kind == "f32":
        _only(words[:-1], "rn", "ftz")
        return _plain(d, i, f"F{name}", 32, _FTZ if "ftz" in words else 0)
    if kind == "f32x2":
        _only(words[:-1], "rn", "ftz")
        return _plain(d, i, f"F{name}2", 64, _FTZ if "ftz" in words else 0)
    if kind not in ("s16", "u16", "s32", "u32", "s64", "u64"):
        raise PtxError(f"type .{kind} is not known")
    _only(words[:-1])
    return _plain(d, i, f"{name}{_bits(kind)}", _bits(kind))


@_opcode("mul")
def _mul(d: _Decoder, i: Instruction, words: list[str]) -> Any:
    kind = words[-1]
    if kind in ("f32", "f32x2"):
        _only(words[:-1], "rn", "ftz")
        return _plain(
            d,
            i,
            "FMUL" if kind == "f32" else "FMUL2",
            _bits(kind[:3]) * (1 if kind == "f32" else 2),
            _FTZ if "ftz" in words else 0,
        )
    _only(words[1:-1])
    if words[0] == "lo":
        return _plain(d, i, f"MUL{_bits(_integer(kind, widths=(16, 32, 64)))}", _bits(kind))
    if words[0] == "hi" and kind in ("s32", "u32"):
        return _plain(d, i, f"MULHI_{kind.upper()}", 32)
    if words[0] == "wide" and kind in ("s32", "u32"):
        return _plain(d, i, f"MULWIDE_{kind.upper()}", 32)
    raise PtxError(f"opcode {i.opcode} is not known")


@_opcode("mad", "fma")
def _mad(d: _Decoder, i: Instruction, words: list[str]) -> Any:
    kind = words[-1]
    if kind in ("f32", "f32x2"):
        _only(words[:-1], "rn", "ftz")
        return _plain(
            d, i, "FFMA" if kind == "f32" else "FFMA2", 32 if kind == "f32" else 64, _FTZ if "ftz" in words else 0
        )
    _only(words[1:-1])
    if words[0] == "lo" and kind in ("s32", "u32", "s64", "u64"):
        return _plain(d, i, f"MAD{_bits(kind)}", _bits(kind))
    if words[0] == "wide" and kind in ("s32", "u32"):
        insn = _plain(d, i, f"MADWIDE_{kind.upper()}", 32)
        insn.s2 = d.value(i.operands[3], 64)
        return insn
    raise PtxError(f"opcode {i.opcode} is not known")


@_opcode("div", "rem")
def _div(d: _Decoder, i: Instruction, words: list[str]) -> Any:
    name, kind = i.opcode.split(".")[0].upper(), words[-1]
    if name == "DIV" and kind == "f32":
        _only(words[:-1], "rn", "ftz", "full", "approx")
        return _plain(d, i, "FDIV", 32, _FTZ if "ftz" in words else 0)
    _only(words[:-1])
    return _plain(d, i, f"{name}_{_integer(kind).upper()}", _bits(kind))


@_opcode("min", "max")
def _min(d: _Decoder, i: Instruction, words: list[str]) -> Any:
    name, kind = i.opcode.split(".")[0].upper(), words[-1]
    if kind == "f32":
        _only(words[:-1], "NaN", "ftz")
        mod = (_FTZ if "ftz" in words else 0) | (_NAN if "NaN" in words else 0)
        if len(i.operands) == 4:
            raise PtxError("three operands are not known")
        return _plain(d, i, f"F{name}", 32, mod)
    if kind not in ("s32", "u32", "s64", "u64"):
        raise PtxError(f"type .{kind} is not known")
    _only(words[:-1])
    return _plain(d, i, f"{name}_{kind.upper()}", _bits(kind))


@_opcode("neg", "abs")
def _neg(d: _Decoder, i: Instruction, words: list[str]) -> Any:
    name, kind = i.opcode.split(".")[0].upper(), words[-1]
    if kind == "f32":
        _only(words[:-1], "ftz")
        return _plain(d, i, f"F{name}", 32, _FTZ if "ftz" in words else 0)
    if (name, kind) not in (("NEG", "s32"), ("NEG", "s64"), ("ABS", "s32")):
        raise PtxError(f"type .{kind} is not known")
    return _plain(d, i, f"{name}{_bits(kind)}", _bits(kind))


@_opcode("rcp", "sqrt", "rsqrt", "ex2", "lg2")
def _special_function(d: _Decoder, i: Instruction, words: list[str]) -> Any:
    _only(words, "approx", "rn", "ftz", "f32")
    return _plain(d, i, f"F{i.opcode.split('.')[0].upper()}", 32, _FTZ if "ftz" in words else 0)


@_opcode("and", "or", "xor", "not")
def _logic(d: _Decoder, i: Instruction, words: list[str]) -> Any:
    name, kind = i.opcode.split(".")[0].upper(), words[-1]
    if kind == "pred":
        return _plain(d, i, f"P{name}", 1)
    bits = _bits(_integer(kind, widths=(16, 32, 64), signs="b"))
    _only(words[:-1])
    insn = _plain(d, i, f"{name}{64 if bits == 64 else 32}", bits)
    if name == "NOT" and bits == 16:
        raise PtxError("not.b16 is not known")
    return insn


@_opcode("shl", "shr")
def _shift(d: _Decoder, i: Instruction, words: list[str]) -> Any:
    name, kind = i.opcode.split(".")[0], words[-1]
    _integer(kind, widths=(16, 32, 64), signs="b" if name == "shl" else "bsu")
    _only(words[:-1])
    if name == "shl":
        return _plain(d, i, f"SHL{_bits(kind)}", _bits(kind), shift=True)
    if kind == "s16":
        raise PtxError("shr.s16 is not known")
    sign = "S" if kind.startswith("s") else "U"
    return _plain(d, i, f"SHR_{sign}{_bits(kind)}", _bits(kind), shift=True)


@_opcode("shf")
def _funnel(d: _Decoder, i: Instruction, words: list[str]) -> Any:
    _exactly(i, words, "l.wrap.b32", "l.clamp.b32", "r.wrap.b32", "r.clamp.b32")
    return _plain(d, i, f"SHF_{words[0].upper()}", 32, 1 if "clamp" in words else 0)


@_opcode("popc", "clz", "brev", "bfind", "bfe", "bfi", "prmt")
def _bit_operation(d: _Decoder, i: Instruction, words: list[str]) -> Any:
    name, kind = i.opcode.split(".")[0].upper(), words[-1]
    _only(words[:-1])
    _integer(kind, widths=(32,), signs={"BFIND": "u", "BFE": "su"}.get(name, "b"))
    op = {"BFIND": "BFIND_U32", "BFE": f"BFE_{kind.upper()}", "PRMT": "PRMT"}.get(name, f"{name}32")
    return _plain(d, i, op, 32)


@_opcode("lop3")
def _lop3(d: _Decoder, i: Instruction, words: list[str]) -> Any:
    _only(words, "b32")
    table = i.operands[4]
    assert isinstance(table, Immediate)
    a, b, c = (d.value(o) for o in i.operands[1:4])
    return Insn("LOP3", i, d0=_result(i.operands[0]), s0=a, s1=b, s2=c, imm=table.bits)


# --- comparison, conversion, movement --------------------------------------------------------------------------------


@_opcode("setp")
def _setp(d: _Decoder, i: Instruction, words: list[str]) -> Any:
    kind = words[-1]
    comparison = words[0]
    logic = next((w for w in words[1:-1] if w in ("and", "or", "xor")), None)
    _only(words[1:-1], "and", "or", "xor", *(["ftz"] if kind == "f32" else []))
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
    bits = _bits(kind)
    return Insn(
        op, i, d0=_result(first), d1=_result(second) if second is not None else None,
        s0=d.value(i.operands[1], bits), s1=d.value(i.operands[2], bits),
        s2=d.value(i.operands[3], 1) if logic else (1, 1), mod=mod,
        imm={None: 0, "and": 1, "or": 2, "xor": 3}[logic],
    )  # fmt: skip


@_opcode("selp")
def _selp(d: _Decoder, i: Instruction, words: list[str]) -> Any:
    _only(words[:-1])
    bits = _bits(words[-1])
    a, b = d.value(i.operands[1], bits), d.value(i.operands[2], bits)
    return Insn(
        "SELP64" if bits == 64 else "SELP32", i, d0=_result(i.operands[0]), s0=a, s1=b, s2=d.value(i.operands[3], 1)
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


@_opcode("cvt")
def _cvt(d: _Decoder, i: Instruction, words: list[str]) -> Any:
    kinds, modifiers = words[-2:], words[:-2]
    op = _CONVERSIONS.get((kinds[0], kinds[1]))
    if op is None:
        raise PtxError(f"conversion .{kinds[0]}.{kinds[1]} is not known")
    to_float, from_float = kinds[0][0] in "fb", kinds[1][0] in "fb"
    needed: tuple[str, ...] = ()
    if not to_float and from_float:
        needed = tuple(_ROUNDINGS)
        _only(modifiers, *needed, "ftz")
    elif to_float and (not from_float or kinds[1] == "f32"):
        needed = ("rn",)
        _only(modifiers, "rn", *(["relu"] if from_float else []), *(["ftz"] if kinds[0].startswith("f16") else []))
    else:
        _only(modifiers, *(["ftz"] if kinds[1] == "f16" else []))
    if sum(modifier in needed for modifier in modifiers) != bool(needed):
        raise PtxError(f"one rounding is expected of {', '.join(f'.{name}' for name in needed)}")
    mod = (_RELU if "relu" in modifiers else 0) | (_FTZ if "ftz" in modifiers else 0)
    for name, value in _ROUNDINGS.items():
        if name in modifiers:
            mod |= value << 4
    return _plain(d, i, op, 64 if kinds[1].endswith("64") else 32, mod)


@_opcode("mov")
def _mov(d: _Decoder, i: Instruction, words: list[str]) -> Any:
    kind = words[-1]
    target, source = i.operands
    _only(words[:-1])
    if kind == "pred":
        return Insn("PMOV", i, d0=_result(target), s0=d.value(source, 1))
    bits = _bits(kind)
    if bits not in (16, 32, 64):
        raise PtxError(f"type .{kind} is not known")
    if isinstance(source, Vector):
        return _pack(d, i, bits, source)
    if isinstance(target, Vector):
        parts = [_result(o) for o in target.elements]
        if len(parts) != 2:
            raise PtxError("only two elements are known")
        return Insn(f"UNPACK{bits}", i, d0=parts[0], d1=parts[1], s0=d.value(source, bits))
    if isinstance(source, Register) and source.name in _SPECIAL:
        return Insn("MOV_SPECIAL", i, d0=_result(target), imm=_SPECIAL[source.name], mod=int(bits == 64))
    if isinstance(source, Register) and source.name.startswith("%") and source.name not in d.kernel.registers:
        raise PtxError(f"special register {source.name} is not known")
    return Insn("MOV64" if bits == 64 else "MOV32", i, d0=_result(target), s0=d.value(source, bits))


def _pack(d: _Decoder, i: Instruction, bits: int, source: Vector) -> Insn:
    if len(source.elements) != 2:
        raise PtxError("only two elements are known")
    low, high = (d.value(o, bits // 2) for o in source.elements)
    low, high = ((32, o[1]) if isinstance(o, tuple) else o for o in (low, high))
    return Insn(f"PACK{bits}", i, d0=_result(i.operands[0]), s0=low, s1=high)


@_opcode("cvta")
def _cvta(d: _Decoder, i: Instruction, words: list[str]) -> Any:
    spaces = ("shared", "shared::cta", "global", "param", "const")
    _exactly(i, words, *(f"{to}{space}.u64" for to in ("", "to.") for space in spaces))
    if "shared" in words or "shared::cta" in words:
        op = "SUB64" if words[0] == "to" else "ADD64"
        return Insn(op, i, d0=_result(i.operands[0]), s0=d.value(i.operands[1], 64), s1=(64, SHARED_WINDOW))
    return Insn("MOV64", i, d0=_result(i.operands[0]), s0=d.value(i.operands[1], 64))


# --- control and warps -----------------------------------------------------------------------------------------------


@_opcode("bra")
def _bra(d: _Decoder, i: Instruction, words: list[str]) -> Any:
    _only(words, "uni")
    target = i.operands[0]
    assert isinstance(target, Register | Symbol)  # a label of a nested scope is renamed as registers are
    return Insn("BRA", i, target=Symbol(target.name))


@_opcode("ret", "exit")
def _ret(d: _Decoder, i: Instruction, words: list[str]) -> Any:
    return Insn("RET", i)


@_opcode("trap")
def _trap(d: _Decoder, i: Instruction, words: list[str]) -> Any:
    return Insn("TRAP", i)


_HINT_WORDS = {
    "nanosleep": ("u32",), "prefetch": ("global", "tensormap", "param", "const"), "applypriority": ("global",),
    "griddepcontrol": ("wait", "launch_dependents"), "createpolicy": ("fractional", "range", "global", "cvt", "b64"),
    "pmevent": ("mask",),
}  # fmt: skip


@_opcode("nanosleep", "prefetch", "prefetchu", "griddepcontrol", "pmevent", "applypriority", "createpolicy")
def _nothing(d: _Decoder, i: Instruction, words: list[str]) -> Any:
    """Hints. griddepcontrol orders launches, and the machine runs them one after another."""
    name = i.opcode.split(".")[0]
    _only([word for word in words if not word.startswith(("L1", "L2"))], *_HINT_WORDS.get(name, ()))
    if i.opcode.startswith("createpolicy"):
        return Insn("MOV64", i, d0=_result(i.operands[0]), s0=(64, 0))
    return Insn("NOP", i)


@_opcode("setmaxnreg")
def _setmaxnreg(d: _Decoder, i: Instruction, words: list[str]) -> Any:
    _exactly(i, words, "inc.sync.aligned.u32", "dec.sync.aligned.u32")
    return Insn("SETMAXNREG", i)


@_opcode("shfl")
def _shfl(d: _Decoder, i: Instruction, words: list[str]) -> Any:
    _only(words, "sync", "idx", "up", "down", "bfly", "b32")
    if words[0] != "sync":
        raise PtxError("only shfl.sync is known")
    target = i.operands[0]
    first, second = (target.first, target.second) if isinstance(target, Pair) else (target, None)
    return Insn(
        "SHFL", i, d0=_result(first), d1=_result(second) if second is not None else None, s0=d.value(i.operands[1]),
        s1=d.value(i.operands[2]), s2=d.value(i.operands[3]), s3=d.value(i.operands[4]),
        mod=("idx", "up", "down", "bfly").index(words[1]),
    )  # fmt: skip


@_opcode("vote")
def _vote(d: _Decoder, i: Instruction, words: list[str]) -> Any:
    _exactly(i, words, "sync.all.pred", "sync.any.pred", "sync.uni.pred", "sync.ballot.b32")
    mod = ("all", "any", "uni", "ballot").index(words[1])
    return Insn("VOTE", i, d0=_result(i.operands[0]), s0=d.value(i.operands[1], 1), s3=d.value(i.operands[2]), mod=mod)


@_opcode("elect")
def _elect(d: _Decoder, i: Instruction, words: list[str]) -> Any:
    target = i.operands[0]
    _exactly(i, words, "sync")
    if not isinstance(target, Pair):
        raise PtxError("two results are expected")
    return Insn("ELECT", i, d0=_result(target.first), d1=_result(target.second), s3=d.value(i.operands[1]))


@_opcode("redux")
def _redux(d: _Decoder, i: Instruction, words: list[str]) -> Any:
    arithmetic = (f"sync.{name}.{kind}" for name in ("add", "min", "max") for kind in ("s32", "u32"))
    _exactly(i, words, *arithmetic, "sync.and.b32", "sync.or.b32", "sync.xor.b32")
    operation, kind = words[1], words[-1]
    mod = {"add": 0, "min": 1 if kind == "s32" else 3, "max": 2 if kind == "s32" else 4, "and": 5, "or": 6, "xor": 7}[
        operation
    ]
    return Insn("REDUX", i, d0=_result(i.operands[0]), s0=d.value(i.operands[1]), s3=d.value(i.operands[2]), mod=mod)


@_opcode("activemask")
def _activemask(d: _Decoder, i: Instruction, words: list[str]) -> Any:
    _exactly(i, words, "b32")
    return Insn("ACTIVEMASK", i, d0=_result(i.operands[0]))


# --- barriers and fences ---------------------------------------------------------------------------------------------


@_opcode("bar", "barrier")
def _bar(d: _Decoder, i: Instruction, words: list[str]) -> Any:
    words = [word for word in words if word not in ("cta", "aligned")]
    if words[0] == "warp":
        _only(words[1:], "sync")
        return Insn("BAR_WARP", i, s0=d.value(i.operands[0]))
    if words[0] == "cluster":
        _only(words[1:2], "arrive", "wait")
        _only(words[2:], *(("release", "relaxed") if words[1] == "arrive" else ("acquire",)))
        return Insn("CLUSTER_ARRIVE" if words[1] == "arrive" else "CLUSTER_WAIT", i)
    _only(words, "sync", "arrive")
    values = [d.value(o) for o in i.operands]
    if words[0] == "sync":
        return Insn("BAR_SYNC", i, s0=values[0], s1=values[-1], mod=int(len(values) == 1))
    return Insn("BAR_ARRIVE", i, s0=values[0], s1=values[1])


@_opcode("mbarrier")
def _mbarrier(d: _Decoder, i: Instruction, words: list[str]) -> Any:
    what = words[0]
    spaces = (
        "shared",
        "shared::cta",
        "shared::cluster",
        "b64",
        "acquire",
        "release",
        "relaxed",
        "cta",
        "cluster",
        "parity",
    )
    _only([w for w in words[1:] if w not in ("expect_tx", "noComplete")], *spaces)
    if what in ("init", "inval", "expect_tx"):
        base, offset, wide = d.address(i.operands[0])
        if what == "inval":
            return Insn("MBAR_INVAL", i, s0=base, imm=offset, mod=wide)
        op, mod = ("MBAR_INIT", wide) if what == "init" else ("MBAR_EXPECT_TX", wide | 2 | 4)
        return Insn(op, i, s0=base, imm=offset, s1=d.value(i.operands[1]), mod=mod)
    if what == "arrive":
        if "noComplete" in words:
            raise PtxError("mbarrier.arrive.noComplete is not known")
        has_token = not isinstance(i.operands[0], Memory)
        operands = i.operands[1:] if has_token else i.operands
        base, offset, wide = d.address(operands[0])
        count = d.value(operands[1]) if len(operands) > 1 else (32, 1)
        token = i.operands[0] if has_token else None
        op = "MBAR_ARRIVE_EXPECT_TX" if "expect_tx" in words else "MBAR_ARRIVE"
        return Insn(
            op,
            i,
            d0=_result(token) if token is not None else None,
            s0=base,
            imm=offset,
            s1=count,
            mod=wide | (2 if "expect_tx" in words else 0),
        )
    if what in ("try_wait", "test_wait"):
        base, offset, wide = d.address(i.operands[1])
        parity = "parity" in words
        mod = wide | (8 if what == "try_wait" else 0)
        asked = d.value(i.operands[2], 32 if parity else 64)
        return Insn(
            "MBAR_WAIT_PARITY" if parity else "MBAR_WAIT_TOKEN",
            i,
            d0=_result(i.operands[0]),
            s0=base,
            imm=offset,
            s1=asked,
            mod=mod,
        )
    raise PtxError(f"opcode {i.opcode} is not known")


@_opcode("fence", "membar")
def _fence(d: _Decoder, i: Instruction, words: list[str]) -> Any:
    if words[0] == "proxy":
        if words[1] != "async" or not set(words[2:]) <= {"shared::cta", "global", "shared::cluster"}:
            raise PtxError(f"opcode {i.opcode} is not known")
        return Insn("FENCE_PROXY_ASYNC", i)
    if words[0] == "mbarrier_init":
        _only(words[1:], "release", "cluster")
        return Insn("FENCE_MBAR_INIT", i)
    _only(words, "acq_rel", "sc", "acquire", "release", "cta", "gpu", "sys", "cluster", "gl")
    return Insn("FENCE", i)


# --- memory ----------------------------------------------------------------------------------------------------------

_SPACES = {"global": 0, "shared": 1, "shared::cta": 1, "shared::cluster": 1}
_HINTS = (
    "ca", "cg", "cs", "lu", "cv", "wb", "wt", "nc", "relaxed", "acquire", "release", "volatile", "weak", "cta", "gpu",
    "sys", "cluster", "L1::no_allocate", "L1::evict_last", "L1::evict_first", "L1::evict_normal", "L2::64B", "L2::128B",
    "L2::256B", "L2::cache_hint",
)  # fmt: skip


def _plain_type(kind: str) -> str:
    if kind not in (
        "b8",
        "u8",
        "s8",
        "b16",
        "u16",
        "s16",
        *(f"{letter}{bits}" for letter in "busf" for bits in (32, 64)),
    ):
        raise PtxError(f"type .{kind} is not known")
    return kind


def _access(d: _Decoder, i: Instruction, words: list[str]) -> tuple[int, int, int, bool]:
    """(space, elements, bytes of one, signed) of a load or store."""
    space = next((_SPACES[word] for word in words if word in _SPACES), 2)
    count = next((int(word[1:]) for word in words if word in ("v2", "v4", "v8")), 1)
    kind = words[-1]
    _only(words[:-1], "v2", "v4", "v8", *_SPACES, *_HINTS)
    size = _bits(_plain_type(kind)) // 8
    for name, number in (("global", 0), ("shared", 1)):
        if space in (number, 2):
            d.granules[name] = min(d.granules[name], size)
    return space, count, size, kind.startswith("s")


@_opcode("ld", "ldu")
def _ld(d: _Decoder, i: Instruction, words: list[str]) -> Any:
    target = i.operands[0]
    results = [_result(o) for o in (target.elements if isinstance(target, Vector) else (target,))]
    if words[0].startswith("param"):
        _only(words[:-1], "param", "param::entry", "v2", "v4")
        memory = i.operands[1]
        assert isinstance(memory, Memory)
        if not isinstance(memory.base, Symbol):
            raise PtxError("a parameter is read by its name")
        offset = d.parameters[memory.base.name].offset + memory.offset
        size = _bits(_plain_type(words[-1])) // 8
        end = max((parameter.offset + parameter.bytes for parameter in d.kernel.parameters), default=0)
        if not 0 <= offset <= end - size * len(results):
            raise PtxError("this lies outside the parameters")
        return Insn(
            "LD_PARAM",
            i,
            imm=offset,
            mod=size.bit_length() - 1 | int(words[-1].startswith("s")) << 5 | int(d.is_wide(results[0])) << 7,
            list=results,
            n=len(results),
            list_is_written=len(results),
        )
    space, count, size, is_signed = _access(d, i, words)
    base, offset, wide = d.address(i.operands[1])
    if count != len(results):
        raise PtxError(f"{count} results are expected")
    whole = int(d.is_wide(results[0]))
    mod = space | (size.bit_length() - 1) << 2 | int(is_signed) << 5 | wide << 6 | whole << 7
    return Insn("LD", i, s0=base, imm=offset, mod=mod, list=results, n=count, list_is_written=count)


@_opcode("st")
def _st(d: _Decoder, i: Instruction, words: list[str]) -> Any:
    space, count, size, _ = _access(d, i, words)
    base, offset, wide = d.address(i.operands[0])
    source = i.operands[1]
    values = [d.value(o, max(32, size * 8)) for o in (source.elements if isinstance(source, Vector) else (source,))]
    if count != len(values):
        raise PtxError(f"{count} values are expected")
    mod = space | (size.bit_length() - 1) << 2 | wide << 6 | int(size == 8) << 7
    return Insn("ST", i, s0=base, imm=offset, mod=mod, list=values, n=count)


_ATOMICS = {
    ("add", "u32"): 0, ("add", "s32"): 0, ("add", "f32"): 1, ("exch", "b32"): 2, ("min", "u32"): 3, ("max", "u32"): 4,
    ("and", "b32"): 5, ("or", "b32"): 6, ("cas", "b32"): 7, ("add", "u64"): 8, ("min", "s32"): 9, ("max", "s32"): 10,
    ("xor", "b32"): 11,
}  # fmt: skip


@_opcode("atom", "red")
def _atom(d: _Decoder, i: Instruction, words: list[str]) -> Any:
    has_result = i.opcode.startswith("atom")
    operation = next((w for w in words if (w, words[-1]) in _ATOMICS), None)
    if operation is None:
        raise PtxError(f"opcode {i.opcode} is not known")
    _only([w for w in words[:-1] if w != operation], "v2", "v4", "noftz", *_SPACES, *_HINTS)
    operands = i.operands[1:] if has_result else i.operands
    base, offset, wide = d.address(operands[0])
    space = next((_SPACES[word] for word in words if word in _SPACES), 2)
    source = operands[1]
    width = 64 if words[-1] == "u64" else 32
    values = [d.value(o, width) for o in (source.elements if isinstance(source, Vector) else (source,))]
    return Insn(
        "ATOM", i, d0=_result(i.operands[0]) if has_result else None, s0=base, imm=offset,
        s2=d.value(operands[2]) if operation == "cas" else None, mod=space | int(has_result) << 2 | wide << 6,
        target=_ATOMICS[operation, words[-1]], list=values, n=len(values),
    )  # fmt: skip


@_opcode("ldmatrix", "stmatrix")
def _matrix(d: _Decoder, i: Instruction, words: list[str]) -> Any:
    load = i.opcode.startswith("ld")
    _only(words, "sync", "aligned", "m8n8", "x1", "x2", "x4", "trans", "b16", *_SPACES)
    memory, fragment = (i.operands[1], i.operands[0]) if load else (i.operands[0], i.operands[1])
    base, offset, wide = d.address(memory)
    parts = fragment.elements if isinstance(fragment, Vector) else (fragment,)
    values = [_result(o) if load else d.value(o) for o in parts]
    if f"x{len(values)}" not in words:
        raise PtxError("as many registers as matrices are expected")
    return Insn(
        "LDMATRIX" if load else "STMATRIX", i, s0=base, imm=offset, mod=int("trans" in words) | wide << 1, list=values,
        n=len(values), list_is_written=len(values) if load else 0,
    )  # fmt: skip


# --- asynchronous copies ---------------------------------------------------------------------------------------------


@_opcode("cp")
def _cp(d: _Decoder, i: Instruction, words: list[str]) -> Any:
    if "bulk" in words:
        return _bulk(d, i, [word for word in words if word not in ("reduce", "async", "bulk")])
    rest = words[1:]
    if rest == ["commit_group"]:
        return Insn("CP_ASYNC_COMMIT", i)
    if rest == ["wait_all"]:
        return Insn("CP_ASYNC_WAIT", i, imm=-1)
    if rest == ["wait_group"]:
        return Insn("CP_ASYNC_WAIT", i, imm=_literal(i.operands[0]))
    if rest[0] == "mbarrier":
        _only(rest[1:], "arrive", "noinc", "b64", *_SPACES)
        base, offset, wide = d.address(i.operands[0])
        return Insn("CP_ASYNC_MBAR_ARRIVE", i, s0=base, imm=offset, mod=wide | (2 if "noinc" in rest else 0))
    _only(rest, "ca", "cg", *_SPACES, *_HINTS)
    to, to_offset, to_wide = d.address(i.operands[0])
    source, offset, _ = d.address(i.operands[1])
    size = _literal(i.operands[2])
    if size not in ((16,) if "cg" in rest else (4, 8, 16)):
        raise PtxError(f"copies of {size} bytes are not known")
    counted = len(i.operands) > 3
    if counted and isinstance(i.operands[3], Register) and d.kind(i.operands[3]) == "pred":
        raise PtxError("ignore-src is not known")
    return Insn(
        "CP_ASYNC", i, s0=to, imm2=to_offset, s1=source, n=offset, imm=size,
        s2=d.value(i.operands[3]) if counted else None, mod=to_wide | (2 if counted else 0),
    )  # fmt: skip


def _literal(operand: Operand) -> int:
    if not isinstance(operand, Immediate):
        raise PtxError(f"{operand} has to be a literal")
    return operand.bits


_REDUCTIONS = {("add", "f32"): 1, ("add", "bf16"): 2, ("add", "u32"): 3, ("add", "s32"): 3}


def _bulk(d: _Decoder, i: Instruction, words: list[str]) -> Any:
    """cp.async.bulk and cp.reduce.async.bulk, of tensors or of runs of bytes."""
    if words[0] == "commit_group":
        _only(words[1:])
        return Insn("BULK_COMMIT", i)
    if words[0] == "wait_group":
        _only(words[1:], "read")
        return Insn("BULK_WAIT", i, imm=_literal(i.operands[0]))
    if words[0] == "prefetch":
        return Insn("NOP", i)
    reduction = 0
    if i.opcode.startswith("cp.reduce"):
        kind = words[-1] if re.fullmatch(r"[bfsu]\d+|bf16", words[-1]) else ""
        operation = next((w for w in words if w in ("add", "min", "max", "inc", "dec", "and", "or", "xor")), "")
        reduction = _REDUCTIONS.get(
            (operation, kind), 1 if operation == "add" and "tensor" in words and not kind else 0
        )
        if not reduction:
            raise PtxError(f"opcode {i.opcode} is not known")
        words = [w for w in words if w not in (operation, kind, "noftz")]
    known = (
        "tensor", "1d", "2d", "3d", "4d", "5d", "shared::cta", "shared::cluster", "global", "tile", "tile::gather4",
        "mbarrier::complete_tx::bytes", "bulk_group", "L2::cache_hint", "cta_group::1",
    )  # fmt: skip
    _only(words, *known)
    spaces = [word for word in words if word in _SPACES]
    if len(spaces) != 2 or "global" not in spaces:
        raise PtxError("only copies between global and shared memory are known")
    to_shared = spaces[1] == "global"
    if "tensor" in words:
        tensor = i.operands[1 if to_shared else 0]
        shared = i.operands[0 if to_shared else 1]
        assert isinstance(tensor, Memory)
        base, offset, wide = d.address(shared)
        coordinates = [d.value(o) for o in tensor.coordinates]
        rank = 5 if "tile::gather4" in words else next(int(w[0]) for w in words if re.fullmatch("[1-5]d", w))
        if len(coordinates) != rank:
            raise PtxError(f"{rank} coordinates are expected")
        map_address = tensor.base if isinstance(tensor.base, Register) else d.value(tensor.base, 64)
        if not to_shared:
            d.granules["global"] = min(d.granules["global"], 2)  # elements of tensors may be this small
            return Insn(
                "TMA_STORE",
                i,
                s0=base,
                imm=offset,
                s1=map_address,
                mod=wide,
                list=coordinates,
                n=len(coordinates),
                target=reduction,
            )
        barrier, barrier_offset, barrier_wide = d.address(i.operands[2])
        mod = wide | (2 if "tile::gather4" in words else 0) | barrier_wide << 2
        return Insn(
            "TMA_LOAD",
            i,
            s0=base,
            imm=offset,
            s1=map_address,
            s2=barrier,
            imm2=barrier_offset,
            mod=mod,
            list=coordinates,
            n=len(coordinates),
        )
    to, to_offset, to_wide = d.address(i.operands[0])
    source, offset, wide = d.address(i.operands[1])
    size = d.value(i.operands[2])
    if not to_shared:
        return Insn("BULK_STORE", i, s0=to, imm=to_offset, s1=source, imm2=offset, s2=size, mod=wide, target=reduction)
    barrier, barrier_offset, barrier_wide = d.address(i.operands[3])
    return Insn(
        "BULK_LOAD",
        i,
        s0=to,
        imm=to_offset,
        s1=source,
        imm2=offset,
        s2=size,
        s3=barrier,
        n=barrier_offset,
        mod=to_wide | barrier_wide << 2,
    )


# --- tensor cores ----------------------------------------------------------------------------------------------------


@_opcode("wgmma")
def _wgmma(d: _Decoder, i: Instruction, words: list[str]) -> Any:
    what = words[0]
    if what in ("fence", "commit_group", "wait_group"):
        _exactly(i, words[1:], "sync.aligned")
    if what == "fence":
        return Insn("WGMMA_FENCE", i)
    if what == "commit_group":
        return Insn("WGMMA_COMMIT", i)
    if what == "wait_group":
        return Insn("WGMMA_WAIT", i, imm=_literal(i.operands[0]))
    known = re.fullmatch(r"mma_async\.sync\.aligned\.m64n(\d+)k16\.f32\.(bf16|f16)\.\2", ".".join(words))
    columns = int(known.group(1)) if known else 0
    if known is None or columns % 8 or not 8 <= columns <= 256:
        raise PtxError(f"opcode {i.opcode} is not known")
    accumulator, a, b, scale, *flags = i.operands
    if not isinstance(accumulator, Vector) or len(accumulator.elements) != columns // 2:
        raise PtxError(f"{columns // 2} accumulator registers are expected")
    operands: list[Any] = [_result(o) for o in accumulator.elements]
    in_registers = isinstance(a, Vector)
    numbers = [_literal(o) for o in flags]
    if not set(numbers[:2]) <= {1, -1} or not set(numbers[2:]) <= {0, 1} or len(numbers) != (3 if in_registers else 4):
        raise PtxError("two signs and whether an operand is transposed are expected")
    mod = (8 if known.group(2) == "f16" else 0) | (16 if numbers[0] == -1 else 0) | (32 if numbers[1] == -1 else 0)
    if isinstance(a, Vector):
        operands += [_result(o) for o in a.elements]
        mod |= 1 | (4 if numbers[2] else 0)
    else:
        mod |= (2 if numbers[2] else 0) | (4 if numbers[3] else 0)
    return Insn(
        "WGMMA", i, s0=None if in_registers else d.value(a, 64), s1=d.value(b, 64), s2=d.value(scale, 1), mod=mod,
        list=operands, n=columns, list_is_written=columns // 2,
    )  # fmt: skip


@_opcode("tcgen05")
def _tcgen05(d: _Decoder, i: Instruction, words: list[str]) -> Any:
    what, rest = words[0], words[1:]
    _only([w for w in rest if not w.startswith(("kind::", "collector::a::", "x"))], *_TCGEN05_WORDS)
    if what == "alloc":
        base, offset, wide = d.address(i.operands[0])
        return Insn("TC5_ALLOC", i, s0=base, imm=offset, s1=d.value(i.operands[1]), mod=wide)
    if what == "dealloc":
        return Insn("TC5_DEALLOC", i, s0=d.value(i.operands[0]), s1=d.value(i.operands[1]))
    if what == "relinquish_alloc_permit":
        return Insn("TC5_RELINQUISH", i)
    if what in ("wait::ld", "wait::st"):
        return Insn("TC5_WAIT", i, mod=int(what == "wait::st"))
    if what in ("fence::before_thread_sync", "fence::after_thread_sync"):
        return Insn("TC5_FENCE_BEFORE" if "before" in what else "TC5_FENCE_AFTER", i)
    if what == "commit":
        if len(i.operands) != 1:
            raise PtxError("a multicast commit is not known")
        base, offset, wide = d.address(i.operands[0])
        return Insn("TC5_COMMIT", i, s0=base, imm=offset, mod=wide)
    if what in ("ld", "st"):
        return _tcgen05_move(d, i, what, rest)
    if what == "mma":
        return _tcgen05_mma(d, i, rest)
    raise PtxError(f"opcode {i.opcode} is not known")


_TCGEN05_WORDS = (
    "cta_group::1", "sync", "aligned", "shared::cta", "shared::cluster", "b32", "b64", "mbarrier::arrive::one",
    "32x32b", "16x256b", "16x128b",
)  # fmt: skip


def _tcgen05_move(d: _Decoder, i: Instruction, what: str, words: list[str]) -> Insn:
    shape = ("32x32b", "16x256b", "16x128b").index(words[2])
    repetitions = int(words[3][1:])
    if repetitions & (repetitions - 1) or words[4:] != ["b32"]:
        raise PtxError(f"opcode {i.opcode} is not known")
    count = repetitions * (1, 4, 2)[shape]
    fragment, memory = (i.operands[0], i.operands[1]) if what == "ld" else (i.operands[1], i.operands[0])
    parts = fragment.elements if isinstance(fragment, Vector) else (fragment,)
    if len(parts) != count:
        raise PtxError(f"{count} registers are expected")
    base, offset, _ = d.address(memory)
    values = [_result(o) if what == "ld" else d.value(o) for o in parts]
    written = count if what == "ld" else 0
    return Insn(f"TC5_{what.upper()}", i, s0=base, imm=offset, mod=shape, list=values, n=count, list_is_written=written)


def _tcgen05_mma(d: _Decoder, i: Instruction, words: list[str]) -> Insn:
    if "kind::f16" not in words:
        raise PtxError("only kind::f16 is known")
    target, a, b, description, *rest = i.operands
    lane_mask: tuple[Operand, ...] = ()
    if isinstance(rest[0], Vector):
        lane_mask = rest[0].elements
        rest = rest[1:]
    if len(rest) != 1 or len(lane_mask) not in (0, 4):
        raise PtxError("scale-input-d and masks of other lengths are not known")
    base, offset, _ = d.address(target)
    from_tensor_memory = isinstance(a, Memory)
    a_value, a_offset = (d.address(a)[0], d.address(a)[1]) if from_tensor_memory else (d.value(a, 64), 0)
    mod = int(from_tensor_memory) | (2 if lane_mask else 0)
    return Insn(
        "TC5_MMA", i, s0=base, imm=offset, s1=a_value, imm2=a_offset, s2=d.value(b, 64), s3=d.value(description),
        predicate=d.value(rest[0], 1), mod=mod, list=[d.value(o) for o in lane_mask], n=len(lane_mask),
    )  # fmt: skip
