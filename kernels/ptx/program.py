"""Decoded instructions to a program: register slots, constants and operand lists, as the machine's arrays."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy

from dsa_planner.kernels.ptx.registers import REGISTER_WIDTHS, Use, allocate, live_spans
from dsa_planner.kernels.ptx.syntax import Instruction, Kernel, Register

__all__ = ["FIELDS", "OPCODES", "Insn", "Program", "assemble", "read", "written"]

_LISTED = (Path(__file__).parent / "vm/opcodes.h").read_text().split("*/", 1)[1]
OPCODES = {
    name: number for number, name in enumerate(re.findall(r"\b(?:OP|PLAIN|CONVERGED|ALIGNED)\((\w+)\)", _LISTED))
}
FIELDS = (
    "op", "guard", "d0", "d1", "s0", "s1", "s2", "s3", "imm", "imm2", "mod", "list", "n", "line", "touches", "target",
)  # fmt: skip

_PREDICATE_RESULTS = frozenset(
    {"SETP_S32", "SETP_U32", "SETP_S64", "SETP_U64", "SETP_F32", "SETP_S16", "SETP_U16", "PAND", "POR", "PXOR", "PNOT",
     "PMOV", "MBAR_WAIT_PARITY", "MBAR_WAIT_TOKEN"}
)  # fmt: skip
_SECOND_PREDICATE = frozenset({"SHFL", "ELECT"})


@dataclass
class Program:
    """A decoded kernel.

    ``code`` is int32 [instructions, fields]; ``lists`` int32, what instructions with many operands index; ``constants``
    uint32 [slots, 32 lanes]; ``lines`` and ``texts`` say where each instruction comes from.
    """

    name: str
    kernel: Kernel
    code: Any
    lists: Any
    constants: Any
    slots: int
    predicates: int
    lines: list[int]
    texts: list[str]
    opcodes: list[str]
    shared_granule_shift: int
    global_granule_shift: int
    shared_static: int
    uses_tensor_memory: bool
    register_names: dict[int, str]
    """The registers that asynchronous instructions use, by slot. Others share slots."""


@dataclass
class Insn:
    """One instruction of the machine, with registers still by name."""

    op: str
    source: Instruction
    d0: Any = None
    d1: Any = None
    s0: Any = None
    s1: Any = None
    s2: Any = None
    s3: Any = None
    imm: int = 0
    imm2: int = 0
    mod: int = 0
    list: Sequence[Any] = ()
    n: int = 0
    target: Any = 0
    predicate: Any = None
    """A predicate operand beyond the others; it takes the place of the target."""
    list_is_written: int = 0
    """How many of the list's operands are results."""


def assemble(kernel: Kernel, instructions: list[Insn], granules: Mapping[str, int], shared_static: int) -> Program:
    """Give registers their slots and operands their numbers.

    Args:
        granules: by memory space, the bytes of the smallest access: the resolution of the race detector.
        shared_static: bytes of shared memory that the kernel's own variables take.
    """
    spans = live_spans([_use(index, insn) for index, insn in enumerate(instructions)])
    encoder = _Encoder(kernel, instructions, spans)
    code = numpy.zeros((len(instructions), len(FIELDS)), numpy.int32)
    for index, insn in enumerate(instructions):
        code[index] = encoder.instruction(insn)
    return Program(
        name=kernel.name,
        kernel=kernel,
        code=code,
        lists=numpy.array(encoder.lists, numpy.int32),
        constants=numpy.array(encoder.rows or [[0] * 32], numpy.uint32),
        slots=encoder.slot_count,
        predicates=len(encoder.predicates) + 1,
        lines=[insn.source.line for insn in instructions],
        texts=[insn.source.text for insn in instructions],
        opcodes=[insn.source.opcode for insn in instructions],
        shared_granule_shift=granules["shared"].bit_length() - 1,
        global_granule_shift=granules["global"].bit_length() - 1,
        shared_static=shared_static,
        uses_tensor_memory=any(insn.op.startswith("TC5") for insn in instructions),
        register_names={encoder.slots[name]: name for name in encoder.alone if name in encoder.slots},
    )


class _Encoder:
    """Operands to numbers: registers to slots, constants to rows, lists to places."""

    def __init__(self, kernel: Kernel, instructions: list[Insn], spans: dict[str, tuple[int, int]]) -> None:
        predicates = [name for name in sorted(spans) if kernel.registers[name] == "pred"]
        self.predicates = {name: 1 + number for number, name in enumerate(predicates)}
        general = {name: span for name, span in spans.items() if name not in self.predicates}
        in_flight, fragments = _async_registers(instructions)
        width = lambda name: REGISTER_WIDTHS[kernel.registers[name]]  # noqa: E731
        self.slots, count = allocate(general, width, in_flight | fragments)
        self.trash = count + count % 2  # where unwanted results go
        self.slot_count = self.trash + 2
        self.alone = in_flight | fragments
        self.pinned = {self.slots[name] for name in self.alone if name in self.slots}
        self.in_flight = {self.slots[name] for name in in_flight if name in self.slots}
        self.constants: dict[tuple[int, int], int] = {}
        self.rows: list[list[int]] = []
        self.lists: list[int] = [0]
        for bits in (64, 32):  # of 64 bits first, so that they are aligned
            for insn in instructions:
                for operand in (insn.s0, insn.s1, insn.s2, insn.s3, *insn.list):
                    if isinstance(operand, tuple) and operand[0] == bits:
                        self.operand(operand)

    def operand(self, operand: Any) -> int:
        if operand is None:
            return self.trash
        if isinstance(operand, Register):
            if operand.name == "_":
                return self.trash
            if operand.name in self.predicates:
                return self.predicates[operand.name] * 2 + operand.negated
            return self.slots[operand.name]
        bits, value = operand
        if bits == 1:  # a constant predicate: slot 0 is true
            return 0 if value else 1
        if operand not in self.constants:
            self.constants[operand] = len(self.rows)
            if bits == 64:
                self.rows += [[value & 0xFFFFFFFF, value >> 32] * 16] * 2
            else:
                self.rows.append([value] * 32)
        return ~self.constants[operand]

    def instruction(self, insn: Insn) -> list[int]:
        place = len(self.lists)
        self.lists.extend(self.operand(operand) for operand in insn.list)
        touches = 0 if insn.op == "WGMMA" else self.touches(insn)
        first = insn.op in _PREDICATE_RESULTS
        second = first or insn.op in _SECOND_PREDICATE
        operands = (insn.s0, insn.s1, insn.s2, insn.s3)
        target = insn.target if insn.predicate is None else self.operand(insn.predicate)
        return [
            OPCODES[insn.op], self.operand(insn.source.guard) if insn.source.guard else 0, self.result(insn.d0, first),
            self.result(insn.d1, second), *(self.operand(o) for o in operands), _int32(insn.imm), _int32(insn.imm2),
            insn.mod, place, insn.n, insn.source.line, touches, target,
        ]  # fmt: skip

    def result(self, operand: Any, is_predicate: bool) -> int:
        return 1 if operand is None and is_predicate else self.operand(operand)  # predicate 1 takes no writes

    def touches(self, insn: Insn) -> int:
        """Where the instruction's registers that asynchronous instructions use are listed: writes, then reads."""
        wrote = [self.operand(o) for o in written(insn) if o.name not in self.predicates]
        reads = [self.operand(o) for o in read(insn) if o.name not in self.predicates]
        wrote, reads = [s for s in wrote if s in self.pinned], [s for s in reads if s in self.in_flight]
        if not wrote and not reads:
            return 0
        place = len(self.lists)
        self.lists.extend([len(wrote), *wrote, len(reads), *reads])
        return place


def written(insn: Insn) -> list[Register]:
    """The registers that an instruction writes."""
    results = [insn.d0, insn.d1, *insn.list[: insn.list_is_written]]
    return [operand for operand in results if isinstance(operand, Register) and operand.name != "_"]


def read(insn: Insn) -> list[Register]:
    """The registers that an instruction reads, but for its guard."""
    operands = [insn.s0, insn.s1, insn.s2, insn.s3, insn.predicate]
    operands += insn.list if insn.op == "WGMMA" else insn.list[insn.list_is_written :]
    return [operand for operand in operands if isinstance(operand, Register) and operand.name != "_"]


def _use(index: int, insn: Insn) -> Use:
    reads = {operand.name for operand in read(insn)}
    guard = insn.source.guard
    if guard is not None:
        reads.add(guard.name)
    successors: tuple[int, ...] = (index + 1,)
    if insn.op == "BRA":
        successors = (insn.target, index + 1) if guard else (insn.target,)
    elif insn.op == "RET" and not guard:
        successors = ()
    return Use(frozenset(reads), frozenset(o.name for o in written(insn)), guard is not None, successors)


def _async_registers(instructions: list[Insn]) -> tuple[set[str], set[str]]:
    """Registers that asynchronous instructions write (wgmma accumulators, what tcgen05.ld fetches), and those that they
    only read (A fragments of wgmma)."""
    written: set[str] = set()
    read: set[str] = set()
    for insn in instructions:
        names = [operand.name for operand in insn.list if isinstance(operand, Register)]
        if insn.op == "WGMMA":
            written |= set(names[: insn.n // 2])
            read |= set(names[insn.n // 2 :])
        elif insn.op == "TC5_LD":
            written |= set(names)
    return written, read


def _int32(value: int) -> int:
    return (value + (1 << 31)) % (1 << 32) - (1 << 31)
