"""`outrider bench host`: host time of a round in both processes, without models.

cli.py                     Host time of a round, step by step.
fake_device.py             Device stand-ins with canned results.
in_process.py              Host time of a round with in-process drafts.
look_ahead.py              Host time of a round with look-ahead hits.
plain.py                   Host time of a plain round.
router_rounds.py           Rounds per second with routers connected.
scripted_verifier.py       A verifier's engine over a fake device.
session_churn.py           Host time of plain rounds while sessions come and go.
"""
