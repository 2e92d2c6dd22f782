"""Plans with one fault each, to measure what ``dsa-plan verify`` notices.

A mutant is a text edit of a plan's PTX. Its place is found by opcode and by following operands to where they are
computed, since register numbers differ between compilations; where several places are alike a seed chooses. The number
of lines stays, so that findings name the lines of the plan.

Run as a script it prints the score: ``python tests/ptx_mutants.py``.
"""

from __future__ import annotations

import argparse
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from dsa_planner import verify
from dsa_planner.cache.planfile import PlanFile
from dsa_planner.kernels.cases import Case
from dsa_planner.settings import Settings

CASES = tuple(sorted(verify.default_cases(12, 0), key=lambda case: case.batch * case.s_q))
"""What ``dsa-plan verify`` runs, the small ones first: most faults show in those."""
SCHEDULES = ("inorder", "random:1", "late:1")


# --- finding and editing a statement ----------------------------------------------------------------------------------


class Text:
    """The lines of a module, of which one kernel is looked at."""

    def __init__(self, ptx: str, kernel: str) -> None:
        self.lines = ptx.split("\n")
        starts = [n for n, line in enumerate(self.lines) if ".entry dsa_" in line] + [len(self.lines)]
        own = next(n for n in range(len(starts)) if re.search(rf"\.entry dsa_{kernel}_\d+\(", self.lines[starts[n]]))
        self.start, self.end = starts[own : own + 2]

    def matches(self, pattern: str) -> list[int]:
        found = [n for n in range(self.start, self.end) if re.search(pattern, self.lines[n])]
        if not found:
            raise LookupError(f"no statement matches {pattern!r}")
        return found

    def definition(self, line: int, operand: int) -> int:
        """Where a register operand of a statement is computed, going up the text."""
        register = re.findall(r"%\w+", self.lines[line])[operand]
        pattern = re.compile(rf"^\s*[a-z][\w.:]*\s+{register}\b")
        return next(n for n in range(line - 1, self.start, -1) if pattern.search(self.lines[n]))


Site = Callable[[Text, random.Random], list[int]]
Change = Callable[[str, random.Random], str]


def every(pattern: str) -> Site:
    """All statements that match."""
    return lambda text, _: text.matches(pattern)


def nth(pattern: str, *numbers: int) -> Site:
    """The statement that matches and has this number among those that do; of several numbers, one by chance."""
    return lambda text, chance: [text.matches(pattern)[chance.choice(numbers)]]


def any_of(pattern: str) -> Site:
    """One of the statements that match, by chance."""
    return lambda text, chance: [chance.choice(text.matches(pattern))]


def span(pattern: str, first: int, last: int) -> Site:
    """The statements that match, from number ``first`` up to ``last``."""
    return lambda text, _: text.matches(pattern)[first:last]


def source(site: Site, *operands: int) -> Site:
    """Where a register operand of a statement is computed; with several operands, so many steps back."""

    def found(text: Text, chance: random.Random) -> list[int]:
        lines = site(text, chance)
        for operand in operands:
            lines = [text.definition(line, operand) for line in lines]
        return lines

    return found


def above(site: Site, count: int) -> Site:
    """So many lines above a statement."""
    return lambda text, chance: [line - count for line in site(text, chance)]


def drop(line: str, _: random.Random) -> str:
    return f"// without {line.strip()}"


def put(pattern: str, replacement: str | Callable[[re.Match[str]], str]) -> Change:
    """Replace part of the statement."""

    def change(line: str, _: random.Random) -> str:
        changed = re.sub(pattern, replacement, line)
        if changed == line:
            raise LookupError(f"{pattern!r} is not in {line.strip()!r}")
        return changed

    return change


def add(amount: int) -> Change:
    """Raise the number that ends the statement or its address."""
    return put(r"(\d+)(\]?(, \{.*\})?;)$", lambda match: f"{int(match[1]) + amount}{match[2]}")


def flip_bit(first: int, last: int) -> Change:
    """Flip one of these bits of the 64-bit register that the statement writes."""

    def change(line: str, chance: random.Random) -> str:
        register = re.findall(r"%\w+", line)[0]
        return f"{line} xor.b64 {register}, {register}, {1 << chance.randint(first, last)};"

    return change


@dataclass(frozen=True)
class Mutant:
    """One fault. ``kernel`` is its name in the launch record."""

    name: str
    about: str
    site: Site
    change: Change
    kernel: str = "gradients"


def mutate(plan: PlanFile, mutant: Mutant, seed: int = 0) -> PlanFile:
    """The plan with the fault in its PTX. Its cubin stays, and so does the plan id."""
    text = Text(plan.sections["ptx"].decode(), mutant.kernel)
    chance = random.Random(f"{mutant.name}/{seed}")
    for line in mutant.site(text, chance):
        text.lines[line] = mutant.change(text.lines[line], chance)
    sections = {**plan.sections, "ptx": "\n".join(text.lines).encode()}
    manifest = plan.manifest
    return PlanFile.build(manifest["identity"], manifest["build"], manifest["kernels"], sections)


# --- the faults -------------------------------------------------------------------------------------------------------

# Places, numbered in the order of the text.
WAIT = r"mbarrier\.try_wait"
ARRIVE = r"mbarrier\.arrive\.shared"
ARRIVE_CP = r"cp\.async\.mbarrier\.arrive"
EXPECT = r"mbarrier\.arrive\.expect_tx"
INIT = r"mbarrier\.init"
NAMED_BARRIER = r"bar\.sync\s+%\w+, 128"
MMA = r"wgmma\.mma_async"
SCALE_D = r"setp\.ne\.b32 p,"
LAST_BULK_WAIT = r"bulk\.wait_group\s+0"
GATHER = r"cp\.async\.cg\.shared\.global"
TMA = r"cp\.async\.bulk\.tensor"
STMATRIX = r"stmatrix"
SCATTER = r"cp\.reduce\.async\.bulk"
STORE_DQ = r"cp\.async\.bulk\.global\.shared::cta"
STAGE_DK = r"st\.shared\.v2\.b32\s+\[%\w+\+1"
GRAD = r"selp\.f32\s+%\w+, %\w+, 0f00000000"
GATE = r"setp\.gt\.f32"
THRESHOLD = r"setp\.ltu\.f32"

WAITS = ("q-empty", "k-empty", "q-full", "k-full")
MMAS = {"s": (0, 8), "dk": (8, 12), "dq": (12, 16)}
DESCRIPTORS = {"s-a": (0, -2), "s-b": (0, -1), "dk-b": (8, -1), "dq-a": (12, -2), "dq-b": (12, -1)}
"""The first wgmma that uses a descriptor, and which of its registers it is."""
DESCRIPTOR_PARTS = {"start": (0, 13), "lbo": (16, 29), "sbo": (32, 45), "base": (49, 51), "swizzle": (62, 63)}

TO_KEY = (1, 2, 1, 1, 1)
"""From a gather's copy over its address, clamped key and shuffle to the selection of a key or -1."""

CUT = put(r"cvt\S+(\s+%\w+), (%\w+), (%\w+);", r"prmt.b32\1, \3, \2, 0x7632;")
"""Two fp32 numbers to bf16 by dropping bits."""

# fmt: off


def _order() -> Iterator[Mutant]:
    """Waits, arrivals, fences, barriers and groups."""
    for n, name in enumerate(WAITS):
        yield Mutant(f"wait-{name}-dropped", "a wait that never waits", nth(WAIT, n), put(r"mbarrier.*;", "mov.pred P1, -1;"))
        yield Mutant(f"wait-{name}-parity", "a wait for the other parity", source(nth(WAIT, n), 1), put("1, 0,", "0, 1,"))
    yield Mutant("wait-k-full-next", "a wait at the next barrier", source(nth(WAIT, 3), 0), add(8))
    for n, name in ((1, "k-empty"), (3, "k-full")):
        yield Mutant(f"phase-{name}-slow", "a parity that changes half as often", source(nth(WAIT, n), 1, 1, 2, 1, 1), add(1))
    yield Mutant("arrive-k-empty-dropped", "a K stage is never given back", nth(ARRIVE, 0), drop)
    yield Mutant("arrive-q-empty-dropped", "a Q stage is never given back", nth(ARRIVE, 1), drop)
    yield Mutant("arrive-k-empty-all-lanes", "32 arrivals in place of one", above(nth(ARRIVE, 0), 2), drop)
    yield Mutant("arrive-k-full-dropped", "the gather never says that it is done", every(ARRIVE_CP), drop)
    yield Mutant("arrive-k-full-counted", "an arrival that raises the count first", every(ARRIVE_CP), put(r"\.noinc", ""))
    yield Mutant("arrive-k-full-early", "an arrival that does not wait for the copies", every(ARRIVE_CP), put(r"cp\..*(\[.*\]);", r"mbarrier.arrive.shared.b64 _, \1, 1;"))
    yield Mutant("arrive-k-full-next", "an arrival at the next barrier", every(ARRIVE_CP), add(8))
    yield Mutant("expect-tx-lowered", "8192 bytes expected of 16384", source(every(EXPECT), 2), put("16384", "8192"))
    yield Mutant("expect-tx-raised", "16400 bytes expected of 16384", source(every(EXPECT), 2), add(16))
    yield Mutant("expect-tx-dropped", "neither an arrival nor bytes", every(EXPECT), drop)
    yield Mutant("expect-tx-plain", "an arrival without bytes", every(EXPECT), put(r"\.expect_tx(.*), %\w+;", r"\1, 1;"))
    yield Mutant("init-k-full-low", "a barrier for one of the two gather warps", source(nth(INIT, 8), 1), put("64", "32"))
    yield Mutant("init-empty-low", "a barrier for three of the four math warps", source(nth(INIT, 1), 1), put("4;", "3;"))
    yield Mutant("init-dropped", "a barrier that is not set up", any_of(INIT), drop)

    yield Mutant("fence-init-dropped", "TMA may not see the barriers", every(r"fence\.mbarrier_init"), drop)
    for n, name in enumerate(("k", "a", "dk-rows", "dq-rows")):
        yield Mutant(f"fence-proxy-{name}-dropped", "the async proxy may read stale bytes", nth(r"fence\.proxy\.async", n), drop)
    yield Mutant("bar-start-dropped", "warps start before the barriers are set up", every(r"bar\.sync\s+0;"), drop)
    for n, name in enumerate(("before-a", "after-a", "d-weights")):
        yield Mutant(f"bar-{name}-dropped", "the four warps are not in step", nth(NAMED_BARRIER, n), drop)
    yield Mutant("bar-shared", "both workers meet at one barrier", nth(NAMED_BARRIER, 1), put(r"%\w+, 128", "1, 128"))
    yield Mutant("bar-half", "a barrier for two of the four warps", nth(NAMED_BARRIER, 0), put("128", "64"))
    for n, name in enumerate(("dk-before", "dk-after", "dq-before", "dq-after")):
        yield Mutant(f"warp-sync-{name}-dropped", "the lanes are not in step", nth(r"bar\.warp\.sync", n), drop)

    for n, name in enumerate(MMAS):
        yield Mutant(f"wgmma-fence-{name}-dropped", "the registers may not have settled", nth(r"wgmma\.fence", n), drop)
        yield Mutant(f"wgmma-commit-{name}-dropped", "products join the next group", nth(r"wgmma\.commit", n), drop)
    for n, (name, most) in enumerate((("s", 0), ("dk", 1), ("dq", 0))):
        yield Mutant(f"wgmma-wait-{name}-dropped", "results are used in flight", nth(r"wgmma\.wait", n), drop)
        yield Mutant(f"wgmma-wait-{name}-weak", f"{most + 1} groups may be in flight", nth(r"wgmma\.wait", n), add(1))
    for n, name in enumerate(("dk", "dq")):
        yield Mutant(f"bulk-wait-{name}-dropped", "staged rows are overwritten", nth(r"bulk\.wait_group\.read", n), drop)
        yield Mutant(f"bulk-wait-{name}-weak", "one copy may still read", nth(r"bulk\.wait_group\.read", n), add(1))
        yield Mutant(f"bulk-commit-{name}-dropped", "copies join the next group", nth(r"bulk\.commit_group", n), drop)
    yield Mutant("bulk-wait-end-dropped", "the CTA ends with copies in flight", every(LAST_BULK_WAIT), drop)
    yield Mutant("bulk-wait-end-read", "the last wait is for reads alone", every(LAST_BULK_WAIT), put("wait_group", "wait_group.read"))
    yield Mutant("setmaxnreg-dropped", "the gather warps keep their registers", every(r"setmaxnreg\.dec"), drop)


def _operands() -> Iterator[Mutant]:
    """Descriptors and flags of wgmma."""
    for name, (first, operand) in DESCRIPTORS.items():
        for part, bits in DESCRIPTOR_PARTS.items():
            yield Mutant(f"descriptor-{name}-{part}", "bit {} to {} is wrong".format(*bits), source(nth(MMA, first), operand), flip_bit(*bits))
    for name, (first, last) in MMAS.items():
        yield Mutant(f"transposed-{name}-b", "B is read the other way", span(MMA, first, last), put(r"(\d);", lambda match: f"{1 - int(match[1])};"))
    yield Mutant("transposed-dq-a", "A is read the other way", span(MMA, 12, 16), put("1, 1;", "0, 1;"))
    yield Mutant("scale-d-s", "S adds to what was there", nth(SCALE_D, 0), put("setp.*", "mov.pred p, -1;"))
    yield Mutant("scale-d-dk", "dK adds to that of the last tile", nth(SCALE_D, 8), put("setp.*", "mov.pred p, -1;"))
    yield Mutant("scale-d-dq", "dQ adds to that of the last row", nth(SCALE_D, 12), put("setp.*", "mov.pred p, -1;"))
    yield Mutant("scale-d-lost", "a product replaces the sum", nth(SCALE_D, *range(1, 8), *range(9, 12), *range(13, 16)), put("setp.*", "mov.pred p, 0;"))
    yield Mutant("mma-dropped", "one of 16 products is missing", any_of(MMA), drop)


def _addresses() -> Iterator[Mutant]:
    """Swizzles, pitches, offsets and coordinates."""
    yield Mutant("gather-swizzle", "chunks do not lie where the MMA looks", source(any_of(GATHER), 0, 1, 2, 1, 1), put("xor", "or"))
    yield Mutant("gather-stage", "K stages overlap", source(nth(GATHER, 0), 0, 1, 1, 1, 2, 1, 2), put("12;", "11;"))
    yield Mutant("gather-half", "the halves of a tile overlap", source(nth(GATHER, 0), 0, 1, 1, 1, 2, 1, 1, 1), put("10;", "9;"))
    yield Mutant("gather-offset", "a pair of rows lands on the next one", source(any_of(GATHER), 0), add(256))
    yield Mutant("gather-shuffle", "a pair of rows gets other keys", source(nth(GATHER, *range(4, 16)), 1, 2, 1, 1, 2), put(r"(\d+);", lambda match: f"{int(match[1]) ^ 4};"))
    yield Mutant("gather-pitch", "K rows of 128 bytes", source(any_of(GATHER), 1, 2), put("256", "128"))
    yield Mutant("stmatrix-swizzle", "a chunk of A does not lie where the MMA looks", source(any_of(STMATRIX), 0, 1, 1), put("112", "48"))
    yield Mutant("stmatrix-stage", "the A of both workers overlap", source(any_of(STMATRIX), 0, 2), put("13;", "12;"))
    yield Mutant("stmatrix-offset", "a chunk of A lands on the next one", source(any_of(STMATRIX), 0, 1, 2), add(32))
    yield Mutant("stmatrix-order", "two fragments of A are exchanged", any_of(STMATRIX), put(r"\{(%\w+), (%\w+)", r"{\2, \1"))
    yield Mutant("dk-pitch-written", "dK rows are staged 528 bytes apart", nth(r"mad\.lo\.s32.*, 544,", 0), put("544", "528"))
    yield Mutant("dk-pitch-read", "dK rows are taken from 528 bytes apart", nth(r"mad\.lo\.s32.*, 544,", 1), put("544", "528"))
    yield Mutant("dq-pitch-read", "dQ rows are taken from 256 bytes apart", every(r"mad\.lo\.s32.*, 272,"), put("272", "256"))
    yield Mutant("dk-stage", "the staged rows of warps overlap", source(every(SCATTER), 1, 1, 2), put("8704", "8192"))
    yield Mutant("dk-column", "a pair of columns is staged in the next one's place", any_of(STAGE_DK), put(r"\+(\d+)\]", lambda match: f"+{int(match[1]) + 8}]"))
    yield Mutant("tma-box", "the second half of Q is the first", source(nth(TMA, 1), 2), put("64", "0"))
    yield Mutant("tma-row", "Q of another row", source(nth(TMA, 0), 3), put("6;", "5;"))
    yield Mutant("tma-stage", "Q stages overlap", source(nth(TMA, 0), 0, 2), put("14;", "13;"))
    yield Mutant("tma-target", "the second half of Q lands on the first", nth(TMA, 1), put(r"\+11264", "+3072"))
    yield Mutant("tma-barrier", "half of Q is counted elsewhere", nth(TMA, 1), put(r"\[(%\w+)\], (%\w+);", r"[\1+8], \2;"))
    yield Mutant("scatter-short", "half a row is added", every(SCATTER), put("512", "256"))
    yield Mutant("scatter-store", "rows replace the sum", every(SCATTER), put(r"reduce\.(.*)\.add\.f32", r"\1"))
    yield Mutant("scatter-dropped", "nothing is added", every(SCATTER), drop)
    yield Mutant("scatter-batch", "the ids' batch element is left out", source(every(SCATTER), 0, 2, 1), put(r", %\w+;", ", 0;"))
    yield Mutant("store-dq-short", "half a row of dQ is stored", every(STORE_DQ), put("256", "128"))
    yield Mutant("store-dq-row", "dQ of another row", source(every(STORE_DQ), 0, 2, 1, 1), put("64", "32"))
    yield Mutant("weights-offset", "some weights of other heads", nth(r"ld\.global\.v2\.b16", *range(1, 8)), add(16))


def _ids() -> Iterator[Mutant]:
    """What invalid ids do."""
    yield Mutant("gather-limit", "the id after the last is gathered", source(nth(GATHER, 0), *TO_KEY, 2), put(r"lt\.u32", "le.u32"))
    yield Mutant("gather-negative", "negative ids are gathered", source(nth(GATHER, 0), *TO_KEY, 2), put(r"lt\.u32", "lt.s32"))
    yield Mutant("gather-batch", "the ids' batch element is left out", source(nth(GATHER, 0), *TO_KEY, 1), put(r", %\w+;", ", 0;"))
    yield Mutant("gather-fill", "invalid slots get a key in place of zeros", source(every(GATHER), 2), put("0, 16", "16, 16"))
    yield Mutant("gather-fill-key-0", "key 0 is taken for invalid", source(every(GATHER), 2, 1), put(r"lt\.s32", "le.s32"))
    yield Mutant("gather-clamp", "the key -1 is not clamped to 0", source(any_of(GATHER), 1, 2, 1), put(r"max\.s32(.*), 0;", r"mov.b32\1;"))
    yield Mutant("scatter-limit", "the id after the last is scattered", source(nth(r"\bor\.pred", 2), 2), put(r"ge\.u32", "gt.u32"))
    yield Mutant("scatter-negative", "negative ids are scattered", source(nth(r"\bor\.pred", 2), 2), put(r"ge\.u32", "ge.s32"))
    yield Mutant("scatter-lanes", "lanes without a slot scatter too", source(nth(r"\bor\.pred", 2), 1), put("15;", "31;"))
    yield Mutant("grad-limit", "the id after the last has a gradient", source(nth(GRAD, 0), 2), put(r"lt\.u32", "le.u32"))
    yield Mutant("grad-unmasked", "every id has a gradient", nth(GRAD, 0), put(r"selp\.f32(\s+%\w+, %\w+),.*;", r"mov.b32\1;"))


def _values() -> Iterator[Mutant]:
    """Arithmetic, and which lanes and rows it is for."""
    yield Mutant("gate-zero", "a score of zero passes a gate", any_of(GATE), put(r"gt\.f32", "ge.f32"))
    yield Mutant("gate-relu", "d_weights takes the other half", any_of(r"max\.NaN\.f32"), put("max", "min"))
    yield Mutant("a-cut", "A is cut in place of rounded", nth(r"cvt\.rn\.bf16x2", *range(16)), CUT)
    yield Mutant("dq-cut", "dQ is cut in place of rounded", span(r"cvt\.rn\.bf16x2", 16, 48), CUT)
    yield Mutant("dq-cut-once", "one of 32 columns of dQ is cut", nth(r"cvt\.rn\.bf16x2", *range(16, 48)), CUT)
    yield Mutant("d-weights-cut", "d_weights is cut in place of rounded", every(r"cvt\.rn\.bf16\.f32"), put(r"cvt\S+(\s+)(%\w+), (%\w+);", r"mov.b32\1{_, \2}, \3;"))
    yield Mutant("gate-scale", "sm_scale is left out", source(nth(GRAD, 0), 1), put(r"mul\.f32(\s+%\w+), %\w+, ", r"mov.b32\1, "))
    yield Mutant("gate-shuffle", "gradients of other slots", source(nth(r"shfl\.sync\.idx", 20), 2), put("8;", "4;"))
    yield Mutant("d-weights-butterfly", "a step of a sum over lanes doubles", any_of(r"shfl\.sync\.bfly"), put(r", \d+, 31", ", 0, 31"))
    yield Mutant("d-weights-few", "32 of 64 heads are stored", every(r"setp\.gt\.u32\s+%\w+, %\w+, 63;"), put("63;", "31;"))
    yield Mutant("d-weights-many", "threads without a head store too", every(r"setp\.gt\.u32\s+%\w+, %\w+, 63;"), put("63;", "127;"))
    yield Mutant("d-weights-lanes", "three of four lanes leave their sums", every(r"setp\.gt\.u32\s+%\w+, %\w+, 3;"), put("3;", "2;"))
    yield Mutant("d-weights-dropped", "the store is missing", every(r"st\.global\.b16"), drop)
    yield Mutant("math-row-step", "every other row of a worker", source(nth(r"setp\.lt\.s32", -1), 1, 2), put("1;", "2;"))
    yield Mutant("gather-row-step", "every other row of a worker", source(nth(r"setp\.lt\.s32", 18), 1, 2), put("1;", "2;"))
    yield Mutant("row-step-zero", "the first row for ever", every(r"add\.s32\s+(%\w+), \1, %\w+;"), drop)
    yield Mutant("prefetch-tile", "ids of another tile", every(r"setp\.eq\.b32\s+%\w+, %\w+, [24];"), put(r"\d;", "1;"))
    yield Mutant("prefetch-dropped", "ids of the last tile", nth(r"ld\.global\.b32", -2), drop)

    for name, number in (("low", "1A"), ("high", "1C")):
        yield Mutant(f"threshold-{name}", "exp(-100) is off by one subnormal", any_of(THRESHOLD), put("1B;", f"{number};"), "score_grad")
    yield Mutant("threshold-equal", "a probability next to exp(-100) is cut", any_of(THRESHOLD), put("ltu", "leu"), "score_grad")
    yield Mutant("threshold-nan", "a NaN passes the threshold", any_of(THRESHOLD), put("ltu", "lt"), "score_grad")
    yield Mutant("target-clamp", "the target is not held above exp(-100)", any_of(r"max\.NaN\.f32"), put("0f0000001B", "0f00000000"), "score_grad")
    yield Mutant("score-grad-butterfly", "a step of the sum over lanes doubles", any_of(r"shfl\.sync\.bfly"), put(r", \d+, 31", ", 0, 31"), "score_grad")
    yield Mutant("score-grad-dropped", "the store is missing", nth(r"st\.global\.v4", 0), drop, "score_grad")
    yield Mutant("zero-dropped", "the accumulator is not zeroed", nth(r"st\.global\.v4", -1), drop, "score_grad")
    yield Mutant("zero-step", "every other row is zeroed", source(nth(r"add\.s32", -1), 2), put("3;", "4;"), "score_grad")
    yield Mutant("zero-for-ever", "the loop over rows stands still", nth(r"add\.s32", -1), drop, "score_grad")
    yield Mutant("round-order", "two columns are exchanged", any_of(r"cvt\.rn\.bf16x2"), put(r", (%\w+), (%\w+);", r", \2, \1;"), "round_d_index_k")
    yield Mutant("round-cut", "d_index_k is cut in place of rounded", any_of(r"cvt\.rn\.bf16x2"), CUT, "round_d_index_k")
    yield Mutant("round-rows", "the last row is not rounded", every(r"setp\.lt\.s32"), put("setp.*(%p\\w+),.*", r"mov.pred \1, 0;"), "round_d_index_k")


# fmt: on
MUTANTS = (*_order(), *_operands(), *_addresses(), *_ids(), *_values())

EQUIVALENT = {
    "wait-q-empty-dropped": "before it fetches Q for a row, the gather warp has waited for K stages that are given back "
    "only after the last product with the Q that was there",
    "wgmma-fence-dq-dropped": "two other fences lie between the last use of dQ's registers and its first product",
    "descriptor-s-a-lbo": "the leading offset is not used where an operand is K-major and swizzled",
    "descriptor-s-b-lbo": "the leading offset is not used where an operand is K-major and swizzled",
    "descriptor-dq-a-lbo": "the 64 heads of A are one swizzled line, so there is no second one to lead to",
    "bulk-wait-end-read": "nothing comes after that wait but the end of the grid, which completes the writes",
    "gather-clamp": "a copy of zero bytes reads nothing, whatever its address",
    "grad-limit": "the K row of an invalid slot is zero, so that its scores are zero and its gates closed",
    "grad-unmasked": "the K row of an invalid slot is zero, so that its scores are zero and its gates closed",
}
"""Mutants that, by reading the code, compute the same as the plan for all finite inputs, and why."""

MISSED = {
    "target-clamp": "a target below exp(-100) counts as itself: the gradient changes by less than 1e-43",
    "threshold-nan": "only a NaN among the probabilities tells the two apart, and no case has one",
    "dq-cut-once": "one column in 32 rounded the wrong way stays below the bound on the rms error of d_index_q",
    "setmaxnreg-dropped": "registers are not counted: by the ISA the math warps would wait for theirs",
}
"""Mutants that are wrong and that nothing notices, and why."""


# --- the verdict ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """What noticed a mutant first: "detector", "values", "deadlock", or "limit" for a loop without end; None if nothing
    did."""

    by: str | None
    schedule: str = ""
    case: str = ""
    problem: str = ""


def judge(
    plan: PlanFile,
    settings: Settings | None = None,
    cases: Sequence[Case] = CASES,
    schedules: Sequence[str] = SCHEDULES,
    detect: bool = True,
) -> Verdict:
    """Run a plan until something is wrong."""
    for schedule in schedules:
        for case in cases:
            outcome = verify.run_in_machine(plan, case, verify.parse_schedule(schedule), detect, settings)
            if outcome.problems:
                first = outcome.problems[0]
                return Verdict(_noticed_by(first) if outcome.findings else "values", schedule, str(case), first)
    return Verdict(None)


def _noticed_by(finding: str) -> str:
    kinds = {"deadlock": "deadlock", "no end": "limit"}
    return next((by for kind, by in kinds.items() if finding.startswith(kind)), "detector")


def main() -> None:
    """Print what noticed each mutant, for several seeds, and the totals."""
    from dsa_planner import envelope
    from dsa_planner.compiler import compile_plan

    parser = argparse.ArgumentParser(description="Print what verify notices of plans with one fault each.")
    parser.add_argument("names", nargs="*", help="mutants; all of them by default")
    parser.add_argument("--topk", default="128,256")
    parser.add_argument("--seeds", type=int, default=1, help="places to try, where several are alike")
    parser.add_argument("--no-detector", action="store_true", help="look for no races, as a plain emulator would")
    arguments = parser.parse_args()
    totals: Counter[str] = Counter()
    schedules: Counter[str] = Counter()
    for topk in map(int, arguments.topk.split(",")):
        plan = compile_plan(envelope.plan_config({"arch": "sm_90a", "topk": topk})).plan
        for mutant in MUTANTS:
            if arguments.names and mutant.name not in arguments.names:
                continue
            for seed in range(arguments.seeds):
                start = time.perf_counter()
                verdict = judge(mutate(plan, mutant, seed), detect=not arguments.no_detector)
                seconds = time.perf_counter() - start
                totals[verdict.by or "survived"] += 1
                schedules[verdict.schedule] += verdict.by is not None
                print(
                    f"{topk:4} {seed:2} {mutant.name:30} {verdict.by or 'survived':9} {verdict.schedule:9} "
                    f"{seconds:5.2f} s  {verdict.problem[:100]}",
                    flush=True,
                )
    print(", ".join(f"{count} {by}" for by, count in totals.most_common()), "of", sum(totals.values()))
    print(", ".join(f"{count} {schedule}" for schedule, count in schedules.most_common() if count))


if __name__ == "__main__":
    main()
