"""Triton kernels of the device engine, each beside a PyTorch reference.

Each function `name(...)` dispatches: CUDA tensors go to `name_triton`, all others to `name_torch`,
the PyTorch reference that defines the result. CI compares the two under TRITON_INTERPRET=1.

The packages `linear`, `attention`, `acceptance`, `logits_processor`, `drafts` and `exchange` hold
the kernels of the parts of a round. The modules of this package hold what they share.

compile_ahead.py           Parallel compilation of Triton kernels before their first launch.
embedding.py               Embedding lookup for a few tokens, faster than torch's, with the RMSNorm
                           of the result.
finite.py                  Detection of rows of logits without a finite value, before the logits are
                           processed.
matrix_unit.py             Bit-exact model of the matrix unit of NVIDIA Hopper, for kernels that run
                           in the interpreter.
noise.py                   Triton implementation of `outrider.spec.noise`, and the Gumbel-perturbed
                           argmax of a tile.
norm.py                    RMSNorm and gated SiLU kernels for matrix products that do not fuse
                           them.
runtime.py                 Helpers shared by all kernels: interpreter detection, a safe dot, grid
                           arithmetic.
sampling.py                Token sampling from logits on the device, with the parameters of each
                           session.
session_tensors.py         Per-session tensors that the device keeps between rounds, one row per
                           session slot.
token_rows.py              Builds the verify input of a round: token ids of each session's root and
                           draft tokens.
"""
