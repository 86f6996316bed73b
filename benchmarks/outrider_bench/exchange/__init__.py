"""`outrider bench exchange`: rounds between verifier and drafter, without models.

channel_rounds.py          Round trips of a verifier's working thread by channels between two
                           processes.
channels.py                Channels compared by the exchange benchmark: the drafter's end and the
                           verifier's end.
cli.py                     Idle time of a round between a verifier and a drafter in two processes,
                           without models.
device_rounds.py           Rounds of two processes over exchange buffers, without models.
payload.py                 What a round of the exchange benchmark carries, the same by every
                           transport.
"""
