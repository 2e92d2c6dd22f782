"""Prove a plan: run its own PTX on the CPU, or its cubin on a GPU, and compare every output with the fp64 oracle.

Outputs are poisoned first, so that what a kernel leaves out shows. In the machine a run also fails on any finding of
its race and contract detector. Build side; needs the extra ``verify`` (numpy, ziglang), and torch for a GPU.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsa_planner.cache.planfile import PlanFile
from dsa_planner.errors import UnsupportedError, VerifierMissingError, shown
from dsa_planner.launch_record import PARAMETER_BYTES, LaunchRecord, Parameter
from dsa_planner.settings import Settings

if TYPE_CHECKING:
    from dsa_planner.kernels.cases import Call, Case
    from dsa_planner.kernels.ptx.machine import Buffer, Machine, Result, Schedule
    from dsa_planner.kernels.ptx.program import Program

__all__ = [
    "Outcome",
    "default_cases",
    "pairwise_cases",
    "parse_cases",
    "parse_schedule",
    "require_executable",
    "run_in_machine",
    "run_on_device",
    "with_ptx",
]

OUTPUTS = ("d_index_q", "d_weights", "d_index_k")
STAGE_1_BOUND = 1e-6
SLACK = {"default": 1e-4, "sm100_v2": 4e-6, "sm90_v2": 4e-6}
"""rms error that d_index_q and d_index_k may have beyond the rounding of their own store. For ``default`` the oracle
rounds A to bf16, as the backend is defined; what is left are the A that fp32 and fp64 round to different neighbours.
The v2 backends keep A as two bf16 numbers, which leaves 2.2e-6 to 2.7e-6; with one bit less, 4.6e-6 or more."""
D_WEIGHTS_SLACK = 1e-6
"""The same for d_weights, in which no A takes part: sums in fp32 are left, 1e-7 to 2e-7."""


@dataclass(frozen=True)
class Outcome:
    """One run. ``errors`` are rms errors relative to the exact answer, by output; ``problems`` is empty if it passed.

    ``where`` is the schedule, or "device". ``results`` are the arrays that came out, bf16 as uint16.
    """

    plan_id: str
    config: Mapping[str, Any]
    case: Case
    where: str
    errors: Mapping[str, float]
    problems: tuple[str, ...]
    findings: int
    rows_per_second: float
    seconds: float
    results: Mapping[str, Any] = field(repr=False, default_factory=dict)
    profile: Mapping[str, Any] = field(repr=False, default_factory=dict)

    @property
    def passed(self) -> bool:
        return not self.problems


def require_verifier() -> None:
    """See that the packages of the extra are there.

    Raises:
        VerifierMissingError: numpy or ziglang is not installed.
    """
    import importlib.util

    for package in ("numpy", "ziglang"):
        if importlib.util.find_spec(package) is None:
            raise VerifierMissingError(
                f"package {package}", "verifying needs it and it is not installed", "pip install 'dsa-planner[verify]'"
            )


def parse_schedule(text: str) -> Schedule:
    """A schedule from its name.

    Raises:
        UnsupportedError: there is no such schedule.
    """
    from dsa_planner.kernels.ptx.machine import Schedule

    try:
        return Schedule.parse(text)
    except ValueError as error:
        asked, _, rule = str(error).partition(": ")
        raise UnsupportedError(asked, rule, "for example inorder,random:1,late:1") from None


def parse_cases(text: str) -> Callable[[Mapping[str, Any], int, int], list[Case]]:
    """From the name of a set of cases, the function that gives those of a config, a number of rows and a seed.

    Raises:
        UnsupportedError: there is no such set.
    """
    sets = {"usual": lambda config, rows, seed: default_cases(rows, seed), "pairwise": pairwise_cases}
    if text not in sets:
        raise UnsupportedError(f"--cases {shown(text)}", "there are the cases usual and pairwise", "name one of them")
    return sets[text]


def default_cases(rows: int, seed: int) -> list[Case]:
    """Shapes that reach every path: both id spaces, both dtypes of d_index_k, several batch elements, one lone row.

    With 9 rows or more every stage of a pipeline is used again, and with more than 256 keys every loop over keys goes
    round. Few rows leave keys that no slot selects; they are NaN.
    """
    from dsa_planner.kernels.cases import Case

    half = max(1, rows // 2)
    return [
        Case(1, rows, 200, "local", "fp32", seed=seed),
        Case(2, half, 70, "local", "bf16", seed=seed + 1),
        Case(2, half, 70, "global", "fp32", seed=seed + 2),
        Case(1, 1, 40, "local", "bf16", seed=seed + 3),
        Case(2, 1, 200, "local", "bf16", seed=seed + 8, unused_keys="nan"),
    ]


PAIRWISE = (
    # batch, ids, keys, sm_scale, invalid ids, unused keys, d_index_k, d_weights
    (1, "local", "fewer", 0.3, False, "finite", "bf16", "bf16"),
    (3, "global", "more", 1.0, True, "nan", "bf16", "bf16"),
    (3, "global", "more", 0.3, False, "finite", "fp32", "fp32"),
    (3, "local", "fewer", 1.0, True, "finite", "fp32", "fp32"),
    (1, "global", "fewer", 1.0, False, "nan", "fp32", "bf16"),
    (1, "local", "more", 0.3, True, "nan", "bf16", "fp32"),
)
"""Factors of a call, two values each, so that any two values of any two factors meet in some row. With "fewer"
keys than slots ids repeat."""


def pairwise_cases(config: Mapping[str, Any], rows: int, seed: int) -> list[Case]:
    """The calls of ``PAIRWISE`` that a plan takes, for three SMs: with 9 rows, three for each.

    A backend that has one dtype of d_weights takes the calls of both.
    """
    from dsa_planner import envelope
    from dsa_planner.kernels.cases import Case

    topk, dtypes = config["topk"], envelope.support_of(config).d_weights
    found: list[Case] = []
    for batch, ids, keys, sm_scale, invalid_ids, unused_keys, d_index_k, d_weights in PAIRWISE:
        if d_weights == config["d_weights"] or d_weights not in dtypes:
            s_k = topk // 2 + 6 if keys == "fewer" else topk + 72
            found.append(
                Case(
                    batch, max(1, rows // batch), s_k, ids, d_index_k, sm_scale, seed=seed + len(found),
                    unused_keys=unused_keys, invalid_ids=invalid_ids, multiprocessors=3,
                )
            )  # fmt: skip
    return found


# --- the machine ------------------------------------------------------------------------------------------------------


def run_in_machine(
    plan: PlanFile, case: Case, schedule: Schedule, detect: bool = True, settings: Settings | None = None
) -> Outcome:
    """Execute a plan's PTX for one case under one schedule.

    Raises:
        UnsupportedError: the plan has no PTX, or PTX that the machine does not know.
        VerifierMissingError: the extra is not installed, or the machine cannot be compiled.
    """
    require_verifier()
    from dsa_planner.kernels import cases
    from dsa_planner.kernels.ptx.machine import profile

    programs = _programs(plan)
    config = plan.config
    call = cases.make(case, config["topk"], config["heads"], config["head_dim"])
    machine = _machine(_folder(settings or Settings.from_environment()))
    launch = _Launch(plan, call)
    results: list[tuple[str, Program, Result]] = []
    start = time.perf_counter()
    for kernel, grid in launch.kernels():
        program = programs[kernel.name]
        parameters = launch.parameters(program, kernel.parameters)
        result = machine.launch(
            program, grid, kernel.block, kernel.shared_bytes, parameters, launch.buffers, schedule,
            resident=case.multiprocessors, detect=detect, instruction_limit=instruction_limit(config, case),
        )  # fmt: skip
        results.append((kernel.name, program, result))
        if result.findings:
            break
    seconds = time.perf_counter() - start
    problems = [str(finding) for _, _, result in results for finding in result.findings]
    arrays = {name: launch.arrays[name] for name in ("attn_score", *OUTPUTS)}
    errors: dict[str, float] = {}
    if not problems:
        errors, problems = compare(plan, call, arrays)
    rows = case.batch * case.s_q
    return Outcome(
        plan.plan_id, config, case, str(schedule), errors, tuple(problems),
        sum(len(result.findings) for _, _, result in results), rows / seconds if seconds else 0.0, seconds, arrays,
        {name: profile(program, result) for name, program, result in results},
    )  # fmt: skip


def instruction_limit(config: Mapping[str, Any], case: Case) -> int:
    """Warp instructions after which a kernel counts as one that never ends: a plan that loops is to be told so soon.

    The kernels take about 45 for a slot and 8 for a key.
    """
    return 1_000_000 + 1_000 * case.batch * (case.s_q * int(config["topk"]) + case.s_k)


class _Launch:
    """The memory, grids and parameters of one call, from the plan's launch record."""

    def __init__(self, plan: PlanFile, call: Call) -> None:
        import numpy

        from dsa_planner.kernels.ptx.machine import Buffer

        self.record = LaunchRecord.parse(plan.launch)
        self.facts = {"d_index_k": call.case.d_index_k}
        self.values = launch_values(plan.config, call.case)
        self.record.complete(self.values)
        self.arrays = {name: array.copy() for name, array in call.arrays.items()} | empty_outputs(plan.config, call)
        written = {"attn_score", *OUTPUTS}
        for buffer in self.record.buffers:
            if _holds(buffer.when, self.facts):
                self.arrays[buffer.name] = numpy.full(buffer.bytes(self.values) // 4, numpy.nan, numpy.float32)
                written.add(buffer.name)
        self.buffers: list[Buffer] = []
        self.addresses: dict[str, int] = {}
        for index, (name, array) in enumerate(self.arrays.items()):
            made = name in written and name != "attn_score"
            self.buffers.append(Buffer(array, index, writable=name in written, initialised=not made))
            self.addresses[name] = self.buffers[-1].address
        for buffer in self.record.buffers:
            if buffer.otherwise is not None and buffer.name not in self.addresses:
                self.addresses[buffer.name] = self.addresses[buffer.otherwise]

    def kernels(self) -> list[tuple[Any, int]]:
        """The kernels that this call launches, with their grids."""
        found = [(kernel, kernel.grid(self.values)) for kernel in self.record.kernels]
        return [(kernel, grid) for kernel, grid in found if grid and _holds(kernel.when, self.facts)]

    def parameters(self, program: Program, parameters: Sequence[Parameter]) -> bytes:
        """A kernel's parameter block."""
        from dsa_planner.kernels.ptx.machine import TensorMap, pack_parameters

        values: list[int | float | bytes] = []
        for parameter in parameters:
            if parameter.type == "pointer":
                values.append(self.addresses[parameter.name])
            elif parameter.tensor_map is not None:
                shape = parameter.tensor_map
                size = {"bf16": 2, "fp32": 4}[shape.element]
                extents = tuple(extent(self.values) for extent in shape.extents)
                strides = [size * extents[0]]
                for extent in extents[1:-1]:
                    strides.append(strides[-1] * extent)
                address = self.addresses[parameter.name]
                values.append(TensorMap(address, size, extents, tuple(strides), shape.box, shape.swizzle_bytes).pack())
            else:
                value = self.values[parameter.name]
                values.append(float(value) if parameter.type == "float32" else int(value))
        return pack_parameters(program, values)


def launch_values(config: Mapping[str, Any], case: Case) -> dict[str, Any]:
    """The launch values of a case, as the runtime would have them."""
    rows, keys = case.batch * case.s_q, case.batch * case.s_k
    return {
        "rows": rows,
        "keys": keys,
        "s_q": max(case.s_q, 1),
        "heads": config["heads"],
        "head_dim": config["head_dim"],
        "topk": config["topk"],
        "multiprocessors": case.multiprocessors,
        "id_limit": keys if case.ids == "global" else case.s_k,
        "id_offset": 0 if case.ids == "global" else case.s_k,
        "sm_scale": case.sm_scale,
        "loss_scale": case.loss_coeff / rows if rows else 0.0,
    }


def empty_outputs(config: Mapping[str, Any], call: Call) -> dict[str, Any]:
    """The three outputs, poisoned with NaN."""
    import numpy

    dtypes = {"d_index_q": "bf16", "d_weights": config["d_weights"], "d_index_k": call.case.d_index_k}
    inputs = {"d_index_q": "index_q", "d_weights": "weights", "d_index_k": "index_k"}
    poison = {"bf16": (numpy.uint16, 0x7FFF), "fp32": (numpy.float32, numpy.nan)}
    return {
        name: numpy.full(call.arrays[inputs[name]].shape, poison[dtype][1], poison[dtype][0])
        for name, dtype in dtypes.items()
    }


def _holds(when: Mapping[str, str], facts: Mapping[str, str]) -> bool:
    return all(facts[name] == value for name, value in when.items())


def with_ptx(plan: PlanFile, ptx: bytes) -> PlanFile:
    """A plan with other PTX, for those who work on a kernel. Its cubin, and so its id, stay as they are."""
    manifest = plan.manifest
    sections = {**plan.sections, "ptx": ptx}
    return PlanFile.build(manifest["identity"], manifest["build"], manifest["kernels"], sections)


def require_executable(plan: PlanFile, ptx: Path | None = None) -> None:
    """See that the machine can execute a plan's PTX, which takes half a second, before any run.

    Args:
        ptx: the file that this PTX is from, if it is not the plan's own.

    Raises:
        UnsupportedError: as from ``run_in_machine``.
    """
    _programs(plan, ptx)


def _programs(plan: PlanFile, ptx: Path | None = None) -> dict[str, Program]:
    """The plan's kernels, decoded, by their names in the launch record."""
    from dsa_planner.kernels.ptx.syntax import PtxError

    asked, remedy = f"plan {plan.plan_id[:12]}", "verify it with the version of dsa-planner that built it"
    if ptx is not None:
        asked, remedy = f"--ptx {ptx}", "mend the PTX there"
    if "ptx" not in plan.sections:
        raise UnsupportedError(
            asked,
            "its file has no PTX to execute",
            "export it with its PTX, or build it into another DSA_PLAN_CACHE_DIR",
        )
    try:
        programs = _decoded(plan.sections["ptx"])
        return _launched(plan, programs)
    except PtxError as error:
        raise UnsupportedError(asked, f"its PTX cannot be executed ({error})", remedy) from None
    except UnicodeDecodeError as error:
        rule = f"its PTX cannot be executed (byte {error.start} is not text in UTF-8)"
        raise UnsupportedError(asked, rule, remedy) from None


def _launched(plan: PlanFile, programs: Mapping[str, Program]) -> dict[str, Program]:
    """The programs that a plan launches, by their names in its launch record.

    Raises:
        PtxError: one is missing, or is not launched as it has to be.
    """
    from dsa_planner.kernels.ptx.machine import check_launch
    from dsa_planner.kernels.ptx.syntax import PtxError, quoted

    symbols = {entry["name"]: entry["symbol"] for entry in plan.manifest["kernels"]}
    found = {}
    for kernel in LaunchRecord.parse(plan.launch).kernels:
        program = programs.get(symbols[kernel.name])
        if program is None:
            there = ", ".join(programs) or "none"
            raise PtxError(f"it has no entry {symbols[kernel.name]}, only {quoted(there)}")
        check_launch(program, kernel.block, kernel.shared_bytes)
        due = [PARAMETER_BYTES[parameter.type] for parameter in kernel.parameters]
        if due != [parameter.bytes for parameter in program.kernel.parameters]:
            raise PtxError(
                f"line {program.kernel.line}: entry {program.name} is launched with {len(due)} parameters of "
                f"{', '.join(map(str, due))} bytes, and does not declare these"
            )
        found[kernel.name] = program
    return found


@lru_cache(maxsize=4)
def _decoded(ptx: bytes) -> dict[str, Program]:
    """Programs by symbol. Decoding takes as long as a small case, and a plan runs many."""
    from dsa_planner.kernels.ptx.decode import decode
    from dsa_planner.kernels.ptx.parser import parse

    return {name: decode(kernel) for name, kernel in parse(ptx.decode()).kernels.items()}


@cache
def _machine(folder: Path) -> Machine:
    from dsa_planner.kernels.ptx.build import BuildError
    from dsa_planner.kernels.ptx.machine import Machine

    try:
        return Machine(folder)
    except (BuildError, OSError) as error:
        raise VerifierMissingError(
            "the PTX machine", f"it cannot be compiled here ({error})", "pip install 'dsa-planner[verify]'"
        ) from None


@cache
def _scratch() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="dsa-plan-vm-")


def _folder(settings: Settings) -> Path:
    """Where the compiled machine lies: with the plans, or, where there is no folder for them, for this process only."""
    return settings.cache_dir / "machine" if settings.cache_dir is not None else Path(_scratch().name)


# --- comparison -------------------------------------------------------------------------------------------------------


def compare(plan: PlanFile, call: Call, results: Mapping[str, Any]) -> tuple[dict[str, float], list[str]]:
    """The rms errors of a run against the exact answer, and what is wrong with it.

    An output is held to its backend's definition: beyond the rounding of its own store only ``SLACK`` is left to it.
    """
    import numpy

    from dsa_planner.kernels import cases, oracle

    case, backend = call.case, plan.config["backend"]
    scores = oracle.score_gradient(
        call.arrays["attn_score"], call.arrays["index_score"], float(call.arrays["grad_loss"][0]), case.loss_coeff
    )
    problems = []
    stage_1 = oracle.rms_error(results["attn_score"], scores)
    if not stage_1 < STAGE_1_BOUND:
        problems.append(f"attn_score: rms error {stage_1:.2e}, at most {STAGE_1_BOUND:.0e}")

    def bf16(values: Any) -> Any:
        return cases.bf16_values(cases.bf16_bits(values)).astype(numpy.float64)

    def gradients(rounded: bool) -> oracle.Gradients:
        return oracle.gradients(
            call.values("index_q"), call.values("weights"), call.values("index_k"), results["attn_score"],
            call.arrays["topk_indices"], case.sm_scale, case.ids == "global", round_a=bf16 if rounded else None,
        )  # fmt: skip

    exact = gradients(False)
    defined = gradients(True) if backend == "default" else exact
    errors = {"attn_score": stage_1}
    for name in OUTPUTS:
        found = results[name]
        values = cases.bf16_values(found) if found.dtype == numpy.uint16 else found
        want = getattr(defined, name)
        floor = oracle.rms_error(bf16(want), want) if found.dtype == numpy.uint16 else 0.0
        left = oracle.rms_error(values, want)
        errors[name] = oracle.rms_error(values, getattr(exact, name))
        if not left < 1.02 * floor + (D_WEIGHTS_SLACK if name == "d_weights" else SLACK[backend]):
            problems.append(f"{name}: rms error {left:.2e}, the store alone gives {floor:.2e}")
    return errors, problems


# --- a GPU ------------------------------------------------------------------------------------------------------------


def run_on_device(plan: PlanFile, case: Case) -> Outcome:
    """Launch a plan's cubin on the current CUDA device for one case.

    Raises:
        DriverError: there is no driver or no GPU.
        DeviceMismatchError: the plan is not for this GPU.
    """
    import numpy
    import torch

    from dsa_planner.driver import device
    from dsa_planner.kernels import cases
    from dsa_planner.plan import Plan

    device(0)
    config = plan.config
    call = cases.make(case, config["topk"], config["heads"], config["head_dim"])
    arrays = {name: array.copy() for name, array in call.arrays.items()} | empty_outputs(config, call)
    tensors: dict[str, Any] = {}
    for name, array in arrays.items():
        tensor = torch.from_numpy(array.view(numpy.int16) if array.dtype == numpy.uint16 else array).cuda()
        tensors[name] = tensor.view(torch.bfloat16) if array.dtype == numpy.uint16 else tensor
    loaded = Plan(plan, torch.cuda.current_device())
    torch.cuda.synchronize()
    start = time.perf_counter()
    loaded.launch(
        **tensors, sm_scale=case.sm_scale, loss_coeff=case.loss_coeff, topk_indices_global=case.ids == "global"
    )
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    results: dict[str, Any] = {}
    for name in ("attn_score", *OUTPUTS):
        tensor = tensors[name].cpu()
        if tensor.dtype == torch.bfloat16:
            results[name] = tensor.view(torch.int16).numpy().view(numpy.uint16)
        else:
            results[name] = tensor.numpy()
    errors, problems = compare(plan, call, results)
    rows = case.batch * case.s_q
    return Outcome(
        plan.plan_id, config, case, "device", errors, tuple(problems), 0, rows / seconds, seconds, results
    )  # fmt: skip
