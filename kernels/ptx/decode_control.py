"""Control flow, warps, barriers and fences."""

from __future__ import annotations

from typing import Any

from dsa_planner.kernels.ptx.operands import (
    Operands,
    exactly,
    only,
    opcode,
    operands,
)
from dsa_planner.kernels.ptx.program import Insn
from dsa_planner.kernels.ptx.syntax import Immediate, Instruction, Memory, Pair, PtxError


@opcode("bra")
def _bra(d: Operands, i: Instruction, words: list[str]) -> Any:
    only(words, "uni")
    (target,) = operands(i, 1)
    return Insn("BRA", i, target=d.label(target))


@opcode("ret", "exit")
def _ret(d: Operands, i: Instruction, words: list[str]) -> Any:
    only(words, *(("uni",) if i.opcode.startswith("ret") else ()))
    return Insn("RET", i)


@opcode("trap")
def _trap(d: Operands, i: Instruction, words: list[str]) -> Any:
    only(words)
    return Insn("TRAP", i)


@opcode("nanosleep")
def _nanosleep(d: Operands, i: Instruction, words: list[str]) -> Any:
    exactly(i, words, "u32")
    (time,) = operands(i, 1)
    d.value(time, "u32")
    return Insn("NOP", i)


@opcode("griddepcontrol")
def _griddepcontrol(d: Operands, i: Instruction, words: list[str]) -> Any:
    """It orders launches, and the machine runs them one after another."""
    exactly(i, words, "wait", "launch_dependents")
    return Insn("NOP", i)


@opcode("pmevent")
def _pmevent(d: Operands, i: Instruction, words: list[str]) -> Any:
    only(words, "mask")
    (event,) = operands(i, 1)
    d.literal(event, 0, 0xFFFF if words else 15)
    return Insn("NOP", i)


@opcode("prefetch", "prefetchu", "applypriority")
def _prefetch(d: Operands, i: Instruction, words: list[str]) -> Any:
    """Hints about a cache."""
    name = i.opcode.split(".")[0]
    known = {"prefetch": ("global", "tensormap", "param", "const"), "applypriority": ("global",)}.get(name, ())
    only([word for word in words if not word.startswith(("L1", "L2"))], *known)
    address, *size = operands(i, 2 if name == "applypriority" else 1)
    if isinstance(address, Memory) and "tensormap" in words:
        d.tensor(address)
    else:
        d.address(address)
    for bytes_ in size:
        d.literal(bytes_, 128, 128)
    return Insn("NOP", i)


@opcode("createpolicy")
def _createpolicy(d: Operands, i: Instruction, words: list[str]) -> Any:
    """A cache policy, which the machine has no use for; .range and .cvt have operands of other kinds."""
    only([word for word in words if not word.startswith("L2::")], "fractional", "b64")
    target, *fraction = operands(i, 1, 2)
    for o in fraction:
        d.value(o, "f32")
    return Insn("MOV64", i, d0=d.result(target, "u64"), s0=(64, 0))


@opcode("setmaxnreg")
def _setmaxnreg(d: Operands, i: Instruction, words: list[str]) -> Any:
    exactly(i, words, "inc.sync.aligned.u32", "dec.sync.aligned.u32")
    (count,) = operands(i, 1)
    if d.literal(count, 24, 256) % 8:
        raise PtxError("a number of registers is a multiple of 8")
    return Insn("SETMAXNREG", i)


@opcode("shfl")
def _shfl(d: Operands, i: Instruction, words: list[str]) -> Any:
    if words[0] != "sync":
        raise PtxError("only shfl.sync is known")
    modes = ("idx", "up", "down", "bfly")
    exactly(i, words, *(f"sync.{mode}.b32" for mode in modes))
    target, value, lane, clamp, members = operands(i, 5)
    first, second = d.two_results(target, "b32", "pred")
    return Insn(
        "SHFL", i, d0=first, d1=second, s0=d.value(value, "b32"), s1=d.value(lane, "b32"), s2=d.value(clamp, "b32"),
        s3=_members(d, members), mod=modes.index(words[1]),
    )  # fmt: skip


def _members(d: Operands, operand: Any) -> Any:
    """The lanes that have to take part."""
    if isinstance(operand, Immediate) and not operand.bits:
        raise PtxError("a member mask without members")
    return d.value(operand, "u32")


@opcode("vote")
def _vote(d: Operands, i: Instruction, words: list[str]) -> Any:
    exactly(i, words, "sync.all.pred", "sync.any.pred", "sync.uni.pred", "sync.ballot.b32")
    mod = ("all", "any", "uni", "ballot").index(words[1])
    target, condition, members = operands(i, 3)
    return Insn(
        "VOTE", i, d0=d.result(target, words[-1]), s0=d.value(condition, "pred"), s3=_members(d, members), mod=mod
    )


@opcode("elect")
def _elect(d: Operands, i: Instruction, words: list[str]) -> Any:
    exactly(i, words, "sync")
    target, members = operands(i, 2)
    if not isinstance(target, Pair):
        raise PtxError("two results are expected")
    first, second = d.two_results(target, "u32", "pred")
    return Insn("ELECT", i, d0=first, d1=second, s3=_members(d, members))


@opcode("redux")
def _redux(d: Operands, i: Instruction, words: list[str]) -> Any:
    arithmetic = (f"sync.{name}.{kind}" for name in ("add", "min", "max") for kind in ("s32", "u32"))
    exactly(i, words, *arithmetic, "sync.and.b32", "sync.or.b32", "sync.xor.b32")
    operation, kind = words[1], words[-1]
    mod = {"add": 0, "min": 1 if kind == "s32" else 3, "max": 2 if kind == "s32" else 4, "and": 5, "or": 6, "xor": 7}[
        operation
    ]
    target, value, members = operands(i, 3)
    kind = "u32" if kind == "b32" else kind  # its operands are integers, as the assembler has it
    return Insn("REDUX", i, d0=d.result(target, kind), s0=d.value(value, kind), s3=_members(d, members), mod=mod)


@opcode("activemask")
def _activemask(d: Operands, i: Instruction, words: list[str]) -> Any:
    exactly(i, words, "b32")
    (target,) = operands(i, 1)
    return Insn("ACTIVEMASK", i, d0=d.result(target, "b32"))


# --- barriers and fences ---------------------------------------------------------------------------------------------


@opcode("bar", "barrier")
def _bar(d: Operands, i: Instruction, words: list[str]) -> Any:
    words = [word for word in words if word not in ("cta", "aligned")]
    if words[0] == "warp":
        exactly(i, words, "warp.sync")
        (members,) = operands(i, 1)
        return Insn("BAR_WARP", i, s0=_members(d, members))
    if words[0] == "cluster":
        only(words[1:2], "arrive", "wait")
        only(words[2:], *(("release", "relaxed") if words[1] == "arrive" else ("acquire",)))
        return Insn("CLUSTER_ARRIVE" if words[1] == "arrive" else "CLUSTER_WAIT", i)
    exactly(i, words, "sync", "arrive")
    barrier, *rest = operands(i, *((1, 2) if words[0] == "sync" else (2,)))
    if isinstance(barrier, Immediate):
        d.literal(barrier, 0, 15)
    for count in rest:
        if isinstance(count, Immediate) and d.literal(count, 32, 1024) % 32:
            raise PtxError("the threads of a barrier are a multiple of 32")
    values = [d.value(o, "u32") for o in (barrier, *rest)]
    if words[0] == "sync":
        return Insn("BAR_SYNC", i, s0=values[0], s1=values[-1], mod=int(len(values) == 1))
    return Insn("BAR_ARRIVE", i, s0=values[0], s1=values[1])


_MOST_PENDING = (1 << 20) - 1
"""Arrivals that an mbarrier may wait for, and bytes."""
_MBARRIER_WORDS = ("shared", "shared::cta", "shared::cluster", "b64", "acquire", "release", "relaxed", "cta", "cluster")


@opcode("mbarrier")
def _mbarrier(d: Operands, i: Instruction, words: list[str]) -> Any:
    what, rest = words[0], words[1:]
    if what == "arrive" and "noComplete" in rest:
        raise PtxError("mbarrier.arrive.noComplete is not known")
    own = {"arrive": ("expect_tx",), "try_wait": ("parity",), "test_wait": ("parity",)}.get(what, ())
    only(rest, *_MBARRIER_WORDS, *own)
    if what == "inval":
        (memory,) = operands(i, 1)
        base, offset, wide = d.address(memory, shared=True)
        return Insn("MBAR_INVAL", i, s0=base, imm=offset, mod=wide)
    if what in ("init", "expect_tx"):
        memory, count = operands(i, 2)
        base, offset, wide = d.address(memory, shared=True)
        op, mod = ("MBAR_INIT", wide) if what == "init" else ("MBAR_EXPECT_TX", wide | 2 | 4)
        return Insn(op, i, s0=base, imm=offset, s1=_pending(d, count, what == "init"), mod=mod)
    if what == "arrive":
        has_token = bool(i.operands) and not isinstance(i.operands[0], Memory)
        memory, *counts = operands(i, 2, 3)[1:] if has_token else operands(i, 1, 2)
        base, offset, wide = d.address(memory, shared=True)
        expects = "expect_tx" in rest
        if expects and not counts:
            raise PtxError("the bytes to expect are missing")
        return Insn(
            "MBAR_ARRIVE_EXPECT_TX" if expects else "MBAR_ARRIVE", i,
            d0=d.result(i.operands[0], "u64") if has_token else None, s0=base, imm=offset,
            s1=_pending(d, counts[0], not expects) if counts else (32, 1), mod=wide | (2 if expects else 0),
        )  # fmt: skip
    if what in ("try_wait", "test_wait"):
        target, memory, phase, *time = operands(i, *((3, 4) if what == "try_wait" else (3,)))
        base, offset, wide = d.address(memory, shared=True)
        parity = "parity" in rest
        if parity and isinstance(phase, Immediate):
            d.literal(phase, 0, 1)
        for o in time:  # after which it may give up, as it may at any time
            d.value(o, "u32")
        return Insn(
            "MBAR_WAIT_PARITY" if parity else "MBAR_WAIT_TOKEN", i, d0=d.result(target, "pred"), s0=base, imm=offset,
            s1=d.value(phase, "u32" if parity else "u64"), mod=wide | (8 if what == "try_wait" else 0),
        )  # fmt: skip
    raise PtxError(f"opcode {i.opcode} is not known")


def _pending(d: Operands, operand: Any, arrivals: bool) -> Any:
    """A count of arrivals, of which there is one at least, or of bytes."""
    if isinstance(operand, Immediate):
        d.literal(operand, int(arrivals), _MOST_PENDING)
    return d.value(operand, "u32")


@opcode("fence", "membar")
def _fence(d: Operands, i: Instruction, words: list[str]) -> Any:
    if words[0] == "proxy":
        if words[1] != "async" or not set(words[2:]) <= {"shared::cta", "global", "shared::cluster"}:
            raise PtxError(f"opcode {i.opcode} is not known")
        return Insn("FENCE_PROXY_ASYNC", i)
    if words[0] == "mbarrier_init":
        only(words[1:], "release", "cluster")
        return Insn("FENCE_MBAR_INIT", i)
    only(words, "acq_rel", "sc", "acquire", "release", "cta", "gpu", "sys", "cluster", "gl")
    return Insn("FENCE", i)
