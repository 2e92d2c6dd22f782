"""Loads, stores, atomics and asynchronous copies."""

from __future__ import annotations

import re
from typing import Any

from dsa_planner.kernels.ptx.operands import (
    Operands,
    bits_of,
    literal,
    only,
    opcode,
    result,
)
from dsa_planner.kernels.ptx.parser import (
    Instruction,
    Memory,
    PtxError,
    Register,
    Symbol,
    Vector,
)
from dsa_planner.kernels.ptx.program import Insn

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


def _access(d: Operands, i: Instruction, words: list[str]) -> tuple[int, int, int, bool]:
    """(space, elements, bytes of one, signed) of a load or store."""
    space = next((_SPACES[word] for word in words if word in _SPACES), 2)
    count = next((int(word[1:]) for word in words if word in ("v2", "v4", "v8")), 1)
    kind = words[-1]
    only(words[:-1], "v2", "v4", "v8", *_SPACES, *_HINTS)
    size = bits_of(_plain_type(kind)) // 8
    for name, number in (("global", 0), ("shared", 1)):
        if space in (number, 2):
            d.granules[name] = min(d.granules[name], size)
    return space, count, size, kind.startswith("s")


@opcode("ld", "ldu")
def _ld(d: Operands, i: Instruction, words: list[str]) -> Any:
    target = i.operands[0]
    results = [result(o) for o in (target.elements if isinstance(target, Vector) else (target,))]
    if words[0].startswith("param"):
        only(words[:-1], "param", "param::entry", "v2", "v4")
        memory = i.operands[1]
        assert isinstance(memory, Memory)
        if not isinstance(memory.base, Symbol):
            raise PtxError("a parameter is read by its name")
        offset = d.parameters[memory.base.name].offset + memory.offset
        size = bits_of(_plain_type(words[-1])) // 8
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


@opcode("st")
def _st(d: Operands, i: Instruction, words: list[str]) -> Any:
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


@opcode("atom", "red")
def _atom(d: Operands, i: Instruction, words: list[str]) -> Any:
    has_result = i.opcode.startswith("atom")
    operation = next((w for w in words if (w, words[-1]) in _ATOMICS), None)
    if operation is None:
        raise PtxError(f"opcode {i.opcode} is not known")
    only([w for w in words[:-1] if w != operation], "v2", "v4", "noftz", *_SPACES, *_HINTS)
    operands = i.operands[1:] if has_result else i.operands
    base, offset, wide = d.address(operands[0])
    space = next((_SPACES[word] for word in words if word in _SPACES), 2)
    source = operands[1]
    width = 64 if words[-1] == "u64" else 32
    values = [d.value(o, width) for o in (source.elements if isinstance(source, Vector) else (source,))]
    return Insn(
        "ATOM", i, d0=result(i.operands[0]) if has_result else None, s0=base, imm=offset,
        s2=d.value(operands[2]) if operation == "cas" else None, mod=space | int(has_result) << 2 | wide << 6,
        target=_ATOMICS[operation, words[-1]], list=values, n=len(values),
    )  # fmt: skip


@opcode("ldmatrix", "stmatrix")
def _matrix(d: Operands, i: Instruction, words: list[str]) -> Any:
    load = i.opcode.startswith("ld")
    only(words, "sync", "aligned", "m8n8", "x1", "x2", "x4", "trans", "b16", *_SPACES)
    memory, fragment = (i.operands[1], i.operands[0]) if load else (i.operands[0], i.operands[1])
    base, offset, wide = d.address(memory)
    parts = fragment.elements if isinstance(fragment, Vector) else (fragment,)
    values = [result(o) if load else d.value(o) for o in parts]
    if f"x{len(values)}" not in words:
        raise PtxError("as many registers as matrices are expected")
    return Insn(
        "LDMATRIX" if load else "STMATRIX", i, s0=base, imm=offset, mod=int("trans" in words) | wide << 1, list=values,
        n=len(values), list_is_written=len(values) if load else 0,
    )  # fmt: skip


# --- asynchronous copies ---------------------------------------------------------------------------------------------


@opcode("cp")
def _cp(d: Operands, i: Instruction, words: list[str]) -> Any:
    if "bulk" in words:
        return _bulk(d, i, [word for word in words if word not in ("reduce", "async", "bulk")])
    rest = words[1:]
    if rest == ["commit_group"]:
        return Insn("CP_ASYNC_COMMIT", i)
    if rest == ["wait_all"]:
        return Insn("CP_ASYNC_WAIT", i, imm=-1)
    if rest == ["wait_group"]:
        return Insn("CP_ASYNC_WAIT", i, imm=literal(i.operands[0]))
    if rest[0] == "mbarrier":
        only(rest[1:], "arrive", "noinc", "b64", *_SPACES)
        base, offset, wide = d.address(i.operands[0])
        return Insn("CP_ASYNC_MBAR_ARRIVE", i, s0=base, imm=offset, mod=wide | (2 if "noinc" in rest else 0))
    only(rest, "ca", "cg", *_SPACES, *_HINTS)
    to, to_offset, to_wide = d.address(i.operands[0])
    source, offset, _ = d.address(i.operands[1])
    size = literal(i.operands[2])
    if size not in ((16,) if "cg" in rest else (4, 8, 16)):
        raise PtxError(f"copies of {size} bytes are not known")
    counted = len(i.operands) > 3
    if counted and isinstance(i.operands[3], Register) and d.kind(i.operands[3]) == "pred":
        raise PtxError("ignore-src is not known")
    return Insn(
        "CP_ASYNC", i, s0=to, imm2=to_offset, s1=source, n=offset, imm=size,
        s2=d.value(i.operands[3]) if counted else None, mod=to_wide | (2 if counted else 0),
    )  # fmt: skip


_REDUCTIONS = {("add", "f32"): 1, ("add", "bf16"): 2, ("add", "u32"): 3, ("add", "s32"): 3}


def _bulk(d: Operands, i: Instruction, words: list[str]) -> Any:
    """cp.async.bulk and cp.reduce.async.bulk, of tensors or of runs of bytes."""
    if words[0] == "commit_group":
        only(words[1:])
        return Insn("BULK_COMMIT", i)
    if words[0] == "wait_group":
        only(words[1:], "read")
        return Insn("BULK_WAIT", i, imm=literal(i.operands[0]))
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
    only(words, *known)
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
