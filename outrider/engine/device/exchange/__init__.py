"""Exchange between the devices of a drafter and a verifier of one host: buffers that both processes
map, and what each side's graphs do with them.

device_clock.py            DeviceClock: converts time stamps of a device to the host's clock, for
                           timelines.
draft_replica.py           Draft model that serves one verifier from another GPU and reads its
                           rounds from exchange buffers.
exchange_times.py          Idle time of the verifier's device before rounds whose drafts come from
                           another device.
layout.py                  Layout of exchange buffers: offsets of the arrays in the memory that
                           drafter and verifier share.
look_ahead_drafter.py      Makes drafts for outcomes of a round while the verifier runs it, on the
                           drafter's device alone.
memory.py                  Memory that two processes of one host share, and that kernels of both
                           their devices reach.
remote_drafter.py          Verifier's side of a drafter on another GPU: it receives drafts and sends
                           accepted rows.
round_history.py           RoundHistory: reads the times that a device records of its rounds, each
                           round once.
round_spans.py             RoundSpans: marks the steps of an exchange's rounds on a device as spans
                           of a timeline.
side.py                    ExchangeSide: buffers, state and lifetime of one side of an exchange, in
                           drafter or verifier.
"""
