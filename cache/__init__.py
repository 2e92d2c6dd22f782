"""Where plans are kept: the plan file, the layers, and the index.

==============  ======================================================================================= =============
``canonical``   canonical JSON, from which every id is derived                                           both sides
``planfile``    one plan in one file                                                                     both sides
``layer``       folders of plan files and the search through them                                        both sides
``writable``    publish, recency, eviction                                                               build side
``index``       statistics about builds, in diskcache                                                    build side
==============  ======================================================================================= =============

The one invariant: a plan file is found by the id that its own content gives, or not at all. Nothing here imports the
planner or the kernels, except for the error classes.
"""
