"""Kernels as data and code: what can be compiled, from which bytes, and how the result is launched.

==================================  ===============================================================================
``catalogue``                       a kernel's launch record, compile options and source digest, without a compiler
``oracle``                          the operation in fp64, the reference for every test and proof
``score_grad``                      stage 1, shared by every backend of an architecture
``round_d_index_k``                 stage 3, the bf16 rounding of the fp32 d_index_k accumulator
``sum_d_index_k``                   stage 3 where d_index_k is to be reproducible
``gemm_stage``                      what stage 2 has in common on all architectures
``gradients_sm90``                  stage 2 of both backends for Hopper
``gradients_sm100``                 stage 2 of both backends for Blackwell
``hopper``                          the instructions that they use
``blackwell``                       those that only Blackwell has
``indexer_backward``                the program of all stages
``indexer_backward_sm90``           what is compiled for a plan for Hopper
``indexer_backward_sm100``          what is compiled for a plan for Blackwell
``cases``                           seeded calls for proofs
``ptx``                             a machine that executes the kernels' PTX
==================================  ===============================================================================

Beside a kernel module ``<name>.py``, whose ``program(config)`` says what to compile, lies ``<name>.json`` with what
must be known without compiling: the source files that enter the digest, the compile options, and the launch record.
Nothing here imports the planner or the cache.
"""
