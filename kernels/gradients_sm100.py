"""The GEMM stage of ``indexer_backward`` for Blackwell (sm_100): tcgen05, one persistent CTA an SM.

For each row (one query) with its ``topk`` selected keys, and with g'[t] = sm_scale * attn_score[t] from stage 1::

    S[h,t]   = sum_d Q[h,d] K[n,d]          n = topk_indices[t]
    d_weights[h]    = sum_t g'[t] max(S[h,t], 0)
    A[h,t]   = g'[t] weights[h]             where S[h,t] > 0, else 0; as one bf16, or as the sum of two
    d_index_q[h,d]  = sum_t A[h,t] K[n,d]
    d_index_k[n,d] += sum_h A[h,t] Q[h,d]   fp32, over all rows

One bf16 is A rounded. Two are hi = bf16(A) and lo = bf16(A - hi), each multiplied and added to the same accumulator:
16 bits of A. lo is lost where |A| is below about 1e-35, and where |A| reaches 2^128 - 2^119, which rounds to infinity,
hi and lo are opposite infinities and the result is NaN.

Scores are computed with heads as rows. So a thread that gates them holds two heads and a quarter of the slots: the sum
over slots for d_weights stays in its registers and crosses lanes once a row, and A goes to shared memory as it lies in
the fragment. The three contractions read Q, K and A as they are stored, along or across; nothing is transposed.

Warps, and the rings (see ``gemm_stage``) in which something passes between them:

* the producer: for each tile of 128 slots the keys and g' of its slots and its row (ring ``tile``), K by TMA gather,
  four rows at a time, zero where the id is invalid (ring ``k``); for each row Q by TMA (ring ``q``);
* the MMA warp: S of tile i + 1, then d_index_q and d_index_k of tile i (rings ``s``, ``dq``, ``dk`` in tensor memory);
* gate warps, 16 heads each: S to A (ring ``a``), d_weights; d_index_q of a row while the next one is under way;
* four drain warps, 32 slots each: d_index_k rows to shared memory, and from there to global memory by bulk reductions,
  512 bytes each, issued by the thread that has the slot.

All that a warp needs to know of a tile is in its stage of ``tile``, which is filled again only when every warp has
released it; so no row's ids or gradients can be replaced before their last reader, however few tiles a row has.

A CTA is one worker: how rows go to workers is said in ``gemm_stage``.

Tensor memory, 512 columns: S and d_index_q take 16 lanes of each quarter, so their two stages lie in one range of
columns, at lanes 0 and 16; d_index_k takes all lanes of two ranges.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.experimental.cuda as cuda
import cutlass.memory
from cutlass import BFloat16, Float32, Int32, Int64
from cutlass.cute import arch

from dsa_planner.kernels import blackwell, hopper
from dsa_planner.kernels.blackwell import TMEM_COLUMNS, TMEM_LANE
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
from dsa_planner.kernels.hopper import LINE, LINE_BYTES

TILE = 128  # slots
GATE_WARPS = 4
DRAIN_WARPS = 4
PRODUCER_WARP = GATE_WARPS + DRAIN_WARPS
MMA_WARP = PRODUCER_WARP + 1
THREADS = 32 * (MMA_WARP + 1)
TILE_STAGES = 4
Q_STAGES = 2
K_STAGES = 2
S_PLACES = 2  # in tensor memory: stages of S, or the two sums that one S is made of
DK_STAGES = 2
DQ_STAGES = 2

S_START = 0
DQ_START = TILE
DK_START = 2 * TILE

# Pitches of staging rows: 16 bytes more than a row, so that 8 rows at one column fall on different banks.
DK_PITCH = 128 + 4  # fp32 elements
DQ_PITCH = 128 + 8  # bf16 elements
A_BYTES = HEAD_ROWS * TILE * 2  # of one term

SHARED_BYTES = 221_184  # of 232,448; held to the layout below by an assertion


class Tensors(NamedTuple):
    """Global memory. ``ticket`` is None unless rows are drawn; ``planes`` and ``keys`` unless they go in order."""

    index_q_map: object
    index_k_map: object
    weights: object
    score_grad: object
    topk_indices: object
    d_index_q: object
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
        rows: how rows go to CTAs.
    """

    threads = THREADS

    def __init__(self, topk: int, heads: int, head_dim: int, terms: int, d_weights: type, rows: str) -> None:
        self.topk = topk
        self.heads = heads
        self.terms = terms
        # Sums over dims that S is made of. The kernel that goes in order has no registers for a second one.
        self.chains = 2 if d_weights is Float32 and rows != "in order" else 1
        self.d_weights = d_weights
        self.row_tiles = topk // TILE
        self.a_stages = 2 // terms
        self.gate_warps = heads // 16  # of GATE_WARPS; the others have nothing to do
        self.q_bytes = HEAD_ROWS * head_dim * 2
        self.k_bytes = TILE * head_dim * 2
        readers = self.gate_warps + DRAIN_WARPS + 1
        rings = {
            "tile": (TILE_STAGES, 1, readers),
            "q": (Q_STAGES, 1, 1),
            "k": (K_STAGES, 1, 1),
            "s": (S_PLACES // self.chains, 1, self.gate_warps),
            "a": (self.a_stages, self.gate_warps, 1),
            "dq": (DQ_STAGES, 1, self.gate_warps),
            "dk": (DK_STAGES, 1, DRAIN_WARPS),
        }
        super().__init__(rows, head_dim, rings)

    def arguments(self, tensors: GlobalTensors, extent: Int32):
        """Of a launch: the tensor maps and pointers with which each kernel begins."""
        return (
            lines_map(tensors.index_q, self.dims, extent, HEAD_ROWS), lines_map(tensors.index_k, self.dims, extent, 1),
            tensors.weights, tensors.score_grad, tensors.topk_indices, tensors.d_index_q, tensors.d_weights,
            tensors.dk_accum,
        )  # fmt: skip

    # --- kernels ---------------------------------------------------------------------------------------------------

    @cute.kernel
    def kernel(
        self,
        index_q_map: cutlass.GridConstant[cuda.TensorMap],
        index_k_map: cutlass.GridConstant[cuda.TensorMap],
        weights: cute.Pointer,
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
        maps = (index_q_map.get_ptr(), index_k_map.get_ptr())
        inputs, outputs = (weights, score_grad, topk_indices), (d_index_q, d_weights, dk_accum)
        work = Work(rows, s_q, id_limit, id_offset, sm_scale)
        self.run(Tensors(*maps, *inputs, *outputs), work)

    @cute.kernel
    def kernel_with_tickets(
        self,
        index_q_map: cutlass.GridConstant[cuda.TensorMap],
        index_k_map: cutlass.GridConstant[cuda.TensorMap],
        weights: cute.Pointer,
        score_grad: cute.Pointer,
        topk_indices: cute.Pointer,
        d_index_q: cute.Pointer,
        d_weights: cute.Pointer,
        dk_accum: cute.Pointer,
        ticket: cute.Pointer,
        rows: Int32,
        s_q: Int32,
        id_limit: Int32,
        id_offset: Int32,
        sm_scale: Float32,
    ):
        maps = (index_q_map.get_ptr(), index_k_map.get_ptr())
        inputs, outputs = (weights, score_grad, topk_indices), (d_index_q, d_weights, dk_accum)
        work = Work(rows, s_q, id_limit, id_offset, sm_scale)
        self.run(Tensors(*maps, *inputs, *outputs, ticket=ticket), work)

    @cute.kernel
    def kernel_in_order(
        self,
        index_q_map: cutlass.GridConstant[cuda.TensorMap],
        index_k_map: cutlass.GridConstant[cuda.TensorMap],
        weights: cute.Pointer,
        score_grad: cute.Pointer,
        topk_indices: cute.Pointer,
        d_index_q: cute.Pointer,
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
        maps = (index_q_map.get_ptr(), index_k_map.get_ptr())
        inputs, outputs = (weights, score_grad, topk_indices), (d_index_q, d_weights, dk_accum)
        work = Work(rows, s_q, id_limit, id_offset, sm_scale)
        self.run(Tensors(*maps, *inputs, *outputs, planes=dk_planes, keys=keys), work)

    @cute.jit
    def run(self, tensors, work):
        warp = arch.make_warp_uniform(arch.warp_idx())
        shared = cutlass.memory.SmemAllocator().allocate(self.shared_storage())
        if warp == 0:
            self.init_barriers(shared)
        if warp == MMA_WARP:
            arch.alloc_tmem(TMEM_COLUMNS, shared.tmem.data_ptr())
            arch.relinquish_tmem_alloc_permit()
        if cutlass.const_expr(self.heads < HEAD_ROWS):
            self.clear_unused_heads(shared, warp)
        arch.mbarrier_init_fence()
        blackwell.fence_before_sync()
        arch.sync_threads()
        blackwell.fence_after_sync()

        tmem = shared.tmem.data_ptr().load()
        if warp == PRODUCER_WARP:
            self.produce(shared, tensors, work)
        elif warp == MMA_WARP:
            self.multiply(shared, tmem)
        elif warp < self.gate_warps:
            self.gate(shared, tmem + warp * (32 * TMEM_LANE), tensors, warp)
        elif warp >= GATE_WARPS:
            quarter = warp - GATE_WARPS  # of tensor memory; a warp reaches the one that its index modulo 4 names
            self.drain(shared, tmem + quarter * (32 * TMEM_LANE), tensors, quarter)
        blackwell.fence_before_sync()
        arch.sync_threads()
        if warp == MMA_WARP:
            blackwell.fence_after_sync()
            arch.dealloc_tmem(arch.retrieve_tmem_ptr(Float32, 16, shared.tmem.data_ptr()), TMEM_COLUMNS)

    def shared_storage(self):
        @cute.struct
        class Shared:
            tile: self.barriers("tile")
            q: self.barriers("q")
            k: self.barriers("k")
            s: self.barriers("s")
            a: self.barriers("a")
            dq: self.barriers("dq")
            dk: self.barriers("dk")
            tmem: cute.struct.MemRange[Int32, 1]
            rows: cute.struct.Align[cute.struct.MemRange[Int32, TILE_STAGES], 16]
            keys: cute.struct.Align[cute.struct.MemRange[Int32, TILE_STAGES * TILE], 16]
            grads: cute.struct.Align[cute.struct.MemRange[Float32, TILE_STAGES * TILE], 16]
            q_tiles: cute.struct.Align[cute.struct.MemRange[BFloat16, Q_STAGES * self.q_bytes // 2], 1024]
            k_tiles: cute.struct.Align[cute.struct.MemRange[BFloat16, K_STAGES * self.k_bytes // 2], 1024]
            a_tiles: cute.struct.Align[cute.struct.MemRange[BFloat16, 2 * A_BYTES // 2], 1024]
            dk_stage: cute.struct.Align[cute.struct.MemRange[Float32, TILE * DK_PITCH], 128]
            dq_stage: cute.struct.Align[cute.struct.MemRange[BFloat16, HEAD_ROWS * DQ_PITCH], 128]

        if Shared.size_in_bytes() != SHARED_BYTES:
            raise AssertionError(f"shared memory is {Shared.size_in_bytes()} bytes, the record says {SHARED_BYTES}")
        return Shared

    @cute.jit
    def clear_unused_heads(self, shared, warp):
        """Zero the rows of A that no head has: products read them, into rows of d_index_q that nobody reads."""
        words = cute.recast_ptr(shared.a_tiles.data_ptr(), dtype=Int32)
        unused = (HEAD_ROWS - self.heads) * (LINE_BYTES // 4)
        columns = 2 * A_BYTES // (HEAD_ROWS * LINE_BYTES)
        if warp < columns:
            for i in cutlass.range(arch.lane_idx(), unused, 32, unroll=1):
                (words + (warp * HEAD_ROWS + self.heads) * (LINE_BYTES // 4) + i).store(Int32(0))
            arch.fence_proxy("async.shared", space="cta")

    # --- tiles -----------------------------------------------------------------------------------------------------

    def q_tile(self, shared, count):
        return shared.q_tiles.data_ptr() + count % Q_STAGES * (self.q_bytes // 2)

    def k_tile(self, shared, count):
        return shared.k_tiles.data_ptr() + count % K_STAGES * (self.k_bytes // 2)

    def a_tile(self, shared, count, term):
        return shared.a_tiles.data_ptr() + (count % self.a_stages * self.terms + term) * (A_BYTES // 2)

    # --- producer --------------------------------------------------------------------------------------------------

    @cute.jit
    def produce(self, shared, tensors, work):
        """Fill the rings ``tile``, ``q`` and ``k``. Lane l has slots 4 l to 4 l + 3 of a tile."""
        lane = arch.lane_idx()
        block, _, _ = arch.block_idx()
        blocks, _, _ = arch.grid_dim()
        ids = cute.make_rmem_tensor(4, Int32)
        scores = cute.make_rmem_tensor(4, Float32)
        row = block
        row_count = Int32(0)
        tile_count = Int32(0)
        if row < work.rows:
            self.load_slots(tensors, row, 0, lane, ids, scores)
        next_row = self.row_after(row, blocks, self.draw(tensors, lane))
        while row < work.rows:
            drawn = self.draw(tensors, lane)  # for the row after the next: it is there when it is asked for
            self.load_q(shared, tensors, row, row_count)
            key_offset = (row // work.s_q) * work.id_offset
            for tile in cutlass.range(self.row_tiles, unroll=1):
                keys, grads = self.mask(work, key_offset, ids, scores)
                # The next tile's ids and gradients travel while this tile waits for its stages.
                then_tile, then_row = tile + 1, row
                if then_tile == self.row_tiles:
                    then_tile, then_row = 0, next_row
                if then_row < work.rows:
                    self.load_slots(tensors, then_row, then_tile, lane, ids, scores)

                self.wait_empty(shared, "tile", tile_count)
                place = tile_count % TILE_STAGES * TILE + lane * 4
                cute.autovec_copy(keys, aligned(shared.keys.data_ptr() + place))
                cute.autovec_copy(grads, aligned(shared.grads.data_ptr() + place))
                self.fill_tile(shared, lane, row, tile_count)

                self.load_k(shared, tensors, tile_count)
                tile_count += 1
            row_count += 1
            row = next_row
            next_row = self.row_after(row, blocks, drawn)
        self.wait_empty(shared, "tile", tile_count)
        self.fill_tile(shared, lane, Int32(-1), tile_count)

    @cute.jit
    def load_slots(self, tensors, row, tile, lane, ids, scores):
        """The ids and score gradients of the lane's four slots of a tile."""
        offset = Int64(row) * self.topk + (tile * TILE + lane * 4)
        cute.autovec_copy(aligned(tensors.topk_indices + offset), ids)
        cute.autovec_copy(aligned(tensors.score_grad + offset), scores)

    @cute.jit
    def load_q(self, shared, tensors, row, row_count):
        self.wait_empty(shared, "q", row_count)
        with arch.elect_one():
            full = self.full(shared, "q", row_count)
            arch.mbarrier_arrive_and_expect_tx(full, self.q_bytes)
            for half in cutlass.range_constexpr(self.dims // LINE):
                hopper.load_box(
                    self.q_tile(shared, row_count) + half * (HEAD_ROWS * LINE), tensors.index_q_map,
                    half * LINE, row * self.heads, full,
                )  # fmt: skip

    @cute.jit
    def load_k(self, shared, tensors, tile_count):
        """Gather K, four rows an instruction.

        One thread takes all keys from shared memory: TMA wants uniform registers, so that lanes would take turns.
        """
        self.wait_empty(shared, "k", tile_count)
        with arch.elect_one():
            full = self.full(shared, "k", tile_count)
            arch.mbarrier_arrive_and_expect_tx(full, self.k_bytes)
            target = self.k_tile(shared, tile_count)
            keys = shared.keys.data_ptr() + tile_count % TILE_STAGES * TILE
            for group in cutlass.range(TILE // 4, unroll=4):
                rows = cute.make_rmem_tensor(4, Int32)
                cute.autovec_copy(aligned(keys + group * 4), rows)
                for half in cutlass.range_constexpr(self.dims // LINE):
                    blackwell.gather_rows(
                        target + (half * TILE + group * 4) * LINE, tensors.index_k_map, half * LINE,
                        [rows[0], rows[1], rows[2], rows[3]], full,
                    )  # fmt: skip

    @cute.jit
    def fill_tile(self, shared, lane, row, tile_count):
        """Say which row a tile is of, -1 for none, and hand over what the lanes have stored of it."""
        if lane == 0:
            (shared.rows.data_ptr() + tile_count % TILE_STAGES).store(row)
        arch.sync_warp()
        self.arrive_full(shared, "tile", tile_count)

    @cute.jit
    def row_of(self, shared, tile_count):
        """The row of a tile, once it is known."""
        self.wait_full(shared, "tile", tile_count)
        return (shared.rows.data_ptr() + tile_count % TILE_STAGES).load()

    # --- MMA -------------------------------------------------------------------------------------------------------

    @cute.jit
    def multiply(self, shared, tmem):
        """Issue, in turn, S of one tile and the gradients of the tile before it."""
        count = Int32(0)
        row, tile = Int32(0), Int32(0)  # of S: rows of this CTA, tiles of the row
        row_before, tile_before = Int32(0), Int32(0)
        more = self.row_of(shared, count) >= 0
        going = more
        while going:
            if more:
                self.scores(shared, tmem, count, row)
            if count > 0:
                self.gradients(shared, tmem, count - 1, row_before, tile_before)
            row_before, tile_before = row, tile
            going = more
            count += 1
            tile += 1
            if tile == self.row_tiles:
                row, tile = row + 1, Int32(0)
                if more:
                    more = self.row_of(shared, count) >= 0
        # Shared memory has to last until the last commits have arrived there; of these rings no other warp waits.
        tiles = cutlass.max(count - 1, 0)
        for name, uses in (("k", tiles), ("a", tiles), ("q", row_before)):
            for stage in cutlass.range_constexpr(self.rings[name][0]):
                self.wait_empty(shared, name, uses + stage)

    @cute.jit
    def scores(self, shared, tmem, count, row):
        """S = Q K^T, 64 heads x 128 slots, over the dims."""
        self.wait_full(shared, "tile", count)
        arch.sync_warp()  # every lane has read the tile's row
        self.arrive_empty(shared, "tile", count)
        self.wait_full(shared, "q", row)
        self.wait_full(shared, "k", count)
        self.wait_empty(shared, "s", count)
        blackwell.fence_after_sync()
        with arch.elect_one():
            q, k = blackwell.k_major(self.q_tile(shared, row)), blackwell.k_major(self.k_tile(shared, count))
            kind = blackwell.bf16_to_fp32(HEAD_ROWS, TILE)
            steps = self.dims // blackwell.K_STEP
            for step in cutlass.range_constexpr(steps):
                chain, first = step // (steps // self.chains), step % (steps // self.chains) == 0
                q_step, k_step = blackwell.k_major_step(step, HEAD_ROWS), blackwell.k_major_step(step, TILE)
                blackwell.mma(self.s_place(tmem, count, chain), q + q_step, k + k_step, kind, not first)
            blackwell.commit(self.full(shared, "s", count))

    def s_place(self, tmem, count, chain):
        """Where S of a tile lies, or one of the two sums that it is made of.

        The tensor cores cut a sum after every 16 products, so two short sums are closer to the truth than a long one.
        """
        place = count % S_PLACES if self.chains == 1 else chain
        return tmem + S_START + place * (16 * TMEM_LANE)

    @cute.jit
    def gradients(self, shared, tmem, count, row, tile):
        """dQ += A K, 64 heads x 128 dims, over the tile's slots; dK = A^T Q, 128 slots x 128 dims, over the heads."""
        first = tile == 0
        last = tile == self.row_tiles - 1
        if first:
            self.wait_empty(shared, "dq", row)
        self.wait_full(shared, "a", count)
        blackwell.fence_after_sync()
        with arch.elect_one():
            k = blackwell.mn_major(self.k_tile(shared, count), TILE)
            target = tmem + DQ_START + row % DQ_STAGES * (16 * TMEM_LANE)
            kind = blackwell.bf16_to_fp32(HEAD_ROWS, self.dims, b_across=True)
            for term in cutlass.range_constexpr(self.terms):
                a = blackwell.k_major(self.a_tile(shared, count, term))
                for step in cutlass.range_constexpr(TILE // blackwell.K_STEP):
                    accumulate = Int32(1)
                    if cutlass.const_expr(term == 0 and step == 0):
                        accumulate = Int32(0) if first else Int32(1)
                    a_step, k_step = blackwell.k_major_step(step, HEAD_ROWS), blackwell.mn_major_step(step)
                    blackwell.mma(target, a + a_step, k + k_step, kind, accumulate)
            blackwell.commit(self.empty(shared, "k", count))
            if last:
                blackwell.commit(self.full(shared, "dq", row))
        self.wait_empty(shared, "dk", count)
        blackwell.fence_after_sync()
        with arch.elect_one():
            q = blackwell.mn_major(self.q_tile(shared, row), HEAD_ROWS)
            target = tmem + DK_START + count % DK_STAGES * self.dims
            kind = blackwell.bf16_to_fp32(TILE, self.dims, a_across=True, b_across=True)
            for term in cutlass.range_constexpr(self.terms):
                a = blackwell.mn_major(self.a_tile(shared, count, term), HEAD_ROWS)
                for step in cutlass.range_constexpr(self.heads // blackwell.K_STEP):
                    offset = blackwell.mn_major_step(step)
                    blackwell.mma(target, a + offset, q + offset, kind, term + step > 0)
            blackwell.commit(self.full(shared, "dk", count))
            blackwell.commit(self.empty(shared, "a", count))
            if last:
                blackwell.commit(self.empty(shared, "q", row))

    # --- gate ------------------------------------------------------------------------------------------------------

    @cute.jit
    def gate(self, shared, tmem, tensors, warp):
        """From S to A, tile by tile; d_weights and d_index_q, row by row."""
        lane = arch.lane_idx()
        head = warp * 16 + lane // 4  # and the one 8 further on
        w = cute.make_rmem_tensor(2, Float32)
        dw = cute.make_rmem_tensor(4, Float32)
        count = Int32(0)
        row_count = Int32(0)
        row_before = Int32(-1)
        row = self.row_of(shared, count)
        while row >= 0:
            for j in cutlass.range_constexpr(2):
                w[j] = (tensors.weights + (Int64(row) * self.heads + head + 8 * j)).load().to(Float32)
            dw.fill(0.0)
            for tile in cutlass.range(self.row_tiles, unroll=1):
                self.gate_tile(shared, tmem, warp, lane, w, dw, count)
                if tile == 0 and row_before >= 0:
                    self.store_dq(shared, tmem, tensors, warp, lane, row_before, row_count - 1)
                count += 1
            self.store_dw(tensors.d_weights + (Int64(row) * self.heads + head), lane, dw)
            row_before = row
            row_count += 1
            row = self.row_of(shared, count)
        if row_before >= 0:
            self.store_dq(shared, tmem, tensors, warp, lane, row_before, row_count - 1)
        arch.cp_async_bulk_wait_group(0)

    @cute.jit
    def gate_tile(self, shared, tmem, warp, lane, w, dw, count):
        """One tile: adds to the lane's share of d_weights, and stores A.

        The share is summed by tile first, in four parts, so that its rounding errors stay small at any topk.
        """
        self.wait_full(shared, "tile", count)
        self.wait_full(shared, "s", count)
        blackwell.fence_after_sync()
        s = blackwell.load_fragment(self.s_place(tmem, count, 0), TILE)
        if cutlass.const_expr(self.chains == 2):
            other = blackwell.load_fragment(self.s_place(tmem, count, 1), TILE)
            s = [s[e] + other[e] for e in range(TILE // 2)]
        blackwell.fence_before_sync()
        arch.sync_warp()
        self.arrive_empty(shared, "s", count)
        self.wait_empty(shared, "a", count)
        grads = shared.grads.data_ptr() + (count % TILE_STAGES * TILE + 2 * (lane % 4))
        part = cute.make_rmem_tensor(8, Float32)
        part.fill(0.0)
        for n in cutlass.range_constexpr(TILE // 16):
            words = [[], []]
            for m in cutlass.range_constexpr(2):
                column = 2 * n + m
                grad = cute.make_tensor(grads + 8 * column, cute.make_layout(2)).load()
                for j in cutlass.range_constexpr(2):
                    a = []
                    for i in cutlass.range_constexpr(2):
                        score = s[4 * column + 2 * j + i]
                        part[4 * j + 2 * m + i] = part[4 * j + 2 * m + i] + grad[i] * arch.fmax(score, 0.0, nan=True)
                        a.append(grad[i] * w[j] if score > 0.0 else Float32(0.0))
                    hi = hopper.round_pair(a[0], a[1])
                    words[0].append(hi)
                    if cutlass.const_expr(self.terms == 2):
                        low, high = hopper.widen_pair(hi)
                        words[1].append(hopper.round_pair(a[0] - low, a[1] - high))
            for term in cutlass.range_constexpr(self.terms):
                target = self.a_tile(shared, count, term) + place(warp, lane, n)
                hopper.store_matrices(target, *words[term])
        for j in cutlass.range_constexpr(2):
            add_exactly(dw, j, (part[4 * j] + part[4 * j + 1]) + (part[4 * j + 2] + part[4 * j + 3]))
        arch.fence_proxy("async.shared", space="cta")
        arch.sync_warp()
        with arch.elect_one():
            arch.mbarrier_arrive(self.full(shared, "a", count))
            arch.mbarrier_arrive(self.empty(shared, "tile", count))

    @cute.jit
    def store_dw(self, target, lane, dw):
        """Sum the four lanes' shares in a fixed order and store the row's two heads."""
        for j in cutlass.range_constexpr(2):
            total = sum_over_lanes(dw, j)
            if lane % 4 == 0:
                (target + 8 * j).store(total.to(self.d_weights))

    @cute.jit
    def store_dq(self, shared, tmem, tensors, warp, lane, row, row_count):
        """d_index_q of a row: from tensor memory over the warp's staging rows to global memory."""
        self.wait_full(shared, "dq", row_count)
        blackwell.fence_after_sync()
        dq = blackwell.load_fragment(tmem + DQ_START + row_count % DQ_STAGES * (16 * TMEM_LANE), self.dims)
        blackwell.fence_before_sync()
        arch.cp_async_bulk_wait_group(0, read=True)  # the lanes that stored the last row: it has been read
        arch.sync_warp()
        self.arrive_empty(shared, "dq", row_count)
        stage = shared.dq_stage.data_ptr() + warp * (16 * DQ_PITCH)
        matrix_row = lane % 8 + 8 * (lane // 8 % 2)
        for n in cutlass.range_constexpr(self.dims // 16):
            words = [hopper.round_pair(dq[8 * n + 2 * i], dq[8 * n + 2 * i + 1]) for i in range(4)]
            hopper.store_matrices(stage + matrix_row * DQ_PITCH + (16 * n + 8 * (lane // 16)), *words)
        arch.fence_proxy("async.shared", space="cta")
        arch.sync_warp()
        if lane < 16:
            target = tensors.d_index_q + (Int64(row) * self.heads + warp * 16 + lane) * self.dims
            hopper.bulk_store(target, stage + lane * DQ_PITCH, 2 * self.dims)
        arch.cp_async_bulk_commit_group()

    # --- drain -----------------------------------------------------------------------------------------------------

    @cute.jit
    def drain(self, shared, tmem, tensors, quarter):
        """Add d_index_k, tile by tile. Lane l of a warp has slot 32 * quarter + l."""
        lane = arch.lane_idx()
        slot = quarter * 32 + lane
        plane = self.plane(tensors, quarter, lane)
        stage = shared.dk_stage.data_ptr() + slot * DK_PITCH
        count = Int32(0)
        while self.row_of(shared, count) >= 0:
            keys = shared.keys.data_ptr() + count % TILE_STAGES * TILE
            key = (keys + slot).load()
            self.wait_full(shared, "dk", count)
            blackwell.fence_after_sync()
            dk = blackwell.load_rows(tmem + DK_START + count % DK_STAGES * self.dims, self.dims)
            blackwell.fence_before_sync()
            arch.sync_warp()
            self.arrive_empty(shared, "dk", count)
            if cutlass.const_expr(self.rows == "in order"):
                self.barrier()  # all four warps have added the last tile's rows
            else:
                arch.cp_async_bulk_wait_group(0, read=True)
            row = cute.make_rmem_tensor(self.dims, Float32)
            for i in cutlass.range_constexpr(self.dims):
                row[i] = dk[i]
            cute.autovec_copy(row, cute.make_tensor(stage, cute.make_layout(self.dims)))
            if cutlass.const_expr(self.rows == "in order"):
                self.barrier()
                self.add_in_order(shared, plane, keys, quarter, lane)
            else:
                arch.fence_proxy("async.shared", space="cta")
                if key >= 0:
                    hopper.bulk_add(plane + Int64(key) * self.dims, stage, 4 * self.dims)
                arch.cp_async_bulk_commit_group()
            arch.sync_warp()
            self.arrive_empty(shared, "tile", count)
            count += 1
        arch.cp_async_bulk_wait_group(0)

    @cute.jit
    def plane(self, tensors, quarter, lane):
        """Where this CTA adds d_index_k."""
        if cutlass.const_expr(self.rows != "in order"):
            return tensors.dk_accum
        block, _, _ = arch.block_idx()
        plane = self.own_plane(tensors)
        if block > 0:
            self.zero(plane, lane, (quarter, tensors.keys, DRAIN_WARPS))
        return plane

    @cute.jit
    def add_in_order(self, shared, plane, keys, quarter, lane):
        """Add the tile's rows, in slot order. Keys go to warps and columns to lanes by a fixed rule: a thread's own
        additions to one address keep their order.
        """
        rows = shared.dk_stage.data_ptr() + lane * 4
        for group in cutlass.range(TILE // 32, unroll=1):
            key = (keys + (group * 32 + lane)).load()
            mine = arch.vote_ballot_sync(key >= 0 and key % DRAIN_WARPS == quarter)
            while mine != 0:
                source = arch.popc(~mine & (mine - 1))
                mine = mine & (mine - 1)
                values = cute.make_rmem_tensor(4, Float32)
                cute.autovec_copy(aligned(rows + (group * 32 + source) * DK_PITCH), values)
                target = plane + (Int64(arch.shuffle_sync(key, source)) * self.dims + lane * 4)
                hopper.add_vector(target, values[0], values[1], values[2], values[3])

    def barrier(self):
        """Among the drain warps."""
        arch.barrier(barrier_id=1, number_of_threads=32 * DRAIN_WARPS)


for _kernel in (Gradients.kernel, Gradients.kernel_with_tickets, Gradients.kernel_in_order):
    _kernel.set_name_prefix("dsa_gradients", remove_cutlass_symbol=True, keep_mangled_name=False)
