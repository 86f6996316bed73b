"""Checkpoints as files: configurations, tensor names, shapes and dtypes, and what is supported.

Nothing here reads the values of weights but for one comparison, and nothing imports torch: the
engine loads a checkpoint only after these checks, and `outrider serve` runs the same checks before
it starts a process.
"""
