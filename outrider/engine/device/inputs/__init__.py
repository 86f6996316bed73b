"""Static input tensors of a round, filled from the host before each launch.

distribution_inputs.py     Draft distributions on their way to the GPU.
prefill_chunks.py          Prefill chunks of a round.
round_inputs.py            Static input tensors of a round.
round_rows.py              Rows of a round in columns.
token_masks.py             Allowed-token masks of a launch.
"""
