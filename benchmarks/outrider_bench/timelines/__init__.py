"""Timelines of several processes.

lock_step_gaps.py          Breakdown of the gaps between lock-step rounds, from timelines of a
                           verifier and its drafter.
merge.py                   Merge of the timelines of several processes of one host, for Perfetto and
                           as a picture.
"""
