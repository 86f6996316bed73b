"""Triton kernels of the device engine, each beside a plain torch twin.

`name(...)` dispatches: CUDA tensors go to `name_triton`, all others to `name_torch`, the twin that
says what is computed. CI compares the two under TRITON_INTERPRET=1.
"""
