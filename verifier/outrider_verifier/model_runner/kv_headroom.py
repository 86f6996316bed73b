"""How many K/V slots of a session rounds may write past those that the host knows of (pure).

The one formula for it. A round writes its root and the nodes of its draft before it is known which
of them stand. A runner that runs ahead submits one behind another whose outcome the host has not
seen, so both may have been as long as they can be; and a head in this process writes the steps of
its next draft behind them.
"""

from __future__ import annotations

from typing import NamedTuple

from outrider_verifier.state.session import Session


class KVHeadroom(NamedTuple):
    """What a runner writes."""

    max_nodes: int
    """Nodes of a draft from outside."""
    rounds: int = 1
    """Rounds of a session that may be unsettled, the one about to be submitted included."""
    in_process_slots: int = 0
    """The same as `most` for a session that a head in this process drafts for; 0: there is none."""

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
