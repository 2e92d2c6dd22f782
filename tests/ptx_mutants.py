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

    def matches(self, pattern: str, part: str = "") -> list[int]:
        """The statements that match, in the kernel or in a part of it (``PARTS``)."""
        start, end = self.start, self.end
        if part:
            first, after = PARTS[part]
            start = self._only(first)
            end = self._only(after) if after else self.end
        found = [n for n in range(start, end) if re.search(pattern, self.lines[n])]
        if not found:
            raise LookupError(f"no statement matches {pattern!r}")
        return found

    def _only(self, pattern: str) -> int:
        (line,) = self.matches(pattern)
        return line

    def definition(self, line: int, operand: int) -> int:
        """Where a register operand of a statement is computed, going up the text."""
        register = re.findall(r"%\w+", self.lines[line])[operand]
        return self.nearest(line, rf"^\s*[a-z][\w.:]*\s+{register}\b", -1)

    def nearest(self, line: int, pattern: str, step: int) -> int:
        """The first statement that matches, above a line or below it."""
        stop = self.start if step < 0 else self.end
        for n in range(line + step, stop, step):
            if re.search(pattern, self.lines[n]):
                return n
        raise LookupError(f"no statement from line {line + 1} on matches {pattern!r}")

    def barrier(self, line: int) -> str:
        """The ring and kind of the mbarrier that a wait or an arrival names, from the offset in its address."""
        match = re.search(r"\[(%\w+)(?:\+(\d+))?\]", self.lines[line])
        if match is None:
            raise LookupError(f"no address in {self.lines[line].strip()!r}")
        offset = int(match[2] or 0)
        if not offset:
            operand = re.findall(r"%\w+", self.lines[line]).index(match[1])
            added = re.search(r", (\d+);$", self.lines[self.definition(line, operand)])
            offset = int(added[1]) if added else 0
        if offset not in BARRIERS:
            raise LookupError(f"no mbarrier lies at {offset}: {self.lines[line].strip()!r}")
        return BARRIERS[offset]

    def at_barrier(self, pattern: str, places: dict[str, tuple[str, ...]], barrier: str, place: str) -> int:
        """The wait or arrival of this name; that there are as many as there are names is seen to."""
        lines = [n for n in self.matches(pattern) if self.barrier(n) == barrier]
        if len(lines) != len(places[barrier]):
            raise LookupError(f"{len(lines)} of {pattern!r} at {barrier}, not {len(places[barrier])}")
        return lines[places[barrier].index(place)]


Site = Callable[[Text, random.Random], list[int]]
Change = Callable[[str, random.Random], str]


def every(pattern: str, part: str = "") -> Site:
    """All statements that match."""
    return lambda text, _: text.matches(pattern, part)


def nth(pattern: str, *numbers: int, of: int = 0, part: str = "") -> Site:
    """The statement that matches and has this number among those that do; of several numbers, one by chance.

    With ``of`` there have to be so many.
    """

    def found(text: Text, chance: random.Random) -> list[int]:
        lines = text.matches(pattern, part)
        if of and len(lines) != of:
            raise LookupError(f"{len(lines)} statements match {pattern!r}, not {of}")
        return [lines[chance.choice(numbers)]]

    return found


def any_of(pattern: str, part: str = "") -> Site:
    """One of the statements that match, by chance."""
    return lambda text, chance: [chance.choice(text.matches(pattern, part))]


def span(pattern: str, first: int, last: int, part: str = "") -> Site:
    """The statements that match, from number ``first`` up to ``last``."""
    return lambda text, _: text.matches(pattern, part)[first:last]


def wait(barrier: str, place: str) -> Site:
    return lambda text, _: [text.at_barrier(r"mbarrier\.try_wait", WAITS, barrier, place)]


def arrival(barrier: str, place: str) -> Site:
    return lambda text, _: [text.at_barrier(r"mbarrier\.arrive\.shared", ARRIVALS, barrier, place)]


def named(pattern: str, places: tuple[str, ...], place: str) -> Site:
    """One of so many statements as there are names for."""
    return nth(pattern, places.index(place), of=len(places))


def between(first: Site, end: Site, pattern: str) -> Site:
    """The statements that match, from one statement to another."""

    def found(text: Text, chance: random.Random) -> list[int]:
        (start,), (stop,) = first(text, chance), end(text, chance)
        return [n for n in text.matches(pattern) if start < n < stop]

    return found


def one_of(site: Site, *numbers: int, of: int = 0) -> Site:
    """One of these statements, by chance; of those with these numbers, where some are given. As for ``nth``."""

    def found(text: Text, chance: random.Random) -> list[int]:
        lines = site(text, chance)
        if of and len(lines) != of:
            raise LookupError(f"{len(lines)} statements from line {lines[0] + 1} on, not {of}")
        return [lines[chance.choice(numbers or range(len(lines)))]]

    return found


def last(site: Site, count: int) -> Site:
    """So many of these statements, at the end."""
    return lambda text, chance: site(text, chance)[-count:]


def source(site: Site, *operands: int) -> Site:
    """Where a register operand of a statement is computed; with several operands, so many steps back."""

    def found(text: Text, chance: random.Random) -> list[int]:
        lines = site(text, chance)
        for operand in operands:
            lines = [text.definition(line, operand) for line in lines]
        return lines

    return found


def above(site: Site, pattern: str) -> Site:
    """The nearest statement above that matches."""
    return lambda text, chance: [text.nearest(line, pattern, -1) for line in site(text, chance)]


def below(site: Site, pattern: str) -> Site:
    """The nearest statement below that matches."""
    return lambda text, chance: [text.nearest(line, pattern, 1) for line in site(text, chance)]


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


def then(statement: str) -> Change:
    """Add a statement after it. ``R`` is the register that it writes."""
    return lambda line, _: f"{line} {re.sub(r'R', _written(line), statement) if 'R' in statement else statement}"


def _written(line: str) -> str:
    return str(re.findall(r"%\w+", line)[0])


def add(amount: int) -> Change:
    """Raise the number that ends the statement or its address."""
    return put(r"(\d+)(\]?(, (\{.*\}|%\w+))?;)$", lambda match: f"{int(match[1]) + amount}{match[2]}")


def flip_bit(first: int, last: int) -> Change:
    """Flip one of these bits of the 64-bit register that the statement writes."""
    return lambda line, chance: then(f"xor.b64 R, R, {1 << chance.randint(first, last)};")(line, chance)


def parity(site: Site) -> Site:
    """Where a wait's parity is computed; the wait itself where it is a constant."""

    def found(text: Text, chance: random.Random) -> list[int]:
        lines = site(text, chance)
        return [line if "], 0, " in text.lines[line] else text.definition(line, 1) for line in lines]

    return found


def other_parity(line: str, chance: random.Random) -> str:
    """Of a wait for a constant parity, or of the statement that computes it."""
    return (put(r"\], 0, ", "], 1, ") if "try_wait" in line else then("xor.b32 R, R, 1;"))(line, chance)


@dataclass(frozen=True)
class Mutant:
    """One fault, in one place or two. ``kernel`` is its name in the launch record; ``v2`` says that the place is only
    in plans of the v2 backends."""

    name: str
    about: str
    site: Site
    change: Change
    kernel: str = "gradients"
    v2: bool = False
    also: tuple[Site, Change] | None = None


def mutate(plan: PlanFile, mutant: Mutant, seed: int = 0) -> PlanFile:
    """The plan with the fault in its PTX. Its cubin stays, and so does the plan id.

    Raises:
        LookupError: the place of the fault is not in this PTX.
    """
    text = Text(plan.sections["ptx"].decode(), mutant.kernel)
    chance = random.Random(f"{mutant.name}/{seed}")
    edits = [(mutant.site, mutant.change), *([mutant.also] if mutant.also else [])]
    places = [(line, change) for site, change in edits for line in site(text, chance)]
    for line, change in places:
        text.lines[line] = change(text.lines[line], chance)
    return verify.with_ptx(plan, "\n".join(text.lines).encode())


# --- the faults -------------------------------------------------------------------------------------------------------

BARRIERS = {
    0: "q-full", 16: "q-empty", 64: "k-full", 80: "k-empty", 128: "a-full", 160: "out-full", 176: "out-empty"
}  # fmt: skip
"""The first mbarrier of each ring, by its offset in shared memory."""

# Who waits and arrives where, in the order of the text.
WAITS = {
    "q-empty": ("gather",),
    "k-empty": ("gather", "gather-end"),
    "k-full": ("drain-first", "drain-next", "math-first", "math-next"),
    "q-full": ("first", "next"),
    "a-full": ("math",),
    "out-full": ("dq", "dk-0", "dk-1"),
    "out-empty": ("dq", "dk-0", "dk-1", "end-dq", "end-dk-0", "end-dk-1"),
}
ARRIVALS = {
    "k-full": ("gather", "gather-end", "gather-second"),
    "k-empty": ("drain-first", "drain-next", "math"),
    "out-empty": ("dq", "dk-0", "dk-1"),
    "a-full": ("math",),
    "q-empty": ("math",),
    "out-full": ("dq", "dk-0", "dk-1", "end-dq", "end-dk-0", "end-dk-1"),
}
PROXY_FENCES = ("gather", "gather-end", "gather-second", "out-dq", "out-dk-0", "out-dk-1", "a")
BY_LANE = ("k-full", "k-empty")
"""Where each lane arrives for itself; elsewhere one does for its warp."""
WARP_SYNCS = (
    "release-dq", "release-dk-0", "release-dk-1", "stage-dq", "stage-dk-0", "stage-dk-1", "end-dq", "end-dk-0", "end-dk-1",
)  # fmt: skip
GATHER_BARRIERS = ("gather", "gather-end", "gather-second")
PRODUCTS = ("s-first", "dq", "s", "dk")
"""Groups of wgmma, in the order of the text: one fence, one commit and one wait each."""
BULK_GROUPS = ("dq", "dk-0", "dk-1")

PARTS = {
    "helpers": (r"setmaxnreg\.dec", r"setmaxnreg\.inc"),
    "math": (r"setmaxnreg\.inc", ""),
}
"""Where parts of the kernel begin and end. In "math" the first tile comes first, then the loop, then what is left to
hand over."""

# Places, numbered in the order of the text.
EXPECT = r"mbarrier\.arrive\.expect_tx"
INIT = r"mbarrier\.init"
MATH_BARRIER = r"bar\.sync\s+%\w+, 128"
GATHER_BARRIER = r"bar\.sync\s+%\w+, 64"
MMA_S = r"wgmma\.mma_async.*, 0, 0;$"
MMA_DQ = r"wgmma\.mma_async.*, 0, 1;$"
MMA_DK = r"wgmma\.mma_async.*, 1, 1;$"
LAST_BULK_WAIT = r"bulk\.wait_group\s+0"
COPY = r"cp\.async\.cg\.shared\.global"
LOAD_Q = r"cp\.async\.bulk\.tensor.*\.shared::cta\.global"
LOAD_WEIGHTS = r"cp\.async\.bulk\.shared::cta\.global"
STORE_DQ = r"cp\.async\.bulk\.tensor.*\.global\.shared::cta"
SCATTER = r"cp\.reduce\.async\.bulk"
STMATRIX = r"stmatrix"
TICKET = r"atom\.global\.add"
KEYS = r"ld\.shared\.b32\s+%\w+, \[%\w+\+(240|272)\]"
ROW = r"ld\.shared\.b32\s+%\w+, \[%\w+\+224\]"
GRADS = r"ld\.shared\.v2\.b32"
WEIGHTS = r"ld\.shared\.b16"
VALID = r"setp\.lt\.u32"
GATE = r"setp\.gt\.f32"
RELU = r"max\.NaN\.f32"
STORE_DW = r"st\.global\.b(16|32)"
STAGE_DK = r"st\.shared(\.v2)?\.b32\s+\[%\w+\+1\d{5}\]"
BUTTERFLY = r"shfl\.sync\.bfly"
COUNT = r"add\.s32\s+(%\w+), \1, 1;"
COUNT_2 = r"add\.s32\s+(%\w+), \1, 2;"
BRANCH = r"^\s*@%\w+ bra"
LABEL = r"^\$L"
THRESHOLD = r"setp\.ltu\.f32"

DESCRIPTORS = {
    "s-a": (nth(MMA_S, 8, of=16), -2), "s-b": (nth(MMA_S, 8, of=16), -1), "dq-a": (nth(MMA_DQ, 0), -2),
    "dq-b": (nth(MMA_DQ, 0), -1), "dk-a": (nth(MMA_DK, 0), -2), "dk-b": (nth(MMA_DK, 0), -1),
}  # fmt: skip
"""The first wgmma that uses a descriptor, and which of its registers it is. Of S, that of the loop."""
DESCRIPTOR_PARTS = {"start": (0, 13), "lbo": (16, 29), "sbo": (32, 45), "base": (49, 51), "swizzle": (62, 63)}


def gating(pattern: str) -> Site:
    """What matches where the loop goes from S to A, between the waits for the two."""
    return between(nth(r"wgmma\.wait", 2, of=4), nth(r"wgmma\.wait", 3, of=4), pattern)


LO = last(gating(r"sub\.f32"), 32)
"""A - hi; d_weights has subtractions of its own before them."""

TO_KEY = (1, 2, 1, 1)
"""From a copy over its address and its clamped key to the shuffle of keys."""
STM_A = nth(STMATRIX, 8, part="math")
"""The first store of A; eight of d_index_q come before it."""
STAGE_0 = nth(STAGE_DK, 0, part="math")

CUT = put(r"cvt\S+(\s+%\w+), (%\w+), (%\w+);", r"prmt.b32\1, \3, \2, 0x7632;")
"""Two fp32 numbers to bf16 by dropping bits."""
HALVED = put(r"(\d+);$", lambda match: f"{int(match[1]) // 2};")
LESS = put(r"(\d+);$", lambda match: f"{int(match[1]) - 1};")
NEVER = put(r"setp\S+(\s+%\w+), .*;", r"mov.pred\1, 0;")
ALWAYS = put(r"setp\S+(\s+%\w+), .*;", r"mov.pred\1, -1;")

# fmt: off


def _order() -> Iterator[Mutant]:
    """Waits, arrivals, fences, barriers and groups."""
    for barrier, places in WAITS.items():
        for place in places:
            here, name = wait(barrier, place), f"wait-{barrier}-{place}"
            yield Mutant(f"{name}-dropped", "a wait that never waits", here, put(r"mbarrier.*;", "mov.pred P1, -1;"))
            yield Mutant(f"{name}-parity", "a wait for the other parity", parity(here), other_parity)
    for barrier, place in (("k-full", "math-next"), ("out-full", "dk-0"), ("k-empty", "gather"), ("out-empty", "dk-0")):
        yield Mutant(f"wait-{barrier}-{place}-next", "a wait at the next barrier", source(wait(barrier, place), 0), add(8))
    for barrier, place in (("k-empty", "gather"), ("k-full", "math-next"), ("k-full", "drain-next"), ("q-full", "next"), ("out-full", "dk-0"), ("out-empty", "dk-0")):
        yield Mutant(f"phase-{barrier}-{place}-slow", "a parity that changes half as often", source(wait(barrier, place), 1, 1, 2, 1, 1), add(1))
    for barrier, places in ARRIVALS.items():
        for place in places:
            yield Mutant(f"arrive-{barrier}-{place}-dropped", "a stage is not passed on", arrival(barrier, place), drop)
        if barrier in BY_LANE:
            yield Mutant(f"arrive-{barrier}-twice", "two arrivals in place of one", arrival(barrier, places[-1]), put("^(.*)$", r"\1 \1"))
        else:
            yield Mutant(f"arrive-{barrier}-all-lanes", "32 arrivals in place of one", above(arrival(barrier, places[-1]), BRANCH), drop)
        yield Mutant(f"arrive-{barrier}-next", "an arrival at the next barrier", arrival(barrier, places[0]), put(r"\[(%\w+)(\+(\d+))?\]", lambda match: f"[{match[1]}+{int(match[3] or 0) + 8}]"))
    for name, low in (("q-full", None), ("q-empty", 3), ("k-full", 32), ("k-empty", 160), ("a-full", 3), ("out-full", 3), ("out-empty", 1)):
        offset = next(number for number, barrier in BARRIERS.items() if barrier == name)
        place = every(rf"{INIT}.*\[%\w+\+{offset}\]" if offset else rf"{INIT}.*\[%\w+\],")
        if low is not None:
            yield Mutant(f"init-{name}-low", "a barrier for one warp too few", place, put(r", %\w+;", f", {low};"))
        yield Mutant(f"init-{name}-high", "a barrier for one warp too many", place, put(r", %\w+;", f", {(low or 0) + (64 if name in BY_LANE else 2)};"))
    yield Mutant("init-dropped", "a barrier that is not set up", any_of(INIT), drop)
    yield Mutant("expect-tx-lowered", "8192 bytes expected of 16512", source(every(EXPECT), 2), put("16512", "8192"))
    yield Mutant("expect-tx-raised", "16528 bytes expected of 16512", source(every(EXPECT), 2), add(16))
    yield Mutant("expect-tx-weights", "the bytes of the weights are not expected", source(every(EXPECT), 2), put("16512", "16384"))
    yield Mutant("expect-tx-dropped", "neither an arrival nor bytes", every(EXPECT), drop)
    yield Mutant("expect-tx-plain", "an arrival without bytes", every(EXPECT), put(r"\.expect_tx(.*), %\w+;", r"\1, 1;"))

    yield Mutant("fence-init-dropped", "TMA may not see the barriers", every(r"fence\.mbarrier_init"), drop)
    for place in PROXY_FENCES:
        yield Mutant(f"fence-proxy-{place}-dropped", "the async proxy may read stale bytes", named(r"fence\.proxy\.async", PROXY_FENCES, place), drop)
    yield Mutant("bar-start-dropped", "warps start before the barriers are set up", every(r"bar\.sync\s+0;"), drop)
    yield Mutant("bar-math-dropped", "A is multiplied before all warps have stored it", every(MATH_BARRIER), drop)
    yield Mutant("bar-math-shared", "both workers meet at one barrier", every(MATH_BARRIER), put(r"%\w+, 128", "1, 128"))
    yield Mutant("bar-math-half", "a barrier for two of the four warps", every(MATH_BARRIER), put("128", "64"))
    for place in GATHER_BARRIERS:
        yield Mutant(f"bar-{place}-dropped", "the gather warps are not in step", named(GATHER_BARRIER, GATHER_BARRIERS, place), drop)
    yield Mutant("bar-gather-shared", "a gather warp meets those of the math warps", named(GATHER_BARRIER, GATHER_BARRIERS, "gather"), put(r"%\w+, 64", "1, 64"))
    for place in WARP_SYNCS:
        yield Mutant(f"warp-sync-{place}-dropped", "the lanes are not in step", named(r"bar\.warp\.sync", WARP_SYNCS, place), drop)

    for n, name in enumerate(PRODUCTS):
        most = 1 if name == "s" else 0
        yield Mutant(f"wgmma-fence-{name}-dropped", "the registers may not have settled", nth(r"wgmma\.fence", n, of=4), drop)
        yield Mutant(f"wgmma-commit-{name}-dropped", "products join the next group", nth(r"wgmma\.commit", n, of=4), drop)
        yield Mutant(f"wgmma-wait-{name}-dropped", "results are used in flight", nth(r"wgmma\.wait", n, of=4), drop)
        yield Mutant(f"wgmma-wait-{name}-weak", f"{most + 1} groups may be in flight", nth(r"wgmma\.wait", n, of=4), add(1))
    yield Mutant("k-released-early", "a K stage is given back before d_index_q has been computed", nth(r"wgmma\.wait", 1, of=4), drop, also=(below(arrival("k-empty", "math"), LABEL), then("wgmma.wait_group.sync.aligned 0;")))
    for n, name in enumerate(BULK_GROUPS):
        yield Mutant(f"bulk-wait-{name}-dropped", "a stage is given back while it is read", nth(r"bulk\.wait_group\.read", n, of=3), drop)
        yield Mutant(f"bulk-wait-{name}-weak", "one copy may still read", nth(r"bulk\.wait_group\.read", n, of=3), add(1))
        yield Mutant(f"bulk-commit-{name}-dropped", "copies join the next group", nth(r"bulk\.commit_group", n, of=3), drop)
    yield Mutant("out-released-early", "a stage is given back before its copies have read it", nth(r"bulk\.wait_group\.read", 1, of=3), drop, also=(below(arrival("out-empty", "dk-0"), LABEL), then("cp.async.bulk.wait_group.read 0;")))
    yield Mutant("bulk-wait-end-dropped", "the CTA ends with copies in flight", every(LAST_BULK_WAIT), drop)
    yield Mutant("bulk-wait-end-read", "the last wait is for reads alone", every(LAST_BULK_WAIT), put("wait_group", "wait_group.read"))
    for n, place in enumerate(GATHER_BARRIERS):
        yield Mutant(f"copies-wait-{place}-dropped", "K rows are passed on before they are there", nth(r"cp\.async\.wait_group", n, of=3), drop)
        yield Mutant(f"copies-commit-{place}-dropped", "the wait does not know of these copies", nth(r"cp\.async\.commit_group", n, of=3), drop)
    yield Mutant("setmaxnreg-dec-dropped", "the helper warps keep their registers", every(r"setmaxnreg\.dec"), drop)
    yield Mutant("setmaxnreg-inc-dropped", "the math warps have too few registers", every(r"setmaxnreg\.inc"), drop)


def _operands() -> Iterator[Mutant]:
    """Descriptors and flags of wgmma."""
    for name, (first, operand) in DESCRIPTORS.items():
        for part, bits in DESCRIPTOR_PARTS.items():
            yield Mutant(f"descriptor-{name}-{part}", "bit {} to {} is wrong".format(*bits), source(first, operand), flip_bit(*bits))
    for name, about in (("s-a", "S with Q of another row"), ("s-b", "S with K of another tile"), ("dq-b", "d_index_q with K of another tile"), ("dk-b", "d_index_k with Q of another row")):
        first, operand = DESCRIPTORS[name]
        yield Mutant(f"stage-{name}", about, source(first, operand, 1, 1), then("xor.b32 R, R, 1024;"))
    for name, pattern, last in (("s-b", MMA_S, 16), ("dq-b", MMA_DQ, 8), ("dk-b", MMA_DK, 8)):
        yield Mutant(f"transposed-{name}", "B is read the other way", span(pattern, 0, last), put(r"(\d);$", lambda match: f"{1 - int(match[1])};"))
    yield Mutant("transposed-dq-a", "A is read the other way", every(MMA_DQ), put("0, 1;$", "1, 1;"))
    yield Mutant("transposed-dk-a", "A is read the other way", every(MMA_DK), put("1, 1;$", "0, 1;"))
    for name, site in (("s", nth(MMA_S, 8, of=16)), ("dk", nth(MMA_DK, 0)), ("dq", nth(MMA_DQ, 0))):
        yield Mutant(f"scale-d-{name}", "a product adds to what was there", above(site, r"setp\.ne\.b32 p,"), put("setp.*", "mov.pred p, -1;"))
    yield Mutant("scale-d-dq-tile", "d_index_q is that of the last tile alone", above(nth(MMA_DQ, 0), r"setp\.ne\.b32 p,"), put("setp.*", "mov.pred p, 0;"))
    for name, site in (("s", nth(MMA_S, *range(9, 16), of=16)), ("dk", nth(MMA_DK, 1, 2, 3)), ("dq", nth(MMA_DQ, 1, 2, 3))):
        yield Mutant(f"scale-d-lost-{name}", "a product replaces the sum", above(site, r"setp\.ne\.b32 p,"), put("setp.*", "mov.pred p, 0;"))
    for name, site in (("s", nth(MMA_S, *range(8, 16), of=16)), ("dk", nth(MMA_DK, *range(4))), ("dq", nth(MMA_DQ, *range(4)))):
        yield Mutant(f"mma-{name}-dropped", "one of the products is missing", site, drop)
    yield Mutant("mma-dq-of-dk", "d_index_q with the K of another step", source(nth(MMA_DQ, 1), -1), put("128;", "256;"))


def _two_terms() -> Iterator[Mutant]:
    """A as the sum of two bf16."""
    lo_dq, lo_dk = source(nth(MMA_DQ, 4), -2, 1), source(nth(MMA_DK, 4), -2, 1)
    yield Mutant("lo-dq-dropped", "d_index_q with one term", span(MMA_DQ, 4, 8), drop, v2=True)
    yield Mutant("lo-dk-dropped", "d_index_k with one term", span(MMA_DK, 4, 8), drop, v2=True)
    yield Mutant("lo-dq-one-dropped", "one product of four with lo is missing", nth(MMA_DQ, 4, 5, 6, 7), drop, v2=True)
    yield Mutant("hi-twice-dq", "hi in place of lo", lo_dq, put("512;", "0;"), v2=True)
    yield Mutant("hi-twice-dk", "hi in place of lo", lo_dk, put("512;", "0;"), v2=True)
    yield Mutant("terms-swapped-dk", "lo before hi", lo_dk, put("512;", "0;"), v2=True, also=(source(nth(MMA_DK, 0), -2), then("add.s64 R, R, 512;")))
    yield Mutant("lo-sign", "lo is A + hi", LO, put("sub", "add"), v2=True)
    yield Mutant("lo-is-a", "lo is A", LO, put(r"sub\.f32(\s+%\w+, %\w+), %\w+;", r"mov.b32\1;"), v2=True)
    yield Mutant("lo-stale", "one lo is that of the tile before", one_of(LO), drop, v2=True)
    yield Mutant("lo-halves", "two neighbours of lo are exchanged", nth(r"cvt\.rn\.bf16x2", *range(16), part="math"), put(r", (%\w+), (%\w+);", r", \2, \1;"), v2=True)
    yield Mutant("lo-cut", "lo is cut in place of rounded", span(r"cvt\.rn\.bf16x2", 0, 16, "math"), CUT, v2=True)
    yield Mutant("hi-cut", "hi is cut in place of rounded, and lo makes up for it", span(r"cvt\.rn\.bf16\.f32", 32, 64, "math"), put(r"cvt\S+(\s+)(%\w+), (%\w+);", r"mov.b32\1{_, \2}, \3;"), v2=True)
    yield Mutant("hi-zero", "one hi is 0, and lo makes up for it", nth(r"cvt\.rn\.bf16\.f32", *range(32, 64), of=64, part="math"), put(r"cvt\S+(\s+%\w+), %\w+;", r"mov.b16\1, 0;"), v2=True)
    yield Mutant("lo-on-hi", "lo is stored over hi", source(nth(STMATRIX, 12, 13, 14, 15, part="math"), 0), add(-8192), v2=True)
    yield Mutant("lo-words", "lo of the next four columns", nth(STMATRIX, 12, 13, 14, 15, part="math"), put(r"\{(%\w+), (%\w+), (%\w+), (%\w+)\}", r"{\3, \4, \1, \2}"), v2=True)


def _addresses() -> Iterator[Mutant]:
    """Swizzles, pitches, offsets and coordinates."""
    first, second = nth(COPY, 0, of=48), nth(COPY, 32, of=48)
    yield Mutant("gather-swizzle", "chunks do not lie where the MMA looks", source(nth(COPY, 0, 1, 2, 3), 0, 1, 2, 2, 1, 1), put("xor", "or"))
    yield Mutant("gather-second-swizzle", "chunks do not lie where the MMA looks", source(nth(COPY, 32, 33, 34, 35), 0, 1, 2, 1, 1), put("xor", "or"))
    yield Mutant("gather-stage", "K stages overlap", source(first, 0, 1, 1, 2, 1), put("14;", "13;"))
    yield Mutant("gather-line", "the lines of a row overlap", source(first, 0, 1, 1, 2, 2, 1), put("4096", "2048"))
    yield Mutant("gather-offset", "a pair of rows lands on the next one", source(nth(COPY, *range(16)), 0), add(256))
    yield Mutant("gather-second-half", "a pair of the second half lands in the first", source(nth(COPY, *range(32, 48)), 0), add(-4096))
    yield Mutant("gather-shuffle", "a pair of rows gets other keys", source(nth(COPY, *range(4, 16)), *TO_KEY, 2), put(r"(\d+);", lambda match: f"{int(match[1]) ^ 4};"))
    yield Mutant("gather-second-shuffle", "a pair of rows gets other keys", source(nth(COPY, *range(36, 48)), *TO_KEY, 2), put(r"(\d+);", lambda match: f"{int(match[1]) ^ 4};"))
    yield Mutant("gather-second-keys", "the second half of a tile gets the keys of the first", source(second, *TO_KEY, 1), put(r"\+368", "+240"))
    yield Mutant("gather-second-stage", "the keys of another tile", source(second, *TO_KEY, 1, 1, 2, 1), put("8;", "7;"))
    yield Mutant("gather-pitch", "K rows of 128 bytes", source(nth(COPY, *range(16), *range(32, 48)), 1, 2), put("256", "128"))
    yield Mutant("gather-copy-dropped", "a pair of rows is not fetched", nth(COPY, *range(16), *range(32, 48)), drop)
    yield Mutant("stmatrix-swizzle", "a chunk of A and d_index_q does not lie where it is looked for", source(nth(STMATRIX, *range(8, 12), part="math"), 0, 1, 2, 1, 2, 1), put("xor", "or"))
    yield Mutant("stmatrix-pitch", "lines of A overlap", source(STM_A, 0, 1, 2, 1, 1), put("6;", "5;"))
    yield Mutant("stmatrix-worker", "the A of both workers overlap", source(STM_A, 0, 1, 1, 2), LESS)
    yield Mutant("stmatrix-order", "two fragments of A are exchanged", nth(STMATRIX, *range(8, 12), part="math"), put(r"\{(%\w+), (%\w+)", r"{\2, \1"))
    yield Mutant("stmatrix-dropped", "a chunk of A is not stored", nth(STMATRIX, *range(8, 12), part="math"), drop)
    yield Mutant("stmatrix-dq-order", "two fragments of d_index_q are exchanged", nth(STMATRIX, *range(8), part="math"), put(r"\{(%\w+), (%\w+)", r"{\2, \1"))
    yield Mutant("stmatrix-dq-line", "the lines of d_index_q overlap", source(nth(STMATRIX, *range(4, 8), part="math"), 0), add(-8192))
    yield Mutant("stmatrix-dq-stage", "stages of d_index_q overlap", source(nth(STMATRIX, 0, part="math"), 0, 1, 1, 2), put("14;", "13;"))
    yield Mutant("dk-pitch", "rows of d_index_k overlap", source(STAGE_0, 0, 1, 1, 2, 2, 1), put("9;", "8;"))
    yield Mutant("dk-warp", "the rows of warps overlap", source(STAGE_0, 0, 1, 1, 2, 1), put("12;", "11;"))
    yield Mutant("dk-stage", "stages of d_index_k overlap", source(STAGE_0, 0, 1, 2), put("14;", "13;"))
    yield Mutant("dk-stage-same", "both halves of a tile go to one stage", source(wait("out-empty", "dk-1"), 0, 1, 2, 1, 1), put("1;$", "0;"))
    yield Mutant("dk-column", "a pair of columns is staged in the next one's place", nth(STAGE_DK, *range(4), part="math"), put(r"\+(\d+)\]", lambda match: f"+{int(match[1]) + 32}]"))
    yield Mutant("dk-turn", "a row goes through its columns in a wrong order", nth(r"xor\.b32\s+%\w+, %\w+, (32|64|96);", *range(6), part="math"), put(r"(\d+);", lambda match: f"{int(match[1]) % 96 + 32};"))
    yield Mutant("dk-odd", "neighbours are exchanged in the wrong rows", nth(r"setp\.eq\.b32\s+%\w+, %\w+, 0;", 0, 1, part="math"), put("eq", "ne"))
    yield Mutant("dk-high", "halves are exchanged in the wrong rows", nth(r"setp\.gt\.u32\s+%\w+, %\w+, 1;", 0, 1, part="math"), put("1;", "2;"))
    yield Mutant("dk-order", "two columns of d_index_k are exchanged", nth(r"st\.shared\.v2\.b32\s+\[%\w+\+1\d{5}\]", *range(8), part="math"), put(r"\{(%\w+), (%\w+)\}", r"{\2, \1}"))
    yield Mutant("dk-store-dropped", "a pair of columns is not staged", nth(STAGE_DK, *range(56), part="math"), drop)
    yield Mutant("tma-box", "the second half of Q is the first", nth(LOAD_Q, 1, of=2), put(r"\{64,", "{0,"))
    yield Mutant("tma-row", "Q of another row", source(nth(LOAD_Q, 0, of=2), 2), put("6;", "5;"))
    yield Mutant("tma-stage", "Q stages overlap", source(nth(LOAD_Q, 0, of=2), 0, 1, 2), put("14;", "13;"))
    yield Mutant("tma-target", "the second half of Q lands on the first", source(nth(LOAD_Q, 1, of=2), 0), put("11264", "3072"))
    yield Mutant("tma-barrier", "half of Q is counted elsewhere", nth(LOAD_Q, 1, of=2), put(r"\[(%\w+)\];", r"[\1+8];"))
    yield Mutant("tma-dropped", "half of Q is not fetched", nth(LOAD_Q, 0, 1, of=2), drop)
    yield Mutant("weights-short", "half of the weights are fetched", every(LOAD_WEIGHTS), put("128,", "64,"))
    yield Mutant("weights-row", "weights of another row", source(every(LOAD_WEIGHTS), 1, 2), put("128;", "64;"))
    yield Mutant("weights-stage", "stages of weights overlap", source(every(LOAD_WEIGHTS), 0, 1, 2), put("7;", "6;"))
    yield Mutant("weights-head", "one head has the weight of another", nth(WEIGHTS, 1, 3, of=4), add(-16))
    yield Mutant("weights-read-stage", "weights of the row before", source(nth(WEIGHTS, 2, of=4), 1, 1, 2), put("7;", "6;"))
    yield Mutant("weights-stale", "weights of the first row", below(nth(WEIGHTS, 2, 3, of=4), r"cvt\.f32\.bf16"), drop)
    yield Mutant("grads-offset", "gradients of the next slots", nth(GRADS, *range(8, 15), of=16), add(32))
    yield Mutant("grads-lane", "gradients of other slots", source(nth(GRADS, 8, of=16), 2, 2, 2), put("3;", "2;"))
    yield Mutant("grads-stage", "gradients of another tile", source(nth(GRADS, 8, of=16), 2, 2, 1), put("8;", "7;"))
    yield Mutant("scatter-short", "half a row is added", any_of(SCATTER), put("512;", "256;"))
    yield Mutant("scatter-store", "a row replaces the sum", any_of(SCATTER), put(r"reduce\.(.*)\.add\.f32", r"\1"))
    yield Mutant("scatter-dropped", "a row is not added", any_of(SCATTER), drop)
    yield Mutant("scatter-all-lanes", "eight rows are added by every lane", below(above(nth(SCATTER, 0, 8, 16, 24, of=32), r"elect\.sync"), BRANCH), drop)
    yield Mutant("scatter-pitch", "rows of 256 bytes", source(any_of(SCATTER), 0, 2), put("512", "256"))
    yield Mutant("scatter-source", "a row goes to the key of another", source(any_of(SCATTER), 1), add(-512))
    yield Mutant("scatter-part", "rows of the other part", source(nth(SCATTER, 0, of=32), 1, 1, 1, 2), put("13;", "12;"))
    yield Mutant("scatter-stage", "rows of the other stage", source(nth(SCATTER, 0, 16, of=32), 1, 1, 2), put("14;", "13;"))
    yield Mutant("scatter-lane", "keys of the other part", source(below(wait("out-full", "dk-0"), r"shfl\.sync\.idx"), 2), put("4;", "3;"))
    yield Mutant("store-dq-row", "d_index_q of another row", source(nth(STORE_DQ, 0, of=2), 1), put("6;", "5;"))
    yield Mutant("store-dq-box", "the second half of d_index_q is stored over the first", nth(STORE_DQ, 1, of=2), put(r"\{64,", "{0,"))
    yield Mutant("store-dq-source", "the first half of d_index_q is stored twice", source(nth(STORE_DQ, 1, of=2), 2), add(-8192))
    yield Mutant("store-dq-dropped", "half of d_index_q is not stored", nth(STORE_DQ, 0, 1, of=2), drop)
    yield Mutant("store-dq-both", "both drain warps store d_index_q", above(above(nth(STORE_DQ, 0, of=2), r"elect\.sync"), BRANCH), drop)


def _ids() -> Iterator[Mutant]:
    """Ids and keys, and what invalid ones do."""
    slots = {"slot-0": (240, 1264), "slot-1": (368, 1392)}
    for n, (name, (keys, grads)) in enumerate(slots.items()):
        key = every(rf"st\.shared\.b32\s+\[%\w+\+{keys}\], %")
        grad = every(rf"st\.shared\.b32\s+\[%\w+\+{grads}\], %")
        yield Mutant(f"id-limit-{name}", "the id after the last is taken for valid", nth(VALID, n, of=2, part="helpers"), put(r"lt\.u32", "le.u32"))
        yield Mutant(f"id-negative-{name}", "negative ids are taken for valid", nth(VALID, n, of=2, part="helpers"), put(r"lt\.u32", "lt.s32"))
        yield Mutant(f"id-offset-{name}", "the ids' batch element is left out", source(key, 1, 1), put(r", %\w+;", ", 0;"))
        yield Mutant(f"id-unmasked-{name}", "an invalid id is a key", source(key, 1), put(r"selp\.b32(\s+%\w+, %\w+), -1, %\w+;", r"mov.b32\1;"))
        yield Mutant(f"grad-unmasked-{name}", "an invalid slot has a gradient", source(grad, 1), put(r"selp\.f32(\s+%\w+, %\w+),.*;", r"mov.b32\1;"))
        yield Mutant(f"grad-scale-{name}", "sm_scale is left out", source(grad, 1, 1), put(r"mul\.f32(\s+%\w+), %\w+, ", r"mov.b32\1, "))
        yield Mutant(f"key-store-{name}-dropped", "keys of another tile", key, drop)
        yield Mutant(f"grad-store-{name}-dropped", "gradients of another tile", grad, drop)
    key = every(r"st\.shared\.b32\s+\[%\w+\+240\], %")
    yield Mutant("id-offset-rows", "a row counts as a batch element", source(key, 1, 1, 2, 1, 1), put(r"div\.s32(\s+%\w+, %\w+), %\w+;", r"mov.b32\1;"))
    yield Mutant("row-store-dropped", "a tile of another row", every(r"st\.shared\.b32\s+\[%\w+\+224\], %"), drop)
    yield Mutant("end-row-dropped", "the end is not told", every(r"st\.shared\.b32\s+\[%\w+\+224\], -1"), drop)
    yield Mutant("end-row-0", "the end is a tile of row 0", every(r"st\.shared\.b32\s+\[%\w+\+224\], -1"), put("-1;", "0;"))
    yield Mutant("end-keys-0", "the tile after the last has a key", every(r"st\.shared\.b32\s+\[%\w+\+(240|368)\], -1"), put("-1;", "0;"))
    yield Mutant("end-grads-dropped", "the tile after the last has gradients", every(r"st\.shared\.b32\s+\[%\w+\+(1264|1392)\], 0"), drop)
    for name, copies in (("", range(16)), ("-second", range(32, 48))):
        mine = span(COPY, copies[0], copies[-1] + 1)
        one = nth(COPY, *copies, of=48)
        yield Mutant(f"gather{name}-fill", "invalid slots get a key in place of zeros", source(mine, 2), put("0, 16", "16, 16"))
        yield Mutant(f"gather{name}-fill-key-0", "key 0 is taken for invalid", source(mine, 2, 1), put(r"lt\.s32", "le.s32"))
        yield Mutant(f"gather{name}-clamp", "the key -1 is not clamped to 0", source(one, 1, 2, 1), put(r"max\.s32(.*), 0;", r"mov.b32\1;"))
    yield Mutant("prefetch-row", "the next row's first ids are this row's", source(above(nth(r"ld\.global\.b32", 4, of=8, part="helpers"), r"setp\.ge\.s32"), 1), put(r"selp\.b32(\s+%\w+), %\w+, (%\w+), %\w+;", r"mov.b32\1, \2;"))
    yield Mutant("prefetch-slot", "ids or gradients of the other slots", nth(r"ld\.global\.b32", 6, 7, of=8, part="helpers"), put(r"\+128", ""))
    yield Mutant("prefetch-dropped", "ids or gradients of the last tile", nth(r"ld\.global\.b32", 4, 5, 6, 7, of=8, part="helpers"), drop)
    yield Mutant("keys-halves", "the halves of a tile exchange their keys", nth(KEYS, 2, of=4), put("240", "272"), also=(nth(KEYS, 3, of=4), put("272", "240")))
    yield Mutant("keys-stale-0", "half a tile goes to the keys of the tile before", nth(KEYS, 2, of=4), drop)
    yield Mutant("keys-stale-1", "half a tile goes to the keys of the first", below(arrival("out-empty", "dk-1"), r"mov\.b32\s+%\w+, %\w+;"), drop)
    yield Mutant("keys-lane", "rows go to keys of other slots", source(nth(KEYS, 0, of=4), 1, 2, 2, 1, 1), put("48;", "24;"))
    yield Mutant("keys-stage", "keys of another tile", source(nth(KEYS, 2, of=4), 1, 2, 1), then("xor.b32 R, R, 256;"))
    for n, name in ((0, "gather-second"), (2, "drain"), (4, "math")):
        yield Mutant(f"row-stage-{name}", "the row of another tile", source(nth(ROW, n, of=5), 1, 2), then("xor.b32 R, R, 4;"))
    yield Mutant("scatter-invalid", "an invalid slot is scattered", above(any_of(SCATTER), r"setp\.lt\.s32"), NEVER)
    yield Mutant("scatter-never", "a slot is not scattered", above(any_of(SCATTER), r"setp\.lt\.s32"), ALWAYS)
    yield Mutant("scatter-key-0", "key 0 is taken for invalid", above(every(SCATTER), r"setp\.lt\.s32"), put(r"lt\.s32", "le.s32"))
    yield Mutant("scatter-key", "a row goes to the key after its own", above(any_of(SCATTER), r"mul\.wide"), then("add.s64 R, R, 512;"))


def _rows() -> Iterator[Mutant]:
    """Which rows a worker takes, and what is counted along with them."""
    for n, name in enumerate(("first", "next")):
        yield Mutant(f"ticket-{name}-dropped", "a row is not drawn", nth(TICKET, n, of=2), drop, v2=True)
        yield Mutant(f"ticket-{name}-twice", "a row is drawn twice, and one left out", nth(TICKET, n, of=2), put(r"(atom.*;)", r"\1 \1"), v2=True)
        yield Mutant(f"ticket-{name}-skips", "a row is left out", nth(TICKET, n, of=2), put(", 1;", ", 2;"), v2=True)
        yield Mutant(f"ticket-{name}-all-lanes", "32 rows are drawn", above(nth(TICKET, n, of=2), BRANCH), drop, v2=True)
        yield Mutant(f"ticket-{name}-lane", "the ticket of a lane that has none", nth(r"shfl\.sync\.idx\.b32\s+%\w+, %\w+, 0, 31", n, of=2, part="helpers"), put(", 0, 31", ", 1, 31"), v2=True)
    yield Mutant("ticket-base", "drawn rows begin among those that go by number", above(nth(TICKET, 1, of=2), r"shl\.b32"), put("1;", "0;"), v2=True)
    yield Mutant("ticket-not-zeroed", "the counter holds what was there", nth(r"st\.global\.b32", 0, of=1), drop, "score_grad", v2=True)
    yield Mutant("ticket-one", "the counter begins with 1", nth(r"st\.global\.b32", 0, of=1), put("0;", "1;"), "score_grad", v2=True)
    yield Mutant("ticket-zeroed-by-all", "every thread zeroes the counter", above(nth(r"st\.global\.b32", 0, of=1), BRANCH), drop, "score_grad", v2=True)
    yield Mutant("row-worker", "both workers of a CTA begin with one row", nth(r"mad\.lo\.s32", 0, of=1, part="helpers"), put(r"mad\.lo\.s32(\s+%\w+), .*, (%\w+);", r"mov.b32\1, \2;"))
    counts = {
        "gather-tile": below(arrival("k-full", "gather"), COUNT), "gather-row": below(below(arrival("k-full", "gather"), COUNT), COUNT),
        "gather-second": below(arrival("k-full", "gather-second"), COUNT), "drain-tile": above(wait("k-full", "drain-next"), COUNT),
        "drain-dq": below(arrival("out-empty", "dq"), COUNT), "drain-dk": below(arrival("out-empty", "dk-1"), COUNT_2),
        "math-tile": above(wait("k-full", "math-next"), COUNT), "math-dq": below(arrival("out-full", "dq"), COUNT),
        "math-dk": below(arrival("out-full", "dk-1"), COUNT_2),
    }  # fmt: skip
    for name, site in counts.items():
        yield Mutant(f"count-{name}", "a stage counts for two, or two for one", site, put(r"(\d);$", lambda match: f"{3 - int(match[1])};"))
    yield Mutant("drain-last", "d_index_q is looked for a tile early", above(wait("out-full", "dq"), r"setp\.ne\.b32\s+%\w+, %\w+, [1-9];"), LESS)
    yield Mutant("math-last", "a row ends a tile early", above(wait("k-full", "math-next"), r"setp\.eq\.b32\s+%\w+, %\w+, [1-9];"), LESS)
    yield Mutant("math-last-dw", "d_weights is stored a tile early", above(nth(r"wgmma\.fence", 3, of=4), r"setp\.ne\.b32\s+%\w+, %\w+, [1-9];"), LESS)
    next_q = below(nth(ROW, 4, of=5), r"selp\.b32")
    yield Mutant("math-next-q", "Q of a row after the last is waited for", next_q, put(r"selp\.b32(\s+%\w+, %\w+), .*;", r"mov.b32\1;"))
    yield Mutant("math-next-q-early", "every tile takes Q of the row after", below(next_q, r"selp\.b32"), put(r"selp\.b32(\s+%\w+, %\w+), .*;", r"mov.b32\1;"))
    yield Mutant("dq-before-first", "d_index_q is handed over before the first row", above(arrival("q-empty", "math"), r"or\.pred"), put(r"or\.pred(\s+%\w+, %\w+), %\w+;", r"mov.pred\1;"))
    yield Mutant("q-release-stage", "the Q of this row is given back", above(arrival("q-empty", "math"), r"not\.b32"), put(r"not\.b32", "mov.b32"))
    yield Mutant("dk-before-first", "d_index_k is handed over before the first tile", below(nth(r"wgmma\.commit", 1, of=4), r"setp\.lt\.s32"), NEVER)


def _values() -> Iterator[Mutant]:
    """Arithmetic, and which lanes it is for."""
    loop = range(32, 64)
    yield Mutant("gate-zero", "a score of zero passes a gate", nth(GATE, *loop, of=64, part="math"), put(r"gt\.f32", "ge.f32"))
    yield Mutant("gate-open", "a gate lets every score through", nth(GATE, *loop, of=64, part="math"), ALWAYS)
    yield Mutant("gate-relu", "d_weights takes the other half", nth(RELU, *loop, of=64, part="math"), put("max", "min"))
    yield Mutant("gate-weight", "a weight is left out", nth(r"mul\.f32", *loop, of=64, part="math"), put(r"mul\.f32(\s+%\w+, %\w+), %\w+;", r"mov.b32\1;"))
    yield Mutant("dq-cut", "d_index_q is cut in place of rounded", between(wait("out-empty", "dq"), arrival("out-full", "dq"), r"cvt\.rn\.bf16x2"), CUT)
    yield Mutant("dq-cut-once", "one of 32 columns of d_index_q is cut", one_of(between(wait("out-empty", "dq"), arrival("out-full", "dq"), r"cvt\.rn\.bf16x2")), CUT)
    yield Mutant("dq-columns", "two columns of d_index_q are exchanged", one_of(between(wait("out-empty", "dq"), arrival("out-full", "dq"), r"cvt\.rn\.bf16x2")), put(r", (%\w+), (%\w+);", r", \2, \1;"))
    yield Mutant("d-weights-butterfly", "a step of a sum over lanes doubles", nth(BUTTERFLY, 1, 3, 5, 7, of=8), put(r", \d+, 31", ", 0, 31"))
    yield Mutant("d-weights-lane-order", "the lanes are summed in another order", span(BUTTERFLY, 0, 2), put(", 1, 31", ", 2, 31"), also=(span(BUTTERFLY, 2, 4), put(", 2, 31", ", 1, 31")))
    yield Mutant("d-weights-part", "a part of a tile's sum is left out", one_of(gating(r"add\.f32"), 0, 1, 2, 6, 7, 8, of=12), put(r", (%\w+), (%\w+);", r", \1, \1;"))
    yield Mutant("d-weights-tile", "a tile's sum is forgotten", below(nth(r"wgmma\.wait", 3, of=4), r"mov\.b32\s+%\w+, %\w+;"), drop)
    yield Mutant("d-weights-lost", "what rounding loses of a sum is forgotten", one_of(gating(r"add\.f32"), 5, 11, of=12), drop)
    yield Mutant("d-weights-lost-sign", "what rounding loses of a sum is lost twice", one_of(gating(r"add\.f32"), 5, 11, of=12), put(r"add(.*%\w+, %\w+, %\w+;)", r"sub\1"))
    yield Mutant("d-weights-cut-scores", "what the tensor cores cut is not made up for", one_of(between(nth(r"wgmma\.commit", 3, of=4), nth(r"wgmma\.wait", 2, of=4), r"fma\.rn\.f32"), 0, 1, of=2), put(r"fma\S+(\s+%\w+), (%\w+), .*;", r"mov.b32\1, \2;"))
    yield Mutant("d-weights-reset", "a row's sum goes on in the next", below(nth(STORE_DW, 1, of=2, part="math"), r"mov\.b32\s+%\w+, 0f00000000"), drop)
    yield Mutant("d-weights-lanes", "all four lanes of a head store it", above(nth(STORE_DW, 0, of=2, part="math"), r"setp\.ne\.b32"), NEVER)
    yield Mutant("d-weights-head", "the second head is stored over the first", nth(STORE_DW, 1, of=2, part="math"), put(r"\+\d+", ""))
    yield Mutant("d-weights-row", "d_weights of another row", source(nth(STORE_DW, 0, 1, of=2, part="math"), 0, 2, 1), HALVED)
    yield Mutant("d-weights-column", "heads are stored on each other", source(nth(STORE_DW, 0, 1, of=2, part="math"), 0, 2, 2), HALVED)
    yield Mutant("d-weights-dropped", "the store is missing", nth(STORE_DW, 0, 1, of=2, part="math"), drop)

    for name, number in (("low", "1A"), ("high", "1C")):
        yield Mutant(f"threshold-{name}", "exp(-100) is off by one subnormal", any_of(THRESHOLD), put("1B;", f"{number};"), "score_grad")
    yield Mutant("threshold-equal", "a probability next to exp(-100) is cut", any_of(THRESHOLD), put("ltu", "leu"), "score_grad")
    yield Mutant("threshold-nan", "a NaN passes the threshold", any_of(THRESHOLD), put("ltu", "lt"), "score_grad")
    yield Mutant("target-clamp", "the target is not held above exp(-100)", any_of(RELU), put("0f0000001B", "0f00000000"), "score_grad")
    yield Mutant("score-grad-butterfly", "a step of the sum over lanes doubles", any_of(BUTTERFLY), put(r", \d+, 31", ", 0, 31"), "score_grad")
    yield Mutant("score-grad-dropped", "the store is missing", nth(r"st\.global\.v4", 0), drop, "score_grad")
    yield Mutant("zero-dropped", "the accumulator is not zeroed", nth(r"st\.global\.v4", -1), drop, "score_grad")
    yield Mutant("zero-step", "every other row is zeroed", source(nth(r"add\.s32", -1), 2), put("3;", "4;"), "score_grad")
    yield Mutant("zero-for-ever", "the loop over rows stands still", nth(r"add\.s32", -1), drop, "score_grad")
    yield Mutant("round-order", "two columns are exchanged", any_of(r"cvt\.rn\.bf16x2"), put(r", (%\w+), (%\w+);", r", \2, \1;"), "round_d_index_k")
    yield Mutant("round-cut", "d_index_k is cut in place of rounded", any_of(r"cvt\.rn\.bf16x2"), CUT, "round_d_index_k")
    yield Mutant("round-rows", "the last row is not rounded", every(r"setp\.lt\.s32"), put("setp.*(%p\\w+),.*", r"mov.pred \1, 0;"), "round_d_index_k")


# fmt: on
MUTANTS = (*_order(), *_operands(), *_two_terms(), *_addresses(), *_ids(), *_rows(), *_values())

ZERO_ROW = "the K row of an invalid slot is zero, so that its scores are zero and its gates closed"
ELECTED = "the lane that gives the stage back is the one that has issued the copies, and it has waited for them itself"
EQUIVALENT = {
    "wait-k-full-drain-next-dropped": "the drain warps have waited for the second half of the tile before, which the math "
    "warps stage after they have waited for the same keys",
    "warp-sync-release-dq-dropped": ELECTED,
    "warp-sync-release-dk-0-dropped": ELECTED,
    "warp-sync-release-dk-1-dropped": ELECTED,
    "wgmma-fence-s-dropped": "the fence before d_index_q lies between the last use of S and its next product",
    "bulk-wait-end-dropped": "every copy has been waited for until it had read, and the end of the grid completes the writes",
    "bulk-wait-end-read": "every copy has been waited for until it had read, and the end of the grid completes the writes",
    "descriptor-s-a-lbo": "the leading offset is not used where an operand is K-major and swizzled",
    "descriptor-s-b-lbo": "the leading offset is not used where an operand is K-major and swizzled",
    "descriptor-dq-a-lbo": "the 64 slots of A are one swizzled line, so there is no second one to lead to",
    "descriptor-dk-a-lbo": "the 64 slots of A are one swizzled line, so there is no second one to lead to",
    "terms-swapped-dk": "hi and lo are added in the other order",
    "grad-unmasked-slot-0": ZERO_ROW,
    "grad-unmasked-slot-1": ZERO_ROW,
    "end-keys-0": "what is computed of the tile after the last goes nowhere",
    "end-grads-dropped": "what is computed of the tile after the last goes nowhere, and its stage has been written before",
    "gather-clamp": "a copy of zero bytes reads nothing, whatever its address",
    "gather-second-clamp": "a copy of zero bytes reads nothing, whatever its address",
    "d-weights-lane-order": "four lanes are summed as (0 + 2) + (1 + 3) in place of (0 + 1) + (2 + 3)",
}
"""Mutants that, by reading the code, compute the same as the plan for all finite inputs but for the rounding of sums,
and why."""

EQUIVALENT_FROM_3_TILES = {
    "wait-q-empty-gather-dropped": "before it fetches Q for a row, the gather warp has waited for K stages that are given "
    "back only after the last product with the Q that was there",
}
"""The same, for plans with three tiles a row or more. With two it is a race, and noticed."""

MISSED = {
    "d-weights-lost": "the error of d_weights is up to 1.1e-7 in place of 1.0e-7, and 1e-6 is allowed",
    "d-weights-lost-sign": "the error of d_weights is up to 1.3e-7 in place of 1.0e-7, and 1e-6 is allowed",
    "d-weights-cut-scores": "the error of d_weights is up to 1.4e-7 in place of 1.0e-7, and 1e-6 is allowed",
    "target-clamp": "a target below exp(-100) counts as itself: the gradient changes by less than 1e-43",
    "threshold-nan": "only a NaN among the probabilities tells the two apart, and no case has one",
    "setmaxnreg-dec-dropped": "registers are not counted: by the ISA the math warps would wait for theirs",
    "setmaxnreg-inc-dropped": "registers are not counted: by the ISA the math warps have none beyond their share",
}
"""Mutants that are wrong and that nothing notices, and why."""

MISSED_FROM_3_TILES = {
    "init-q-empty-low": "its phases run ahead by one for every three uses of a stage, which with two stages stops the worker "
    "at its seventh row; no case has so many. What is overwritten with two tiles a row is ordered by K stages here",
}
"""The same, for plans with three tiles a row or more. With two it is a race, and noticed."""


def mutants_of(plan: PlanFile) -> list[Mutant]:
    """Those whose place is in this plan."""
    return [mutant for mutant in MUTANTS if not mutant.v2 or plan.config["backend"] != "default"]


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
    """Print what noticed each mutant, for several seeds, and the totals.

    Where a seed chooses among places a mutant may come out as it did for another seed; it is judged and counted once.
    """
    from dsa_planner import envelope
    from dsa_planner.compiler import compile_plan

    parser = argparse.ArgumentParser(description="Print what verify notices of plans with one fault each.")
    parser.add_argument("names", nargs="*", help="mutants; all of them by default")
    parser.add_argument("--backend", default="sm90_v2")
    parser.add_argument("--topk", default="128,256")
    parser.add_argument("--seeds", type=int, default=1, help="places to try, where several are alike")
    parser.add_argument("--no-detector", action="store_true", help="look for no races, as a plain emulator would")
    arguments = parser.parse_args()
    d_weights = "bf16" if arguments.backend == "default" else "fp32"
    totals: Counter[str] = Counter()
    schedules: Counter[str] = Counter()
    for topk in map(int, arguments.topk.split(",")):
        asked = {"arch": "sm_90a", "backend": arguments.backend, "topk": topk, "d_weights": d_weights}
        plan = compile_plan(envelope.plan_config(asked)).plan
        judged: set[bytes] = set()
        for seed in range(arguments.seeds):
            for mutant in mutants_of(plan):
                if arguments.names and mutant.name not in arguments.names:
                    continue
                changed = mutate(plan, mutant, seed)
                if changed.sections["ptx"] in judged:
                    continue
                judged.add(changed.sections["ptx"])
                start = time.perf_counter()
                verdict = judge(changed, detect=not arguments.no_detector)
                seconds = time.perf_counter() - start
                totals[verdict.by or "survived"] += 1
                schedules[verdict.schedule] += verdict.by is not None
                print(
                    f"{topk:4} {seed:2} {mutant.name:34} {verdict.by or 'survived':9} {verdict.schedule:9} "
                    f"{seconds:5.2f} s  {verdict.problem[:100]}",
                    flush=True,
                )
    print(", ".join(f"{count} {by}" for by, count in totals.most_common()), "of", sum(totals.values()))
    print(", ".join(f"{count} {schedule}" for schedule, count in schedules.most_common() if count))


if __name__ == "__main__":
    main()
