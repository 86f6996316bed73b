"""Acceptance, losslessness, structured output and tool calls, measured on real answers.

acceptance.py              `outrider bench acceptance`: mean tokens emitted per round, by draft
                           shape, rule and temperature.
look_ahead.py              `outrider bench look-ahead`: acceptance of a head's drafts made one round
                           early.
lossless.py                `outrider bench lossless`: token ids with and without drafts, at several
                           numbers of sessions.
structured.py              Structured output against a running fleet: validity of all answers and
                           cost of the grammar.
tool_calls.py              `outrider bench tool-calls`: validity of calls that must be made, and
                           equality of streams and of answers with every drafter.
tool_model.py              Copy of a model's directory whose chat template renders tools, tool calls
                           and reasoning.
tool_sets.py               Sets of tools, some written by hand and others from a seed.
"""
