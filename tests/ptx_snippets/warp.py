"""Control flow, what the lanes of a warp exchange, and what identifies a thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ptx_snippets.framework import MASK32, poison, program, s32

Array = Any
_LANES = range(32)
_VALUES = np.random.default_rng(21).integers(0, 1 << 32, 32, np.uint64).astype(np.uint32)
_VALUES[[3, 9, 17]] = [0x80000000, 0x7FFFFFFF, 0]
_LOAD = "ld.param.u64 %d0, [values];\nmad.wide.u32 %d0, %thread, 4, %d0;\nld.global.b32 %r0, [%d0];\n"


def _rows(*rows: Any) -> Callable[[Mapping[str, Array]], Mapping[str, Array]]:
    return lambda buffers: {"out": np.array(rows, np.int64).astype(np.uint32)}


# --- control ---------------------------------------------------------------------------------------------------------

program(
    "if-else-by-lane",
    """
    and.b32 %r1, %lane, 3;
    setp.eq.u32 %p0, %r1, 0;
    @%p0 bra A;
    setp.eq.u32 %p1, %r1, 1;
    @!%p1 bra B;
    mov.u32 %r2, 100;
    bra.uni JOIN;
    A: mov.u32 %r2, 200;
    bra JOIN;
    B: add.u32 %r2, %lane, 300;
    JOIN: add.u32 %r2, %r2, 1;
    STORE 0, %r2;
    bar.warp.sync 0xffffffff;
    activemask.b32 %r3;
    STORE 1, %r3;
    """,
    _rows([{0: 201, 1: 101}.get(lane & 3, lane + 301) for lane in _LANES], [MASK32] * 32),
    holds=("bra", "bra.uni", "activemask.b32", "bar.warp.sync"),
    rows=2,
)
program(
    "loops-with-a-count-of-each-lane",
    """
    mov.u32 %r1, 0;
    mov.u32 %r2, 0;
    mul.lo.u32 %r3, %lane, 7;
    and.b32 %r3, %r3, 15;
    LOOP: setp.ge.u32 %p0, %r1, %r3;
    @%p0 bra DONE;
    mov.u32 %r4, 0;
    INNER: add.u32 %r2, %r2, %r1;
    add.u32 %r4, %r4, 1;
    setp.lt.u32 %p1, %r4, %r1;
    @%p1 bra INNER;
    add.u32 %r1, %r1, 1;
    bra LOOP;
    DONE: STORE 0, %r2;
    bar.warp.sync -1;
    shfl.sync.idx.b32 %r5, %r2, 13, 31, -1;
    STORE 1, %r5;
    """,
    lambda buffers: {
        "out": np.array(
            [
                counts := [sum(i * max(i, 1) for i in range(lane * 7 & 15)) for lane in _LANES],
                [counts[13]] * 32,
            ],
            np.uint32,
        )
    },
    holds=("bra", "bar.warp.sync", "shfl.sync.idx.b32"),
    rows=2,
)
program(
    "lanes-that-leave-early",
    """
    mov.u32 %r1, 7;
    setp.lt.u32 %p0, %lane, 5;
    @%p0 STORE 0, %r1;
    @%p0 ret;
    setp.gt.u32 %p1, %lane, 27;
    mov.u32 %r1, 9;
    @%p1 bra LAST;
    STORE 0, %r1;
    exit;
    LAST: mov.u32 %r1, 11;
    STORE 0, %r1;
    """.replace("@%p0 STORE 0, %r1;", "@%p0 st.global.b32 [%out], %r1;"),
    _rows([7 if lane < 5 else 11 if lane > 27 else 9 for lane in _LANES]),
    holds=("ret", "exit"),
    rows=1,
)
program(
    "scopes-and-shadowed-names",
    """
    mov.u32 %r1, 3;
    {
    .reg .b32 %r1;
    .reg .pred loop;
    mov.u32 %r1, 40;
    AGAIN: sub.u32 %r1, %r1, 4;
    setp.gt.u32 loop, %r1, 10;
    @loop bra AGAIN;
    STORE 0, %r1;
    }
    {
    .reg .b32 other;
    mov.u32 other, 50;
    AGAIN: add.u32 other, other, 1;
    setp.lt.u32 %p0, other, 60;
    @%p0 bra AGAIN;
    STORE 1, other;
    }
    STORE 2, %r1;
    """,
    _rows([8] * 32, [60] * 32, [3] * 32),
    holds=("bra", "mov.u32"),
    rows=3,
)

# --- special registers -----------------------------------------------------------------------------------------------

_GRID, _BLOCK = (3, 2, 2), 64
_SPECIAL = {
    "%tid.x": lambda x, y, z, t: t,
    "%tid.y": lambda x, y, z, t: 0,
    "%tid.z": lambda x, y, z, t: 0,
    "%ntid.x": lambda x, y, z, t: _BLOCK,
    "%ntid.y": lambda x, y, z, t: 1,
    "%ntid.z": lambda x, y, z, t: 1,
    "%ctaid.x": lambda x, y, z, t: x,
    "%ctaid.y": lambda x, y, z, t: y,
    "%ctaid.z": lambda x, y, z, t: z,
    "%nctaid.x": lambda x, y, z, t: _GRID[0],
    "%nctaid.y": lambda x, y, z, t: _GRID[1],
    "%nctaid.z": lambda x, y, z, t: _GRID[2],
    "%laneid": lambda x, y, z, t: t % 32,
    "%lanemask_eq": lambda x, y, z, t: 1 << t % 32,
    "%lanemask_lt": lambda x, y, z, t: (1 << t % 32) - 1,
    "%lanemask_le": lambda x, y, z, t: (2 << t % 32) - 1,
    "%lanemask_gt": lambda x, y, z, t: MASK32 ^ ((2 << t % 32) - 1),
    "%lanemask_ge": lambda x, y, z, t: MASK32 ^ ((1 << t % 32) - 1),
    "%dynamic_smem_size": lambda x, y, z, t: 0,
    "%cluster_ctarank": lambda x, y, z, t: 0,
    "%cluster_nctarank": lambda x, y, z, t: 1,
    "%clusterid.x": lambda x, y, z, t: x,
    "%nclusterid.x": lambda x, y, z, t: _GRID[0],
}
_THREADS_OF_GRID = [
    (x, y, z, t) for z in range(_GRID[2]) for y in range(_GRID[1]) for x in range(_GRID[0]) for t in range(_BLOCK)
]
program(
    "special-registers",
    """
    mov.u32 %r1, %ctaid.z;
    mov.u32 %r2, %nctaid.y;
    mov.u32 %r3, %ctaid.y;
    mad.lo.u32 %r1, %r1, %r2, %r3;
    mov.u32 %r2, %nctaid.x;
    mov.u32 %r3, %ctaid.x;
    mad.lo.u32 %r1, %r1, %r2, %r3;
    mad.lo.u32 %r1, %r1, 64, %thread;
    ld.param.u64 %d0, [ids];
    mad.wide.u32 %d0, %r1, 4, %d0;
    """
    + "".join(
        f"mov.u32 %r4, {name};\nst.global.b32 [%d0 + {row * len(_THREADS_OF_GRID) * 4}], %r4;\n"
        for row, name in enumerate(_SPECIAL)
    )
    # Warps have a number of their own within the CTA; clocks do not run backwards.
    + f"""
    mov.u32 %r4, %warpid;
    shfl.sync.idx.b32 %r5, %r4, 0, 31, -1;
    sub.u32 %r4, %r4, %r5;
    st.global.b32 [%d0 + {len(_SPECIAL) * len(_THREADS_OF_GRID) * 4}], %r4;
    mov.u64 %d1, %clock64;
    mov.u64 %d2, %globaltimer;
    mov.u64 %d3, %globaltimer;
    mov.u64 %d4, %clock64;
    setp.ge.u64 %p0, %d4, %d1;
    setp.ge.and.u64 %p0, %d3, %d2, %p0;
    selp.b32 %r4, 1, 0, %p0;
    st.global.b32 [%d0 + {(len(_SPECIAL) + 1) * len(_THREADS_OF_GRID) * 4}], %r4;
    """,
    lambda buffers: {
        "ids": np.array(
            [
                *([value(*thread) for thread in _THREADS_OF_GRID] for value in _SPECIAL.values()),
                [0] * len(_THREADS_OF_GRID),
                [1] * len(_THREADS_OF_GRID),
            ],
            np.uint32,
        )
    },
    holds=("mov.u32", "mov.u64"),
    rows=0,
    outputs={"out": poison(1), "ids": poison((len(_SPECIAL) + 2, len(_THREADS_OF_GRID)))},
    threads=_BLOCK,
    grid=_GRID,
)

# --- exchange --------------------------------------------------------------------------------------------------------


def _shuffled(mode: str, lane: int, b: int, c: int) -> tuple[int, int]:
    """(source lane, whether it is in range), in the words of the ISA."""
    segment, clamp, b = c >> 8 & 31, c & 31, b & 31
    highest = lane & segment | clamp & ~segment & 31
    lowest = lane & segment
    source = {"up": lane - b, "down": lane + b, "bfly": lane ^ b, "idx": lowest | b & ~segment & 31}[mode]
    inside = source >= highest if mode == "up" else source <= highest
    return (source if inside else lane), int(inside)


_SHUFFLES = [
    ("idx", 5, 31), ("idx", 40, 31), ("idx", 3, 0x181F), ("idx", 11, 0x1807), ("idx", 7, 5), ("idx", 2, 0x1C03),
    ("up", 1, 0), ("up", 5, 0x1800), ("up", 31, 0), ("up", 33, 0), ("up", 3, 0x1C00),
    ("down", 1, 31), ("down", 6, 0x181F), ("down", 2, 0x1C1F), ("down", 4, 20), ("down", 0, 31),
    ("bfly", 1, 31), ("bfly", 16, 31), ("bfly", 31, 31), ("bfly", 9, 0x101F), ("bfly", 3, 17),
]  # fmt: skip


def _shuffle_answer(buffers: Mapping[str, Array]) -> Mapping[str, Array]:
    rows = []
    for mode, b, c in _SHUFFLES:
        found = [_shuffled(mode, lane, b, c) for lane in _LANES]
        rows.append([int(buffers["values"][source]) for source, _ in found])
        rows.append([inside for _, inside in found])
    rotated = [_shuffled("idx", lane, lane * 3 + 1, 31) for lane in _LANES]
    rows.append([int(buffers["values"][source]) for source, _ in rotated])
    half = [_shuffled("bfly", lane, 5, 31)[0] for lane in _LANES]
    rows.append([int(buffers["values"][half[lane]]) ^ (0 if lane < 16 else MASK32) for lane in _LANES])
    return {"out": np.array(rows, np.uint32)}


program(
    "shuffles",
    _LOAD
    + "".join(
        f"shfl.sync.{mode}.b32 %r1|%p0, %r0, {b}, {c}, 0xffffffff;\nSTORE {2 * n}, %r1;\n"
        f"selp.b32 %r1, 1, 0, %p0;\nSTORE {2 * n + 1}, %r1;\n"
        for n, (mode, b, c) in enumerate(_SHUFFLES)
    )
    + f"""
    mad.lo.u32 %r2, %lane, 3, 1;
    mov.u32 %r3, 31;
    mov.u32 %r4, -1;
    shfl.sync.idx.b32 %r1, %r0, %r2, %r3, %r4;
    STORE {2 * len(_SHUFFLES)}, %r1;
    setp.lt.u32 %p1, %lane, 16;
    @%p1 bra LOW;
    shfl.sync.bfly.b32 %r1, %r0, 5, 31, 0xffff0000;
    not.b32 %r1, %r1;
    bra JOIN;
    LOW: shfl.sync.bfly.b32 %r1, %r0, 5, 31, 0x0000ffff;
    JOIN: STORE {2 * len(_SHUFFLES) + 1}, %r1;
    """,
    _shuffle_answer,
    holds=("shfl.sync.idx.b32", "shfl.sync.up.b32", "shfl.sync.down.b32", "shfl.sync.bfly.b32"),
    rows=2 * len(_SHUFFLES) + 2,
    inputs={"values": _VALUES},
)

_BALLOTS = (0, MASK32, 1 << 31, 0x0F0F1234)


def _vote_answer(buffers: Mapping[str, Array]) -> Mapping[str, Array]:
    rows: list[list[int]] = []
    for ballot in _BALLOTS:
        for members in (MASK32, 0x0000FFFF):
            inside = [bool(members >> lane & 1) for lane in _LANES]
            chosen = ballot & members
            results = (int(chosen == members), int(chosen != 0), int(chosen in (0, members)), chosen)
            rows += [[result if inside[lane] else 0xDEAD for lane in _LANES] for result in results]
    return {"out": np.array(rows, np.uint32)}


def _vote_text() -> str:
    lines, row = ["setp.lt.u32 %p3, %lane, 16;", "mov.u32 %r9, 0xDEAD;"], 0
    for number, ballot in enumerate(_BALLOTS):
        lines += [
            f"mov.u32 %r1, {ballot:#x};",
            "shr.u32 %r1, %r1, %lane;",
            "and.b32 %r1, %r1, 1;",
            "setp.ne.b32 %p0, %r1, 0;",
        ]
        for members in ("0xffffffff", "0x0000ffff"):
            if members != "0xffffffff":
                lines += [*(f"STORE {row + n}, %r9;" for n in range(4)), f"@!%p3 bra SKIP{number};"]
            for mode in ("all", "any", "uni"):
                lines += [
                    f"vote.sync.{mode}.pred %p1, %p0, {members};",
                    "selp.b32 %r2, 1, 0, %p1;",
                    f"STORE {row}, %r2;",
                ]
                row += 1
            lines += [f"vote.sync.ballot.b32 %r2, %p0, {members};", f"STORE {row}, %r2;"]
            row += 1
        lines.append(f"SKIP{number}: bar.warp.sync 0xffffffff;")
    return "\n".join(lines)


program(
    "votes",
    _vote_text(),
    _vote_answer,
    holds=("vote.sync.all.pred", "vote.sync.any.pred", "vote.sync.uni.pred", "vote.sync.ballot.b32"),
    rows=8 * len(_BALLOTS),
)
program(  # which lane is elected is open, but it is one, and it is the one that is named
    "election",
    """
    elect.sync %r1|%p0, 0xffffffff;
    vote.sync.ballot.b32 %r2, %p0, 0xffffffff;
    popc.b32 %r3, %r2;
    STORE 0, %r3;
    shl.b32 %r4, 1, %r1;
    sub.u32 %r4, %r4, %r2;
    STORE 1, %r4;
    mov.u32 %r5, 0;
    setp.ge.u32 %p1, %lane, 20;
    @!%p1 bra JOIN;
    elect.sync _|%p0, 0xfff00000;
    vote.sync.ballot.b32 %r5, %p0, 0xfff00000;
    popc.b32 %r6, %r5;
    and.b32 %r5, %r5, 0xfff00000;
    setp.ne.b32 %p2, %r5, 0;
    selp.b32 %r5, %r6, 77, %p2;
    JOIN: STORE 2, %r5;
    """,
    _rows([1] * 32, [0] * 32, [1 if lane >= 20 else 0 for lane in _LANES]),
    holds=("elect.sync",),
    rows=3,
)

_REDUCTIONS: dict[str, Callable[[list[int]], int]] = {
    "add.u32": sum,
    "add.s32": sum,
    "min.u32": min,
    "max.u32": max,
    "min.s32": lambda values: min(map(s32, values)),
    "max.s32": lambda values: max(map(s32, values)),
    "and.b32": lambda values: int(np.bitwise_and.reduce(np.array(values, np.uint32))),
    "or.b32": lambda values: int(np.bitwise_or.reduce(np.array(values, np.uint32))),
    "xor.b32": lambda values: int(np.bitwise_xor.reduce(np.array(values, np.uint32))),
}


def _redux_answer(buffers: Mapping[str, Array]) -> Mapping[str, Array]:
    values = [int(value) for value in buffers["values"]]
    rows = [[function(values) & MASK32] * 32 for function in _REDUCTIONS.values()]
    rows += [[function(values[8 * (n // 8) :][:8]) & MASK32 for n in _LANES] for function in _REDUCTIONS.values()]
    return {"out": np.array(rows, np.uint32)}


program(
    "reductions",
    _LOAD
    + "".join(f"redux.sync.{name} %r1, %r0, 0xffffffff;\nSTORE {row}, %r1;\n" for row, name in enumerate(_REDUCTIONS))
    + "and.b32 %r2, %lane, 24;\nmov.u32 %r3, 255;\nshl.b32 %r3, %r3, %r2;\n"
    # Every mask in a branch of its own: the lanes that one instruction names have to reach it together.
    + "".join(
        f"setp.ne.u32 %p0, %r2, {8 * group};\n@%p0 bra NEXT{group};\n"
        + "".join(
            f"redux.sync.{name} %r1, %r0, %r3;\nSTORE {row + len(_REDUCTIONS)}, %r1;\n"
            for row, name in enumerate(_REDUCTIONS)
        )
        + f"NEXT{group}: bar.warp.sync -1;\n"
        for group in range(4)
    ),
    _redux_answer,
    holds=[f"redux.sync.{name}" for name in _REDUCTIONS],
    rows=2 * len(_REDUCTIONS),
    inputs={"values": _VALUES},
)
program(
    "hints",
    """
    ld.param.u64 %d0, [values];
    mad.wide.u32 %d0, %thread, 4, %d0;
    prefetch.global.L2 [%d0];
    prefetch.global.L1 [%d0];
    nanosleep.u32 20;
    griddepcontrol.wait;
    createpolicy.fractional.L2::evict_last.b64 %d1, 1.0;
    ld.global.L2::cache_hint.b32 %r0, [%d0], %d1;
    griddepcontrol.launch_dependents;
    STORE 0, %r0;
    """.replace("1.0;", "0f3F800000;"),
    lambda buffers: {"out": buffers["values"].reshape(1, 32)},
    holds=("prefetch.global.L2", "nanosleep.u32", "griddepcontrol.wait", "ld.global.L2::cache_hint.b32"),
    rows=1,
    inputs={"values": _VALUES},
)
program(
    "register-counts",
    """
    mov.u32 %r0, 5;
    setmaxnreg.dec.sync.aligned.u32 40;
    add.u32 %r0, %r0, %lane;
    STORE 0, %r0;
    """,
    lambda buffers: {"out": (np.arange(128, dtype=np.uint32) % 32 + 5).reshape(1, 128)},
    holds=("setmaxnreg.dec.sync.aligned.u32",),
    rows=1,
    threads=128,
    directives=".maxnreg 64",
)
