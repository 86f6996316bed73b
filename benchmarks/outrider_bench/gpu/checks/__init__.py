"""Kernel checks and tuning, run by hand on a GPU.

attention.py               Check and time paged tree attention and the kernels around it at the
                           shapes of Llama-3.1-8B.
logits_processor.py        Check and time the logits-processor kernels on a GPU.
sampling.py                Check and time the sampling and acceptance kernels on a GPU, against
                           their PyTorch references.
tune_invariant.py          Tune the batch-invariant matrix product for Llama-3.1-8B.
tune_linear.py             Tune the weight-streaming matrix product for Llama-3.1-8B and its EAGLE-3
                           head.
"""
