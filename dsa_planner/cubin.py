"""Read from a cubin what the plan manifest records: target, kernels, parameters, registers, spills, shared memory.

A cubin is an ELF file; pyelftools reads the container, and the NVIDIA parts are decoded here:

* ``e_flags`` and the ABI version carry the target: the SM number, and whether it is an arch-accelerated ("a") target.
* ``.nv.info`` and ``.nv.info.<symbol>`` hold attribute records: a format byte, an attribute byte and a 16-bit value or
  payload length. The attributes used are REGCOUNT, FRAME_SIZE, REQNTID and KPARAM_INFO.
* Spills have no attribute. Instructions are 16 bytes from Volta on, with the opcode in the low 12 bits; STL and LDL
  (store to and load from local memory) carry their width in bits 73 to 75. Their summed widths equal the "spill stores"
  and "spill loads" that ptxas prints (tests/test_cubin.py).
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elftools.elf.elffile import ELFFile

__all__ = ["Cubin", "CubinError", "CubinKernel", "inspect"]

_EIATTR_FRAME_SIZE = 0x11
_EIATTR_REQNTID = 0x10
_EIATTR_KPARAM_INFO = 0x17
_EIATTR_REGCOUNT = 0x2F
_EIFMT_SVAL = 4
_OPCODE_STL = 0x387
_OPCODE_LDL = 0x983
_ACCESS_BYTES = (1, 1, 2, 2, 4, 8, 16)
_ABI_OF_FLAGS_V1 = 7  # sm_90 and before: SM number in byte 0; from ABI version 8 on: in byte 1


class CubinError(ValueError):
    """The bytes are not a cubin, or not one that this reader understands."""


@dataclass(frozen=True)
class CubinKernel:
    """What the compiler fixed for one kernel. Sizes in bytes."""

    symbol: str
    registers: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    static_shared_bytes: int
    block: int | None
    """Threads a block, where the kernel demands a number."""
    parameters: tuple[tuple[int, int], ...]
    """(offset, size) of each parameter, in order."""


@dataclass(frozen=True)
class Cubin:
    """A cubin's target and kernels; ``accelerated`` tells sm_90a from sm_90. Kernels are in symbol order."""

    sm: int
    accelerated: bool
    kernels: tuple[CubinKernel, ...]


def inspect(data: bytes) -> Cubin:
    """Read a cubin.

    Raises:
        CubinError: the bytes are no CUDA ELF file, or an attribute is missing.
    """
    from elftools.elf.elffile import ELFFile  # of the extra "compile": nothing else needs it

    try:
        elf = ELFFile(io.BytesIO(data))
        if elf["e_machine"] != "EM_CUDA":
            raise CubinError(f"an ELF file for {elf['e_machine']}, not for a CUDA device")
        sections = {section.name: section for section in elf.iter_sections()}
        symbols = [symbol.name for symbol in sections[".symtab"].iter_symbols()]
        sm, accelerated = _target(elf)
        totals = _totals(sections[".nv.info"].data())
        kernels = [
            _kernel(name.removeprefix(".nv.info."), sections, totals, symbols)
            for name in sorted(sections)
            if name.startswith(".nv.info.")
        ]
    except CubinError:
        raise
    except Exception as error:  # on a damaged file pyelftools raises what it happens upon
        raise CubinError(f"not a readable cubin ({type(error).__name__}: {error})") from error
    return Cubin(sm, accelerated, tuple(kernels))


def _target(elf: ELFFile) -> tuple[int, bool]:
    flags = elf["e_flags"]
    if elf["e_ident"]["EI_ABIVERSION"] <= _ABI_OF_FLAGS_V1:
        return flags & 0xFF, bool(flags & 0x800)
    return (flags >> 8) & 0xFF, bool(flags & 0x8)


def _records(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """The attribute records of a .nv.info section: (attribute, 16-bit value, payload)."""
    at = 0
    while at < len(data):
        form, attribute, value = struct.unpack_from("<BBH", data, at)
        at += 4
        payload = b""
        if form == _EIFMT_SVAL:
            payload = data[at : at + value]
            at += value
        yield attribute, value, payload


def _totals(data: bytes) -> dict[tuple[int, int], int]:
    """(attribute, symbol index) -> value, for the attributes that .nv.info keeps for all functions."""
    totals = {}
    for attribute, _, payload in _records(data):
        if attribute in (_EIATTR_REGCOUNT, _EIATTR_FRAME_SIZE):
            symbol, value = struct.unpack("<II", payload)
            totals[attribute, symbol] = value
    return totals


def _kernel(
    symbol: str, sections: dict[str, Any], totals: dict[tuple[int, int], int], symbols: list[str]
) -> CubinKernel:
    index = symbols.index(symbol) if symbol in symbols else -1
    parameters: dict[int, tuple[int, int]] = {}
    block = None
    for attribute, _, payload in _records(sections[f".nv.info.{symbol}"].data()):
        if attribute == _EIATTR_KPARAM_INFO:
            _, ordinal, offset, packed = struct.unpack("<IHHI", payload)
            parameters[ordinal] = (offset, packed >> 18)
        elif attribute == _EIATTR_REQNTID:
            x, y, z = struct.unpack("<III", payload)
            block = x * y * z
    shared = sections.get(f".nv.shared.{symbol}")
    stores, loads = _spills(sections[f".text.{symbol}"].data())
    return CubinKernel(
        symbol=symbol,
        registers=totals[_EIATTR_REGCOUNT, index],
        stack_bytes=totals[_EIATTR_FRAME_SIZE, index],
        spill_store_bytes=stores,
        spill_load_bytes=loads,
        static_shared_bytes=shared["sh_size"] if shared is not None else 0,
        block=block,
        parameters=tuple(parameters[ordinal] for ordinal in range(len(parameters))),
    )


def _spills(text: bytes) -> tuple[int, int]:
    """Bytes that the code's STL and LDL instructions name, each counted once."""
    stores = loads = 0
    for low, high in struct.iter_unpack("<QQ", text[: len(text) // 16 * 16]):
        opcode = low & 0xFFF
        if opcode == _OPCODE_STL:
            stores += _ACCESS_BYTES[(high >> 9) & 7]
        elif opcode == _OPCODE_LDL:
            loads += _ACCESS_BYTES[(high >> 9) & 7]
    return stores, loads
