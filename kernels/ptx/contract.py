"""Contraction of multiplications and additions, as ptxas does it.

The ISA lets an assembler fuse ``mul`` and ``add`` or ``sub`` without a rounding modifier, and ptxas does where the
product has no other use. A cubin then rounds once where the PTX reads as if it rounded twice, so the machine does the
same: its last bits are those of the GPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from dsa_planner.kernels.ptx.program import Insn, read, written
from dsa_planner.kernels.ptx.syntax import Register

__all__ = ["NEGATE_ADDEND", "NEGATE_PRODUCT", "contract"]

NEGATE_PRODUCT, NEGATE_ADDEND = 16, 32  # modifiers of FFMA


def contract(instructions: Sequence[Insn], leaders: set[int]) -> list[Insn]:
    """Fuse within basic blocks; a fused multiplication becomes a NOP, so that every instruction keeps its place.

    Args:
        instructions: of a whole kernel.
        leaders: the places where a basic block begins.
    """
    uses = Counter(register.name for insn in instructions for register in read(insn))
    definitions = Counter(register.name for insn in instructions for register in written(insn))
    result = list(instructions)
    products: dict[str, int] = {}  # register -> place of its multiplication, in this block
    for index, insn in enumerate(instructions):
        if index in leaders:
            products.clear()
        if insn.op in ("FADD", "FSUB") and _may_fuse(insn):
            for operand, is_first in ((insn.s1, False), (insn.s0, True)):
                if isinstance(operand, Register) and operand.name in products:
                    place = products.pop(operand.name)
                    result[index] = _fused(insn, result[place], is_first)
                    result[place] = Insn("NOP", instructions[place].source)
                    break
        for register in written(insn):
            products.pop(register.name, None)
            for name, place in list(products.items()):  # a factor that changes
                if register in (result[place].s0, result[place].s1):
                    del products[name]
        if insn.op == "FMUL" and _may_fuse(insn) and uses[insn.d0.name] == definitions[insn.d0.name] == 1:
            products[insn.d0.name] = index
    return result


def _may_fuse(insn: Insn) -> bool:
    return ".rn" not in insn.source.opcode and insn.source.guard is None


def _fused(add: Insn, multiply: Insn, product_is_first: bool) -> Insn:
    """a * b + c, or with a sign where the instruction subtracts."""
    sign = 0
    if add.op == "FSUB":
        sign = NEGATE_ADDEND if product_is_first else NEGATE_PRODUCT
    addend = add.s1 if product_is_first else add.s0
    return Insn("FFMA", add.source, d0=add.d0, s0=multiply.s0, s1=multiply.s1, s2=addend, mod=add.mod | sign)
