"""Number of KV slots that rounds may write past a session's committed ones. Pure.

This is the only place of the formula. A round writes its root and the nodes of its draft before
acceptance is known. A runner that runs ahead submits a round behind another whose result the host
has not seen, so both count at their largest; and an in-process drafter writes the steps of its next
draft behind them.
"""

from __future__ import annotations

from typing import NamedTuple

from outrider_verifier.state.session import Session


class KVHeadroom(NamedTuple):
    """Bounds of the KV slots that a runner writes in advance."""

    max_nodes: int
    """Nodes of a draft from outside."""
    rounds: int = 1
    """Rounds of a session that may be unsettled, the one about to be submitted included."""
    in_process_slots: int = 0
    """The same as `most` for a session that an in-process drafter drafts for; 0: there is none."""

    @property
    def max_slots(self) -> int:
        """Of any session."""
        return max(self.rounds + self.max_nodes, self.in_process_slots)

    def slots_beyond(self, session: Session, nodes: int | None = None) -> int:
        """Slots that the next round of a session may write past the committed ones, `kv.len`, and
        the prompt tokens that are on their way. `nodes`: of the draft from outside that it will
        verify; None: the most that it may have."""
        own = self.in_process_slots if session.in_process_draft_length else 0
        if nodes is None:
            drafted = session.plan.is_speculative and not session.in_process_draft_length
            nodes = self.max_nodes if drafted else 0
        # A round with a draft from outside is only submitted when all before it are settled.
        return max(self.rounds + nodes, own)
