"""Mathematics of speculation control: measured rounds in, mode and draft length out. Pure numpy;
used by the verifier. It may import `spec`.

cost_table.py              Cost table: forward times by batch shape, measured in service.
deficit.py                 Deficit of speculation against plain decoding since it was last ahead.
draft_length.py            Choice of a session's draft length: most expected tokens per unit of
                           time.
draft_shape_controller.py  Draft shape controller: the shape of in-process drafts with the most
                           expected tokens per second.
estimates.py               Estimates of draft acceptance by depth, and of proposal arrival times.
in_process_controller.py   Controller of in-process drafts: sessions use them unless plain decoding
                           is faster.
look_ahead_acceptance.py   Acceptance under look-ahead relative to lock-step, estimated on the same
                           text.
look_ahead_controller.py   Look-ahead controller: look-ahead or lock-step at each load, by tokens
                           per second.
look_ahead_probe.py        Trials of look-ahead against lock-step at one load, by measured round
                           times.
loss_allowance.py          Loss allowance of speculation: plain rounds won so far, to be spent on
                           further texts.
measurements.py            Statistics of measured rounds: times with stalls cut off, and tokens per
                           row.
probe.py                   Mode probe: a few rounds in the mode that is not in force, to measure it.
probe_costs.py             Expected loss of probing the mode that is not in force.
speculation_controller.py  Speculation controller: speculation or plain decoding, by measured tokens
                           per second.
trial_preparation.py       Trial preparation: sessions collect features until enough of them can
                           speculate.
"""
