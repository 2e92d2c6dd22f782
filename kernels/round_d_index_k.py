"""Stage 3 of ``indexer_backward``: a bf16 ``d_index_k`` is the rounding of the fp32 accumulator.

Not launched when the caller asks for an fp32 d_index_k: the accumulator is then the output itself.
"""

import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64
from cutlass.cute import arch

THREADS = 256
VECTOR = 8  # elements of one 16-byte bf16 store


class RoundDIndexK:
    """Round ``keys`` rows of ``head_dim`` fp32 elements to nearest even; any grid is right."""

    def __init__(self, head_dim: int) -> None:
        self.head_dim = head_dim
        self.lanes_per_key = head_dim // VECTOR

    @cute.kernel
    def kernel(self, dk_accum: cute.Pointer, d_index_k: cute.Pointer, keys: Int32):
        thread, _, _ = arch.thread_idx()
        block, _, _ = arch.block_idx()
        blocks, _, _ = arch.grid_dim()
        keys_per_block = THREADS // self.lanes_per_key
        key = block * keys_per_block + thread // self.lanes_per_key
        column = (thread % self.lanes_per_key) * VECTOR
        wide = cute.make_rmem_tensor(VECTOR, Float32)
        narrow = cute.make_rmem_tensor(VECTOR, BFloat16)
        while key < keys:
            offset = Int64(key) * self.head_dim + column
            cute.autovec_copy(cute.make_tensor(dk_accum + offset, cute.make_layout(VECTOR)), wide)
            narrow.store(wide.load().to(BFloat16))
            cute.autovec_copy(narrow, cute.make_tensor(d_index_k + offset, cute.make_layout(VECTOR)))
            key += blocks * keys_per_block


RoundDIndexK.kernel.set_name_prefix("dsa_round_d_index_k", remove_cutlass_symbol=True, keep_mangled_name=False)
