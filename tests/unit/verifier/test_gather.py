"""How long a round waits for rows that still await their proposals."""

from __future__ import annotations

import pytest
from outrider_verifier.schedule import Limits, RowState, plan_round

from outrider.ids import SessionId

LIMITS = Limits(prefill_tokens=64, decode_tokens=1000, gather_s=0.004)


def rows(ready: int, awaited: int) -> list[RowState]:
    return [
        RowState(
            session_id=SessionId(f"s{number}"),
            prefill_left=0,
            nodes=4 if number < ready else None,
            awaits_proposal=number >= ready,
            since=1.0,
            proposal_at=1.0,
            patience_s=1.0,
        )
        for number in range(ready + awaited)
    ]


@pytest.mark.parametrize(
    ("ready", "awaited", "gathered"), [(1, 1, 0.004), (1, 7, 0.004), (4, 2, 0.002), (8, 1, 0.0005)]
)
def test_many_wait_for_few_only_shortly(ready: int, awaited: int, gathered: float) -> None:
    waiting = plan_round(rows(ready, awaited), 1.0 + 0.9 * gathered, LIMITS)
    assert waiting.empty
    assert waiting.wait_until == pytest.approx(1.0 + gathered)
    begun = plan_round(rows(ready, awaited), 1.0 + 1.1 * gathered, LIMITS)
    assert len(begun.decode) == ready
