"""Speculation control: measured acceptance and round times in, mode and draft length out. Pure. It
may import `state`, `exchange` and `model_runner`.

draft_length.py            Chooses the draft length of chains for each workload class and load.
draft_recovery.py          Decides for which sessions draft K/V is computed once more.
feature_retention.py       Decides which sessions that decode plainly stop keeping features for
                           drafters.
in_process_planner.py      Decides whether sessions use the in-process drafter, and in which draft
                           shape, with one decision for all of them.
load_burst_hold.py         Keeps sessions on plain decoding during load bursts and short dips.
load_stats.py              LoadStats: current load, and measured times of plain rounds, prompts and
                           starts at each.
round_observer.py          Observes the tokens of each round and decides which decoding mode is in
                           force.
speculation_policy.py      Decides for each session whether and how it speculates, from its measured
                           rounds.
two_batch_overlap.py       Decides whether drafted sessions share a round or alternate in two
                           half-batches.
workload_registry.py       Registry of workload classes and their statistics.
workload_stats.py          Statistics of a workload class, and the speculation state of a session.
"""
