"""What decoding functions share: operands as values, addresses and results, and the table of those functions.

A decoding function belongs to the first word of an opcode, and gets the words after it. It reads all of them: what it
does not know it refuses. It reads every operand through ``Operands``, with the type that the ISA gives to it there, and
what it has left unread is refused as well.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from dsa_planner.kernels.ptx.program import Insn
from dsa_planner.kernels.ptx.registers import REGISTER_WIDTHS
from dsa_planner.kernels.ptx.syntax import (
    SHARED_BYTES,
    Immediate,
    Instruction,
    Kernel,
    Memory,
    Operand,
    Pair,
    PtxError,
    Register,
    Symbol,
    Vector,
    spelled,
)

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
_SPECIAL_OF_64_BITS = ("%clock64", "%globaltimer")
_PACKED = {"f16x2": "b32", "bf16x2": "b32", "bf16": "b16", "f32x2": "b64"}
"""Types that registers cannot have: those that hold them."""
_LETTERS = {"u": "bus", "s": "bus", "b": "busf", "f": "bf"}
"""By the first letter of an instruction's type, those of the register types that agree with it."""


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
        if self.shared_static > SHARED_BYTES:
            raise PtxError(
                f"line {kernel.line}: the variables of entry {kernel.name} take {self.shared_static:,} bytes of shared "
                f"memory, and a CTA has at most {SHARED_BYTES:,}"
            )
        self.granules = {"shared": 4, "global": 4}
        self._read: set[int] = set()  # operands of the instruction that is being decoded, by identity

    # --- operands ---

    def kind(self, register: Register) -> str:
        kind = self.kernel.registers.get(register.name)
        if kind is None:
            raise PtxError(f"register {spelled(register)} is not declared")
        return kind

    def is_wide(self, operand: Operand) -> bool:
        """Whether this is a register of 64 bits."""
        return (
            isinstance(operand, Register)
            and operand.name != "_"
            and operand.name not in SPECIAL
            and REGISTER_WIDTHS[self.kind(operand)] == 2
        )

    def value(self, operand: Operand, kind: str, wider: bool = False) -> Any:
        """A readable operand of this type: a register, or a constant (bits, value).

        Args:
            kind: the type that the instruction gives to the operand.
            wider: whether a register may have more bits than that, as those of ld, st and cvt may.
        """
        self._read.add(id(operand))
        if isinstance(operand, Register):
            if operand.name == "_":
                raise PtxError("_ takes a result and has no value")
            if operand.name in SPECIAL:
                raise PtxError(f"{operand.name} has to be moved to a register first")
            if operand.negated and kind != "pred":
                raise PtxError(f"only a predicate can be negated: {spelled(operand)}")
            self._fits(operand, kind, wider)
            return operand
        if isinstance(operand, Immediate):
            return self._constant(operand, kind)
        if isinstance(operand, Symbol):
            return self._symbol(operand, kind)
        raise PtxError(f"{spelled(operand)} is not a value")

    def values(self, operand: Operand, kind: str, wider: bool = False) -> list[Any]:
        """The elements of a vector, or the one operand. Its registers have one width."""
        return self._one_width(operand, [self.value(o, kind, wider) for o in _elements(operand)])

    def result(self, operand: Operand, kind: str, wider: bool = False) -> Any:
        """A register of this type that takes a result; ``_`` is one that nobody reads."""
        self._read.add(id(operand))
        if not isinstance(operand, Register) or operand.negated:
            raise PtxError(f"{spelled(operand)} cannot take a result")
        if operand.name == "_":
            return operand if kind != "pred" else (1, 1)  # a constant predicate takes no writes
        self._fits(operand, kind, wider)
        return operand

    def results(self, operand: Operand, kind: str, wider: bool = False) -> list[Any]:
        """The elements of a vector, or the one operand, as ``result`` gives them. They have one width."""
        return self._one_width(operand, [self.result(o, kind, wider) for o in _elements(operand)])

    def two_results(self, operand: Operand, kind: str, second: str) -> tuple[Any, Any]:
        """A result and, where there are two, ``a|b``, the other one."""
        if not isinstance(operand, Pair):
            return self.result(operand, kind), None
        return self.result(operand.first, kind), self.result(operand.second, second)

    def address(self, operand: Operand, shared: bool = False) -> tuple[Any, int, int]:
        """(base, offset, 1 if the base is 64 bits wide) of a memory operand.

        Args:
            shared: whether it lies in shared memory, so that it may be a variable.
        """
        return self._address(self._memory(operand), (32, 64), "bus", shared)

    def tensor_memory(self, operand: Operand, letters: str = "bus") -> tuple[Any, int]:
        """(base, offset) of an address of tensor memory, which has 32 bits.

        Args:
            letters: of the types that the register may have.
        """
        return self._address(self._memory(operand), (32,), letters, False)[:2]

    def _memory(self, operand: Operand) -> Memory:
        self._read.add(id(operand))
        if not isinstance(operand, Memory):
            raise PtxError(f"{spelled(operand)} is not an address")
        if operand.coordinates:
            raise PtxError(f"this address has no coordinates: {spelled(operand)}")
        return operand

    def tensor(self, operand: Operand) -> tuple[Any, list[Any]]:
        """The address of a tensor map, and the coordinates of an access."""
        self._read.add(id(operand))
        if not isinstance(operand, Memory):
            raise PtxError(f"{spelled(operand)} is not a tensor and its coordinates")
        if operand.offset:
            raise PtxError(f"an offset from a tensor map is not known: {spelled(operand)}")
        return self.value(operand.base, "u64"), [self.value(o, "s32") for o in operand.coordinates]

    def parameter(self, operand: Operand) -> int:
        """Where in the parameter block something lies."""
        self._read.add(id(operand))
        if not isinstance(operand, Memory) or not isinstance(operand.base, Symbol) or operand.coordinates:
            raise PtxError("a parameter is read by its name")
        found = self.parameters.get(operand.base.name)
        if found is None:
            raise PtxError(f"parameter {spelled(operand.base)} is not known")
        return found.offset + operand.offset

    def literal(self, operand: Operand, least: int, most: int) -> int:
        """A number that the assembler has to know, in a range."""
        self._read.add(id(operand))
        if not isinstance(operand, Immediate) or operand.float_bits:
            raise PtxError(f"{spelled(operand)} has to be a literal")
        if not least <= operand.bits <= most:
            raise PtxError(f"{operand.bits} has to be a literal from {least} to {most}")
        return operand.bits

    def label(self, operand: Operand) -> Symbol:
        self._read.add(id(operand))
        if not isinstance(operand, Register | Symbol):  # a label of a nested scope is renamed as registers are
            raise PtxError(f"{spelled(operand)} is not a label")
        return Symbol(operand.name)

    def special(self, operand: Register, bits: int) -> int:
        """The number of a special register of so many bits."""
        self._read.add(id(operand))
        if operand.name in self.kernel.registers:
            raise PtxError(f"{operand.name} is a special register and cannot be declared")
        found = 64 if operand.name in _SPECIAL_OF_64_BITS else 32
        if found != bits:
            raise PtxError(f"{operand.name} has {found} bits, and {bits} are due")
        return SPECIAL[operand.name]

    # --- an instruction ---

    def begin(self, i: Instruction) -> None:
        """Before an instruction is decoded: its guard has to be a predicate."""
        self._read.clear()
        if i.guard is not None:
            self.value(i.guard, "pred")

    def finish(self, i: Instruction, decoded: list[Insn]) -> None:
        """See that every operand was read, and with it every register that the machine will use."""
        unread = [o for operand in i.operands for o in _parts(operand) if id(o) not in self._read]
        if unread:
            raise PtxError(f"operand {spelled(unread[0])} is one too many")
        for insn in decoded:
            for o in (insn.d0, insn.d1, insn.s0, insn.s1, insn.s2, insn.s3, insn.predicate, *insn.list):
                assert not isinstance(o, Register) or id(o) in self._read, (i.text, o)

    # --- helpers ---

    def _fits(self, register: Register, kind: str, wider: bool) -> None:
        declared = self.kind(register)
        holder = _PACKED.get(kind, kind)
        if kind == "pred" or declared == "pred":
            fits = kind == declared
        else:
            bits, due = bits_of(declared), bits_of(holder)
            letters = "b" if kind in _PACKED else _LETTERS[holder[0]]
            fits = declared[0] in letters and (
                bits == due or (wider and kind not in _PACKED and bits > due and (holder[0], declared[0]) != ("f", "f"))
            )
        if not fits:
            due_names = "a predicate" if kind == "pred" else f"one of type .{kind}"
            raise PtxError(f"register {spelled(register)} of type .{declared} stands where {due_names} is due")

    def _one_width(self, operand: Operand, found: list[Any]) -> list[Any]:
        if len({self.kind(o).lstrip("busf") for o in found if isinstance(o, Register) and o.name != "_"}) > 1:
            raise PtxError(f"the registers of a vector have one width: {spelled(operand)}")
        return found

    def _constant(self, operand: Immediate, kind: str) -> tuple[int, int]:
        value, text = operand.bits, spelled(operand)
        if kind == "pred":
            if operand.float_bits or value not in (0, 1, -1):
                raise PtxError(f"{text} stands where a predicate is due")
            return (1, int(value != 0))
        bits = bits_of(kind) if kind not in _PACKED else 0
        if operand.float_bits:
            if kind not in (f"f{operand.float_bits}", f"b{operand.float_bits}"):
                raise PtxError(f"{text} stands where a value of type .{kind} is due")
        elif kind[0] not in "bus" or kind in _PACKED:
            raise PtxError(f"the whole number {text} stands where a value of type .{kind} is due")
        elif not -(1 << bits - 1) <= value < 1 << bits:
            raise PtxError(f"{text} is out of the range of .{kind}")
        return (64 if bits == 64 else 32, value & ((1 << bits) - 1))

    def _symbol(self, symbol: Symbol, kind: str) -> tuple[int, int]:
        if symbol.name in self.shared:
            if kind not in ("b32", "u32", "s32", "b64", "u64", "s64"):
                raise PtxError(f"the address of {spelled(symbol)} stands where a value of type .{kind} is due")
            return (bits_of(kind), self.shared[symbol.name] + symbol.offset)
        if symbol.name in self.parameters:
            if kind not in ("b64", "u64", "s64"):
                raise PtxError(f"the address of parameter {spelled(symbol)} has 64 bits")
            return (64, PARAM_WINDOW + self.parameters[symbol.name].offset + symbol.offset)
        raise PtxError(f"{spelled(symbol)} is not known")

    def _address(self, memory: Memory, widths: tuple[int, ...], letters: str, shared: bool) -> tuple[Any, int, int]:
        base, offset = memory.base, memory.offset
        if not -(1 << 31) <= offset < 1 << 31:
            raise PtxError(f"an offset has 32 bits: {spelled(memory)}")
        if isinstance(base, Register):
            if base.name in SPECIAL or base.name == "_" or base.negated:
                raise PtxError(f"{spelled(base)} is not the base of an address")
            self._read.add(id(base))
            declared = self.kind(base)
            if declared[0] not in letters or bits_of(declared) not in widths:
                due = " or ".join(map(str, widths))
                raise PtxError(
                    f"register {spelled(base)} of type .{declared} stands where an address of {due} bits is due"
                )
            return base, offset, int(bits_of(declared) == 64)
        if isinstance(base, Symbol):
            if not shared and base.name in (self.shared | self.parameters):
                raise PtxError(f"{spelled(base)} does not lie in the memory that is accessed here")
            return self._symbol(base, "u32"), offset, 0
        wide = int(64 in widths and not shared)
        return self._constant(base, "u64" if wide else "u32"), offset, wide


def _elements(operand: Operand) -> tuple[Operand, ...]:
    return operand.elements if isinstance(operand, Vector) else (operand,)


def _parts(operand: Operand) -> tuple[Operand, ...]:
    return (operand.first, operand.second) if isinstance(operand, Pair) else _elements(operand)


Decode = Callable[[Operands, Instruction, list[str]], Any]
DECODERS: dict[str, Decode] = {}


def opcode(*names: str) -> Callable[[Decode], Decode]:
    def register(function: Decode) -> Decode:
        for name in names:
            DECODERS[name] = function
        return function

    return register


def bits_of(kind: str) -> int:
    """The bits of a type that has one element, such as u32."""
    digits = re.fullmatch(r"[a-z]+([0-9]{1,3})", kind)
    if digits is None:
        raise PtxError(f"type .{kind} is not known")
    return int(digits.group(1))


def only(words: list[str], *known: str) -> None:
    """Refuse any word that is not one of these."""
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


def operands(i: Instruction, *counts: int) -> tuple[Operand, ...]:
    """The operands of an instruction, of which there have to be so many."""
    if len(i.operands) not in counts:
        raise PtxError(f"{i.opcode} has {' or '.join(map(str, counts))} operands, not {len(i.operands)}")
    return i.operands


def plain(d: Operands, i: Instruction, op: str, kinds: str, mod: int = 0) -> Insn:
    """d = op(a, b, c, ...): ``kinds`` are the types of d and of each source."""
    kind, *sources = kinds.split()
    target, *others = operands(i, 1 + len(sources))
    found = [d.value(o, source) for o, source in zip(others, sources, strict=True)]
    return Insn(op, i, d0=d.result(target, kind), mod=mod, **dict(zip(("s0", "s1", "s2", "s3"), found, strict=False)))
