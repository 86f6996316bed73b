"""The seam between the engine and the ways of drafting."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from outrider.spec.plan import DraftMethod
from outrider.spec.tree import DraftTree
from outrider.wire.messages import FeatureLayout, Laws, Proposal, Proposals, WireTensor
from outrider_drafter.proposers.tree_growth import Draft
from outrider_drafter.state.outcomes import Layout, Places
from outrider_drafter.state.session import Session


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trees:
    """Drafts that are ready together; columns [B], nodes of all trees flat."""

    node_counts: NDArray[np.int64]
    tokens: NDArray[np.int32]
    parents: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    laws: Laws | None = None

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
            laws=self.laws,
            draft_us=int(seconds * 1e6),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Drafted(Trees):
    """Drafts for the present prefixes of sessions [B]."""

    sessions: Sequence[Session]

    @classmethod
    def of(cls, drafts: Sequence[tuple[Session, Draft]]) -> Drafted:
        """Drafts that were made one by one."""
        flat = Proposals.of(
            [
                Proposal(handle=0, prefix_digest=0, prefix_len=1, tree=draft.tree, law=draft.law)
                for _, draft in drafts
            ]
        )
        return cls(
            sessions=[session for session, _ in drafts],
            node_counts=flat.node_counts,
            tokens=flat.tokens,
            parents=flat.parents,
            logprobs=flat.logprobs,
            laws=flat.laws,
        )


class Live(NamedTuple):
    """The proposal for a session's present prefix: sent, its verdict still to come."""

    session: Session
    tree: DraftTree


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scored:
    """What the target may emit at each place of some live proposals. Row 0 of a proposal is its
    root, row i + 1 its node i; c candidates a place, the same for all."""

    tokens: Sequence[NDArray[np.int32]]
    """Of each proposal [1 + n, c]: target ids, best first; under the coupled rule by shared
    noise."""
    logprobs: Sequence[NDArray[np.float32]]
    """Of each proposal [1 + n, c]: log-prob of each candidate; -inf: there is none, as at places
    that were not looked at."""
    places: Places
    """Of all proposals, one after another,"""
    digests: NDArray[np.uint64]
    """[P]: and the prefix digest at each of these."""

    @classmethod
    def of(
        cls,
        lives: Sequence[Live],
        tokens: Sequence[NDArray[np.int32]],
        logprobs: Sequence[NDArray[np.float32]],
    ) -> Scored:
        """With these candidates of each proposal."""
        places = Places.of([live.tree for live in lives])
        return cls(tokens=tokens, logprobs=logprobs, places=places, digests=digests(places, lives))

    def layout(self, lives: Sequence[int]) -> Layout:
        """Of some proposals, ascending."""
        tokens = np.concatenate([self.tokens[live] for live in lives])
        return Layout.of(self.places.only(lives), tokens)


def digests(places: Places, lives: Sequence[Live]) -> NDArray[np.uint64]:
    """[P]: the prefix digest at each of the proposals' places."""
    found = [live.session.digest for live in lives]
    return places.digests(np.array(found, dtype=np.uint64))


def no_scores(lives: Sequence[Live], width: int = 1) -> Scored:
    """Scores of proposals of which nothing is known; `width` columns."""
    return Scored.of(lives, *no_candidates(lives, width))


def no_candidates(
    lives: Sequence[Live], width: int
) -> tuple[list[NDArray[np.int32]], list[NDArray[np.float32]]]:
    """Tokens and log-probs as in `Scored` where nothing is known."""
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
class Branches(Trees):
    """Pre-drafts, one an outcome [B]."""

    outcomes: NDArray[np.int64]
    """Indices of the outcomes that were asked for; some may be left out."""

    @classmethod
    def of(cls, outcomes: NDArray[np.int64], drafted: Drafted) -> Branches:
        """Drafts for these outcomes."""
        return cls(
            outcomes=outcomes,
            node_counts=drafted.node_counts,
            tokens=drafted.tokens,
            parents=drafted.parents,
            logprobs=drafted.logprobs,
            laws=drafted.laws,
        )


class DraftSource(Protocol):
    """One way of drafting. Keeps what it needs of each session; all calls come from one thread."""

    method: DraftMethod
    feature_layout: FeatureLayout
    """What the source wants to be fed with; PROJECTED sources use up `SessionTable.features`."""
    feature_size: int
    """Width H of a feature row; 0 without features."""
    feature_fingerprint: str
    """Identity of the projection that makes the features; "" without features."""

    def held_features(self, wire: WireTensor) -> NDArray[np.generic]:
        """Feature rows [F, H] as the source wants to find them in `SessionTable.features`; a view
        where they are that already. Never asked of a source without features."""
        ...

    @property
    def usable(self) -> bool:
        """Whether the device still works; asked after a failure only. False is final: nothing
        can be run in this process any more. Must not raise."""
        ...

    def catch_up(self, sessions: Sequence[Session]) -> None:
        """Take in what is new of these sessions; no draft is wanted."""
        ...

    def drafts(self, sessions: Sequence[Session]) -> Iterator[Drafted]:
        """Catch up and draft; yields what is ready as soon as it is: what one step of a device
        makes, together.

        Sessions that cannot be drafted are left out.
        """
        ...

    def release(self, session: Session) -> None:
        """Free what is kept of a session; idempotent."""
        ...


@runtime_checkable
class AheadSource(DraftSource, Protocol):
    """A source that can draft for outcomes before they happen."""

    def score(self, lives: Sequence[Live]) -> Scored:
        """Catch up, then say what the target may emit at each place of these proposals, from the
        freshest features; K/V of the draft rows stays until the next call but `branch`."""
        ...

    def branch(self, outcomes: Sequence[Outcome]) -> Iterator[Branches]:
        """Draft for outcomes of the proposals last scored, from the source's own features; yields
        what is ready as soon as it is. No session may have moved or ended since."""
        ...
