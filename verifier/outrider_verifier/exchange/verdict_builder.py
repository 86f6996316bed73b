"""Builds session starts and verdicts for drafters from committed tokens, live or replayed.

A verdict says which tokens became committed and carries the features of the positions whose KV was
written: w features for w written positions, and w + 1 tokens once the session decodes. A round is
one message for each drafter. X session handles; H width of a feature.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.spec.digest import EMPTY_DIGEST, extend_digest, extend_ragged
from outrider.spec.plan import FEATURE_METHODS, DraftMethod
from outrider.wire.messages import (
    FeatureLayout,
    FeatureRows,
    SessionSpec,
    SessionStart,
    TensorDtype,
    Verdicts,
    VerifierMessage,
)
from outrider_verifier.exchange.feature_store import FeatureStore
from outrider_verifier.exchange.proposal_inbox import ProposalInbox
from outrider_verifier.exchange.shm_features import ShmFeatures
from outrider_verifier.state.commands import ExchangeLink
from outrider_verifier.state.session import Session

NO_LINK = 0
"""Numbers of links begin at 1."""


@dataclass(slots=True, kw_only=True, eq=False)
class VerdictBatch:
    """Sessions that a round moved on, for their drafters; int64 columns [n] unless noted."""

    sessions: Sequence[Session]
    """[n]: read for what their drafters missed of the prefix before the round."""
    handles: NDArray[np.int64]
    prefix_lens: NDArray[np.int64]
    """Tokens of the prefix without those that follow here."""
    counts: NDArray[np.int64]
    """Tokens that follow here."""
    tokens: NDArray[np.int32]
    """[T] of all in turn."""
    written_positions: NDArray[np.int64]
    """Positions whose KV is written now."""
    is_prompt_done: NDArray[np.bool_]
    """Whether the prompt is done."""
    draft_wanted: NDArray[np.bool_]
    """Whether a draft is."""
    features: Sequence[NDArray[np.generic] | None] | ShmFeatures
    """[n]: rows [m, H] of the positions that the round wrote."""

    @classmethod
    def of_current(
        cls, sessions: Sequence[Session], features: Sequence[NDArray[np.generic] | None]
    ) -> VerdictBatch:
        """Sessions as they are; all that is new of them is committed."""
        whole = np.array([session.is_prefilled for session in sessions], dtype=np.bool_)
        return cls(
            sessions=sessions,
            handles=_column([session.handle for session in sessions]),
            prefix_lens=_column([session.length for session in sessions]),
            counts=np.zeros(len(sessions), dtype=np.int64),
            tokens=np.empty(0, dtype=np.int32),
            written_positions=_column([session.written_positions for session in sessions]),
            is_prompt_done=whole,
            draft_wanted=np.array(
                [s.is_prefilled and s.draft_wanted for s in sessions], dtype=np.bool_
            ),
            features=features,
        )

    def __len__(self) -> int:
        return len(self.handles)

    def select(self, chosen: NDArray[np.bool_]) -> VerdictBatch:
        """Some of the sessions; chosen [n]."""
        kept, features = np.flatnonzero(chosen).tolist(), self.features
        return VerdictBatch(
            sessions=[self.sessions[place] for place in kept],
            handles=self.handles[chosen],
            prefix_lens=self.prefix_lens[chosen],
            counts=self.counts[chosen],
            tokens=self.tokens[chosen.repeat(self.counts)],
            written_positions=self.written_positions[chosen],
            is_prompt_done=self.is_prompt_done[chosen],
            draft_wanted=self.draft_wanted[chosen],
            features=features.select(chosen)
            if isinstance(features, ShmFeatures)
            else [features[place] for place in kept],
        )

    def tokens_between(
        self, starts: NDArray[np.int64], stops: NDArray[np.int64]
    ) -> NDArray[np.int32]:
        """Tokens starts[i] .. stops[i] of each session in turn; starts may lie before `lengths`."""
        if bool((starts == self.prefix_lens).all()) and bool((stops - starts == self.counts).all()):
            return self.tokens
        ends = np.cumsum(self.counts).tolist()
        chunks: list[NDArray[np.int32]] = []
        for session, start, stop, length, end, count in zip(
            self.sessions,
            starts.tolist(),
            stops.tolist(),
            self.prefix_lens.tolist(),
            ends,
            self.counts.tolist(),
            strict=True,
        ):
            chunks.append(session.tokens[start : min(stop, length)])
            if stop > length:
                chunks.append(self.tokens[end - count : end - count + stop - length])
        return np.concatenate(chunks) if chunks else self.tokens


class AdvancedBatch(NamedTuple):
    """What a round committed, as prefixes were moved on by it; int64 columns [n] unless noted."""

    batch: VerdictBatch
    starts: NDArray[np.int64]
    """Where what is told begins: what its drafter had not heard before comes with it."""
    counts: NDArray[np.int64]
    """Tokens from there on."""
    tokens: NDArray[np.int32]
    """All of these in turn."""
    digests: NDArray[np.uint64]
    """Of the prefixes."""
    feature_starts: NDArray[np.int64]


class _VerdictFeatures(NamedTuple):
    """What verdicts say of n sessions' features."""

    counts: NDArray[np.int64]
    """[n]: rows of each."""
    rows: FeatureRows | None
    offsets: NDArray[np.int64] | None = None
    """[n]; see `Verdicts.feature_offsets`."""
    chunks: Sequence[NDArray[np.generic] | None] = ()
    """[n]: each one's, where they are in pieces."""


class VerdictBuilder:
    """Tracks the prefixes of sessions that name a drafter, announced or not, in columns."""

    def __init__(
        self,
        *,
        inbox: ProposalInbox,
        store: FeatureStore | None,
        dtype: TensorDtype,
        chunk_tokens: int,
        max_sessions: int,
    ) -> None:
        """`inbox` is told of every prefix that a draft may continue."""
        self._inbox = inbox
        self._store = store
        self._dtype = dtype
        self._chunk_tokens = chunk_tokens
        self._links = np.full(max_sessions, NO_LINK, dtype=np.int64)
        """[X]: where a session is announced."""
        self._with_features = np.zeros(max_sessions, dtype=np.bool_)
        self._tokens = np.zeros(max_sessions, dtype=np.int64)
        """[X]: tokens that `_digests` covers; an announced session's drafter was told as many."""
        self._features = np.zeros(max_sessions, dtype=np.int64)
        """[X]: positions whose KV was written when the session was last looked at."""
        self._digests = np.zeros(max_sessions, dtype=np.uint64)

    def announced_mask(self, link_id: int, handles: NDArray[np.int64]) -> NDArray[np.bool_]:
        """[n]: which of these handles are announced on a link; they may be any numbers >= 0, and
        repeat."""
        known = handles < len(self._links)
        announced: NDArray[np.bool_] = self._links[np.where(known, handles, 0)] == link_id
        return known & announced

    def follow_session(self, session: Session) -> None:
        """Follow a session from its beginning on."""
        handle = session.handle
        self._links[handle] = NO_LINK
        self._tokens[handle] = self._features[handle] = 0
        self._digests[handle] = EMPTY_DIGEST
        self._inbox.open_session(handle)

    def can_announce(self, session: Session, link: ExchangeLink) -> bool:
        """Whether this drafter can serve the session from its present prefix on."""
        if not session.plan.is_speculative or session.plan.method not in link.methods:
            return False
        if not _with_features(session, link):
            return session.plan.method not in FEATURE_METHODS
        held = self._store is not None and self._store.is_complete(session.handle)
        return session.keeps_features and held

    def start_session(self, session: Session, link: ExchangeLink) -> Iterator[VerifierMessage]:
        """Start a session on a link: SessionStart, then everything committed, in chunks."""
        handle = session.handle
        with_features = _with_features(session, link)
        self._links[handle] = link.link_id
        self._with_features[handle] = with_features
        self._tokens[handle] = self._features[handle] = 0
        self._digests[handle] = EMPTY_DIGEST
        yield SessionStart(
            handle=handle,
            session_id=session.session_id,
            epoch=session.spec.epoch,
            plan=session.drafter_plan,
            sampling=session.spec.sampling.for_drafter(),
            max_len=session.max_len,
            prompt_len=session.spec.prompt_len,
            structured_output=session.spec.structured_output,
            stop_token_ids=session.spec.stop_token_ids if session.spec.structured_output else (),
            token_limits=session.spec.token_limits,
            traceparent=session.spec.traceparent,
        )
        yield from self._replay(session)

    def can_catch_up(self, session: Session) -> bool:
        """Whether what the drafter was not told meanwhile is still held."""
        if not self._with_features[session.handle]:
            return True
        return self._store is not None and self._store.is_complete(session.handle)

    def build_catch_up(self, session: Session) -> Iterator[VerifierMessage]:
        """All that an announced session committed since its drafter was last told, in chunks."""
        return self._replay(session)

    def _replay(self, session: Session) -> Iterator[VerifierMessage]:
        handle, written = session.handle, session.written_positions
        told, digest = int(self._tokens[handle]), int(self._digests[handle])
        for start in range(int(self._features[handle]), written, self._chunk_tokens):
            stop = min(start + self._chunk_tokens, written)
            chunks: list[NDArray[np.generic]] = []
            if self._with_features[handle]:
                assert self._store is not None
                chunks = self._store.read(handle, start, stop)
            whole = stop == written and session.is_prefilled
            upto = session.length if whole else stop
            tokens = session.tokens[told:upto]
            digest = extend_digest(digest, tokens)
            yield Verdicts(
                handles=_column([handle]),
                starts=_column([told]),
                token_counts=_column([len(tokens)]),
                tokens=np.array(tokens, dtype=np.int32),
                digests=np.array([digest], dtype=np.uint64),
                feature_starts=_column([start]),
                feature_counts=_column([stop - start if chunks else 0]),
                draft_wanted=np.array([whole and session.draft_wanted]),
                # Of hundreds of tokens these are megabytes: they are copied where they are written.
                features=FeatureRows(dtype=self._dtype, segments=tuple(chunks)) if chunks else None,
            )
            told = upto
            self._tokens[handle], self._features[handle] = told, stop
            self._digests[handle] = digest
            if whole:
                place = np.array([handle])
                self._inbox.advance_sessions(place, self._digests[place], self._tokens[place])

    def prefix_digests(
        self, handles: NDArray[np.int64], lengths: NDArray[np.int64], told: NDArray[np.bool_]
    ) -> list[int] | None:
        """[n] of prefixes of so many tokens, of sessions that drafters are told of; None if what
        is known of any has another length."""
        if not ((self._tokens[handles] == lengths) | ~told).all():
            return None
        digests: list[int] = self._digests[handles].tolist()
        return digests

    def advance_and_build(self, told: VerdictBatch) -> list[tuple[int, Verdicts]]:
        """`follow`, and the verdicts at once."""
        return self.build_verdicts(self.advance_prefixes(told)) if len(told) else []

    def advance_prefixes(self, told: VerdictBatch) -> AdvancedBatch:
        """Take in what a round committed, sessions of which their drafters are to hear nothing yet
        left out; whom that concerns can be said later, with `verdicts`."""
        handles, whole = told.handles, told.is_prompt_done
        starts, feature_starts = self._tokens[handles], self._features[handles]
        every = bool(whole.all())
        upto = told.prefix_lens + told.counts
        if not every:
            upto = np.where(whole, upto, told.written_positions)
        counts = upto - starts
        tokens = told.tokens_between(starts, upto)
        digests = extend_ragged(self._digests[handles], counts, tokens)
        self._tokens[handles], self._features[handles] = upto, told.written_positions
        self._digests[handles] = digests
        if every:
            self._inbox.advance_sessions(handles, digests, upto)
        else:
            self._inbox.advance_sessions(handles[whole], digests[whole], upto[whole])
        return AdvancedBatch(told, starts, counts, tokens, digests, feature_starts)

    def build_verdicts(self, followed: AdvancedBatch) -> list[tuple[int, Verdicts]]:
        """(link, verdicts) for each drafter that is concerned."""
        told, starts, counts, tokens, digests, feature_starts = followed
        if not len(told):
            return []
        handles = told.handles
        links, fed = self._links[handles], self._with_features[handles]
        concerned = set(links.tolist())
        shared = len(concerned) > 1
        if isinstance(told.features, ShmFeatures) and concerned == {told.features.link_id}:
            features = self._in_place(told.features, fed)
        else:
            features = self._scattered_features(told.features, fed)
        verdicts = Verdicts(
            handles=handles,
            starts=starts,
            token_counts=counts,
            tokens=tokens,
            digests=digests,
            feature_starts=feature_starts,
            feature_counts=features.counts,
            draft_wanted=told.draft_wanted,
            features=features.rows,
            feature_offsets=features.offsets,
        )
        if not shared:
            (link,) = concerned
            return [] if link == NO_LINK else [(link, verdicts)]
        return [
            (link, _part(verdicts, links == link, features.chunks))
            for link in sorted(concerned - {NO_LINK})
        ]

    def _in_place(self, placed: ShmFeatures, fed: NDArray[np.bool_]) -> _VerdictFeatures:
        """What is told of features that lie where their drafter reads them; fed [n]."""
        counts = np.where(fed, placed.counts, 0)
        offsets = np.where(counts > 0, placed.offsets, 0)
        used = int((offsets + counts).max())
        if not used:
            return _VerdictFeatures(counts, None)
        rows = FeatureRows(dtype=self._dtype, segments=(placed.memory[:used],))
        return _VerdictFeatures(counts, rows, offsets)

    def _scattered_features(
        self, features: Sequence[NDArray[np.generic] | None] | ShmFeatures, fed: NDArray[np.bool_]
    ) -> _VerdictFeatures:
        """What is told of features that lie anywhere; fed [n]."""
        found = features.row_slices() if isinstance(features, ShmFeatures) else features
        rows = [
            piece if wanted else None for piece, wanted in zip(found, fed.tolist(), strict=True)
        ]
        held = tuple([piece for piece in rows if piece is not None])
        return _VerdictFeatures(
            _column([0 if piece is None else len(piece) for piece in rows]),
            FeatureRows(dtype=self._dtype, segments=held) if held else None,
            chunks=rows,
        )

    def forget_session(self, session: Session) -> None:
        """The session is no longer announced."""
        if session.handle >= 0:
            self._links[session.handle] = NO_LINK


def may_need_features(spec: SessionSpec, in_process_draft: int) -> bool:
    """Whether the session's features may have to be told to a drafter some day: to its own one (of
    a plan without drafts, which may become another), or, where it should have one and none was
    there, to one that comes later. `in_process_draft`: length of drafts that are made in this
    process or between devices; 0: its drafts come by messages."""
    if in_process_draft:
        return False
    if spec.drafter_id is not None:
        return spec.plan.method in FEATURE_METHODS or spec.plan.method is DraftMethod.NONE
    return spec.plan.is_speculative and spec.plan.method in FEATURE_METHODS


def _part(
    verdicts: Verdicts, chosen: NDArray[np.bool_], rows: Sequence[NDArray[np.generic] | None]
) -> Verdicts:
    """Some of the entries; `rows` [S] are their features."""
    mine = [rows[place] for place in np.flatnonzero(chosen).tolist()]
    held = tuple([piece for piece in mine if piece is not None])
    features = verdicts.features
    return Verdicts(
        handles=verdicts.handles[chosen],
        starts=verdicts.starts[chosen],
        token_counts=verdicts.token_counts[chosen],
        tokens=verdicts.tokens[chosen.repeat(verdicts.token_counts)],
        digests=verdicts.digests[chosen],
        feature_starts=verdicts.feature_starts[chosen],
        feature_counts=verdicts.feature_counts[chosen],
        draft_wanted=verdicts.draft_wanted[chosen],
        features=FeatureRows(dtype=features.dtype, segments=held) if features and held else None,
    )


def _column(values: Sequence[int]) -> NDArray[np.int64]:
    return np.array(values, dtype=np.int64)


def _with_features(session: Session, link: ExchangeLink) -> bool:
    wanted = link.feature_layout is FeatureLayout.PROJECTED
    return wanted and session.plan.method in FEATURE_METHODS
