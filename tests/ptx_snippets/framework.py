"""What a snippet is, the edge values that snippets share, and how an answer is compared.

Nothing here imports the machine: the same snippets run on a real GPU.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np

__all__ = [
    "MASK32",
    "MASK64",
    "REGISTRY",
    "Snippet",
    "TensorMapSpec",
    "add",
    "crossed",
    "differences",
    "elementwise",
    "kernel",
    "opcodes_of",
    "poison",
    "program",
    "s32",
    "s64",
]

Array = Any
MASK32, MASK64 = (1 << 32) - 1, (1 << 64) - 1
REGISTRY: dict[str, Snippet] = {}
_VERSIONS = {"sm_90a": "8.6", "sm_100a": "8.8"}


@dataclass(frozen=True)
class TensorMapSpec:
    """A tiled tensor map over a buffer: extents, box and byte strides (of dimensions 1 and up) are innermost first."""

    buffer: str
    kind: str  # f32, u32, f16, bf16 or u8
    extents: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle_bytes: int = 0

    @property
    def element_bytes(self) -> int:
        return {"f32": 4, "u32": 4, "f16": 2, "bf16": 2, "u8": 1}[self.kind]


@dataclass(frozen=True)
class Snippet:
    """One kernel with a known answer.

    ``arguments`` names a buffer (a pointer) or a tensor map for each kernel parameter. ``outputs`` are the buffers that
    the kernel writes, as they are before the launch; a kernel may read them only where ``reads_outputs`` is set.
    ``expected`` computes them from all buffers, without any machine. ``holds`` are the PTX opcodes that the answer
    depends on. Where the ISA leaves a result open, ``tolerance`` gives an output's relative error, and
    ``any_nan`` lets every NaN stand for any other.
    """

    name: str
    text: str
    arguments: tuple[str, ...]
    inputs: Mapping[str, Array]
    outputs: Mapping[str, Array]
    expected: Callable[[Mapping[str, Array]], Mapping[str, Array]]
    holds: frozenset[str]
    threads: int = 32
    grid: tuple[int, int, int] = (1, 1, 1)
    shared_bytes: int = 0
    maps: Mapping[str, TensorMapSpec] = field(default_factory=dict)
    tolerance: Mapping[str, float] = field(default_factory=dict)
    any_nan: bool = False
    reads_outputs: bool = False
    scalars: Mapping[str, tuple[str, int | bytes]] = field(default_factory=dict)
    """Parameters that are no pointers: their PTX type and value, or bytes."""

    @property
    def target(self) -> str:
        found = re.search(r"\.target (\w+)", self.text)
        assert found
        return found.group(1)


def add(snippet: Snippet) -> Snippet:
    """Register a snippet; its name has to be new."""
    assert snippet.name not in REGISTRY, snippet.name
    REGISTRY[snippet.name] = snippet
    return snippet


def poison(shape: int | tuple[int, ...], dtype: Any = np.uint32) -> Array:
    """An output that nothing has written: no computed value looks like it."""
    array = np.empty(shape, dtype)
    array.view(np.uint8)[...] = 0xA5
    return array


def kernel(
    parameters: Iterable[str],
    body: str,
    *,
    threads: int = 32,
    target: str = "sm_90a",
    maps: Iterable[str] = (),
    scalars: Mapping[str, tuple[str, int | bytes]] = MappingProxyType({}),
    directives: str = "",
) -> str:
    """The PTX text of a kernel. Parameters are pointers, but for those that ``maps`` and ``scalars`` name."""
    types = dict.fromkeys(maps, ".align 64 .b8 {}[128]")
    for name, (kind, value) in scalars.items():
        types[name] = f".align 16 .b8 {{}}[{len(value)}]" if isinstance(value, bytes) else f".{kind} {{}}"
    declared = ",\n".join("    .param " + types.get(name, ".u64 {}").format(name) for name in parameters)
    lines = "\n".join("    " + line.strip() for line in body.strip().splitlines())
    return (
        f".version {_VERSIONS[target]}\n.target {target}\n.address_size 64\n\n"
        f".visible .entry snippet(\n{declared}\n)\n.reqntid {threads}, 1, 1 {directives}\n{{\n{lines}\n    ret;\n}}\n"
    )


def opcodes_of(text: str) -> frozenset[str]:
    """The opcodes of some statements."""
    statements = (re.sub(r"^\s*(@!?%\w+\s+)?", "", part) for part in re.split(r"[;{}]", text))
    words = (statement.split(None, 1)[0] for statement in statements if statement.strip())
    return frozenset(word for word in words if re.match(r"[a-z]\w*(\.|$)", word) and not word.startswith("."))


def s32(value: int) -> int:
    """The signed number that these 32 bits are."""
    value &= MASK32
    return value - (1 << 32) if value >> 31 else value


def s64(value: int) -> int:
    """The signed number that these 64 bits are."""
    value &= MASK64
    return value - (1 << 64) if value >> 63 else value


def crossed(dtype: Any, *values: Sequence[int], seed: int = 1) -> list[Array]:
    """Every value of the first two lists with every other; further lists are drawn from. A multiple of 32 long."""
    generator = np.random.default_rng(seed)
    pairs = np.array(list(itertools.product(*values[:2])), dtype)
    pairs = np.concatenate([pairs, pairs[: -len(pairs) % 32]])
    columns = [np.ascontiguousarray(pairs[:, n]) for n in range(len(values[:2]))]
    return columns + [generator.choice(np.array(more, dtype), len(pairs)) for more in values[2:]]


_LOADS = {1: "b16", 2: "b16", 4: "b32", 8: "b64"}


def elementwise(
    name: str,
    operands: Mapping[str, Array],
    instructions: Sequence[tuple[str, Callable[..., int]]],
    *,
    result: int = 32,
    target: str = "sm_90a",
    prepare: str = "",
    tolerance: float = 0.0,
    any_nan: bool = False,
    holds: Iterable[str] = (),
) -> Snippet:
    """A snippet whose lanes each apply every instruction to their own operands.

    Operand ``a`` is in register ``%a``. Each instruction leaves its result in ``%d`` (of ``result`` bits), and its
    function computes the same from the operands' bits as Python ints. Scratch registers: predicates ``%p %q %r %s``,
    32 bits ``%x %y``, 64 bits ``%u %v``, 16 bits ``%h %i``. ``prepare`` runs once, before the instructions.
    """
    count = len(next(iter(operands.values())))
    bits = {key: 8 * array.itemsize for key, array in operands.items()}
    declared = "\n".join(f".reg .{_LOADS[array.itemsize]} %{key};" for key, array in operands.items())
    loads = "\n".join(
        f"ld.param.u64 %address, [{key}];\nmad.wide.u32 %address, %index, {array.itemsize}, %address;\n"
        f"ld.global.b{bits[key]} %{key}, [%address];"
        for key, array in operands.items()
    )
    stores = "\n".join(
        f"{text}\nst.global.b{result} [%address + {position * count * result // 8}], %d;"
        for position, (text, _) in enumerate(instructions)
    )
    body = f"""
        .reg .pred %p, %q, %r, %s;
        .reg .b16 %h, %i;
        .reg .b32 %index, %lane, %block, %x, %y;
        .reg .b64 %address, %u, %v;
        .reg .b{result} %d;
        {declared}
        mov.u32 %lane, %tid.x;
        mov.u32 %block, %ctaid.x;
        shl.b32 %block, %block, 5;
        add.u32 %index, %block, %lane;
        {loads}
        {prepare}
        ld.param.u64 %address, [out];
        mad.wide.u32 %address, %index, {result // 8}, %address;
        {stores}
    """
    dtype = np.uint64 if result == 64 else np.uint32

    def expected(buffers: Mapping[str, Array]) -> Mapping[str, Array]:
        columns = [[int(value) for value in buffers[key]] for key in operands]
        rows = [[function(*values) for values in zip(*columns, strict=True)] for _, function in instructions]
        return {"out": np.array(rows, dtype)}

    assert count % 32 == 0
    return add(
        Snippet(
            name=name,
            text=kernel([*operands, "out"], body, target=target),
            arguments=(*operands, "out"),
            inputs=dict(operands),
            outputs={"out": poison((len(instructions), count), dtype)},
            expected=expected,
            holds=frozenset(holds) or frozenset().union(*(opcodes_of(text) for text, _ in instructions)),
            grid=(count // 32, 1, 1),
            tolerance={"out": tolerance} if tolerance else {},
            any_nan=any_nan,
        )
    )


_SCRATCH = """
.reg .pred %p<12>;
.reg .b16 %h<24>;
.reg .b32 %r<64>;
.reg .b64 %d<32>;
.reg .b32 %thread, %lane, %warp;
.reg .b64 %out;
mov.u32 %thread, %tid.x;
and.b32 %lane, %thread, 31;
shr.u32 %warp, %thread, 5;
ld.param.u64 %out, [out];
mad.wide.u32 %out, %thread, 4, %out;
"""


def program(
    name: str,
    body: str,
    expected: Callable[[Mapping[str, Array]], Mapping[str, Array]],
    *,
    holds: Iterable[str],
    rows: int = 0,
    inputs: Mapping[str, Array] = MappingProxyType({}),
    outputs: Mapping[str, Array] = MappingProxyType({}),
    threads: int = 32,
    target: str = "sm_90a",
    maps: Mapping[str, TensorMapSpec] = MappingProxyType({}),
    scalars: Mapping[str, tuple[str, int | bytes]] = MappingProxyType({}),
    grid: tuple[int, int, int] = (1, 1, 1),
    reads_outputs: bool = False,
    directives: str = "",
) -> Snippet:
    """A snippet with a body of its own.

    Its registers: ``%p0``... predicates, ``%h0``... 16, ``%r0``... 32 and ``%d0``... 64 bits; ``%thread``, ``%lane`` and
    ``%warp``; ``%out`` is where the thread's word of row 0 of output ``out`` is, which has ``rows`` rows of a word for
    each thread. ``STORE n, %r1;`` in the body is short for a store to row n.
    """
    outputs = {"out": poison((rows, threads)), **outputs} if rows else dict(outputs)
    body = re.sub(r"STORE (\d+),", lambda match: f"st.global.b32 [%out + {int(match.group(1)) * threads * 4}],", body)
    arguments = [*inputs, *outputs, *maps, *scalars]
    text = kernel(
        arguments, _SCRATCH + body, threads=threads, target=target, maps=maps, scalars=scalars, directives=directives
    )
    return add(
        Snippet(
            name=name, text=text, arguments=tuple(arguments), inputs=inputs, outputs=outputs, expected=expected,
            holds=frozenset(holds), threads=threads, grid=grid, maps=maps, scalars=scalars, reads_outputs=reads_outputs,
        )
    )  # fmt: skip


def _is_nan(bits: Array) -> Array:
    return (bits & 0x7FFFFFFF) > 0x7F800000


def differences(snippet: Snippet, found: Mapping[str, Array]) -> str:
    """Where an answer is not the expected one, in words; empty where it is."""
    buffers = {**snippet.inputs, **snippet.outputs}
    words = []
    for name, want in snippet.expected(buffers).items():
        got = found[name]
        assert want.dtype == got.dtype, f"{snippet.name}: {name}: {want.dtype} is not {got.dtype}"
        assert want.shape == got.shape, f"{snippet.name}: {name}: {want.shape} is not {got.shape}"
        wrong = want.view(f"u{want.itemsize}") != got.view(f"u{want.itemsize}")
        if snippet.any_nan and want.itemsize == 4:
            wrong &= ~(_is_nan(want.view(np.uint32)) & _is_nan(got.view(np.uint32)))
        bound = snippet.tolerance.get(name)
        if bound:
            with np.errstate(all="ignore"):
                exact, near = (array.view(np.float32).astype(np.float64) for array in (want, got))
                wrong &= ~(np.isfinite(exact) & (np.abs(near - exact) <= bound * np.abs(exact)))
        for where in np.argwhere(wrong)[:8]:
            at = tuple(int(index) for index in where)
            words.append(f"{name}{list(at)}: {_show(got[at])} instead of {_show(want[at])}")
        if wrong.any():
            words.append(f"{name}: {int(wrong.sum())} of {wrong.size} differ")
    return "; ".join(words)


def _show(value: Any) -> str:
    return f"{value!r} ({int(value.view(f'u{value.itemsize}')):#x})"
