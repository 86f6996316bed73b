"""Proposers: the ways of drafting on the host (EAGLE, n-gram, small model), and tree growth. It
may import `state`.

eagle.py                   Proposer that runs an EAGLE head on the host's loop.
eagle_batch.py             Batched steps of an EAGLE head.
eagle_forest.py            Draft rows of an EAGLE head for several trees at once.
eagle_kv.py                K/V cache of an EAGLE head, and attention over it.
forest.py                  Draft rows of many trees, run level by level.
growth_driver.py           Grows the trees of many sessions with one batched pass a level.
interface.py               Proposer protocol and the draft classes that it returns.
kv_proposer.py             Base class of proposers with K/V rows: catch-up of sessions.
ngram.py                   N-gram (prompt lookup) proposer.
outcome_drafting.py        Scores pending proposals and drafts for their outcomes.
small_model.py             Proposer that runs a small language model.
tree_growth.py             Tree growth as state machines: chain, beam and static trees.
tree_visibility.py         Which draft rows each row of a tree attends to.
"""
