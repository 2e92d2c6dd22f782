"""The kernels of a launch as one CUDA graph: what the driver is asked for once instead of once a kernel. Run side.

A driver takes about as long to launch one kernel as to launch a graph of three, and the kernels of a graph follow each
other more closely on the GPU. So a block of launch parameters has a graph, which is instantiated at its first launch
and given the block's parameters again when they have changed.

At most one launch of a graph runs at a time: the driver orders a second one behind the first, whatever their streams.
So blocks are kept by stream. A launch under stream capture does not use a graph of its own: its kernels become nodes
of the one that is being captured.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dsa_planner.driver import call, cu, name_of_failure, relaxed_capture
from dsa_planner.errors import DriverError
from dsa_planner.streams import LEGACY_STREAM

__all__ = ["LaunchGraph", "is_captured"]

_SUCCESS = cu.CUresult.CUDA_SUCCESS
_NOT_CAPTURED = cu.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE


class LaunchGraph:
    """Kernels one after the other, instantiated.

    Args:
        kernels: positions of the kernels in the three sequences that follow, in launch order.
        functions: CUfunctions.
        configs: a CUlaunchConfig each; their streams are not used.
        parameters: for each kernel, the address of its parameter pointers. They are read now and at each ``update``.

    Raises:
        DriverError: the driver refused.
    """

    def __init__(
        self, kernels: Sequence[int], functions: Sequence[Any], configs: Sequence[Any], parameters: Sequence[int]
    ) -> None:
        self.behind = False
        """Whether parameters have changed since they were read."""
        what = "making the graph of a launch"
        self._nodes = []
        self._executable = None
        with relaxed_capture():
            self._graph = call(what, cu.cuGraphCreate(0))
            try:
                before: list[Any] = []
                for index in kernels:
                    config = configs[index]
                    node = cu.CUDA_KERNEL_NODE_PARAMS()
                    node.func = functions[index]
                    node.blockDimX, node.blockDimY, node.blockDimZ = config.blockDimX, 1, 1
                    node.gridDimX, node.gridDimY, node.gridDimZ = config.gridDimX, 1, 1
                    node.sharedMemBytes = config.sharedMemBytes
                    node.kernelParams = parameters[index]
                    before = [call(what, cu.cuGraphAddKernelNode(self._graph, before, len(before), node))]
                    self._nodes.append((before[0], node, config))
                self._executable = call(what, cu.cuGraphInstantiate(self._graph, 0))
            except BaseException:
                self.close()
                raise

    def read_grids(self) -> None:
        """Read the grids again, for the next ``update``."""
        for _, node, config in self._nodes:
            node.gridDimX = config.gridDimX

    def update(self) -> None:
        """Take over parameters, and grids that were read again, for the launches to come; those under way keep theirs.

        Raises:
            DriverError: the driver refused; the graph is then to be closed.
        """
        for handle, node, _ in self._nodes:
            (status,) = cu.cuGraphExecKernelNodeSetParams(self._executable, handle, node)
            if status != _SUCCESS:
                raise DriverError(
                    "changing the graph of a launch",
                    f"the CUDA driver answered {name_of_failure(status)}",
                    "set DSA_PLAN_LAUNCH=kernels to launch without graphs",
                )
        self.behind = False

    def launch(self, stream: int) -> Any:
        """Launch on a stream; the driver's status."""
        return cu.cuGraphLaunch(self._executable, stream)[0]

    def close(self) -> None:
        """Free it; what is under way ends first. A driver that refuses has failed before, and has said so."""
        if self._executable is not None:
            cu.cuGraphExecDestroy(self._executable)
        cu.cuGraphDestroy(self._graph)


def is_captured(stream: int) -> bool:
    """Whether a stream is being captured, or not even the driver can tell: a launch then says what is wrong."""
    if stream <= LEGACY_STREAM:  # the default stream cannot be
        return False
    status, capture = cu.cuStreamIsCapturing(stream)
    return bool(status != _SUCCESS or capture != _NOT_CAPTURED)
