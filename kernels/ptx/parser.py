"""PTX text to statements: kernels, their parameters, registers and instructions.

The grammar is the part of the PTX ISA that compilers emit: one translation unit, kernels without calls, inline assembly
in nested scopes with registers and labels of their own. Nothing is interpreted here; ``decode.py`` gives instructions
their meaning. Every error names the line and the rule, and quotes what breaks it. The text may be anybody's, so what it
can make grow has a limit.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import prod

from dsa_planner.kernels.ptx.registers import REGISTER_WIDTHS
from dsa_planner.kernels.ptx.syntax import (
    SHARED_BYTES,
    Immediate,
    Instruction,
    Kernel,
    Memory,
    Module,
    Operand,
    Pair,
    Parameter,
    PtxError,
    Register,
    Shared,
    Symbol,
    Vector,
    alignment,
    count,
    number,
    quoted,
)

__all__ = ["MOST_CHARACTERS", "MOST_LINES", "MOST_REGISTERS", "PtxError", "parse"]

MOST_CHARACTERS, MOST_LINES, MOST_REGISTERS = 1 << 24, 1 << 18, 1 << 17
"""Limits of a unit, and of a kernel's registers: ten times and more what the largest plan has."""
_PARAMETER_BYTES = 32_764
_SCOPES = 64  # one in another
_THREADS = 1024

_SIZES = {"8": 1, "16": 2, "32": 4, "64": 8, "128": 16}
_LABEL = re.compile(r"([A-Za-z_$][\w$]*)\s*:(?!:)")
_ENTRY = re.compile(r"(?:\.visible\s+|\.weak\s+)*\.entry\s+([\w$]+)\s*\(")
_PARAMETER = re.compile(
    r"\.param\s+(?:\.align\s+(\d+)\s+)?\.[bufs](8|16|32|64)(?:\s+\.ptr[^,\s]*(?:\s+\.\w+(?:\s+\d+)?)*)?\s+([\w$]+)"
    r"(?:\[(\d+)\])?",
    re.A,
)
_REG = re.compile(r"\.reg\s+\.(\w+)\s+(.*)", re.S)
_SHARED = re.compile(
    r"(?:\.extern\s+|\.visible\s+)*\.shared\s+(?:\.align\s+(\d+)\s+)?\.[bufs](8|16|32|64)\s+([\w$]+)\s*(?:\[(\d*)\])?",
    re.A,
)
_BLOCK = r"\.{}\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?"
_REQUIRED_BLOCK, _LARGEST_BLOCK = (re.compile(_BLOCK.format(name), re.A) for name in ("reqntid", "maxntid"))
_NO_MEANING_HERE = re.compile(r"\.(?:minnctapersm|maxnctapersm|maxnreg)\s+\d+|\.pragma\s+\"[^\"]*\"\s*;", re.A)


def parse(text: str) -> Module:
    """Parse a translation unit.

    Raises:
        PtxError: it has something that this machine does not know, or more of something than the limits above.
    """
    lines = text.count("\n")
    if lines > MOST_LINES:
        raise PtxError(f"line {MOST_LINES + 1}: a unit has at most {MOST_LINES:,} lines, and this one has {lines:,}")
    if len(text) > MOST_CHARACTERS:
        raise PtxError(f"line 1: a unit has at most {MOST_CHARACTERS:,} characters, and this one has {len(text):,}")
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

    def _advance(self, characters: int) -> None:
        self.line += self.text.count("\n", self.at, self.at + characters)
        self.at += characters

    def _until(self, stop: str) -> str:
        end = self.text.find(stop, self.at)
        if end < 0:
            raise PtxError(f"line {self.line}: {stop!r} expected before the end")
        found = self.text[self.at : end]
        self._advance(end + len(stop) - self.at)
        return found

    def _rest_of_line(self) -> str:
        end = self.text.find("\n", self.at)
        found = self.text[self.at : end if end >= 0 else len(self.text)]
        self._advance(len(found))
        return found

    # --- module level ---

    def module(self) -> Module:
        target = version = ""
        kernels: dict[str, Kernel] = {}
        while True:
            self._skip_space()
            if self.at == len(self.text):
                break
            line = self.line
            entry = _ENTRY.match(self.text, self.at)
            if entry:
                self._advance(entry.end() - self.at)
                kernel = self._kernel(entry.group(1))
                if kernel.name in kernels:
                    raise PtxError(f"line {line}: entry {quoted(kernel.name)} is declared twice")
                kernels[kernel.name] = kernel
            elif self.text.startswith((".version", ".target", ".address_size", ".file", ".loc"), self.at):
                directive, _, value = " ".join(self._rest_of_line().split()).partition(" ")
                if directive == ".version":
                    version = value
                elif directive == ".target":
                    target = value.split(",")[0].strip()
                elif directive == ".address_size" and value != "64":
                    raise PtxError(f"line {line}: addresses of 64 bits are expected: {directive} {quoted(value)}")
            elif self.text.startswith((".extern", ".shared", ".visible"), self.at):
                self._declare_shared(self._until(";"), self.shared, line)
            elif self.text.startswith(".section", self.at):
                self._until("}")
            else:
                raise PtxError(f"line {line}: '{quoted(self._rest_of_line())}' is not known at the top level")
        return Module(target, version, kernels)

    def _declare_shared(self, statement: str, into: list[Shared], line: int) -> None:
        text = quoted(statement)
        match = _SHARED.fullmatch(statement.strip())
        if not match:
            raise PtxError(f"line {line}: '{text}' is not known")
        align, bits, name, extent = match.groups()
        size = _SIZES[bits]
        limit = SHARED_BYTES // size
        with _Quoting(line, text):
            elements = count("elements", extent, limit) if extent else (0 if extent == "" else 1)
            if name in {variable.name for variable in into}:
                raise PtxError(f"{quoted(name)} is declared twice")
            into.append(Shared(name, alignment(align or str(size)), size * elements))

    def _kernel(self, name: str) -> Kernel:
        kernel = Kernel(name, self.line, shared=list(self.shared))
        line = self.line
        offset = 0
        for declaration in filter(None, (part.strip() for part in self._until(")").split(","))):
            match = _PARAMETER.fullmatch(declaration)
            if not match:
                raise PtxError(f"line {line}: parameter '{quoted(declaration)}' is not known")
            align, bits, parameter, extent = match.groups()
            with _Quoting(line, quoted(declaration)):
                size = _SIZES[bits] * count("elements", extent or "1", _PARAMETER_BYTES)
                step = alignment(align or str(_SIZES[bits]))
                offset = -(-offset // step) * step
                if offset + size > _PARAMETER_BYTES:
                    raise PtxError(f"parameters take at most {_PARAMETER_BYTES:,} bytes together")
                if parameter in {known.name for known in kernel.parameters}:
                    raise PtxError(f"{quoted(parameter)} is declared twice")
            kernel.parameters.append(Parameter(parameter, offset, size))
            offset += size
        self._directives(kernel)
        self.scopes = [{}]
        while self.scopes:
            self._skip_space()
            if self.at == len(self.text):
                raise PtxError(f"line {self.line}: the body of {quoted(name)} does not end")
            character = self.text[self.at]
            if character == "{":
                if len(self.scopes) > _SCOPES:
                    raise PtxError(f"line {self.line}: at most {_SCOPES} scopes lie one in another: {{")
                self._advance(1)
                self.scope_count += 1
                self.scopes.append(self._scope_names())
            elif character == "}":
                self._advance(1)
                self.scopes.pop()
            elif label := _LABEL.match(self.text, self.at):
                known = self._name(label.group(1))
                if known in kernel.labels:
                    raise PtxError(f"line {self.line}: a label stands once in its scope: {quoted(label.group())}")
                kernel.labels[known] = len(kernel.instructions)
                self._advance(label.end() - self.at)
            else:
                self._statement(kernel)
        return kernel

    def _directives(self, kernel: Kernel) -> None:
        """What stands between an entry's parameters and its body: its block, and hints for the assembler."""
        line = self.line
        text = self._until("{")
        with _Quoting(line, quoted(text)):
            for pattern, what in ((_REQUIRED_BLOCK, "required_block"), (_LARGEST_BLOCK, "largest_block")):
                for match in pattern.finditer(text):
                    extents = tuple(count("threads", extent, _THREADS) for extent in match.groups() if extent)
                    if not 1 <= prod(extents) <= _THREADS:
                        raise PtxError(f"a block has 1 to {_THREADS} threads, not {prod(extents):,}")
                    setattr(kernel, what, extents)
                text = pattern.sub(" ", text)
            left = _NO_MEANING_HERE.sub(" ", text).split()
            if left:
                raise PtxError(f"directive {quoted(left[0])} of an entry is not known")

    def _scope_names(self) -> dict[str, str]:
        """The names that a nested scope declares: its labels and registers, renamed so that they are unique."""
        body = self._scope_body()
        suffix = f"@{self.scope_count}"
        names = {label: label + suffix for label in _LABEL.findall(body)}
        for statement in re.findall(r"\.reg\s+\.\w+\s+[^;]*(?=;)", body):
            names.update((name, name + suffix) for name, _ in _registers(statement, self.line))
            if len(names) > MOST_REGISTERS:
                raise PtxError(
                    f"line {self.line}: a kernel has at most {MOST_REGISTERS:,} registers: {quoted(statement)}"
                )
        return names

    def _scope_body(self) -> str:
        """The text of the scope that begins here, without the scopes (and vectors) in it."""
        depth, parts, start = 1, [], self.at
        for brace in re.compile(r"[{}]").finditer(self.text, self.at):
            if depth == 1:
                parts.append(self.text[start : brace.start()])
            depth += 1 if brace.group() == "{" else -1
            start = brace.end()
            if not depth:
                return " ".join(parts)
        raise PtxError(f"line {self.line}: a scope does not end")

    def _name(self, name: str) -> str:
        for scope in reversed(self.scopes):
            if name in scope:
                return scope[name]
        return name

    # --- statements ---

    def _statement(self, kernel: Kernel) -> None:
        line = self.line
        if self.text.startswith((".loc", ".file"), self.at):
            self._rest_of_line()
            return
        statement = " ".join(self._until(";").split())
        if statement.startswith(".reg"):
            for name, kind in _registers(statement, line):
                known = self._name(name)
                if known in kernel.registers:
                    raise PtxError(f"line {line}: register {quoted(name)} is declared twice: {quoted(statement)}")
                if len(kernel.registers) == MOST_REGISTERS:
                    raise PtxError(
                        f"line {line}: a kernel has at most {MOST_REGISTERS:,} registers: {quoted(statement)}"
                    )
                kernel.registers[known] = kind
        elif statement.startswith((".pragma", ".branchtargets")):
            return
        elif statement.startswith(".shared"):
            self._declare_shared(statement, kernel.shared, line)
        elif statement:
            if len(kernel.instructions) == MOST_LINES:
                raise PtxError(f"line {line}: a kernel has at most {MOST_LINES:,} instructions: {quoted(statement)}")
            kernel.instructions.append(self._instruction(statement, line))

    def _instruction(self, statement: str, line: int) -> Instruction:
        text, guard = statement, None
        match = re.match(r"@(!?)([%\w$.]+)\s+", statement)
        if match:
            guard = Register(self._name(match.group(2)), match.group(1) == "!")
            statement = statement[match.end() :]
        opcode, _, rest = statement.partition(" ")
        with _Quoting(line, quoted(text)):
            return Instruction(line, opcode, tuple(self._operand(part) for part in _split(rest)), guard, text)

    def _operand(self, text: str) -> Operand:
        if text.startswith("{") and text.endswith("}"):
            return Vector(tuple(self._simple(part) for part in _split(text[1:-1])))
        if text.startswith("[") and text.endswith("]"):
            first, *others = _split(text[1:-1]) or [""]
            base, offset = self._address(first)
            coordinates: list[Operand] = []
            for part in others:
                operand = self._operand(part) if part.startswith("{") else self._simple(part)
                coordinates.extend(operand.elements if isinstance(operand, Vector) else (operand,))
            return Memory(base, offset, tuple(coordinates))
        if "|" in text:
            first, _, second = text.partition("|")
            return Pair(self._simple(first.strip()), self._simple(second.strip()))
        return self._simple(text)

    def _address(self, text: str) -> tuple[Register | Symbol | Immediate, int]:
        match = re.fullmatch(r"([%\w$.]+)\s*(?:([+-])\s*(-?\w+))?", text.strip())
        if not match:
            raise PtxError(f"address '{quoted(text)}' is not understood")
        base = self._simple(match.group(1))
        offset = number(match.group(3) or "0")
        if offset is None:
            raise PtxError(f"offset '{quoted(match.group(3))}' is not a whole number")
        return base, offset * (-1 if match.group(2) == "-" else 1)

    def _simple(self, text: str) -> Register | Immediate | Symbol:
        value = number(text)
        if value is not None:
            return Immediate(value)
        if re.fullmatch(r"0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16}", text):
            return Immediate(int(text[2:], 16), float_bits=32 if text[1] in "fF" else 64)
        negated = text.startswith("!")
        name = self._name(text[1:].strip() if negated else text)
        if re.fullmatch(r"[%\w$][\w$.]*(?:@\d+)?", name):
            if name.startswith("%") or "@" in name or name == "_" or negated:
                return Register(name, negated)
            if re.fullmatch(r"[A-Za-z_$][\w$]*", name):
                return Symbol(name)
        raise PtxError(f"operand '{quoted(text)}' is not understood")


class _Quoting:
    """Errors in here get the number and the text of a statement."""

    def __init__(self, line: int, text: str) -> None:
        self.line, self.text = line, text

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, PtxError):
            raise PtxError(f"line {self.line}: {error}: {self.text}") from None


def _registers(statement: str, line: int) -> Iterator[tuple[str, str]]:
    """The name and type of every register that a statement declares."""
    match = _REG.fullmatch(statement)
    text = quoted(statement)
    if not match:
        raise PtxError(f"line {line}: '{text}' is not known")
    names, kind = match.group(2), match.group(1)
    with _Quoting(line, text):
        if kind not in REGISTER_WIDTHS:
            raise PtxError(f"registers of type .{quoted(kind)} are not known")
        for name in names.split(","):
            counted = re.fullmatch(r"(%?[\w$]+)\s*<\s*(\d+)\s*>", name.strip(), re.A)
            if counted:
                for index in range(count("registers", counted.group(2), MOST_REGISTERS)):
                    yield f"{counted.group(1)}{index}", kind
            elif re.fullmatch(r"%?[\w$]+", name.strip()):
                yield name.strip(), kind
            else:
                raise PtxError(f"'{quoted(name)}' is not the name of a register")


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
    if parts == [""]:
        return []
    if "" in parts:
        raise PtxError("an operand is missing between commas")
    return parts
