"""A row of a round that was settled, as rounds and the planner see it."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.wire.messages import FinishReason
from outrider_verifier.engine import RowOutcome
from outrider_verifier.packing import VerifyRow
from outrider_verifier.sessions import Session


@dataclass(slots=True, eq=False)
class Settled:
    """A row whose tokens are committed and whose drafter is told; the rest is to be done."""

    session: Session
    result: RowOutcome
    tokens: tuple[int, ...] = ()
    reason: FinishReason | None = None
    verified: VerifyRow | None = None
    missed: bool = False
    """Whether a proposal was wanted and none was there."""
