"""Products with a small number of rows, and what is joined to them: norms, rotation, K/V writes.

`fused` says what is computed and dispatches; `configs` chooses tiles, `launch` and `kernel` run.
"""
