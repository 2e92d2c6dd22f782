"""The instructions of Blackwell (sm_100) that the kernels use and Hopper lacks: tcgen05, tensor memory, TMA gathers.

Each function emits the one instruction that the PTX ISA names. Shared-memory operands of an MMA are tiles of lines, as
``hopper`` describes them.
"""

from cutlass import Float32, Int32, Uint32, Uint64
from cutlass.cute import arch

from dsa_planner.kernels.hopper import LINE, LINE_BYTES

GROUP_BYTES = 8 * LINE_BYTES  # what the swizzle repeats after
K_STEP = 16  # of one MMA

TMEM_LANE = 1 << 16  # of a tensor-memory address; a column is 1
TMEM_COLUMNS = 512

_SWIZZLE_128B = 2 << 61
_VERSION = 1 << 46


def k_major(tile):
    """Descriptor of an operand whose lines run along K: (M or N) lines of K elements."""
    return _descriptor(tile, 1, GROUP_BYTES)


def mn_major(tile, lines):
    """Descriptor of an operand whose lines run along M or N, a line for each K: K is ``lines`` at most.

    From one column of lines to the next it is ``lines`` lines.
    """
    return _descriptor(tile, lines * LINE_BYTES, GROUP_BYTES)


def _descriptor(tile, leading_bytes, stride_bytes):
    fixed = _SWIZZLE_128B | _VERSION | (stride_bytes >> 4) << 32 | (leading_bytes >> 4) << 16
    return Uint64((Uint32(tile.toint()) >> 4) & 0x3FFF) | Uint64(fixed)


def k_major_step(step, lines):
    """Bytes from the start of a K-major tile of ``lines`` lines to its MMA step, as a descriptor counts them."""
    per_line = LINE // K_STEP
    return (step // per_line * (lines * LINE_BYTES) + step % per_line * (2 * K_STEP)) >> 4


def mn_major_step(step):
    """The same for an MN-major tile."""
    return (step * K_STEP * LINE_BYTES) >> 4


def bf16_to_fp32(m, n, a_across=False, b_across=False):
    """Instruction descriptor: D (m x n, fp32) from bf16 A and B; "across" is MN-major."""
    fp32, bf16 = 1, 1
    return fp32 << 4 | bf16 << 7 | bf16 << 10 | a_across << 15 | b_across << 16 | (n >> 3) << 17 | (m >> 4) << 24


def mma(d, a, b, kind, accumulate):
    """D = A B, or += where ``accumulate``, over one K step; by one thread, completed by a commit.

    64 rows of D lie in 16 lanes of each quarter of tensor memory: in lanes 0 to 15, or 16 to 31, as ``d`` says.
    """
    arch.inline_ptx(
        "{ .reg .pred p; setp.ne.b32 p, {$r4}, 0;"
        " tcgen05.mma.cta_group::1.kind::f16 [{$r0}], {$r1}, {$r2}, {$r3}, p; }",
        read_only_args=[d, a, b, Uint32(kind), Int32(accumulate)],
    )


def commit(barrier):
    """Arrive at an mbarrier once all MMAs that this thread has issued have completed."""
    arch.inline_ptx(
        "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [{$r0}];", read_only_args=[barrier]
    )


def fence_before_sync():
    """Order this thread's tensor-memory work before what it does next to tell another thread."""
    arch.inline_ptx("tcgen05.fence::before_thread_sync;")


def fence_after_sync():
    """Order this thread's tensor-memory work after what it has been told by another thread."""
    arch.inline_ptx("tcgen05.fence::after_thread_sync;")


def load_rows(address, columns):
    """``columns`` fp32 of one lane a thread, 32 lanes from the warp's first: a list, ready."""
    return _load("32x32b", address, columns, columns)


def load_fragment(address, columns):
    """The warp's 16 lanes, as a fragment. A list, ready.

    Element 4 n + 2 j + i of thread l is lane ``l // 4 + 8 j``, column ``8 n + 2 (l % 4) + i``.
    """
    return _load("16x256b", address, columns // 8, columns // 2)


def _load(shape, address, times, registers):
    names = ", ".join(f"{{$w{i}}}" for i in range(registers))
    return arch.inline_ptx(
        f"tcgen05.ld.sync.aligned.{shape}.x{times}.b32 {{{names}}}, [{{$r0}}]; tcgen05.wait::ld.sync.aligned;",
        write_only_types=[Float32] * registers,
        read_only_args=[address],
    )


def gather_rows(target, tensor_map, x, rows, barrier):
    """TMA: 4 rows of a matrix, a line each from column x, to shared memory; rows outside it give zeros."""
    arch.inline_ptx(
        "cp.async.bulk.tensor.2d.shared::cta.global.tile::gather4.mbarrier::complete_tx::bytes [{$r0}],"
        " [{$r1}, {{$r2}, {$r3}, {$r4}, {$r5}, {$r6}}], [{$r7}];",
        read_only_args=[target, tensor_map, Int32(x), *rows, barrier],
    )
