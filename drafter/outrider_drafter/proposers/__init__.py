"""Proposers: the ways of drafting on the host (EAGLE, n-gram, small model), and tree growth.
This package may import `state`.

eagle.py                   EagleProposer: EAGLE head run from the host, batched over sessions, with
                           KV per session.
eagle_forest.py            EagleForest: rows of an EAGLE head, run from the host for several
                           sessions at once.
forest.py                  DraftForest: draft rows of many trees, run through a model on the host
                           level by level.
interface.py               Proposer protocols (`Proposer`, `LookAheadProposer`) and the draft
                           classes that they return.
kv_proposer.py             KVProposer: base class of proposers with KV rows, which writes the rows
                           of new tokens.
ngram.py                   NgramProposer: drafts by n-gram lookup in a session's own tokens (prompt
                           lookup).
outcome_drafting.py        Scores pending proposals and drafts for their outcomes in a forest, for
                           all host proposers.
small_model.py             SmallModelProposer: drafts by a separate small language model with the
                           target's tokenizer.
tree_growth.py             Grows draft trees: chain, beam and static trees as state machines, and
                           the passes that feed them.
"""
