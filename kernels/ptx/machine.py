"""Run a decoded kernel: memory, parameters and schedules in, findings and counts out.

The interpreter itself is C (``vm/``); this module lays out what it works on and names what it found.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy

from dsa_planner.errors import shown
from dsa_planner.kernels.ptx import build
from dsa_planner.kernels.ptx.findings import SPACES, Finding, describe
from dsa_planner.kernels.ptx.program import FIELDS, Program
from dsa_planner.kernels.ptx.syntax import SHARED_BYTES, PtxError, quoted

__all__ = [
    "Buffer",
    "Finding",
    "Machine",
    "Profile",
    "Result",
    "Schedule",
    "TensorMap",
    "check_launch",
    "pack_parameters",
    "profile",
]

_I32, _U32, _U64 = ctypes.c_int32, ctypes.c_uint32, ctypes.c_uint64
_MAX_FINDINGS = 256
_TENSOR_MAP_MAGIC = 0x50414D524F534E54
_REGION = 1 << 36
_FIRST_ADDRESS = 1 << 40
_MOST_SEED = (1 << 64) - 1


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
        """``inorder``, ``random:SEED`` or ``late:SEED``.

        Raises:
            ValueError: it is none of them, or the seed does not fit into 64 bits.
        """
        name, _, seed = text.partition(":")
        if text == "inorder":
            return cls()
        is_number = seed.isascii() and seed.isdigit() and len(seed) <= len(str(_MOST_SEED))
        if name in ("random", "late") and is_number and int(seed) <= _MOST_SEED:
            return cls(int(seed), name == "late")
        raise ValueError(
            f"schedule {shown(text)}: it has to be inorder, random:SEED or late:SEED, SEED from 0 to {_MOST_SEED}"
        )

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


def check_launch(program: Program, threads: int, shared_bytes: int) -> None:
    """See that a kernel can be launched so.

    Raises:
        PtxError: its block is another one, or its shared memory is too large; the message names the kernel's line.
    """
    kernel = program.kernel
    entry = f"line {kernel.line}: entry {quoted(kernel.name)}"
    if threads % 32 or not 32 <= threads <= 1024:
        raise PtxError(f"{entry} is launched with {threads} threads in a block, which are not 1 to 32 whole warps")
    required = (*kernel.required_block, 1, 1, 1)[:3]
    if kernel.required_block and required != (threads, 1, 1):
        block = ", ".join(map(str, kernel.required_block))
        raise PtxError(f"{entry} requires a block of {block} threads (.reqntid), and is launched with {threads}")
    if kernel.largest_block and threads > prod(kernel.largest_block):
        most = prod(kernel.largest_block)
        raise PtxError(f"{entry} allows {most} threads in a block (.maxntid), and is launched with {threads}")
    if program.shared_static + shared_bytes > SHARED_BYTES:
        raise PtxError(
            f"{entry} has {program.shared_static:,} bytes of shared memory and is launched with {shared_bytes:,} more, "
            f"and a CTA has at most {SHARED_BYTES:,}"
        )


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

        Raises:
            PtxError: as from ``check_launch``.
        """
        check_launch(program, threads, shared_bytes)
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
            findings=[describe(machine.findings[n], program) for n in range(machine.finding_count)],
            executed=machine.executed,
            landed=machine.landed,
            macs=machine.macs,
            bytes_read=dict(zip(SPACES, machine.bytes_read, strict=True)),
            bytes_written=dict(zip(SPACES, machine.bytes_written, strict=True)),
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
