"""Which prompt tokens join a round (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from outrider_verifier.state.round_plan import PrefillChunk, RoundLimits, RowState

CROWDED_ROUNDS: Final = 3
"""Prompts are crowded where what waits is more than so many rounds take beside sessions that
decode,"""
CROWDED_SHARE: Final = 6
"""and where one of so many sessions waits for its prompt."""


def choose_prompt_chunks(
    prefilling: Sequence[RowState], decoding: int, limits: RoundLimits
) -> tuple[PrefillChunk, ...]:
    """What of these prompts joins a round in which `decoding` sessions decode: by priority, then in
    order of opening, within `limits.prefill_tokens` and what may be added to such a round."""
    if not prefilling:
        return ()
    budget = limits.prefill_tokens
    beside = limits.prefill_limit(decoding, False) if decoding else None
    if beside is not None:
        if _crowded(prefilling, decoding, beside, limits.chunk_tokens):
            beside = limits.prefill_limit(decoding, True) or beside
        budget = min(budget, beside)
    return _fill(sorted(prefilling, key=_turn), budget, limits.chunk_tokens)


def _crowded(prefilling: Sequence[RowState], decoding: int, beside: int, piece: int) -> bool:
    """Whether so many prompts wait that those who decode had better wait for more of them at once.

    All of them are computed sooner or later; until then their sessions leave places of every round
    empty, and rounds of few rows cost hardly less than full ones. So prompts that come in faster
    than short rounds take them would keep most sessions waiting, for good.
    """
    if len(prefilling) * CROWDED_SHARE < len(prefilling) + decoding:
        return False
    waiting = sum([-(-row.prefill_left // piece) * piece for row in prefilling])
    return waiting > CROWDED_ROUNDS * beside


def _turn(row: RowState) -> tuple[int, float]:
    """Whose prompt comes first is smaller."""
    return -row.priority, row.root_known_at


def _fill(rows: list[RowState], budget: int, piece: int) -> tuple[PrefillChunk, ...]:
    chunks: list[PrefillChunk] = []
    for row in rows:
        if budget <= 0:
            break
        take = min(row.prefill_left, budget)
        chunks.append(PrefillChunk(session_id=row.session_id, num_tokens=take))
        budget -= -(-take // piece) * piece
    return tuple(chunks)
