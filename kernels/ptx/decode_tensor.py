"""The tensor cores: wgmma and tcgen05."""

from __future__ import annotations

import re
from typing import Any

from dsa_planner.kernels.ptx.operands import (
    Operands,
    exactly,
    only,
    opcode,
    operands,
)
from dsa_planner.kernels.ptx.program import Insn
from dsa_planner.kernels.ptx.syntax import Immediate, Instruction, Memory, Operand, PtxError, Vector


@opcode("wgmma")
def _wgmma(d: Operands, i: Instruction, words: list[str]) -> Any:
    what = words[0]
    if what in ("fence", "commit_group", "wait_group"):
        exactly(i, words[1:], "sync.aligned")
    if what == "fence":
        return Insn("WGMMA_FENCE", i)
    if what == "commit_group":
        return Insn("WGMMA_COMMIT", i)
    if what == "wait_group":
        (groups,) = operands(i, 1)
        return Insn("WGMMA_WAIT", i, imm=d.literal(groups, 0, 7))
    known = re.fullmatch(r"mma_async\.sync\.aligned\.m64n(\d+)k16\.f32\.(bf16|f16)\.\2", ".".join(words))
    columns = int(known.group(1)) if known else 0
    if known is None or columns % 8 or not 8 <= columns <= 256:
        raise PtxError(f"opcode {i.opcode} is not known")
    accumulator, a, b, scale, *flags = operands(i, 4 + 3, 4 + 4)
    in_registers = isinstance(a, Vector)
    if len(flags) != (3 if in_registers else 4):
        raise PtxError("two signs and whether an operand is transposed are expected")
    results = d.results(accumulator, "f32")
    if len(results) != columns // 2 or not isinstance(accumulator, Vector):
        raise PtxError(f"{columns // 2} accumulator registers are expected")
    signs, transposed = [d.literal(o, -1, 1) for o in flags[:2]], [d.literal(o, 0, 1) for o in flags[2:]]
    if 0 in signs:
        raise PtxError("a sign is 1 or -1")
    mod = (8 if known.group(2) == "f16" else 0) | (16 if signs[0] == -1 else 0) | (32 if signs[1] == -1 else 0)
    fragment: list[Any] = []
    if in_registers:
        fragment = d.results(a, "b32")  # registers, each with a name: they are read later
        if len(fragment) != 4:
            raise PtxError("4 registers of A are expected")
        mod |= 1 | (4 if transposed[0] else 0)
    else:
        mod |= (2 if transposed[0] else 0) | (4 if transposed[1] else 0)
    if any(register.name == "_" for register in (*results, *fragment)):
        raise PtxError("wgmma reads its registers, and _ has no value")
    return Insn(
        "WGMMA", i, s0=None if in_registers else d.value(a, "u64"), s1=d.value(b, "u64"), s2=d.value(scale, "pred"),
        mod=mod, list=results + fragment, n=columns, list_is_written=columns // 2,
    )  # fmt: skip


@opcode("tcgen05")
def _tcgen05(d: Operands, i: Instruction, words: list[str]) -> Any:
    what, rest = words[0], words[1:]
    if what in _TCGEN05_FORMS:
        exactly(i, rest, *_TCGEN05_FORMS[what])
    if what == "alloc":
        memory, columns = operands(i, 2)
        base, offset, wide = d.address(memory, shared=True)
        return Insn("TC5_ALLOC", i, s0=base, imm=offset, s1=_columns(d, columns), mod=wide)
    if what == "dealloc":
        start, columns = operands(i, 2)
        return Insn("TC5_DEALLOC", i, s0=d.value(start, "u32"), s1=_columns(d, columns))
    if what == "relinquish_alloc_permit":
        return Insn("TC5_RELINQUISH", i)
    if what in ("wait::ld", "wait::st"):
        return Insn("TC5_WAIT", i, mod=int(what == "wait::st"))
    if what in ("fence::before_thread_sync", "fence::after_thread_sync"):
        return Insn("TC5_FENCE_BEFORE" if "before" in what else "TC5_FENCE_AFTER", i)
    if what == "commit":
        if len(i.operands) != 1:
            raise PtxError("a multicast commit is not known")
        base, offset, wide = d.address(i.operands[0], shared=True)
        return Insn("TC5_COMMIT", i, s0=base, imm=offset, mod=wide)
    if what in ("ld", "st"):
        return _tcgen05_move(d, i, what, rest)
    if what == "mma":
        return _tcgen05_mma(d, i, rest)
    raise PtxError(f"opcode {i.opcode} is not known")


_TCGEN05_FORMS = {
    "alloc": ("cta_group::1.sync.aligned.shared::cta.b32", "cta_group::1.sync.aligned.b32"),
    "dealloc": ("cta_group::1.sync.aligned.b32",),
    "relinquish_alloc_permit": ("cta_group::1.sync.aligned",),
    "wait::ld": ("sync.aligned",),
    "wait::st": ("sync.aligned",),
    "fence::before_thread_sync": ("",),
    "fence::after_thread_sync": ("",),
    "commit": (
        "cta_group::1.mbarrier::arrive::one.b64",
        "cta_group::1.mbarrier::arrive::one.shared::cluster.b64",
    ),
}


def _columns(d: Operands, operand: Operand) -> Any:
    if isinstance(operand, Immediate) and d.literal(operand, 32, 512).bit_count() != 1:
        raise PtxError("columns of tensor memory are a power of two")
    return d.value(operand, "u32")


def _tcgen05_move(d: Operands, i: Instruction, what: str, words: list[str]) -> Insn:
    form = re.fullmatch(r"sync\.aligned\.(32x32b|16x256b|16x128b)\.x(1|2|4|8|16|32|64|128)\.b32", ".".join(words))
    if form is None:
        raise PtxError(f"opcode {i.opcode} is not known")
    shape = ("32x32b", "16x256b", "16x128b").index(form.group(1))
    count = int(form.group(2)) * (1, 4, 2)[shape]
    if count > 128:
        raise PtxError(f"opcode {i.opcode} is not known")
    first, second = operands(i, 2)
    fragment, memory = (first, second) if what == "ld" else (second, first)
    base, offset = d.tensor_memory(memory)
    found = d.results(fragment, "b32") if what == "ld" else d.values(fragment, "b32")
    if len(found) != count:
        raise PtxError(f"{count} registers are expected")
    written = count if what == "ld" else 0
    return Insn(f"TC5_{what.upper()}", i, s0=base, imm=offset, mod=shape, list=found, n=count, list_is_written=written)


def _tcgen05_mma(d: Operands, i: Instruction, words: list[str]) -> Insn:
    if words[:2] != ["cta_group::1", "kind::f16"]:
        raise PtxError("only cta_group::1.kind::f16 is known")
    only([word for word in words[2:] if not word.startswith("collector::a::")])
    target, a, b, description, *rest = operands(i, 5, 6)
    lane_mask: list[Any] = []
    if isinstance(rest[0], Vector):
        lane_mask = d.values(rest.pop(0), "b32")
    if len(rest) != 1 or len(lane_mask) not in (0, 4):
        raise PtxError("scale-input-d and masks of other lengths are not known")
    base, offset = d.tensor_memory(target, letters="b")
    from_tensor_memory = isinstance(a, Memory)
    a_value, a_offset = d.tensor_memory(a, letters="b") if from_tensor_memory else (d.value(a, "u64"), 0)
    mod = int(from_tensor_memory) | (2 if lane_mask else 0)
    return Insn(
        "TC5_MMA", i, s0=base, imm=offset, s1=a_value, imm2=a_offset, s2=d.value(b, "u64"),
        s3=d.value(description, "u32"), predicate=d.value(rest[0], "pred"), mod=mod, list=lane_mask, n=len(lane_mask),
    )  # fmt: skip
