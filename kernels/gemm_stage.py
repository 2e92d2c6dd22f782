"""What the GEMM stages of ``indexer_backward`` have in common, whatever the architecture.

*Rows* go to workers in one of three ways: "static", worker w of W takes rows w, w + W, ...; "tickets", a worker draws
its next row from a counter that is 0 at launch; "in order" is static, and each worker adds to a plane of its own, each
key and column always by one thread, so that the order of all additions is fixed.

*Rings*: what passes between warps lies in stages that are filled and emptied in turn, with two mbarriers each. A warp
counts the stages that it has seen; the count says which stage is next and which phase of its mbarriers to wait for.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.experimental.cuda as cuda
from cutlass import BFloat16, Float32, Int32, Int64, Uint32
from cutlass.cute import arch

from dsa_planner.kernels.hopper import LINE

ROWS = ("static", "tickets", "in order")
HEAD_ROWS = 64  # rows of S, d_index_q and A; with fewer heads the rest is computed and ignored


class Work(NamedTuple):
    """The rows of a launch, and what turns their ids into keys."""

    rows: cutlass.Int32
    s_q: cutlass.Int32
    id_limit: cutlass.Int32
    id_offset: cutlass.Int32
    sm_scale: cutlass.Float32


class GlobalTensors(NamedTuple):
    """Pointers to the tensors of a launch."""

    index_q: cute.Pointer
    weights: cute.Pointer
    index_k: cute.Pointer
    score_grad: cute.Pointer
    topk_indices: cute.Pointer
    d_index_q: cute.Pointer
    d_weights: cute.Pointer
    dk_accum: cute.Pointer


class GemmStage:
    """Base of the GEMM stages.

    Args:
        rows: how rows go to workers.
        head_dim: dims of a head.
        rings: by name, the stages of a ring, and the warps that fill and that empty one.
        workers: of a CTA; each has rings of its own.
        by_lane: rings at which every lane arrives for itself. Elsewhere one arrives for its warp, after a warp barrier.
            That orders as much; but the assembler leaves out the barrier of a warp that it knows to be together, and
            NVIDIA's race checker then takes what the other lanes store and load for unordered.
    """

    def __init__(
        self,
        rows: str,
        head_dim: int,
        rings: dict[str, tuple[int, int, int]],
        workers: int = 1,
        by_lane: tuple[str, ...] = (),
    ) -> None:
        self.rows = rows
        self.dims = head_dim
        self.rings = rings
        self.workers = workers
        self.by_lane = by_lane

    @property
    def launch_kernel(self):
        """The entry point for this way of handing out rows."""
        by_rows = (self.kernel, self.kernel_with_tickets, self.kernel_in_order)
        return dict(zip(ROWS, by_rows, strict=True))[self.rows]

    # --- rows ------------------------------------------------------------------------------------------------------

    @cute.jit
    def draw(self, tensors, lane):
        """A ticket, in lane 0; on its way."""
        drawn = Int32(0)
        if cutlass.const_expr(self.rows != "tickets"):
            return drawn
        if lane == 0:
            drawn = arch.atomic_add(tensors.ticket, Int32(1), sem="relaxed", scope="gpu")
        return drawn

    @cute.jit
    def row_after(self, row, workers, drawn):
        """A worker's row after ``row``."""
        if cutlass.const_expr(self.rows == "tickets"):
            return arch.shuffle_sync(drawn, 0) + workers
        return row + workers

    @cute.jit
    def mask(self, work, key_offset, ids, scores):
        """The keys of slots and their g': -1 and 0 where the id is invalid."""
        keys = cute.make_rmem_tensor(cute.size(ids), Int32)
        grads = cute.make_rmem_tensor(cute.size(ids), Float32)
        for e in cutlass.range_constexpr(cute.size(ids)):
            valid = Uint32(ids[e]) < Uint32(work.id_limit)
            keys[e] = ids[e] + key_offset if valid else Int32(-1)
            grads[e] = scores[e] * work.sm_scale if valid else Float32(0.0)
        return keys, grads

    @cute.jit
    def own_plane(self, tensors):
        """Where the CTA adds d_index_k, if rows go in order: CTA 0 to the output."""
        block, _, _ = arch.block_idx()
        address = tensors.dk_accum.toint()
        if block > 0:
            address = (tensors.planes + Int64(block - 1) * tensors.keys * self.dims).toint()
        return cute.make_ptr(Float32, address, cute.AddressSpace.gmem, assumed_align=16)

    @cute.jit
    def zero(self, plane, lane, keys):
        """Zero the lane's four columns of some keys; by the thread that will add to them, so that nothing else has to
        order the two.
        """
        zeros = cute.make_rmem_tensor(4, Float32)
        zeros.fill(0.0)
        first, end, step = keys
        for key in cutlass.range(first, end, step, unroll=1):
            cute.autovec_copy(zeros, aligned(plane + (Int64(key) * self.dims + lane * 4)))

    # --- rings -----------------------------------------------------------------------------------------------------

    def barriers(self, name: str):
        """The memory of a ring's mbarriers: for each worker those of full stages, then those of empty ones."""
        return cute.struct.MemRange[Int64, 2 * self.workers * self.rings[name][0]]

    @cute.jit
    def init_barriers(self, shared):
        with arch.elect_one():
            for name in self.rings:
                stages, at_full, at_empty = self.rings[name]
                if name in self.by_lane:
                    at_full, at_empty = 32 * at_full, 32 * at_empty
                for worker in range(self.workers):
                    barriers = getattr(shared, name).data_ptr() + worker * 2 * stages
                    for stage in cutlass.range_constexpr(stages):
                        arch.mbarrier_init(barriers + stage, at_full)
                        arch.mbarrier_init(barriers + (stages + stage), at_empty)

    @cute.jit
    def wait_full(self, shared, name: cutlass.Constexpr, count, worker=0):
        """Wait until stage ``count`` of a ring is filled for the ``count``-th time around."""
        stages = self.rings[name][0]
        arch.mbarrier_wait(self.full(shared, name, count, worker), (count // stages) & 1)

    @cute.jit
    def wait_empty(self, shared, name: cutlass.Constexpr, count, worker=0):
        """Wait until the stage for ``count`` is free."""
        stages = self.rings[name][0]
        arch.mbarrier_wait(self.empty(shared, name, count, worker), ((count // stages) & 1) ^ 1)

    @cute.jit
    def arrive_full(self, shared, name: cutlass.Constexpr, count, worker=0):
        """This warp has filled a stage."""
        self.arrive(self.full, shared, name, count, worker)

    @cute.jit
    def arrive_empty(self, shared, name: cutlass.Constexpr, count, worker=0):
        """This warp is done with a stage."""
        self.arrive(self.empty, shared, name, count, worker)

    @cute.jit
    def arrive(self, barrier: cutlass.Constexpr, shared, name: cutlass.Constexpr, count, worker):
        """This warp arrives at an mbarrier of a ring, ``full`` or ``empty``."""
        if cutlass.const_expr(name in self.by_lane):
            arch.mbarrier_arrive(barrier(shared, name, count, worker))
        else:
            with arch.elect_one():
                arch.mbarrier_arrive(barrier(shared, name, count, worker))

    def full(self, shared, name, count, worker=0):
        stages = self.rings[name][0]
        return getattr(shared, name).data_ptr() + (worker * 2 * stages + count % stages)

    def empty(self, shared, name, count, worker=0):
        stages = self.rings[name][0]
        return getattr(shared, name).data_ptr() + (worker * 2 * stages + stages + count % stages)

    def stage(self, name, count, worker=0):
        """The stage for ``count``, among those of all workers."""
        stages = self.rings[name][0]
        return worker * stages + count % stages


def lines_map(pointer: cute.Pointer, dims: int, extent: Int32, lines: int):
    """The tensor map of a bf16 matrix of ``extent`` rows of ``dims``, in boxes of one line of each of ``lines``."""
    return cuda.create_tensor_map_tiled(
        global_address=pointer.toint(),
        dtype=BFloat16,
        global_dims=[dims, extent],
        global_strides=[dims * 2 // 16],
        box_dims=[LINE, lines],
        swizzle=cuda.TensorMapSwizzle.s128b,
    )


def place(warp, lane, n):
    """Where a lane's row of the four matrices of columns 16 n to 16 n + 15 starts in a tile of HEAD_ROWS, in elements.

    The matrices are rows + 8 (m % 2), columns + 8 (m // 2) of the warp's 16 rows; lane 8 m + r gives row r of matrix m.
    """
    line = warp * 16 + lane % 8 + 8 * (lane // 8 % 2)
    chunk = 2 * n % 8 + lane // 16
    return 2 * n // 8 * (HEAD_ROWS * LINE) + line * LINE + (chunk ^ (lane % 8)) * 8


def add_exactly(sums, j, value):
    """Add to ``sums[j]``, and what rounding loses to ``sums[j + 2]``."""
    total = sums[j] + value
    added = total - sums[j]
    sums[j + 2] = sums[j + 2] + ((sums[j] - (total - added)) + (value - added))
    sums[j] = total


def sum_over_lanes(sums, j):
    """``sums[j] + sums[j + 2]`` over four neighbouring lanes, in a fixed order; each lane gets it."""
    for lanes in (1, 2):
        lost = arch.shuffle_sync_bfly(sums[j + 2], lanes)
        add_exactly(sums, j, arch.shuffle_sync_bfly(sums[j], lanes))
        sums[j + 2] = sums[j + 2] + lost
    return sums[j] + sums[j + 2]


def aligned(pointer):
    """Four elements, for one 16-byte access."""
    return cute.make_tensor(pointer, cute.make_layout(4))
