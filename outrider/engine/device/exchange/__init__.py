"""Exchange between the devices of a drafter and a verifier of one host: buffers that both processes
map, and what each side's graphs do with them.

device_clock.py            DeviceClock: converts time stamps of a device to the host's clock, for
                           timelines.
draft_replica.py           Draft model of one verifier on another GPU: it follows the verifier's
                           rounds by exchange buffers.
exchange_times.py          Idle time of rounds whose drafts pass between devices, from the clock of
                           the verifier's device.
layout.py                  Layout of exchange buffers: what lies where in the memory that drafter
                           and verifier share.
look_ahead_drafter.py      Drafts for outcomes of a round that the verifier still runs, on the
                           drafter's device alone.
memory.py                  Memory that two processes of one host share, and that kernels of both
                           their devices reach.
remote_drafter.py          Drafter on another GPU, as seen by the verifier's graphs: drafts come in,
                           accepted rows go out.
round_history.py           RoundHistory: reads the times that a device records of its rounds, each
                           round once.
round_spans.py             RoundSpans: the steps of an exchange's rounds on a device, as spans of a
                           timeline.
side.py                    ExchangeSide: buffers, round numbers and lifetime of one side of an
                           exchange, the same for drafter and verifier.
"""
