"""Loads, stores, atomics and asynchronous copies."""

from __future__ import annotations

import re
from typing import Any

from dsa_planner.kernels.ptx.operands import (
    Operands,
    bits_of,
    only,
    opcode,
    operands,
)
from dsa_planner.kernels.ptx.program import Insn
from dsa_planner.kernels.ptx.syntax import (
    Immediate,
    Instruction,
    Operand,
    PtxError,
    Register,
    spelled,
)

_SPACES = {"global": 0, "shared": 1, "shared::cta": 1, "shared::cluster": 1}
_MOST_GROUPS = (1 << 31) - 1
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


def _policy(d: Operands, words: list[str], rest: list[Operand]) -> None:
    """The cache policy behind the other operands, which has to be there where an opcode says so."""
    if len(rest) != int("L2::cache_hint" in words):
        raise PtxError("a cache policy goes with .L2::cache_hint")
    for o in rest:
        d.value(o, "u64")


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
    if words[0].startswith("param"):
        return _ld_param(d, i, words)
    space, count, size, is_signed = _access(d, i, words)
    target, memory, *rest = operands(i, 2, 3)
    base, offset, wide = d.address(memory, shared=space == 1)
    results = d.results(target, words[-1], wider=True)
    _policy(d, words, rest)
    if count != len(results):
        raise PtxError(f"{count} results are expected")
    mod = space | (size.bit_length() - 1) << 2 | int(is_signed) << 5 | wide << 6 | _whole(d, results) << 7
    return Insn("LD", i, s0=base, imm=offset, mod=mod, list=results, n=count, list_is_written=count)


def _whole(d: Operands, registers: list[Any]) -> int:
    """Whether registers have 64 bits."""
    return int(any(d.is_wide(register) for register in registers))


def _ld_param(d: Operands, i: Instruction, words: list[str]) -> Insn:
    only(words[:-1], "param", "param::entry", "v2", "v4")
    target, memory = operands(i, 2)
    kind = _plain_type(words[-1])
    results = d.results(target, kind, wider=True)
    if len(results) != next((int(word[1:]) for word in words if word in ("v2", "v4")), 1):
        raise PtxError("as many results as elements are expected")
    offset, size = d.parameter(memory), bits_of(kind) // 8
    end = max((parameter.offset + parameter.bytes for parameter in d.kernel.parameters), default=0)
    if not 0 <= offset <= end - size * len(results):
        raise PtxError("this lies outside the parameters")
    if offset % size:
        raise PtxError(f"the address of {size} bytes is a multiple of {size}")
    mod = size.bit_length() - 1 | int(kind.startswith("s")) << 5 | _whole(d, results) << 7
    return Insn("LD_PARAM", i, imm=offset, mod=mod, list=results, n=len(results), list_is_written=len(results))


@opcode("st")
def _st(d: Operands, i: Instruction, words: list[str]) -> Any:
    space, count, size, _ = _access(d, i, words)
    memory, source, *rest = operands(i, 2, 3)
    base, offset, wide = d.address(memory, shared=space == 1)
    values = d.values(source, words[-1], wider=True)
    _policy(d, words, rest)
    if count != len(values):
        raise PtxError(f"{count} values are expected")
    whole = _whole(d, values) | int(size == 8)
    values = [(64, o[1]) if isinstance(o, tuple) and whole else o for o in values]
    mod = space | (size.bit_length() - 1) << 2 | wide << 6 | whole << 7
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
    space, kind = next((_SPACES[word] for word in words if word in _SPACES), 2), words[-1]
    least = 2 + int(has_result) + int(operation == "cas")
    found = list(operands(i, least, least + 1))
    target = found.pop(0) if has_result else None
    base, offset, wide = d.address(found[0], shared=space == 1)
    values = d.values(found[1], kind)
    count = next((int(word[1:]) for word in words if word in ("v2", "v4")), 1)
    if count != len(values) or (count > 1 and (kind != "f32" or has_result or space == 1)):
        raise PtxError("vectors are known of red.global.add.f32, as many values as elements")
    _policy(d, words, found[3 if operation == "cas" else 2 :])
    return Insn(
        "ATOM", i, d0=d.result(target, kind) if target is not None else None, s0=base, imm=offset,
        s2=d.value(found[2], kind) if operation == "cas" else None, mod=space | int(has_result) << 2 | wide << 6,
        target=_ATOMICS[operation, kind], list=values, n=count,
    )  # fmt: skip


@opcode("ldmatrix", "stmatrix")
def _matrix(d: Operands, i: Instruction, words: list[str]) -> Any:
    load = i.opcode.startswith("ld")
    only(words, "sync", "aligned", "m8n8", "x1", "x2", "x4", "trans", "b16", *_SPACES)
    first, second = operands(i, 2)
    memory, fragment = (second, first) if load else (first, second)
    base, offset, wide = d.address(memory, shared=True)
    values = d.results(fragment, "b32") if load else d.values(fragment, "b32")
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
        (groups,) = operands(i, 1)
        return Insn("CP_ASYNC_WAIT", i, imm=d.literal(groups, 0, _MOST_GROUPS))
    if rest[0] == "mbarrier":
        only(rest[1:], "arrive", "noinc", "b64", *_SPACES)
        (memory,) = operands(i, 1)
        base, offset, wide = d.address(memory, shared=True)
        return Insn("CP_ASYNC_MBAR_ARRIVE", i, s0=base, imm=offset, mod=wide | (2 if "noinc" in rest else 0))
    only(rest, "ca", "cg", *_SPACES, *_HINTS)
    target, memory, length, *more = operands(i, 3, 4, 5)
    to, to_offset, to_wide = d.address(target, shared=True)
    source, offset, wide = d.address(memory)
    size = d.literal(length, 4, 16)
    if size not in ((16,) if "cg" in rest else (4, 8, 16)):
        raise PtxError(f"copies of {size} bytes are not known")
    if not wide:
        raise PtxError(f"an address of global memory has 64 bits: {spelled(memory)}")
    counted = more[: len(more) - int("L2::cache_hint" in rest)]
    if counted and isinstance(counted[0], Register) and d.kind(counted[0]) == "pred":
        raise PtxError("ignore-src is not known")
    _policy(d, rest, more[len(counted) :])
    if counted and isinstance(counted[0], Immediate):
        d.literal(counted[0], 0, size)
    return Insn(
        "CP_ASYNC", i, s0=to, imm2=to_offset, s1=source, n=offset, imm=size,
        s2=d.value(counted[0], "u32") if counted else None, mod=to_wide | (2 if counted else 0),
    )  # fmt: skip


_REDUCTIONS = {("add", "f32"): 1, ("add", "bf16"): 2, ("add", "u32"): 3, ("add", "s32"): 3}


def _bulk(d: Operands, i: Instruction, words: list[str]) -> Any:
    """cp.async.bulk and cp.reduce.async.bulk, of tensors or of runs of bytes."""
    if words[0] == "commit_group":
        only(words[1:])
        return Insn("BULK_COMMIT", i)
    if words[0] == "wait_group":
        only(words[1:], "read")
        (groups,) = operands(i, 1)
        return Insn("BULK_WAIT", i, imm=d.literal(groups, 0, _MOST_GROUPS))
    if words[0] == "prefetch":
        return _bulk_prefetch(d, i, words[1:])
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
    return (
        _tensor_copy(d, i, words, reduction, to_shared)
        if "tensor" in words
        else _run_copy(d, i, words, reduction, to_shared)
    )


def _bulk_prefetch(d: Operands, i: Instruction, words: list[str]) -> Insn:
    only(words, "tensor", "1d", "2d", "3d", "4d", "5d", "L2", "global", "tile", "tile::gather4", "L2::cache_hint")
    memory, *rest = i.operands
    if "tensor" in words:
        d.tensor(memory)
    else:
        d.address(memory)
        d.value(rest.pop(0), "u32")
    _policy(d, words, rest)
    return Insn("NOP", i)


def _tensor_copy(d: Operands, i: Instruction, words: list[str], reduction: int, to_shared: bool) -> Insn:
    rank = 5 if "tile::gather4" in words else next(int(w[0]) for w in words if re.fullmatch("[1-5]d", w))
    first, second, *rest = operands(i, *((3, 4) if to_shared else (2, 3)))
    tensor, shared = (second, first) if to_shared else (first, second)
    base, offset, wide = d.address(shared, shared=True)
    map_address, coordinates = d.tensor(tensor)
    if len(coordinates) != rank:
        raise PtxError(f"{rank} coordinates are expected")
    if not to_shared:
        _policy(d, words, rest)
        d.granules["global"] = min(d.granules["global"], 2)  # elements of tensors may be this small
        return Insn(
            "TMA_STORE", i, s0=base, imm=offset, s1=map_address, mod=wide, list=coordinates, n=rank, target=reduction
        )
    barrier, barrier_offset, barrier_wide = d.address(rest[0], shared=True)
    _policy(d, words, rest[1:])
    return Insn(
        "TMA_LOAD", i, s0=base, imm=offset, s1=map_address, s2=barrier, imm2=barrier_offset,
        mod=wide | (2 if "tile::gather4" in words else 0) | barrier_wide << 2, list=coordinates, n=rank,
    )  # fmt: skip


def _run_copy(d: Operands, i: Instruction, words: list[str], reduction: int, to_shared: bool) -> Insn:
    """A run of bytes."""
    first, second, length, *rest = operands(i, *((4, 5) if to_shared else (3, 4)))
    to, to_offset, to_wide = d.address(first, shared=to_shared)
    source, offset, wide = d.address(second, shared=not to_shared)
    if not (wide if to_shared else to_wide):
        raise PtxError("an address of global memory has 64 bits")
    size = d.value(length, "u32")
    if not to_shared:
        _policy(d, words, rest)
        return Insn("BULK_STORE", i, s0=to, imm=to_offset, s1=source, imm2=offset, s2=size, mod=wide, target=reduction)
    barrier, barrier_offset, barrier_wide = d.address(rest[0], shared=True)
    _policy(d, words, rest[1:])
    return Insn(
        "BULK_LOAD", i, s0=to, imm=to_offset, s1=source, imm2=offset, s2=size, s3=barrier, n=barrier_offset,
        mod=to_wide | barrier_wide << 2,
    )  # fmt: skip
