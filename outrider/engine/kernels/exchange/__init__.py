"""Kernels of the exchange between the devices of a drafter and a verifier, each beside a PyTorch
reference.

buffers.py                 Exchange buffers as kernels take them: addresses in device memory, looked
                           up at each launch.
clock.py                   Reading of the clock that the stamps of an exchange are of.
distributions.py           Distributions of drafts that came from another device, on the verifier's.
drafts.py                  Draft chains, from the drafter's device to the verifier's.
drafts_ahead.py            Drafts for outcomes of a round that the verifier still runs, from device
                           to device.
numbers.py                 Round numbers between two devices: wait for the peer's, publish one's
                           own.
verdicts.py                Accepted tokens and features of a round, from the verifier's device to
                           the drafter's.
"""
