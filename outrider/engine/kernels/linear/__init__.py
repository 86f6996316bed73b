"""Products with a small number of rows, and what is joined to them: norms, rotation, KV writes.

`fused` says what is computed and dispatches; `configs` chooses tiles, `launch` and `kernel` run.

configs.py                 Launch configurations of the skinny matrix product, tuned for the shapes
                           of Llama-3.1-8B.
fused.py                   Fused matrix products: preceding RMSNorm, following activation or
                           residual.
invariant.py               Batch-invariant matrix products: the bits of a row depend on the row and
                           the weight alone.
kernel.py                  Triton kernel of the weight-streaming (skinny) matrix product.
launch.py                  Launch of the weight-streaming kernel, and the workspace of products with
                           a split K.
qkv.py                     Fused QKV projection: matrix product, rotary embedding, and the write of
                           KV to the cache.
"""
