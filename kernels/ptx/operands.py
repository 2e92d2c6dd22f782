"""What decoding functions share: operands as values, addresses and results, and the table of those functions.

A decoding function belongs to the first word of an opcode, and gets the words after it. It reads all of them: what it
does not know it refuses.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from dsa_planner.kernels.ptx.parser import (
    Immediate,
    Instruction,
    Kernel,
    Memory,
    Operand,
    PtxError,
    Register,
    Symbol,
)
from dsa_planner.kernels.ptx.program import REGISTER_WIDTHS, Insn

PARAM_WINDOW = 0x0600000000000000
SHARED_WINDOW = 0x0500000000000000

FTZ, NAN, RELU = 1, 2, 4  # modifiers of arithmetic
SPECIAL = {
    "%tid.x": 0, "%laneid": 1, "%ctaid.x": 2, "%nctaid.x": 3, "%ntid.x": 4, "%warpid": 5, "%tid.y": 6, "%tid.z": 6,
    "%ntid.y": 7, "%ntid.z": 7, "%clock": 8, "%clock64": 8, "%globaltimer": 8, "%globaltimer_lo": 8,
    "%dynamic_smem_size": 9, "%total_smem_size": 10, "%lanemask_lt": 12, "%lanemask_le": 13, "%lanemask_eq": 14,
    "%lanemask_ge": 15, "%lanemask_gt": 16, "%ctaid.y": 17, "%ctaid.z": 18, "%nctaid.y": 19, "%nctaid.z": 20,
    # A cluster is one CTA.
    "%cluster_ctarank": 6, "%cluster_nctarank": 7, "%clusterid.x": 2, "%clusterid.y": 17, "%clusterid.z": 18,
    "%nclusterid.x": 3, "%cluster_ctaid.x": 6, "%cluster_ctaid.y": 6, "%cluster_ctaid.z": 6, "%cluster_nctaid.x": 7,
    "%cluster_nctaid.y": 7, "%cluster_nctaid.z": 7,
}  # fmt: skip


class Operands:
    """The operands of one kernel.

    ``granules`` is, by memory space, the smallest access in bytes; ``shared`` where each variable lies.
    """

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
            isinstance(operand, Register) and operand.name not in SPECIAL and REGISTER_WIDTHS[self.kind(operand)] == 2
        )

    def value(self, operand: Operand, bits: int = 32) -> Any:
        """A readable operand: a register, or a constant (bits, value)."""
        if isinstance(operand, Register):
            if operand.name in SPECIAL or operand.name == "_":
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

    def check(self, insn: Insn) -> None:
        """See that every register of an instruction is declared."""
        operands = (insn.d0, insn.d1, insn.s0, insn.s1, insn.s2, insn.s3, insn.predicate, insn.source.guard, *insn.list)
        for operand in operands:
            if isinstance(operand, Register) and operand.name != "_":
                self.kind(operand)


Decode = Callable[[Operands, Instruction, list[str]], Any]
DECODERS: dict[str, Decode] = {}


def opcode(*names: str) -> Callable[[Decode], Decode]:
    def register(function: Decode) -> Decode:
        for name in names:
            DECODERS[name] = function
        return function

    return register


def bits_of(kind: str) -> int:
    return int(re.sub(r"\D", "", kind))


def only(words: list[str], *known: str) -> None:
    unknown = [word for word in words if word not in known]
    if unknown:
        raise PtxError(f"modifier .{unknown[0]} is not known")


def exactly(i: Instruction, words: list[str], *forms: str) -> None:
    """The words after an opcode's first have to be one of these, dots between them."""
    if ".".join(words) not in forms:
        raise PtxError(f"opcode {i.opcode} is not known")


def integer(kind: str, *, widths: tuple[int, ...] = (32, 64), signs: str = "su") -> str:
    """An integer type, which has to be one of these."""
    if kind not in {f"{sign}{width}" for sign in signs for width in widths}:
        raise PtxError(f"type .{kind} is not known")
    return kind


def plain(d: Operands, i: Instruction, op: str, bits: int, mod: int = 0, shift: bool = False) -> Insn:
    """d = op(a, b, c, ...), all of one width; a shift count is 32 bits wide."""
    sources = [d.value(o, 32 if shift and n else bits) for n, o in enumerate(i.operands[1:])]
    names = ("s0", "s1", "s2", "s3")
    return Insn(op, i, d0=result(i.operands[0]), mod=mod, **dict(zip(names, sources, strict=False)))


def result(operand: Operand) -> Register:
    if not isinstance(operand, Register) or operand.negated:
        raise PtxError(f"{operand} cannot take a result")
    return operand


def literal(operand: Operand) -> int:
    if not isinstance(operand, Immediate):
        raise PtxError(f"{operand} has to be a literal")
    return operand.bits
