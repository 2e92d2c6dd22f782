"""Where plans are kept: the plan file, the layers, bundles, and the index.

==============  ================================================================ ==============
``canonical``   canonical JSON, from which every id is derived                   both sides
``disk``        files read with a bound, and written so that they stay           both sides
``planfile``    one plan in one file                                             both sides
``listing``     the list of a bundle's files, and its signature                  both sides
``layer``       one folder of plan files, for reading                            both sides
``search``      the layers of a process, in order                                both sides
``writable``    single flight, publish, recency, eviction, pruning               build side
``bundle``      export, import and verify                                        build side
``locks``       locks between processes                                          build side
``index``       statistics about builds, in diskcache                            build side
==============  ================================================================ ==============

The one invariant: a plan file is found by the id that its own content gives, or not at all. Nothing here imports the
planner or the kernels, except for the error classes.
"""
