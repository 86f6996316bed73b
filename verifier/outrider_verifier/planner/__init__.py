"""Speculation control: chooses decoding mode and draft length from measured acceptance and round
times. Pure. It may import `state`, `exchange` and `model_runner`.

draft_length.py            Draft length of chains that are drafted by messages: the most expected
                           tokens per second.
draft_recovery.py          Decides for which sessions draft KV is recomputed.
in_process_planner.py      Decides the draft shape of all sessions with in-process drafts, and
                           whether they have any.
proposal_wait.py           How long a session waits for its proposal, and when a drafter counts as
                           stalled.
speculation_controller.py  Speculation controller: chooses the draft shape with the most expected
                           tokens per second.
speculation_policy.py      Decides for each session whether and how it speculates, from its
                           measured rounds.
statistics.py              Statistics of measured rounds: typical times without outliers, tokens
                           per row, and load.
two_batch_overlap.py       Decides whether drafted sessions share a round or alternate in two half-
                           batches.
workload.py                Workload classes (sessions that are expected to speculate alike) and
                           their measured statistics.
"""
