"""CUDA graphs and the batch shapes that they are captured for.

graph_cache.py             CUDA graph cache by key, with an eager mode of the same code.
kernel_compilation.py      Compilation of the kernels of many graphs at once, before the first of
                           them is captured.
shape_family.py            Bounded set of batch shapes of a device's rounds.
shapes.py                  Batch shapes (buckets) of rounds, the keys of CUDA graphs.
"""
