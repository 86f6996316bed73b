"""Draft programs and forwards on the device, for drafters and for the in-process drafter.

alternatives.py            Alternative candidates for each drafted token.
chain_levels.py            Chains drafted level by level for grammars.
draft_forward.py           Interface of draft-model forwards.
draft_masks.py             Allowed-token masks of drafts.
draft_program.py           Draft program over static tensors: chains and trees.
draft_row_state.py         Sampling state of each draft row.
eagle_forward.py           Forward of an EAGLE-3 head.
eagle_weights.py           Weights of an EAGLE-3 head.
grammar_drafts.py          In-process drafts that follow grammars.
in_process_drafter.py      Draft head inside the verifier process.
look_ahead_program.py      Draft program that also drafts for outcomes.
recent_rows.py             Newest draft rows of each slot.
small_model_forward.py     Forward of a small draft model.
"""
