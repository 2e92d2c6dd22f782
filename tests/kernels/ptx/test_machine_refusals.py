"""What the machine does not know is an error that quotes its line: nothing is skipped, and no modifier is ignored."""

from __future__ import annotations

import pytest

pytest.importorskip("numpy")

from ptx_snippets.framework import kernel

from dsa_planner.kernels.ptx import decode, parser

_REGISTERS = ".reg .pred %p<8>;\n.reg .b16 %h<8>;\n.reg .b32 %r<8>;\n.reg .b64 %d<8>;\n"

UNKNOWN = """
foo.bar.b32 %r1, %r2
add.rz.f32 %r1, %r2, %r3
add.cc.u32 %r1, %r2, %r3
add.sat.s32 %r1, %r2, %r3
add.f64 %d1, %d2, %d3
addc.u32 %r1, %r2, %r3
mad.lo.cc.u32 %r1, %r2, %r3, %r4
mad.lo.sat.s32 %r1, %r2, %r3, %r4
mad.wide.foo.s32 %d1, %r2, %r3, %d4
mad.hi.u16 %h1, %h2, %h3, %h4
mad.hi.cc.u32 %r1, %r2, %r3, %r4
fma.lo.u32 %r1, %r2, %r3, %r4
mul.lo.foo.s32 %r1, %r2, %r3
mul.hi.foo.s32 %r1, %r2, %r3
mul.wide.foo.s32 %d1, %r2, %r3
mul.hi.u16 %h1, %h2, %h3
mul.hi.b64 %d1, %d2, %d3
mul.wide.u16 %r1, %h1, %h2
mul.rz.f32 %r1, %r2, %r3
mul.sat.f32 %r1, %r2, %r3
mul.lo.f32 %r1, %r2, %r3
mul.lo.b32 %r1, %r2, %r3
fma.rn.sat.f32 %r1, %r2, %r3, %r4
fma.rz.f32 %r1, %r2, %r3, %r4
fma.rn.relu.bf16x2 %r1, %r2, %r3, %r4
div.rz.f32 %r1, %r2, %r3
div.sat.s32 %r1, %r2, %r3
rem.foo.u32 %r1, %r2, %r3
div.u16 %h1, %h2, %h3
min.xorsign.abs.f32 %r1, %r2, %r3
max.f32 %r1, %r2, %r3, %r4
min.relu.s32 %r1, %r2, %r3
max.bf16x2 %r1, %r2, %r3
neg.f16 %h1, %h2
abs.s64 %d1, %d2
rcp.rz.f32 %r1, %r2
rcp.approx.f64 %d1, %d2
tanh.approx.f32 %r1, %r2
ex2.approx.bf16 %h1, %h2
and.foo.b32 %r1, %r2, %r3
xor.s32 %r1, %r2, %r3
not.b16 %h1, %h2
cnot.b32 %r1, %r2
shl.wrap.b32 %r1, %r2, %r3
shr.rn.u32 %r1, %r2, %r3
shr.s16 %h1, %h2, %r3
shf.l.b32 %r1, %r2, %r3, %r4
shf.wrap.b32 %r1, %r2, %r3, %r4
popc.b64 %r1, %d2
bfind.s32 %r1, %r2
bfind.shiftamt.u32 %r1, %r2
bfe.u64 %d1, %d2, %r3, %r4
bfi.b64 %d1, %d2, %d3, %r3, %r4
fns.b32 %r1, %r2, %r3, %r4
lop3.or.b32 %r1, %r2, %r3, %r4, 0x80
prmt.b32.f4e %r1, %r2, %r3, %r4
dp4a.u32.u32 %r1, %r2, %r3, %r4
setp.lt.f16 %p1, %h1, %h2
setp.lt.f64 %p1, %d1, %d2
setp.foo.s32 %p1, %r1, %r2
setp.ltu.s32 %p1, %r1, %r2
setp.num.u32 %p1, %r1, %r2
setp.lo.s32 %p1, %r1, %r2
setp.lt.b32 %p1, %r1, %r2
setp.lt.nand.s32 %p1, %r1, %r2, %p2
set.lt.u32.s32 %r1, %r1, %r2
selp.foo.b32 %r1, %r2, %r3, %p1
slct.s32.s32 %r1, %r2, %r3, %r4
cvt.rz.f32.s32 %r1, %r2
cvt.f32.s32 %r1, %r2
cvt.s32.f32 %r1, %r2
cvt.sat.s32.f32 %r1, %r2
cvt.rzi.u32.u16 %r1, %h2
cvt.rn.u32.f32 %r1, %r2
cvt.rzi.f32.s32 %r1, %r2
cvt.f16.f32 %h1, %r2
cvt.rz.bf16x2.f32 %r1, %r2, %r3
cvt.rn.satfinite.e4m3x2.f32 %h1, %r2, %r3
cvt.sat.u8.s32 %r1, %r2
cvt.relu.s32.f32 %r1, %r2
mov.foo.b32 %r1, %r2
mov.u32 %r1, %smid
mov.b64 {%h1, %h2, %h3, %h4}, %d1
mov.b128 %d1, %d2
cvta.local.u64 %d1, %d2
cvta.foo.shared.u64 %d1, %d2
cvta.shared.u32 %r1, %r2
isspacep.shared %p1, %d1
bra.foo END
brx.idx %r1, END
call foo
shfl.idx.b32 %r1, %r2, 0, 31
shfl.sync.b32 %r1, %r2, 0, 31, -1
shfl.sync.foo.b32 %r1, %r2, 0, 31, -1
shfl.sync.idx.b64 %d1, %d2, 0, 31, -1
vote.ballot.b32 %r1, %p1
vote.sync.foo.pred %p1, %p2, -1
vote.sync.all.b32 %r1, %p2, -1
vote.sync.ballot.foo.b32 %r1, %p2, -1
match.any.sync.b32 %r1, %r2, -1
redux.sync.add.f32 %r1, %r2, -1
redux.sync.min.f32 %r1, %r2, -1
redux.sync.max.abs.NaN.f32 %r1, %r2, -1
redux.sync.min.b32 %r1, %r2, -1
redux.sync.and.s32 %r1, %r2, -1
redux.add.u32 %r1, %r2
elect.foo %r1|%p1, -1
elect.sync %r1, -1
activemask.b64 %r1
bar.red.popc.u32 %r1, 0, %p1
bar.foo 0
bar.warp.foo -1
barrier.cluster.foo
barrier.cluster.arrive.foo
setmaxnreg.foo.sync.aligned.u32 40
mbarrier.arrive.noComplete.shared.b64 %d1, [%r1], 1
mbarrier.pending_count.b64 %r1, %d1
mbarrier.complete_tx.shared.b64 [%r1], 16
mbarrier.init.foo.b64 [%r1], 1
mbarrier.arrive_drop.shared.b64 %d1, [%r1]
fence.proxy.alias
fence.proxy.tensormap::generic.release.gpu
fence.foo
fence.mbarrier_init.foo
membar.foo
ld.foo.u32 %r1, [%d1]
ld.local.u32 %r1, [%d1]
ld.const.u32 %r1, [%d1]
ld.global.v3.u32 {%r1, %r2, %r3}, [%d1]
ld.global.v2.u32 %r1, [%d1]
ld.param.foo.u64 %d1, [out]
ld.global.b128 %d1, [%d1]
ld.param.b128 %d1, [out]
st.global.b128 [%d1], %d2
st.foo.u32 [%d1], %r1
st.local.u32 [%d1], %r1
st.async.b32 [%d1], %r1
st.bulk.shared [%r1], 64, 0
atom.global.inc.u32 %r1, [%d1], %r2
atom.global.cas.b64 %d1, [%d1], %d2, %d3
atom.global.add.f64 %d1, [%d1], %d2
atom.global.add.noftz.f16x2 %r1, [%d1], %r2
atom.foo.add.u32 %r1, [%d1], %r2
red.global.add.noftz.bf16x2 [%d1], %r2
red.async.add.u32 [%d1], %r2
multimem.red.add.f32 [%d1], %r2
ldmatrix.sync.aligned.m16n16.x1.trans.shared.b8 {%r1, %r2}, [%r3]
ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%r1}, [%r3]
ldmatrix.sync.aligned.m8n8.x3.shared.b16 {%r1, %r2, %r4}, [%r3]
stmatrix.sync.aligned.m16n8.x1.trans.shared.b8 [%r3], {%r1}
movmatrix.sync.aligned.m8n8.trans.b16 %r1, %r2
mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%r1, %r2, %r3, %r4}, {%r1, %r2, %r3, %r4}, {%r1, %r2}, {%r1, %r2, %r3, %r4}
cp.async.ca.shared.global [%r1], [%d1], 4, %p1
cp.async.ca.shared.global [%r1], [%d1], 5
cp.async.cg.shared.global [%r1], [%d1], 8
cp.async.foo.shared.global [%r1], [%d1], 16
cp.async.wait_group.foo 0
cp.async.mbarrier.foo.shared.b64 [%r1]
cp.async.bulk.wait_group.foo 0
cp.async.bulk.commit_group.foo
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%r1], [%d1], 16, [%r2], %h1
cp.async.bulk.tensor.2d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes [%r1], [%d1, {%r1, %r2}], [%r2], {%h1}
cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.cta_group::2 [%r1], [%d1, {%r1, %r2}], [%r2]
cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%r1], [%d1, {%r1, %r2}], [%r2]
cp.async.bulk.tensor.2d.global.shared::cta.tile::scatter4.bulk_group [%d1, {%r1, %r2, %r3, %r4, %r5}], [%r2]
cp.reduce.async.bulk.global.shared::cta.bulk_group.min.u32 [%d1], [%r1], 16
cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f16 [%d1], [%r1], 16
cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.add.u32 [%r2], [%r1], 16, [%r3]
cp.reduce.async.bulk.tensor.2d.global.shared::cta.max.tile.bulk_group [%d1, {%r1, %r2}], [%r1]
wgmma.foo.sync.aligned
wgmma.mma_async.sp.sync.aligned.m64n8k32.f32.f16.f16 {%r1, %r2, %r3, %r4}, %d1, %d2, %r5, 0, %p1, 1, 1, 0, 0
wgmma.mma_async.sp.sync.aligned.m64n8k16.f32.f16.f16 {%r1, %r2, %r3, %r4}, %d1, %d2, %p1, 1, 1, 0, 0
wgmma.mma_async.sync.aligned.m64n8k8.f32.tf32.tf32 {%r1, %r2, %r3, %r4}, %d1, %d2, %p1, 1, 1
wgmma.mma_async.sync.aligned.m64n8k16.f16.f16.f16 {%r1, %r2}, %d1, %d2, %p1, 1, 1, 0, 0
wgmma.mma_async.sync.aligned.m64n12k16.f32.f16.f16 {%r1, %r2, %r3, %r4, %r5, %r6}, %d1, %d2, %p1, 1, 1, 0, 0
wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%r1, %r2, %r3, %r4}, %d1, %d2, %p1, 2, 1, 0, 0
wgmma.fence.foo
wgmma.wait_group.foo 0
tcgen05.mma.ws.cta_group::1.kind::f16 [%r1], %d1, %d2, %r2, %p1
tcgen05.mma.cta_group::1.kind::tf32 [%r1], %d1, %d2, %r2, %p1
tcgen05.mma.cta_group::2.kind::f16 [%r1], %d1, %d2, %r2, %p1
tcgen05.mma.cta_group::1.kind::f16.32x32b [%r1], %d1, %d2, %r2, %p1
tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.xyz.b32 [%r1], 32
tcgen05.dealloc.cta_group::2.sync.aligned.b32 %r1, 32
tcgen05.mma.sp.cta_group::1.kind::f16 [%r1], %d1, %d2, [%r3], %r2, %p1
tcgen05.mma.cta_group::1.kind::f16 [%r1], %d1, %d2, %r2, %p1, 2
tcgen05.ld.sync.aligned.16x64b.x1.b32 {%r1}, [%r2]
tcgen05.ld.sync.aligned.32x32b.x1.pack::16b.b32 {%r1}, [%r2]
tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r1}, [%r2]
tcgen05.ld.sync.aligned.32x32b.x3.b32 {%r1, %r2, %r3}, [%r2]
tcgen05.ld.red.sync.aligned.32x32b.x2.min.f32 {%r1, %r2}, %r3, [%r2]
tcgen05.st.sync.aligned.32x32b.x1.unpack::16b.b32 [%r2], {%r1}
tcgen05.cp.cta_group::1.128x256b [%r1], %d1
tcgen05.shift.cta_group::1.down [%r1]
tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%r1], %h1
tcgen05.wait::foo.sync.aligned
tcgen05.fence::foo
createpolicy.foo.b64 %d1
prefetch.foo [%d1]
griddepcontrol.foo
mapa.u64 %d1, %d2, 0
tex.2d.v4.f32.f32 {%r1, %r2, %r3, %r4}, [%d1, {%r1, %r2}]
discard.global.L2 [%d1], 128
""".strip().splitlines()
"""Opcodes, modifiers, types and operands, some of them valid PTX of other architectures, some of no version."""

UNDECLARED = [
    ("add.u32 %r1, %r2, %other", "register %other is not declared"),
    ("bra NOWHERE", "label NOWHERE is not known"),
    ("ld.shared.u32 %r1, [nothing]", "nothing is not known"),
    ("ld.param.u32 %r1, [nothing]", "nothing"),
    ("add.u32 %r1, %tid.x, 1", "has to be moved to a register first"),
    ("mov.u32 %r1, %gridid", "special register %gridid is not known"),
    ("mov.u32 5, %r1", "cannot take a result"),
]


def program(line: str) -> str:
    return kernel(["out"], f"{_REGISTERS}mov.u32 %r1, 0;\n{line};\nEND:")


def place(text: str, line: str) -> str:
    return f"line {1 + next(n for n, found in enumerate(text.splitlines()) if line in found)}: "


@pytest.mark.parametrize("line", UNKNOWN)
def test_an_unknown_instruction_is_refused_with_its_line(line: str) -> None:
    text = program(line)
    with pytest.raises(parser.PtxError) as refused:
        decode.decode(parser.parse(text).kernels["snippet"])
    assert line in str(refused.value)
    assert str(refused.value).startswith(place(text, line))


@pytest.mark.parametrize(("line", "message"), UNDECLARED)
def test_an_unknown_name_is_refused_with_its_line(line: str, message: str) -> None:
    text = program(line)
    with pytest.raises(parser.PtxError) as refused:
        decode.decode(parser.parse(text).kernels["snippet"])
    assert line in str(refused.value)
    assert message in str(refused.value)
    assert str(refused.value).startswith(place(text, line))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (".version 8.6\n.target sm_90a\n.func helper() { ret; }\n", "line 3: '.func helper() { ret; }' is not known"),
        (".version 8.6\n.visible .entry k(.param .texref t) { ret; }\n", "parameter '.param .texref t' is not known"),
        (".version 8.6\n.visible .entry k() {\nret;\n", "the body of k does not end"),
        (".version 8.6\n.visible .entry k() {\nmov.u32 %r1, 0\n}\n", "expected before the end"),
    ],
)
def test_an_unknown_unit_is_refused(text: str, message: str) -> None:
    with pytest.raises(parser.PtxError) as refused:
        parser.parse(text)
    assert message in str(refused.value)
