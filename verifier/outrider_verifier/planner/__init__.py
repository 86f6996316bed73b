"""Speculation control: chooses decoding mode and draft length from measured acceptance and round
times. Pure. It may import `state`, `exchange` and `model_runner`.

draft_length.py            Chooses the draft length of chains that drafters propose by messages.
draft_recovery.py          Decides for which sessions draft KV is recomputed.
in_process_planner.py      Decides whether sessions use in-process drafts, and in which shape.
proposal_wait.py           Computes how long a session waits for its proposal, and when its drafter
                           counts as stalled.
speculation_controller.py  Speculation controller: chooses the draft shape with the most expected
                           tokens per second.
speculation_policy.py      Decides for each session whether and how it speculates, from its
                           measured rounds.
statistics.py              Statistics of measured rounds: typical times without outliers, tokens
                           per row, and load.
two_batch_overlap.py       Decides whether drafted sessions share a round or alternate in two half-
                           batches.
workload.py                Defines workload classes (sessions that are expected to speculate alike)
                           and their measured statistics.
"""
