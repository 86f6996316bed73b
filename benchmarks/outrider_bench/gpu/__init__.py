"""Benchmarks of the device engine: `outrider bench gpu NAME`.

ablation.py                The five ideas, each before and after, in this system.
acceptance.py              Tokens a round by rule and temperature, and the time of an output token.
ahead.py                   Cost of drafting ahead, as a drafter's engine does it.
cli.py                     `outrider bench gpu NAME`.
draft.py                   Cost of drafting.
kernels.py                 Kernel times against the bytes that they must move, in the shapes of the
                           random-weight model.
lossless.py                Greedy text with and without speculation on the device, and why any of it
                           differs.
placement.py               The widened model by placement.
plain.py                   Plain decoding end to end through the verifier's loop, per token.
serving.py                 End-to-end serving by placement and batch.
simulated_rounds.py        Rounds with the drafter on the target's device, simulated acceptance, and
                           a timeline of them.
summary.py                 `summary.json`.
swap.py                    Swapping one long session out and in beside the rounds of others.
verify.py                  Verify cost by rows and nodes.
"""
