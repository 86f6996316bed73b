"""`outrider bench exchange`: round trips between verifier and drafter, without models.

channels.py                Transports compared by the exchange benchmark: the drafter's end and the
                           verifier's end.
cli.py                     Round-trip times of the exchange between two processes, without models,
                           by transport.
device_rounds.py           Rounds of two processes on two GPUs over exchange buffers, without
                           models.
"""
