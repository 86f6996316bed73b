"""Triton kernels of the device engine, each beside a PyTorch reference.

`name(...)` dispatches: CUDA tensors go to `name_triton`, all others to `name_torch`, the
reference that says what is computed. CI compares the two under TRITON_INTERPRET=1.

`linear`, `attention`, `acceptance`, `logits_processor` and `drafts` are the parts of a round; what
they share (keys of the noise, the sessions' state, norms, sampling) is here.

compile_ahead.py           Parallel compilation of the Triton kernels that are launched while
                           nothing runs.
embedding.py               Embedding lookup for a few tokens, faster than torch's, with the RMSNorm
                           of the result.
finite.py                  Detection of rows of logits without a finite value, before the logits are
                           processed.
matrix_unit.py             Bit-exact model of the matrix unit of NVIDIA Hopper, for kernels that run
                           in the interpreter.
noise.py                   Triton implementation of `outrider.spec.noise`, and the Gumbel-perturbed
                           argmax of a tile.
norm.py                    RMSNorm and gated SiLU kernels for products that do not fuse them.
runtime.py                 Helpers shared by all kernels: interpreter detection, a safe dot, grid
                           arithmetic.
sampling.py                Token sampling from logits on the device: argmax or Gumbel-perturbed
                           argmax, by session.
session_tensors.py         Per-session tensors that the device keeps between rounds, one row per
                           session slot.
token_rows.py              Builds the verify input of a round: token ids of each session's root and
                           drafts.
"""
