"""Small PTX kernels with known answers: what holds the machine, and a GPU, to the text of the PTX ISA.

Each module registers snippets. Their answers are computed from the ISA's definitions with numpy and Python ints, and
share no code with the machine.
"""

from ptx_snippets import comparison, copies, floating, integer, memory, sync, tcgen05, warp, wgmma  # noqa: F401
from ptx_snippets.framework import REGISTRY, Snippet, TensorMapSpec, differences

__all__ = ["REGISTRY", "Snippet", "TensorMapSpec", "differences"]
