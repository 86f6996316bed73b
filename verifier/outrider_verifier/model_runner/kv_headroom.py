"""Computes the number of KV slots that rounds may write beyond a session's committed ones. Pure.

Only this module computes this number. A round writes the KV of its root and draft nodes before
acceptance is known. If a runner submits a round before the host has the result of the previous one,
both rounds count with their maximum size. An in-process drafter also writes the draft KV of its
next draft after these slots.
"""

from __future__ import annotations

from typing import NamedTuple

from outrider_verifier.state.session import Session


class KVHeadroom(NamedTuple):
    """Limits that determine how many KV slots a runner may write beyond the committed ones."""

    max_nodes: int
    """Maximum number of draft nodes of a proposal."""
    rounds: int = 1
    """Maximum number of rounds of a session whose results the host does not have, including the
    next one."""
    in_process_slots: int = 0
    """Maximum number of slots that a session with in-process drafts needs; 0 without such a
    drafter."""

    @property
    def max_slots(self) -> int:
        """Maximum number of slots that are written beyond the committed ones, for any session."""
        return max(self.rounds + self.max_nodes, self.in_process_slots)

    def slots_beyond(self, session: Session, nodes: int | None = None) -> int:
        """Return how many slots the next round of a session may write beyond the `kv.len` committed
        slots and the prompt tokens in flight.

        `nodes` is the number of draft nodes of the proposal that the round verifies; None means the
        maximum.
        """
        own = self.in_process_slots if session.in_process_draft_length else 0
        if nodes is None:
            drafted = session.plan.is_speculative and not session.in_process_draft_length
            nodes = self.max_nodes if drafted else 0
        # A round with an external draft is submitted only after all earlier rounds have results.
        return max(self.rounds + nodes, own)
