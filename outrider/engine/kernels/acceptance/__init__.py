"""Acceptance kernels: `matching` compares tokens, `randomized` compares distributions.

matching.py                Token-matching acceptance (greedy, coupled) on the device, and the commit
                           of a round.
randomized.py              Acceptance on the device under any acceptance rule, including rejection
                           and target-only.
randomized_kernels.py      Triton kernels behind `outrider.engine.kernels.acceptance.randomized`, in
                           the order of a launch.
randomized_launch.py       Launch of the randomized acceptance kernels: arguments, workspace and
                           grids.
residual.py                Triton functions for recursive rejection sampling on the ids of a draft
                           distribution.
"""
