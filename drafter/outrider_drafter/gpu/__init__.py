"""Proposers whose drafts are captured GPU graphs. It may import `state` and `proposers`.

batch.py                   Static input buffers of a draft launch.
draft_launcher.py          Launches drafts and reads them back.
draft_model.py             Common interface of heads and small models on the GPU.
draft_results.py           Converts drafts read from the GPU into columns.
draft_slots.py             Per-session device state, in columns.
eagle.py                   EAGLE-3 proposer on the GPU.
grammar_masks.py           Grammar masks of one draft launch.
kv_writer.py               Writes the K/V of catch-up rows.
look_ahead.py              Look-ahead on the GPU: scoring, then drafting for outcomes.
outcome_drafting.py        Drafts for outcomes, one launch for each shape.
outcome_scoring.py         Scores the candidates after every node of pending proposals.
paged_kv.py                Paged K/V cache of the draft model.
proposer.py                Proposer whose drafts are captured GPU graphs.
scoring_layout.py          Positions of proposal nodes in a scoring launch.
session_slots.py           Assigns slots and K/V blocks to followed sessions.
shapes.py                  Draft shapes and batch sizes that are captured as graphs.
small_model.py             Small-model proposer on the GPU.
"""
