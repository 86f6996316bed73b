"""Proposer protocols (`Proposer`, `LookAheadProposer`) and the draft classes that they return."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from outrider.spec.draft_distribution import DraftDistribution
from outrider.spec.plan import DraftMethod
from outrider.spec.tree import DraftTree
from outrider.wire.messages import (
    DraftDistributions,
    FeatureLayout,
    Proposal,
    Proposals,
    WireTensor,
)
from outrider_drafter.state.outcomes import CandidateLayout, NodeIndex
from outrider_drafter.state.session import FollowedSession


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposedDraft:
    """The draft of one session, with its distribution where the acceptance rule needs one."""

    tree: DraftTree
    distribution: DraftDistribution | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DraftTrees:
    """Drafts that are ready together; columns [B], nodes of all trees flat."""

    node_counts: NDArray[np.int64]
    tokens: NDArray[np.int32]
    parents: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    distributions: DraftDistributions | None = None

    def proposals(
        self,
        handles: NDArray[np.int64],
        digests: NDArray[np.uint64],
        prefix_lens: NDArray[np.int64],
        seconds: float,
    ) -> Proposals:
        """What goes out of them: for the sessions of these handles and for these prefixes, all
        [B]; `seconds`: what they took."""
        return Proposals(
            handles=handles,
            digests=digests,
            prefix_lens=prefix_lens,
            node_counts=self.node_counts,
            tokens=self.tokens,
            parents=self.parents,
            logprobs=self.logprobs,
            distributions=self.distributions,
            draft_us=int(seconds * 1e6),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SessionDrafts(DraftTrees):
    """Drafts for the present prefixes of sessions [B]."""

    sessions: Sequence[FollowedSession]

    @classmethod
    def of_drafts(cls, drafts: Sequence[tuple[FollowedSession, ProposedDraft]]) -> SessionDrafts:
        """Drafts that were made one by one."""
        flat = Proposals.of_proposals(
            [
                Proposal(
                    handle=0,
                    prefix_digest=0,
                    prefix_len=1,
                    tree=draft.tree,
                    distribution=draft.distribution,
                )
                for _, draft in drafts
            ]
        )
        return cls(
            sessions=[session for session, _ in drafts],
            node_counts=flat.node_counts,
            tokens=flat.tokens,
            parents=flat.parents,
            logprobs=flat.logprobs,
            distributions=flat.distributions,
        )


class PendingProposal(NamedTuple):
    """The proposal for a session's present prefix: sent, its verdict still to come."""

    session: FollowedSession
    tree: DraftTree


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OutcomeScores:
    """What the target may emit at each place of some live proposals. Row 0 of a proposal is its
    root, row i + 1 its node i; c candidates a place, the same for all."""

    tokens: Sequence[NDArray[np.int32]]
    """Of each proposal [1 + n, c]: target ids, best first; under the coupled rule by shared
    noise."""
    logprobs: Sequence[NDArray[np.float32]]
    """Of each proposal [1 + n, c]: log-prob of each candidate; -inf: there is none, as at places
    that were not looked at."""
    places: NodeIndex
    """Places of all proposals, one proposal after another."""
    digests: NDArray[np.uint64]
    """[P]: prefix digest at each of `places`."""

    @classmethod
    def of_candidates(
        cls,
        lives: Sequence[PendingProposal],
        tokens: Sequence[NDArray[np.int32]],
        logprobs: Sequence[NDArray[np.float32]],
    ) -> OutcomeScores:
        """With these candidates of each proposal."""
        places = NodeIndex.of_trees([live.tree for live in lives])
        return cls(
            tokens=tokens, logprobs=logprobs, places=places, digests=node_digests(places, lives)
        )

    def layout(self, lives: Sequence[int]) -> CandidateLayout:
        """Of some proposals, ascending."""
        tokens = np.concatenate([self.tokens[live] for live in lives])
        return CandidateLayout.of_candidates(self.places.select(lives), tokens)


def node_digests(places: NodeIndex, lives: Sequence[PendingProposal]) -> NDArray[np.uint64]:
    """[P]: the prefix digest at each of the proposals' places."""
    found = [live.session.digest for live in lives]
    return places.prefix_digests(np.array(found, dtype=np.uint64))


def empty_scores(lives: Sequence[PendingProposal], width: int = 1) -> OutcomeScores:
    """Scores of proposals of which nothing is known; `width` columns."""
    return OutcomeScores.of_candidates(lives, *empty_candidates(lives, width))


def empty_candidates(
    lives: Sequence[PendingProposal], width: int
) -> tuple[list[NDArray[np.int32]], list[NDArray[np.float32]]]:
    """Tokens and log-probs as in `OutcomeScores` where nothing is known."""
    shapes = [(len(live.tree) + 1, width) for live in lives]
    tokens = [np.full(shape, -1, dtype=np.int32) for shape in shapes]
    return tokens, [np.full(shape, -np.inf, dtype=np.float32) for shape in shapes]


class Outcome(NamedTuple):
    """A verdict that may come: the path to `node` stands and `token`, no child of it, follows."""

    live: int
    """Index of its proposal."""
    node: int
    """ROOT if nothing stands."""
    token: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OutcomeDrafts(DraftTrees):
    """Pre-drafts, one an outcome [B]."""

    outcomes: NDArray[np.int64]
    """Indices of the outcomes that were asked for; some may be left out."""

    @classmethod
    def of_drafts(cls, outcomes: NDArray[np.int64], drafted: SessionDrafts) -> OutcomeDrafts:
        """Drafts for these outcomes."""
        return cls(
            outcomes=outcomes,
            node_counts=drafted.node_counts,
            tokens=drafted.tokens,
            parents=drafted.parents,
            logprobs=drafted.logprobs,
            distributions=drafted.distributions,
        )


class Proposer(Protocol):
    """A method of drafting, with the state it needs of each session; called from one thread."""

    method: DraftMethod
    feature_layout: FeatureLayout
    """What the source wants to be fed with; PROJECTED sources use up `SessionTable.features`."""
    feature_size: int
    """Width H of a feature row; 0 without features."""
    feature_fingerprint: str
    """Identity of the projection that makes the features; "" without features."""

    def convert_features(self, wire: WireTensor) -> NDArray[np.generic]:
        """Feature rows [F, H] as the source wants to find them in `SessionTable.features`; a view
        where they are that already. Never asked of a source without features."""
        ...

    @property
    def is_usable(self) -> bool:
        """Whether the device still works; asked after a failure only. False is final: nothing
        can be run in this process any more. Must not raise."""
        ...

    def catch_up(self, sessions: Sequence[FollowedSession]) -> None:
        """Take in what is new of these sessions; no draft is wanted."""
        ...

    def draft_sessions(self, sessions: Sequence[FollowedSession]) -> Iterator[SessionDrafts]:
        """Catch up and draft; yields what is ready as soon as it is: what one step of a device
        makes, together.

        Sessions that cannot be drafted are left out.
        """
        ...

    def release_session(self, session: FollowedSession) -> None:
        """Free what is kept of a session; idempotent."""
        ...


@runtime_checkable
class LookAheadProposer(Proposer, Protocol):
    """A proposer that can draft for outcomes before they happen."""

    def score_proposals(self, lives: Sequence[PendingProposal]) -> OutcomeScores:
        """Catch up, then score what the target may emit at each place of these proposals, from the
        newest features. The KV of the draft rows stays until the next call of another method than
        `draft_outcomes`."""
        ...

    def draft_outcomes(self, outcomes: Sequence[Outcome]) -> Iterator[OutcomeDrafts]:
        """Draft for outcomes of the proposals last scored, from the source's own features; yields
        what is ready as soon as it is. No session may have moved or ended since."""
        ...
