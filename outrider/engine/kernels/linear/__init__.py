"""Products with a small number of rows, and what is joined to them: norms, rotation, K/V writes.

`fused` says what is computed and dispatches; `configs` chooses tiles, `launch` and `kernel` run.

configs.py                 Launch configurations of the skinny matrix product, tuned for the shapes
                           of Llama-3.1-8B.
fused.py                   Matrix products with the activation or residual after them fused in, and
                           the norm before them.
kernel.py                  The weight-streaming kernel behind `linear.fused_linear_triton`.
launch.py                  Launch of the weight-streaming kernel, and the workspace of products
                           whose K is split.
qkv.py                     The product of queries, keys and values with what follows it.
"""
