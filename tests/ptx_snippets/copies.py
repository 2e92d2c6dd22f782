"""Copies that run beside the threads: cp.async, bulk copies, and tiles of tensors with their swizzles and edges."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ptx_snippets.floating import encode, value_of
from ptx_snippets.framework import TensorMapSpec, poison, program

Array = Any
_BYTES = np.random.default_rng(51).integers(0, 256, 8192, np.uint8)

# --- cp.async --------------------------------------------------------------------------------------------------------


def _partial(size: int, take: Callable[[int], int]) -> Array:
    """What each lane's copy of ``size`` bytes leaves where it reads only some of them."""
    lanes = _BYTES[: 32 * size].reshape(32, size).copy()
    for lane in range(32):
        lanes[lane, take(lane) :] = 0
    return lanes.reshape(-1)


_CP_ASYNC = """
.shared .align 16 .b8 landing[2048];
mov.u32 %r20, landing;
ld.param.u64 %d0, [source];
ld.param.u64 %d1, [target];
"""
_OUT_16 = """
ld.shared.v4.b32 {{%r0, %r1, %r2, %r3}}, [%r21];
mad.wide.u32 %d3, %lane, 16, %d1;
st.global.v4.b32 [%d3 + {0}], {{%r0, %r1, %r2, %r3}};
"""


def _sized(size: int, cache: str, row: int, count: str = "") -> str:
    """Each lane copies ``size`` bytes, and takes 16 of what it finds in its own place."""
    return f"""
        mov.u32 %r9, 0x5A5A5A5A;
        mad.lo.u32 %r21, %lane, 16, %r20;
        st.shared.v4.b32 [%r21], {{%r9, %r9, %r9, %r9}};
        mad.wide.u32 %d2, %lane, {size}, %d0;
        {count}
        cp.async.{cache}.shared.global [%r21], [%d2], {size}{", %r8" if count else ""};
        cp.async.commit_group;
        cp.async.wait_group 0;
        {_OUT_16.format(512 * row)}
    """


def _own_place(size: int, content: Array) -> Array:
    lanes = np.full((32, 16), 0x5A, np.uint8)
    lanes[:, :size] = content.reshape(32, size)
    return lanes.reshape(-1)


_TAKES = [(4, "ca"), (8, "ca"), (16, "ca"), (16, "cg")]
program(
    "cp-async-sizes",
    _CP_ASYNC
    + "".join(_sized(size, cache, row) for row, (size, cache) in enumerate(_TAKES))
    + "".join(
        _sized(size, cache, row + 4, f"rem.u32 %r8, %lane, {size + 1};") for row, (size, cache) in enumerate(_TAKES)
    ),
    lambda buffers: {
        "target": np.stack(
            [_own_place(size, _BYTES[: 32 * size]) for size, _ in _TAKES]
            + [_own_place(size, _partial(size, lambda lane, size=size: lane % (size + 1))) for size, _ in _TAKES]
        )
    },
    holds=("cp.async.ca.shared.global", "cp.async.cg.shared.global", "cp.async.commit_group", "cp.async.wait_group"),
    inputs={"source": _BYTES},
    outputs={"out": poison(1), "target": poison((8, 512), np.uint8)},
)
program(  # four groups in flight; each is used as soon as the wait for it is over
    "cp-async-groups",
    _CP_ASYNC
    + "mad.lo.u32 %r21, %lane, 16, %r20;\nmad.wide.u32 %d2, %lane, 16, %d0;\n"
    + "".join(
        f"cp.async.cg.shared::cta.global [%r21 + {512 * n}], [%d2 + {512 * n}], 16;\ncp.async.commit_group;\n"
        for n in range(4)
    )
    + "".join(
        f"cp.async.wait_group {3 - n};\n" + _OUT_16.format(512 * n).replace("[%r21]", f"[%r21 + {512 * n}]")
        for n in range(3)
    )
    + "cp.async.wait_all;\n"
    + _OUT_16.format(512 * 3).replace("[%r21]", "[%r21 + 1536]")
    # Once all have waited, each also sees what the others have fetched.
    + """
    bar.warp.sync -1;
    xor.b32 %r22, %r21, 16;
    sub.u32 %r22, 31, %lane;
    mad.lo.u32 %r21, %r22, 16, %r20;
    """.replace("    xor.b32 %r22, %r21, 16;\n", "")
    + _OUT_16.format(512 * 4),
    lambda buffers: {
        "target": np.concatenate([_BYTES[:2048], _BYTES[:512].reshape(32, 16)[::-1].reshape(-1)]).reshape(5, 512)
    },
    holds=("cp.async.cg.shared::cta.global", "cp.async.wait_group", "cp.async.wait_all", "cp.async.commit_group"),
    inputs={"source": _BYTES},
    outputs={"out": poison(1), "target": poison((5, 512), np.uint8)},
)
_ARRIVALS = """
.shared .align 8 .b8 barrier[8];
mov.u32 %r23, barrier;
setp.eq.u32 %p1, %thread, 0;
@%p1 mbarrier.init.shared::cta.b64 [%r23], 64;
bar.sync 0;
mad.lo.u32 %r21, %thread, 16, %r20;
mad.wide.u32 %d2, %thread, 16, %d0;
mov.u32 %r10, 0;
ROUND: cp.async.cg.shared.global [%r21], [%d2], 16;
"""
_WAIT_AND_READ = """
WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p0, [%r23], %r10;
@!%p0 bra WAIT;
xor.b32 %r22, %thread, 33;
mad.lo.u32 %r22, %r22, 16, %r20;
ld.shared.v4.b32 {%r0, %r1, %r2, %r3}, [%r22];
mad.wide.u32 %d3, %thread, 16, %d1;
mad.wide.u32 %d3, %r10, 1024, %d3;
st.global.v4.b32 [%d3], {%r0, %r1, %r2, %r3};
bar.sync 0;
add.u32 %r10, %r10, 1;
add.s64 %d2, %d2, 1024;
setp.lt.u32 %p2, %r10, 2;
@%p2 bra ROUND;
"""


def _rounds(buffers: Mapping[str, Array]) -> Mapping[str, Array]:
    return {"target": buffers["source"][:2048].reshape(2, 64, 16)[:, np.arange(64) ^ 33].reshape(2, 1024)}


for _name, _arrive in (
    ("noinc", "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%r23];\n"),
    ("counted", "cp.async.mbarrier.arrive.shared::cta.b64 [%r23];\nmbarrier.arrive.shared::cta.b64 _, [%r23];\n"),
):
    program(
        f"cp-async-arrives-{_name}",
        _CP_ASYNC + _ARRIVALS + _arrive + _WAIT_AND_READ,
        _rounds,
        holds=(_arrive.split()[0],),
        inputs={"source": _BYTES},
        outputs={"out": poison(1), "target": poison((2, 1024), np.uint8)},
        threads=64,
    )

# --- bulk copies -----------------------------------------------------------------------------------------------------

_BULK = """
.shared .align 1024 .b8 room[{room}];
.shared .align 8 .b8 barrier[8];
mov.u32 %r20, room;
mov.u32 %r23, barrier;
setp.eq.u32 %p1, %thread, 0;
@%p1 mbarrier.init.shared::cta.b64 [%r23], 1;
@%p1 fence.mbarrier_init.release.cluster;
bar.sync 0;
"""


def _loaded(issue: str, total: int) -> str:
    """Thread 0 expects ``total`` bytes and issues loads; all wait for them."""
    return f"""
        @!%p1 bra WAIT;
        mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r23], {total};
        {issue}
        WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p0, [%r23], 0;
        @!%p0 bra WAIT;
    """


def _out_of_shared(total: int, threads: int, name: str = "target") -> str:
    """All threads copy the room to an output, 16 bytes at a time."""
    return f"""
        ld.param.u64 %d1, [{name}];
        mov.u32 %r10, %thread;
        COPY: shl.b32 %r11, %r10, 4;
        add.u32 %r12, %r11, %r20;
        cvt.u64.u32 %d3, %r11;
        add.s64 %d3, %d3, %d1;
        ld.shared.v4.b32 {{%r0, %r1, %r2, %r3}}, [%r12];
        st.global.v4.b32 [%d3], {{%r0, %r1, %r2, %r3}};
        add.u32 %r10, %r10, {threads};
        setp.lt.u32 %p2, %r10, {total // 16};
        @%p2 bra COPY;
    """


def fill_from(name: str, total: int, threads: int) -> str:
    """All threads fill the room from an input, for the async proxy to read."""
    return f"""
        ld.param.u64 %d1, [{name}];
        mov.u32 %r10, %thread;
        FILL: shl.b32 %r11, %r10, 4;
        add.u32 %r12, %r11, %r20;
        cvt.u64.u32 %d3, %r11;
        add.s64 %d3, %d3, %d1;
        ld.global.v4.b32 {{%r0, %r1, %r2, %r3}}, [%d3];
        st.shared.v4.b32 [%r12], {{%r0, %r1, %r2, %r3}};
        add.u32 %r10, %r10, {threads};
        setp.lt.u32 %p2, %r10, {total // 16};
        @%p2 bra FILL;
        fence.proxy.async.shared::cta;
        bar.sync 0;
    """


_BULK_LOADS = [(0, 16, 16), (256, 512, 1024), (1280, 4096, 768)]  # (to, from, bytes), which leave gaps
program(
    "bulk-loads",
    _BULK.format(room=2048)
    + """
    mad.lo.u32 %r11, %thread, 16, %r20;
    mov.u32 %r0, 0x77777777;
    st.shared.v4.b32 [%r11], {%r0, %r0, %r0, %r0};
    fence.proxy.async;
    bar.sync 0;
    ld.param.u64 %d0, [source];
    """
    + _loaded(
        "\n".join(
            f"mov.u32 %r5, {size};\ncp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
            f"[%r20 + {to}], [%d0 + {start}], %r5, [%r23];"
            for to, start, size in _BULK_LOADS
        ),
        sum(size for _, _, size in _BULK_LOADS),
    )
    + _out_of_shared(2048, 128),
    lambda buffers: {"target": _bulk_loaded(buffers["source"])},
    holds=("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes", "fence.proxy.async"),
    inputs={"source": _BYTES},
    outputs={"out": poison(1), "target": poison(2048, np.uint8)},
    threads=128,
)


def _bulk_loaded(source: Array) -> Array:
    room = np.full(2048, 0x77, np.uint8)
    for to, start, size in _BULK_LOADS:
        room[to : to + size] = source[start : start + size]
    return room


program(  # a room is filled again once its copies have read it
    "bulk-stores",
    _BULK.format(room=2048)
    + """
    ld.param.u64 %d0, [target];
    mov.u32 %r7, 0;
    ROUND: mad.lo.u32 %r0, %r7, 1000, %thread;
    mad.lo.u32 %r11, %thread, 4, %r20;
    st.shared.b32 [%r11], %r0;
    add.u32 %r0, %r0, 500;
    st.shared.b32 [%r11 + 512], %r0;
    fence.proxy.async.shared::cta;
    bar.sync 0;
    @!%p1 bra NEXT;
    cp.async.bulk.global.shared::cta.bulk_group [%d0], [%r20], 512;
    cp.async.bulk.commit_group;
    cp.async.bulk.global.shared::cta.bulk_group [%d0 + 512], [%r20 + 512], 256;
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group.read 1;
    cp.async.bulk.wait_group.read 0;
    NEXT: bar.sync 0;
    add.s64 %d0, %d0, 1024;
    add.u32 %r7, %r7, 1;
    setp.lt.u32 %p2, %r7, 3;
    @%p2 bra ROUND;
    @%p1 cp.async.bulk.wait_group 0;
    """,
    lambda buffers: {"target": _bulk_stored(buffers["target"])},
    holds=(
        "cp.async.bulk.global.shared::cta.bulk_group", "cp.async.bulk.commit_group", "cp.async.bulk.wait_group.read",
        "cp.async.bulk.wait_group", "fence.proxy.async.shared::cta",
    ),
    outputs={"out": poison(1), "target": poison((3, 256))},
    threads=128,
)  # fmt: skip


def _bulk_stored(target: Array) -> Array:
    target = target.copy()
    for step in range(3):
        target[step, :128] = np.arange(128) + 1000 * step
        target[step, 128:192] = np.arange(64) + 1000 * step + 500
    return target


def _add_f32(old: int, value: int) -> int:
    """Subnormals are kept: an H200 does, and the ISA says nothing of them here."""
    return encode(value_of(old) + value_of(value), (old & value) >> 31 == 1)


def _add_bf16(old: int, value: int) -> int:
    total = value_of(old << 16) + value_of(value << 16)
    return encode(total, (old & value) >> 15 == 1, 8, 7)


_F32 = np.array([0, 0x3F800000, 1, 0x00400000, 0x80000001, 0x00800000, 0x80800001, 0x4B800000, 0xC2F6E979, 0x7F7FFFFF,
                 0x80000000, 0x33800000, 0xBF800000, 0x007FFFFF, 0x3F800001, 0x40490FDB], np.uint32)  # fmt: skip
_F32_ADDED = np.concatenate([np.roll(_F32, n) for n in (0, 1, 5, 8)])
_F32_OLD = np.tile(_F32, 4)
_BF16_OLD = np.tile((_F32 >> np.uint32(16)).astype(np.uint16), 8)
_BF16_ADDED = np.concatenate([np.roll(_BF16_OLD[:16], n) for n in (0, 1, 2, 3, 5, 6, 8, 11)])


def _each(function: Callable[[int, int], int], old: Array, added: Array) -> Array:
    values = [function(int(o), int(v)) for o, v in zip(old.reshape(-1), added.reshape(-1), strict=True)]
    return np.array(values, old.dtype).reshape(old.shape)


program(
    "bulk-reductions",
    _BULK.format(room=1024)
    + fill_from("source", 1024, 64)
    + """
    @!%p1 bra DONE;
    ld.param.u64 %d0, [words];
    cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%d0], [%r20], 256;
    cp.reduce.async.bulk.global.shared::cta.bulk_group.add.s32 [%d0 + 256], [%r20 + 256], 256;
    ld.param.u64 %d0, [floats];
    cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%d0], [%r20 + 512], 256;
    ld.param.u64 %d0, [halves];
    cp.reduce.async.bulk.global.shared::cta.bulk_group.add.noftz.bf16 [%d0], [%r20 + 768], 256;
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group 0;
    DONE:
    """,
    lambda buffers: {
        "words": (buffers["words"] + buffers["source"][:512].view(np.uint32)).astype(np.uint32),
        "floats": _each(_add_f32, buffers["floats"], _F32_ADDED),
        "halves": _each(_add_bf16, buffers["halves"], _BF16_ADDED),
    },
    holds=[
        f"cp.reduce.async.bulk.global.shared::cta.bulk_group.add.{kind}" for kind in ("u32", "s32", "f32", "noftz.bf16")
    ],
    inputs={"source": np.concatenate([_BYTES[:512], _F32_ADDED.view(np.uint8), _BF16_ADDED.view(np.uint8)])},
    outputs={
        "out": poison(1),
        "words": np.random.default_rng(52).integers(0, 1 << 32, 128, np.uint64).astype(np.uint32),
        "floats": _F32_OLD,
        "halves": _BF16_OLD,
    },
    reads_outputs=True,
    threads=64,
)
program(  # several CTAs at one place: sums of small integers are the same in every order
    "bulk-reductions-of-many-ctas",
    _BULK.format(room=512)
    + """
    mov.u32 %r5, %ctaid.x;
    mad.lo.u32 %r5, %r5, 7, %thread;
    cvt.rn.f32.u32 %r6, %r5;
    mad.lo.u32 %r11, %thread, 4, %r20;
    st.shared.b32 [%r11], %r6;
    fence.proxy.async.shared::cta;
    bar.sync 0;
    ld.param.u64 %d0, [floats];
    @%p1 cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%d0], [%r20], 512;
    @%p1 cp.async.bulk.commit_group;
    @%p1 cp.async.bulk.wait_group 0;
    """,
    lambda buffers: {
        "floats": np.sum([np.arange(128) + 7 * cta for cta in range(5)], axis=0).astype(np.float32) + np.float32(1)
    },
    holds=("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32",),
    outputs={"out": poison(1), "floats": np.ones(128, np.float32)},
    reads_outputs=True,
    threads=128,
    grid=(5, 1, 1),
)

# --- tiles of tensors ------------------------------------------------------------------------------------------------


def swizzle_offsets(size: int, swizzle_bytes: int) -> Array:
    """Where each byte of a tile goes. In line i of 128 bytes, 16-byte chunk j of a group as wide as the swizzle goes to
    chunk j xor (i mod the group's chunks)."""
    offsets = np.arange(size)
    if not swizzle_bytes:
        return offsets
    chunks = swizzle_bytes // 16
    line, chunk, byte = offsets // 128, offsets // 16 % 8, offsets % 16
    group, within = chunk // chunks, chunk % chunks
    return line * 128 + (group * chunks + (within ^ line % chunks)) * 16 + byte


def _tile_elements(spec: TensorMapSpec, coordinates: Sequence[int]) -> tuple[Array, Array]:
    """(byte offset in the tensor of each element of a box in its order, whether that lies inside)."""
    grids = np.meshgrid(*(np.arange(extent) for extent in reversed(spec.box)), indexing="ij")
    index = [grid.reshape(-1) + at for grid, at in zip(reversed(grids), coordinates, strict=True)]
    inside = np.ones(len(index[0]), bool)
    offset = index[0] * spec.element_bytes
    for axis, at in enumerate(index):
        inside &= (at >= 0) & (at < spec.extents[axis])
        if axis:
            offset = offset + at * spec.strides[axis - 1]
    return offset, inside


def tile(spec: TensorMapSpec, tensor: Array, coordinates: Sequence[int]) -> Array:
    """The bytes of a box as they lie in shared memory: zero outside of the tensor, then swizzled."""
    offset, inside = _tile_elements(spec, coordinates)
    places = np.where(inside, offset, 0)[:, None] + np.arange(spec.element_bytes)
    linear = np.where(inside[:, None], tensor.reshape(-1).view(np.uint8)[places], np.uint8(0)).reshape(-1)
    swizzled = np.empty_like(linear)
    swizzled[swizzle_offsets(len(linear), spec.swizzle_bytes)] = linear
    return swizzled


def _put(spec: TensorMapSpec, tensor: Array, coordinates: Sequence[int], shared: Array) -> None:
    """Store a box: the opposite of tile; what is outside of the tensor goes nowhere."""
    offset, inside = _tile_elements(spec, coordinates)
    linear = shared[swizzle_offsets(len(offset) * spec.element_bytes, spec.swizzle_bytes)]
    places = offset[inside][:, None] + np.arange(spec.element_bytes)
    tensor.reshape(-1).view(np.uint8)[places] = linear.reshape(-1, spec.element_bytes)[inside]


def _tensors(count: int, size: int) -> dict[str, Array]:
    generator = np.random.default_rng(53)
    return {f"t{n}": generator.integers(0, 256, size, np.uint8) for n in range(count)}


_MAPS = {
    "line": TensorMapSpec("t0", "f32", (100,), (), (32,)),
    "plain": TensorMapSpec("t0", "f16", (40, 20), (96,), (16, 8)),
    "bytes": TensorMapSpec("t1", "u8", (70, 9), (80,), (32, 4)),
    "s32": TensorMapSpec("t0", "bf16", (60, 24), (128,), (16, 24), 32),
    "s64": TensorMapSpec("t1", "bf16", (60, 24), (128,), (32, 16), 64),
    "s128": TensorMapSpec("t2", "f16", (100, 24), (208,), (64, 16), 128),
    "words": TensorMapSpec("t3", "u32", (50, 20), (208,), (32, 8), 128),
    "cube": TensorMapSpec("t2", "bf16", (72, 6, 5), (144, 144 * 7), (64, 4, 2), 128),
    "thin": TensorMapSpec("t3", "f32", (30, 3, 4), (128, 128 * 4), (8, 2, 3), 32),
}
_TILES: list[tuple[str, tuple[int, ...]]] = [
    ("line", (0,)), ("line", (88,)), ("line", (-8,)), ("line", (200,)),
    ("plain", (0, 0)), ("plain", (8, 3)), ("plain", (32, 15)), ("plain", (-8, -2)), ("plain", (-16, 0)),
    ("bytes", (16, 2)), ("bytes", (48, 7)), ("bytes", (-16, -1)),
    ("s32", (0, 0)), ("s32", (48, 3)), ("s32", (-8, -20)),
    ("s64", (0, 0)), ("s64", (48, 12)), ("s64", (-8, 5)),
    ("s128", (0, 0)), ("s128", (64, 8)), ("s128", (-8, -3)), ("s128", (16, 21)),
    ("words", (0, 0)), ("words", (32, 15)),
    ("cube", (0, 0, 0)), ("cube", (8, 3, 4)), ("cube", (-8, -1, -1)),
    ("thin", (0, 0, 0)), ("thin", (24, 2, 3)), ("thin", (-4, -1, -2)),
]  # fmt: skip


def _sizes(spec: TensorMapSpec) -> int:
    return int(np.prod(spec.box)) * spec.element_bytes


def _map_addresses(names: Sequence[str]) -> str:
    """The generic address of each map in a register: %d10 and on."""
    return "".join(
        f"mov.b64 %d{10 + n}, {name};\ncvta.param.u64 %d{10 + n}, %d{10 + n};\n" for n, name in enumerate(names)
    )


def _load_opcode(rank: int) -> str:
    return f"cp.async.bulk.tensor.{rank}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"


def _place_tiles(tiles: Sequence[tuple[str, tuple[int, ...]]]) -> tuple[list[int], int]:
    """Each tile starts where the pattern of its swizzle does, and what lies between is filled in advance."""
    places, at = [], 0
    for name, _ in tiles:
        places.append(at)
        at += -(-_sizes(_MAPS[name]) // 1024) * 1024
    return places, at


def _load_tiles(name: str, tiles: Sequence[tuple[str, tuple[int, ...]]]) -> None:
    used = list(dict.fromkeys(which for which, _ in tiles))
    places, room = _place_tiles(tiles)
    issue = []
    for place, (which, coordinates) in zip(places, tiles, strict=True):
        issue += [f"mov.u32 %r{30 + n}, {c};" for n, c in enumerate(coordinates)]
        at = ", ".join(f"%r{30 + n}" for n in range(len(coordinates)))
        opcode, address = _load_opcode(len(coordinates)), 10 + used.index(which)
        issue.append(f"{opcode} [%r20 + {place}], [%d{address}, {{{at}}}], [%r23];")
    buffers = _tensors(4, 24 * 208)

    def answer(found: Mapping[str, Array]) -> Mapping[str, Array]:
        target = np.full(room, 0x11, np.uint8)
        for place, (which, coordinates) in zip(places, tiles, strict=True):
            content = tile(_MAPS[which], found[_MAPS[which].buffer], coordinates)
            target[place : place + len(content)] = content
        return {"target": target}

    program(
        name,
        _BULK.format(room=room)
        + f"""
        mov.u32 %r0, 0x11111111;
        mov.u32 %r10, %thread;
        CLEAR: shl.b32 %r11, %r10, 4;
        add.u32 %r11, %r11, %r20;
        st.shared.v4.b32 [%r11], {{%r0, %r0, %r0, %r0}};
        add.u32 %r10, %r10, 128;
        setp.lt.u32 %p2, %r10, {room // 16};
        @%p2 bra CLEAR;
        fence.proxy.async.shared::cta;
        bar.sync 0;
        """
        + _map_addresses(used)
        + _loaded("\n".join(issue), sum(_sizes(_MAPS[which]) for which, _ in tiles))
        + _out_of_shared(room, 128),
        answer,
        holds={_load_opcode(len(coordinates)) for _, coordinates in tiles},
        inputs=buffers,
        outputs={"out": poison(1), "target": poison(room, np.uint8)},
        maps={which: _MAPS[which] for which in used},
        threads=128,
    )


_load_tiles("tile-loads-unswizzled", [t for t in _TILES if not _MAPS[t[0]].swizzle_bytes])
for _bytes in (32, 64, 128):
    _load_tiles(f"tile-loads-swizzle-{_bytes}", [t for t in _TILES if _MAPS[t[0]].swizzle_bytes == _bytes])

_STORES: list[tuple[str, tuple[int, ...]]] = [
    ("sline", (16,)), ("sline", (88,)), ("sline", (52,)),
    ("splain", (0, 0)), ("splain", (32, 12)), ("splain", (16, 8)),
    ("ss32", (48, 3)), ("ss64", (8, 5)), ("ss128", (64, 12)), ("ss128", (0, 0)),
    ("scube", (8, 3, 4)), ("scube", (0, 0, 1)),
]  # fmt: skip
_STORED = {
    "sline": TensorMapSpec("o0", "f32", (100,), (), (32,)),
    "splain": TensorMapSpec("o1", "f16", (40, 20), (96,), (16, 8)),
    "ss32": TensorMapSpec("o2", "bf16", (56, 24), (128,), (16, 24), 32),
    "ss64": TensorMapSpec("o3", "bf16", (56, 24), (128,), (32, 16), 64),
    "ss128": TensorMapSpec("o4", "f16", (96, 24), (208,), (64, 16), 128),
    "scube": TensorMapSpec("o5", "bf16", (72, 6, 5), (144, 144 * 7), (64, 4, 2), 128),
}
_MAPS.update(_STORED)
_STORE_PLACES, _STORE_ROOM = _place_tiles(_STORES)


def _tile_stores() -> None:
    issue, used = [], list(_STORED)
    for place, (which, coordinates) in zip(_STORE_PLACES, _STORES, strict=True):
        issue += [f"mov.u32 %r{30 + n}, {c};" for n, c in enumerate(coordinates)]
        at = ", ".join(f"%r{30 + n}" for n in range(len(coordinates)))
        issue.append(
            f"cp.async.bulk.tensor.{len(coordinates)}d.global.shared::cta.tile.bulk_group "
            f"[%d{10 + used.index(which)}, {{{at}}}], [%r20 + {place}];\ncp.async.bulk.commit_group;"
        )
    outputs = {spec.buffer: poison(24 * 208 + 144 * 40, np.uint8) for spec in _STORED.values()}

    def answer(found: Mapping[str, Array]) -> Mapping[str, Array]:
        results = {name: found[name].copy() for name in outputs}
        for place, (which, coordinates) in zip(_STORE_PLACES, _STORES, strict=True):
            spec = _STORED[which]
            _put(spec, results[spec.buffer], coordinates, found["source"][place : place + _sizes(spec)])
        return results

    program(
        "tile-stores",
        _BULK.format(room=_STORE_ROOM)
        + fill_from("source", _STORE_ROOM, 128)
        + _map_addresses(used)
        + "@!%p1 bra DONE;\n"
        + "\n".join(issue)
        + "\ncp.async.bulk.wait_group 0;\nDONE:\n",
        answer,
        holds=[f"cp.async.bulk.tensor.{rank}d.global.shared::cta.tile.bulk_group" for rank in (1, 2, 3)],
        inputs={"source": np.random.default_rng(54).integers(0, 256, _STORE_ROOM, np.uint8)},
        outputs={"out": poison(1), **outputs},
        maps=_STORED,
        threads=128,
    )


_tile_stores()

_SUMMED = {
    "flat": TensorMapSpec("sums", "f32", (20, 10), (96,), (16, 4)),
    "swizzled": TensorMapSpec("more", "f32", (40, 12), (160,), (32, 8), 128),
}
_SUMS: list[tuple[str, tuple[int, int]]] = [
    ("flat", (0, 0)), ("flat", (8, 2)), ("flat", (4, 7)), ("swizzled", (0, 0)), ("swizzled", (16, 6)),
    ("swizzled", (4, 2)),
]  # fmt: skip
_SUM_VALUES = np.random.default_rng(55).integers(-50, 50, 6 * 256).astype(np.float32)


def _tile_sums() -> None:
    places = [1024 * n for n in range(len(_SUMS))]
    issue = []
    for place, (which, coordinates) in zip(places, _SUMS, strict=True):
        issue.append(
            f"mov.u32 %r30, {coordinates[0]};\nmov.u32 %r31, {coordinates[1]};\n"
            "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group "
            f"[%d{10 + list(_SUMMED).index(which)}, {{%r30, %r31}}], [%r20 + {place}];"
        )

    def answer(found: Mapping[str, Array]) -> Mapping[str, Array]:
        results = {name: found[name].copy() for name in ("sums", "more")}
        for place, (which, coordinates) in zip(places, _SUMS, strict=True):
            spec = _SUMMED[which]
            before = results[spec.buffer]
            added = np.zeros_like(before)
            _put(spec, added, coordinates, found["source"].view(np.uint8)[place : place + _sizes(spec)])
            results[spec.buffer] = before + added
        return results

    program(
        "tile-reductions",
        _BULK.format(room=6 * 1024)
        + fill_from("source", 6 * 1024, 128)
        + _map_addresses(list(_SUMMED))
        + "@!%p1 bra DONE;\n"
        + "\n".join(issue)
        + "\ncp.async.bulk.commit_group;\ncp.async.bulk.wait_group 0;\nDONE:\n",
        answer,
        holds=("cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group",),
        inputs={"source": _SUM_VALUES},
        outputs={"out": poison(1), "sums": np.arange(240, dtype=np.float32), "more": np.ones(480, np.float32)},
        maps=_SUMMED,
        reads_outputs=True,
        threads=128,
    )


_tile_sums()

# --- gathered rows: sm_100 -------------------------------------------------------------------------------------------

_GATHERED = {
    "rows": TensorMapSpec("t0", "bf16", (64, 30), (144,), (64, 1), 128),
    "narrow": TensorMapSpec("t0", "f16", (40, 30), (144,), (16, 1)),
}
_GATHERS = [
    ("rows", 0, (3, 29, 0, 3)), ("rows", 8, (7, -1, 30, 12)), ("narrow", 0, (1, 2, 3, 4)), ("narrow", 32, (5, 99, 0, 29)),
    ("narrow", -8, (-2, 11, 12, 13)),
]  # fmt: skip


def _gather() -> None:
    issue, total = [], 0
    for n, (which, column, rows) in enumerate(_GATHERS):
        issue += [f"mov.u32 %r{30 + k}, {c};" for k, c in enumerate((column, *rows))]
        at = ", ".join(f"%r{30 + k}" for k in range(5))
        issue.append(
            "cp.async.bulk.tensor.2d.shared::cta.global.tile::gather4.mbarrier::complete_tx::bytes "
            f"[%r20 + {1024 * n}], [%d{10 + list(_GATHERED).index(which)}, {{{at}}}], [%r23];"
        )
        total += 4 * _sizes(_GATHERED[which])

    def answer(found: Mapping[str, Array]) -> Mapping[str, Array]:
        target = np.full(1024 * len(_GATHERS), 0x11, np.uint8)
        for n, (which, column, rows) in enumerate(_GATHERS):
            spec = _GATHERED[which]
            flat = TensorMapSpec(spec.buffer, spec.kind, spec.extents, spec.strides, spec.box)
            linear = np.concatenate([tile(flat, found["t0"], (column, row)) for row in rows])
            target[1024 * n + swizzle_offsets(len(linear), spec.swizzle_bytes)] = linear
        return {"target": target}

    room = 1024 * len(_GATHERS)
    program(
        "tile-gathers",
        _BULK.format(room=room)
        + fill_from("source", room, 128)
        + _map_addresses(list(_GATHERED))
        + _loaded("\n".join(issue), total)
        + _out_of_shared(room, 128),
        answer,
        holds=("cp.async.bulk.tensor.2d.shared::cta.global.tile::gather4.mbarrier::complete_tx::bytes",),
        inputs={"source": np.full(room, 0x11, np.uint8), "t0": _BYTES[: 30 * 144]},
        outputs={"out": poison(1), "target": poison(room, np.uint8)},
        maps=_GATHERED,
        threads=128,
        target="sm_100a",
    )


_gather()
