"""A race of the kind that persistent kernels have, made on purpose: the machine has to report it.

Three warps work on rows of tiles. The producer stages each row's ids and gradients in one of two slots and its keys tile
by tile; the multiplier turns a tile of keys into a tile of sums; the drain adds gradient * sum to the output at the id.
Full and empty mbarriers guard the keys and the sums, two stages each. Nothing guards the slots: row i + 2 is staged
where row i was, and only the chain of waits for tiles keeps the producer from being too early. With two tiles a row it
is too short, and the drain may read the ids of row i + 2. Five tiles are enough: when the producer starts a row, the
multiplier may be two tiles behind, the drain two more, and of one more tile it may have yet to read the ids.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("numpy")
pytest.importorskip("ziglang")

import numpy as np

from dsa_planner.kernels.ptx.decode import decode
from dsa_planner.kernels.ptx.machine import Buffer, Machine, Result, Schedule, pack_parameters
from dsa_planner.kernels.ptx.parser import parse

ROWS, KEYS = 8, 50
K_FULL, K_EMPTY, SUM_FULL, SUM_EMPTY, SLOT_FREE = range(0, 80, 16)  # bytes; two mbarriers each
WRONG = ("random:2", "random:3", "late:2", "late:3")
"""Schedules under which two tiles a row give wrong sums."""


def kernel(tiles: int, guarded: bool) -> str:
    """PTX of the three warps, for rows of so many tiles of 32; ``guarded`` adds the barrier that is missing."""
    bytes_a_tile, half = 128, 128 * tiles
    waits = 0

    def wait(barriers: int, counter: str, empty: bool) -> str:
        """Wait for a stage: the counter's lowest bit is the stage, the next one its phase."""
        nonlocal waits
        waits += 1
        return f"""
        and.b32 %stage, {counter}, 1;
        shr.u32 %phase, {counter}, 1;
        {"xor.b32 %phase, %phase, 1;" if empty else ""}
        and.b32 %phase, %phase, 1;
        mad.lo.u32 %barrier, %stage, 8, %barriers;
WAIT_{waits}:
        mbarrier.try_wait.parity.shared::cta.b64 %done, [%barrier+{barriers}], %phase;
        @!%done bra WAIT_{waits};"""

    def arrive(barriers: int) -> str:
        return f"mbarrier.arrive.shared::cta.b64 _, [%barrier+{barriers}];"

    def next_tile(label: str) -> str:
        return f"""
        add.u32 %count, %count, 1;
        add.u32 %tile, %tile, 1;
        setp.lt.u32 %more, %tile, {tiles};
        @%more bra {label}_TILE;
        add.u32 %row, %row, 1;
        setp.lt.u32 %more, %row, %rows;
        @%more bra {label}_ROW;
        ret;"""

    return f"""
.version 8.0
.target sm_90a
.address_size 64
.visible .entry persistent(.param .u64 ids, .param .u64 grads, .param .u64 keys, .param .u64 out, .param .u32 rows)
.reqntid 96
{{
        .reg .pred %more, %done, %mine;
        .reg .b32 %lane, %warp, %rows, %row, %tile, %count, %stage, %phase, %barrier, %barriers, %place, %index, %id;
        .reg .b32 %slot;
        .reg .f32 %value, %grad;
        .reg .b64 %ids, %grads, %keys, %out, %offset, %from;
        .shared .align 8 .b8 barriers[80];
        .shared .align 16 .b8 metadata[{4 * half}];
        .shared .align 16 .b8 key_tiles[{2 * bytes_a_tile}];
        .shared .align 16 .b8 sum_tiles[{2 * bytes_a_tile}];

        ld.param.u64 %ids, [ids];
        ld.param.u64 %grads, [grads];
        ld.param.u64 %keys, [keys];
        ld.param.u64 %out, [out];
        ld.param.u32 %rows, [rows];
        mov.u32 %warp, %tid.x;
        and.b32 %lane, %warp, 31;
        shr.u32 %warp, %warp, 5;
        mov.u32 %barriers, barriers;
        setp.lt.u32 %mine, %warp, 1;
        setp.gt.u32 %done, %lane, 9;
        @!%mine bra READY;
        @%done bra READY;
        mad.lo.u32 %barrier, %lane, 8, %barriers;
        mbarrier.init.shared::cta.b64 [%barrier], 32;
READY:
        bar.sync 0;
        mov.u32 %row, 0;
        mov.u32 %count, 0;
        setp.eq.u32 %mine, %warp, 1;
        @%mine bra MULTIPLIER_ROW;
        setp.eq.u32 %mine, %warp, 2;
        @%mine bra DRAIN_ROW;

PRODUCER_ROW:
        {wait(SLOT_FREE, "%row", True) if guarded else ""}
        and.b32 %slot, %row, 1;
        mov.u32 %place, metadata;
        mad.lo.u32 %place, %slot, {2 * half}, %place;
        mad.lo.u32 %place, %lane, 4, %place;
        mov.u32 %tile, 0;
STAGE:
        mad.lo.u32 %index, %row, {tiles}, %tile;
        mad.lo.u32 %index, %index, 32, %lane;
        mul.wide.u32 %offset, %index, 4;
        add.s64 %from, %ids, %offset;
        ld.global.b32 %id, [%from];
        st.shared.b32 [%place], %id;
        add.s64 %from, %grads, %offset;
        ld.global.f32 %grad, [%from];
        st.shared.f32 [%place+{half}], %grad;
        add.u32 %place, %place, {bytes_a_tile};
        add.u32 %tile, %tile, 1;
        setp.lt.u32 %more, %tile, {tiles};
        @%more bra STAGE;
        mov.u32 %tile, 0;
PRODUCER_TILE:
        {wait(K_EMPTY, "%count", True)}
        mad.lo.u32 %index, %row, {tiles}, %tile;
        mad.lo.u32 %index, %index, 32, %lane;
        mul.wide.u32 %offset, %index, 4;
        add.s64 %from, %keys, %offset;
        ld.global.f32 %value, [%from];
        mov.u32 %place, key_tiles;
        mad.lo.u32 %place, %stage, {bytes_a_tile}, %place;
        mad.lo.u32 %place, %lane, 4, %place;
        st.shared.f32 [%place], %value;
        {arrive(K_FULL)}
        {next_tile("PRODUCER")}

MULTIPLIER_ROW:
        mov.u32 %tile, 0;
MULTIPLIER_TILE:
        {wait(K_FULL, "%count", False)}
        {wait(SUM_EMPTY, "%count", True)}
        mov.u32 %place, key_tiles;
        mad.lo.u32 %place, %stage, {bytes_a_tile}, %place;
        mad.lo.u32 %place, %lane, 4, %place;
        ld.shared.f32 %value, [%place];
        {arrive(K_EMPTY)}
        add.f32 %value, %value, %value;
        mov.u32 %place, sum_tiles;
        mad.lo.u32 %place, %stage, {bytes_a_tile}, %place;
        mad.lo.u32 %place, %lane, 4, %place;
        st.shared.f32 [%place], %value;
        {arrive(SUM_FULL)}
        {next_tile("MULTIPLIER")}

DRAIN_ROW:
        mov.u32 %tile, 0;
DRAIN_TILE:
        {wait(SUM_FULL, "%count", False)}
        mov.u32 %place, sum_tiles;
        mad.lo.u32 %place, %stage, {bytes_a_tile}, %place;
        mad.lo.u32 %place, %lane, 4, %place;
        ld.shared.f32 %value, [%place];
        {arrive(SUM_EMPTY)}
        and.b32 %slot, %row, 1;
        mov.u32 %place, metadata;
        mad.lo.u32 %place, %slot, {2 * half}, %place;
        mad.lo.u32 %place, %tile, {bytes_a_tile}, %place;
        mad.lo.u32 %place, %lane, 4, %place;
        ld.shared.b32 %id, [%place];
        ld.shared.f32 %grad, [%place+{half}];
        mul.f32 %value, %value, %grad;
        mul.wide.u32 %offset, %id, 4;
        add.s64 %from, %out, %offset;
        red.global.add.f32 [%from], %value;
        {drained(tiles) if guarded else ""}
        {next_tile("DRAIN")}
}}
"""


def drained(tiles: int) -> str:
    """After the last tile of a row: the slot is free."""
    return f"""
        setp.lt.u32 %more, %tile, {tiles - 1};
        mad.lo.u32 %barrier, %slot, 8, %barriers;
        @!%more mbarrier.arrive.shared::cta.b64 _, [%barrier+{SLOT_FREE}];"""


@pytest.fixture(scope="module")
def vm(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    return Machine(tmp_path_factory.mktemp("ptx-vm"))


def run(vm: Machine, tiles: int, guarded: bool, schedule: str) -> tuple[bool, Result]:
    """Whether the output is right, bit for bit since all numbers are small integers, and what the machine says."""
    g = np.random.default_rng(tiles)
    shape = (ROWS, tiles, 32)
    ids = g.integers(0, KEYS, shape).astype(np.uint32)
    grads, keys = (g.integers(-9, 10, shape).astype(np.float32) for _ in range(2))
    out = np.zeros(KEYS, np.float32)
    arrays = (ids, grads, keys, out)
    buffers = [Buffer(array, index, writable=array is out) for index, array in enumerate(arrays)]
    program = decode(parse(kernel(tiles, guarded)).kernels["persistent"])
    parameters = pack_parameters(program, [*(buffer.address for buffer in buffers), ROWS])
    result = vm.launch(program, 1, 96, 0, parameters, buffers, Schedule.parse(schedule))
    expected = np.zeros(KEYS, np.float32)
    np.add.at(expected, ids.reshape(-1), (2 * keys * grads).reshape(-1))
    return np.array_equal(out, expected), result


def test_two_tiles_a_row_race_and_one_run_in_order_says_so(vm: Machine) -> None:
    """In order nothing goes wrong, and still the accesses that nothing orders are named."""
    right, result = run(vm, 2, False, "inorder")
    assert right
    assert {str(finding).split(";")[0] for finding in result.findings} == {
        f"race: write after read: {line('ld.shared.b32 %id')} / {line('st.shared.b32 [%place]')}",
        f"race: write after read: {line('ld.shared.f32 %grad')} / {line('st.shared.f32 [%place+')}",
    }


def line(start: str) -> str:
    """A line of the kernel with two tiles a row, as findings name it."""
    number, text = next((n, text.strip()) for n, text in enumerate(kernel(2, False).split("\n"), 1) if start in text)
    return f"line {number} ({text.rstrip(';')})"


@pytest.mark.parametrize("schedule", WRONG)
def test_two_tiles_a_row_give_wrong_sums_under_some_schedules(vm: Machine, schedule: str) -> None:
    right, result = run(vm, 2, False, schedule)
    assert not right
    assert any("%id" in str(finding) for finding in result.findings)


def test_with_the_missing_barrier_there_is_no_finding_and_no_wrong_sum(vm: Machine) -> None:
    for schedule in ("inorder", *(f"{kind}:{seed}" for kind in ("random", "late") for seed in range(1, 21))):
        right, result = run(vm, 2, True, schedule)
        assert right, schedule
        assert not result.findings, (schedule, *map(str, result.findings))


@pytest.mark.parametrize("schedule", ["inorder", *WRONG])
def test_with_four_tiles_a_row_the_sums_are_right_and_the_race_is_reported_still(vm: Machine, schedule: str) -> None:
    right, result = run(vm, 4, False, schedule)
    assert right
    assert [finding.kind for finding in result.findings] == ["race: write after read"] * 2


def test_with_five_tiles_a_row_the_waits_for_tiles_order_the_metadata_too(vm: Machine) -> None:
    for schedule in ("inorder", *WRONG):
        right, result = run(vm, 5, False, schedule)
        assert right
        assert not result.findings


@pytest.mark.parametrize("guarded", [False, True])
def test_the_assembler_takes_the_kernel(guarded: bool, tmp_path: Path) -> None:
    assemblers = [path for place in sys.path if (path := Path(place) / "nvidia/cu13/bin/ptxas").is_file()]
    if not assemblers:
        pytest.skip("ptxas is not installed")
    source = tmp_path / "persistent.ptx"
    source.write_text(kernel(2, guarded))
    command = [str(assemblers[0]), "-arch=sm_90a", str(source), "-o", str(tmp_path / "persistent.cubin")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
