"""wgmma: fragments, descriptors and flags. Operands are laid out from the ISA's canonical layouts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ptx_snippets.copies import fill_from
from ptx_snippets.framework import MASK64, program
from ptx_snippets.layouts import Operand, halves, numbers, operand

Array = Any
_MODES = {0: 0, 128: 1, 64: 2, 32: 3}
_THREAD = np.arange(128)


def descriptor_constant(layout: Operand) -> int:
    """All of a descriptor but its start."""
    return (layout.leading >> 4) << 16 | (layout.stride >> 4) << 32 | _MODES[layout.swizzle_bytes] << 62


def accumulator_places(columns: int) -> tuple[Array, Array]:
    """Row and column of D that each register of each thread holds, [registers, threads]."""
    register = np.arange(columns // 2)[:, None]
    warp, lane = _THREAD // 32, _THREAD % 32
    row = 16 * warp + lane // 4 + 8 * (register // 2 % 2)
    column = 8 * (register // 4) + 2 * (lane % 4) + register % 2
    return row, column


def a_fragments(a: Array) -> Array:
    """The registers that hold A [64, 16 steps], [4 steps, threads]: two neighbours along k in each."""
    words = []
    warp, lane = _THREAD // 32, _THREAD % 32
    for step in range(a.shape[1] // 16):
        for register in range(4):
            row = 16 * warp + lane // 4 + 8 * (register % 2)
            column = 16 * step + 2 * (lane % 4) + 8 * (register // 2)
            words.append(a[row, column].astype(np.uint32) | a[row, column + 1].astype(np.uint32) << 16)
    return np.array(words)


@dataclass(frozen=True)
class _Case:
    name: str
    columns: int
    kind: str
    a: Operand
    b: Operand
    a_in_registers: bool = False
    a_sign: int = 1
    b_sign: int = 1
    accumulates: bool = True

    def depth(self) -> int:
        return min(self.a.k, self.b.k)


def _start(register: str, base: str, offset: int, constant: int) -> str:
    return f"""
        add.u32 %r31, {base}, {offset};
        shr.u32 %r31, %r31, 4;
        and.b32 %r31, %r31, 0x3fff;
        cvt.u64.u32 {register}, %r31;
        or.b64 {register}, {register}, {constant & MASK64:#x};
    """


def _add(case: _Case, seed: int) -> None:
    depth, columns = case.depth(), case.columns
    a, b, c = numbers(64, case.a.k, seed), numbers(columns, case.b.k, seed + 1), numbers(64, columns, seed + 2, 100)
    a_image = case.a.image(halves(a, case.kind))
    image = np.concatenate([a_image, case.b.image(halves(b, case.kind))])
    registers = [f"%c{n}" for n in range(columns // 2)]
    opcode = f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{case.kind}.{case.kind}"
    lines = [
        f".shared .align 1024 .b8 room[{len(image)}];\nmov.u32 %r20, room;\n.reg .b32 %c<{columns // 2}>;",
        fill_from("image", len(image), 128),
        "ld.param.u64 %d4, [initial];\nmad.wide.u32 %d4, %thread, 4, %d4;",
        *(f"ld.global.b32 {register}, [%d4 + {512 * n}];" for n, register in enumerate(registers)),
    ]
    if case.a_in_registers:
        lines.append("ld.param.u64 %d4, [fragments];\nmad.wide.u32 %d4, %thread, 4, %d4;")
        lines += [f"ld.global.b32 %r{32 + n}, [%d4 + {512 * n}];" for n in range(depth // 4)]
    lines += [
        f"setp.ne.u32 %p4, %thread, {'999' if case.accumulates else '%thread'};\nsetp.eq.u32 %p5, %thread, %thread;",
        "wgmma.fence.sync.aligned;",
    ]
    for step in range(depth // 16):
        if case.a_in_registers:
            first = f"{{{', '.join(f'%r{32 + 4 * step + n}' for n in range(4))}}}"
        else:
            lines.append(_start("%d5", "%r20", step * case.a.step(), descriptor_constant(case.a)))
            first = "%d5"
        lines.append(_start("%d6", "%r20", len(a_image) + step * case.b.step(), descriptor_constant(case.b)))
        flags = [case.a_sign, case.b_sign]
        flags += [int(case.b.mn_major)] if case.a_in_registers else [int(case.a.mn_major), int(case.b.mn_major)]
        scale = "%p5" if step else "%p4"
        lines.append(f"{opcode} {{{', '.join(registers)}}}, {first}, %d6, {scale}, {', '.join(map(str, flags))};")
    lines += ["wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned 0;"]
    lines += [f"STORE {n}, {register};" for n, register in enumerate(registers)]
    row, column = accumulator_places(columns)

    def answer(buffers: Mapping[str, Array]) -> Mapping[str, Array]:
        product = (case.a_sign * a[:, :depth]) @ (case.b_sign * b[:, :depth]).T
        total = product + (c if case.accumulates else 0)
        return {"out": total[row, column].astype(np.float32).view(np.uint32)}

    inputs = {"image": image, "initial": c[row, column]}
    if case.a_in_registers:
        inputs["fragments"] = a_fragments(halves(a[:, :depth], case.kind))
    program(
        f"wgmma-{case.name}", "\n".join(lines), answer,
        holds=(opcode, "wgmma.fence.sync.aligned", "wgmma.commit_group.sync.aligned", "wgmma.wait_group.sync.aligned"),
        inputs=inputs, rows=columns // 2, threads=128,
    )  # fmt: skip


def _cases() -> list[_Case]:
    cases = []
    for number, swizzle in enumerate((0, 32, 64, 128)):
        for a_mn in (False, True):
            for b_mn in (False, True):
                name = f"swizzle-{swizzle}-a-{'mn' if a_mn else 'k'}-b-{'mn' if b_mn else 'k'}"
                kind = ("f16", "bf16")[(number + a_mn + b_mn) % 2]
                wide = a_mn != b_mn
                cases.append(
                    _Case(name, 64, kind, operand(64, a_mn, swizzle, wide=wide), operand(64, b_mn, swizzle, wide=not wide))
                )  # fmt: skip
    a = operand(64, False, 128)
    cases += [
        _Case("n8", 8, "bf16", a, operand(8, False, 128)),
        _Case("n8-b-mn", 8, "f16", operand(64, True, 128), operand(8, True, 0)),
        _Case("n128", 128, "f16", a, operand(128, False, 64)),
        _Case("n128-b-mn", 128, "bf16", a, operand(128, True, 128)),
        _Case("n256", 256, "bf16", a, operand(256, False, 128)),
        _Case("n256-b-mn", 256, "f16", operand(64, True, 64), operand(256, True, 128), accumulates=False),
        _Case("n24-n-of-no-power-of-two", 24, "f16", a, operand(24, False, 32)),
        _Case("a-in-registers", 64, "bf16", a, operand(64, False, 128), a_in_registers=True),
        _Case("a-in-registers-b-mn", 128, "f16", a, operand(128, True, 128), a_in_registers=True, a_sign=-1),
        _Case("negated-a", 64, "f16", a, operand(64, False, 128), a_sign=-1),
        _Case("negated-b", 64, "bf16", a, operand(64, True, 128), b_sign=-1, accumulates=False),
        _Case("negated-both", 8, "f16", a, operand(8, False, 128), a_sign=-1, b_sign=-1),
        _Case("scale-d-0", 64, "f16", a, operand(64, False, 128), accumulates=False),
    ]
    return cases


for _number, _case in enumerate(_cases()):
    _add(_case, 100 + 3 * _number)


def _groups() -> None:
    """Two groups in flight: the first result is used while the second is still being computed."""
    layout_a, layout_b = operand(64, False, 128), operand(8, False, 128)
    a, b = numbers(64, 64, 301), numbers(8, 64, 302)
    a_image = layout_a.image(halves(a, "bf16"))
    image = np.concatenate([a_image, layout_b.image(halves(b, "bf16"))])
    opcode = "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16"
    lines = [
        f".shared .align 1024 .b8 room[{len(image)}];\nmov.u32 %r20, room;\n.reg .b32 %c<4>, %e<4>;",
        fill_from("image", len(image), 128),
        "setp.ne.u32 %p4, %thread, %thread;\nsetp.eq.u32 %p5, %thread, %thread;\nwgmma.fence.sync.aligned;",
    ]
    for group, registers in enumerate(("%c", "%e")):
        for step in range(2):
            at = 2 * group + step
            lines.append(_start("%d5", "%r20", 32 * at, descriptor_constant(layout_a)))
            lines.append(_start("%d6", "%r20", len(a_image) + 32 * at, descriptor_constant(layout_b)))
            fragment = ", ".join(f"{registers}{n}" for n in range(4))
            lines.append(f"{opcode} {{{fragment}}}, %d5, %d6, {'%p5' if step else '%p4'}, 1, 1, 0, 0;")
        lines.append("wgmma.commit_group.sync.aligned;")
    for group, registers in enumerate(("%c", "%e")):
        lines.append(f"wgmma.wait_group.sync.aligned {1 - group};")
        lines += [f"STORE {4 * group + n}, {registers}{n};" for n in range(4)]
    row, column = accumulator_places(8)

    def answer(buffers: Mapping[str, Array]) -> Mapping[str, Array]:
        parts = [(a[:, 32 * n : 32 * n + 32] @ b[:, 32 * n : 32 * n + 32].T)[row, column] for n in range(2)]
        return {"out": np.concatenate(parts).astype(np.float32).view(np.uint32)}

    program(
        "wgmma-groups", "\n".join(lines), answer, holds=(opcode, "wgmma.wait_group.sync.aligned"),
        inputs={"image": image}, rows=8, threads=128,
    )  # fmt: skip


_groups()
