"""The ``default`` backend of ``indexer_backward`` for Hopper (sm_90a): the GEMM stage, and the program around it.

For each row (one query) with its ``topk`` selected keys, and with g'[t] = sm_scale * attn_score[t] from stage 1::

    S[t,h]   = sum_d K[n,d] Q[h,d]          n = topk_indices[t]
    d_weights[h]    = sum_t g'[t] max(S[t,h], 0)
    A[t,h]   = g'[t] weights[h]             where S[t,h] > 0, else 0; rounded once to bf16
    d_index_q[h,d]  = sum_t A[t,h] K[n,d]
    d_index_k[n,d] += sum_h A[t,h] Q[h,d]   fp32, over all rows

Schedule.  One persistent CTA an SM holds two *workers*.  A worker owns whole rows (worker w of W takes rows w, w + W,
...) and shares nothing with the other, so one worker's tensor-core work fills the other's waits.  It consists of

* two gather warps: topk_indices -> K rows by cp.async, 16 bytes a lane, zero-filled where the id is invalid; one of
  them also fetches Q by TMA, one row ahead;
* one math warpgroup: for each tile of 64 slots three wgmma contractions, the gate between them, and the scatter.

A never leaves the warpgroup as fp32.  S is computed with slots as the M mode, so the accumulator fragment of S is also
the register-operand fragment of A in ``dK = A Q``; ``dQ = A^T K`` reads A from shared memory, where its M-major view
is a transpose for free.  The MN-major views of Q and K are descriptor views of the same bytes.

Each warp of the warpgroup owns 16 slots of the dK tile, stages them in shared memory of its own, and adds each row to
global memory with one 512-byte bulk reduction, issued by the lane that holds the slot's id.  The staging pitch of 544
bytes makes the fragment stores free of bank conflicts.

What bounds it: one 512-byte fp32 add and one 256-byte gather a (row, slot) pair, both in the L2.  The order of those
adds is not fixed, so d_index_k differs in the last bits between runs; d_index_q and d_weights are reproducible bit
for bit.

Invalid slots contribute nothing: their g' is 0, and their K row is zero, so that no stale byte, which may be a NaN,
reaches d_index_q.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import BFloat16, Float32, Int32, Int64, Uint32
from cutlass.cute import arch
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup
from cutlass.cute.nvgpu.warpgroup import OperandSource, SmemLayoutAtomKind
from cutlass.cute.runtime import make_fake_stream, make_ptr

from dsa_planner.kernels.round_d_index_k import RoundDIndexK
from dsa_planner.kernels.score_grad import ScoreGrad

WORKERS = 2  # a CTA
GATHER_WARPS = 2  # a worker
MATH_WARPS = 4  # a worker
THREADS = 32 * WORKERS * (GATHER_WARPS + MATH_WARPS)
TILE = 64  # slots
Q_STAGES = 2  # rows of Q in shared memory, a worker
K_STAGES = 2  # tiles of K in shared memory, a worker
WARP_SLOTS = TILE // MATH_WARPS
GATHER_REGISTERS = 40
MATH_REGISTERS = 232
SHARED_BYTES = 220_160  # of 232,448; held to the layout below by an assertion

# Pitches, in elements, of the warps' staging rows. 544 bytes: the 8 rows x 4 lanes of a fragment store fall on
# different banks in each half warp. 272 bytes: the same for bf16 pairs.
DK_PITCH = 136
DQ_PITCH = 136
WARP_STAGE = WARP_SLOTS * DK_PITCH  # fp32 elements

# Static extent of the outer mode that TMA coordinates run over. The real extent is in the tensor map, and the support
# envelope keeps rows * heads within this one.
Q_ROWS_BOUND = 1 << 30


class Work(NamedTuple):
    """The rows of one worker, and what turns their ids into keys."""

    rows: Int32
    s_q: Int32
    id_limit: Int32
    id_offset: Int32
    first_row: Int32
    row_step: Int32


class Gradients:
    """The GEMM stage for one topk, with 64 heads of 128 dims."""

    def __init__(self, topk: int, heads: int, head_dim: int) -> None:
        self.topk = topk
        self.heads = heads
        self.dims = head_dim
        self.tiles = topk // TILE

    # --- layouts -------------------------------------------------------------------------------------------------

    def shared_layouts(self):
        """Layouts of Q, K and A in shared memory: K-major as they are written, MN-major as the same bytes seen across.

        Every tile is 128-byte swizzled: a run of 64 bf16 elements is one swizzled 128-byte line.
        """
        k_major = warpgroup.make_smem_layout_atom(SmemLayoutAtomKind.K_SW128, BFloat16)
        mn_major = warpgroup.make_smem_layout_atom(SmemLayoutAtomKind.MN_SW128, BFloat16)

        def both(outer: int, contiguous: int, stages: int):
            return (
                cute.tile_to_shape(k_major, (outer, contiguous, stages), order=(0, 1, 2)),
                cute.tile_to_shape(mn_major, (contiguous, outer, stages), order=(1, 0, 2)),
            )

        q, q_across = both(self.heads, self.dims, WORKERS * Q_STAGES)
        k, k_across = both(TILE, self.dims, WORKERS * K_STAGES)
        a, a_across = both(TILE, self.heads, WORKERS)
        return q, q_across, k, k_across, a, a_across

    def shared_storage(self):
        q_layout, _, k_layout, _, a_layout, _ = self.shared_layouts()

        @cute.struct
        class Shared:
            q_full: cute.struct.MemRange[Int64, WORKERS * Q_STAGES]
            q_empty: cute.struct.MemRange[Int64, WORKERS * Q_STAGES]
            k_full: cute.struct.MemRange[Int64, WORKERS * K_STAGES]
            k_empty: cute.struct.MemRange[Int64, WORKERS * K_STAGES]
            dw: cute.struct.Align[cute.struct.MemRange[Float32, WORKERS * MATH_WARPS * self.heads], 16]
            q: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(q_layout)], 1024]
            k: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(k_layout)], 1024]
            a: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(a_layout)], 1024]
            stage: cute.struct.Align[cute.struct.MemRange[Float32, WORKERS * MATH_WARPS * WARP_STAGE], 128]

        if Shared.size_in_bytes() != SHARED_BYTES:
            raise AssertionError(
                f"shared memory is {Shared.size_in_bytes()} bytes, the launch record says {SHARED_BYTES}"
            )
        return Shared

    def tiled_mmas(self):
        """S = K Q^T (64 slots x heads), dK = A Q (64 slots x dims), dQ = A^T K (heads x dims)."""

        def mma(n: int, a_source: OperandSource, a_major: OperandMajorMode, b_major: OperandMajorMode) -> cute.TiledMma:
            op = warpgroup.MmaF16BF16Op(BFloat16, Float32, (64, n, 16), a_source, a_major, b_major)
            return cute.make_tiled_mma(op)

        across = OperandMajorMode.MN
        along = OperandMajorMode.K
        return (
            mma(self.heads, OperandSource.SMEM, along, along),
            mma(self.dims, OperandSource.RMEM, along, across),
            mma(self.dims, OperandSource.SMEM, across, across),
        )

    # --- kernel --------------------------------------------------------------------------------------------------

    @cute.jit
    def tma_atom(self, index_q: cute.Pointer):
        """The TMA copy of one row of Q, (heads, dims), and the coordinate tensor that it reads."""
        q, *_ = self.shared_layouts()
        rows = cute.make_tensor(index_q, cute.make_layout((Q_ROWS_BOUND, self.dims), stride=(self.dims, 1)))
        return cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(), rows, cute.slice_(q, (None, None, 0)), (self.heads, self.dims)
        )

    @cute.kernel
    def kernel(
        self,
        index_q_map: cute.CopyAtom,
        index_q: cute.Tensor,
        weights: cute.Pointer,
        index_k: cute.Pointer,
        score_grad: cute.Pointer,
        topk_indices: cute.Pointer,
        d_index_q: cute.Pointer,
        d_weights: cute.Pointer,
        dk_accum: cute.Pointer,
        rows: Int32,
        s_q: Int32,
        id_limit: Int32,
        id_offset: Int32,
        sm_scale: Float32,
    ):
        block, _, _ = arch.block_idx()
        blocks, _, _ = arch.grid_dim()
        thread, _, _ = arch.thread_idx()
        warp_index = arch.make_warp_uniform(arch.warp_idx())
        shared = cutlass.memory.SmemAllocator().allocate(self.shared_storage())
        if warp_index == 0:
            self.init_barriers(shared)
        arch.mbarrier_init_fence()
        arch.sync_threads()

        if warp_index < WORKERS * GATHER_WARPS:
            arch.setmaxregister_decrease(GATHER_REGISTERS)
            worker = warp_index // GATHER_WARPS
            work = Work(rows, s_q, id_limit, id_offset, block * WORKERS + worker, blocks * WORKERS)
            half = warp_index % GATHER_WARPS
            self.gather(shared, worker, half, index_q_map, index_q, index_k, topk_indices, work)
        else:
            arch.setmaxregister_increase(MATH_REGISTERS)
            worker = warp_index // MATH_WARPS - 1
            work = Work(rows, s_q, id_limit, id_offset, block * WORKERS + worker, blocks * WORKERS)
            ids = (warp_index % MATH_WARPS, thread % (32 * MATH_WARPS))
            inputs = (weights, score_grad, topk_indices)
            self.math(shared, worker, ids, inputs, (d_index_q, d_weights, dk_accum), sm_scale, work)

    @cute.jit
    def init_barriers(self, shared):
        with arch.elect_one():
            for i in cutlass.range_constexpr(WORKERS * Q_STAGES):
                arch.mbarrier_init(shared.q_full.data_ptr() + i, 1)
                arch.mbarrier_init(shared.q_empty.data_ptr() + i, MATH_WARPS)
            for i in cutlass.range_constexpr(WORKERS * K_STAGES):
                arch.mbarrier_init(shared.k_full.data_ptr() + i, 32 * GATHER_WARPS)
                arch.mbarrier_init(shared.k_empty.data_ptr() + i, MATH_WARPS)

    # --- gather warps --------------------------------------------------------------------------------------------

    @cute.jit
    def gather(self, shared, worker, half, index_q_map, index_q, index_k, topk_indices, work):
        """Fill the worker's Q and K stages. Each of the two warps gathers one half of a tile's slots."""
        q_layout, *_ = self.shared_layouts()
        q_shared = shared.q.get_tensor(q_layout.outer, swizzle=q_layout.inner)
        q_rows = cute.local_tile(index_q, (self.heads, self.dims), (None, 0))
        to_shared, from_global = cpasync.tma_partition(
            index_q_map, 0, cute.make_layout(1), cute.group_modes(q_shared, 0, 2), cute.group_modes(q_rows, 0, 2)
        )
        q_full, q_empty = shared.q_full.data_ptr(), shared.q_empty.data_ptr()
        k_full, k_empty = shared.k_full.data_ptr(), shared.k_empty.data_ptr()
        lane = arch.lane_idx()
        row = work.first_row
        q_count = Int32(0)
        k_count = Int32(0)
        while row < work.rows:
            if half == 0:
                q_stage = worker * Q_STAGES + q_count % Q_STAGES
                arch.mbarrier_wait(q_empty + q_stage, ((q_count // Q_STAGES) & 1) ^ 1)
                with arch.elect_one():
                    arch.mbarrier_arrive_and_expect_tx(q_full + q_stage, self.heads * self.dims * 2)
                cute.copy(index_q_map, from_global[None, row], to_shared[None, q_stage], tma_bar_ptr=q_full + q_stage)
            q_count += 1
            key_offset = (row // work.s_q) * work.id_offset
            ids = topk_indices + (Int64(row) * self.topk + half * (TILE // 2) + lane)
            for tile in cutlass.range(self.tiles, unroll=1):
                slot_id = (ids + tile * TILE).load()
                key = slot_id + key_offset if Uint32(slot_id) < Uint32(work.id_limit) else Int32(-1)
                k_stage = worker * K_STAGES + k_count % K_STAGES
                arch.mbarrier_wait(k_empty + k_stage, ((k_count // K_STAGES) & 1) ^ 1)
                self.gather_half_tile(shared, k_stage, half, lane, index_k, key)
                arch.cp_async_mbarrier_arrive_noinc(k_full + k_stage)
                k_count += 1
            row += work.row_step

    @cute.jit
    def gather_half_tile(self, shared, k_stage, half, lane, index_k, key):
        """Copy the 32 K rows whose keys the lanes hold, two rows an instruction; key -1 gives zeros.

        Lane l carries 16-byte chunk l % 16 of a row. The destination is the 128-byte swizzle by hand: within a
        64-element line, chunk c of row r lies at chunk c ^ (r % 8).
        """
        words = self.dims // 2  # of 4 bytes, in a K row
        chunk = lane % 16
        sub_row = lane // 16
        source = cute.recast_ptr(index_k, dtype=Int32) + chunk * 4
        line = cute.recast_ptr(shared.k.data_ptr(), dtype=Int32) + (
            k_stage * (TILE * words) + (chunk // 8) * (TILE * 32) + half * (TILE // 2 * 32)
        )
        for i in cutlass.range_constexpr(TILE // 4):
            row_key = arch.shuffle_sync(key, 2 * i + sub_row)
            destination = line + (2 * i + sub_row) * 32 + ((chunk % 8) ^ ((2 * i) % 8 + sub_row)) * 4
            copied_bytes = Int32(16) if row_key >= 0 else Int32(0)
            arch.inline_ptx(
                "cp.async.cg.shared.global [{$r0}], [{$r1}], 16, {$r2};",
                read_only_args=[destination, source + Int64(cutlass.max(row_key, 0)) * words, copied_bytes],
            )

    # --- math warpgroup ------------------------------------------------------------------------------------------

    @cute.jit
    def math(self, shared, worker, thread_ids, inputs, outputs, sm_scale, work):
        """Consume the worker's stages: the three contractions, the gate, and all outputs of its rows."""
        warp_index, thread = thread_ids
        weights, score_grad, topk_indices = inputs
        d_index_q, d_weights, dk_accum = outputs
        lane = arch.lane_idx()
        group, pair = lane // 4, lane % 4  # accumulator fragment: rows group, group + 8; columns 8n + 2 pair + {0, 1}
        barrier_id = 1 + worker
        q_full, q_empty = shared.q_full.data_ptr(), shared.q_empty.data_ptr()
        k_full, k_empty = shared.k_full.data_ptr(), shared.k_empty.data_ptr()

        q_layout, q_across, k_layout, k_across, a_layout, a_across = self.shared_layouts()
        s_mma, dk_mma, dq_mma = self.tiled_mmas()
        s_slice, dk_slice, dq_slice = s_mma.get_slice(thread), dk_mma.get_slice(thread), dq_mma.get_slice(thread)
        a_shared = shared.a.get_tensor(a_layout.outer, swizzle=a_layout.inner)
        s_from_k = s_slice.make_fragment_A(s_slice.partition_A(view(shared.k, k_layout)))
        s_from_q = s_slice.make_fragment_B(s_slice.partition_B(view(shared.q, q_layout)))
        dk_from_q = dk_slice.make_fragment_B(dk_slice.partition_B(view(shared.q, q_across)))
        dq_from_a = dq_slice.make_fragment_A(dq_slice.partition_A(view(shared.a, a_across)))
        dq_from_k = dq_slice.make_fragment_B(dq_slice.partition_B(view(shared.k, k_across)))
        s = s_slice.make_fragment_C(s_slice.partition_shape_C((TILE, self.heads)))
        dk = dk_slice.make_fragment_C(dk_slice.partition_shape_C((TILE, self.dims)))
        dq = dq_slice.make_fragment_C(dq_slice.partition_shape_C((self.heads, self.dims)))
        a = dk_slice.make_fragment_A(dk_slice.partition_shape_A((TILE, self.heads)))

        a_store = cute.make_tiled_copy_C(cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), BFloat16), s_mma)
        a_to_shared = a_store.get_slice(thread).partition_D(a_shared)
        a_as_s = a_store.retile(cute.make_tensor(a.iterator, s.layout))  # the two fragments hold the same order

        stage = shared.stage.data_ptr() + (worker * MATH_WARPS + warp_index) * WARP_STAGE
        w = cute.make_rmem_tensor(self.heads // 4, Float32)
        dw = cute.make_rmem_tensor(self.heads // 4, Float32)

        slot = warp_index * WARP_SLOTS + lane % WARP_SLOTS  # lanes 16 to 31 repeat the warp's 16 slots
        row = work.first_row
        q_count = Int32(0)
        k_count = Int32(0)
        next_id = Int32(-1)
        next_grad = Float32(0.0)
        if row < work.rows:
            first = Int64(row) * self.topk + slot
            next_id = (topk_indices + first).load()
            next_grad = (score_grad + first).load()
        while row < work.rows:
            self.load_weights(weights, row, pair, w)
            dw.fill(0.0)
            key_offset = (row // work.s_q) * work.id_offset
            q_stage = worker * Q_STAGES + q_count % Q_STAGES
            arch.mbarrier_wait(q_full + q_stage, (q_count // Q_STAGES) & 1)
            for tile in cutlass.range(self.tiles, unroll=1):
                slot_id = next_id
                valid = Uint32(slot_id) < Uint32(work.id_limit)
                grad = next_grad * sm_scale if valid else Float32(0.0)
                # The next tile's ids and gradients travel while this tile is computed.
                next_tile, next_row = tile + 1, row
                if next_tile == self.tiles:
                    next_tile, next_row = 0, row + work.row_step
                if next_row < work.rows:
                    offset = Int64(next_row) * self.topk + next_tile * TILE + slot
                    next_id = (topk_indices + offset).load()
                    next_grad = (score_grad + offset).load()

                k_stage = worker * K_STAGES + k_count % K_STAGES
                arch.mbarrier_wait(k_full + k_stage, (k_count // K_STAGES) & 1)
                arch.fence_proxy("async.shared", space="cta")  # cp.async wrote K through the generic proxy
                gemm(s_mma, s, s_from_k[None, None, None, k_stage], s_from_q[None, None, None, q_stage], False)
                warpgroup.wait_group(0)
                self.gate(s, a, w, dw, arch.shuffle_sync(grad, group), arch.shuffle_sync(grad, group + 8))

                # A of the last tile is free once all four warps have passed their wait for its dQ product. It is stored
                # before the dK product is issued: the ISA forbids even reading A's registers while a wgmma uses them.
                arch.barrier(barrier_id=barrier_id, number_of_threads=32 * MATH_WARPS)
                cute.copy(a_store, a_as_s, a_to_shared[None, None, None, worker])
                arch.fence_proxy("async.shared", space="cta")
                gemm(dk_mma, dk, a, dk_from_q[None, None, None, q_stage], False)
                arch.barrier(barrier_id=barrier_id, number_of_threads=32 * MATH_WARPS)
                gemm(dq_mma, dq, dq_from_a[None, None, None, worker], dq_from_k[None, None, None, k_stage], tile > 0)

                warpgroup.wait_group(1)
                self.stage_rows(dk, stage, DK_PITCH, group, pair)
                if lane < WARP_SLOTS and valid:
                    destination = dk_accum + Int64(slot_id + key_offset) * self.dims
                    bulk_add(destination, stage + lane * DK_PITCH, 4 * self.dims)
                arch.cp_async_bulk_commit_group()
                warpgroup.wait_group(0)
                with arch.elect_one():
                    arch.mbarrier_arrive(k_empty + k_stage)
                k_count += 1
            with arch.elect_one():
                arch.mbarrier_arrive(q_empty + q_stage)
            q_count += 1

            stage_bf16 = cute.recast_ptr(stage, dtype=BFloat16)
            self.stage_rows(dq, stage_bf16, DQ_PITCH, group, pair)
            if lane < WARP_SLOTS:
                head = warp_index * WARP_SLOTS + lane
                destination = d_index_q + (Int64(row) * self.heads + head) * self.dims
                bulk_store(destination, stage_bf16 + lane * DQ_PITCH, 2 * self.dims)
            arch.cp_async_bulk_commit_group()
            self.store_dw(shared, worker, warp_index, thread, barrier_id, dw, d_weights + Int64(row) * self.heads)
            row += work.row_step
        arch.cp_async_bulk_wait_group(0)

    @cute.jit
    def load_weights(self, weights, row, pair, w):
        """w[2n + i] = weights[row, 8n + 2 pair + i], exact in fp32."""
        for n in cutlass.range_constexpr(self.heads // 8):
            source = weights + (Int64(row) * self.heads + 8 * n + 2 * pair)
            both = cute.make_tensor(source, cute.make_layout(2)).load().to(Float32)
            w[2 * n] = both[0]
            w[2 * n + 1] = both[1]

    @cute.jit
    def gate(self, s, a, w, dw, grad_low, grad_high):
        """From S to A in registers, adding to the lane's share of d_weights on the way.

        Element 4n + 2j + i of the fragment is slot ``group + 8j`` and head ``8n + 2 pair + i``.
        """
        scores = cute.make_tensor(s.iterator, cute.make_layout(self.heads // 2))
        for n in cutlass.range_constexpr(self.heads // 8):
            for j in cutlass.range_constexpr(2):
                for i in cutlass.range_constexpr(2):
                    grad = grad_low if j == 0 else grad_high
                    score = scores[4 * n + 2 * j + i]
                    dw[2 * n + i] = dw[2 * n + i] + grad * arch.fmax(score, 0.0, nan=True)
                    scores[4 * n + 2 * j + i] = grad * w[2 * n + i] if score > 0.0 else Float32(0.0)
        cute.make_tensor(a.iterator, scores.layout).store(scores.load().to(BFloat16))

    @cute.jit
    def stage_rows(self, accumulator, stage, pitch, group, pair):
        """Write the warp's 16 rows of an accumulator to its staging buffer, ready for bulk copies out of it.

        The buffer is reused: the lanes that issued the last copies out of it first wait until those have read it.
        """
        arch.cp_async_bulk_wait_group(0, read=True)
        arch.sync_warp()
        for n in cutlass.range_constexpr(self.dims // 8):
            for j in cutlass.range_constexpr(2):
                source = cute.make_tensor(accumulator.iterator + (4 * n + 2 * j), cute.make_layout(2))
                target = cute.make_tensor(stage + (group + 8 * j) * pitch + 8 * n + 2 * pair, cute.make_layout(2))
                target.store(source.load().to(stage.dtype))
        arch.fence_proxy("async.shared", space="cta")
        arch.sync_warp()

    @cute.jit
    def store_dw(self, shared, worker, warp_index, thread, barrier_id, dw, d_weights):
        """Sum the lanes' shares of d_weights over slots in a fixed order, round, and store one row.

        The scratch of one row is read behind one barrier and written again behind those of the next row's tiles.
        """
        scratch = cute.make_tensor(
            shared.dw.data_ptr() + worker * (MATH_WARPS * self.heads),
            cute.make_layout((MATH_WARPS, self.heads), stride=(self.heads, 1)),
        )
        lane = thread % 32
        for e in cutlass.range_constexpr(self.heads // 4):
            for lanes in (4, 8, 16):
                dw[e] = dw[e] + arch.shuffle_sync_bfly(dw[e], lanes)
        if lane < 4:
            for e in cutlass.range_constexpr(self.heads // 4):
                scratch[warp_index, 8 * (e // 2) + 2 * lane + e % 2] = dw[e]
        arch.barrier(barrier_id=barrier_id, number_of_threads=32 * MATH_WARPS)
        if thread < self.heads:
            head_total = (scratch[0, thread] + scratch[1, thread]) + (scratch[2, thread] + scratch[3, thread])
            (d_weights + thread).store(head_total.to(BFloat16))


Gradients.kernel.set_name_prefix("dsa_gradients", remove_cutlass_symbol=True, keep_mangled_name=False)


def view(memory, layout):
    """The tensor that a swizzled layout makes of a shared-memory range."""
    return cute.make_tensor(cute.recast_ptr(memory.data_ptr(), layout.inner), layout.outer)


def bulk_add(destination, source, size):
    """Add ``size`` bytes of fp32 in shared memory to global memory, asynchronously, in this thread's bulk group."""
    arch.inline_ptx(
        f"cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [{{$r0}}], [{{$r1}}], {size};",
        read_only_args=[destination, source],
    )


def bulk_store(destination, source, size):
    """Copy ``size`` bytes of shared memory to global memory, asynchronously, in this thread's bulk group."""
    arch.inline_ptx(
        f"cp.async.bulk.global.shared::cta.bulk_group [{{$r0}}], [{{$r1}}], {size};",
        read_only_args=[destination, source],
    )


@cute.jit
def gemm(mma: cute.TiledMma, accumulator, a, b, accumulate):
    """Issue and commit one wgmma group: accumulator = a b, or += where ``accumulate``. The caller waits."""
    warpgroup.fence()
    mma.set(warpgroup.Field.ACCUMULATE, accumulate)
    for k in cutlass.range_constexpr(cute.size(a, mode=[2])):
        cute.gemm(mma, accumulator, a[None, None, k], b[None, None, k], accumulator)
        mma.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()


class Program:
    """The three stages as one compilation: one module, one cubin. Its launches are never run; the runtime launches."""

    def __init__(self, topk: int, heads: int, head_dim: int) -> None:
        self.score_grad = ScoreGrad(topk, head_dim)
        self.gradients = Gradients(topk, heads, head_dim)
        self.round_d_index_k = RoundDIndexK(head_dim)

    @cute.jit
    def __call__(
        self,
        index_q: cute.Pointer,
        weights: cute.Pointer,
        index_k: cute.Pointer,
        attn_score: cute.Pointer,
        index_score: cute.Pointer,
        topk_indices: cute.Pointer,
        grad_loss: cute.Pointer,
        d_index_q: cute.Pointer,
        d_weights: cute.Pointer,
        d_index_k: cute.Pointer,
        dk_accum: cute.Pointer,
        extent: Int32,
        scale: Float32,
        stream: cuda.CUstream,
    ):
        self.score_grad.kernel(attn_score, index_score, grad_loss, dk_accum, scale, extent, extent).launch(
            grid=(extent, 1, 1), block=(256, 1, 1), stream=stream
        )
        atom, rows = self.gradients.tma_atom(index_q)
        self.gradients.kernel(
            atom, rows, weights, index_k, attn_score, topk_indices, d_index_q, d_weights, dk_accum,
            extent, extent, extent, extent, scale,
        ).launch(grid=(extent, 1, 1), block=(THREADS, 1, 1), stream=stream, min_blocks_per_mp=1)  # fmt: skip
        self.round_d_index_k.kernel(dk_accum, d_index_k, extent).launch(
            grid=(extent, 1, 1), block=(256, 1, 1), stream=stream
        )


def program(config: Mapping[str, Any]) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """What to hand to ``cute.compile`` for one plan config: the function and its stand-in arguments."""

    def pointer(dtype: type, align: int = 16) -> Any:
        return make_ptr(dtype, align, cute.AddressSpace.gmem, assumed_align=align)

    arguments = (
        pointer(BFloat16), pointer(BFloat16), pointer(BFloat16), pointer(Float32), pointer(Float32), pointer(Int32),
        pointer(Float32, 4), pointer(BFloat16), pointer(BFloat16), pointer(BFloat16), pointer(Float32),
        Int32(1), Float32(1.0), make_fake_stream(),
    )  # fmt: skip
    return Program(config["topk"], config["heads"], config["head_dim"]), arguments
