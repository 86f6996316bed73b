"""Tree attention over the paged KV cache, and the kernels that write and compact that cache.

`tree` defines the computation and dispatches to PyTorch or Triton, `config` chooses launch
parameters, and `kernel` has the Triton kernels.

compaction.py              Compaction after acceptance: the KV and the features of accepted nodes
                           become contiguous.
config.py                  Launch parameters of the attention kernels by shape: tile sizes and
                           splits of the context.
invariant.py               Batch-invariant attention over the paged KV cache: the result of a row
                           does not depend on other rows.
invariant_kernel.py        Triton kernels of batch-invariant attention over the paged KV cache.
kernel.py                  Triton kernels of tree attention over the paged KV cache, with a split
                           context.
layout.py                  Layout of the token rows of a round: positions, KV slots and the tree
                           mask.
rotary.py                  Rotary embedding of new queries and keys, and the write of KV to the
                           cache.
tree.py                    Tree attention: the token rows of a round attend to the paged KV cache
                           and to their ancestors.
"""
