"""Draft programs and forwards on the device, for drafters and for the in-process drafter.

alternatives.py            Alternative candidate ids for each drafted token, ranked from draft
                           logits.
chain_levels.py            Level-by-level drafting of in-process chains, so that the host can mask
                           each level by grammar.
draft_forward.py           Interface of draft model forwards on a device, for feature heads and
                           small models.
draft_masks.py             Allowed-token masks of in-process drafts, uploaded for sessions with a
                           grammar.
draft_program.py           Drafting of chains and dynamic trees on static device tensors, for any
                           `DraftForward`.
draft_row_state.py         Sampling state of draft rows that differs from the state of their KV
                           slots.
eagle_forward.py           Forward of an EAGLE-3 head (Li et al., 2025), one decoder layer over
                           features of the target.
eagle_weights.py           Weight tensors of an EAGLE-3 head, for kernels that fuse several of its
                           modules.
grammar_drafts.py          In-process drafts of sessions with a grammar, drafted with masks and read
                           back by the host.
in_process_drafter.py      Draft head inside the verifier process (colocated and fused placement).
look_ahead_program.py      Look-ahead drafting on static device tensors: drafts for outcomes of an
                           unverified proposal.
recent_rows.py             Newest draft rows of every session, kept on the device as input of later
                           drafts.
round_drafter.py           RoundDrafter protocol: a drafter whose drafts a round's graphs read on
                           the verifier's device.
small_model_forward.py     Forward of a small draft model, whose rows are tokens and whose KV is
                           always exact.
"""
