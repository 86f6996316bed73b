"""Outrider: speculative decoding with the drafter and the target in separate processes."""

__version__ = "0.1.0"
