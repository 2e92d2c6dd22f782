"""Control flow, warps, barriers and fences."""

from __future__ import annotations

from typing import Any

from dsa_planner.kernels.ptx.operands import (
    Operands,
    exactly,
    only,
    opcode,
    result,
)
from dsa_planner.kernels.ptx.parser import (
    Instruction,
    Memory,
    Pair,
    PtxError,
    Register,
    Symbol,
)
from dsa_planner.kernels.ptx.program import Insn


@opcode("bra")
def _bra(d: Operands, i: Instruction, words: list[str]) -> Any:
    only(words, "uni")
    target = i.operands[0]
    assert isinstance(target, Register | Symbol)  # a label of a nested scope is renamed as registers are
    return Insn("BRA", i, target=Symbol(target.name))


@opcode("ret", "exit")
def _ret(d: Operands, i: Instruction, words: list[str]) -> Any:
    return Insn("RET", i)


@opcode("trap")
def _trap(d: Operands, i: Instruction, words: list[str]) -> Any:
    return Insn("TRAP", i)


_HINT_WORDS = {
    "nanosleep": ("u32",), "prefetch": ("global", "tensormap", "param", "const"), "applypriority": ("global",),
    "griddepcontrol": ("wait", "launch_dependents"), "createpolicy": ("fractional", "range", "global", "cvt", "b64"),
    "pmevent": ("mask",),
}  # fmt: skip


@opcode("nanosleep", "prefetch", "prefetchu", "griddepcontrol", "pmevent", "applypriority", "createpolicy")
def _nothing(d: Operands, i: Instruction, words: list[str]) -> Any:
    """Hints. griddepcontrol orders launches, and the machine runs them one after another."""
    name = i.opcode.split(".")[0]
    only([word for word in words if not word.startswith(("L1", "L2"))], *_HINT_WORDS.get(name, ()))
    if i.opcode.startswith("createpolicy"):
        return Insn("MOV64", i, d0=result(i.operands[0]), s0=(64, 0))
    return Insn("NOP", i)


@opcode("setmaxnreg")
def _setmaxnreg(d: Operands, i: Instruction, words: list[str]) -> Any:
    exactly(i, words, "inc.sync.aligned.u32", "dec.sync.aligned.u32")
    return Insn("SETMAXNREG", i)


@opcode("shfl")
def _shfl(d: Operands, i: Instruction, words: list[str]) -> Any:
    only(words, "sync", "idx", "up", "down", "bfly", "b32")
    if words[0] != "sync":
        raise PtxError("only shfl.sync is known")
    target = i.operands[0]
    first, second = (target.first, target.second) if isinstance(target, Pair) else (target, None)
    return Insn(
        "SHFL", i, d0=result(first), d1=result(second) if second is not None else None, s0=d.value(i.operands[1]),
        s1=d.value(i.operands[2]), s2=d.value(i.operands[3]), s3=d.value(i.operands[4]),
        mod=("idx", "up", "down", "bfly").index(words[1]),
    )  # fmt: skip


@opcode("vote")
def _vote(d: Operands, i: Instruction, words: list[str]) -> Any:
    exactly(i, words, "sync.all.pred", "sync.any.pred", "sync.uni.pred", "sync.ballot.b32")
    mod = ("all", "any", "uni", "ballot").index(words[1])
    return Insn("VOTE", i, d0=result(i.operands[0]), s0=d.value(i.operands[1], 1), s3=d.value(i.operands[2]), mod=mod)


@opcode("elect")
def _elect(d: Operands, i: Instruction, words: list[str]) -> Any:
    target = i.operands[0]
    exactly(i, words, "sync")
    if not isinstance(target, Pair):
        raise PtxError("two results are expected")
    return Insn("ELECT", i, d0=result(target.first), d1=result(target.second), s3=d.value(i.operands[1]))


@opcode("redux")
def _redux(d: Operands, i: Instruction, words: list[str]) -> Any:
    arithmetic = (f"sync.{name}.{kind}" for name in ("add", "min", "max") for kind in ("s32", "u32"))
    exactly(i, words, *arithmetic, "sync.and.b32", "sync.or.b32", "sync.xor.b32")
    operation, kind = words[1], words[-1]
    mod = {"add": 0, "min": 1 if kind == "s32" else 3, "max": 2 if kind == "s32" else 4, "and": 5, "or": 6, "xor": 7}[
        operation
    ]
    return Insn("REDUX", i, d0=result(i.operands[0]), s0=d.value(i.operands[1]), s3=d.value(i.operands[2]), mod=mod)


@opcode("activemask")
def _activemask(d: Operands, i: Instruction, words: list[str]) -> Any:
    exactly(i, words, "b32")
    return Insn("ACTIVEMASK", i, d0=result(i.operands[0]))


# --- barriers and fences ---------------------------------------------------------------------------------------------


@opcode("bar", "barrier")
def _bar(d: Operands, i: Instruction, words: list[str]) -> Any:
    words = [word for word in words if word not in ("cta", "aligned")]
    if words[0] == "warp":
        only(words[1:], "sync")
        return Insn("BAR_WARP", i, s0=d.value(i.operands[0]))
    if words[0] == "cluster":
        only(words[1:2], "arrive", "wait")
        only(words[2:], *(("release", "relaxed") if words[1] == "arrive" else ("acquire",)))
        return Insn("CLUSTER_ARRIVE" if words[1] == "arrive" else "CLUSTER_WAIT", i)
    only(words, "sync", "arrive")
    values = [d.value(o) for o in i.operands]
    if words[0] == "sync":
        return Insn("BAR_SYNC", i, s0=values[0], s1=values[-1], mod=int(len(values) == 1))
    return Insn("BAR_ARRIVE", i, s0=values[0], s1=values[1])


@opcode("mbarrier")
def _mbarrier(d: Operands, i: Instruction, words: list[str]) -> Any:
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
    only([w for w in words[1:] if w not in ("expect_tx", "noComplete")], *spaces)
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
            d0=result(token) if token is not None else None,
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
            d0=result(i.operands[0]),
            s0=base,
            imm=offset,
            s1=asked,
            mod=mod,
        )
    raise PtxError(f"opcode {i.opcode} is not known")


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
