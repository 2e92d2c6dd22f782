"""PTX instructions to the machine's: each operand and modifier given a meaning.

An opcode is split at its dots, and a function for its first word reads the rest. What a function does not understand is
an error that names the line: nothing is skipped.
"""

from __future__ import annotations

from collections.abc import Sequence

from dsa_planner.kernels.ptx import decode_arithmetic, decode_control, decode_memory, decode_tensor
from dsa_planner.kernels.ptx.contract import contract
from dsa_planner.kernels.ptx.operands import DECODERS, Operands
from dsa_planner.kernels.ptx.program import Insn, Program, assemble, read, written
from dsa_planner.kernels.ptx.syntax import Instruction, Kernel, PtxError, Symbol, quoted, spelled

__all__ = ["FAMILIES", "decode", "decode_instruction"]

FAMILIES = (decode_arithmetic, decode_control, decode_memory, decode_tensor)
"""The modules whose functions are in the table of decoders."""

_LONGEST_OPCODE = 160  # characters; those of the ISA have up to 140


def decode(kernel: Kernel) -> Program:
    """Decode a kernel.

    Raises:
        PtxError: an instruction that the machine does not know, or an operand that does not belong there; the message
            quotes its line.
    """
    operands = Operands(kernel)
    instructions: list[Insn] = []
    starts: list[int] = []
    for source in kernel.instructions:
        starts.append(len(instructions))
        found = decode_instruction(operands, source)
        instructions.extend(found)
    starts.append(len(instructions))
    instructions.append(Insn("RET", Instruction(0, "ret", (), None, "the end of the kernel")))
    labels = {name: starts[index] for name, index in kernel.labels.items()}
    for insn in instructions:
        if isinstance(insn.target, Symbol):
            if insn.target.name not in labels:
                raise PtxError(
                    f"line {insn.source.line}: label {spelled(insn.target)} is not known: {quoted(insn.source.text)}"
                )
            insn.target = labels[insn.target.name]
    _check_written(instructions)
    leaders = {*labels.values(), *(n + 1 for n, insn in enumerate(instructions) if insn.op == "BRA")}
    return assemble(kernel, contract(instructions, leaders), operands.granules, operands.shared_static)


def _check_written(instructions: Sequence[Insn]) -> None:
    """A register that is read is written somewhere. Whether before the read is not looked at."""
    known = {register.name for insn in instructions for register in written(insn)}
    for insn in instructions:
        for register in (*read(insn), *([insn.source.guard] if insn.source.guard else [])):
            if register.name not in known:
                raise PtxError(
                    f"line {insn.source.line}: register {spelled(register)} is read and nothing writes it: "
                    f"{quoted(insn.source.text)}"
                )


def decode_instruction(operands: Operands, source: Instruction) -> list[Insn]:
    """What one instruction is to the machine.

    Raises:
        PtxError: as from ``decode``.
    """
    words = source.opcode.split(".")
    decoder = DECODERS.get(words[0])
    try:
        if decoder is None or len(source.opcode) > _LONGEST_OPCODE:
            raise PtxError(f"opcode {quoted(source.opcode, 80)} is not known")
        operands.begin(source)
        decoded = decoder(operands, source, words[1:])
        found = [decoded] if isinstance(decoded, Insn) else decoded
        operands.finish(source, found)
    except PtxError as error:
        raise PtxError(f"line {source.line}: {error}: {quoted(source.text)}") from None
    except IndexError:  # of the words of its opcode, which are read in order
        raise PtxError(f"line {source.line}: opcode {source.opcode} is not known: {quoted(source.text)}") from None
    return found
