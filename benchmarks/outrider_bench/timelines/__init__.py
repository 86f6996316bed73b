"""Timelines of several processes.

lock_step_gaps.py          What a lock-step round waits for.
merge.py                   Merges the timelines of several processes.
"""
