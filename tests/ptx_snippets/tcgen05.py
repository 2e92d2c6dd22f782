"""tcgen05: tensor memory and the MMAs that write it. Operands are laid out from the ISA's canonical layouts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ptx_snippets.copies import fill_from
from ptx_snippets.framework import MASK32, MASK64, poison, program
from ptx_snippets.layouts import Operand, halves, numbers, operand

Array = Any
_MODES = {0: 0, 128: 2, 64: 4, 32: 6}
_D, _A = 32, 320  # the columns where D and A lie, of the 512 that are allocated

_BEGIN = """
.shared .align 8 .b8 slot[16];
mov.u32 %r22, slot;
setp.eq.u32 %p1, %thread, 0;
setp.ne.u32 %p7, %warp, 0;
@%p7 bra ALLOCATED;
tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r22], 512;
tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
@%p1 mbarrier.init.shared::cta.b64 [%r22 + 8], 1;
@%p1 fence.mbarrier_init.release.cluster;
ALLOCATED: tcgen05.fence::before_thread_sync;
bar.sync 0;
tcgen05.fence::after_thread_sync;
ld.shared.b32 %r24, [%r22];
shl.b32 %r25, %warp, 21;
add.u32 %r25, %r24, %r25;
"""
_END = """
tcgen05.fence::before_thread_sync;
bar.sync 0;
tcgen05.fence::after_thread_sync;
@%p7 bra RELEASED;
tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r24, 512;
RELEASED:
"""
_HELD = (
    "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32",
    "tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned",
    "tcgen05.dealloc.cta_group::1.sync.aligned.b32",
    "tcgen05.fence::before_thread_sync",
    "tcgen05.fence::after_thread_sync",
    "tcgen05.wait::ld.sync.aligned",
    "tcgen05.wait::st.sync.aligned",
)


def _registers(prefix: str, count: int) -> str:
    return "{" + ", ".join(f"{prefix}{n}" for n in range(count)) + "}"


def _chunks(columns: int) -> list[tuple[int, int]]:
    """(first column, columns) of moves that are powers of two and at most 32."""
    found, at = [], 0
    while at < columns:
        size = min(32, 1 << (columns - at).bit_length() - 1)
        found.append((at, size))
        at += size
    return found


def _fill(name: str, column: int, columns: int) -> str:
    """Thread t writes row t of an input to lane t of tensor memory."""
    lines = [f"ld.param.u64 %d4, [{name}];\nmad.wide.u32 %d4, %thread, {4 * columns}, %d4;"]
    for at, size in _chunks(columns):
        lines += [f"ld.global.b32 %c{n}, [%d4 + {4 * (at + n)}];" for n in range(size)]
        lines.append(f"add.u32 %r26, %r25, {column + at};")
        lines.append(f"tcgen05.st.sync.aligned.32x32b.x{size}.b32 [%r26], {_registers('%c', size)};")
    return "\n".join([*lines, "tcgen05.wait::st.sync.aligned;"])


def _read(column: int, columns: int) -> str:
    """Thread t stores lane t of tensor memory as row t of output ``cells``."""
    lines = [f"ld.param.u64 %d4, [cells];\nmad.wide.u32 %d4, %thread, {4 * columns}, %d4;"]
    for at, size in _chunks(columns):
        lines.append(f"add.u32 %r26, %r25, {column + at};")
        lines.append(f"tcgen05.ld.sync.aligned.32x32b.x{size}.b32 {_registers('%c', size)}, [%r26];")
        lines.append("tcgen05.wait::ld.sync.aligned;")
        lines += [f"st.global.b32 [%d4 + {4 * (at + n)}], %c{n};" for n in range(size)]
    return "\n".join(lines)


# --- moves -----------------------------------------------------------------------------------------------------------


def _cell(shape: str, register: int, lane: int) -> tuple[int, int]:
    """(lane of tensor memory, column) that a register of a lane is, from the figures of the ISA."""
    if shape == "32x32b":
        return lane, register
    if shape == "16x256b":  # 8 columns a repetition: pairs of a row in 4 lanes, then the rows 8 further down
        repetition, part = divmod(register, 4)
        return lane // 4 + 8 * (part // 2), 8 * repetition + 2 * (lane % 4) + part % 2
    repetition, part = divmod(register, 2)  # 16x128b: 4 columns a repetition
    return lane // 4 + 8 * part, 4 * repetition + lane % 4


_COUNTS = {"32x32b": 1, "16x256b": 4, "16x128b": 2}
_MOVES = [("32x32b", 1), ("32x32b", 2), ("32x32b", 16), ("32x32b", 64), ("16x256b", 1), ("16x256b", 2), ("16x256b", 8),
          ("16x128b", 1), ("16x128b", 2), ("16x128b", 16)]  # fmt: skip


def _moves() -> None:
    """Each form loads what plain stores have written, and stores what plain loads then read."""
    columns = 64
    for shape, repetitions in _MOVES:
        count = _COUNTS[shape] * repetitions
        halves_of_lanes = (0, 16) if shape != "32x32b" else (0,)
        lines = [".reg .b32 %c<64>;", _BEGIN, _fill("initial", _D, columns)]
        for n, half in enumerate(halves_of_lanes):
            lines.append(f"add.u32 %r26, %r25, {(half << 16) + _D + 3};" if count < 32 and shape == "32x32b" else
                         f"add.u32 %r26, %r25, {(half << 16) + _D};")  # fmt: skip
            lines.append(f"tcgen05.ld.sync.aligned.{shape}.x{repetitions}.b32 {_registers('%c', count)}, [%r26];")
            lines.append("tcgen05.wait::ld.sync.aligned;")
            lines += [f"STORE {count * n + r}, %c{r};" for r in range(count)]
            lines += [f"mad.lo.u32 %c{r}, %thread, 1000, {r + 500000 * n};" for r in range(count)]
            lines.append(f"tcgen05.st.sync.aligned.{shape}.x{repetitions}.b32 [%r26], {_registers('%c', count)};")
            lines.append("tcgen05.wait::st.sync.aligned;")
        lines += [_read(_D, columns), _END]

        def answer(
            buffers: Mapping[str, Array],
            shape: str = shape,
            count: int = count,
            parts: tuple[int, ...] = halves_of_lanes,
        ) -> Mapping[str, Array]:
            cells = buffers["initial"].copy()
            out = np.zeros((count * len(parts), 128), np.uint32)
            shift = 3 if shape == "32x32b" and count < 32 else 0
            for n, half in enumerate(parts):
                for register in range(count):
                    for thread in range(128):
                        lane, column = _cell(shape, register, thread % 32)
                        place = 32 * (thread // 32) + half + lane, column + shift
                        out[count * n + register, thread] = cells[place]
                        cells[place] = 1000 * thread + register + 500000 * n
            return {"out": out, "cells": cells}

        program(
            f"tcgen05-moves-{shape}-x{repetitions}",
            "\n".join(lines),
            answer,
            holds=(
                *_HELD,
                f"tcgen05.ld.sync.aligned.{shape}.x{repetitions}.b32",
                f"tcgen05.st.sync.aligned.{shape}.x{repetitions}.b32",
            ),
            inputs={"initial": np.arange(128 * columns, dtype=np.uint32).reshape(128, columns) * np.uint32(7919)},
            outputs={"cells": poison((128, columns))},
            rows=count * len(halves_of_lanes),
            threads=128,
            target="sm_100a",
        )


_moves()

# --- MMA -------------------------------------------------------------------------------------------------------------


def descriptor_constant(layout: Operand) -> int:
    """All of a shared memory descriptor but its start: the offsets, the constant 1 of this version, the swizzle."""
    return (
        (layout.leading >> 4) << 16 | (layout.stride >> 4) << 32 | 1 << 46 | _MODES[layout.swizzle_bytes] << 61
    ) & MASK64


@dataclass(frozen=True)
class _Case:
    name: str
    rows: int
    columns: int
    a_kind: str
    b_kind: str
    a: Operand
    b: Operand
    a_in_tensor_memory: bool = False
    a_sign: int = 1
    b_sign: int = 1
    accumulates: bool = True
    masks: tuple[int, ...] = ()

    def instruction_descriptor(self) -> int:
        """fp32 results, the kinds and signs of A and B, which of them are not K-major, and the shape."""
        kinds = {"f16": 0, "bf16": 1}
        return (
            1 << 4
            | kinds[self.a_kind] << 7
            | kinds[self.b_kind] << 10
            | int(self.a_sign < 0) << 13
            | int(self.b_sign < 0) << 14
            | int(self.a.mn_major) << 15
            | int(self.b.mn_major) << 16
            | self.columns // 8 << 17
            | self.rows // 16 << 24
        )


def lanes_of(rows: int) -> Array:
    """The lane of tensor memory of each row: 64 rows take the first 16 lanes of every 32."""
    row = np.arange(rows)
    return row if rows == 128 else 32 * (row // 16) + row % 16


def _start(register: str, base: str, offset: int, constant: int) -> str:
    return f"""
        add.u32 %r31, {base}, {offset};
        shr.u32 %r31, %r31, 4;
        and.b32 %r31, %r31, 0x3fff;
        cvt.u64.u32 {register}, %r31;
        or.b64 {register}, {register}, {constant:#x};
    """


def _add(case: _Case, seed: int) -> None:
    depth = min(case.a.k, case.b.k)
    a, b = numbers(case.rows, case.a.k, seed), numbers(case.columns, case.b.k, seed + 1)
    initial = numbers(128, case.columns, seed + 2, 100)
    a_image = case.a.image(halves(a, case.a_kind))
    image = np.concatenate([a_image, case.b.image(halves(b, case.b_kind))])
    inputs = {"image": image, "initial": initial.view(np.uint32)}
    lines = [
        f".shared .align 1024 .b8 room[{len(image)}];\nmov.u32 %r20, room;\n.reg .b32 %c<32>;",
        _BEGIN,
        _fill("initial", _D, case.columns),
    ]
    if case.a_in_tensor_memory:
        cells = np.zeros((128, depth // 2), np.uint32)
        bits = halves(a[:, :depth], case.a_kind).astype(np.uint32)
        cells[lanes_of(case.rows)] = bits[:, ::2] | bits[:, 1::2] << 16
        inputs["a_cells"] = cells
        lines.append(_fill("a_cells", _A, depth // 2))
    lines += [
        "tcgen05.fence::before_thread_sync;",
        fill_from("image", len(image), 128),
        "tcgen05.fence::after_thread_sync;",
        "@!%p1 bra ISSUED;",
        f"add.u32 %r27, %r24, {_D};\nmov.u32 %r28, {case.instruction_descriptor():#x};",
        f"setp.{'eq' if case.accumulates else 'ne'}.u32 %p4, %thread, %thread;\nsetp.eq.u32 %p5, %thread, %thread;",
        *(f"mov.u32 %r{40 + n}, {mask:#x};" for n, mask in enumerate(case.masks)),
    ]
    opcode = "tcgen05.mma.cta_group::1.kind::f16"
    for step in range(depth // 16):
        if case.a_in_tensor_memory:
            lines.append(f"add.u32 %r29, %r24, {_A + 8 * step};")
            first = "[%r29]"
        else:
            lines.append(_start("%d5", "%r20", step * case.a.step(), descriptor_constant(case.a)))
            first = "%d5"
        lines.append(_start("%d6", "%r20", len(a_image) + step * case.b.step(), descriptor_constant(case.b)))
        masks = f" {{{', '.join(f'%r{40 + n}' for n in range(4))}}}," if case.masks else ""
        lines.append(f"{opcode} [%r27], {first}, %d6, %r28,{masks} {'%p5' if step else '%p4'};")
    lines += [
        "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r22 + 8];",
        "ISSUED: mbarrier.try_wait.parity.shared::cta.b64 %p6, [%r22 + 8], 0;\n@!%p6 bra ISSUED;",
        "tcgen05.fence::after_thread_sync;",
        _read(_D, case.columns),
        _END,
    ]

    def answer(buffers: Mapping[str, Array]) -> Mapping[str, Array]:
        cells = initial.copy()
        product = (case.a_sign * a[:, :depth]) @ (case.b_sign * b[:, :depth]).T
        for row, lane in enumerate(lanes_of(case.rows)):
            if case.masks and case.masks[lane // 32] >> int(lane) % 32 & 1:
                continue
            # Without the input every step but the first adds to what the one before has left.
            cells[lane] = product[row] + (initial[lane] if case.accumulates else 0)
        return {"cells": cells.astype(np.float32).view(np.uint32)}

    program(
        f"tcgen05-{case.name}", "\n".join(lines), answer,
        holds=(*_HELD, opcode, "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64"),
        inputs=inputs, outputs={"out": poison(1), "cells": poison((128, case.columns))}, threads=128, target="sm_100a",
    )  # fmt: skip


def _cases() -> list[_Case]:
    cases = []
    for number, swizzle in enumerate((0, 32, 64, 128)):
        for a_mn in (False, True):
            for b_mn in (False, True):
                kinds = ("f16", "bf16")[(number + a_mn + b_mn) % 2]
                rows = 128 if (number + a_mn) % 2 else 64
                name = f"swizzle-{swizzle}-a-{'mn' if a_mn else 'k'}-b-{'mn' if b_mn else 'k'}-m{rows}"
                a, b = operand(rows, a_mn, swizzle, wide=a_mn == b_mn), operand(64, b_mn, swizzle, wide=a_mn != b_mn)
                cases.append(_Case(name, rows, 64, kinds, kinds, a, b))
    a64, a128 = operand(64, False, 128), operand(128, False, 128)
    b16, b64 = operand(16, False, 128), operand(64, False, 128)
    masks = (0x0000FFF1, 0x80000001, 0, MASK32)
    cases += [
        _Case("m128-n16", 128, 16, "bf16", "bf16", a128, b16),
        _Case("m64-n8", 64, 8, "f16", "f16", a64, operand(8, False, 128)),
        _Case("m64-n48-b-mn", 64, 48, "f16", "f16", a64, operand(48, True, 32)),
        _Case("m128-n128", 128, 128, "f16", "f16", a128, operand(128, True, 128)),
        _Case("m128-n256", 128, 256, "bf16", "bf16", operand(128, False, 64), operand(256, False, 64)),
        _Case("m64-n256-b-mn", 64, 256, "f16", "f16", a64, operand(256, True, 128), accumulates=False),
        _Case("kinds-that-differ", 128, 16, "f16", "bf16", a128, b16),
        _Case("a-in-tensor-memory-m128", 128, 64, "bf16", "bf16", a128, b64, a_in_tensor_memory=True),
        _Case("a-in-tensor-memory-m64", 64, 64, "f16", "f16", a64, operand(64, True, 128), a_in_tensor_memory=True),
        _Case("negated-a", 128, 16, "f16", "f16", a128, b16, a_sign=-1),
        _Case("negated-b", 64, 16, "bf16", "bf16", a64, b16, b_sign=-1),
        _Case("negated-both", 64, 16, "bf16", "bf16", a64, b16, a_sign=-1, b_sign=-1, accumulates=False),
        _Case("lanes-left-out-m128", 128, 16, "f16", "f16", a128, b16, masks=masks),
        _Case("lanes-left-out-m64", 64, 16, "bf16", "bf16", a64, b16, masks=masks, accumulates=False),
        _Case("without-input", 128, 64, "f16", "f16", a128, b64, accumulates=False),
    ]
    return cases


for _number, _case in enumerate(_cases()):
    _add(_case, 500 + 3 * _number)


def _allocations() -> None:
    """Several allocations at once do not overlap, and what is released can be had again."""
    lines = [
        ".shared .align 8 .b8 slots[32];\nmov.u32 %r22, slots;\nsetp.ne.u32 %p7, %warp, 0;\n@%p7 bra DONE;",
        *(
            f"tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r22 + {4 * n}], {columns};"
            for n, columns in enumerate((64, 32, 128))
        ),
        "bar.warp.sync -1;",
        *(f"ld.shared.b32 %r{30 + n}, [%r22 + {4 * n}];" for n in range(3)),
    ]
    for n in range(3):
        lines.append(f"mov.u32 %r10, {n + 5};\nadd.u32 %r11, %r10, %lane;")
        lines.append(f"tcgen05.st.sync.aligned.32x32b.x1.b32 [%r{30 + n}], {{%r11}};")
    lines.append("tcgen05.wait::st.sync.aligned;")
    for n in range(3):
        lines.append(f"tcgen05.ld.sync.aligned.32x32b.x1.b32 {{%r12}}, [%r{30 + n}];\ntcgen05.wait::ld.sync.aligned;")
        lines.append(f"STORE {n}, %r12;")
    lines.append("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r31, 32;")
    lines.append("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r30, 64;")
    lines.append("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r22 + 16], 256;\nbar.warp.sync -1;")
    lines.append("ld.shared.b32 %r33, [%r22 + 16];")
    lines.append("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;")
    lines.append("mov.u32 %r11, 77;\ntcgen05.st.sync.aligned.32x32b.x1.b32 [%r33 + 200], {%r11};")
    lines.append("tcgen05.wait::st.sync.aligned;")
    lines.append(
        "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r12}, [%r32];\ntcgen05.wait::ld.sync.aligned;\nSTORE 3, %r12;"
    )
    lines.append("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r32, 128;")
    lines.append("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r33, 256;\nDONE:")
    program(
        "tcgen05-allocations", "\n".join(lines),
        lambda buffers: {"out": np.arange(32, dtype=np.uint32) + np.array([[5], [6], [7], [7]], np.uint32)},
        holds=_HELD[:3], rows=4, target="sm_100a",
    )  # fmt: skip


_allocations()
