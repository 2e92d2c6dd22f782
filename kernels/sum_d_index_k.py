"""Stage 3 of ``indexer_backward`` for a reproducible d_index_k: the sum of the workers' planes, in their order.

Worker 0 of stage 2 has added to ``dk_accum``, worker i to plane i - 1. An fp32 d_index_k is dk_accum itself.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute import arch

THREADS = 256
VECTOR = 4  # fp32 elements of one 16-byte access


class SumDIndexK:
    """Add up ``workers`` planes of ``keys`` rows of ``head_dim`` fp32 elements; any grid is right."""

    def __init__(self, head_dim: int) -> None:
        self.head_dim = head_dim
        self.lanes_per_key = head_dim // VECTOR

    @cute.kernel
    def to_bf16(
        self, dk_accum: cute.Pointer, dk_planes: cute.Pointer, d_index_k: cute.Pointer, keys: Int32, workers: Int32
    ):
        self.run(dk_accum, dk_planes, d_index_k, keys, workers)

    @cute.kernel
    def to_fp32(
        self, dk_accum: cute.Pointer, dk_planes: cute.Pointer, d_index_k: cute.Pointer, keys: Int32, workers: Int32
    ):
        self.run(dk_accum, dk_planes, d_index_k, keys, workers)

    @cute.jit
    def run(self, dk_accum, dk_planes, d_index_k, keys, workers):
        thread, _, _ = arch.thread_idx()
        block, _, _ = arch.block_idx()
        blocks, _, _ = arch.grid_dim()
        keys_per_block = THREADS // self.lanes_per_key
        key = block * keys_per_block + thread // self.lanes_per_key
        column = thread % self.lanes_per_key * VECTOR
        total = cute.make_rmem_tensor(VECTOR, Float32)
        part = cute.make_rmem_tensor(VECTOR, Float32)
        result = cute.make_rmem_tensor(VECTOR, d_index_k.dtype)
        plane_elements = Int64(keys) * self.head_dim
        while key < keys:
            offset = Int64(key) * self.head_dim + column
            cute.autovec_copy(four(dk_accum + offset), total)
            for worker in cutlass.range(workers - 1, unroll=4):
                cute.autovec_copy(four(dk_planes + (worker * plane_elements + offset)), part)
                for e in cutlass.range_constexpr(VECTOR):
                    total[e] = total[e] + part[e]
            result.store(total.load().to(d_index_k.dtype))
            cute.autovec_copy(result, four(d_index_k + offset))
            key += blocks * keys_per_block


def four(pointer):
    return cute.make_tensor(pointer, cute.make_layout(VECTOR))


SumDIndexK.to_bf16.set_name_prefix("dsa_sum_to_bf16", remove_cutlass_symbol=True, keep_mangled_name=False)
SumDIndexK.to_fp32.set_name_prefix("dsa_sum_to_fp32", remove_cutlass_symbol=True, keep_mangled_name=False)
