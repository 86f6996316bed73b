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
    """K outcomes of pending proposals that were selected for drafting. An outcome is a proposal
    (`lives`), its last accepted node (`nodes`) and the next token (`tokens`). Arrays are [K]."""

    lives: Indices
    nodes: Indices
    tokens: NDArray[np.int32]
    parent_digests: NDArray[np.uint64]
    """Digest of the prefix that ends with each outcome's node."""
    lengths: Indices
    """Length in tokens of the prefix that ends with each outcome's token."""
    gains: Floats

    def prefix_digests(self) -> NDArray[np.uint64]:
        """Return the digest of the prefix that ends with each outcome's token."""
        return extend_digests(self.parent_digests, self.tokens)

    def select(self, which: Indices | slice) -> SelectedOutcomes:
        """Return the outcomes with the indices `which`, in this order."""
        return SelectedOutcomes(
            self.lives[which],
            self.nodes[which],
            self.tokens[which],
            self.parent_digests[which],
            self.lengths[which],
            self.gains[which],
        )


class ScoredProposal(NamedTuple):
    """Scores of one proposal. The layout and the log-probs are shared by all proposals of a class
    that were scored together."""

    layout: CandidateLayout
    logprobs: NDArray[np.float32]
    """[P, c]: log-prob of each candidate, where P is the number of places of all proposals of the
    layout and c the number of candidates at each place."""
    proposal: int
    """Index of the proposal in the layout."""


@dataclass(slots=True, eq=False)
class LookAheadSession:
    """Look-ahead state of one session. Its live proposal is the proposal whose verdict is
    awaited."""

    session: FollowedSession
    tree: DraftTree | None = None
    """Tree of the live proposal; None if there is no live proposal."""
    length: int = 0
    """Length in tokens of the prefix that the live proposal continues."""
    sent_at: float = 0.0
    """Time in seconds when the live proposal was sent. If it is a hit, time when the verdict
    arrived that made it the live proposal."""
    is_hit: bool = False
    """Whether the live proposal was drafted by look-ahead, before the verdict on the previous
    proposal."""
    scored: ScoredProposal | None = None
    """Scores of the live proposal; None until it is scored."""
    outcome_drafts: dict[int, DraftTree] = field(default_factory=dict)
    """Drafts that were sent for outcomes of the live proposal, by prefix digest."""
    covered_probability: float = 0.0
    """Probability that the next verdict is one of the outcomes in `outcome_drafts`."""
    num_pending: int = 0
    """Number of outcomes that were selected but not drafted for yet."""

    def start_proposal(self, tree: DraftTree | None, now: float, *, is_hit: bool = False) -> None:
        """Replace the live proposal by `tree`, a draft for the session's current prefix, or by None
        if there is no such draft. `now`: time in seconds when the draft was sent or, with `is_hit`,
        when the verdict arrived. `is_hit`: whether the draft was made before that verdict."""
        self.tree, self.length = tree, len(self.session.tokens)
        self.sent_at, self.is_hit = now, is_hit
        self.scored, self.outcome_drafts = None, {}
        self.covered_probability, self.num_pending = 0.0, 0
