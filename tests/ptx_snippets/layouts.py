"""The canonical layouts of matrix operands in shared memory, as the PTX ISA writes them down.

A layout is a nest of shapes and strides, followed by a swizzle of the byte offset. The tables below are those of the
ISA's section on canonical layouts, in elements; ``T`` is 128 bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ptx_snippets.copies import swizzle_offsets

Array = Any
_T = 8  # 16-bit elements in 128 bits


def _mode(index: Array, shape: tuple[int, ...], stride: tuple[int, ...]) -> Array:
    """The offset of an index into one mode; the last extent takes what is left."""
    offset = np.zeros_like(index)
    for position, (extent, step) in enumerate(zip(shape, stride, strict=True)):
        digit = index if position == len(shape) - 1 else index % extent
        offset = offset + digit * step
        index = index // extent
    return offset


@dataclass(frozen=True)
class Operand:
    """A 16-bit matrix operand [mn, k] in shared memory: its layout, and the descriptor's two byte offsets."""

    mn: int
    k: int
    mn_major: bool
    swizzle_bytes: int
    leading: int
    stride: int

    def offsets(self) -> Array:
        """The byte offset of every element, [mn, k]."""
        mn, k = np.arange(self.mn)[:, None], np.arange(self.k)[None, :]
        leading, stride = self.leading // 2, self.stride // 2
        chunks = max(1, self.swizzle_bytes // 16)
        if self.mn_major and self.swizzle_bytes:  # ((T,chunks,m),(8,k)):((1,T,LBO),(chunks T,SBO))
            offset = _mode(mn, (_T, chunks, 1), (1, _T, leading)) + _mode(k, (8, 1), (chunks * _T, stride))
        elif self.mn_major:  # ((T,1,m),(8,k)):((1,T,SBO),(T,LBO))
            offset = _mode(mn, (_T, 1, 1), (1, _T, stride)) + _mode(k, (8, 1), (_T, leading))
        elif self.swizzle_bytes:  # ((8,m),(T,2k)):((chunks T,SBO),(1,T))
            offset = _mode(mn, (8, 1), (chunks * _T, stride)) + _mode(k, (_T, 1), (1, _T))
        else:  # ((8,m),(T,2k)):((T,SBO),(1,LBO))
            offset = _mode(mn, (8, 1), (_T, stride)) + _mode(k, (_T, 1), (1, leading))
        linear = 2 * offset
        span = -(-(int(linear.max()) + 2) // 1024) * 1024
        return swizzle_offsets(span, self.swizzle_bytes)[linear]

    def image(self, matrix: Array) -> Array:
        """The bytes of shared memory, from an aligned start on, that hold a matrix [mn, k]."""
        places = self.offsets()
        image = np.full(-(-(int(places.max()) + 2) // 1024) * 1024, 0x7F, np.uint8)  # NaN in between
        assert len(np.unique(places)) == matrix.size
        image[places], image[places + 1] = matrix & 0xFF, matrix >> 8
        return image

    def step(self) -> int:
        """Bytes from one descriptor's start to the next, 16 elements further along k."""
        if self.mn_major:
            return 2 * (self.stride if self.swizzle_bytes else self.leading)
        return 32 if self.swizzle_bytes else 2 * self.leading


def operand(mn: int, mn_major: bool, swizzle_bytes: int, *, wide: bool = False) -> Operand:
    """An operand as deep as one line of its swizzle, or 32 elements. ``wide`` leaves room between its parts."""
    if swizzle_bytes:
        k = 64 if mn_major else swizzle_bytes // 2
        atom = 8 * swizzle_bytes
        if mn_major:  # atoms of 8 elements along k lie one after the other, then those along mn
            stride = atom * (2 if wide else 1)
            return Operand(mn, k, True, swizzle_bytes, stride * (k // 8), stride)
        return Operand(mn, k, False, swizzle_bytes, 16, atom * (2 if wide else 1))
    k = 32
    if mn_major:
        stride = 128 + (16 if wide else 0)
        return Operand(mn, k, True, 0, stride * (mn // 8) + 128, stride)
    leading = 128 + (16 if wide else 0)
    return Operand(mn, k, False, 0, leading, leading * (k // 8) + 16)


def numbers(rows: int, columns: int, seed: int, bound: int = 4) -> Array:
    """Small integers: their sums are exact in fp32 in every order."""
    return np.random.default_rng(seed).integers(-bound, bound + 1, (rows, columns)).astype(np.float32)


def halves(matrix: Array, kind: str) -> Array:
    """The bits of small integers as f16 or bf16, which hold them exactly."""
    if kind == "f16":
        return matrix.astype(np.float16).view(np.uint16)
    return (matrix.astype(np.float32).view(np.uint32) >> np.uint32(16)).astype(np.uint16)
