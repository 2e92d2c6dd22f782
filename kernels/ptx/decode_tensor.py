"""The tensor cores: wgmma and tcgen05."""

from __future__ import annotations

import re
from typing import Any

from dsa_planner.kernels.ptx.operands import (
    Operands,
    exactly,
    literal,
    only,
    opcode,
    result,
)
from dsa_planner.kernels.ptx.parser import (
    Instruction,
    Memory,
    Operand,
    PtxError,
    Vector,
)
from dsa_planner.kernels.ptx.program import Insn


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
        return Insn("WGMMA_WAIT", i, imm=literal(i.operands[0]))
    known = re.fullmatch(r"mma_async\.sync\.aligned\.m64n(\d+)k16\.f32\.(bf16|f16)\.\2", ".".join(words))
    columns = int(known.group(1)) if known else 0
    if known is None or columns % 8 or not 8 <= columns <= 256:
        raise PtxError(f"opcode {i.opcode} is not known")
    accumulator, a, b, scale, *flags = i.operands
    if not isinstance(accumulator, Vector) or len(accumulator.elements) != columns // 2:
        raise PtxError(f"{columns // 2} accumulator registers are expected")
    operands: list[Any] = [result(o) for o in accumulator.elements]
    in_registers = isinstance(a, Vector)
    numbers = [literal(o) for o in flags]
    if not set(numbers[:2]) <= {1, -1} or not set(numbers[2:]) <= {0, 1} or len(numbers) != (3 if in_registers else 4):
        raise PtxError("two signs and whether an operand is transposed are expected")
    mod = (8 if known.group(2) == "f16" else 0) | (16 if numbers[0] == -1 else 0) | (32 if numbers[1] == -1 else 0)
    if isinstance(a, Vector):
        operands += [result(o) for o in a.elements]
        mod |= 1 | (4 if numbers[2] else 0)
    else:
        mod |= (2 if numbers[2] else 0) | (4 if numbers[3] else 0)
    return Insn(
        "WGMMA", i, s0=None if in_registers else d.value(a, 64), s1=d.value(b, 64), s2=d.value(scale, 1), mod=mod,
        list=operands, n=columns, list_is_written=columns // 2,
    )  # fmt: skip


@opcode("tcgen05")
def _tcgen05(d: Operands, i: Instruction, words: list[str]) -> Any:
    what, rest = words[0], words[1:]
    only([w for w in rest if not w.startswith(("kind::", "collector::a::", "x"))], *_TCGEN05_WORDS)
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


def _tcgen05_move(d: Operands, i: Instruction, what: str, words: list[str]) -> Insn:
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
    values = [result(o) if what == "ld" else d.value(o) for o in parts]
    written = count if what == "ld" else 0
    return Insn(f"TC5_{what.upper()}", i, s0=base, imm=offset, mod=shape, list=values, n=count, list_is_written=written)


def _tcgen05_mma(d: Operands, i: Instruction, words: list[str]) -> Insn:
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
