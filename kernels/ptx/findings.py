"""What the machine found, in words: the rule, the PTX lines, and where it was."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dsa_planner.kernels.ptx.program import Program
from dsa_planner.kernels.ptx.syntax import Register, quoted, spelled

__all__ = ["SPACES", "Finding", "describe"]

_KINDS = (
    "race: read after write", "race: write after read", "race: write after write", "missing proxy fence",
    "read of memory never written", "access out of bounds", "misaligned access", "write to read-only memory",
    "mbarrier contract", "wgmma contract", "convergence", "barrier contract", "tensor memory contract", "deadlock",
    "no end, or a limit of the machine", "still in flight at the end", "descriptor", "tensor map",
)  # fmt: skip
SPACES = ("global", "shared", "generic", "tensor")
_REGISTER, _LANES, _BARRIER, _VALUE = range(len(SPACES), len(SPACES) + 4)  # as in machine.h
_WAITS = ("", "an mbarrier", "a barrier", "a copy or mma group", "tensor memory", "")


@dataclass(frozen=True)
class Finding:
    """One broken rule: what, the PTX lines of the earlier and the later access, where, and how often."""

    kind: str
    before: str
    now: str
    where: str
    count: int

    def __str__(self) -> str:
        lines = " / ".join(line for line in (self.before, self.now) if line)
        return f"{self.kind}: {lines}; {self.where}; {self.count}x"


def describe(found: Any, program: Program) -> Finding:
    """A finding of the C code, whose layout is that of ``Finding`` in machine.h."""

    def line(pc: int) -> str:
        return f"line {program.lines[pc]} ({quoted(program.texts[pc])})" if 0 <= pc < len(program.lines) else ""

    kind = _KINDS[found.kind]
    before = line(found.pc_before)
    where = f"CTA {found.cta}, warp {found.warp}"
    if found.lane >= 0:
        where += f", lane {found.lane}"
    if kind == "deadlock":
        before = _wait(found)
    else:
        where += _place(found, program)
    return Finding(kind, before, line(found.pc_now), where, int(found.count))


def _place(found: Any, program: Program) -> str:
    """What the number of a finding says, which depends on its space."""
    number, space = int(found.address), found.space
    if space < len(SPACES):
        return f", {SPACES[space]} address {number:#x}"
    if space == _REGISTER:
        return f", register {spelled(Register(program.register_names.get(number, '_')))}"
    if space == _LANES:
        return f", lanes {number & 0xFFFFFFFF:#010x}"
    if space == _BARRIER:
        return f", barrier {number >> 32} of {number & 0xFFFFFFFF} threads"
    if space == _VALUE:
        return f", value {number if number < 1 << 63 else number - (1 << 64)}"
    return ""


def _wait(found: Any) -> str:
    """What a warp waits for, and its state."""
    what = _WAITS[found.pc_before]
    if what == "an mbarrier":
        phase, pending, transfer = found.state
        to_come = f"{pending} arrivals and {transfer} bytes to come"
        return f"waits for the mbarrier at {found.address:#x} (phase {phase}, {to_come})"
    if what == "a barrier":
        return f"waits for barrier {found.address} ({found.state[0]} of {found.state[1]} threads arrived)"
    return f"waits for {what}"
