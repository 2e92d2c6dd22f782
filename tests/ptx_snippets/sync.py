"""Barriers of a CTA and mbarriers: who waits for whom, over several phases."""

from __future__ import annotations

import numpy as np

from ptx_snippets.framework import program

_THREADS = np.arange(128, dtype=np.uint32)

_EXCHANGE = """
.shared .align 16 .b8 words[512];
mov.u32 %r20, words;
shl.b32 %r21, %thread, 2;
add.u32 %r21, %r20, %r21;
"""

program(
    "barrier-of-all-threads",
    _EXCHANGE
    + """
    mul.lo.u32 %r0, %thread, 3;
    st.shared.b32 [%r21], %r0;
    bar.sync 0;
    xor.b32 %r1, %thread, 96;
    shl.b32 %r1, %r1, 2;
    add.u32 %r1, %r20, %r1;
    ld.shared.b32 %r2, [%r1];
    barrier.sync.aligned 5;
    st.shared.b32 [%r1], %r2;
    bar.cta.sync 15, 128;
    ld.shared.b32 %r3, [%r21];
    STORE 0, %r2;
    STORE 1, %r3;
    """,
    lambda buffers: {"out": np.stack([(_THREADS ^ 96) * 3, _THREADS * 3])},
    holds=("bar.sync", "barrier.sync.aligned", "bar.cta.sync"),
    rows=2,
    threads=128,
)
program(
    "barriers-of-some-warps",
    _EXCHANGE
    + """
    shr.u32 %r5, %warp, 1;
    add.u32 %r5, %r5, 1;
    mov.u32 %r6, 64;
    mov.u32 %r8, 0;
    mov.u32 %r9, 0;
    ROUND: mad.lo.u32 %r0, %r8, 1000, %thread;
    st.shared.b32 [%r21], %r0;
    bar.sync %r5, %r6;
    xor.b32 %r1, %thread, 32;
    shl.b32 %r1, %r1, 2;
    add.u32 %r1, %r20, %r1;
    ld.shared.b32 %r2, [%r1];
    add.u32 %r9, %r9, %r2;
    bar.sync %r5, 64;
    add.u32 %r8, %r8, 1;
    setp.lt.u32 %p0, %r8, 4;
    @%p0 bra ROUND;
    STORE 0, %r9;
    """,
    lambda buffers: {"out": ((_THREADS ^ 32) * 4 + 6000).reshape(1, 128).astype(np.uint32)},
    holds=("bar.sync",),
    rows=1,
    threads=128,
)
program(  # three warps produce and go on, one consumes; then the room is free again
    "producers-arrive-and-a-consumer-waits",
    _EXCHANGE
    + """
    mov.u32 %r8, 0;
    mov.u32 %r9, 0;
    setp.eq.u32 %p1, %warp, 3;
    ROUND: @%p1 bra CONSUME;
    mad.lo.u32 %r0, %r8, 100, %thread;
    st.shared.b32 [%r21], %r0;
    bar.arrive 1, 128;
    bar.sync 2, 128;
    bra NEXT;
    CONSUME: bar.sync 1, 128;
    shl.b32 %r1, %lane, 2;
    add.u32 %r1, %r20, %r1;
    ld.shared.b32 %r2, [%r1];
    ld.shared.b32 %r3, [%r1 + 128];
    ld.shared.b32 %r4, [%r1 + 256];
    add.u32 %r9, %r9, %r2;
    add.u32 %r9, %r9, %r3;
    add.u32 %r9, %r9, %r4;
    bar.arrive 2, 128;
    NEXT: add.u32 %r8, %r8, 1;
    setp.lt.u32 %p0, %r8, 5;
    @%p0 bra ROUND;
    STORE 0, %r9;
    """,
    lambda buffers: {
        "out": np.where(_THREADS < 96, 0, 5 * (3 * (_THREADS % 32) + 96) + 3 * 1000).reshape(1, 128).astype(np.uint32)
    },
    holds=("bar.arrive", "bar.sync"),
    rows=1,
    threads=128,
)
program(
    "barrier-of-a-cluster-of-one",
    _EXCHANGE
    + """
    st.shared.b32 [%r21], %thread;
    barrier.cluster.arrive.release.aligned;
    mov.u32 %r0, 17;
    barrier.cluster.wait.acquire.aligned;
    xor.b32 %r1, %thread, 112;
    shl.b32 %r1, %r1, 2;
    add.u32 %r1, %r20, %r1;
    ld.shared.b32 %r2, [%r1];
    barrier.cluster.arrive.aligned;
    barrier.cluster.wait.aligned;
    st.shared.b32 [%r1], %r0;
    bar.sync 0;
    ld.shared.b32 %r3, [%r21];
    STORE 0, %r2;
    STORE 1, %r3;
    """,
    lambda buffers: {"out": np.stack([_THREADS ^ 112, np.full(128, 17, np.uint32)])},
    holds=("barrier.cluster.arrive.release.aligned", "barrier.cluster.wait.acquire.aligned"),
    rows=2,
    threads=128,
)
program(
    "fences-order-a-flag",
    """
    st.global.b32 [%out], %thread;
    fence.acq_rel.gpu;
    membar.gl;
    fence.acq_rel.cta;
    ld.global.b32 %r0, [%out];
    add.u32 %r0, %r0, 1;
    STORE 1, %r0;
    """,
    lambda buffers: {"out": np.stack([_THREADS[:32], _THREADS[:32] + 1])},
    holds=("fence.acq_rel.gpu", "membar.gl", "fence.acq_rel.cta"),
    rows=2,
)

# --- mbarriers -------------------------------------------------------------------------------------------------------

_MBARRIER = (
    _EXCHANGE
    + """
.shared .align 8 .b8 barrier[16];
mov.u32 %r22, barrier;
setp.eq.u32 %p10, %thread, 0;
"""
)
_READ_NEIGHBOUR = """
xor.b32 %r1, %thread, 96;
shl.b32 %r1, %r1, 2;
add.u32 %r1, %r20, %r1;
ld.shared.b32 %r2, [%r1];
add.u32 %r9, %r9, %r2;
"""
_PHASES = np.sum([(_THREADS ^ 96) + 1000 * phase for phase in range(5)], axis=0, dtype=np.uint32).reshape(1, 128)

program(
    "mbarrier-phases-by-parity",
    _MBARRIER
    + """
    @%p10 mbarrier.init.shared::cta.b64 [%r22], 128;
    bar.sync 0;
    mov.u32 %r8, 0;
    mov.u32 %r9, 0;
    ROUND: mad.lo.u32 %r0, %r8, 1000, %thread;
    st.shared.b32 [%r21], %r0;
    mbarrier.arrive.shared::cta.b64 _, [%r22];
    FULL: mbarrier.try_wait.parity.shared::cta.b64 %p0, [%r22], 0;
    @!%p0 bra FULL;
    """
    + _READ_NEIGHBOUR
    + """
    mbarrier.arrive.release.cta.shared::cta.b64 _, [%r22];
    mov.u32 %r3, 1;
    EMPTY: mbarrier.test_wait.parity.acquire.cta.shared::cta.b64 %p0, [%r22], %r3;
    @!%p0 bra EMPTY;
    add.u32 %r8, %r8, 1;
    setp.lt.u32 %p0, %r8, 5;
    @%p0 bra ROUND;
    STORE 0, %r9;
    bar.sync 0;
    @%p10 mbarrier.inval.shared::cta.b64 [%r22];
    @%p10 mbarrier.init.shared::cta.b64 [%r22 + 8], 1;
    @%p10 mbarrier.inval.shared::cta.b64 [%r22 + 8];
    """,
    lambda buffers: {"out": _PHASES},
    holds=(
        "mbarrier.init.shared::cta.b64",
        "mbarrier.arrive.shared::cta.b64",
        "mbarrier.try_wait.parity.shared::cta.b64",
        "mbarrier.test_wait.parity.acquire.cta.shared::cta.b64",
        "mbarrier.inval.shared::cta.b64",
    ),
    rows=1,
    threads=128,
)
program(
    "mbarrier-phases-by-token",
    _MBARRIER
    + """
    @%p10 mbarrier.init.shared.b64 [%r22], 128;
    bar.sync 0;
    mov.u32 %r8, 0;
    mov.u32 %r9, 0;
    ROUND: mad.lo.u32 %r0, %r8, 1000, %thread;
    st.shared.b32 [%r21], %r0;
    mbarrier.arrive.shared.b64 %d0, [%r22];
    FULL: mbarrier.test_wait.shared.b64 %p0, [%r22], %d0;
    @!%p0 bra FULL;
    """
    + _READ_NEIGHBOUR
    + """
    mbarrier.arrive.shared.b64 %d0, [%r22];
    EMPTY: mbarrier.try_wait.shared.b64 %p0, [%r22], %d0;
    @!%p0 bra EMPTY;
    add.u32 %r8, %r8, 1;
    setp.lt.u32 %p0, %r8, 5;
    @%p0 bra ROUND;
    STORE 0, %r9;
    """,
    lambda buffers: {"out": _PHASES},
    holds=("mbarrier.arrive.shared.b64", "mbarrier.test_wait.shared.b64", "mbarrier.try_wait.shared.b64"),
    rows=1,
    threads=128,
)
program(  # one lane of each warp arrives for all of it, through a generic address
    "mbarrier-arrivals-with-a-count",
    _MBARRIER
    + """
    cvt.u64.u32 %d1, %r22;
    cvta.shared.u64 %d1, %d1;
    @%p10 mbarrier.init.b64 [%d1], 128;
    bar.sync 0;
    setp.eq.u32 %p1, %lane, 0;
    mov.u32 %r8, 0;
    mov.u32 %r9, 0;
    mov.u32 %r7, 0;
    ROUND: mad.lo.u32 %r0, %r8, 1000, %thread;
    st.shared.b32 [%r21], %r0;
    bar.warp.sync -1;
    @%p1 mbarrier.arrive.shared::cta.b64 _, [%r22], 32;
    FULL: mbarrier.try_wait.parity.b64 %p0, [%d1], %r7;
    @!%p0 bra FULL;
    """
    + _READ_NEIGHBOUR
    + """
    xor.b32 %r7, %r7, 1;
    bar.sync 0;
    add.u32 %r8, %r8, 1;
    setp.lt.u32 %p0, %r8, 5;
    @%p0 bra ROUND;
    STORE 0, %r9;
    """,
    lambda buffers: {"out": _PHASES},
    holds=("mbarrier.init.b64", "mbarrier.arrive.shared::cta.b64", "mbarrier.try_wait.parity.b64", "cvta.shared.u64"),
    rows=1,
    threads=128,
)
program(  # bytes that are expected keep a phase open until copies have brought them
    "mbarrier-expects-bytes",
    _MBARRIER
    + """
    .shared .align 16 .b8 landing[256];
    mov.u32 %r23, landing;
    ld.param.u64 %d0, [source];
    @%p10 mbarrier.init.shared::cta.b64 [%r22], 2;
    @%p10 fence.mbarrier_init.release.cluster;
    bar.sync 0;
    @!%p10 bra WAIT;
    mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r22], 128;
    mbarrier.arrive.shared::cta.b64 _, [%r22];
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r23], [%d0], 128, [%r22];
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r22], 128;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r23 + 128], [%d0 + 128], 128, [%r22];
    WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p0, [%r22], 0;
    @!%p0 bra WAIT;
    and.b32 %r1, %thread, 63;
    shl.b32 %r1, %r1, 2;
    add.u32 %r1, %r23, %r1;
    ld.shared.b32 %r2, [%r1];
    STORE 0, %r2;
    """,
    lambda buffers: {"out": np.tile(buffers["source"], 2).reshape(1, 128)},
    holds=(
        "mbarrier.expect_tx.relaxed.cta.shared::cta.b64",
        "mbarrier.arrive.expect_tx.shared::cta.b64",
        "fence.mbarrier_init.release.cluster",
    ),
    rows=1,
    threads=128,
    inputs={"source": np.random.default_rng(31).integers(0, 1 << 32, 64, np.uint64).astype(np.uint32)},
)
