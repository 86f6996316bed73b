"""Matrix products with few rows, and the operations that are fused with them: norms, rotary
embedding, KV writes.

`fused` defines the products and dispatches to PyTorch, cuBLAS or Triton. `configs` chooses launch
parameters for the Triton kernel in `kernel`, which `launch` launches.

configs.py                 Launch configurations of the skinny matrix product, tuned for the shapes
                           of Llama-3.1-8B.
fused.py                   Matrix products fused with a preceding RMSNorm and a following activation
                           or residual.
invariant.py               Batch-invariant matrix products: the result of a row does not depend on
                           other rows.
kernel.py                  Triton kernel of the weight-streaming (skinny) matrix product.
launch.py                  Launch of the weight-streaming kernel, and the workspace of split-K
                           products.
qkv.py                     Fused QKV projection: matrix product, rotary embedding, and the write of
                           KV to the cache.
"""
