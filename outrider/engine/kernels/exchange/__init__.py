"""Kernels with which a drafter and a verifier exchange data through GPU memory, each with a PyTorch
reference.

buffers.py                 Exchange buffers: memory of one process into which the other process
                           writes.
clock.py                   Reading of the device clock that gives the time stamps of an exchange.
distributions.py           Transfer of draft distributions from the drafter to the verifier, with
                           checks.
drafts.py                  Transfer of draft chains from the drafter to the verifier.
drafts_ahead.py            Transfer of look-ahead drafts, made for possible outcomes of a running
                           round.
numbers.py                 Synchronisation of two devices by round numbers: wait for the peer's
                           number, publish one's own.
verdicts.py                Transfer of the accepted tokens and features of a round from the verifier
                           to the drafter.
"""
