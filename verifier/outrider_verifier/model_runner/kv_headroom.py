"""Number of KV slots that rounds may write past a session's committed ones. Pure.

Only this module computes this number. A round writes the KV of its root and draft nodes before
acceptance is known. A runner that runs ahead submits a round before the host has the result of the
previous one, so the maximum size of both rounds counts. An in-process drafter also writes the steps
of its next draft after them.
"""

from __future__ import annotations

from typing import NamedTuple

from outrider_verifier.state.session import Session


class KVHeadroom(NamedTuple):
    """Bounds of the KV slots that a runner writes in advance."""

    max_nodes: int
    """Maximum number of nodes of a draft from a drafter outside this process."""
    rounds: int = 1
    """Maximum number of rounds of a session without a result, including the next one."""
    in_process_slots: int = 0
    """Maximum number of slots for a session with in-process drafts; 0 without such a drafter."""

    @property
    def max_slots(self) -> int:
        """Maximum number of slots written in advance for any session."""
        return max(self.rounds + self.max_nodes, self.in_process_slots)

    def slots_beyond(self, session: Session, nodes: int | None = None) -> int:
        """Return the number of slots that the next round of a session may write beyond the `kv.len`
        committed slots and the prompt tokens in flight.

        `nodes` is the number of nodes of the external draft to verify; None means the maximum.
        """
        own = self.in_process_slots if session.in_process_draft_length else 0
        if nodes is None:
            drafted = session.plan.is_speculative and not session.in_process_draft_length
            nodes = self.max_nodes if drafted else 0
        # A round with an external draft is submitted only after all earlier rounds have results.
        return max(self.rounds + nodes, own)
