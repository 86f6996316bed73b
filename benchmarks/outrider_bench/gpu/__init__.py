"""Benchmarks of the device engine: `outrider bench gpu NAME`.

ablation.py                Ablation of five optimisations, each measured before and after in this
                           system.
acceptance.py              Tokens per round by acceptance rule and temperature, and time per output
                           token.
ahead.py                   Cost of look-ahead drafting in a drafter's engine: a draft, then drafts
                           for its outcomes.
cli.py                     `outrider bench gpu NAME`: benchmarks of the device engine, one command
                           each.
draft.py                   Cost of drafting by number of sessions: one step, and a catch-up with a
                           chain of five.
kernels.py                 Kernel times compared with the memory traffic bound, in the random-weight
                           model's shapes.
lossless.py                Lossless check on the device: greedy text with and without speculation,
                           differences explained.
placement.py               Tokens per second and round breakdown by placement, for the widened
                           model.
plain.py                   Time per token of plain decoding, end to end in a verifier service.
serving.py                 End-to-end serving by placement and batch: tokens/s, time to first token,
                           inter-token latency.
simulated_rounds.py        Round times with simulated acceptance and the drafter on the target's
                           device, with a timeline.
summary.py                 Summary file `summary.json`: the results of a folder's benchmarks under
                           stable names.
swap.py                    Cost of swapping one long session out and in while other sessions decode.
verify.py                  Cost of verification by rows and nodes: target, LM head and acceptance,
                           in one graph.
"""
