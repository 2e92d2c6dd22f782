"""Measure plans on the GPU at hand, beside its limits and beside cuDNN frontend's operator. Run side.

``python -m dsa_planner.bench`` needs what launching a plan needs, torch and cuda.bindings; ``dsa-plan bench`` measures
the same. One file, one job:

* ``request``: what to measure, checked before anything runs;
* ``inputs``: tensors, and the distributions of topk_indices;
* ``gpu``: the clocks: kernels by CUPTI, calls by events, host time;
* ``floor``: the least time of a pair, as a kernel;
* ``contenders``: who is measured: plans, and the peer;
* ``run``: the rounds, in which contenders take turns;
* ``report``: statistics, and the answer as JSON and as rows of a table; ``plot``: as a picture.
"""
