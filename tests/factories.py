"""Tiny random checkpoints; `outrider chaos` runs on them too."""

from __future__ import annotations

from outrider_chaos.tiny_models import (
    CHAT_TEMPLATE,
    SPECIALS,
    make_eagle3_head,
    make_target,
    make_tokenizer,
)

__all__ = ["CHAT_TEMPLATE", "SPECIALS", "make_eagle3_head", "make_target", "make_tokenizer"]
