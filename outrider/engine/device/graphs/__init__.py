"""CUDA graphs and the batch shapes that they are captured for.

graph_cache.py             Cache of captured CUDA graphs.
shape_family.py            All batch shapes that are captured.
shapes.py                  Batch shapes (buckets) of rounds.
"""
