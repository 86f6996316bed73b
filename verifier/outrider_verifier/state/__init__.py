"""Data that the other packages exchange: sessions, commands, effects, round plans. It imports no
other package of the verifier.

commands.py                Messages from the asyncio thread to the engine thread.
effects.py                 Messages from the engine thread to the asyncio thread.
handles.py                 Small integer handles that index the per-session columns.
ngram_index.py             Per-session n-gram index over the session's own tokens.
preemption_mode.py         How preempted sessions get their K/V back.
round_plan.py              Data classes for what the scheduler reads and the plan it returns.
session.py                 Session: tokens, K/V, plan and phase of one served request.
simulated_acceptance.py    Parses the acceptance rates of --simulated-acceptance.
"""
