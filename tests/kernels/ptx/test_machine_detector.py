"""The detector: each fault that it knows in a tiny program, and the repaired twin of that program without findings."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

pytest.importorskip("numpy")
pytest.importorskip("ziglang")

import numpy as np
from ptx_snippets.framework import kernel

from dsa_planner.kernels.ptx import decode, machine, parser

RACES = frozenset({"race: read after write", "race: write after read", "race: write after write"})
UNWRITTEN = "read of memory never written"
SCHEDULES = ("inorder", "random:1", "random:5", "late:2")

SETUP = """
.reg .pred %p<12>;
.reg .b16 %h<8>;
.reg .b32 %r<40>;
.reg .b64 %d<16>;
.reg .b32 %thread, %lane, %warp;
.shared .align 1024 .b8 room[4096];
.shared .align 8 .b8 barrier[16];
mov.u32 %thread, %tid.x;
and.b32 %lane, %thread, 31;
shr.u32 %warp, %thread, 5;
mov.u32 %r20, room;
mov.u32 %r21, barrier;
mad.lo.u32 %r22, %thread, 4, %r20;
setp.eq.u32 %p1, %thread, 0;
setp.eq.u32 %p2, %warp, 0;
ld.param.u64 %d0, [source];
ld.param.u64 %d1, [target];
mad.wide.u32 %d2, %thread, 4, %d0;
mad.wide.u32 %d3, %thread, 4, %d1;
"""


@dataclass(frozen=True)
class Fault:
    """A program that breaks a rule where ``repair`` stands in it, and is right with ``by`` in that place.

    ``kind`` is what the detector says, and ``before`` and ``now`` are parts of the two lines that it quotes. Under some
    schedules it may see the same fault from another side: ``also``. A fault that ``depends_on_timing`` may go unseen
    where an operation happens to be early.
    """

    name: str
    body: str
    kind: str
    now: str
    by: str = ""
    instead: str = ""
    before: str = ""
    threads: int = 32
    grid: int = 1
    target: str = "sm_90a"
    also: frozenset[str] = frozenset()
    depends_on_timing: bool = False

    def text(self, repaired: bool) -> str:
        body = self.body.replace("REPAIR", self.by if repaired else self.instead)
        return kernel(["source", "target"], SETUP + body, threads=self.threads, target=self.target)


def run(
    vm: machine.Machine, text: str, threads: int, grid: int, schedule: str, limit: int = 1 << 20
) -> list[machine.Finding]:
    program = decode.decode(parser.parse(text).kernels["snippet"])
    source = machine.Buffer(np.arange(1024, dtype=np.uint32), 0, writable=False)
    target = machine.Buffer(np.zeros(1024, np.uint32), 1)
    parameters = machine.pack_parameters(program, [source.address, target.address])
    result = vm.launch(
        program, grid, threads, 0, parameters, [source, target], machine.Schedule.parse(schedule), instruction_limit=limit
    )  # fmt: skip
    return result.findings


_OTHER = "xor.b32 %r1, %thread, 32;\nmad.lo.u32 %r23, %r1, 4, %r20;\n"
_NEIGHBOUR = "xor.b32 %r1, %thread, 1;\nmad.lo.u32 %r23, %r1, 4, %r20;\n"
_MBARRIER = "@%p1 mbarrier.init.shared::cta.b64 [%r21], {0};\n@%p1 fence.mbarrier_init.release.cluster;\nbar.sync 0;\n"
_LOAD = """
@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r21], 128;
@%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r20], [%d0], 128, [%r21];
"""
_WAIT = "WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p0, [%r21], 0;\n@!%p0 bra WAIT;\n"
_WGMMA = "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%r1, %r2, %r3, %r4}, %d5, %d5, %p3, 1, 1, 0, 0;\n"
_WGMMA_ROOM = """
mov.u32 %r0, 0;
mov.u32 %r1, %r0;
mov.u32 %r2, %r0;
mov.u32 %r3, %r0;
mov.u32 %r4, %r0;
mad.lo.u32 %r23, %thread, 16, %r20;
st.shared.v4.b32 [%r23], {%r0, %r0, %r0, %r0};
st.shared.v4.b32 [%r23 + 2048], {%r0, %r0, %r0, %r0};
shr.u32 %r6, %r20, 4;
cvt.u64.u32 %d5, %r6;
or.b64 %d5, %d5, 0x0000001000080000;
setp.eq.u32 %p3, %thread, %thread;
"""
_FENCED = "fence.proxy.async.shared::cta;\nbar.sync 0;\n"
_COMMITTED = "wgmma.commit_group.sync.aligned;\n"
_WAITED = "wgmma.wait_group.sync.aligned 0;\n"
_ALLOCATE = "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r20], 32;\nbar.warp.sync -1;\nld.shared.b32 %r24, [%r20];\n"
_RELEASE = "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r24, 32;\n"

FAULTS = [
    Fault(
        "a-warp-reads-what-another-writes",
        _OTHER + "st.shared.b32 [%r22], %thread;\nREPAIR\nld.shared.b32 %r2, [%r23];\nst.global.b32 [%d3], %r2;",
        # In order the first warp reads before the second has written at all.
        UNWRITTEN, "ld.shared.b32", by="bar.sync 0;", threads=64, also=RACES,
    ),
    Fault(
        "read-after-write-between-warps",
        "@%p2 st.shared.b32 [%r22], %thread;\nREPAIR\nsub.u32 %r1, %r22, 128;\n@!%p2 ld.shared.b32 %r2, [%r1];\n"
        "@!%p2 st.global.b32 [%d3], %r2;",
        "race: read after write", "ld.shared.b32", by="bar.sync 0;", before="st.shared.b32 [%r22]", threads=64,
        also=RACES | {UNWRITTEN},
    ),
    Fault(
        "write-after-read-between-warps",
        "st.shared.b32 [%r22], %thread;\nbar.sync 0;\n" + _OTHER
        + "ld.shared.b32 %r2, [%r23];\nst.global.b32 [%d3], %r2;\nREPAIR\nst.shared.b32 [%r22], %r2;",
        "race: write after read", "st.shared.b32 [%r22], %r2", by="bar.sync 0;", before="ld.shared.b32", threads=64,
        also=RACES,
    ),
    Fault(
        "a-word-that-more-warps-have-read-than-are-waited-for",
        "@%p1 st.shared.b32 [%r20], 5;\nbar.sync 0;\nld.shared.b32 %r2, [%r20];\nst.global.b32 [%d3], %r2;\nREPAIR\n"
        "@%p1 st.shared.b32 [%r20], 6;",
        "race: write after read", "st.shared.b32 [%r20], 6", by="bar.sync 0;",
        instead="setp.lt.u32 %p4, %warp, 2;\n@%p4 bar.sync 1, 64;", before="ld.shared.b32", threads=96, also=RACES,
    ),
    Fault(
        "write-after-write-between-warps",
        "@%p2 st.shared.b32 [%r22], %thread;\nREPAIR\nsub.u32 %r1, %r22, 128;\n@!%p2 st.shared.b32 [%r1], %thread;",
        "race: write after write", "st.shared.b32", by="bar.sync 0;", before="st.shared.b32", threads=64,
    ),
    Fault(
        "a-named-barrier-of-other-warps-orders-nothing",
        "setp.lt.u32 %p4, %warp, 2;\n@%p4 st.shared.b32 [%r22], %thread;\nREPAIR\nsub.u32 %r1, %r22, 256;\n"
        "@!%p4 ld.shared.b32 %r2, [%r1];\n@!%p4 st.global.b32 [%d3], %r2;",
        "race: read after write", "ld.shared.b32", by="bar.sync 3, 128;",
        instead="shr.u32 %r5, %warp, 1;\nadd.u32 %r5, %r5, 1;\nbar.sync %r5, 64;", before="st.shared.b32", threads=128,
        also=RACES | {UNWRITTEN},
    ),
    Fault(
        "lanes-of-a-warp-without-a-warp-barrier",
        _NEIGHBOUR + "st.shared.b32 [%r22], %thread;\nREPAIR\nld.shared.b32 %r2, [%r23];\nst.global.b32 [%d3], %r2;",
        "race: read after write", "ld.shared.b32", by="bar.warp.sync -1;", before="st.shared.b32 [%r22]",
    ),
    Fault(
        "a-warp-barrier-of-half-the-lanes",
        "st.shared.b32 [%r22], %thread;\nREPAIR\nxor.b32 %r1, %thread, 16;\nmad.lo.u32 %r23, %r1, 4, %r20;\n"
        "ld.shared.b32 %r2, [%r23];\nst.global.b32 [%d3], %r2;",
        "race: read after write", "ld.shared.b32", by="bar.warp.sync 0xffffffff;",
        instead="setp.lt.u32 %p4, %lane, 16;\nselp.b32 %r5, 0xffff, 0xffff0000, %p4;\nbar.warp.sync %r5;",
        before="st.shared.b32 [%r22]",
    ),
    Fault(
        "lanes-of-a-warp-in-global-memory",
        "st.global.b32 [%d3], %thread;\nREPAIR\nxor.b32 %r1, %thread, 1;\nmad.wide.u32 %d4, %r1, 4, %d1;\n"
        "ld.global.b32 %r2, [%d4];\nst.shared.b32 [%r22], %r2;",
        "race: read after write", "ld.global.b32 %r2", by="bar.warp.sync -1;", before="st.global.b32 [%d3]",
    ),
    Fault(
        "a-bulk-store-of-what-no-proxy-fence-covers",
        "st.shared.b32 [%r22], %thread;\nREPAIR\nbar.warp.sync -1;\n@!%p1 bra DONE;\n"
        "cp.async.bulk.global.shared::cta.bulk_group [%d1], [%r20], 128;\ncp.async.bulk.commit_group;\n"
        "cp.async.bulk.wait_group 0;\nDONE:",
        "missing proxy fence", "cp.async.bulk.global", by="fence.proxy.async.shared::cta;", before="st.shared.b32",
    ),
    Fault(
        "a-proxy-fence-before-the-barrier-of-others",
        # The fence of one thread does not cover what it has not yet been told of.
        "st.shared.b32 [%r22], %thread;\nREPAIR\n@!%p1 bra DONE;\n"
        "cp.async.bulk.global.shared::cta.bulk_group [%d1], [%r20], 256;\ncp.async.bulk.commit_group;\n"
        "cp.async.bulk.wait_group 0;\nDONE:",
        "missing proxy fence", "cp.async.bulk.global", by="bar.sync 0;\nfence.proxy.async;",
        instead="@%p1 fence.proxy.async;\nbar.sync 0;", before="st.shared.b32", threads=64,
    ),
    Fault(
        "a-bulk-load-over-what-no-proxy-fence-covers",
        "st.shared.b32 [%r22], %thread;\nREPAIR\n" + _MBARRIER.format(1) + _LOAD + _WAIT
        + "ld.shared.b32 %r2, [%r22];\nst.global.b32 [%d3], %r2;",
        "missing proxy fence", "cp.async.bulk.shared", by="fence.proxy.async;", before="st.shared.b32",
    ),
    Fault(
        "a-bulk-reduction-into-what-no-proxy-fence-covers",
        "st.shared.b32 [%r22], %thread;\nfence.proxy.async;\nst.global.b32 [%d3], %thread;\nREPAIR\nbar.warp.sync -1;\n@!%p1 bra DONE;\n"
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%d1], [%r20], 128;\n"
        "cp.async.bulk.commit_group;\ncp.async.bulk.wait_group 0;\nDONE:",
        "missing proxy fence", "cp.reduce.async.bulk", by="fence.proxy.async;",
        before="st.global.b32",
    ),
    Fault(
        "a-bulk-load-of-what-no-proxy-fence-covers",
        "st.global.b32 [%d3], %thread;\nREPAIR\n" + _MBARRIER.format(1) + _LOAD.replace("[%d0]", "[%d1]") + _WAIT,
        "missing proxy fence", "cp.async.bulk.shared", by="fence.proxy.async.global;", before="st.global.b32",
    ),
    Fault(
        "cp-async-without-its-wait",
        "cp.async.ca.shared.global [%r22], [%d2], 4;\ncp.async.commit_group;\nREPAIR\n"
        "ld.shared.b32 %r2, [%r22];\nst.global.b32 [%d3], %r2;",
        UNWRITTEN, "ld.shared.b32", by="cp.async.wait_group 0;", also=RACES,
    ),
    Fault(
        "cp-async-with-a-wait-for-too-few-groups",
        "cp.async.ca.shared.global [%r22], [%d2], 4;\ncp.async.commit_group;\n"
        "cp.async.ca.shared.global [%r22 + 128], [%d2], 4;\ncp.async.commit_group;\nREPAIR\n"
        "ld.shared.b32 %r2, [%r22 + 128];\nst.global.b32 [%d3], %r2;",
        "race: read after write", "ld.shared.b32", by="cp.async.wait_group 0;", instead="cp.async.wait_group 1;",
        before="cp.async.ca", also=RACES | {UNWRITTEN},
    ),
    Fault(
        "cp-async-that-other-lanes-read-without-a-barrier",
        "cp.async.ca.shared.global [%r22], [%d2], 4;\ncp.async.wait_all;\nREPAIR\n" + _NEIGHBOUR
        + "ld.shared.b32 %r2, [%r23];\nst.global.b32 [%d3], %r2;",
        "race: read after write", "ld.shared.b32", by="bar.warp.sync -1;", before="cp.async.ca",
    ),
    Fault(
        "a-bulk-load-without-its-wait",
        _MBARRIER.format(1) + _LOAD + "REPAIR\nld.shared.b32 %r2, [%r22];\nst.global.b32 [%d3], %r2;",
        UNWRITTEN, "ld.shared.b32", by=_WAIT, also=RACES,
    ),
    Fault(
        "a-room-filled-again-while-a-bulk-store-reads-it",
        "st.shared.b32 [%r22], %thread;\nfence.proxy.async;\nbar.warp.sync -1;\n@!%p1 bra DONE;\n"
        "cp.async.bulk.global.shared::cta.bulk_group [%d1], [%r20], 128;\ncp.async.bulk.commit_group;\nREPAIR\n"
        "st.shared.b32 [%r20], 7;\ncp.async.bulk.wait_group 0;\nDONE:",
        "missing proxy fence", "cp.async.bulk.global", by="cp.async.bulk.wait_group.read 0;",
        before="st.shared.b32 [%r20], 7", also=RACES,
    ),
    Fault(
        "a-room-filled-again-after-a-wait-for-too-few-groups",
        "st.shared.b32 [%r22], %thread;\nst.shared.b32 [%r22 + 128], %thread;\nfence.proxy.async;\nbar.warp.sync -1;\n"
        "@!%p1 bra DONE;\n"
        "cp.async.bulk.global.shared::cta.bulk_group [%d1], [%r20], 128;\ncp.async.bulk.commit_group;\n"
        "cp.async.bulk.global.shared::cta.bulk_group [%d1 + 128], [%r20 + 128], 128;\ncp.async.bulk.commit_group;\n"
        "REPAIR\nst.shared.b32 [%r20 + 128], 7;\ncp.async.bulk.wait_group 0;\nDONE:",
        "race: write after read", "st.shared.b32 [%r20 + 128], 7", by="cp.async.bulk.wait_group.read 0;",
        instead="cp.async.bulk.wait_group.read 1;", before="cp.async.bulk.global",
        also=RACES | {"missing proxy fence"},
    ),
    Fault(
        "a-bulk-store-in-flight-at-the-end",
        "st.shared.b32 [%r22], %thread;\nfence.proxy.async;\nbar.warp.sync -1;\n@!%p1 bra DONE;\n"
        "cp.async.bulk.global.shared::cta.bulk_group [%d1], [%r20], 128;\ncp.async.bulk.commit_group;\nREPAIR\nDONE:",
        "still in flight at the end", "", by="cp.async.bulk.wait_group.read 0;", before="cp.async.bulk.global",
        depends_on_timing=True,
    ),
    Fault(
        "a-wgmma-without-its-wait",
        _WGMMA_ROOM + _FENCED + "wgmma.fence.sync.aligned;\n" + _WGMMA + _COMMITTED
        + "REPAIR\nst.global.b32 [%d3], %r1;\nwgmma.wait_group.sync.aligned 0;",
        "wgmma contract", "st.global.b32", by=_WAITED, before="wgmma.mma_async", threads=128, depends_on_timing=True,
    ),
    Fault(
        "a-wgmma-after-a-register-write-without-a-fence",
        _WGMMA_ROOM + _FENCED + "wgmma.fence.sync.aligned;\nmov.u32 %r1, 0;\nREPAIR\n" + _WGMMA + _COMMITTED + _WAITED
        + "st.global.b32 [%d3], %r1;",
        "wgmma contract", "wgmma.mma_async", by="wgmma.fence.sync.aligned;", threads=128,
    ),
    Fault(
        "a-wgmma-after-a-register-read-without-a-fence",
        _WGMMA_ROOM + _FENCED + "wgmma.fence.sync.aligned;\n" + _WGMMA + _COMMITTED + _WAITED
        + "st.global.b32 [%d3], %r1;\nREPAIR\n" + _WGMMA + _COMMITTED + _WAITED,
        "wgmma contract", "wgmma.mma_async", by="wgmma.fence.sync.aligned;", threads=128,
    ),
    Fault(
        "a-wgmma-without-any-fence",
        _WGMMA_ROOM.replace("eq.u32 %p3", "ne.u32 %p3") + _FENCED + "REPAIR\n"
        + _WGMMA.replace("{%r1, %r2, %r3, %r4}", "{%r30, %r31, %r32, %r33}") + _COMMITTED + _WAITED
        + "st.global.b32 [%d3], %r30;",
        "wgmma contract", "wgmma.mma_async", by="wgmma.fence.sync.aligned;", threads=128,
    ),
    Fault(
        "a-wgmma-of-operands-that-no-proxy-fence-covers",
        _WGMMA_ROOM + "REPAIR\nbar.sync 0;\nwgmma.fence.sync.aligned;\n" + _WGMMA + _COMMITTED + _WAITED
        + "st.global.b32 [%d3], %r1;",
        "missing proxy fence", "wgmma.mma_async", by="fence.proxy.async;", before="st.shared.v4.b32", threads=128,
    ),
    Fault(
        "operands-overwritten-while-a-wgmma-reads-them",
        _WGMMA_ROOM + _FENCED + "wgmma.fence.sync.aligned;\n" + _WGMMA + _COMMITTED
        + "REPAIR\nst.shared.b32 [%r22], %thread;\nwgmma.wait_group.sync.aligned 0;\nst.global.b32 [%d3], %r1;",
        "race: write after read", "st.shared.b32 [%r22]", by=_WAITED + "bar.sync 0;", before="wgmma.mma_async",
        threads=128, also=RACES | {"missing proxy fence"},
    ),
    Fault(
        "operands-overwritten-after-a-wait-for-too-few-groups",
        _WGMMA_ROOM + _FENCED + "wgmma.fence.sync.aligned;\n" + _WGMMA + _COMMITTED + "add.s64 %d6, %d5, 128;\n"
        + _WGMMA.replace("%d5, %d5", "%d6, %d6") + _COMMITTED
        + "REPAIR\nbar.sync 0;\nst.shared.b32 [%r22 + 2048], %thread;\nwgmma.wait_group.sync.aligned 0;\n"
        "st.global.b32 [%d3], %r1;",
        "race: write after read", "st.shared.b32 [%r22 + 2048]", by=_WAITED, instead=_WAITED.replace("0;", "1;"),
        before="wgmma.mma_async", threads=128, also=RACES | {"missing proxy fence"},
    ),
    Fault(
        "a-wgmma-descriptor-with-a-base-offset",
        _WGMMA_ROOM + _FENCED + "REPAIR\nwgmma.fence.sync.aligned;\n" + _WGMMA + _COMMITTED + _WAITED
        + "st.global.b32 [%d3], %r1;",
        "descriptor", "wgmma.mma_async", instead="or.b64 %d5, %d5, 0x0002000000000000;", threads=128,
    ),
    Fault(
        "a-read-of-shared-memory-that-nothing-wrote",
        "REPAIR\nld.shared.b32 %r2, [%r22];\nst.global.b32 [%d3], %r2;",
        UNWRITTEN, "ld.shared.b32", by="st.shared.b32 [%r22], %thread;",
    ),
    Fault(
        "global-memory-out-of-bounds",
        "REPAIR\nld.global.b32 %r2, [%d2];\nst.global.b32 [%d3], %r2;",
        "access out of bounds", "ld.global.b32", instead="add.s64 %d2, %d2, 4000;",
    ),
    Fault(
        "shared-memory-out-of-bounds",
        "REPAIR\nst.shared.b32 [%r22], %thread;",
        "access out of bounds", "st.shared.b32", instead="add.u32 %r22, %r22, 4096;",
    ),
    Fault(
        "a-vector-at-an-odd-word",
        "REPAIR\nmad.wide.u32 %d4, %thread, 16, %d4;\nld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%d4];",
        "misaligned access", "ld.global.v4.b32", by="mov.u64 %d4, %d0;", instead="add.s64 %d4, %d0, 4;",
    ),
    Fault(
        "a-bulk-copy-at-an-odd-word",
        "mov.u64 %d5, %d0;\nREPAIR\n" + _MBARRIER.format(1) + _LOAD.replace("[%d0]", "[%d5]") + _WAIT,
        "misaligned access", "cp.async.bulk.shared", instead="add.s64 %d5, %d0, 8;",
    ),
    Fault(
        "a-write-to-read-only-memory",
        "REPAIR\nst.global.b32 [%d4], %thread;",
        "write to read-only memory", "st.global.b32", by="mov.u64 %d4, %d3;", instead="mov.u64 %d4, %d2;",
    ),
    Fault(
        "an-atomic-to-read-only-memory",
        "REPAIR\nred.global.add.u32 [%d4], 1;",
        "write to read-only memory", "red.global.add.u32", by="mov.u64 %d4, %d3;", instead="mov.u64 %d4, %d2;",
    ),
    Fault(
        "too-many-arrivals-at-an-mbarrier",
        "REPAIR\nbar.sync 0;\nmbarrier.arrive.shared::cta.b64 _, [%r21], 2;",
        "mbarrier contract", "mbarrier.arrive", by="@%p1 mbarrier.init.shared::cta.b64 [%r21], 64;",
        instead="@%p1 mbarrier.init.shared::cta.b64 [%r21], 63;", before="mbarrier.init",
    ),
    Fault(
        "a-wait-for-an-mbarrier-that-nothing-initialised",
        "REPAIR\nbar.sync 0;\n" + _WAIT,
        "mbarrier contract", "mbarrier.try_wait",
        by="@%p1 mbarrier.init.shared::cta.b64 [%r21], 1;\n@%p1 mbarrier.arrive.shared::cta.b64 _, [%r21];",
    ),
    Fault(
        "an-mbarrier-initialised-twice",
        "@%p1 mbarrier.init.shared::cta.b64 [%r21], 1;\nREPAIR\n@%p1 mbarrier.init.shared::cta.b64 [%r21], 1;",
        "mbarrier contract", "mbarrier.init", by="@%p1 mbarrier.inval.shared::cta.b64 [%r21];", before="mbarrier.init",
    ),
    Fault(
        "an-mbarrier-used-before-its-init-is-known",
        "@%p1 mbarrier.init.shared::cta.b64 [%r21], 64;\nREPAIR\nmbarrier.arrive.shared::cta.b64 _, [%r21];",
        "race: read after write", "mbarrier.arrive", by="bar.sync 0;", before="mbarrier.init", threads=64,
        also=frozenset({"mbarrier contract"}),
    ),
    Fault(
        "an-mbarrier-read-as-plain-memory",
        "@%p1 mbarrier.init.shared::cta.b64 [%r21], 1;\nREPAIR\n@%p1 st.shared.b32 [%r21], 5;",
        "mbarrier contract", "st.shared.b32", by="@%p1 mbarrier.inval.shared::cta.b64 [%r21];", before="mbarrier.init",
    ),
    Fault(
        "a-copy-that-arrives-at-an-mbarrier-without-a-fence",
        "@%p1 mbarrier.init.shared::cta.b64 [%r21], 1;\nREPAIR\nbar.sync 0;\n" + _LOAD + _WAIT,
        "missing proxy fence", "cp.async.bulk.shared", by="@%p1 fence.mbarrier_init.release.cluster;",
        before="mbarrier.init",
    ),
    Fault(
        "bar-sync-with-counts-that-differ",
        "mov.u32 %r5, 64;\nREPAIR\nbar.sync 1, %r5;",
        "barrier contract", "bar.sync 1", instead="@%p2 mov.u32 %r5, 96;", threads=96, also=frozenset({"deadlock"}),
        by="@%p2 ret;",
    ),
    Fault(
        "bar-sync-with-a-count-of-no-whole-warps",
        "REPAIR\nbar.sync 1, %r5;",
        "barrier contract", "bar.sync 1", by="mov.u32 %r5, 32;", instead="mov.u32 %r5, 33;",
    ),
    Fault(
        "a-shuffle-from-a-lane-that-is-not-there",
        "setp.lt.u32 %p4, %lane, 16;\n@!%p4 bra DONE;\nshfl.sync.idx.b32 %r1, %thread, REPAIR, 31, 0xffff;\n"
        "st.global.b32 [%d3], %r1;\nDONE:",
        "convergence", "shfl.sync.idx", by="3", instead="20",
    ),
    Fault(
        "a-warp-barrier-that-some-lanes-never-reach",
        "setp.lt.u32 %p4, %lane, 16;\n@%p4 bra LOW;\nbar.warp.sync REPAIR;\nbra DONE;\nLOW: bar.warp.sync 0xffff;\nDONE:",
        "convergence", "bar.warp.sync", by="0xffff0000", instead="0xffff0001", also=frozenset({"deadlock"}),
    ),
    Fault(
        "a-trap",
        "setp.lt.u32 %p4, %lane, REPAIR;\n@%p4 trap;",
        "convergence", "trap", by="0", instead="1",
    ),
    Fault(
        "ctas-that-write-and-read-one-place",
        "mov.u32 %r5, %ctaid.x;\nREPAIR\nst.global.b32 [%d3], %r5;",
        "race: write after write", "st.global.b32", by="mad.wide.u32 %d3, %r5, 128, %d3;", before="st.global.b32", grid=2,
    ),
    Fault(
        "a-cta-that-reads-what-another-writes",
        "mov.u32 %r5, %ctaid.x;\nsetp.eq.u32 %p4, %r5, 0;\n@%p4 st.global.b32 [%d3], %r5;\nREPAIR\n"
        "@!%p4 ld.global.b32 %r6, [%d3];\n@!%p4 st.global.b32 [%d3 + 1024], %r6;",
        "race: read after write", "ld.global.b32 %r6", by="add.s64 %d3, %d3, 512;", before="st.global.b32 [%d3], %r5",
        grid=2, also=RACES,
    ),
    Fault(
        "an-atomic-and-a-plain-store-of-two-ctas",
        "mov.u32 %r5, %ctaid.x;\nsetp.eq.u32 %p4, %r5, 0;\n@%p4 red.global.add.u32 [%d1], 1;\nREPAIR",
        "race: write after write", "st.global.b32", by="@!%p4 red.global.add.u32 [%d1], 5;",
        instead="setp.eq.and.u32 %p5, %thread, 0, !%p4;\n@%p5 st.global.b32 [%d1], 5;", grid=2, also=RACES,
    ),
    Fault(
        "an-atomic-and-a-plain-store-in-shared-memory",
        "@%p1 st.shared.b32 [%r20], 0;\nbar.sync 0;\n@%p2 red.shared.add.u32 [%r20], 1;\nREPAIR\n"
        "@!%p2 st.shared.b32 [%r20], 9;",
        "race: write after write", "st.shared.b32 [%r20], 9", by="bar.sync 0;\nsetp.ne.u32 %p2, %thread, 40;",
        instead="setp.ne.u32 %p2, %thread, 40;", before="red.shared.add.u32", threads=64, also=RACES,
    ),
    Fault(
        "an-atomic-on-shared-memory-that-nothing-wrote",
        "REPAIR\nbar.warp.sync -1;\nred.shared.add.u32 [%r20], 1;",
        UNWRITTEN, "red.shared.add.u32", by="@%p1 st.shared.b32 [%r20], 0;",
    ),
    Fault(
        "tensor-memory-that-is-not-released",
        _ALLOCATE + "REPAIR", "tensor memory contract", "", by=_RELEASE, target="sm_100a",
    ),
    Fault(
        "tensor-memory-released-with-another-size",
        _ALLOCATE + "REPAIR", "tensor memory contract", "tcgen05.dealloc", by=_RELEASE,
        instead=_RELEASE.replace(", 32", ", 64"), target="sm_100a",
    ),
    Fault(
        "tensor-memory-that-is-not-allocated",
        _ALLOCATE + "REPAIR\ntcgen05.st.sync.aligned.32x32b.x1.b32 [%r25], {%thread};\n"
        "tcgen05.wait::st.sync.aligned;\n" + _RELEASE,
        "tensor memory contract", "tcgen05.st", by="mov.u32 %r25, %r24;", instead="add.u32 %r25, %r24, 32;",
        target="sm_100a",
    ),
    Fault(
        "a-quarter-of-tensor-memory-of-another-warp",
        _ALLOCATE + "REPAIR\ntcgen05.st.sync.aligned.32x32b.x1.b32 [%r25], {%thread};\n"
        "tcgen05.wait::st.sync.aligned;\n" + _RELEASE,
        "tensor memory contract", "tcgen05.st", by="mov.u32 %r25, %r24;", instead="add.u32 %r25, %r24, 0x200000;",
        target="sm_100a",
    ),
    Fault(
        "a-load-from-tensor-memory-without-its-wait",
        _ALLOCATE + "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r24], {%thread};\ntcgen05.wait::st.sync.aligned;\n"
        "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r5}, [%r24];\nREPAIR\nst.global.b32 [%d3], %r5;\n"
        "tcgen05.wait::ld.sync.aligned;\n" + _RELEASE,
        "tensor memory contract", "st.global.b32", by="tcgen05.wait::ld.sync.aligned;", before="tcgen05.ld",
        target="sm_100a",
    ),
    Fault(
        "a-load-from-tensor-memory-before-its-store-is-done",
        _ALLOCATE + "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r24], {%thread};\nREPAIR\n"
        "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r5}, [%r24];\ntcgen05.wait::ld.sync.aligned;\n"
        "st.global.b32 [%d3], %r5;\n" + _RELEASE,
        "race: read after write", "tcgen05.ld", by="tcgen05.wait::st.sync.aligned;", before="tcgen05.st",
        target="sm_100a",
    ),
]  # fmt: skip


def seen(fault: Fault, finding: machine.Finding) -> bool:
    """Whether a finding is that fault, from whichever side."""
    exact = finding.kind == fault.kind and fault.now in finding.now and fault.before in finding.before
    return exact or (finding.kind in fault.also and bool(finding.now or finding.before))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_found_with_its_lines(vm: machine.Machine, fault: Fault) -> None:
    by_schedule = {schedule: run(vm, fault.text(False), fault.threads, fault.grid, schedule) for schedule in SCHEDULES}
    words = {schedule: list(map(str, findings)) for schedule, findings in by_schedule.items()}
    missed = [name for name, findings in by_schedule.items() if not any(seen(fault, one) for one in findings)]
    assert not missed or (fault.depends_on_timing and len(missed) < len(SCHEDULES)), words
    every = [finding for findings in by_schedule.values() for finding in findings]
    exact = [one for one in every if one.kind == fault.kind and fault.now in one.now and fault.before in one.before]
    assert exact, words


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_repaired_program_has_no_finding(vm: machine.Machine, fault: Fault, schedule: str) -> None:
    found = run(vm, fault.text(True), fault.threads, fault.grid, schedule)
    assert not found, list(map(str, found))


@pytest.mark.parametrize("name", ["a-wgmma-without-its-wait", "a-wgmma-after-a-register-write-without-a-fence"])
def test_a_register_of_wgmma_is_named(vm: machine.Machine, name: str) -> None:
    (fault,) = (fault for fault in FAULTS if fault.name == name)
    found = [one for schedule in SCHEDULES for one in run(vm, fault.text(False), fault.threads, 1, schedule)]
    assert any(one.kind == fault.kind and one.where.endswith(", register %r1") for one in found)


def deadlock(vm: machine.Machine, body: str, threads: int, schedule: str, target: str = "sm_90a") -> list[str]:
    """Where and for what each warp is said to wait, in the order of warps."""
    text = kernel(["source", "target"], SETUP + body, threads=threads, target=target)
    found = [finding for finding in run(vm, text, threads, 1, schedule) if finding.kind == "deadlock"]
    return sorted(f"{finding.where}: {finding.before}, {finding.now.partition(' (')[2][:-1]}" for finding in found)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_wait_for_the_wrong_parity_is_a_deadlock_that_says_where_each_warp_waits(
    vm: machine.Machine, schedule: str
) -> None:
    body = (
        _MBARRIER.format(32)
        + """
        setp.gt.u32 %p4, %warp, 0;
        @%p4 bra OTHERS;
        mbarrier.arrive.shared::cta.b64 _, [%r21];
        FIRST: mbarrier.try_wait.parity.shared::cta.b64 %p0, [%r21], 0;
        @!%p0 bra FIRST;
        SECOND: mbarrier.try_wait.parity.shared::cta.b64 %p0, [%r21], PARITY;
        @!%p0 bra SECOND;
        OTHERS: bar.sync 0;
    """
    )
    found = deadlock(vm, body.replace("PARITY", "1"), 96, schedule)
    assert found == [
        "CTA 0, warp 0: waits for the mbarrier at 0x1000 (phase 1, 32 arrivals and 0 bytes to come), "
        "mbarrier.try_wait.parity.shared::cta.b64 %p0, [%r21], 1",
        "CTA 0, warp 1: waits for barrier 0 (64 of 96 threads arrived), bar.sync 0",
        "CTA 0, warp 2: waits for barrier 0 (64 of 96 threads arrived), bar.sync 0",
    ]
    assert not deadlock(vm, body.replace("PARITY", "0"), 96, schedule)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_barrier_that_too_few_threads_reach_is_a_deadlock(vm: machine.Machine, schedule: str) -> None:
    assert deadlock(vm, "@%p2 bar.sync 4, 64;", 64, schedule) == [
        "CTA 0, warp 0: waits for barrier 4 (32 of 64 threads arrived), @%p2 bar.sync 4, 64"
    ]
    assert not deadlock(vm, "@%p2 bar.sync 4, 32;", 64, schedule)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_bytes_that_never_come_are_a_deadlock(vm: machine.Machine, schedule: str) -> None:
    body = _MBARRIER.format(1) + _LOAD + _WAIT
    (found,) = deadlock(vm, body.replace("[%r21], 128;\n@%p1 cp", "[%r21], 256;\n@%p1 cp"), 32, schedule)
    assert "0 arrivals and 128 bytes to come" in found
    assert not deadlock(vm, body, 32, schedule)


def test_tensor_memory_that_nobody_releases_is_waited_for_in_a_deadlock(vm: machine.Machine) -> None:
    allocate = "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r20], 512"
    found = deadlock(vm, f"{allocate};\n{allocate};", 32, "inorder", "sm_100a")
    assert found == [f"CTA 0, warp 0: waits for tensor memory, {allocate}"]


def test_a_program_that_does_not_end_meets_the_limit(vm: machine.Machine) -> None:
    text = kernel(["source", "target"], SETUP + "FOREVER: add.u32 %r1, %r1, 1;\nbra FOREVER;")
    found = run(vm, text, 32, 1, "inorder", limit=10000)
    assert [finding.kind for finding in found] == ["no end, or a limit of the machine"]


def test_atomics_of_several_ctas_and_lanes_are_no_race(vm: machine.Machine) -> None:
    body = """
        red.global.add.u32 [%d1], 1;
        atom.global.max.u32 %r1, [%d1 + 4], %thread;
        red.global.add.f32 [%d1 + 8], 0f3F800000;
        red.shared.add.u32 [%r20], 1;
    """
    text = kernel(["source", "target"], SETUP + "@%p1 st.shared.b32 [%r20], 0;\nbar.sync 0;" + body, threads=64)
    for schedule in SCHEDULES:
        found = run(vm, text, 64, 4, schedule)
        assert not found, list(map(str, found))


TILE = """
mov.b64 %d4, map;
cvta.param.u64 %d4, %d4;
mov.u32 %r1, 0;
fence.proxy.async;
bar.warp.sync -1;
@!%p1 bra DONE;
{0}
cp.async.bulk.commit_group;
cp.async.bulk.wait_group 0;
DONE:
"""
STORE = "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%d4, {%r1, %r1}], [%r20];"
REDUCE = "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%d4, {%r1, %r1}], [%r20];"


@pytest.mark.parametrize(
    ("statement", "element_bytes", "box", "swizzle", "kind"),
    [
        (STORE, 4, (8, 4), 0, None),
        (REDUCE, 4, (8, 4), 0, None),
        (REDUCE, 2, (8, 4), 0, "tensor map"),  # its sums would be those of another type
        (STORE.replace("[%r20]", "[%r20 + 64]"), 4, (8, 4), 0, "misaligned access"),
        (STORE, 4, (16, 2), 32, "misaligned access"),  # the box is wider than the swizzle
        ("mov.u32 %r1, 3;" + STORE, 4, (8, 4), 0, "misaligned access"),  # of the innermost coordinate, in bytes
        ("mov.u32 %r1, -4;" + STORE, 4, (8, 4), 0, "access out of bounds"),  # only loads may begin before a tensor
        ("mov.u32 %r1, -4;" + REDUCE, 4, (8, 4), 0, "access out of bounds"),
        (STORE, 4, (3, 4), 0, "tensor map"),  # a row of the box is no multiple of 16 bytes
        (STORE.replace("[%d4,", "[%d0,"), 4, (8, 4), 0, "tensor map"),
    ],
)
def test_what_a_tensor_map_cannot_do_is_a_finding(
    vm: machine.Machine, statement: str, element_bytes: int, box: tuple[int, int], swizzle: int, kind: str | None
) -> None:
    body = SETUP + "st.shared.b32 [%r22], %thread;\n" + TILE.replace("{0}", statement)
    text = kernel(["source", "target", "map"], body, maps=["map"])
    program = decode.decode(parser.parse(text).kernels["snippet"])
    source, target = (
        machine.Buffer(np.zeros(64, np.uint32), 0, writable=False),
        machine.Buffer(np.zeros(1024, np.uint32), 1),
    )
    tensor = machine.TensorMap(target.address, element_bytes, (16, 16), (64,), box, swizzle)
    parameters = machine.pack_parameters(program, [source.address, target.address, tensor.pack()])
    result = vm.launch(program, 1, 32, 0, parameters, [source, target])
    assert [finding.kind for finding in result.findings] == ([kind] if kind else [])
