"""Run a decoded kernel: memory, parameters and schedules in, findings and counts out.

The interpreter itself is C (``vm/``); this module lays out what it works on and names what it found.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy

from dsa_planner.kernels.ptx import build
from dsa_planner.kernels.ptx.program import FIELDS, Program
from dsa_planner.kernels.ptx.syntax import Register, quoted, spelled

__all__ = ["Buffer", "Finding", "Machine", "Profile", "Result", "Schedule", "TensorMap", "pack_parameters", "profile"]

_I32, _U32, _U64 = ctypes.c_int32, ctypes.c_uint32, ctypes.c_uint64
_MAX_FINDINGS = 256
_TENSOR_MAP_MAGIC = 0x50414D524F534E54
_REGION = 1 << 36
_FIRST_ADDRESS = 1 << 40


class _Allocation(ctypes.Structure):
    _fields_ = [
        ("va", _U64), ("bytes", _U64), ("host", _U64), ("written", _U64), ("written_pc", _U64), ("read", _U64),
        ("read_pc", _U64), ("written_cta", _U64), ("read_cta", _U64), ("writable", _I32), ("pad", _I32),
    ]  # fmt: skip


class _Finding(ctypes.Structure):
    _fields_ = [
        ("kind", _I32), ("pc_before", _I32), ("pc_now", _I32), ("cta", _I32), ("warp", _I32), ("lane", _I32),
        ("space", _I32), ("pad", _I32), ("address", _U64), ("count", _U64), ("state", ctypes.c_int64 * 3),
    ]  # fmt: skip


class _Machine(ctypes.Structure):
    _fields_ = [
        ("code", _U64), ("lists", _U64), ("constants", _U64), ("code_count", _I32), ("slots", _I32),
        ("predicate_slots", _I32), ("granule_shift", _I32), ("shared_bytes", _I32), ("shared_static", _I32),
        ("uses_tmem", _I32), ("pad", _I32),
        ("threads", _I32), ("ctas", _I32), ("grid", _I32 * 3), ("param_bytes", _I32), ("params", _U64),
        ("allocations", _U64), ("allocation_count", _I32), ("global_granule_shift", _I32), ("seed", _U64),
        ("random", _U64), ("policy", _I32), ("detect", _I32), ("stop_on_finding", _I32), ("late", _I32),
        ("instruction_limit", _U64), ("findings", _Finding * _MAX_FINDINGS), ("finding_count", _I32), ("fatal", _I32),
        ("executed", _U64), ("landed", _U64), ("bytes_read", _U64 * 4), ("bytes_written", _U64 * 4), ("macs", _U64),
        ("counts", _U64), ("progress", _U64), ("sequence", _U64), ("starved_warp", _I32),
        ("starve_left", _I32), ("stale", ctypes.c_uint8 * 4096),
    ]  # fmt: skip


_KINDS = (
    "race: read after write", "race: write after read", "race: write after write", "missing proxy fence",
    "read of memory never written", "access out of bounds", "misaligned access", "write to read-only memory",
    "mbarrier contract", "wgmma contract", "convergence", "barrier contract", "tensor memory contract", "deadlock",
    "no end, or a limit of the machine", "still in flight at the end", "descriptor", "tensor map",
)  # fmt: skip
_SPACES = ("global", "shared", "generic", "tensor")
_REGISTER, _LANES, _BARRIER, _VALUE = range(len(_SPACES), len(_SPACES) + 4)  # as in machine.h
_WAITS = ("", "an mbarrier", "a barrier", "a copy or mma group", "tensor memory", "")


@dataclass(frozen=True)
class Schedule:
    """In which order things happen. ``seed`` None is in order: each warp runs until it waits, operations land at once.

    With a seed warps run for random spells, some are starved for a while, and asynchronous operations land in random
    order; ``late`` keeps them back until nothing else can run.
    """

    seed: int | None = None
    late: bool = False

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """``inorder``, ``random:SEED`` or ``late:SEED``."""
        name, _, seed = text.partition(":")
        if text == "inorder":
            return cls()
        if name in ("random", "late") and seed.isdigit():
            return cls(int(seed), name == "late")
        raise ValueError(f"schedule {text!r}: it has to be inorder, random:SEED or late:SEED")

    def __str__(self) -> str:
        return "inorder" if self.seed is None else f"{'late' if self.late else 'random'}:{self.seed}"


@dataclass
class Buffer:
    """Global memory: a numpy array that kernels see at ``address``. Whether each granule was written is kept."""

    array: Any
    index: int
    writable: bool = True
    initialised: bool = True
    written: Any = None

    @property
    def address(self) -> int:
        return _FIRST_ADDRESS + self.index * _REGION


@dataclass(frozen=True)
class TensorMap:
    """What a CUtensorMap says, in the clear: extents, box and byte strides are innermost first."""

    address: int
    element_bytes: int
    extents: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle_bytes: int = 0

    def pack(self) -> bytes:
        """The 128 bytes that stand in for the CUtensorMap among the parameters."""
        rank = len(self.extents)
        return struct.pack(
            "<QQII5I5I4QII", _TENSOR_MAP_MAGIC, self.address, self.element_bytes, rank, *_pad(self.extents, 5),
            *_pad(self.box, 5), *_pad(self.strides, 4), self.swizzle_bytes, 0,
        ).ljust(128, b"\0")  # fmt: skip


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


@dataclass
class Result:
    """What one launch did.

    ``counts`` is uint64 [warps, instructions]; bytes are by space (global, shared, ...).
    """

    findings: list[Finding]
    executed: int
    landed: int
    macs: int
    bytes_read: dict[str, int]
    bytes_written: dict[str, int]
    counts: Any = field(repr=False, default=None)

    @property
    def ok(self) -> bool:
        return not self.findings


def pack_parameters(program: Program, values: Sequence[int | float | bytes]) -> bytes:
    """The parameter block: ints as they fit, floats as fp32, bytes as they are."""
    parameters = program.kernel.parameters
    if len(parameters) != len(values):
        raise ValueError(f"{program.name} takes {len(parameters)} parameters, not {len(values)}")
    block = bytearray(max((p.offset + p.bytes for p in parameters), default=0))
    for parameter, value in zip(parameters, values, strict=True):
        if isinstance(value, float):
            raw = struct.pack("<f", value)
        elif isinstance(value, int):
            raw = (value & ((1 << 8 * parameter.bytes) - 1)).to_bytes(parameter.bytes, "little")
        else:
            raw = value
        if len(raw) != parameter.bytes:
            raise ValueError(f"{parameter.name} has {parameter.bytes} bytes, not {len(raw)}")
        block[parameter.offset : parameter.offset + parameter.bytes] = raw
    return bytes(block)


class Machine:
    """The interpreter, with its compiled core in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._library = build.library(folder)
        self._library.machine_bytes.restype = _I32
        if self._library.machine_bytes() != ctypes.sizeof(_Machine):
            raise AssertionError("the machine's layout is not that of its library")

    def launch(
        self,
        program: Program,
        grid: int | tuple[int, int, int],
        threads: int,
        shared_bytes: int,
        parameters: bytes,
        buffers: Sequence[Buffer],
        schedule: Schedule = Schedule(),
        resident: int = 2,
        detect: bool = True,
        instruction_limit: int = 1 << 34,
    ) -> Result:
        """Run a grid of CTAs, ``resident`` of them at a time. Buffers are changed in place.

        Args:
            grid: CTAs, or CTAs in x, y and z.
            shared_bytes: dynamic shared memory of a CTA.
            parameters: the parameter block, from ``pack_parameters``.
            detect: whether to look for races; without, it is faster.
        """
        machine = _Machine()
        code = numpy.ascontiguousarray(program.code)
        assert code.shape[1] == len(FIELDS)
        keep: list[Any] = [code, program.lists]
        constants = _aligned(program.constants)
        keep.append(constants)
        machine.code, machine.lists, machine.constants = _pointer(code), _pointer(program.lists), _pointer(constants)
        machine.code_count, machine.slots = len(code), program.slots
        machine.predicate_slots = program.predicates
        machine.granule_shift, machine.global_granule_shift = program.shared_granule_shift, program.global_granule_shift
        machine.shared_static = program.shared_static
        machine.uses_tmem = int(program.uses_tensor_memory)
        machine.shared_bytes = -(-(program.shared_static + shared_bytes) // 16) * 16
        extents = (grid, 1, 1) if isinstance(grid, int) else grid
        machine.threads, machine.ctas = threads, extents[0] * extents[1] * extents[2]
        machine.grid[:] = extents
        block = ctypes.create_string_buffer(parameters, len(parameters) + 8)
        machine.params, machine.param_bytes = ctypes.addressof(block), len(parameters)
        allocations = (_Allocation * max(1, len(buffers)))()
        for allocation, buffer in zip(allocations, buffers, strict=False):
            self._describe(allocation, buffer, program.global_granule_shift, keep)
        machine.allocations, machine.allocation_count = ctypes.addressof(allocations), len(buffers)
        machine.seed = schedule.seed or 0
        machine.policy, machine.late = int(schedule.seed is not None), int(schedule.late)
        machine.detect, machine.instruction_limit = int(detect), instruction_limit
        counts = numpy.zeros((threads // 32, len(code)), numpy.uint64)
        machine.counts = _pointer(counts)
        if machine.ctas:
            self._library.run_machine(ctypes.byref(machine), resident)
        for buffer in buffers:
            if buffer.written is not None:
                numpy.minimum(buffer.written, 1, out=buffer.written)
        return Result(
            findings=[_describe_finding(machine.findings[n], program) for n in range(machine.finding_count)],
            executed=machine.executed,
            landed=machine.landed,
            macs=machine.macs,
            bytes_read=dict(zip(_SPACES, machine.bytes_read, strict=True)),
            bytes_written=dict(zip(_SPACES, machine.bytes_written, strict=True)),
            counts=counts,
        )

    def _describe(self, allocation: _Allocation, buffer: Buffer, shift: int, keep: list[Any]) -> None:
        array = buffer.array
        if not array.flags.c_contiguous:
            raise ValueError("a buffer has to be contiguous")
        allocation.va, allocation.bytes, allocation.host = buffer.address, array.nbytes, _pointer(array)
        allocation.writable = int(buffer.writable)
        if not buffer.writable:
            return
        granules = (array.nbytes >> shift) + 1
        if buffer.written is None or len(buffer.written) != granules:
            wrote = buffer.initialised if buffer.written is None else bool(buffer.written.any())
            buffer.written = numpy.full(granules, int(wrote), numpy.uint32)
        shadows = [numpy.zeros(granules, numpy.uint32) for _ in range(3)]
        ctas = [numpy.zeros(granules, numpy.uint16) for _ in range(2)]
        keep += shadows + ctas
        allocation.written = _pointer(buffer.written)
        allocation.written_pc, allocation.read, allocation.read_pc = (_pointer(s) for s in shadows)
        allocation.written_cta, allocation.read_cta = (_pointer(s) for s in ctas)


def _pad(values: Sequence[int], count: int) -> list[int]:
    return [*values, *[1] * (count - len(values))]


def _pointer(array: Any) -> int:
    return int(array.ctypes.data)


def _aligned(array: Any) -> Any:
    """A copy whose memory starts at a multiple of 64."""
    raw = numpy.zeros(array.nbytes + 64, numpy.uint8)
    start = -_pointer(raw) % 64
    view = raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    view[...] = array
    return view


def _describe_finding(found: _Finding, program: Program) -> Finding:
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


def _place(found: _Finding, program: Program) -> str:
    """What the number of a finding says, which depends on its space."""
    number, space = int(found.address), found.space
    if space < len(_SPACES):
        return f", {_SPACES[space]} address {number:#x}"
    if space == _REGISTER:
        return f", register {spelled(Register(program.register_names[number]))}"
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


@dataclass
class Profile:
    """What one launch executed.

    ``opcodes`` maps to counts by warp, summed over CTAs; ``bytes`` are by space and direction; ``macs`` are
    multiply-adds of the tensor cores.
    """

    opcodes: Mapping[str, Any]
    bytes: Mapping[str, int]
    macs: int


def profile(program: Program, result: Result) -> Profile:
    """Executions of each opcode, and bytes moved."""
    totals: dict[str, Any] = {}
    for index, opcode in enumerate(program.opcodes):
        totals[opcode] = totals.get(opcode, 0) + result.counts[:, index]
    moved = {
        f"{space} {direction}": counts[space]
        for direction, counts in (("read", result.bytes_read), ("written", result.bytes_written))
        for space in ("global", "shared", "tensor")
        if counts[space]
    }
    return Profile(totals, moved, result.macs)
