"""Look-ahead: drafting for likely outcomes of pending proposals before their verdicts arrive. This
package may import `state` and `proposers`.

calibration.py             Calibrates the probabilities of a proposal's outcomes from observed
                           verdicts.
scheduler.py               LookAheadScheduler: drafts for likely outcomes of pending proposals
                           before their verdicts.
session_state.py           Per-session look-ahead state, and the outcomes selected for drafting.
time_budget.py             LookAheadBudget: decides from measured times how much look-ahead fits
                           before the next verdict.
"""
