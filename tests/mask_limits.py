"""Mask limits for tests that are not about time: a busy machine exceeds the default ones."""

from __future__ import annotations

from typing import Final

from outrider.grammar.limits import MaskLimits

LONG_MASKS: Final = MaskLimits(mask_ms=10_000.0, session_s=100.0)
