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
    """Draft of one session. `distribution` is set if the acceptance rule needs draft
    distributions."""

    tree: DraftTree
    distribution: DraftDistribution | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DraftTrees:
    """Draft trees that are ready together. `node_counts` is [B], one entry for each draft; the
    other arrays contain the nodes of all drafts, one draft after another."""

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
        """Return the message with these drafts. `handles`, `digests` and `prefix_lens` [B]: session
        handle, prefix digest and prefix length of each draft; `seconds`: drafting time of the
        batch."""
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
    """Draft trees that continue the current prefixes of B sessions."""

    sessions: Sequence[FollowedSession]

    @classmethod
    def of_drafts(cls, drafts: Sequence[tuple[FollowedSession, ProposedDraft]]) -> SessionDrafts:
        """Combine drafts that were made one at a time, given as (session, draft) pairs."""
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
    """The proposal for a session's current prefix, which was sent and whose verdict is awaited."""

    session: FollowedSession
    tree: DraftTree


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OutcomeScores:
    """Candidates for the token that the target emits at each place (root or node) of several
    pending proposals. In the arrays of a proposal, row 0 is its root and row i + 1 is its node i.
    Each place has c candidates."""

    tokens: Sequence[NDArray[np.int32]]
    """For each proposal with n nodes [1 + n, c]: target ids of the candidates, best first. Under
    the coupled rule their order takes the shared noise into account."""
    logprobs: Sequence[NDArray[np.float32]]
    """For each proposal with n nodes [1 + n, c]: log-prob of each candidate. -inf marks an unused
    entry, for example at a place that was not scored."""
    places: NodeIndex
    """Places of all proposals, one proposal after another."""
    digests: NDArray[np.uint64]
    """[P]: prefix digest at each of the P places in `places`."""

    @classmethod
    def of_candidates(
        cls,
        lives: Sequence[PendingProposal],
        tokens: Sequence[NDArray[np.int32]],
        logprobs: Sequence[NDArray[np.float32]],
    ) -> OutcomeScores:
        """Build the scores of the proposals `lives`. `tokens` and `logprobs`: as in the fields."""
        places = NodeIndex.of_trees([live.tree for live in lives])
        return cls(
            tokens=tokens, logprobs=logprobs, places=places, digests=node_digests(places, lives)
        )

    def layout(self, lives: Sequence[int]) -> CandidateLayout:
        """Return the `CandidateLayout` of the proposals with the indices `lives`, which must be
        ascending."""
        tokens = np.concatenate([self.tokens[live] for live in lives])
        return CandidateLayout.of_candidates(self.places.select(lives), tokens)


def node_digests(places: NodeIndex, lives: Sequence[PendingProposal]) -> NDArray[np.uint64]:
    """Return the digest of the prefix that ends at each of the P places (roots and nodes) of the
    proposals, uint64 [P]."""
    found = [live.session.digest for live in lives]
    return places.prefix_digests(np.array(found, dtype=np.uint64))


def empty_scores(lives: Sequence[PendingProposal], width: int = 1) -> OutcomeScores:
    """Return scores in which no place has a candidate. All `width` entries of a place are unused
    (token -1, log-prob -inf)."""
    return OutcomeScores.of_candidates(lives, *empty_candidates(lives, width))


def empty_candidates(
    lives: Sequence[PendingProposal], width: int
) -> tuple[list[NDArray[np.int32]], list[NDArray[np.float32]]]:
    """Return the arrays `tokens` and `logprobs` of `OutcomeScores`, with `width` entries for each
    place. All entries are unused: the tokens are -1, the log-probs -inf."""
    shapes = [(len(live.tree) + 1, width) for live in lives]
    tokens = [np.full(shape, -1, dtype=np.int32) for shape in shapes]
    return tokens, [np.full(shape, -np.inf, dtype=np.float32) for shape in shapes]


class Outcome(NamedTuple):
    """Possible verdict on a pending proposal: the path to `node` is accepted, and `token`, which is
    no child of the node, follows."""

    live: int
    """Index of the proposal among those that were scored last."""
    node: int
    """Index of the last accepted node; ROOT if no node is accepted."""
    token: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OutcomeDrafts(DraftTrees):
    """Draft trees for B outcomes of pending proposals, made before the verdicts arrive."""

    outcomes: NDArray[np.int64]
    """[B]: index of each draft's outcome in the argument of `LookAheadProposer.draft_outcomes`.
    Outcomes that were not drafted for are missing."""

    @classmethod
    def of_drafts(cls, outcomes: NDArray[np.int64], drafted: SessionDrafts) -> OutcomeDrafts:
        """Return the drafts in `drafted` as drafts for outcomes. `outcomes` [B]: index of each
        draft's outcome."""
        return cls(
            outcomes=outcomes,
            node_counts=drafted.node_counts,
            tokens=drafted.tokens,
            parents=drafted.parents,
            logprobs=drafted.logprobs,
            distributions=drafted.distributions,
        )


class Proposer(Protocol):
    """Implementation of a draft method, with the state that it keeps for each session. All methods
    are called from one thread."""

    method: DraftMethod
    feature_layout: FeatureLayout
    """Kind of features that the proposer needs. A proposer with PROJECTED features consumes
    `SessionTable.features`."""
    feature_size: int
    """Width H of a feature row; 0 if the proposer needs no features."""
    feature_fingerprint: str
    """Identity of the projection that makes the features; empty if the proposer needs no
    features."""

    def convert_features(self, wire: WireTensor) -> NDArray[np.generic]:
        """Return received features as rows [F, H] in the proposer's element type; a view if no
        conversion is needed. Not called if the proposer needs no features."""
        ...

    @property
    def is_usable(self) -> bool:
        """Whether the proposer's device still works; read only after a failure. Once False, nothing
        can run on the device in this process any more. Must not raise."""
        ...

    def catch_up(self, sessions: Sequence[FollowedSession]) -> None:
        """Process the new tokens and features of these sessions without drafting."""
        ...

    def draft_sessions(self, sessions: Sequence[FollowedSession]) -> Iterator[SessionDrafts]:
        """Process the new tokens and features of these sessions, then draft. Yields drafts as soon
        as they are ready; drafts of one launch on a device are yielded together.

        Sessions that cannot be drafted are left out.
        """
        ...

    def release_session(self, session: FollowedSession) -> None:
        """Free the state of a session; idempotent."""
        ...


@runtime_checkable
class LookAheadProposer(Proposer, Protocol):
    """Proposer that can draft for outcomes before their verdicts."""

    def score_proposals(self, lives: Sequence[PendingProposal]) -> OutcomeScores:
        """Process the new tokens and features of the proposals' sessions, then return candidates
        for the token that the target emits at each place (root or node) of these proposals. The KV
        of the proposals' nodes is kept until a method other than `draft_outcomes` is called."""
        ...

    def draft_outcomes(self, outcomes: Sequence[Outcome]) -> Iterator[OutcomeDrafts]:
        """Draft for outcomes of the proposals that were scored last. Yields drafts as soon as they
        are ready. No session may have received tokens or ended since the scoring."""
        ...
