"""Look-ahead: which outcomes of pending proposals are drafted for before they happen. It may
import `state` and `proposers`.

calibration.py             Calibrates the probabilities of outcomes from verdicts.
launch_value.py            Pure: expected value of each look-ahead launch.
scheduler.py               Schedules look-ahead drafts for outcomes that may happen.
session_state.py           Per-session state of look-ahead.
time_budget.py             Decides how much look-ahead fits before the next verdict.
timing.py                  Measured durations of draft steps and times between verdicts.
"""
