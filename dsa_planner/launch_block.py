"""What one launch hands to the driver: the values of all kernel parameters, packed. Run side.

Three things change at different rates, so they are kept apart: what follows from the *shapes* of a launch (``Shape``:
extents, grids, scratch), what follows from its *addresses* (pointers and tensor maps), and its *scalars*. A ``Block``
remembers what it packed last and packs again only what changed. Nothing is looked up by shape: there is one last
shape, and a comparison.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any

from dsa_planner.arguments import Tensors, explain_placement, placement_ok
from dsa_planner.driver import call, cu
from dsa_planner.launch_graph import LaunchGraph
from dsa_planner.launch_record import TENSORS, Buffer, LaunchRecord, Parameter, TensorMap, holds

__all__ = ["Block", "BlockLayout", "Shape", "spans_of", "workspace_bytes"]

COUNTER = "ticket"
"""The buffer from which v2 backends draw rows."""
_WRITTEN = frozenset({"attn_score", "d_index_q", "d_weights", "d_index_k", "workspace"})
_BUFFER_ALIGNMENT = 256
_ELEMENT_BYTES = {"bf16": 2, "fp32": 4}
_MAP_ELEMENTS = {
    "bf16": cu.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
    "fp32": cu.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
}
_MAP_SWIZZLES = {
    0: cu.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_NONE,
    32: cu.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_32B,
    64: cu.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_64B,
    128: cu.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
}


def workspace_bytes(buffers: Sequence[Buffer], values: Mapping[str, int], d_index_k: str) -> int:
    """Bytes of workspace for the buffers that a launch needs, each rounded up to 256."""
    return sum(_aligned(buffer.bytes(values)) for buffer in buffers if holds(buffer.when, {"d_index_k": d_index_k}))


class Shape:
    """What the shapes and dtypes of a launch decide, computed from tensors that have passed the checks.

    Args:
        record: the plan's launch record.
        constants: the launch values that the plan and its device fix.
        tensors: the launch's tensors.
        ids_are_flat: whether topk_indices are flat over batch * S_k.
        d_index_k: this project's name of d_index_k's dtype.
    """

    def __init__(
        self,
        record: LaunchRecord,
        constants: Mapping[str, int],
        tensors: Tensors,
        ids_are_flat: bool,
        d_index_k: str,
    ) -> None:
        self.ids_are_flat = ids_are_flat
        self.admits = _admission(tensors)
        batch, s_q, s_k = tensors[0].shape[0], tensors[0].shape[1], tensors[2].shape[1]
        self.rows, keys = batch * s_q, batch * s_k
        self.values: dict[str, int] = {
            **constants,
            "rows": self.rows,
            "keys": keys,
            "s_q": max(s_q, 1),
            "id_limit": keys if ids_are_flat else s_k,
            "id_offset": 0 if ids_are_flat else s_k,
        }
        record.complete(self.values)
        call_facts = {"d_index_k": d_index_k}
        self.workspace_bytes = workspace_bytes(record.buffers, self.values, d_index_k)
        self._place(record.buffers, call_facts)
        self.sizes = (*[tensor.nbytes for tensor in tensors], *self._buffer_sizes)
        """Bytes of the tensors, and of the buffers."""
        kernels = [(index, kernel) for index, kernel in enumerate(record.kernels) if holds(kernel.when, call_facts)]
        grids = [(index, kernel.grid(self.values)) for index, kernel in kernels]
        self.grids = [(index, grid) for index, grid in grids if grid]
        """(kernel, CTAs) of the kernels that have something to do, in launch order."""
        self.kernels = tuple(index for index, _ in self.grids)

    def _place(self, buffers: Sequence[Buffer], call_facts: Mapping[str, str]) -> None:
        self.places = {name: position for position, name in enumerate(TENSORS)}
        """By name of a tensor or buffer, its position among the addresses of the tensors and of the buffers."""
        self.offsets: list[int] = []
        """Of the buffers in the workspace, in bytes."""
        self._buffer_sizes: list[int] = []
        names = []
        used = 0
        for buffer in buffers:
            if holds(buffer.when, call_facts):
                self.places[buffer.name] = len(TENSORS) + len(self.offsets)
                self.offsets.append(used)
                self._buffer_sizes.append(buffer.bytes(self.values))
                used += _aligned(self._buffer_sizes[-1])
                names.append(buffer.name)
            elif buffer.otherwise is not None:
                self.places[buffer.name] = self.places[buffer.otherwise]
        self.needs_only_a_counter = names == [COUNTER]

    def buffers_in(self, workspace: int) -> list[int]:
        """The addresses of the buffers in a workspace that begins at an address."""
        return [workspace + offset for offset in self.offsets]


def spans_of(shape: Shape, addresses: Sequence[int]) -> list[tuple[str, int, int, bool]]:
    """The memory of a launch: name, first byte, byte after the last, whether the launch writes it.

    Args:
        shape: of the launch.
        addresses: of its tensors and buffers.
    """
    names = (*TENSORS, *["workspace"] * len(shape.offsets))
    sizes = zip(names, addresses, shape.sizes, strict=True)
    return [(name, start, start + size, name in _WRITTEN) for name, start, size in sizes if size]


def _admission(tensors: Tensors) -> Callable[[Sequence[Any]], bool]:
    """A function that says whether tensors have the shapes, dtypes and device of these, which passed the checks.

    It runs at every launch, so it is one expression over local names: a loop over the ten tensors takes half as long
    again.
    """
    q_shape, w_shape, k_shape, score_shape = (tensors[position].shape for position in (0, 1, 2, 3))
    bf16, fp32, int32 = (tensors[position].dtype for position in (0, 3, 5))
    dw_dtype, dk_dtype = tensors[8].dtype, tensors[9].dtype
    loss_shape = tensors[6].shape
    device = tensors[0].get_device()

    def admits(tensors: Sequence[Any]) -> bool:
        q, w, k, attn, index, ids, loss, dq, dw, dk = tensors
        try:
            return (
                q.shape == q_shape
                and w.shape == w_shape
                and k.shape == k_shape
                and attn.shape == index.shape == ids.shape == score_shape
                and loss.shape == loss_shape
                and q.dtype is w.dtype is k.dtype is bf16
                and attn.dtype is index.dtype is loss.dtype is fp32
                and ids.dtype is int32
                and q.get_device() == w.get_device() == k.get_device() == attn.get_device() == device
                and index.get_device() == ids.get_device() == loss.get_device() == device
                and q.is_contiguous()
                and w.is_contiguous()
                and k.is_contiguous()
                and attn.is_contiguous()
                and index.is_contiguous()
                and ids.is_contiguous()
                # The negative bit comes from conjugated complex numbers, so only an fp32 tensor can have it.
                and not (attn.is_neg() or index.is_neg() or loss.is_neg())
                # An output that the caller left out is stood in for by the input that it will look like.
                and (
                    dq is q
                    or (dq.shape == q_shape and dq.dtype is bf16 and dq.get_device() == device and dq.is_contiguous())
                )
                and (
                    (dw is w and dw_dtype is bf16)
                    or (
                        dw.shape == w_shape
                        and dw.dtype is dw_dtype
                        and dw.get_device() == device
                        and dw.is_contiguous()
                        and not (dw_dtype is fp32 and dw.is_neg())
                    )
                )
                and (
                    (dk is k and dk_dtype is bf16)
                    or (
                        dk.shape == k_shape
                        and dk.dtype is dk_dtype
                        and dk.get_device() == device
                        and dk.is_contiguous()
                        and not (dk_dtype is fp32 and dk.is_neg())
                    )
                )
            )
        except (AttributeError, TypeError, RuntimeError):  # not a dense tensor
            return False

    return admits


class BlockLayout:
    """Where in a block each launch value lies, from the parameters of all kernels of a record."""

    def __init__(self, record: LaunchRecord) -> None:
        self.kernels = record.kernels
        parameters = [parameter for kernel in record.kernels for parameter in kernel.parameters]
        self.pointers = _unique(parameters, "pointer")
        self.ints = _unique(parameters, "int32")
        self.floats = _unique(parameters, "float32")
        self.maps = {p.name: p.tensor_map for p in parameters if p.tensor_map is not None}
        self.pointer_pack = struct.Struct(f"={len(self.pointers)}Q")
        self.int_pack = struct.Struct(f"={len(self.ints)}i")
        self.float_pack = struct.Struct(f"={len(self.floats)}f")
        self.int_offset = self.pointer_pack.size
        self.float_offset = self.int_offset + self.int_pack.size
        self.size = self.float_offset + self.float_pack.size

    def offset(self, parameter: Parameter) -> int:
        """Byte offset of a parameter's value in the block's values, where no tensor maps are."""
        if parameter.type == "pointer":
            return 8 * self.pointers.index(parameter.name)
        if parameter.type == "int32":
            return self.int_offset + 4 * self.ints.index(parameter.name)
        return self.float_offset + 4 * self.floats.index(parameter.name)


class Block:
    """The memory from which the driver reads the parameters of one launch, and the launch configurations.

    Used by one launch at a time, and thrown away by one whose packing failed: what it then holds is unknown.
    ``parameters`` has, for each kernel of the record, the address of its parameter pointers; ``configs`` its
    CUlaunchConfig, without a stream.
    """

    def __init__(self, layout: BlockLayout) -> None:
        self.layout = layout
        # What was packed last; None where nothing valid was.
        self._shape: Shape | None = None
        self._addresses: list[int] = []
        self._scalars: tuple[float, float] | None = None
        self._graphs: dict[tuple[int, ...], LaunchGraph] = {}
        self._values = ctypes.create_string_buffer(layout.size)
        base = ctypes.addressof(self._values)
        self._arrays = []
        map_pointers: dict[str, list[tuple[Any, int]]] = {name: [] for name in layout.maps}
        self.configs = []
        for kernel in layout.kernels:
            array = (ctypes.c_void_p * len(kernel.parameters))()
            for index, parameter in enumerate(kernel.parameters):
                if parameter.tensor_map is None:
                    array[index] = base + layout.offset(parameter)
                else:
                    map_pointers[parameter.name].append((array, index))
            self._arrays.append(array)
            config = cu.CUlaunchConfig()
            config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1
            config.blockDimX = kernel.block
            config.sharedMemBytes = kernel.shared_bytes
            self.configs.append(config)
        self.parameters = [ctypes.addressof(array) for array in self._arrays]
        self._pointers: Callable[[list[int]], tuple[int, ...]]  # those of the last shape, from all addresses
        self._maps = [_HeldMap(name, tensor_map, map_pointers[name]) for name, tensor_map in layout.maps.items()]

    def pack(self, shape: Shape, addresses: list[int], sm_scale: float, loss_coeff: float) -> None:
        """Make the block say what a launch needs.

        Args:
            shape: of the launch.
            addresses: of its tensors, in order, and of its buffers.
            sm_scale: see ``indexer_backward``.
            loss_coeff: see ``indexer_backward``.

        Raises:
            UnsupportedError: an address that is not aligned, or tensors that overlap.
        """
        if self._shape is not shape or self._addresses != addresses:
            if not placement_ok(addresses, shape.sizes):
                names = (*TENSORS, *["workspace"] * len(shape.offsets))
                explain_placement(names, addresses, shape.sizes, _WRITTEN)
            if self._shape is not shape:
                self._pack_shape(shape)
            self._pack_addresses(shape, addresses)
        elif self._scalars == (sm_scale, loss_coeff):
            return
        if self._scalars != (sm_scale, loss_coeff):
            values = {"sm_scale": sm_scale, "loss_scale": loss_coeff / shape.rows if shape.rows else 0.0}
            layout = self.layout
            layout.float_pack.pack_into(self._values, layout.float_offset, *[values[name] for name in layout.floats])
            self._scalars = (sm_scale, loss_coeff)
        for graph in self._graphs.values():
            graph.behind = True

    def graph(self, shape: Shape, functions: Sequence[Any]) -> LaunchGraph:
        """The graph of a shape's kernels, with what is packed now; ``functions`` of all kernels of the record.

        Raises:
            DriverError: the driver refused.
        """
        graph = self._graphs.get(shape.kernels)
        if graph is None:
            graph = LaunchGraph(shape.kernels, functions, self.configs, self.parameters)
            self._graphs[shape.kernels] = graph
        elif graph.behind:
            graph.update()
        return graph

    def close(self) -> None:
        """Free the graphs."""
        while self._graphs:
            self._graphs.popitem()[1].close()

    def _pack_shape(self, shape: Shape) -> None:
        layout = self.layout
        layout.int_pack.pack_into(self._values, layout.int_offset, *[shape.values[name] for name in layout.ints])
        for index, grid in shape.grids:
            self.configs[index].gridDimX = grid
        for graph in self._graphs.values():
            graph.read_grids()
        self._pointers = itemgetter(*[shape.places[name] for name in layout.pointers])
        for held in self._maps:
            held.address = None
        self._shape, self._scalars = shape, None  # loss_scale depends on the rows

    def _pack_addresses(self, shape: Shape, addresses: list[int]) -> None:
        """Pack the pointers, and see to the tensor maps whose address or extents have changed."""
        self.layout.pointer_pack.pack_into(self._values, 0, *self._pointers(addresses))
        for held in self._maps:
            # Of an empty tensor nothing is read: any memory will do.
            address = addresses[shape.places[held.name]] or addresses[0]
            if held.address != address:
                held.point_to(address, shape)
        self._addresses = addresses


class _HeldMap:
    """A CUtensorMap parameter. The driver reads it where it is, so it stays there until its extents change.

    Args:
        name: of the tensor.
        tensor_map: what the record says of it.
        pointers: where the addresses of this parameter are to be written: (array, index).
    """

    def __init__(self, name: str, tensor_map: TensorMap, pointers: Sequence[tuple[Any, int]]) -> None:
        self.name = name
        self.address: int | None = None
        """Of the tensor; None where the extents may have changed."""
        self._tensor_map = tensor_map
        self._pointers = pointers
        self._encoded: Any = None

    def point_to(self, address: int, shape: Shape) -> None:
        """Make it a map over the contiguous tensor at an address; without extents or memory there is none: its kernel
        has no CTA.
        """
        if self.address is None:
            extents = [extent(shape.values) for extent in self._tensor_map.extents]
            if not (all(extents) and address):
                return
            self._encoded = _encoded(self._tensor_map, extents, address)
            for array, index in self._pointers:
                array[index] = int(self._encoded.getPtr())
        else:
            call("moving a tensor map", cu.cuTensorMapReplaceAddress(self._encoded, address))
        self.address = address


def _encoded(tensor_map: TensorMap, extents: Sequence[int], address: int) -> Any:
    """A CUtensorMap over a contiguous tensor of these extents, innermost first."""
    pitch = _ELEMENT_BYTES[tensor_map.element]
    strides = []
    for extent in extents[:-1]:
        pitch *= extent
        strides.append(cu.cuuint64_t(pitch))
    return call(
        "encoding a tensor map",
        cu.cuTensorMapEncodeTiled(
            _MAP_ELEMENTS[tensor_map.element],
            len(extents),
            address,
            [cu.cuuint64_t(extent) for extent in extents],
            strides,
            [cu.cuuint32_t(size) for size in tensor_map.box],
            [cu.cuuint32_t(1)] * len(extents),
            cu.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            _MAP_SWIZZLES[tensor_map.swizzle_bytes],
            cu.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
            cu.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        ),
    )


def _unique(parameters: Sequence[Parameter], type_: str) -> list[str]:
    return list(dict.fromkeys(parameter.name for parameter in parameters if parameter.type == type_))


def _aligned(size: int) -> int:
    return -(-size // _BUFFER_ALIGNMENT) * _BUFFER_ALIGNMENT
