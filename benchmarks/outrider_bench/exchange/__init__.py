"""`outrider bench exchange`: rounds between verifier and drafter, without models.

channel_rounds.py          Round trips between the worker threads of two processes over channels.
channels.py                Channels that the exchange benchmark compares, each with the drafter's
                           end and the verifier's end.
cli.py                     Idle time of a round between a verifier and a drafter in two processes,
                           without models.
device_rounds.py           Rounds of two processes over exchange buffers, without models.
payload.py                 Payload of a round of the exchange benchmark, the same for every
                           transport.
"""
