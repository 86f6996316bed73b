"""Static input tensors of a round, filled from the host before each launch.

distribution_inputs.py     Upload of remote drafters' draft distributions into static device memory.
prefill_chunks.py          Prefill chunks of a round, batched with the decoding sessions.
round_inputs.py            Host-to-device inputs of a bucket's rows: static tensors, uploaded when
                           they change.
round_rows.py              Columns of a round's decoding rows: sessions and the host's drafts for
                           them.
token_masks.py             Allowed-token masks of a launch, uploaded for rows with a grammar.
"""
