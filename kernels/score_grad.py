"""Stage 1 of ``indexer_backward``: the gradient of the KL loss with respect to the index scores.

One kernel, shared by every backend of an architecture, so that their stage 1 agrees bit for bit.  Per row of
``topk`` slots, in fp32 with subnormals kept (the threshold eps is a subnormal)::

    gi[t]         = -max(attn_score[t], eps) * loss_scale * grad_loss[0]    where index_score[t] >= eps, else 0
    attn_score[t] = gi[t] - index_score[t] * sum(gi)

A NaN in attn_score makes its row NaN, unless index_score masks the slot; a NaN in index_score makes its own slot NaN.

``loss_scale`` is loss_coeff / (batch * S_q).  One warp holds a whole row in registers, so each element is read once
and written once and no two warps meet; the sum runs over the lane's own elements in slot order, then over the lanes as
a butterfly, which makes it reproducible.  The kernel also zeroes the fp32 accumulator that stage 2 adds d_index_k rows
into: the stores are issued while the row's loads are under way.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute import arch

EPS = 3.720075976020836e-44  # exp(-100)
WARPS = 8
THREADS = 32 * WARPS
VECTOR = 4  # fp32 elements of one 16-byte access


class ScoreGrad:
    """The stage-1 kernel for one topk.

    A CTA of 256 threads takes 8 rows; any grid that covers the rows is right, and a larger one zeroes faster.
    """

    def __init__(self, topk: int, head_dim: int) -> None:
        self.vectors = topk // (32 * VECTOR)  # 16-byte accesses of a lane in a row
        self.topk = topk
        self.head_dim = head_dim

    @cute.kernel
    def kernel(
        self,
        attn_score: cute.Pointer,
        index_score: cute.Pointer,
        grad_loss: cute.Pointer,
        dk_accum: cute.Pointer,
        loss_scale: Float32,
        rows: Int32,
        keys: Int32,
    ):
        self.run(attn_score, index_score, grad_loss, dk_accum, loss_scale, rows, keys)

    @cute.kernel
    def kernel_with_ticket(
        self,
        attn_score: cute.Pointer,
        index_score: cute.Pointer,
        grad_loss: cute.Pointer,
        dk_accum: cute.Pointer,
        ticket: cute.Pointer,
        loss_scale: Float32,
        rows: Int32,
        keys: Int32,
    ):
        """The same, and the counter that stage 2 draws rows from is zeroed."""
        thread, _, _ = arch.thread_idx()
        block, _, _ = arch.block_idx()
        if block + thread == 0:
            ticket.store(Int32(0))
        self.run(attn_score, index_score, grad_loss, dk_accum, loss_scale, rows, keys)

    @cute.jit
    def run(self, attn_score, index_score, grad_loss, dk_accum, loss_scale, rows, keys):
        thread, _, _ = arch.thread_idx()
        block, _, _ = arch.block_idx()
        blocks, _, _ = arch.grid_dim()
        lane = thread % 32
        warp = block * WARPS + arch.make_warp_uniform(thread // 32)
        if warp < rows:
            self.row(attn_score, index_score, grad_loss.load() * loss_scale, Int64(warp) * self.topk + lane * VECTOR)
        self.zero(dk_accum, keys, warp, blocks * WARPS, lane)

    @cute.jit
    def row(self, attn_score: cute.Pointer, index_score: cute.Pointer, scale: Float32, offset: Int64):
        """Rewrite one row; ``offset`` is that of the lane's first element."""
        layout = cute.make_layout((VECTOR, self.vectors), stride=(1, 32 * VECTOR))
        target = cute.make_tensor(attn_score + offset, layout)
        predicted = cute.make_tensor(index_score + offset, layout)
        g = cute.make_rmem_tensor((VECTOR, self.vectors), Float32)
        p = cute.make_rmem_tensor((VECTOR, self.vectors), Float32)
        for v in cutlass.range_constexpr(self.vectors):
            cute.autovec_copy(target[None, v], g[None, v])
        for v in cutlass.range_constexpr(self.vectors):
            cute.autovec_copy(predicted[None, v], p[None, v])
        total = Float32(0.0)
        for e in cutlass.range_constexpr(VECTOR * self.vectors):
            gi = -arch.fmax(g[e], EPS, nan=True) * scale
            if not (p[e] >= EPS):
                gi = Float32(0.0)
            g[e] = gi
            total = total + gi
        for offset_lanes in (16, 8, 4, 2, 1):
            total = total + arch.shuffle_sync_bfly(total, offset_lanes)
        for e in cutlass.range_constexpr(VECTOR * self.vectors):
            g[e] = g[e] - p[e] * total
        for v in cutlass.range_constexpr(self.vectors):
            cute.autovec_copy(g[None, v], target[None, v])

    @cute.jit
    def zero(self, dk_accum: cute.Pointer, keys: Int32, warp: Int32, warps: Int32, lane: Int32):
        """Zero the accumulator, one key (512 bytes) a warp and step."""
        zeros = cute.make_rmem_tensor(VECTOR, Float32)
        zeros.fill(0.0)
        key = warp
        while key < keys:
            destination = dk_accum + (Int64(key) * self.head_dim + lane * VECTOR)
            cute.autovec_copy(zeros, cute.make_tensor(destination, cute.make_layout(VECTOR)))
            key += warps


for _kernel in (ScoreGrad.kernel, ScoreGrad.kernel_with_ticket):
    _kernel.set_name_prefix("dsa_score_grad", remove_cutlass_symbol=True, keep_mangled_name=False)
