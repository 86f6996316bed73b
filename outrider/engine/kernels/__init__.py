"""Triton kernels of the device engine, each beside a plain torch twin.

`name(...)` dispatches: CUDA tensors go to `name_triton`, all others to `name_torch`, the twin that
says what is computed. CI compares the two under TRITON_INTERPRET=1.

`linear`, `attention`, `acceptance`, `warp` and `drafts` are the parts of a round; what they share
(keys of the noise, the sessions' state, norms, sampling) is here.

embedding.py               Embedding rows of a few tokens, where torch's lookup is slower than a
                           layer's small kernels.
finite.py                  Detection of rows of logits that have no finite logit, before anything
                           edits them.
noise.py                   The noise of `outrider.spec.noise` inside kernels, and the best of a tile
                           of perturbed scores.
norm.py                    RMSNorm before a product, and the gated activation of products that do
                           not fuse it.
runtime.py                 What all kernels share.
sampling.py                Tokens from logits on the device.
session_tensors.py         Tensors that the device keeps of the sessions between rounds, one row a
                           session slot.
token_rows.py              Token rows of a round: root, then drafts.
"""
