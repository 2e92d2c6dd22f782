"""Every operand has the type that the ISA gives to its place: what ptxas refuses the machine refuses, with its line."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("numpy")

import ptx_snippets
from ptx_snippets.framework import kernel

from dsa_planner.kernels.ptx import decode, operands, parser

KINDS = ("pred", "b8", "u8", "b16", "u16", "s16", "f16", "b32", "u32", "s32", "f32", "b64", "u64", "s64", "f64")
_REGISTERS = "".join(f".reg .{kind} %{kind}_<140>;\n" for kind in KINDS)
_VERSIONS = {"sm_90a": "8.6", "sm_100a": "8.8"}

WRONG = [
    ("add.f32 %f32_1, %u32_1, %u64_2", "register %u32_1 of type .u32 stands where one of type .f32 is due"),
    ("setp.ltu.f32 %u32_1, %f32_1, %f32_2", "register %u32_1 of type .u32 stands where a predicate is due"),
    ("add.u32 %u32_1, %pred_1, %u32_2", "register %pred_1 of type .pred stands where one of type .u32 is due"),
    ("and.pred %pred_1, %pred_2, %b32_1", "register %b32_1 of type .b32 stands where a predicate is due"),
    ("@%u32_1 add.u32 %u32_1, %u32_2, %u32_3", "register %u32_1 of type .u32 stands where a predicate is due"),
    ("shl.b64 %b64_1, %b64_2, %b64_3", "register %b64_3 of type .b64 stands where one of type .u32 is due"),
    ("mul.wide.u32 %u32_1, %u32_2, %u32_3", "register %u32_1 of type .u32 stands where one of type .u64 is due"),
    ("shfl.sync.idx.b32 %b32_1|%b32_2, %b32_3, 0, 31, -1", "register %b32_2 of type .b32 stands where a predicate is due"),
    ("ld.global.u32 %u32_1, [%f64_1]", "%f64_1 of type .f64 stands where an address of 32 or 64 bits is due"),
    ("ld.global.u32 %u32_1, [%pred_1]", "%pred_1 of type .pred stands where an address of 32 or 64 bits is due"),
    ("ld.global.v2.b32 {%b32_1, %b64_2}, [%u64_1]", "the registers of a vector have one width: {%b32_1, %b64_2}"),
    ("mov.u64 %u64_1, %tid.x", "%tid.x has 32 bits, and 64 are due"),
    ("cvt.u64.u32 %u64_1, %u64_2", "register %u64_2 has more bits than the machine knows for .u32"),
    ("add.u32 %u32_1, !%u32_2, 5", "only a predicate can be negated: !%u32_2"),
    ("add.u32 %u32_1, _, 5", "_ takes a result and has no value"),
    ("add.u32 %u32_1, %u32_2, %u32_3, %u32_4", "add.u32 has 3 operands, not 4"),
    ("add.u32 %u32_1, %u32_2", "add.u32 has 3 operands, not 2"),
    ("ret 5", "operand 5 is one too many"),
    ("bar.sync 0, 64, 64", "bar.sync has 1 or 2 operands, not 3"),
    ("ld.global.u32 %u32_1, [%u64_1], %u64_2", "a cache policy goes with .L2::cache_hint"),
    ("ld.global.L2::cache_hint.u32 %u32_1, [%u64_1]", "a cache policy goes with .L2::cache_hint"),
    ("ld.global.u32 %u32_1, [%u64_1, 4]", "this address has no coordinates: [%u64_1, {4}]"),
    ("ld.global.u32 %u32_1, [room]", "room does not lie in the memory that is accessed here"),
    ("ld.global.u32 %u32_1, [out]", "out does not lie in the memory that is accessed here"),
    ("mov.u32 %u32_1, out", "the address of parameter out has 64 bits"),
    ("mov.f32 %f32_1, room", "the address of room stands where a value of type .f32 is due"),
    ("setp.eq.u32 %pred_1|%pred_2|%pred_3, %u32_1, %u32_2", "operand '%pred_2|%pred_3' is not understood"),
    ("bra 5", "5 is not a label"),
    ("bra [%u32_1]", "[%u32_1] is not a label"),
    ("wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%f32_1, %f32_2, %f32_3, _}, %b64_1, %b64_2, %pred_1, 1, 1, 0, 0",
     "wgmma reads its registers, and _ has no value"),
]  # fmt: skip

OUT_OF_RANGE = [
    ("add.u32 %u32_1, %u32_2, 4294967296", "4294967296 is out of the range of .u32"),
    ("add.s32 %s32_1, %s32_2, -2147483649", "-2147483649 is out of the range of .s32"),
    ("add.u16 %u16_1, %u16_2, 65536", "65536 is out of the range of .u16"),
    ("st.global.u8 [%u64_1], 256", "256 is out of the range of .u8"),
    ("add.u64 %u64_1, %u64_2, 18446744073709551616", "literal '18446744073709551616' does not fit into 64 bits"),
    ("add.u32 %u32_1, %u32_2, " + "9" * 5000, "does not fit into 64 bits"),
    ("add.u32 %u32_1, %u32_2, 0f3F800000", "0f3F800000 stands where a value of type .u32 is due"),
    ("add.f32 %f32_1, %f32_2, 1", "the whole number 1 stands where a value of type .f32 is due"),
    ("add.f32 %f32_1, %f32_2, 0d3FF0000000000000", "0d3FF0000000000000 stands where a value of type .f32 is due"),
    ("selp.u32 %u32_1, %u32_2, %u32_3, 2", "2 stands where a predicate is due"),
    ("ld.global.u32 %u32_1, [%u64_1+4294967296]", "an offset has 32 bits: [%u64_1+4294967296]"),
    ("ld.global.u32 %u32_1, [%u64_1+x]", "offset 'x' is not a whole number"),
    ("lop3.b32 %b32_1, %b32_2, %b32_3, %b32_4, 256", "256 has to be a literal from 0 to 255"),
    ("lop3.b32 %b32_1, %b32_2, %b32_3, %b32_4, %b32_5", "%b32_5 has to be a literal"),
    ("wgmma.wait_group.sync.aligned 4294967295", "4294967295 has to be a literal from 0 to 7"),
    ("wgmma.wait_group.sync.aligned -1", "-1 has to be a literal from 0 to 7"),
    ("cp.async.wait_group -1", "-1 has to be a literal from 0 to 2147483647"),
    ("cp.async.wait_group 4294967295", "4294967295 has to be a literal from 0 to 2147483647"),
    ("cp.async.bulk.wait_group -1", "-1 has to be a literal from 0 to 2147483647"),
    ("bar.sync 16", "16 has to be a literal from 0 to 15"),
    ("bar.sync -1", "-1 has to be a literal from 0 to 15"),
    ("bar.sync 1, 33", "the threads of a barrier are a multiple of 32"),
    ("setmaxnreg.inc.sync.aligned.u32 41", "a number of registers is a multiple of 8"),
    ("setmaxnreg.inc.sync.aligned.u32 264", "264 has to be a literal from 24 to 256"),
    ("shfl.sync.idx.b32 %b32_1, %b32_2, 0, 31, 0", "a member mask without members"),
    ("shfl.sync.idx.b32 %b32_1, %b32_2, 0, 31, 4294967296", "4294967296 is out of the range of .u32"),
    ("mbarrier.init.shared.b64 [%u32_1], 0", "0 has to be a literal from 1 to 1048575"),
    ("mbarrier.init.shared.b64 [%u32_1], 1048576", "1048576 has to be a literal from 1 to 1048575"),
    ("mbarrier.arrive.expect_tx.shared.b64 _, [%u32_1], -16", "-16 has to be a literal from 0 to 1048575"),
    ("mbarrier.try_wait.parity.shared.b64 %pred_1, [%u32_1], 2", "2 has to be a literal from 0 to 1"),
    ("cp.async.ca.shared.global [%u32_1], [%u64_1], 4, 5", "5 has to be a literal from 0 to 4"),
    ("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%u32_1], 33", "columns of tensor memory are a power of two"),
    ("ld.param.u64 %u64_1, [out+4]", "this lies outside the parameters"),
    ("ld.param.u16 %u16_1, [out+1]", "the address of 2 bytes is a multiple of 2"),
]  # fmt: skip

RIGHT = """
add.u32 %u32_1, %b32_2, %s32_3
and.b32 %u32_1, %f32_2, -1
add.f32 %b32_1, %f32_2, 0f3F800000
mov.b32 %b32_1, 0f3F800000
mov.b64 %b64_1, 0d3FF0000000000000
mov.pred %pred_1, -1
mov.u32 %u32_1, 0b101U
mov.u32 %u32_1, 017
and.pred %pred_1, !%pred_2, %pred_3
setp.eq.u32 %pred_1|_, %u32_1, %u32_2
setp.eq.u32 _|%pred_1, %u32_1, %u32_2
vote.sync.all.pred _, %pred_1, -1
elect.sync %b32_1|_, -1
ld.global.u8 %u64_1, [%u64_2]
ld.global.s16 %s32_1, [%u64_2]
ld.global.v2.u8 {%u32_1, _}, [%u64_2]
ld.global.v2.b32 {_, %b32_1}, [%u64_2]
st.global.u32 [%u64_1], %u64_2
cvt.u32.u16 %u32_1, %u32_2
cvt.rn.bf16.f32 %b16_1, %f32_2
mov.b64 {_, %b32_1}, %b64_1
mov.u32 %u32_1, room
mov.u64 %u64_1, %clock64
ld.shared.u32 %u32_1, [room+8]
mbarrier.try_wait.shared.b64 %pred_1, [room], %u64_1, 1000
""".strip().splitlines()


def text_of(line: str) -> str:
    return kernel(["out"], f"{_REGISTERS}.shared .align 128 .b8 room[1024];\n{line};\nEND:")


def refusal(text: str) -> str:
    with pytest.raises(parser.PtxError) as refused:
        decode.decode(parser.parse(text).kernels["snippet"])
    return str(refused.value)


@pytest.mark.parametrize(("line", "message"), WRONG + OUT_OF_RANGE, ids=lambda text: text[:60])
def test_an_operand_that_does_not_fit_is_refused_with_its_line(line: str, message: str) -> None:
    text = text_of(line)
    found = refusal(text)
    number = 1 + next(n for n, one in enumerate(text.splitlines()) if line in one)
    assert found.startswith(f"line {number}: ")
    assert message in found
    assert line[:80] in found
    assert len(found) < 500


@pytest.mark.parametrize("line", RIGHT)
def test_an_operand_that_fits_is_taken(line: str) -> None:
    unit = parser.parse(text_of(line)).kernels["snippet"]
    assert decode.decode_instruction(operands.Operands(unit), unit.instructions[0])


@pytest.mark.parametrize(
    "line", ["add.u32 %u32_1, %u32_2, 1", "@%pred_1 mov.u32 %u32_1, 1", "st.global.u32 [%u64_1], 1"]
)
def test_a_register_that_nothing_writes_is_not_read(line: str) -> None:
    name = re.findall(r"%(u32_2|pred_1|u64_1)", line)[0]
    assert f"register %{name} is read and nothing writes it: {line}" in refusal(text_of(line))


def variants(target: str) -> tuple[list[str], dict[int, int]]:
    """Each instruction of the snippets once, and again with a register of every other type in each of its places; and
    of each changed one, by its number, that of the instruction which it was made from."""
    forms: dict[str, str] = {}
    for snippet in ptx_snippets.REGISTRY.values():
        if snippet.target != target:
            continue
        found = parser.parse(snippet.text).kernels["snippet"]
        for i in found.instructions:
            count = iter(range(1, 200))

            def typed(match: re.Match[str], known: dict[str, str] = found.registers, count: object = count) -> str:
                kind = known.get(match.group())
                return match.group() if kind is None else f"%{kind}_{next(count)}"  # type: ignore[call-overload]

            form = re.sub(r"%[\w$.]+", typed, re.sub(r"^@!?\S+ ", "", i.text))
            if not i.opcode.startswith(("bra", "ld.param", "ret", "exit")):
                forms.setdefault(re.sub(r"-?\b(0x)?[0-9a-fA-F]+\b", "N", form), form)
    lines, origin = list(forms.values()), {}
    for number, form in enumerate(forms.values()):
        places = list(re.finditer(r"%([a-z]+\d*)_(\d+)", form))
        for place in places if len(places) < 9 else places[:2] + places[-3:]:
            for kind in KINDS:
                origin[len(lines)] = number
                lines.append(f"{form[: place.start()]}%{kind}_{place.group(2)}{form[place.end() :]}")
    return lines, origin


@pytest.mark.parametrize("target", _VERSIONS)
def test_the_assembler_refuses_no_register_that_the_machine_takes(target: str, tmp_path: Path) -> None:
    """Every place of every opcode that a snippet holds, with a register of every type."""
    found = [path for path in sys.path if (Path(path) / "nvidia/cu13/bin/ptxas").is_file()]
    if not found:
        pytest.skip("ptxas is not installed")
    lines, origin = variants(target)
    assert len(origin) > 2000
    head = (
        f".version {_VERSIONS[target]}\n.target {target}\n.address_size 64\n.visible .entry snippet(.param .u64 out)\n"
        f".reqntid 128\n{{\n{_REGISTERS}"
    )
    first = 1 + head.count("\n")
    text = head + "".join(f"{line};\n" for line in lines) + "ret;\n}\n"
    source = tmp_path / "operands.ptx"
    source.write_text(text)
    ptxas = Path(found[0]) / "nvidia/cu13/bin/ptxas"
    command = [ptxas, f"-arch={target}", "-o", tmp_path / "cubin", source]
    errors = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False).stderr
    refused = {int(number) - first for number in re.findall(r"line (\d+); error", errors)}
    unit = parser.parse(text).kernels["snippet"]
    reader = operands.Operands(unit)
    taken = set()
    for instruction in unit.instructions:
        try:
            decode.decode_instruction(reader, instruction)
        except parser.PtxError:
            continue
        taken.add(instruction.line - first)
    compared = [number for number, form in origin.items() if form in taken and form not in refused]
    assert len(compared) > 0.9 * len(origin)
    assert len(refused.intersection(compared)) > 0.5 * len(compared)
    lax = [lines[number] for number in compared if number in taken and number in refused]
    assert not lax, lax[:20]
