"""PTX text to statements: kernels, their parameters, registers and instructions.

The grammar is the part of the PTX ISA that compilers emit: one translation unit, kernels without calls, inline assembly
in nested scopes with registers and labels of their own. Nothing is interpreted here; ``program.py`` gives instructions
their meaning. Every error names the line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

__all__ = [
    "Immediate",
    "Instruction",
    "Kernel",
    "Memory",
    "Module",
    "Pair",
    "Parameter",
    "PtxError",
    "Register",
    "Shared",
    "Symbol",
    "Vector",
    "parse",
]


class PtxError(ValueError):
    """PTX that the machine does not understand; the message names the line and quotes it."""


@dataclass(frozen=True)
class Register:
    """A register, or a special register such as ``%tid.x``. ``negated`` is the ``!`` of a predicate operand."""

    name: str
    negated: bool = False


@dataclass(frozen=True)
class Immediate:
    """A literal. ``bits`` is its value, or the bits of a float (32 of ``0f``, 64 of ``0d``)."""

    bits: int
    is_float: bool = False


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
    parameters: list[Parameter] = field(default_factory=list)
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    registers: dict[str, str] = field(default_factory=dict)
    shared: list[Shared] = field(default_factory=list)
    threads: int = 0


@dataclass
class Module:
    """A translation unit."""

    target: str
    version: str
    kernels: dict[str, Kernel]


_SIZES = {"8": 1, "16": 2, "32": 4, "64": 8, "128": 16}
_LABEL = re.compile(r"([A-Za-z_$][\w$]*)\s*:(?!:)")
_ENTRY = re.compile(r"(?:\.visible\s+|\.weak\s+)*\.entry\s+([\w$]+)\s*\(")
_PARAMETER = re.compile(
    r"\.param\s+(?:\.align\s+(\d+)\s+)?\.[bufs](8|16|32|64)(?:\s+\.ptr[^,\s]*(?:\s+\.\w+(?:\s+\d+)?)*)?\s+([\w$]+)"
    r"(?:\[(\d+)\])?"
)
_REG = re.compile(r"\.reg\s+\.(\w+)\s+(.*)", re.S)
_SHARED = re.compile(
    r"(?:\.extern\s+|\.visible\s+)*\.shared\s+(?:\.align\s+(\d+)\s+)?\.[bufs](8|16|32|64)\s+([\w$]+)\s*(?:\[(\d*)\])?"
)
_NUMBER = re.compile(r"-?(0[xX][0-9a-fA-F]+|\d+)U?$")


def parse(text: str) -> Module:
    """Parse a translation unit.

    Raises:
        PtxError: it has something that this machine does not know.
    """
    return _Parser(text).module()


class _Parser:
    def __init__(self, text: str) -> None:
        # Comments become spaces, so that lines keep their numbers.
        blank = lambda match: re.sub(r"[^\n]", " ", match.group())  # noqa: E731
        self.text = re.sub(r"//[^\n]*|/\*.*?\*/", blank, text, flags=re.S)
        self.at = 0
        self.line = 1
        self.scopes: list[dict[str, str]] = []
        self.scope_count = 0
        self.shared: list[Shared] = []

    # --- scanning ---

    def _skip_space(self) -> None:
        while self.at < len(self.text) and self.text[self.at].isspace():
            self._advance(1)

    def _advance(self, count: int) -> None:
        self.line += self.text.count("\n", self.at, self.at + count)
        self.at += count

    def _until(self, stop: str) -> str:
        end = self.text.find(stop, self.at)
        if end < 0:
            raise PtxError(f"line {self.line}: {stop!r} expected before the end")
        found = self.text[self.at : end]
        self._advance(end + len(stop) - self.at)
        return found

    # --- module level ---

    def module(self) -> Module:
        target = version = ""
        kernels: dict[str, Kernel] = {}
        while True:
            self._skip_space()
            if self.at == len(self.text):
                break
            entry = _ENTRY.match(self.text, self.at)
            if entry:
                self._advance(entry.end() - self.at)
                kernel = self._kernel(entry.group(1))
                kernels[kernel.name] = kernel
                continue
            line = self.text[self.at : (self.text + "\n").find("\n", self.at)]
            if line.startswith((".version", ".target", ".address_size", ".file", ".loc")):
                words = self._until("\n").split(None, 1) if "\n" in self.text[self.at :] else [line, ""]
                if words[0] == ".version":
                    version = words[1].strip()
                elif words[0] == ".target":
                    target = words[1].split(",")[0].strip()
            elif line.startswith((".extern", ".shared", ".visible")):
                self._declare_shared(self._until(";"), self.shared)
            elif line.startswith(".section"):
                self._until("}")
            else:
                raise PtxError(f"line {self.line}: {line.strip()!r} is not known at the top level")
        return Module(target, version, kernels)

    def _declare_shared(self, statement: str, into: list[Shared]) -> None:
        match = _SHARED.match(statement.strip())
        if not match:
            raise PtxError(f"line {self.line}: {statement.strip()!r} is not known")
        align, bits, name, count = match.groups()
        size = _SIZES[bits]
        elements = int(count) if count else (0 if count == "" else 1)
        into.append(Shared(name, int(align or size), size * elements))

    def _kernel(self, name: str) -> Kernel:
        kernel = Kernel(name, shared=list(self.shared))
        offset = 0
        for declaration in filter(None, (part.strip() for part in self._until(")").split(","))):
            match = _PARAMETER.match(declaration)
            if not match:
                raise PtxError(f"line {self.line}: parameter {declaration!r} is not known")
            align, bits, parameter, count = match.groups()
            size = _SIZES[bits] * int(count or 1)
            step = int(align or _SIZES[bits])
            offset = -(-offset // step) * step
            kernel.parameters.append(Parameter(parameter, offset, size))
            offset += size
        directives = self._until("{")
        threads = re.search(r"\.reqntid\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?", directives)
        if threads:
            kernel.threads = 1
            for extent in filter(None, threads.groups()):
                kernel.threads *= int(extent)
        self.scopes = [{}]
        self.pending_labels: list[tuple[str, int]] = []
        depth = 1
        while depth:
            self._skip_space()
            if self.at == len(self.text):
                raise PtxError(f"line {self.line}: the body of {name} does not end")
            character = self.text[self.at]
            if character == "{":
                self._advance(1)
                depth += 1
                self.scope_count += 1
                self.scopes.append(self._scope_names())
            elif character == "}":
                self._advance(1)
                depth -= 1
                self.scopes.pop()
            elif label := _LABEL.match(self.text, self.at):
                kernel.labels[self._name(label.group(1))] = len(kernel.instructions)
                self._advance(label.end() - self.at)
            else:
                self._statement(kernel)
        return kernel

    def _scope_names(self) -> dict[str, str]:
        """The names that a nested scope declares: its labels and registers, renamed so that they are unique."""
        body = self.text[self.at : self._scope_end()]
        suffix = f"@{self.scope_count}"
        names = {label: label + suffix for label in _LABEL.findall(body)}
        for declared in re.findall(r"\.reg\s+\.\w+\s+([^;]*);", body):
            for register in declared.split(","):
                names[register.strip()] = register.strip() + suffix
        return names

    def _scope_end(self) -> int:
        depth, at = 1, self.at
        while depth:
            if at == len(self.text):
                raise PtxError(f"line {self.line}: a scope does not end")
            depth += {"{": 1, "}": -1}.get(self.text[at], 0)
            at += 1
        return at

    def _name(self, name: str) -> str:
        for scope in reversed(self.scopes):
            if name in scope:
                return scope[name]
        return name

    # --- statements ---

    def _statement(self, kernel: Kernel) -> None:
        line = self.line
        if self.text.startswith((".loc", ".file"), self.at):
            self._until("\n")
            return
        statement = " ".join(self._until(";").split())
        if statement.startswith(".reg"):
            for name, kind in self._registers(statement, line):
                kernel.registers[self._name(name)] = kind
        elif statement.startswith((".pragma", ".branchtargets")):
            return
        elif statement.startswith(".shared"):
            self._declare_shared(statement, kernel.shared)
        elif statement:
            kernel.instructions.append(self._instruction(statement, line))

    def _registers(self, statement: str, line: int) -> Iterator[tuple[str, str]]:
        match = _REG.match(statement)
        if not match:
            raise PtxError(f"line {line}: {statement!r} is not known")
        for name in match.group(2).split(","):
            counted = re.fullmatch(r"(%?[\w$]+)<(\d+)>", name.strip())
            if counted:
                for index in range(int(counted.group(2))):
                    yield f"{counted.group(1)}{index}", match.group(1)
            else:
                yield name.strip(), match.group(1)

    def _instruction(self, statement: str, line: int) -> Instruction:
        text, guard = statement, None
        match = re.match(r"@(!?)([%\w$.]+)\s+", statement)
        if match:
            guard = Register(self._name(match.group(2)), match.group(1) == "!")
            statement = statement[match.end() :]
        opcode, _, rest = statement.partition(" ")
        try:
            operands = tuple(self._operand(part) for part in _split(rest))
        except PtxError as error:
            raise PtxError(f"line {line}: {error} in {text!r}") from None
        return Instruction(line, opcode, operands, guard, text)

    def _operand(self, text: str) -> Operand:
        if text.startswith("{") and text.endswith("}"):
            return Vector(tuple(self._operand(part) for part in _split(text[1:-1])))
        if text.startswith("[") and text.endswith("]"):
            first, *others = _split(text[1:-1])
            base, offset = self._address(first)
            coordinates: list[Operand] = []
            for part in others:
                operand = self._operand(part)
                coordinates.extend(operand.elements if isinstance(operand, Vector) else (operand,))
            return Memory(base, offset, tuple(coordinates))
        if "|" in text:
            first, second = text.split("|")
            return Pair(self._operand(first.strip()), self._operand(second.strip()))
        return self._simple(text)

    def _address(self, text: str) -> tuple[Register | Symbol | Immediate, int]:
        match = re.fullmatch(r"([%\w$.]+)\s*(?:([+-])\s*(-?\w+))?", text.strip())
        if not match:
            raise PtxError(f"address {text!r}")
        base = self._simple(match.group(1))
        if isinstance(base, Pair | Vector | Memory):
            raise PtxError(f"address {text!r}")
        offset = int(match.group(3) or "0", 0) * (-1 if match.group(2) == "-" else 1)
        return base, offset

    def _simple(self, text: str) -> Register | Immediate | Symbol:
        if _NUMBER.match(text):
            return Immediate(int(text.rstrip("U"), 0))
        if re.fullmatch(r"0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16}", text):
            return Immediate(int(text[2:], 16), is_float=True)
        negated = text.startswith("!")
        name = self._name(text[1:].strip() if negated else text)
        if name.startswith("%") or "@" in name or name == "_" or negated:
            return Register(name, negated)
        if re.fullmatch(r"[\w$]+", name):
            return Symbol(name)
        raise PtxError(f"operand {text!r}")


def _split(text: str) -> list[str]:
    """Split at the commas that no bracket encloses."""
    parts, depth, start = [], 0, 0
    for at, character in enumerate(text):
        if character in "{[(":
            depth += 1
        elif character in "}])":
            depth -= 1
        elif character == "," and not depth:
            parts.append(text[start:at].strip())
            start = at + 1
    parts.append(text[start:].strip())
    return [part for part in parts if part]
