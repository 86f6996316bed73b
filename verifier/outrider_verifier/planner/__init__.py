"""Speculation control: measured acceptance and round times in, mode and draft length out. Pure. It
may import `state`, `exchange` and `model_runner`.

draft_length.py            Chooses the draft length for each workload class and load.
feature_retention.py       Decides which sessions stop keeping features for drafters.
in_process_planner.py      Decides whether the in-process drafter is used.
load_burst_hold.py         Keeps sessions on plain decoding during short load changes.
load_stats.py              Current load and the measured cost of plain rounds at each load.
ngram_fallback.py          N-gram drafts when the drafter is late or less effective.
round_observer.py          Feeds measured rounds into the speculation decisions.
speculation_policy.py      Decides for each session whether and how it speculates.
two_batch_overlap.py       Splits drafted sessions into two alternating half-batches.
workload_registry.py       Registry of workload classes.
workload_stats.py          Statistics of a workload class, and the speculation state of a session.
"""
