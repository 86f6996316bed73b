"""Acceptance, losslessness and structured output, measured on real answers.

acceptance.py              `outrider bench acceptance`: mean tokens emitted per round, by draft
                           shape, rule and temperature.
look_ahead.py              `outrider bench look-ahead`: acceptance of a head's drafts made one round
                           early.
lossless.py                `outrider bench lossless`: token ids with and without drafts, at several
                           numbers of sessions.
structured.py              Structured output against a running fleet: validity of all answers and
                           cost of the grammar.
"""
