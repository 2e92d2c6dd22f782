"""PTX may be anybody's: whatever it can make grow has a limit, and every refusal is one line of a screen's width."""

from __future__ import annotations

import tracemalloc

import pytest

pytest.importorskip("numpy")

from dsa_planner.kernels.ptx import decode, parser

HEAD = ".version 8.6\n.target sm_90a\n.address_size 64\n"


def unit(body: str = "", parameters: str = "", directives: str = "", variables: str = "") -> str:
    return f"{HEAD}{variables}\n.visible .entry k({parameters})\n{directives}\n{{\n{body}\nret;\n}}\n"


REFUSED = {
    "shared-memory": (unit(".shared .b8 x[99999999999];"), "at most 232,448 elements are possible: .shared .b8 x["),
    "shared-memory-of-long-numbers": (unit(f".shared .b8 x[{'9' * 5000}];"), "at most 232,448 elements are possible"),
    "shared-memory-of-wide-elements": (unit(".shared .b64 x[29057];"), "at most 29,056 elements are possible"),
    "shared-memory-together": (
        unit(".shared .b8 x[200000];\n.shared .b8 y[32449];"),
        "line 5: the variables of entry k take 232,449 bytes of shared memory, and a CTA has at most 232,448",
    ),
    "shared-memory-of-a-unit": (unit(variables=".shared .b8 x[232449];"), "line 4: at most 232,448 elements"),
    "more-dimensions": (unit(".shared .b8 x[4][4];"), "'.shared .b8 x[4][4]' is not known"),
    "alignment-of-nothing": (unit(".shared .align 0 .b8 x[4];"), "line 8: an alignment is a power of two: .shared"),
    "alignment-of-three": (unit(".shared .align 3 .b8 x[4];"), "line 8: an alignment is a power of two: .shared"),
    "alignment-of-a-parameter": (unit(parameters=".param .align 0 .b8 p[8]"), "an alignment is a power of two: .param"),
    "alignment-without-end": (unit(f".shared .align {'8' * 5000} .b8 x[4];"), "at most 65,536 bytes of alignment"),
    "parameters": (unit(parameters=".param .b8 p[32765]"), "at most 32,764"),
    "parameters-together": (unit(parameters=".param .b8 p[32764], .param .u64 q"), "parameters take at most 32,764 bytes"),
    "registers": (unit(".reg .b32 %r<999999999>;"), "line 8: at most 131,072 registers are possible: .reg .b32 %r<9999"),
    "registers-of-long-numbers": (unit(f".reg .b32 %r<{'9' * 5000}>;"), "at most 131,072 registers are possible"),
    "registers-together": (
        unit(".reg .b32 %r<131072>;\n.reg .b32 %x;"), "line 9: a kernel has at most 131,072 registers: .reg .b32 %x"
    ),
    "registers-of-scopes": (
        unit("{\n" + "".join(f".reg .b32 %r{n}_<131072>;\n" for n in range(9)) + "}"), "at most 131,072 registers"
    ),
    "a-type-of-registers": (unit(".reg .b128 %r;"), "line 8: registers of type .b128 are not known: .reg .b128 %r"),
    "a-register-twice": (unit(".reg .b32 %r;\n.reg .pred %r;"), "line 9: register %r is declared twice: .reg .pred %r"),
    "a-name-of-a-register": (unit(".reg .b32 %r[4];"), "'%r[4]' is not the name of a register"),
    "a-parameter-twice": (unit(parameters=".param .u64 p, .param .u64 p"), "p is declared twice: .param .u64 p"),
    "a-variable-twice": (unit(".shared .b8 x[4];\n.shared .b8 x[4];"), "line 9: x is declared twice: .shared"),
    "a-label-twice": (unit("A:\nA:"), "line 9: a label stands once in its scope: A:"),
    "an-entry-twice": (unit() + unit()[len(HEAD) :], "line 12: entry k is declared twice"),
    "deep-scopes": (unit("{" * 5000 + "}" * 5000), "at most 64 scopes lie one in another: {"),
    "deep-operands": (unit("mov.b64 " + "{" * 9000 + "}" * 9000 + ", 5;"), "operand"),
    "deep-addresses": (unit("ld.global.u32 " + "[0, " * 9000 + "]" * 9000 + ", 5;"), "operand"),
    "a-scope-without-end": (unit("{")[:-2], "line 8: a scope does not end"),
    "a-missing-operand": (unit("mov.u32 , 5;"), "line 8: an operand is missing between commas: mov.u32 , 5"),
    "an-address-without-base": (unit("ld.global.u32 %r1, [];"), "line 8: address '' is not understood"),
    "no-words": (unit("mul %r1, %r2, %r3;"), "line 8: opcode mul is not known: mul %r1, %r2, %r3"),
    "too-few-words": (unit("mul.lo %r1, %r2, %r3;"), "line 8: opcode mul.lo is not known: mul.lo"),
    "a-block-of-nothing": (unit(directives=".reqntid 0"), "a block has 1 to 1024 threads, not 0: .reqntid 0"),
    "a-large-block": (unit(directives=".maxntid 64, 64"), "a block has 1 to 1024 threads, not 4,096: .maxntid 64, 64"),
    "a-block-of-long-numbers": (unit(directives=f".reqntid {'9' * 5000}"), "at most 1,024 threads are possible"),
    "a-cluster": (unit(directives=".reqnctapercluster 2, 1, 1"), "directive .reqnctapercluster of an entry is not known"),
    "small-addresses": (unit().replace("size 64", "size 32"), "line 3: addresses of 64 bits are expected"),
    "a-long-opcode": (unit(f"{'x' * 12_000};"), "... is not known: xxx"),
    "a-long-modifier": (unit(f"mul.{'x' * 12_000} %r1, %r2, %r3;"), "... is not known: mul.xxx"),
    "long-operands": (unit(f"{{\n.reg .b32 %{'x' * 9000};\nadd.f32 %{'x' * 9000}, 5, %y;\n}}"), "line 10: the whole number 5 stands where"),
    "a-long-line-of-a-unit": (HEAD + "x" * 12_000, "is not known at the top level"),
    "a-long-parameter": (unit(parameters=".param .u64 " + "p " * 6000), "is not known"),
    "control-characters": (unit("mov.u32 \x1bJ, 5;"), "operand '\\x1bJ' is not understood"),
    "lines": (HEAD + "\n" * (1 << 18), "line 262145: a unit has at most 262,144 lines, and this one has 262,147"),
    "characters": (HEAD + " " * (1 << 24), "line 1: a unit has at most 16,777,216 characters"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_bound_or_no_sense_is_refused_in_one_short_line(name: str) -> None:
    text, message = REFUSED[name]
    tracemalloc.start()
    try:
        with pytest.raises(parser.PtxError) as refused:
            decode.decode(parser.parse(text).kernels["k"])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    found = str(refused.value)
    assert message in found
    assert found.startswith("line ")
    assert found.isprintable()
    assert len(found) < 600
    assert peak < 8 * len(text) + (64 << 20)


def test_what_a_nested_scope_declares_is_its_own() -> None:
    """Counted registers as well, and names of a scope in a scope, which the one between does not have."""
    kernel = parser.parse(
        unit(
            """
            .reg .b32 %r, %t<2>;
            {
            .reg .b64 %t<2>;
            mov.u64 %t1, 5;
            {
            .reg .pred %r;
            mov.pred %r, 1;
            }
            mov.u32 %r, 5;
            }
            mov.u32 %t1, 5;
            """
        )
    ).kernels["k"]
    assert [kernel.registers[i.operands[0].name] for i in kernel.instructions[:4]] == ["b64", "pred", "b32", "b32"]  # type: ignore[union-attr]
    decode.decode(kernel)


def test_the_hints_of_an_entry_have_no_meaning_here() -> None:
    directives = '.reqntid 64, 2 .maxntid 128 .minnctapersm 1 .maxnreg 64 .pragma "nounroll";'
    kernel = parser.parse(unit(directives=directives)).kernels["k"]
    assert (kernel.required_block, kernel.largest_block) == ((64, 2), (128,))
