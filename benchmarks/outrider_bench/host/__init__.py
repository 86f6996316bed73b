"""`outrider bench host`: host time of a round in both processes, without models.

cli.py                     Host time of a round in verifier and drafter, step by step, without
                           models or transport.
fake_device.py             Fake device of the host benchmarks with prepared results, and the step
                           timer.
in_process.py              Host time of a verifier round with in-process drafts.
look_ahead.py              Host time of a verifier round with look-ahead hits, so that the next
                           round starts immediately.
plain.py                   Host time of plain decoding with speculation turned off, compared with
                           that without a drafter.
router_rounds.py           Rounds per second of a verifier process with routers connected, without
                           device time.
scripted_verifier.py       Verifier engine over a fake device without computing time, shared by the
                           host benchmarks.
session_churn.py           Host time of plain rounds while sessions end and new ones start.
"""
