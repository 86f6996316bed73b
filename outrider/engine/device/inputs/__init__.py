"""Static input tensors of a round, filled from the host before each launch.

distribution_inputs.py     Uploads the draft distributions that drafter processes send into static
                           device memory.
prefill_chunks.py          Prefill chunks of a round, batched with the decoding sessions.
round_inputs.py            Static input tensors of a bucket's decoding rows: session slots and
                           drafts, uploaded by the host.
round_rows.py              Decoding rows of a round: the session slot of each row, and the draft
                           that the host has for it.
token_masks.py             Allowed-token masks of a launch, uploaded for rows with a grammar.
"""
