"""Attention of trees over a paged cache, and what writes, lays out and compacts that cache.

`tree` says what is computed and dispatches; `config` chooses tiles, `kernel` runs.

compaction.py              Making what a round accepted contiguous.
config.py                  Launch parameters of the attention kernels.
kernel.py                  The kernels of `outrider.engine.kernels.attention.tree`.
layout.py                  Where the token rows of a round go.
rotary.py                  Rotary embedding of fresh queries and keys, and the write of K/V to the
                           cache.
tree.py                    Attention of the rows of a round over the paged K/V cache.
"""
