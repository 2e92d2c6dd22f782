"""The instructions of Hopper (sm_90) that the kernels use, and that Blackwell has too: TMA, bulk copies, stmatrix.

Each function emits the one instruction that the PTX ISA names. Tiles in shared memory lie in lines of 64 bf16 elements,
128 bytes, with the 128-byte swizzle: within each group of 8 lines, 16-byte chunk c of line r lies at chunk c ^ (r % 8).
A tile that is wider than a line is several such columns of lines, one after another.
"""

from cutlass import Float32, Int32, Uint32
from cutlass.cute import arch

LINE = 64  # bf16 elements
LINE_BYTES = 2 * LINE


def load_box(target, tensor_map, x, y, barrier):
    """TMA: the box at column x and row y of a matrix to shared memory; completes at the mbarrier."""
    arch.inline_ptx(
        "cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [{$r0}], [{$r1}, {{$r2}, {$r3}}],"
        " [{$r4}];",
        read_only_args=[target, tensor_map, Int32(x), Int32(y), barrier],
    )


def store_box(source, tensor_map, x, y):
    """TMA: a box in shared memory to column x and row y of a matrix, asynchronously, in this thread's bulk group."""
    arch.inline_ptx(
        "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [{$r0}, {{$r1}, {$r2}}], [{$r3}];",
        read_only_args=[tensor_map, Int32(x), Int32(y), source],
    )


def copy_16(target, source, size):
    """Copy ``size`` bytes, 16 or 0, to shared memory, asynchronously, and fill up 16 with zeros."""
    arch.inline_ptx("cp.async.cg.shared.global [{$r0}], [{$r1}], 16, {$r2};", read_only_args=[target, source, size])


def store_matrices(target, a, b, c, d):
    """stmatrix: four 8 x 8 matrices of bf16, whose rows lie where lanes 0 to 7, 8 to 15, ... say."""
    arch.inline_ptx(
        "stmatrix.sync.aligned.m8n8.x4.shared.b16 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
        read_only_args=[target, a, b, c, d],
    )


def round_pair(low, high):
    """Two fp32, each rounded to nearest even, as bf16 halves of a word."""
    return arch.inline_ptx(
        "cvt.rn.bf16x2.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Uint32], read_only_args=[high, low]
    )


def widen_pair(pair):
    """The bf16 halves of a word in fp32."""
    return as_float(pair << 16), as_float(pair & 0xFFFF0000)


def as_float(bits):
    """The fp32 of these bits."""
    return arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[Uint32(bits)])


def bulk_load(target, source, size, barrier):
    """Copy ``size`` bytes of global memory to shared memory, asynchronously; completes at the mbarrier."""
    arch.inline_ptx(
        f"cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [{{$r0}}], [{{$r1}}], {size}, [{{$r2}}];",
        read_only_args=[target, source, barrier],
    )


def bulk_add(target, source, size):
    """Add ``size`` bytes of fp32 in shared memory to global memory, asynchronously, in this thread's bulk group."""
    arch.inline_ptx(
        f"cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [{{$r0}}], [{{$r1}}], {size};",
        read_only_args=[target, source],
    )


def bulk_store(target, source, size):
    """Copy ``size`` bytes of shared memory to global memory, asynchronously, in this thread's bulk group."""
    arch.inline_ptx(
        f"cp.async.bulk.global.shared::cta.bulk_group [{{$r0}}], [{{$r1}}], {size};", read_only_args=[target, source]
    )


def add_vector(target, a, b, c, d):
    """Add four fp32 to global memory; a thread's own additions to one address keep their order."""
    arch.inline_ptx(
        "red.relaxed.gpu.global.add.v4.f32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", read_only_args=[target, a, b, c, d]
    )
