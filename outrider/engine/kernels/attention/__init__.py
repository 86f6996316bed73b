"""Attention of trees over a paged cache, and what writes, lays out and compacts that cache.

`tree` says what is computed and dispatches; `config` chooses tiles, `kernel` runs.

compaction.py              Compaction of accepted rows: KV of all layers and feature rows become
                           contiguous.
config.py                  Launch parameters of the attention kernels by shape: tile sizes and
                           splits of the context.
invariant.py               Batch-invariant attention over the paged KV cache: the bits of a row
                           depend on its path alone.
invariant_kernel.py        Triton kernels of batch-invariant attention over the paged KV cache.
kernel.py                  Triton kernels of tree attention over the paged KV cache, with a split
                           context.
layout.py                  Layout of the token rows of a round: positions, pool slots and the tree
                           mask, from parents.
rotary.py                  Rotary embedding of new queries and keys, and the write of KV to the
                           cache.
tree.py                    Tree attention: the token rows of a round attend to the paged KV cache
                           and to their ancestors.
"""
