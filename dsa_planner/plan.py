"""A plan on a device: load its cubin once, then launch it. Run side.

A launch checks its tensors, packs their addresses and a few numbers into one block of memory, and has the driver launch
the kernels as one graph on the caller's stream (``launch_graph``). It synchronises nothing. What depends on shapes only
is kept from the launch before and made again when they change; likewise what depends on addresses. Nothing is looked up
by shape. Where the caller brings no workspace, memory is the stream's own (``device_memory``); the cubin is one of
``modules``.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from dsa_planner import dlpack, envelope, streams
from dsa_planner.arguments import ArgumentCheck, Tensors, dtype_name
from dsa_planner.audit import audited
from dsa_planner.cache.planfile import PlanFile
from dsa_planner.device_memory import StreamMemory, captured_scratch, memory_of
from dsa_planner.driver import cu, device, name_of_failure, refuse_fork
from dsa_planner.errors import CaptureError, DeviceMismatchError, DriverError, PlanFileError, UnsupportedError, shown
from dsa_planner.launch_block import Block, BlockLayout, Shape, spans_of, workspace_bytes
from dsa_planner.launch_graph import is_captured
from dsa_planner.launch_record import LaunchRecord
from dsa_planner.modules import module_of
from dsa_planner.settings import DEFAULT_MODULE_BYTES, LAUNCHES

if TYPE_CHECKING:
    import torch

__all__ = ["Plan"]

_SUCCESS = cu.CUresult.CUDA_SUCCESS
_MOST_BLOCKS = 64  # streams whose launch parameters and graphs a plan keeps; torch has 32 of each priority
_one_by_one = threading.Lock()
"""Held while kernels are launched one by one, or those of two threads on one stream would take turns."""


class Plan:
    """A compiled plan, loaded on one device.

    Made by ``dsa_planner.load_plan``. One plan serves every shape; it may be launched from several threads and on
    several streams at once.

    Args:
        file: the plan file.
        ordinal: the device.
        launch: "graph" to launch the kernels as one CUDA graph, "kernels" to launch each.
        audit: audit every launch, see ``launch``.
        module_bytes: bytes of cubins that the device is held to.

    Raises:
        DeviceMismatchError: the device's compute capability is not one that the plan's arch admits.
        PlanFileError: the cubin's parameters are not those of the manifest.
        DriverError: no driver, or it refuses the cubin.
    """

    def __init__(
        self,
        file: PlanFile,
        ordinal: int,
        launch: str = LAUNCHES[0],
        audit: bool = False,
        module_bytes: int = DEFAULT_MODULE_BYTES,
    ) -> None:
        self.config: Mapping[str, Any] = file.config
        self.plan_id = file.plan_id
        self.build_id = file.build_id
        self.file_sha256 = file.encode()[-32:].hex()
        """The digest that the plan file ends with."""
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
            self._module = module_of(file, self._record, target, module_bytes)
        except (ValueError, KeyError, TypeError) as error:
            raise PlanFileError(
                f"plan {self.plan_id}", f"its launch record is malformed ({error})", "build it again"
            ) from None
        self._module.load()
        self._module.users.add(self)
        self._memory = memory_of(target)
        with target.current():
            self._memory.prepare()
        self.check = ArgumentCheck(self.row, self.config, ordinal)
        self._layout = BlockLayout(self._record)
        self._as_graph = launch == "graph"
        self._audit = audit
        self._blocks: dict[int, Block] = {}
        """By stream, the block of its last launch. A launch takes it out, so that threads do not meet."""
        self._shape: Shape | None = None  # of the last launch
        self._constants = {name: self.config[name] for name in ("heads", "head_dim", "topk")}
        self._constants["multiprocessors"] = target.multiprocessors
        self.launches = 0
        """Launches so far; from several threads at once, roughly. ``captured`` of them were under stream capture."""
        self.captured = 0

    def __repr__(self) -> str:
        backend, arch, topk = (self.config[name] for name in ("backend", "arch", "topk"))
        return f"<Plan {self.plan_id[:12]} {backend} {arch} topk={topk} on cuda:{self.device}>"

    def prepare(self, device: int | str | torch.device | None = None) -> Plan:
        """Do now what a launch under stream capture could not: load the cubin, force its kernels in, take the memory.

        ``load_plan`` has done it once; since then the cubin may have been unloaded, to keep within
        DSA_PLAN_MODULE_BYTES. Once captured, it stays.

        Args:
            device: None, or the plan's device, as for ``load_plan``.

        Returns:
            the plan.

        Raises:
            DeviceMismatchError: another device.
            DriverError: the driver refused.
        """
        if device is not None and (asked := streams.ordinal_of(device)) != self.device:
            raise DeviceMismatchError(
                f"device {asked}", f"{self!r} was loaded for cuda:{self.device}", f"load a plan for cuda:{asked}"
            )
        refuse_fork()
        self._module.touch()
        self._module.load()
        with self._target.current():
            self._memory.prepare()
        return self

    def stats(self) -> dict[str, int | bool]:
        """How often it was launched, how often of these under capture, and whether its cubin is loaded, and stays."""
        loaded = self._module.functions is not None
        return {"launches": self.launches, "captured": self.captured, "loaded": loaded, "stays": self._module.stays}

    def forget_functions(self) -> None:
        """Free the graphs of launches, whose functions are about to be unloaded; for ``modules``."""
        while self._blocks:
            with suppress(KeyError):  # another thread was faster
                self._blocks.popitem()[1].close()

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
        dtype = d_index_k if isinstance(d_index_k, (str, int)) else dtype_name(d_index_k)
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
        audit: bool | None = None,
    ) -> None:
        """Compute the gradients into the caller's buffers, on the caller's stream; return without waiting.

        Tensors and scalars are those of ``dsa_planner.indexer_backward``; the three outputs are required here, and all
        tensors are checked before anything runs. Inputs may be CUDA arrays of any library with DLPack (``dlpack``).

        Under stream capture the launch becomes part of the graph; each replay consumes the attn_score that it finds.

        Args:
            workspace: at least ``workspace_bytes(B, S_k, dtype of d_index_k)`` bytes on the device, of any dtype,
                aligned to 16 bytes; not shared with another launch in flight. None uses memory that the stream owns,
                or under capture memory of the graph.
            stream: None for torch's current stream, or any stream of the device (see ``streams.handle_of``).
            audit: refuse the launch if another one that may run at the same time uses its memory (see ``audit``); it
                may wait for that one. None for what DSA_PLAN_AUDIT said when the plan was loaded.

        Raises:
            UnsupportedError: a value, shape, dtype, stride or alignment outside the contract; buffers that overlap.
            DeviceMismatchError: a tensor or the stream on another device.
            CaptureError: under capture, what a replay could not repeat: the plan is not loaded, or there is no
                workspace and the capture was not begun by torch.
            AuditError: the audit found another launch that may run at the same time and shares memory.
            DriverError: the driver refused. Where kernels are launched one by one (under stream capture, or with
                DSA_PLAN_LAUNCH=kernels) and it refused another than the first, attn_score has been overwritten:
                compute it again before a second try.
        """
        tensors: Tensors = (
            index_q, weights, index_k, attn_score, index_score, topk_indices, grad_loss,
            d_index_q, d_weights, d_index_k,
        )  # fmt: skip
        envelope.check_scalars(self.row, sm_scale, loss_coeff, block_I, topk_indices_global)
        handle = streams.handle_of(stream, self.device)
        try:
            shape = self.shape_of(tensors, topk_indices_global)
        except UnsupportedError:
            if not dlpack.has_foreign(tensors, workspace):
                raise
            tensors, workspace = dlpack.as_tensors(tensors, workspace, handle)
            shape = self.shape_of(tensors, topk_indices_global)
        self.launch_checked(shape, tensors, sm_scale, loss_coeff, workspace, handle, audit)

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
        audit: bool | None = None,
    ) -> None:
        """``launch`` after the checks of tensors (``shape_of``) and scalars, for callers in this package."""
        if audit is None:
            audit = self._audit
        elif type(audit) is not bool:
            raise UnsupportedError(f"audit={shown(audit)}", "it must be True, False or None", "pass bool(audit)")
        # A thread that has not used the GPU yet has no context, and without one no tensor map can be encoded.
        status, context = cu.cuCtxGetCurrent()
        if status == _SUCCESS and int(context) == self._target.context_address:
            self._launch(shape, tensors, sm_scale, loss_coeff, workspace, stream, audit)
        else:
            refuse_fork()
            with self._target.current():
                self._launch(shape, tensors, sm_scale, loss_coeff, workspace, stream, audit)

    def _launch(
        self,
        shape: Shape,
        tensors: Tensors,
        sm_scale: float,
        loss_coeff: float,
        workspace: torch.Tensor | None,
        stream: int,
        audit: bool,
    ) -> None:
        """Find the functions, the block and the memory of a launch, and run it.

        Everything here runs at every launch, so it is one function where two would read better.
        """
        module = self._module
        token = object()
        module.launching[token] = None
        try:
            captured = is_captured(stream)
            functions = module.functions or self._functions_again(captured)
            block = self._blocks.pop(stream, None) or self._new_block(stream)
            owner: StreamMemory | None = None
            base = lent = 0
            try:
                addresses = [tensor.data_ptr() for tensor in tensors]
                if needed := shape.workspace_bytes:
                    if workspace is not None:
                        if not self.check.workspace_ok(workspace, needed):
                            workspace = self._workspace_of_another_library(workspace, needed, stream)
                        base = workspace.data_ptr()
                    elif captured:
                        workspace = captured_scratch(needed, tensors[2], stream, self.device)
                        base = workspace.data_ptr()
                    else:
                        memory = self._memory.of(stream)
                        memory.lock.acquire()
                        owner = memory
                        base = (
                            memory.counter if shape.needs_only_a_counter else self._memory.kept(memory, needed, stream)
                        )
                        if not base:
                            base = lent = self._memory.lend(needed, stream)
                for offset in shape.offsets:
                    addresses.append(base + offset)
                block.pack(shape, addresses, sm_scale, loss_coeff)
                # Autograd counts writes, to notice that a tensor which it saved has changed since.
                self.check.count_write((tensors[3], tensors[7], tensors[8], tensors[9]))
                as_graph = self._as_graph and not captured and len(shape.kernels) > 1
                if audit and not captured:
                    with audited(self.device, stream, spans_of(shape, addresses)):
                        self._hand_over(block, shape, functions, stream, as_graph)
                else:
                    self._hand_over(block, shape, functions, stream, as_graph)
            except BaseException:  # what the block now holds is unknown
                block.close()
                raise
            finally:
                if owner is not None:
                    try:
                        if lent:
                            self._memory.give_back(lent, stream)
                    finally:
                        owner.lock.release()
            self.launches += 1
            if captured:
                self.captured += 1
                module.stays = True
            module.touch()
            self._keep(block, stream)
        finally:
            del module.launching[token]

    def _workspace_of_another_library(self, workspace: Any, needed: int, stream: int) -> torch.Tensor:
        """A workspace that is no torch tensor as one, or an error that says what is wrong with it."""
        found = dlpack.as_tensor("workspace", workspace, stream)
        if not self.check.workspace_ok(found, needed):
            self.check.explain_workspace(found, needed)
        return found

    def _hand_over(self, block: Block, shape: Shape, functions: list[Any], stream: int, as_graph: bool) -> None:
        if as_graph:
            status = block.graph(shape, functions).launch(stream)
            if status != _SUCCESS:
                raise self._refused("the kernels", status)
        else:
            self._launch_kernels(block, shape, functions, stream)

    def _launch_kernels(self, block: Block, shape: Shape, functions: list[Any], stream: int) -> None:
        handle = cu.CUstream(stream)
        with _one_by_one:
            for index in shape.kernels:
                config = block.configs[index]
                config.hStream = handle
                (status,) = cu.cuLaunchKernelEx(config, functions[index], block.parameters[index], 0)
                if status != _SUCCESS:
                    raise self._refused(self._record.kernels[index].name, status)

    def _functions_again(self, captured: bool) -> list[Any]:
        """The functions of a cubin that was unloaded since the last launch."""
        functions = self._module.settled()
        if functions is not None:
            return functions
        if captured:
            raise CaptureError(
                f"a launch of {self!r} under stream capture",
                "its cubin was unloaded to keep within DSA_PLAN_MODULE_BYTES, and a capture cannot load it again",
                "call plan.prepare() before the capture, or raise the limit",
            )
        return self._module.load()

    def _new_block(self, stream: int) -> Block:
        """A block for a stream that has none; what is known of the stream decides whether the cubin can be unloaded."""
        if streams.is_permanent(stream, self.device):
            self._module.streams.add(stream)
        else:
            self._module.stays = True
        return Block(self._layout)

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
