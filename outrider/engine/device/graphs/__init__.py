"""CUDA graphs and the batch shapes that they are captured for.

graph_cache.py             Cache of CUDA graphs, one for each key, with an eager mode of the same
                           code.
kernel_compilation.py      Compiles the kernels of many graphs in parallel, before the first graph
                           is captured.
shape_family.py            Bounded set of batch shapes in which the rounds of an engine run.
shapes.py                  Batch shapes (buckets) of rounds, which are the keys of their CUDA
                           graphs.
"""
