"""Stage 2 alone, executed by the PTX machine from a given score gradient; its precision by backend and topk.

``python tests/gemm_stage.py`` prints the table of docs/blackwell.md, in two minutes.
"""

from __future__ import annotations

from typing import Any

import numpy

from dsa_planner import verify
from dsa_planner.cache.planfile import PlanFile
from dsa_planner.kernels import cases, oracle
from dsa_planner.settings import Settings

KEYS = 4096


def softmax_call(topk: int, rows: int, seed: int) -> cases.Call:
    """Normally distributed inputs, uniform ids among 4096 keys, and a softmax as score gradient."""
    g = numpy.random.default_rng((topk, seed))
    score = numpy.exp(g.standard_normal((1, rows, topk)))
    return cases.Call(
        cases.Case(1, rows, KEYS, "local", "fp32", sm_scale=1.0),
        {
            "index_q": cases.bf16_bits(g.standard_normal((1, rows, 64, 128)) * 0.1),
            "weights": cases.bf16_bits(g.standard_normal((1, rows, 64)) * 0.5),
            "index_k": cases.bf16_bits(g.standard_normal((1, KEYS, 128)) * 0.1),
            "attn_score": (score / score.sum(-1, keepdims=True)).astype(numpy.float32),
            "index_score": numpy.zeros((1, rows, topk), numpy.float32),
            "topk_indices": g.integers(0, KEYS, (1, rows, topk)).astype(numpy.int32),
            "grad_loss": numpy.ones(1, numpy.float32),
        },
    )


def gemm_stage(plan: PlanFile, call: cases.Call, settings: Settings) -> dict[str, Any]:
    """The three gradients, d_index_k in fp32, from ``attn_score`` as the score gradient."""
    launch, programs = verify._Launch(plan, call), verify._programs(plan)
    launch.arrays["d_index_k"][...] = 0
    if "ticket" in launch.arrays:
        launch.arrays["ticket"][...] = 0
    for buffer in launch.buffers:
        buffer.initialised = True
    ((kernel, grid),) = [(kernel, grid) for kernel, grid in launch.kernels() if kernel.name == "gradients"]
    program = programs[kernel.name]
    result = verify._machine(verify._folder(settings)).launch(
        program, grid, kernel.block, kernel.shared_bytes, launch.parameters(program, kernel.parameters),
        launch.buffers, detect=False,
    )  # fmt: skip
    assert result.ok
    return {
        name: cases.bf16_values(array) if (array := launch.arrays[name]).dtype == numpy.uint16 else array
        for name in verify.OUTPUTS
    }


def errors(plan: PlanFile, call: cases.Call, settings: Settings) -> dict[str, float]:
    """rms errors of ``gemm_stage``, relative to the exact gradients."""
    a = call.arrays
    exact = oracle.gradients(
        call.values("index_q"), call.values("weights"), call.values("index_k"), a["attn_score"], a["topk_indices"]
    )
    found = gemm_stage(plan, call, settings)
    return {name: oracle.rms_error(found[name], getattr(exact, name)) for name in verify.OUTPUTS}


def main() -> None:
    from dsa_planner import envelope
    from dsa_planner.compiler import compile_plan

    settings = Settings.from_environment()
    print("| topk | d_index_q: default, sm100_v2 | d_weights: default, sm100_v2 | d_index_k: default, sm100_v2 |")
    for topk in (128, 256, 384, 512, 640, 1024, 2048):
        columns = []
        for backend, d_weights in (("default", "bf16"), ("sm100_v2", "fp32")):
            config = {"arch": "sm_100f", "topk": topk, "backend": backend, "d_weights": d_weights}
            plan = compile_plan(envelope.plan_config(config)).plan
            columns.append([errors(plan, softmax_call(topk, 16, seed), settings) for seed in range(3)])
        means = [{name: numpy.mean([e[name] for e in found]) for name in verify.OUTPUTS} for found in columns]
        cells = [f"{means[0][name]:.2e}, {means[1][name]:.2e}" for name in verify.OUTPUTS]
        print(f"| {topk} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
