"""Which drafts stand: `matching` where tokens are compared, `coins` where laws are.

matching.py                Acceptance on the device for rules that compare tokens, and the state
                           that follows from it.
randomized.py              Acceptance by random draws (rejection and target-only).
randomized_kernels.py      Triton kernels of randomized acceptance.
randomized_launch.py       Launches of randomized acceptance.
residual.py                Recursive rejection on the ids of a draft law, as
                           `outrider.engine.residual` does it (float64).
"""
