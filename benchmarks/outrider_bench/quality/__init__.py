"""Acceptance, losslessness and structured output, measured on real answers.

acceptance.py              Mean tokens emitted per round by draft shape, rule and temperature.
look_ahead.py              Acceptance of drafts made one round ahead.
lossless.py                Compares token ids with and without a drafter.
structured.py              Structured output: validity and cost.
"""
