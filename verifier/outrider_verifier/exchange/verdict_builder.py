"""Builds the messages that announce sessions to drafters, and the verdicts that follow.

A verdict contains newly committed tokens and the features of the positions whose KV was written. In
total a drafter gets w features for w written positions, and w + 1 tokens once the session decodes.
The verdicts of a round for one drafter are one message. In shapes, n is the number of sessions of a
round; feature rows have shape [rows, feature width].
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
"""Value for "not announced on any link"; link ids begin at 1."""


@dataclass(slots=True, kw_only=True, eq=False)
class VerdictBatch:
    """Results of a round from which the verdicts for drafters are built. Arrays are int64 [n]
    unless noted otherwise, where n is the number of sessions."""

    sessions: Sequence[Session]
    """The n sessions. Tokens of earlier rounds that a drafter has not received are read from
    them."""
    handles: NDArray[np.int64]
    prefix_lens: NDArray[np.int64]
    """Length of each session's prefix in tokens, without the tokens of this round."""
    counts: NDArray[np.int64]
    """Number of tokens that each session commits in this round."""
    tokens: NDArray[np.int32]
    """Tokens that all sessions commit in this round, one session after the other."""
    written_positions: NDArray[np.int64]
    """Number of token positions of each session whose KV is written after this round."""
    is_prompt_done: NDArray[np.bool_]
    """Whether the prompt is completely prefilled, bool [n]."""
    draft_wanted: NDArray[np.bool_]
    """Whether a draft is wanted for the new prefix, bool [n]."""
    features: Sequence[NDArray[np.generic] | None] | ShmFeatures
    """Features [rows, feature width] of the positions that the round wrote, for each session; None
    if there are none."""

    @classmethod
    def of_current(
        cls, sessions: Sequence[Session], features: Sequence[NDArray[np.generic] | None]
    ) -> VerdictBatch:
        """Return a batch for sessions whose tokens of this round are already committed, so that
        `counts` is 0. `features` are the features to send for each session, or None."""
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
        """Return a batch of the sessions for which the mask `chosen` [n] is true."""
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
        """Return the tokens from position `starts[i]` to `stops[i]` - 1 of each session i, one
        session after the other. Starts may be less than `prefix_lens`."""
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
    """A `VerdictBatch` with what is to be sent of it, as returned by
    `VerdictBuilder.advance_prefixes`. Arrays are int64 [n] unless noted otherwise, where n is the
    number of sessions."""

    batch: VerdictBatch
    starts: NDArray[np.int64]
    """Position of the first token to send. Tokens of earlier rounds that the drafter has not
    received are sent, too."""
    counts: NDArray[np.int64]
    """Number of tokens to send."""
    tokens: NDArray[np.int32]
    """Tokens to send of all sessions, one session after the other."""
    digests: NDArray[np.uint64]
    """Digests of the new prefixes."""
    feature_starts: NDArray[np.int64]
    """Position of the first feature to send."""


class _VerdictFeatures(NamedTuple):
    """Features of n sessions as parts of a `Verdicts` message."""

    counts: NDArray[np.int64]
    """Number of feature rows of each session, [n]."""
    rows: FeatureRows | None
    offsets: NDArray[np.int64] | None = None
    """See `Verdicts.feature_offsets`; None if the rows follow each other."""
    chunks: Sequence[NDArray[np.generic] | None] = ()
    """Feature rows of each of the n sessions, or None; empty if the features lie in shared
    memory."""


class VerdictBuilder:
    """Tracks the prefixes of the sessions that have a drafter, whether or not they are announced to
    it, and builds the messages to their drafters."""

    def __init__(
        self,
        *,
        inbox: ProposalInbox,
        store: FeatureStore | None,
        dtype: TensorDtype,
        chunk_tokens: int,
        max_sessions: int,
    ) -> None:
        """Create a builder without sessions. `inbox` is told every prefix for which a proposal may
        arrive. `dtype` is the element type of features. `chunk_tokens` is the maximum number of
        positions per verdict when earlier tokens are sent again."""
        self._inbox = inbox
        self._store = store
        self._dtype = dtype
        self._chunk_tokens = chunk_tokens
        self._links = np.full(max_sessions, NO_LINK, dtype=np.int64)
        """Link on which a session is announced, by handle."""
        self._with_features = np.zeros(max_sessions, dtype=np.bool_)
        self._tokens = np.zeros(max_sessions, dtype=np.int64)
        """Number of tokens that `_digests` covers, by handle. The drafter of an announced session
        has received these tokens."""
        self._features = np.zeros(max_sessions, dtype=np.int64)
        """Number of positions whose KV was written at the last update of the session, by handle."""
        self._digests = np.zeros(max_sessions, dtype=np.uint64)

    def announced_mask(self, link_id: int, handles: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return a mask [n] of the handles that are announced on a link. `handles` [n] may contain
        any numbers >= 0, and the same number several times."""
        known = handles < len(self._links)
        announced: NDArray[np.bool_] = self._links[np.where(known, handles, 0)] == link_id
        return known & announced

    def follow_session(self, session: Session) -> None:
        """Start to track a session from its beginning."""
        handle = session.handle
        self._links[handle] = NO_LINK
        self._tokens[handle] = self._features[handle] = 0
        self._digests[handle] = EMPTY_DIGEST
        self._inbox.open_session(handle)

    def can_announce(self, session: Session, link: ExchangeLink) -> bool:
        """Return whether the drafter of this link can draft for the session from its current prefix
        on."""
        if not session.plan.is_speculative or session.plan.method not in link.methods:
            return False
        if not _with_features(session, link):
            return session.plan.method not in FEATURE_METHODS
        held = self._store is not None and self._store.is_complete(session.handle)
        return session.keeps_features and held

    def start_session(self, session: Session, link: ExchangeLink) -> Iterator[VerifierMessage]:
        """Announce a session on a link. Yield a `SessionStart` and then all committed tokens and
        features in chunks."""
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
        """Return whether `build_catch_up` can be called: either the session's drafter needs no
        features, or all its features are still stored."""
        if not self._with_features[session.handle]:
            return True
        return self._store is not None and self._store.is_complete(session.handle)

    def build_catch_up(self, session: Session) -> Iterator[VerifierMessage]:
        """Yield verdicts, in chunks, with all tokens and features that an announced session has
        committed since the last message to its drafter."""
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
                # These features may be megabytes, so they are copied only where they are written.
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
        """Return the digests of the prefixes of n sessions, or None if the tracked prefix of any
        session has another length than `lengths`. Only sessions in the mask `told` [n], which have
        a drafter, are checked."""
        if not ((self._tokens[handles] == lengths) | ~told).all():
            return None
        digests: list[int] = self._digests[handles].tolist()
        return digests

    def advance_and_build(self, told: VerdictBatch) -> list[tuple[int, Verdicts]]:
        """Call `advance_prefixes` and return the result of `build_verdicts`."""
        return self.build_verdicts(self.advance_prefixes(told)) if len(told) else []

    def advance_prefixes(self, told: VerdictBatch) -> AdvancedBatch:
        """Advance the tracked prefixes by the tokens of a round, and pass the new prefixes to the
        inbox. `told` must not contain sessions whose drafters should receive nothing yet. The
        result is the input of `build_verdicts`, which may be called later."""
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
        """Return a pair (link id, verdicts) for each drafter to which sessions of the batch are
        announced."""
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
        """Return the features that lie in shared memory from which the drafter reads. `fed` [n] is
        whether the session's drafter receives features."""
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
        """Return the features that lie in separate arrays. `fed` [n] is whether the session's
        drafter receives features."""
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
        """Record that no drafter knows the session, so that it is announced before its next
        verdict."""
        if session.handle >= 0:
            self._links[session.handle] = NO_LINK


def may_need_features(spec: SessionSpec, in_process_draft: int) -> bool:
    """Return whether a drafter may ever need the session's features. This may be its present
    drafter or, if it has none although its plan wants drafts, one that is assigned later. For a
    session with a drafter, a plan without drafts counts too, because the plan may change.
    `in_process_draft` is the length, in tokens, of drafts that are made in this process or
    exchanged between devices; 0 if drafts come by messages."""
    if in_process_draft:
        return False
    if spec.drafter_id is not None:
        return spec.plan.method in FEATURE_METHODS or spec.plan.method is DraftMethod.NONE
    return spec.plan.is_speculative and spec.plan.method in FEATURE_METHODS


def _part(
    verdicts: Verdicts, chosen: NDArray[np.bool_], rows: Sequence[NDArray[np.generic] | None]
) -> Verdicts:
    """Return a message with the entries for which the mask `chosen` is true. `rows` holds the
    feature rows of each entry."""
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
