"""Every opcode of the machine gives what the PTX ISA says, under every kind of schedule."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("numpy")
pytest.importorskip("ziglang")

import numpy as np
import ptx_snippets

from dsa_planner.kernels.ptx import decode, machine, parser, program

SNIPPETS = sorted(ptx_snippets.REGISTRY)
SCHEDULES = ("inorder", "random:1", "late:2")
NOT_HELD = {"TRAP": "it ends the launch: the tests of findings hold it"}
"""Opcodes of the machine that no snippet holds, each with the reason."""


def decoded(snippet: ptx_snippets.Snippet) -> program.Program:
    return decode.decode(parser.parse(snippet.text).kernels["snippet"])


def launch(
    vm: machine.Machine, snippet: ptx_snippets.Snippet, schedule: str
) -> tuple[dict[str, np.ndarray], machine.Result]:
    """Run a snippet; the outputs, and what the machine says of the launch."""
    buffers: dict[str, machine.Buffer] = {}
    for name, array in {**snippet.inputs, **snippet.outputs}.items():
        is_output = name in snippet.outputs
        initialised = not is_output or snippet.reads_outputs
        buffers[name] = machine.Buffer(array.copy(), len(buffers), writable=is_output, initialised=initialised)
    values: list[int | float | bytes] = []
    for name in snippet.arguments:
        if name in snippet.maps:
            spec = snippet.maps[name]
            values.append(
                machine.TensorMap(
                    buffers[spec.buffer].address, spec.element_bytes, spec.extents, spec.strides, spec.box, spec.swizzle_bytes
                ).pack()
            )  # fmt: skip
        elif name in snippet.scalars:
            values.append(snippet.scalars[name][1])
        else:
            values.append(buffers[name].address)
    code = decoded(snippet)
    result = vm.launch(
        code, snippet.grid, snippet.threads, snippet.shared_bytes, machine.pack_parameters(code, values),
        list(buffers.values()), machine.Schedule.parse(schedule),
    )  # fmt: skip
    return {name: buffers[name].array for name in snippet.outputs}, result


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", SNIPPETS)
def test_a_snippet_gives_the_expected_bits_without_findings(vm: machine.Machine, name: str, schedule: str) -> None:
    snippet = ptx_snippets.REGISTRY[name]
    outputs, result = launch(vm, snippet, schedule)
    assert not result.findings, "\n".join(map(str, result.findings))
    code = decoded(snippet)
    executed = {name for name, count in zip(code.opcodes, result.counts.sum(0), strict=True) if count}
    assert snippet.holds <= executed, snippet.holds - executed
    wrong = ptx_snippets.differences(snippet, outputs)
    assert not wrong, wrong


@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
def test_the_assembler_takes_every_snippet(target: str, tmp_path: Path) -> None:
    """All of one target in one file: what the machine executes is PTX, not a dialect of its own."""
    found = [path for path in sys.path if (Path(path) / "nvidia/cu13/bin/ptxas").is_file()]
    if not found:
        pytest.skip("ptxas is not installed")
    header: dict[str, None] = {}
    kernels = []
    for name in SNIPPETS:
        snippet = ptx_snippets.REGISTRY[name]
        if snippet.target == target:
            before, body = snippet.text.split(".visible", 1)
            header.update(dict.fromkeys(before.splitlines(keepends=True)))
            kernels.append(".visible" + body.replace(".entry snippet(", f".entry {re.sub(r'[^a-z0-9]', '_', name)}("))
    source = tmp_path / "snippets.ptx"
    source.write_text("".join(header) + "\n".join(kernels))
    command = [Path(found[0]) / "nvidia/cu13/bin/ptxas", f"-arch={target}", "-o", tmp_path / "cubin", source]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert not done.stderr, done.stderr[-4000:]


def held_opcodes() -> Iterator[tuple[str, str]]:
    """(opcode of the machine, snippet) for each instruction that a snippet says it holds."""
    names = {number: name for name, number in program.OPCODES.items()}
    for name in SNIPPETS:
        snippet = ptx_snippets.REGISTRY[name]
        code = decoded(snippet)
        assert snippet.holds <= set(code.opcodes), f"{name}: {snippet.holds - set(code.opcodes)}"
        for number, opcode in zip(code.code[:, 0], code.opcodes, strict=True):
            if opcode in snippet.holds:
                yield names[int(number)], name


def test_every_opcode_of_the_machine_is_held_by_a_snippet() -> None:
    listed = Path(program.__file__).parent / "vm/opcodes.h"
    known = set(re.findall(r"\b(?:OP|PLAIN|CONVERGED|ALIGNED)\((\w+)\)", listed.read_text().split("*/", 1)[1]))
    assert known == set(program.OPCODES)
    held = {opcode for opcode, _ in held_opcodes()}
    assert held.isdisjoint(NOT_HELD), held & set(NOT_HELD)
    assert held | set(NOT_HELD) == known, known - held - set(NOT_HELD)
