"""Kernel checks and tuning, run by hand on a GPU.

attention.py               Checks and times tree attention.
logits_processor.py        Checks and times the logits-processor kernels.
sampling.py                Checks and times sampling and acceptance kernels.
tune_linear.py             Tunes the skinny matrix product.
"""
