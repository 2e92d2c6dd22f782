"""``indexer_backward``: its stages as one compilation a plan, whatever the architecture and the backend.

=============================  ====================================================================
``default``                    A rounded to bf16, rows by number
``sm90_v2``, ``sm100_v2``      A as the sum of two bf16; rows by tickets, or, deterministic, in order
=============================  ====================================================================
"""

from collections.abc import Callable, Mapping
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32
from cutlass.cute.runtime import make_fake_stream, make_ptr

from dsa_planner.kernels.gemm_stage import GemmStage, GlobalTensors
from dsa_planner.kernels.round_d_index_k import RoundDIndexK
from dsa_planner.kernels.score_grad import ScoreGrad
from dsa_planner.kernels.sum_d_index_k import SumDIndexK


class Program:
    """The stages as one compilation: one module, one cubin. Its launches are never run; the runtime launches."""

    def __init__(self, gradients: GemmStage, topk: int, head_dim: int) -> None:
        self.gradients = gradients
        self.score_grad = ScoreGrad(topk, head_dim)
        self.round_d_index_k = RoundDIndexK(head_dim)
        self.sum_d_index_k = SumDIndexK(head_dim)

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
        d_index_k_fp32: cute.Pointer,
        dk_accum: cute.Pointer,
        ticket: cute.Pointer,
        extent: Int32,
        scale: Float32,
        stream: cuda.CUstream,
    ):
        grid = {"grid": (extent, 1, 1), "stream": stream}
        gradients = self.gradients
        drawn = cutlass.const_expr(gradients.rows == "tickets")
        counters = (ticket,) if drawn else ()
        score_grad = self.score_grad.kernel_with_ticket if drawn else self.score_grad.kernel
        score_grad(attn_score, index_score, grad_loss, dk_accum, *counters, scale, extent, extent).launch(
            block=(256, 1, 1), **grid
        )
        tensors = GlobalTensors(index_q, weights, index_k, attn_score, topk_indices, d_index_q, d_weights, dk_accum)
        planes = (dk_accum, extent) if cutlass.const_expr(gradients.rows == "in order") else ()
        gradients.launch_kernel(
            *gradients.arguments(tensors, extent), *counters, *planes, extent, extent, extent, extent, scale
        ).launch(block=(gradients.threads, 1, 1), min_blocks_per_mp=1, **grid)
        if cutlass.const_expr(gradients.rows == "in order"):
            self.sum_d_index_k.to_bf16(dk_accum, dk_accum, d_index_k, extent, extent).launch(block=(256, 1, 1), **grid)
            self.sum_d_index_k.to_fp32(dk_accum, dk_accum, d_index_k_fp32, extent, extent).launch(
                block=(256, 1, 1), **grid
            )
        else:
            self.round_d_index_k.kernel(dk_accum, d_index_k, extent).launch(block=(256, 1, 1), **grid)


def compilation(config: Mapping[str, Any], stage: type) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """What to hand to ``cute.compile`` for one plan config: the function and its stand-in arguments.

    Args:
        config: of the plan.
        stage: the GEMM stage of its architecture.
    """

    def pointer(dtype: type, align: int = 16) -> Any:
        return make_ptr(dtype, align, cute.AddressSpace.gmem, assumed_align=align)

    topk, heads, head_dim = config["topk"], config["heads"], config["head_dim"]
    d_weights = {"bf16": BFloat16, "fp32": Float32}[config["d_weights"]]
    v2 = config["backend"] != "default"
    rows = "in order" if config["deterministic"] else "tickets" if v2 else "static"
    gradients = stage(topk, heads, head_dim, 2 if v2 else 1, d_weights, rows)
    arguments = (
        pointer(BFloat16), pointer(BFloat16), pointer(BFloat16), pointer(Float32), pointer(Float32), pointer(Int32),
        pointer(Float32, 4), pointer(BFloat16), pointer(d_weights), pointer(BFloat16), pointer(Float32),
        pointer(Float32), pointer(Int32, 4), Int32(1), Float32(1.0), make_fake_stream(),
    )  # fmt: skip
    return Program(gradients, topk, head_dim), arguments
