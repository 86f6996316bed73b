"""What drafters are told about sessions: their start, then verdicts, live or replayed.

A verdict says which tokens became committed and carries the features of the positions whose K/V
was written: w features for w written positions, and w + 1 tokens once the session decodes. A round
is one message for each drafter. X session handles; H width of a feature.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.spec.digest import EMPTY_DIGEST, extend_digest, extend_ragged
from outrider.spec.plan import DraftMethod
from outrider.wire.messages import (
    FeatureLayout,
    FeatureRows,
    SessionStart,
    TensorDtype,
    Verdict,
    Verdicts,
    VerifierMessage,
    WireTensor,
)
from outrider_verifier.commands import Link
from outrider_verifier.features import FeatureStore
from outrider_verifier.inbox import Inbox
from outrider_verifier.sessions import Session

FEATURE_FED = (DraftMethod.EAGLE3, DraftMethod.EAGLE)
"""Draft methods that look at target features; the others get tokens only."""
NO_LINK = 0
"""Numbers of links begin at 1."""


class Told(NamedTuple):
    """A session that a round moved on, for its drafter."""

    session: Session
    features: NDArray[np.generic] | None
    """[m, H] of the positions that the round wrote; copied before the round is left."""


class Handover:
    """Follows the prefixes of sessions that name a drafter, announced or not, in columns."""

    def __init__(
        self,
        *,
        inbox: Inbox,
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
        """[X]: positions whose K/V was written when the session was last looked at."""
        self._digests = np.zeros(max_sessions, dtype=np.uint64)

    def owned(self, link_id: int, handles: NDArray[np.int64]) -> NDArray[np.bool_]:
        """[n]: which of these handles are announced on a link; they may be any numbers >= 0."""
        known = handles < len(self._links)
        announced: NDArray[np.bool_] = self._links[np.where(known, handles, 0)] == link_id
        return known & announced

    def open(self, session: Session) -> None:
        """Follow a session from its beginning on."""
        handle = session.handle
        self._links[handle] = NO_LINK
        self._tokens[handle] = self._features[handle] = 0
        self._digests[handle] = EMPTY_DIGEST
        # No draft continues an unfinished prompt.
        beyond = np.array([session.max_len], dtype=np.int64)
        self._inbox.move(np.array([handle]), np.zeros(1, dtype=np.uint64), beyond)

    def can_announce(self, session: Session, link: Link) -> bool:
        """Whether this drafter can serve the session from its present prefix on."""
        if not session.plan.speculative or session.plan.method not in link.methods:
            return False
        if not _with_features(session, link):
            return session.plan.method not in FEATURE_FED
        held = self._store is not None and self._store.complete(session.session_id)
        return session.keeps_features and held

    def announce(self, session: Session, link: Link) -> Iterator[VerifierMessage]:
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
            plan=session.plan,
            sampling=session.spec.sampling.for_drafter(),
            max_len=session.max_len,
            prompt_len=session.spec.prompt_len,
        )
        yield from self._replay(session)

    def can_catch_up(self, session: Session) -> bool:
        """Whether what the drafter was not told meanwhile is still held."""
        if not self._with_features[session.handle]:
            return True
        return self._store is not None and self._store.complete(session.session_id)

    def catch_up(self, session: Session) -> Iterator[VerifierMessage]:
        """All that an announced session committed since its drafter was last told, in chunks."""
        return self._replay(session)

    def _replay(self, session: Session) -> Iterator[VerifierMessage]:
        handle, written = session.handle, session.kv.len
        told, digest = int(self._tokens[handle]), int(self._digests[handle])
        for start in range(int(self._features[handle]), written, self._chunk_tokens):
            stop = min(start + self._chunk_tokens, written)
            wire = None
            if self._with_features[handle]:
                assert self._store is not None
                rows = self._store.read(session.session_id, start, stop)
                wire = WireTensor(dtype=self._dtype, data=rows)
            whole = stop == written and session.prefilled
            upto = session.length if whole else stop
            tokens = session.tokens[told:upto]
            digest = extend_digest(digest, tokens)
            verdict = Verdict(
                handle=handle,
                start=told,
                tokens=tokens,
                prefix_digest=digest,
                feature_start=start,
                features=wire,
                draft_wanted=whole and session.draft_wanted,
            )
            yield Verdicts.of([verdict])
            told = upto
            self._tokens[handle], self._features[handle] = told, stop
            self._digests[handle] = digest
            if whole:
                place = np.array([handle])
                self._inbox.move(place, self._digests[place], self._tokens[place])

    def advance(self, round_: Sequence[Told]) -> list[tuple[int, Verdicts]]:
        """Take in what a round committed, sessions of which their drafters are to hear nothing yet
        left out; (link, verdicts) for each drafter that is concerned."""
        if not round_:
            return []
        handles = np.array([told.session.handle for told in round_])
        starts, feature_starts = self._tokens[handles], self._features[handles]
        written = np.array([told.session.kv.len for told in round_])
        whole = np.array([told.session.prefilled for told in round_])
        upto = np.where(whole, [told.session.length for told in round_], written)
        pieces = [
            told.session.tokens[start:stop]
            for told, start, stop in zip(round_, starts.tolist(), upto.tolist(), strict=True)
        ]
        digests = extend_ragged(self._digests[handles], upto - starts, np.concatenate(pieces))
        self._tokens[handles], self._features[handles] = upto, written
        self._digests[handles] = digests
        self._inbox.move(handles[whole], digests[whole], upto[whole])
        links = self._links[handles]
        result: list[tuple[int, Verdicts]] = []
        for link in set(links.tolist()) - {NO_LINK}:
            mine = np.flatnonzero(links == link)
            chosen = mine.tolist()
            told = [round_[place] for place in chosen]
            rows = self._rows(told, self._with_features[handles[mine]])
            counts = np.array([0 if piece is None else len(piece) for piece in rows])
            held = tuple(piece for piece in rows if piece is not None)
            verdicts = Verdicts(
                handles=handles[mine],
                starts=starts[mine],
                token_counts=(upto - starts)[mine],
                tokens=np.concatenate([pieces[place] for place in chosen]),
                digests=digests[mine],
                feature_starts=feature_starts[mine],
                feature_counts=counts,
                draft_wanted=np.array(
                    [bool(whole[place]) and round_[place].session.draft_wanted for place in chosen]
                ),
                features=FeatureRows(dtype=self._dtype, pieces=held) if held else None,
            )
            result.append((link, verdicts))
        return result

    def forget(self, session: Session) -> None:
        """The session is no longer announced."""
        if session.handle >= 0:
            self._links[session.handle] = NO_LINK

    @staticmethod
    def _rows(
        told: Sequence[Told], with_features: NDArray[np.bool_]
    ) -> list[NDArray[np.generic] | None]:
        return [
            entry.features if wanted else None
            for entry, wanted in zip(told, with_features.tolist(), strict=True)
        ]


def _with_features(session: Session, link: Link) -> bool:
    wanted = link.feature_layout is FeatureLayout.PROJECTED
    return wanted and session.plan.method in FEATURE_FED
