"""What PTX text is made of: operands, instructions, declarations and kernels, and how an error quotes them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

__all__ = [
    "SHARED_BYTES",
    "Immediate",
    "Instruction",
    "Kernel",
    "Memory",
    "Module",
    "Operand",
    "Pair",
    "Parameter",
    "PtxError",
    "Register",
    "Shared",
    "Symbol",
    "Vector",
    "alignment",
    "count",
    "number",
    "quoted",
    "spelled",
]

SHARED_BYTES = 232_448
"""Shared memory of a CTA, static and dynamic together: 227 KiB on sm_90 and sm_100."""

_LONGEST_QUOTE, _LONGEST_OPERAND = 200, 80  # characters
_NUMBER = re.compile(r"(-?)(0[xX][0-9a-fA-F]+|0[bB][01]+|0[0-7]*|[1-9]\d*)U?", re.A)
_LONGEST_NUMBER = 66  # 64 binary digits and their 0b


class PtxError(ValueError):
    """PTX that the machine does not understand; the message names the line and quotes it."""


@dataclass(frozen=True)
class Register:
    """A register, or a special register such as ``%tid.x``. ``negated`` is the ``!`` of a predicate operand."""

    name: str
    negated: bool = False


@dataclass(frozen=True)
class Immediate:
    """A literal. ``bits`` is its value, or the bits of a float, of which there are ``float_bits``: 32 of ``0f``, 64 of
    ``0d``."""

    bits: int
    float_bits: int = 0


@dataclass(frozen=True)
class Symbol:
    """The name of a parameter or of a variable in shared memory, plus bytes."""

    name: str
    offset: int = 0


@dataclass(frozen=True)
class Memory:
    """``[base + offset]``, with the coordinates of a tensor access."""

    base: Register | Symbol | Immediate
    offset: int = 0
    coordinates: tuple[Operand, ...] = ()


@dataclass(frozen=True)
class Vector:
    """``{a, b, ...}``."""

    elements: tuple[Operand, ...]


@dataclass(frozen=True)
class Pair:
    """``a|b``: two results."""

    first: Operand
    second: Operand


Operand = Register | Immediate | Symbol | Memory | Vector | Pair


@dataclass(frozen=True)
class Instruction:
    """One instruction. ``opcode`` has its modifiers; a label operand is a Symbol."""

    line: int
    opcode: str
    operands: tuple[Operand, ...]
    guard: Register | None
    text: str


@dataclass(frozen=True)
class Parameter:
    """A kernel parameter and where it lies in the parameter block, in bytes."""

    name: str
    offset: int
    bytes: int


@dataclass(frozen=True)
class Shared:
    """A variable in shared memory. Dynamic shared memory has 0 bytes."""

    name: str
    align: int
    bytes: int


@dataclass
class Kernel:
    """One entry: instructions in order, labels as indices into them, and the type of every register."""

    name: str
    line: int
    parameters: list[Parameter] = field(default_factory=list)
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    registers: dict[str, str] = field(default_factory=dict)
    shared: list[Shared] = field(default_factory=list)
    required_block: tuple[int, ...] = ()
    """Threads in x, y and z that ``.reqntid`` asks for; empty where it does not stand."""
    largest_block: tuple[int, ...] = ()
    """The same of ``.maxntid``, whose product is the limit."""


@dataclass
class Module:
    """A translation unit."""

    target: str
    version: str
    kernels: dict[str, Kernel]


def quoted(text: str, most: int = _LONGEST_QUOTE) -> str:
    """A piece of PTX for a message: one line, printable, cut where it is long."""
    line = " ".join(text[: 4 * most].split())
    line = "".join(c if c.isprintable() else repr(c)[1:-1] for c in line)
    return line if len(line) <= most else line[: most - 3] + "..."


def spelled(operand: Operand) -> str:
    """An operand as PTX has it, for a message."""
    return quoted(_spelled(operand), _LONGEST_OPERAND)


def _spelled(operand: Operand) -> str:
    match operand:
        case Register(name, negated):
            return "!" * negated + name.split("@")[0]  # without the number of its scope
        case Immediate(bits, float_bits):
            return f"0{'f' if float_bits == 32 else 'd'}{bits:0{float_bits // 4}X}" if float_bits else str(bits)
        case Symbol(name, offset):
            return name.split("@")[0] + (f"+{offset}" if offset else "")
        case Memory(base, offset, coordinates):
            inside = _spelled(base) + (f"+{offset}" if offset else "")
            return f"[{inside}, {{{', '.join(map(_spelled, coordinates))}}}]" if coordinates else f"[{inside}]"
        case Vector(elements):
            return f"{{{', '.join(map(_spelled, elements))}}}"
        case Pair(first, second):
            return f"{_spelled(first)}|{_spelled(second)}"


def number(text: str) -> int | None:
    """A literal as the ISA spells integers, or None where it is none."""
    match = _NUMBER.fullmatch(text)
    if not match:
        return None
    digits = match.group(2)
    if len(digits) > 1 and digits[1] in "01234567":
        digits = f"0o{digits[1:]}" if digits[0] == "0" else digits
    value = int(digits, 0) if len(digits) <= _LONGEST_NUMBER else 1 << 64
    if value >= 1 << 64 or (match.group(1) and value > 1 << 63):
        raise PtxError(f"literal '{quoted(text)}' does not fit into 64 bits")
    return -value if match.group(1) else value


def count(what: str, digits: str, most: int) -> int:
    """A number in a declaration."""
    if len(digits) > len(str(most)) or int(digits) > most:
        raise PtxError(f"at most {most:,} {what} are possible")
    return int(digits)


def alignment(digits: str) -> int:
    value = count("bytes of alignment", digits, 1 << 16)
    if value.bit_count() != 1:
        raise PtxError("an alignment is a power of two")
    return value
