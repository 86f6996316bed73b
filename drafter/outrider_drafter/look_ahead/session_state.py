"""Per-session look-ahead state, and the outcomes selected for drafting."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.spec.digest import extend_digests
from outrider.spec.tree import DraftTree
from outrider_drafter.state.outcomes import CandidateLayout, Floats, Indices
from outrider_drafter.state.session import FollowedSession


class SelectedOutcomes(NamedTuple):
    """Outcomes that are to be drafted for; [K] each."""

    lives: Indices
    nodes: Indices
    tokens: NDArray[np.int32]
    parent_digests: NDArray[np.uint64]
    """Prefix digests at their nodes."""
    lengths: Indices
    """Of the prefixes that they make."""
    gains: Floats

    def prefix_digests(self) -> NDArray[np.uint64]:
        """Of the prefixes that they make."""
        return extend_digests(self.parent_digests, self.tokens)

    def select(self, which: Indices | slice) -> SelectedOutcomes:
        """Some of them, in this order."""
        return SelectedOutcomes(
            self.lives[which],
            self.nodes[which],
            self.tokens[which],
            self.parent_digests[which],
            self.lengths[which],
            self.gains[which],
        )


class ScoredProposal(NamedTuple):
    """One of the live proposals that were scored together."""

    layout: CandidateLayout
    logprobs: NDArray[np.float32]
    """[P, c] of the candidates."""
    proposal: int
    """Its place among them."""


@dataclass(slots=True, eq=False)
class LookAheadSession:
    """Look-ahead state of a session."""

    session: FollowedSession
    tree: DraftTree | None = None
    """The live proposal; None while there is none."""
    length: int = 0
    """Tokens of the prefix that it continues."""
    sent_at: float = 0.0
    """When it was sent, or was found to be a hit, seconds."""
    is_hit: bool = False
    """Whether it was made ahead."""
    scored: ScoredProposal | None = None
    """What is known of it, once it was scored."""
    outcome_drafts: dict[int, DraftTree] = field(default_factory=dict)
    """What was sent for outcomes of the live proposal, by prefix digest."""
    covered_probability: float = 0.0
    """Probability that the next verdict is one of these."""
    num_pending: int = 0
    """Outcomes that were chosen and not drafted for yet."""

    def start_proposal(self, tree: DraftTree | None, now: float, *, is_hit: bool = False) -> None:
        """There is another live proposal, for the session's present prefix."""
        self.tree, self.length = tree, len(self.session.tokens)
        self.sent_at, self.is_hit = now, is_hit
        self.scored, self.outcome_drafts = None, {}
        self.covered_probability, self.num_pending = 0.0, 0
