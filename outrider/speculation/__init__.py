"""Mathematics of speculation control: measured rounds in, mode and draft length out. Pure numpy;
used by the verifier. It may import `spec`.

cost_table.py              Measured forward times by batch shape.
deficit.py                 How far speculation has fallen behind plain decoding.
draft_length.py            Draft length with the highest expected throughput.
estimates.py               Estimates of acceptance rates and proposal arrival times.
in_process_controller.py   Whether in-process drafts pay off.
look_ahead_acceptance.py   Acceptance under look-ahead relative to lock-step.
look_ahead_controller.py   Look-ahead or lock-step, by load.
look_ahead_probe.py        Look-ahead against lock-step at one load, by measured rounds.
loss_allowance.py          Accumulated gain of speculation over plain decoding.
measurements.py            Statistics of measured rounds.
probe.py                   A few rounds in the other mode, to measure it.
probe_costs.py             Expected cost of probing the other mode.
speculation_controller.py  Speculation or plain decoding, for one workload class at one load.
trial_preparation.py       How long sessions collect features before a trial of speculation.
"""
