"""The GEMM stage of ``indexer_backward`` for Hopper (sm_90a): wgmma, one persistent CTA an SM, two workers a CTA.

For each row (one query) with its ``topk`` selected keys, and with g'[t] = sm_scale * attn_score[t] from stage 1::

    S[h,t]   = sum_d Q[h,d] K[n,d]          n = topk_indices[t]
    d_weights[h]    = sum_t g'[t] max(S[h,t], 0)
    A[h,t]   = g'[t] weights[h]             where S[h,t] > 0, else 0; as one bf16, or as the sum of two
    d_index_q[h,d]  = sum_t A[h,t] K[n,d]
    d_index_k[n,d] += sum_h A[h,t] Q[h,d]   fp32, over all rows

One bf16 is A rounded. Two are hi = bf16(A) and lo = bf16(A - hi), each multiplied and added to the same accumulator:
16 bits of A. lo is lost where |A| is below about 1e-35, and where |A| reaches 2^128 - 2^119, which rounds to infinity,
hi and lo are opposite infinities and the result is NaN.

What bounds it is the L2: one 512-byte fp32 add and one 256-byte gather a pair of row and slot. So adds are to be under
way all the time, and all else is arranged around them.

A *worker* owns whole rows and shares nothing with the other worker of its CTA, so that one fills the other's waits. It
takes tiles of 64 slots, in the rings (see ``gemm_stage``) ``q``, ``k`` and ``out``:

* two gather warps: for each row Q by TMA and the weights (``q``); for each tile its row, the keys and g' of its slots,
  and K rows by cp.async, zero where the id is invalid (``k``);
* a math warpgroup, 16 heads a warp: S, the gate, d_index_q and d_index_k;
* two drain warps: what the math warpgroup has staged in ``out``, half a tile's d_index_k or a row's d_index_q, leaves
  for global memory, d_index_k by one bulk reduction of 512 bytes a slot. To issue one takes a warp 50 to 60 cycles,
  almost twice what the L2 takes to add it: that is why there are two, and why the math warps do not do it.

The tensor cores take a product from a warp when they are about to begin it, so a warp that issues several waits for all
but the last. Products and other work of a tile therefore alternate: d_index_q is issued, the first half of d_index_k of
the tile *before* is staged; S of the tile *after* is issued, the second half is staged; d_index_k is issued, and A of
the tile after is made.

With heads as rows a thread holds two heads and a quarter of the slots: the sum over slots for d_weights stays in its
registers, with what rounding loses of it, and crosses lanes once a row. A goes through shared memory, where
``dQ = A K`` reads it along and ``dK = A^T Q`` across; nothing is transposed by copying.

All that a warp needs to know of a tile is in its stage of ``k``, which is filled again only when every warp has
released it; so no row's ids or gradients can be replaced before their last reader, however few tiles a row has.

Rows that go "in order" go to the first worker of each CTA.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.experimental.cuda as cuda
import cutlass.memory
from cutlass import BFloat16, Float32, Int32, Int64, Uint32
from cutlass.cute import arch
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.cute.nvgpu.warpgroup import OperandSource, SmemLayoutAtomKind

from dsa_planner.kernels import hopper
from dsa_planner.kernels.gemm_stage import (
    HEAD_ROWS,
    GemmStage,
    GlobalTensors,
    Work,
    add_exactly,
    aligned,
    lines_map,
    place,
    sum_over_lanes,
)
from dsa_planner.kernels.hopper import LINE

WORKERS = 2  # a CTA
GATHER_WARPS = 2  # a worker
DRAIN_WARPS = 2  # a worker
MATH_WARPS = 4  # a worker
HELPERS = WORKERS * (GATHER_WARPS + DRAIN_WARPS)
THREADS = 32 * (HELPERS + WORKERS * MATH_WARPS)
TILE = 64  # slots
Q_STAGES = 2
K_STAGES = 2
OUT_STAGES = 2
HALF = TILE // 2  # slots of an ``out`` stage
HELPER_REGISTERS = 40
MATH_REGISTERS = 216

# The tensor cores cut a sum toward zero after every 16 products. Over 128 dims a score, and with it d_weights, comes
# out smaller by this share: by 0.9e-7 to 1.0e-7 on average where products have either sign, by more where they do not.
CUT_SCORES = 1e-7

SHARED_BYTES = 232_448  # all that a CTA can have; held to the layout below by an assertion


class Tensors(NamedTuple):
    """Global memory. ``ticket`` is None unless rows are drawn; ``planes`` and ``keys`` unless they go in order."""

    index_q_map: object
    d_index_q_map: object
    weights: object
    index_k: object
    score_grad: object
    topk_indices: object
    d_weights: object
    dk_accum: object
    ticket: object = None
    planes: object = None
    keys: object = None


class Gradients(GemmStage):
    """The GEMM stage for one topk.

    Args:
        topk: slots of a row.
        heads: 64 or 32.
        head_dim: 128.
        terms: bf16 numbers that stand for A: 1 or 2.
        d_weights: dtype of d_weights.
        rows: how rows go to workers.
    """

    threads = THREADS

    def __init__(self, topk: int, heads: int, head_dim: int, terms: int, d_weights: type, rows: str) -> None:
        self.topk = topk
        self.heads = heads
        self.terms = terms
        self.d_weights = d_weights
        self.row_tiles = topk // TILE
        self.q_elements = HEAD_ROWS * head_dim
        self.k_elements = TILE * head_dim
        self.a_elements = HEAD_ROWS * TILE
        self.out_elements = HALF * head_dim  # fp32
        # ``a`` is not filled but free to be: its readers, the math warps, are its writers.
        rings = {
            "q": (Q_STAGES, 1, MATH_WARPS),
            "k": (K_STAGES, GATHER_WARPS, MATH_WARPS + DRAIN_WARPS),
            "a": (1, MATH_WARPS, 1),
            "out": (OUT_STAGES, MATH_WARPS, DRAIN_WARPS),
        }
        # What lanes store and load themselves, not asynchronously.
        by_lane = ("k", "out") if rows == "in order" else ("k",)
        super().__init__(rows, head_dim, rings, WORKERS, by_lane)

    def arguments(self, tensors: GlobalTensors, extent: Int32):
        """Of a launch: the tensor maps and pointers with which each kernel begins."""
        return (
            *[lines_map(q, self.dims, extent, self.heads) for q in (tensors.index_q, tensors.d_index_q)],
            tensors.weights, tensors.index_k, tensors.score_grad, tensors.topk_indices, tensors.d_weights,
            tensors.dk_accum,
        )  # fmt: skip

    # --- kernels ---------------------------------------------------------------------------------------------------

    @cute.kernel
    def kernel(
        self,
        index_q_map: cutlass.GridConstant[cuda.TensorMap],
        d_index_q_map: cutlass.GridConstant[cuda.TensorMap],
        weights: cute.Pointer,
        index_k: cute.Pointer,
        score_grad: cute.Pointer,
        topk_indices: cute.Pointer,
        d_weights: cute.Pointer,
        dk_accum: cute.Pointer,
        rows: Int32,
        s_q: Int32,
        id_limit: Int32,
        id_offset: Int32,
        sm_scale: Float32,
    ):
        maps = (index_q_map.get_ptr(), d_index_q_map.get_ptr())
        pointers = (weights, index_k, score_grad, topk_indices, d_weights, dk_accum)
        self.run(Tensors(*maps, *pointers), Work(rows, s_q, id_limit, id_offset, sm_scale))

    @cute.kernel
    def kernel_with_tickets(
        self,
        index_q_map: cutlass.GridConstant[cuda.TensorMap],
        d_index_q_map: cutlass.GridConstant[cuda.TensorMap],
        weights: cute.Pointer,
        index_k: cute.Pointer,
        score_grad: cute.Pointer,
        topk_indices: cute.Pointer,
        d_weights: cute.Pointer,
        dk_accum: cute.Pointer,
        ticket: cute.Pointer,
        rows: Int32,
        s_q: Int32,
        id_limit: Int32,
        id_offset: Int32,
        sm_scale: Float32,
    ):
        maps = (index_q_map.get_ptr(), d_index_q_map.get_ptr())
        pointers = (weights, index_k, score_grad, topk_indices, d_weights, dk_accum)
        self.run(Tensors(*maps, *pointers, ticket=ticket), Work(rows, s_q, id_limit, id_offset, sm_scale))

    @cute.kernel
    def kernel_in_order(
        self,
        index_q_map: cutlass.GridConstant[cuda.TensorMap],
        d_index_q_map: cutlass.GridConstant[cuda.TensorMap],
        weights: cute.Pointer,
        index_k: cute.Pointer,
        score_grad: cute.Pointer,
        topk_indices: cute.Pointer,
        d_weights: cute.Pointer,
        dk_accum: cute.Pointer,
        dk_planes: cute.Pointer,
        keys: Int32,
        rows: Int32,
        s_q: Int32,
        id_limit: Int32,
        id_offset: Int32,
        sm_scale: Float32,
    ):
        maps = (index_q_map.get_ptr(), d_index_q_map.get_ptr())
        pointers = (weights, index_k, score_grad, topk_indices, d_weights, dk_accum)
        work = Work(rows, s_q, id_limit, id_offset, sm_scale)
        self.run(Tensors(*maps, *pointers, planes=dk_planes, keys=keys), work)

    @cute.jit
    def run(self, tensors, work):
        thread, _, _ = arch.thread_idx()
        warp = arch.make_warp_uniform(arch.warp_idx())
        shared = cutlass.memory.SmemAllocator().allocate(self.shared_storage())
        if warp == 0:
            self.init_barriers(shared)
        if cutlass.const_expr(self.heads < HEAD_ROWS):
            self.clear_unused_heads(shared, thread)
        arch.mbarrier_init_fence()
        arch.sync_threads()

        if warp < HELPERS:
            arch.setmaxregister_decrease(HELPER_REGISTERS)
            worker = warp % WORKERS
            if warp < WORKERS:
                self.gather(shared, worker, tensors, work)
            elif warp < 2 * WORKERS:
                self.gather_second_half(shared, worker, tensors)
            else:
                self.drain(shared, worker, warp // WORKERS - GATHER_WARPS, tensors)
        else:
            arch.setmaxregister_increase(MATH_REGISTERS)
            worker = (warp - HELPERS) // MATH_WARPS
            self.math(shared, worker, warp % MATH_WARPS, thread % (32 * MATH_WARPS), tensors)

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

        q, q_across = both(HEAD_ROWS, self.dims, WORKERS * Q_STAGES)
        k, k_across = both(TILE, self.dims, WORKERS * K_STAGES)
        a, a_across = both(HEAD_ROWS, TILE, WORKERS * self.terms)
        return q, q_across, k, k_across, a, a_across

    def shared_storage(self):
        def array(dtype: type, count: int, align: int):
            return cute.struct.Align[cute.struct.MemRange[dtype, WORKERS * count], align]

        @cute.struct
        class Shared:
            q: self.barriers("q")
            k: self.barriers("k")
            a: self.barriers("a")
            out: self.barriers("out")
            rows: array(Int32, K_STAGES, 16)
            keys: array(Int32, K_STAGES * TILE, 16)
            grads: array(Float32, K_STAGES * TILE, 16)
            weights: array(BFloat16, Q_STAGES * HEAD_ROWS, 16)
            q_tiles: array(BFloat16, Q_STAGES * self.q_elements, 1024)
            k_tiles: array(BFloat16, K_STAGES * self.k_elements, 1024)
            a_tiles: array(BFloat16, self.terms * self.a_elements, 1024)
            out_tiles: array(Float32, OUT_STAGES * self.out_elements, 1024)

        if Shared.size_in_bytes() > SHARED_BYTES:
            raise AssertionError(f"shared memory is {Shared.size_in_bytes()} bytes, the record says {SHARED_BYTES}")
        return Shared

    @cute.jit
    def clear_unused_heads(self, shared, thread):
        """Zero the rows of Q that no head has: S is computed of them, into rows that nobody reads."""
        words = cute.recast_ptr(shared.q_tiles.data_ptr(), dtype=Int32)
        unused = (HEAD_ROWS - self.heads) * (LINE // 2)
        columns = WORKERS * Q_STAGES * (self.dims // LINE)
        for column in cutlass.range_constexpr(columns):
            for i in cutlass.range(thread, unused, THREADS, unroll=1):
                (words + (column * HEAD_ROWS + self.heads) * (LINE // 2) + i).store(Int32(0))
        arch.fence_proxy("async.shared", space="cta")

    @cute.jit
    def row_of(self, shared, worker, count):
        """The row of a tile, once the tile is there; -1 for none."""
        self.wait_full(shared, "k", count, worker)
        return (shared.rows.data_ptr() + self.stage("k", count, worker)).load()

    # --- gather ----------------------------------------------------------------------------------------------------

    @cute.jit
    def gather(self, shared, worker, tensors, work):
        """Fill the rings ``k`` and ``q``. Lane l has slots l and l + 32 of a tile."""
        lane = arch.lane_idx()
        block, _, _ = arch.block_idx()
        blocks, _, _ = arch.grid_dim()
        workers = blocks * WORKERS
        row = worker * blocks + block
        if cutlass.const_expr(self.rows == "in order"):
            workers = blocks
            if worker > 0:
                row = work.rows
        ids = cute.make_rmem_tensor(2, Int32)
        scores = cute.make_rmem_tensor(2, Float32)
        row_count = Int32(0)
        count = Int32(0)
        if row < work.rows:
            self.load_slots(tensors, row, 0, lane, ids, scores)
        next_row = self.row_after(row, workers, self.draw(tensors, lane))
        while row < work.rows:
            drawn = self.draw(tensors, lane)  # for the row after the next: it is there when it is asked for
            self.load_q(shared, worker, tensors, row, row_count)
            key_offset = (row // work.s_q) * work.id_offset
            for tile in cutlass.range(self.row_tiles, unroll=1):
                keys, grads = self.mask(work, key_offset, ids, scores)
                # The next tile's ids and gradients travel while this tile waits for its stage.
                then_tile, then_row = tile + 1, row
                if then_tile == self.row_tiles:
                    then_tile, then_row = 0, next_row
                if then_row < work.rows:
                    self.load_slots(tensors, then_row, then_tile, lane, ids, scores)

                self.fill(shared, worker, lane, row, count, keys, grads)
                self.gather_half(shared, worker, lane, 0, tensors.index_k, keys[0], count)
                count += 1
            row_count += 1
            row = next_row
            next_row = self.row_after(row, workers, drawn)
        keys = cute.make_rmem_tensor(2, Int32)
        grads = cute.make_rmem_tensor(2, Float32)
        keys.fill(-1)
        grads.fill(0.0)
        self.fill(shared, worker, lane, Int32(-1), count, keys, grads)
        self.gather_half(shared, worker, lane, 0, tensors.index_k, keys[0], count)

    @cute.jit
    def gather_second_half(self, shared, worker, tensors):
        """Follow the other gather warp."""
        lane = arch.lane_idx()
        count = Int32(0)
        row = Int32(0)
        while row >= 0:
            self.gather_barrier(worker)
            stage = self.stage("k", count, worker)
            row = (shared.rows.data_ptr() + stage).load()
            key = (shared.keys.data_ptr() + (stage * TILE + 32 + lane)).load()
            self.gather_half(shared, worker, lane, 1, tensors.index_k, key, count)
            count += 1

    @cute.jit
    def fill(self, shared, worker, lane, row, count, keys, grads):
        """Say what there is to know of a tile, once its stage is free."""
        self.wait_empty(shared, "k", count, worker)
        stage = self.stage("k", count, worker)
        for e in cutlass.range_constexpr(2):
            (shared.keys.data_ptr() + (stage * TILE + 32 * e + lane)).store(keys[e])
            (shared.grads.data_ptr() + (stage * TILE + 32 * e + lane)).store(grads[e])
        if lane == 0:
            (shared.rows.data_ptr() + stage).store(row)
        self.gather_barrier(worker)

    def gather_barrier(self, worker):
        """Between the gather warps of a worker."""
        arch.barrier(barrier_id=1 + WORKERS + worker, number_of_threads=32 * GATHER_WARPS)

    @cute.jit
    def load_slots(self, tensors, row, tile, lane, ids, scores):
        """The ids and score gradients of the lane's two slots of a tile."""
        offset = Int64(row) * self.topk + (tile * TILE + lane)
        for e in cutlass.range_constexpr(2):
            ids[e] = (tensors.topk_indices + (offset + 32 * e)).load()
            scores[e] = (tensors.score_grad + (offset + 32 * e)).load()

    @cute.jit
    def load_q(self, shared, worker, tensors, row, row_count):
        self.wait_empty(shared, "q", row_count, worker)
        with arch.elect_one():
            full = self.full(shared, "q", row_count, worker)
            arch.mbarrier_arrive_and_expect_tx(full, self.heads * self.dims * 2 + self.heads * 2)
            stage = self.stage("q", row_count, worker)
            weights = tensors.weights + Int64(row) * self.heads
            hopper.bulk_load(shared.weights.data_ptr() + stage * HEAD_ROWS, weights, self.heads * 2, full)
            q = shared.q_tiles.data_ptr() + stage * self.q_elements
            for half in cutlass.range_constexpr(self.dims // LINE):
                hopper.load_box(q + half * (HEAD_ROWS * LINE), tensors.index_q_map, half * LINE, row * self.heads, full)

    @cute.jit
    def gather_half(self, shared, worker, lane, half: cutlass.Constexpr, index_k, key, count):
        """Copy half of a tile's K rows, whose keys the lanes have, two rows an instruction; key -1 gives zeros.

        Lane l carries 16-byte chunk l % 16 of a row. The destination is the 128-byte swizzle by hand: within a line,
        chunk c of row r lies at chunk c ^ (r % 8).
        """
        chunk = lane % 16
        sub_row = lane // 16
        source = index_k + chunk * 8
        rows = shared.k_tiles.data_ptr() + (
            self.stage("k", count, worker) * self.k_elements + chunk // 8 * (TILE * LINE) + half * (TILE // 2 * LINE)
        )
        for i in cutlass.range_constexpr(TILE // 4):
            row_key = arch.shuffle_sync(key, 2 * i + sub_row)
            target = rows + (2 * i + sub_row) * LINE + ((chunk % 8) ^ ((2 * i) % 8 + sub_row)) * 8
            size = Int32(16) if row_key >= 0 else Int32(0)
            hopper.copy_16(target, source + Int64(cutlass.max(row_key, 0)) * self.dims, size)
        arch.cp_async_commit_group()
        arch.cp_async_wait_group(0)
        arch.fence_proxy("async.shared", space="cta")  # cp.async writes through the generic proxy
        self.arrive_full(shared, "k", count, worker)

    # --- math ------------------------------------------------------------------------------------------------------

    def mma_ops(self):
        """S = Q K^T (64 heads x slots), dQ = A K (64 heads x dims), dK = A^T Q (64 slots x dims)."""

        def op(n: int, a_major: OperandMajorMode, b_major: OperandMajorMode):
            return warpgroup.MmaF16BF16Op(BFloat16, Float32, (64, n, 16), OperandSource.SMEM, a_major, b_major)

        along, across = OperandMajorMode.K, OperandMajorMode.MN
        return op(TILE, along, along), op(self.dims, along, across), op(self.dims, across, across)

    @cute.jit
    def math(self, shared, worker, warp, thread, tensors):
        """Consume the worker's stages: the three contractions, the gate, and all outputs of its rows."""
        lane = arch.lane_idx()
        head = warp * 16 + lane // 4  # of this thread, and the one 8 further on
        q, q_across, k, k_across, a, a_across = self.shared_layouts()
        s_op, dq_op, dk_op = self.mma_ops()
        s_slice, dq_slice, dk_slice = [cute.make_tiled_mma(op).get_slice(thread) for op in (s_op, dq_op, dk_op)]
        s_from_q = s_slice.make_fragment_A(s_slice.partition_A(view(shared.q_tiles, q)))
        s_from_k = s_slice.make_fragment_B(s_slice.partition_B(view(shared.k_tiles, k)))
        dq_from_a = dq_slice.make_fragment_A(dq_slice.partition_A(view(shared.a_tiles, a)))
        dq_from_k = dq_slice.make_fragment_B(dq_slice.partition_B(view(shared.k_tiles, k_across)))
        dk_from_a = dk_slice.make_fragment_A(dk_slice.partition_A(view(shared.a_tiles, a_across)))
        dk_from_q = dk_slice.make_fragment_B(dk_slice.partition_B(view(shared.q_tiles, q_across)))
        s = s_slice.make_fragment_C(s_slice.partition_shape_C((HEAD_ROWS, TILE)))
        dq = dq_slice.make_fragment_C(dq_slice.partition_shape_C((HEAD_ROWS, self.dims)))
        dk = dk_slice.make_fragment_C(dk_slice.partition_shape_C((TILE, self.dims)))
        a = [cute.make_rmem_tensor(TILE // 2, BFloat16) for _ in range(self.terms)]
        w = cute.make_rmem_tensor(2, Float32)
        dw = cute.make_rmem_tensor(4, Float32)

        scores = (s_op, s, s_from_q, s_from_k)
        count = Int32(0)
        row_count = Int32(0)
        out_count = Int32(0)
        row = self.row_of(shared, worker, count)
        if row >= 0:
            self.multiply_scores(shared, worker, scores, row_count, count)
            self.load_weights(shared, worker, row_count, head, w)
            dw.fill(0.0)
            grads = self.load_grads(shared, worker, count, lane)
            warpgroup.wait_group(0)
            self.gate(grads, s, a, w, dw)
            tile = Int32(0)
            while row >= 0:
                # Here nothing is under way in the tensor cores. A of this tile is in registers, and so are d_index_k of
                # the tile before and, where that was its row's last, d_index_q.
                last = tile == self.row_tiles - 1
                self.arrive_full(shared, "a", count, worker)  # free to be filled
                if tile == 0 and row_count > 0:
                    self.arrive_empty(shared, "q", row_count - 1, worker)
                    self.hand_over_dq(shared, worker, out_count, dq, warp, lane)
                    out_count += 1
                # A of the tile before has been read when all four warps have seen their part of its d_index_k.
                self.wait_full(shared, "a", count, worker)
                self.store_a(shared, worker, warp, lane, a)
                arch.fence_proxy("async.shared", space="cta")
                k_stage = self.stage("k", count, worker)
                arch.barrier(barrier_id=1 + worker, number_of_threads=32 * MATH_WARPS)
                gemm(
                    dq_op, dq, [dq_from_a[None, None, None, worker * self.terms + t] for t in range(self.terms)],
                    dq_from_k[None, None, None, k_stage], TILE // 16, tile > 0,
                )  # fmt: skip
                if count > 0:
                    self.hand_over_dk(shared, worker, out_count, dk, warp, lane, 0)
                warpgroup.wait_group(0)  # d_index_q of this tile: the last use of its K
                self.arrive_empty(shared, "k", count, worker)
                # After the last tile comes one without keys, so that S need not be left out: a wgmma in a branch makes
                # the assembler wait for each one.
                next_row = self.row_of(shared, worker, count + 1)
                next_q = row_count + 1 if last and next_row >= 0 else row_count
                self.multiply_scores(shared, worker, scores, next_q, count + 1)
                if count > 0:
                    self.hand_over_dk(shared, worker, out_count + 1, dk, warp, lane, 1)
                    out_count += 2
                gemm(
                    dk_op, dk, [dk_from_a[None, None, None, worker * self.terms + t] for t in range(self.terms)],
                    dk_from_q[None, None, None, self.stage("q", row_count, worker)], self.heads // 16, False,
                )  # fmt: skip
                tile += 1
                if last:
                    self.store_dw(tensors, row, head, lane, dw)
                    dw.fill(0.0)
                    self.load_weights(shared, worker, next_q, head, w)
                    tile = Int32(0)
                    row_count += 1
                grads = self.load_grads(shared, worker, count + 1, lane)
                warpgroup.wait_group(1)  # S of the next tile
                self.gate(grads, s, a, w, dw)
                warpgroup.wait_group(0)  # d_index_k of this tile
                count += 1
                row = next_row
            self.hand_over_dq(shared, worker, out_count, dq, warp, lane)
            for half in cutlass.range_constexpr(2):
                self.hand_over_dk(shared, worker, out_count + 1 + half, dk, warp, lane, half)

    @cute.jit
    def multiply_scores(self, shared, worker, scores, row_count, count):
        """Issue S of a tile, once Q is there."""
        op, s, s_from_q, s_from_k = scores
        self.wait_full(shared, "q", row_count, worker)
        q = s_from_q[None, None, None, self.stage("q", row_count, worker)]
        gemm(op, s, [q], s_from_k[None, None, None, self.stage("k", count, worker)], self.dims // 16, False)

    @cute.jit
    def load_weights(self, shared, worker, row_count, head, w):
        """The weights of the thread's two heads."""
        weights = shared.weights.data_ptr() + self.stage("q", row_count, worker) * HEAD_ROWS
        for j in cutlass.range_constexpr(2):
            w[j] = (weights + (head + 8 * j) % self.heads).load().to(Float32)

    @cute.jit
    def load_grads(self, shared, worker, count, lane):
        """g' of the slots that the thread has: 8n + 2 (lane % 4) + i."""
        grads = shared.grads.data_ptr() + (self.stage("k", count, worker) * TILE + lane % 4 * 2)
        loaded = cute.make_rmem_tensor(TILE // 4, Float32)
        for n in cutlass.range_constexpr(TILE // 8):
            pair = cute.make_tensor(grads + 8 * n, cute.make_layout(2)).load()
            loaded[2 * n] = pair[0]
            loaded[2 * n + 1] = pair[1]
        return loaded

    @cute.jit
    def gate(self, grads, s, a, w, dw):
        """From S to A in registers; adds to the thread's share of d_weights.

        Element 4n + 2j + i of the fragment is head ``head + 8j`` and slot ``8n + 2 (lane % 4) + i``. The share is
        summed by tile first, in four parts, so that its rounding errors stay small at any topk.
        """
        scores = cute.make_tensor(s.iterator, cute.make_layout(TILE // 2))
        gated = cute.make_rmem_tensor(TILE // 2, Float32)
        part = cute.make_rmem_tensor(8, Float32)
        part.fill(0.0)
        for n in cutlass.range_constexpr(TILE // 8):
            for j in cutlass.range_constexpr(2):
                for i in cutlass.range_constexpr(2):
                    e, p = 4 * n + 2 * j + i, 4 * j + 2 * (n % 2) + i
                    score, grad = scores[e], grads[2 * n + i]
                    part[p] = part[p] + grad * arch.fmax(score, 0.0, nan=True)
                    gated[e] = grad * w[j] if score > 0.0 else Float32(0.0)
        for j in cutlass.range_constexpr(2):
            add_exactly(dw, j, (part[4 * j] + part[4 * j + 1]) + (part[4 * j + 2] + part[4 * j + 3]))
        exact = gated.load()
        for term in cutlass.range_constexpr(self.terms):
            rounded = exact.to(BFloat16)
            a[term].store(rounded)
            if cutlass.const_expr(term + 1 < self.terms):
                exact = exact - rounded.to(Float32)

    @cute.jit
    def store_a(self, shared, worker, warp, lane, a):
        for term in cutlass.range_constexpr(self.terms):
            tile = shared.a_tiles.data_ptr() + (worker * self.terms + term) * self.a_elements
            words = cute.make_tensor(cute.recast_ptr(a[term].iterator, dtype=Uint32), cute.make_layout(TILE // 4))
            for n in cutlass.range_constexpr(TILE // 16):
                hopper.store_matrices(
                    tile + place(warp, lane, n), words[4 * n], words[4 * n + 1], words[4 * n + 2], words[4 * n + 3]
                )

    @cute.jit
    def hand_over_dq(self, shared, worker, out_count, dq, warp, lane):
        """d_index_q of a row to the drain warps."""
        out = self.claim(shared, worker, out_count)
        self.stage_dq(cute.recast_ptr(out, dtype=BFloat16), dq, warp, lane)
        self.hand_over(shared, worker, out_count)

    @cute.jit
    def hand_over_dk(self, shared, worker, out_count, dk, warp, lane, half: cutlass.Constexpr):
        """Half of the d_index_k of a tile to the drain warps."""
        out = self.claim(shared, worker, out_count)
        self.stage_dk(out, dk, warp, lane, half)
        self.hand_over(shared, worker, out_count)

    @cute.jit
    def claim(self, shared, worker, out_count):
        """The next stage of ``out``, once it is free."""
        self.wait_empty(shared, "out", out_count, worker)
        return shared.out_tiles.data_ptr() + self.stage("out", out_count, worker) * self.out_elements

    @cute.jit
    def hand_over(self, shared, worker, out_count):
        """Let the drain warps have what this warp has stored in a stage of ``out``."""
        arch.sync_warp()
        self.arrive_full(shared, "out", out_count, worker)

    @cute.jit
    def stage_dk(self, out, dk, warp, lane, half):
        """Store the warp's 8 rows of one half of d_index_k: row 8 warp + r is slot 16 warp + 8 half + r of the tile.

        Rows are 512 bytes apart, so four rows at one column would meet in one bank. So each row goes through its
        columns in another order: row r writes block s ^ (r % 4) of four at step s.
        """
        row, pair = lane // 4, lane % 4
        turn = row % 4
        odd, high = turn % 2 == 1, turn >= 2
        base = out + (warp * 8 + row) * self.dims + pair * 2
        targets = [base + (step ^ turn) * 8 for step in range(4)]
        for group in cutlass.range_constexpr(self.dims // 32):
            blocks = [
                [dk[4 * (4 * group + step) + 2 * half], dk[4 * (4 * group + step) + 2 * half + 1]] for step in range(4)
            ]
            for i in cutlass.range_constexpr(2):
                b = [block[i] for block in blocks]
                c = [
                    b[1] if odd else b[0], b[0] if odd else b[1],
                    b[3] if odd else b[2], b[2] if odd else b[3],
                ]  # fmt: skip
                d = [
                    c[2] if high else c[0], c[3] if high else c[1],
                    c[0] if high else c[2], c[1] if high else c[3],
                ]  # fmt: skip
                for step in cutlass.range_constexpr(4):
                    blocks[step][i] = d[step]
            for step in cutlass.range_constexpr(4):
                two = cute.make_rmem_tensor(2, Float32)
                two[0] = blocks[step][0]
                two[1] = blocks[step][1]
                cute.autovec_copy(two, cute.make_tensor(targets[step] + 32 * group, cute.make_layout(2)))

    @cute.jit
    def stage_dq(self, out, dq, warp, lane):
        """Store the warp's heads of d_index_q, as its tensor map has them in shared memory."""
        for n in cutlass.range_constexpr(self.dims // 16):
            words = [hopper.round_pair(dq[8 * n + 2 * i], dq[8 * n + 2 * i + 1]) for i in range(4)]
            hopper.store_matrices(out + place(warp, lane, n), *words)

    @cute.jit
    def store_dw(self, tensors, row, head, lane, dw):
        """Sum the four lanes' shares in a fixed order and store the row's two heads."""
        target = tensors.d_weights + (Int64(row) * self.heads + head)
        for j in cutlass.range_constexpr(2):
            total = sum_over_lanes(dw, j)
            if lane % 4 == 0 and head < self.heads:
                (target + 8 * j).store((total + total * CUT_SCORES).to(self.d_weights))

    # --- drain -----------------------------------------------------------------------------------------------------

    @cute.jit
    def drain(self, shared, worker, part, tensors):
        """Send out what is staged; of each half of a tile, the rows of one part. Lane l has row l of either half."""
        lane = arch.lane_idx()
        plane = self.plane(tensors, worker, part, lane)
        keys = cute.make_rmem_tensor(2, Int32)
        count = Int32(0)
        out_count = Int32(0)
        tile = Int32(0)
        row = self.take_keys(shared, worker, lane, count, keys)
        while row >= 0:
            if tile == self.row_tiles - 1:
                self.store_dq(shared, worker, part, tensors, row, out_count)
                out_count += 1
            next_row = row
            for half in cutlass.range_constexpr(2):
                out = self.staged(shared, worker, out_count)
                key = keys[half]
                if cutlass.const_expr(half == 1):
                    # By now S of the next tile is there, so its keys are. Its stage needs every reader to go round.
                    next_row = self.take_keys(shared, worker, lane, count + 1, keys)
                if cutlass.const_expr(self.rows == "in order"):
                    if part == 0:
                        self.add_in_order(plane, out, key, lane)
                else:
                    self.add(plane, out, part, key)
                self.release_read(shared, worker, out_count)
                out_count += 1
            count += 1
            tile = tile + 1 if tile < self.row_tiles - 1 else Int32(0)
            row = next_row
        arch.cp_async_bulk_wait_group(0)

    @cute.jit
    def take_keys(self, shared, worker, lane, count, keys):
        """The keys of the lane's rows of a tile; returns the tile's row."""
        row = self.row_of(shared, worker, count)
        slots = shared.keys.data_ptr() + (self.stage("k", count, worker) * TILE + lane // 8 * 16 + lane % 8)
        for half in cutlass.range_constexpr(2):
            keys[half] = (slots + 8 * half).load()
        self.arrive_empty(shared, "k", count, worker)
        return row

    @cute.jit
    def staged(self, shared, worker, out_count):
        """What the math warpgroup has staged, for the async proxy to read."""
        self.wait_full(shared, "out", out_count, worker)
        arch.fence_proxy("async.shared", space="cta")
        return shared.out_tiles.data_ptr() + self.stage("out", out_count, worker) * self.out_elements

    @cute.jit
    def store_dq(self, shared, worker, part, tensors, row, out_count):
        """d_index_q of a row to global memory."""
        out = cute.recast_ptr(self.staged(shared, worker, out_count), dtype=BFloat16)
        if part == 0:
            with arch.elect_one():
                for half in cutlass.range_constexpr(self.dims // LINE):
                    source = out + half * (HEAD_ROWS * LINE)
                    hopper.store_box(source, tensors.d_index_q_map, half * LINE, row * self.heads)
        arch.cp_async_bulk_commit_group()
        self.release_read(shared, worker, out_count)

    @cute.jit
    def add(self, plane, out, part, key):
        """Add a part of the rows to their keys, all by one thread."""
        first = part * (HALF // DRAIN_WARPS)
        rows = out + first * self.dims
        for group in cutlass.range_constexpr(HALF // DRAIN_WARPS // 8):
            keys = [arch.shuffle_sync(key, first + 8 * group + i) for i in range(8)]
            with arch.elect_one():
                for i in cutlass.range_constexpr(8):
                    if keys[i] >= 0:
                        source = rows + (8 * group + i) * self.dims
                        hopper.bulk_add(plane + Int64(keys[i]) * self.dims, source, 4 * self.dims)
        arch.cp_async_bulk_commit_group()

    @cute.jit
    def release_read(self, shared, worker, out_count):
        """Give back a stage of ``out``, once it has been read."""
        arch.cp_async_bulk_wait_group(0, read=True)
        arch.sync_warp()
        self.arrive_empty(shared, "out", out_count, worker)

    @cute.jit
    def plane(self, tensors, worker, part, lane):
        """Where this worker adds d_index_k."""
        if cutlass.const_expr(self.rows != "in order"):
            return tensors.dk_accum
        block, _, _ = arch.block_idx()
        plane = self.own_plane(tensors)
        if block > 0 and worker == 0 and part == 0:
            self.zero(plane, lane, (0, tensors.keys, 1))
        return plane

    @cute.jit
    def add_in_order(self, plane, out, key, lane):
        """Add half a tile's rows, in order, each column by one lane, whose additions to an address keep their order."""
        for row in cutlass.range(HALF, unroll=1):
            row_key = arch.shuffle_sync(key, row)
            if row_key >= 0:
                values = cute.make_rmem_tensor(4, Float32)
                cute.autovec_copy(aligned(out + (row * self.dims + lane * 4)), values)
                target = plane + (Int64(row_key) * self.dims + lane * 4)
                hopper.add_vector(target, values[0], values[1], values[2], values[3])
        arch.cp_async_bulk_commit_group()


for _kernel in (Gradients.kernel, Gradients.kernel_with_tickets, Gradients.kernel_in_order):
    _kernel.set_name_prefix("dsa_gradients", remove_cutlass_symbol=True, keep_mangled_name=False)


def gemm(op, accumulator, terms, b, steps, accumulate):
    """Issue and commit one wgmma group: accumulator = sum of a b over ``terms``, or += where ``accumulate``.

    The caller waits.
    """
    mma = cute.make_tiled_mma(op)
    warpgroup.fence()
    mma.set(warpgroup.Field.ACCUMULATE, accumulate)
    for a in terms:
        for step in range(steps):
            cute.gemm(mma, accumulator, a[None, None, step], b[None, None, step], accumulator)
            mma.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()


def view(memory, layout):
    """The tensor that a swizzled layout makes of a shared-memory range."""
    return cute.make_tensor(cute.recast_ptr(memory.data_ptr(), layout.inner), layout.outer)
