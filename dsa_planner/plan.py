"""A plan on a device: load its cubin once, then launch it. Run side.

Loading forces every kernel in, so that nothing is left to load lazily at the first launch, and compares the driver's
own account of the kernels' parameters with the manifest.

A launch checks its tensors, packs their addresses and a few numbers into one block of memory, and has the driver launch
the kernels as one graph on the caller's stream (``launch_graph``). It synchronises nothing. Where the caller brings no
workspace, scratch comes from torch's allocator, and a stream's next launch takes it again if it is small. What depends
on shapes only is kept from the launch before and made again when they change; likewise what depends on addresses.
Nothing is looked up by shape.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from dsa_planner import envelope, streams
from dsa_planner.arguments import ArgumentCheck, Tensors, dtype_name
from dsa_planner.cache.planfile import PlanFile
from dsa_planner.driver import Device, call, cu, device, invoke, name_of_failure
from dsa_planner.errors import DeviceMismatchError, DriverError, PlanFileError, UnsupportedError, shown
from dsa_planner.launch_block import Block, BlockLayout, Shape, workspace_bytes
from dsa_planner.launch_graph import is_captured
from dsa_planner.launch_record import PARAMETER_BYTES, KernelLaunch, LaunchRecord
from dsa_planner.settings import LAUNCHES

if TYPE_CHECKING:
    import torch

__all__ = ["Plan"]

_SUCCESS = cu.CUresult.CUDA_SUCCESS
_MOST_BLOCKS = 16  # streams whose launch parameters and scratch a plan keeps
_MOST_KEPT_BYTES = 32 << 20  # of scratch, for a stream; beyond, a call takes so long that an allocation is nothing
_NO_SUCH_PARAMETER = cu.CUresult.CUDA_ERROR_INVALID_VALUE


class Plan:
    """A compiled plan, loaded on one device.

    Made by ``dsa_planner.load_plan``. One plan serves every shape; it may be launched from several threads and on
    several streams at once. Its memory on the device is its code, and, for launches without a workspace, scratch of at
    most 32 MiB for each of the 16 streams used last.

    Args:
        file: the plan file.
        ordinal: the device.
        launch: "graph" to launch the kernels as one CUDA graph, "kernels" to launch each.

    Raises:
        DeviceMismatchError: the device's compute capability is not one that the plan's arch admits.
        PlanFileError: the cubin's parameters are not those of the manifest.
        DriverError: no driver, or it refuses the cubin.
    """

    def __init__(self, file: PlanFile, ordinal: int, launch: str = LAUNCHES[0]) -> None:
        self.config: Mapping[str, Any] = file.config
        self.plan_id = file.plan_id
        self.build_id = file.build_id
        self.device = ordinal
        self.row = envelope.support_of(self.config)
        target = device(ordinal)
        if target.capability not in self.row.capabilities:
            raise DeviceMismatchError(
                f"plan {self.plan_id[:12]} for {self.config['arch']} on {target.name} (compute capability "
                f"{target.capability[0]}.{target.capability[1]})",
                f"{self.config['arch']} runs on {', '.join(f'{a}.{b}' for a, b in self.row.capabilities)}",
                "load the plan of this device's arch",
            )
        self._target = target
        try:
            self._record = LaunchRecord.parse(file.launch)
            symbols = _symbols(file, self._record)
        except (ValueError, KeyError, TypeError) as error:
            raise PlanFileError(
                f"plan {self.plan_id}", f"its launch record is malformed ({error})", "build it again"
            ) from None
        self._functions = _load(file, self._record, symbols, target)
        self.check = ArgumentCheck(self.row, self.config, ordinal)
        self._layout = BlockLayout(self._record)
        self._as_graph = launch == "graph"
        self._blocks: dict[int, Block] = {}
        """By stream, the block of its last launch. A launch takes it out, so that threads do not meet."""
        self._shape: Shape | None = None  # of the last launch
        self._constants = {name: self.config[name] for name in ("heads", "head_dim", "topk")}
        self._constants["multiprocessors"] = target.multiprocessors

    def __repr__(self) -> str:
        backend, arch, topk = (self.config[name] for name in ("backend", "arch", "topk"))
        return f"<Plan {self.plan_id[:12]} {backend} {arch} topk={topk} on cuda:{self.device}>"

    def workspace_bytes(self, batch: int, s_k: int, d_index_k: str | torch.dtype = "bf16") -> int:
        """Bytes of workspace that a launch needs.

        Args:
            batch: B.
            s_k: S_k.
            d_index_k: dtype of d_index_k, "bf16" or "fp32", or the torch dtype.

        Returns:
            The size for any S_q. A bf16 d_index_k takes an fp32 accumulator, 4 * batch * s_k * head_dim; a backend that
            draws rows by tickets a counter; a reproducible d_index_k planes of at most 1 GiB. Each is rounded up.

        Raises:
            UnsupportedError: another dtype, or an extent that is no count.
        """
        dtype = d_index_k if isinstance(d_index_k, str) else dtype_name(d_index_k)
        if dtype not in self.row.d_index_k:
            raise envelope.refusal("d_index_k", dtype, "d_index_k cannot have this dtype", self.row.d_index_k)
        for name, extent in (("batch", batch), ("s_k", s_k)):
            if type(extent) is not int or extent < 0:
                raise UnsupportedError(
                    f"{name}={shown(extent)}", f"{name} must be a count", f"give {name} as an integer"
                )
        values = {**self._constants, "keys": batch * s_k, "rows": 0, "s_q": 0, "id_limit": 0, "id_offset": 0}
        self._record.complete(values)
        return workspace_bytes(self._record.buffers, values, dtype)

    def launch(
        self,
        index_q: torch.Tensor,
        weights: torch.Tensor,
        index_k: torch.Tensor,
        attn_score: torch.Tensor,
        index_score: torch.Tensor,
        topk_indices: torch.Tensor,
        grad_loss: torch.Tensor,
        *,
        d_index_q: torch.Tensor,
        d_weights: torch.Tensor,
        d_index_k: torch.Tensor,
        sm_scale: float = 1.0,
        loss_coeff: float = 1.0,
        block_I: int = 128,
        topk_indices_global: bool = False,
        workspace: torch.Tensor | None = None,
        stream: Any = None,
    ) -> None:
        """Compute the gradients into the caller's buffers, on the caller's stream; return without waiting.

        Tensors and scalars are those of ``dsa_planner.indexer_backward``; the three outputs are required here, and all
        tensors are checked before anything runs.

        Args:
            workspace: at least ``workspace_bytes(B, S_k, dtype of d_index_k)`` bytes on the device, of any dtype,
                aligned to 16 bytes; not shared with another launch in flight. None takes it from torch's allocator.
            stream: None for torch's current stream, or any stream of the device (see ``streams.handle_of``).

        Raises:
            UnsupportedError: a value, shape, dtype, stride or alignment outside the contract; buffers that overlap.
            DeviceMismatchError: a tensor or the stream on another device.
            DriverError: the driver refused. Where kernels are launched one by one (under stream capture, or with
                DSA_PLAN_LAUNCH=kernels) and it refused another than the first, attn_score has been overwritten:
                compute it again before a second try.
        """
        tensors = (
            index_q, weights, index_k, attn_score, index_score, topk_indices, grad_loss,
            d_index_q, d_weights, d_index_k,
        )  # fmt: skip
        envelope.check_scalars(self.row, sm_scale, loss_coeff, block_I, topk_indices_global)
        shape = self.shape_of(tensors, topk_indices_global)
        handle = streams.handle_of(stream, self.device)
        self.launch_checked(shape, tensors, sm_scale, loss_coeff, workspace, handle)

    def shape_of(self, tensors: Tensors, topk_indices_global: bool) -> Shape:
        """Check all tensors of a launch; what follows from their shapes and dtypes.

        Raises:
            UnsupportedError, DeviceMismatchError: as for ``launch``.
        """
        shape = self._shape
        if shape is None or shape.ids_are_flat is not topk_indices_global or not shape.admits(tensors):
            if not (self.check.inputs_ok(tensors) and self.check.outputs_ok(tensors)):
                self.check.explain(tensors)
            dk_dtype = self.check.d_index_k_names[tensors[9].dtype]
            shape = Shape(self._record, self._constants, tensors, topk_indices_global, dk_dtype)
            self._shape = shape
        return shape

    def launch_checked(
        self,
        shape: Shape,
        tensors: Tensors,
        sm_scale: float,
        loss_coeff: float,
        workspace: torch.Tensor | None,
        stream: int,
    ) -> None:
        """``launch`` after the checks of tensors (``shape_of``) and scalars, for callers in this package."""
        # A thread that has not used the GPU yet has no context, and without one no tensor map can be encoded.
        status, context = cu.cuCtxGetCurrent()
        if status == _SUCCESS and int(context) == self._target.context_address:
            self._launch(shape, tensors, sm_scale, loss_coeff, workspace, stream)
        else:
            with self._target.current():
                self._launch(shape, tensors, sm_scale, loss_coeff, workspace, stream)

    def _launch(
        self,
        shape: Shape,
        tensors: Tensors,
        sm_scale: float,
        loss_coeff: float,
        workspace: torch.Tensor | None,
        stream: int,
    ) -> None:
        block = self._blocks.pop(stream, None) or Block(self._layout)
        try:
            captured = is_captured(stream)
            addresses = [tensor.data_ptr() for tensor in tensors]
            if not (needed := shape.workspace_bytes):
                addresses.append(0)
            else:
                if workspace is None:
                    workspace = self._scratch(block, needed, tensors[2], stream, captured)
                elif not self.check.workspace_ok(workspace, needed):
                    self.check.explain_workspace(workspace, needed)
                addresses.append(workspace.data_ptr())
            block.pack(shape, addresses, sm_scale, loss_coeff)
            # Autograd counts writes, to notice that a tensor which it saved has changed since.
            self.check.count_write((tensors[3], tensors[7], tensors[8], tensors[9]))
            if not self._as_graph or captured or len(shape.kernels) < 2:
                self._launch_kernels(block, shape, stream)
            else:
                status = block.graph(shape, self._functions).launch(stream)
                if status != _SUCCESS:
                    raise self._refused("the kernels", status)
        except BaseException:  # what the block now holds is unknown
            block.close()
            raise
        self._keep(block, stream)

    def _launch_kernels(self, block: Block, shape: Shape, stream: int) -> None:
        handle = cu.CUstream(stream)
        for index in shape.kernels:
            config = block.configs[index]
            config.hStream = handle
            (status,) = cu.cuLaunchKernelEx(config, self._functions[index], block.parameters[index], 0)
            if status != _SUCCESS:
                raise self._refused(self._record.kernels[index].name, status)

    def _refused(self, what: str, status: Any) -> DriverError:
        return DriverError(
            f"launching {what} of {self!r}",
            f"the CUDA driver answered {name_of_failure(status)}",
            "an earlier kernel may have failed: run with CUDA_LAUNCH_BLOCKING=1",
        )

    def _keep(self, block: Block, stream: int) -> None:
        """Keep a block for the stream's next launch, unless another thread has kept one for it in the meantime."""
        if self._blocks.setdefault(stream, block) is not block:
            block.close()
        while len(self._blocks) > _MOST_BLOCKS:
            with suppress(StopIteration, KeyError, RuntimeError):  # another thread was faster
                self._blocks.pop(next(iter(self._blocks))).close()

    def _scratch(self, block: Block, needed: int, like: torch.Tensor, stream: int, captured: bool) -> torch.Tensor:
        """Workspace from torch's allocator; if it is small, that of the stream's last launch.

        Streams come and go, and their handles are used again, so the stream is known by its id. What is captured may
        run beside any stream, so it gets memory of its own, from the graph's pool.
        """
        owner = 0
        if stream > streams.LEGACY_STREAM and not captured:
            owner = int(call("identifying a stream", cu.cuStreamGetId(stream)))
        kept = block.scratch
        if kept is not None and kept[0] == owner and kept[1].nbytes >= needed and not captured:
            return kept[1]
        with streams.allocating_on(stream, self.device):
            scratch = like.new_empty(needed, dtype=self.check.uint8)
        if needed <= _MOST_KEPT_BYTES and not captured:
            block.scratch = (owner, scratch)
        return scratch


def _symbols(file: PlanFile, record: LaunchRecord) -> list[tuple[str, list[tuple[int, int]]]]:
    """For each kernel of the record, its symbol and the (offset, size) of each parameter, from the manifest.

    Raises:
        ValueError, KeyError, TypeError: the manifest does not fit the record.
    """
    entries = file.manifest["kernels"]
    if [entry["name"] for entry in entries] != [kernel.name for kernel in record.kernels]:
        raise ValueError("its kernels are not those of the manifest")
    return [(str(entry["symbol"]), [(int(at), int(size)) for at, size in entry["parameters"]]) for entry in entries]


def _load(
    file: PlanFile, record: LaunchRecord, symbols: list[tuple[str, list[tuple[int, int]]]], target: Device
) -> list[Any]:
    """Load a cubin and force its kernels in; their functions, in the record's order."""
    what = f"loading plan {file.plan_id[:12]}"
    library = invoke(what, "cuLibraryLoadData", file.cubin, [], [], 0, [], [], 0)
    functions = []
    with target.current():
        for kernel, (symbol, parameters) in zip(record.kernels, symbols, strict=True):
            handle = invoke(what, "cuLibraryGetKernel", library, symbol.encode())
            _check_parameters(file, kernel, parameters, handle)
            if kernel.shared_bytes:
                attribute = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                invoke(what, "cuKernelSetAttribute", attribute, kernel.shared_bytes, handle, target.handle)
            functions.append(invoke(what, "cuKernelGetFunction", handle))
    return functions


def _check_parameters(file: PlanFile, kernel: KernelLaunch, parameters: list[tuple[int, int]], handle: Any) -> None:
    """Refuse a cubin whose parameters, as the driver sees them, are not those of the manifest and the launch record."""
    found: list[tuple[int, int]] = []
    while (
        info := invoke("checking a plan", "cuKernelGetParamInfo", handle, len(found), end=_NO_SUCH_PARAMETER)
    ) is not None:
        found.append((int(info[0]), int(info[1])))
    sizes = [PARAMETER_BYTES[parameter.type] for parameter in kernel.parameters]
    if found != parameters or [size for _, size in found] != sizes:
        raise PlanFileError(
            f"plan {file.plan_id}",
            f"kernel {kernel.name} has parameters {found} (offset, size), not {parameters} with sizes {sizes}",
            "build it again",
        )
