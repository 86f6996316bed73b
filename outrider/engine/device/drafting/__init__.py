"""Drafting on the device: forward passes of draft models, and programs that draft with them.

alternatives.py            Ranks the most probable token ids at each draft position, as alternatives
                           to the drafted token.
chain_levels.py            Drafts in-process chains token by token, so that the host can mask each
                           token by a grammar.
draft_forward.py           Interface of a draft model's forward passes on a device, for EAGLE heads
                           and small models.
draft_masks.py             Allowed-token masks for in-process drafts of sessions with a grammar.
draft_program.py           Drafts chains and dynamic trees on static device tensors, with any
                           `DraftForward`.
draft_row_state.py         Sampling state of draft rows whose session slot is not the slot of their
                           block table.
eagle_forward.py           Forward pass of an EAGLE-3 head (Li et al., 2025), one decoder layer over
                           features of the target.
eagle_weights.py           Weight tensors of an EAGLE-3 head, for kernels that fuse several of its
                           modules.
grammar_drafts.py          In-process drafts of sessions with a grammar, drafted under masks and
                           read back by the host.
in_process_drafter.py      Draft head inside the verifier process, for the placements `colocated`
                           and `fused`.
look_ahead_program.py      Look-ahead drafting on static device tensors: drafts for outcomes of an
                           unverified proposal.
recent_rows.py             Newest draft rows of every session, kept on the device as input of later
                           drafts.
round_drafter.py           RoundDrafter: protocol of drafters whose drafts the graphs of a round
                           read on the verifier's device.
small_model_forward.py     Forward pass of a small language model as draft model.
"""
