"""Triton kernels of the device engine, each beside a plain torch twin.

`name(...)` dispatches: CUDA tensors go to `name_triton`, all others to `name_torch`, the twin that
says what is computed. CI compares the two under TRITON_INTERPRET=1.

`linear`, `attention`, `acceptance`, `warp` and `drafts` are the parts of a round; what they share
(keys of the noise, the sessions' state, norms, sampling) is here.
"""
