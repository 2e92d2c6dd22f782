"""The floor of a pair: the time for what no kernel of this design can leave out.

Every pair of a row and a valid slot gathers one 256-byte row of index_k and adds one 512-byte fp32 row to d_index_k.
``PTX`` does both, of rows drawn at random, and nothing else: one CTA an SM, four warps that gather with cp.async and
four that add with red.v4, side by side. What it takes a pair is the floor, for as many keys as the call has, since it
rises where d_index_k outgrows the L2.

The driver assembles the text, so no compiler is needed. tests/bench/test_floor.py runs it in the PTX machine and counts
what it moves.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from dsa_planner.driver import call, cu, device, invoke

__all__ = ["KEY_BYTES", "PAIRS_OF_A_CTA", "PTX", "SUM_BYTES", "launcher"]

KEY_BYTES = 256
SUM_BYTES = 512
PAIRS_OF_A_CTA = 65536
THREADS = 256
SHARED_BYTES = 128 << 10
"""More than half of an SM's, so that a CTA has its SM alone; 32 KiB of it are used."""

# Draws the next row: a step of xorshift of the seed %r6, scaled to the %r1 rows.
_DRAW = """\
    shl.b32 %r12, %r6, 13;
    xor.b32 %r6, %r6, %r12;
    shr.u32 %r12, %r6, 17;
    xor.b32 %r6, %r6, %r12;
    shl.b32 %r12, %r6, 5;
    xor.b32 %r6, %r6, %r12;
    mul.hi.u32 %r13, %r6, %r1;
"""

PTX = f"""\
.version 8.1
.target sm_90
.address_size 64

.extern .shared .align 128 .b8 landing[];

// keys: 256-byte rows; sums: 512-byte rows; key_count of each; pairs: gathered, and added, by each CTA, a multiple of 8
.visible .entry dsa_floor(
    .param .u64 keys,
    .param .u64 sums,
    .param .u32 key_count,
    .param .u32 pairs
)
.maxntid 256, 1, 1
{{
    .reg .pred %p<4>;
    .reg .b32 %r<20>;
    .reg .b64 %a<6>;
    .reg .f32 %f<2>;

    ld.param.u32 %r1, [key_count];
    ld.param.u32 %r2, [pairs];
    mov.u32 %r3, %tid.x;
    mov.u32 %r4, %ctaid.x;
    setp.ge.u32 %p1, %r3, 128;
    @%p1 bra add_rows;

    // Warps 0 to 3: sixteen threads gather a row, 16 bytes each, so a pass has eight rows. The seed is that of the row.
    ld.param.u64 %a1, [keys];
    cvta.to.global.u64 %a1, %a1;
    shr.u32 %r5, %r3, 4;
    mad.lo.u32 %r6, %r4, 131, %r5;
    mad.lo.u32 %r6, %r6, 2654435761, 99;
    and.b32 %r7, %r3, 15;
    shl.b32 %r7, %r7, 4;
    cvt.u64.u32 %a2, %r7;
    add.u64 %a1, %a1, %a2;
    mov.u32 %r8, landing;
    shl.b32 %r9, %r3, 4;
    add.u32 %r8, %r8, %r9;
    shr.u32 %r10, %r2, 3;
    mov.u32 %r11, 0;
gather_pass:
    setp.ge.u32 %p2, %r11, %r10;
    @%p2 bra gathered;
{_DRAW}    mul.wide.u32 %a3, %r13, 256;
    add.u64 %a3, %a1, %a3;
    and.b32 %r14, %r11, 15;
    shl.b32 %r14, %r14, 11;
    add.u32 %r14, %r8, %r14;
    cp.async.cg.shared.global [%r14], [%a3], 16;
    cp.async.commit_group;
    cp.async.wait_group 14;
    add.u32 %r11, %r11, 1;
    bra gather_pass;
gathered:
    cp.async.wait_all;
    ret;

    // Warps 4 to 7: a warp adds a row, 16 bytes a thread, so a pass has four rows. The seed is that of the warp.
add_rows:
    ld.param.u64 %a4, [sums];
    cvta.to.global.u64 %a4, %a4;
    shr.u32 %r5, %r3, 5;
    mad.lo.u32 %r6, %r4, 977, %r5;
    mad.lo.u32 %r6, %r6, 2654435761, 7;
    and.b32 %r7, %r3, 31;
    shl.b32 %r7, %r7, 4;
    cvt.u64.u32 %a2, %r7;
    add.u64 %a4, %a4, %a2;
    mov.f32 %f1, 0f3F800000;
    shr.u32 %r10, %r2, 2;
    mov.u32 %r11, 0;
add_pass:
    setp.ge.u32 %p2, %r11, %r10;
    @%p2 bra added;
{_DRAW}    mul.wide.u32 %a3, %r13, 512;
    add.u64 %a3, %a4, %a3;
    red.global.add.v4.f32 [%a3], {{%f1, %f1, %f1, %f1}};
    add.u32 %r11, %r11, 1;
    bra add_pass;
added:
    ret;
}}
"""


def launcher(ordinal: int) -> tuple[Callable[[int, int, int, int], None], int]:
    """Have the driver assemble ``PTX`` for a device.

    Returns:
        A function that launches it once, given the addresses of keys and sums, their count and a stream's handle; and
        the pairs of a launch.

    Raises:
        DriverError: the driver refuses it; it takes PTX for sm_90 and newer.
    """
    target = device(ordinal)
    what = "assembling the kernel of the floor"
    library = invoke(what, "cuLibraryLoadData", PTX.encode() + b"\0", [], [], 0, [], [], 0)
    with target.current():
        handle = invoke(what, "cuLibraryGetKernel", library, b"dsa_floor")
        attribute = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        invoke(what, "cuKernelSetAttribute", attribute, SHARED_BYTES, handle, target.handle)
        function = invoke(what, "cuKernelGetFunction", handle)
    config = cu.CUlaunchConfig()
    config.gridDimX, config.blockDimX = target.multiprocessors, THREADS
    config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1
    config.sharedMemBytes = SHARED_BYTES
    values: tuple[Any, ...] = (ctypes.c_uint64(), ctypes.c_uint64(), ctypes.c_uint32(), ctypes.c_uint32(PAIRS_OF_A_CTA))
    parameters = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))

    def launch(keys: int, sums: int, key_count: int, stream: int) -> None:
        values[0].value, values[1].value, values[2].value = keys, sums, key_count
        config.hStream = cu.CUstream(stream)
        with target.current():
            call(what, cu.cuLaunchKernelEx(config, function, ctypes.addressof(parameters), 0))

    return launch, target.multiprocessors * PAIRS_OF_A_CTA
