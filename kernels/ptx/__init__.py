"""A virtual machine that executes PTX on the CPU: what proves a kernel without its GPU.

``parser`` reads the text, ``decode`` gives each instruction its meaning, ``program`` its registers, and ``machine``
runs whole CTAs, warp by warp, under a schedule that a seed chooses. The interpreter is C (``vm/``), compiled on first
use; each opcode is one small function there. Asynchronous operations land late and in any order that the ISA allows; a
detector reports accesses that nothing orders. An instruction that the machine does not know is an error, never skipped.

Needs numpy and ziglang (the extra ``verify``).
"""
