"""What a drafter is told about a session: its start, then verdicts, live or replayed.

A verdict says which tokens became committed and carries the features of the positions whose K/V
was written: w features for w written positions, and w + 1 tokens once the session decodes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider.spec.digest import EMPTY_DIGEST, extend_digest
from outrider.spec.plan import DraftMethod
from outrider.wire.messages import (
    FeatureLayout,
    SessionStart,
    TensorDtype,
    Verdict,
    VerifierMessage,
    WireTensor,
)
from outrider_verifier.commands import Link
from outrider_verifier.features import FeatureStore
from outrider_verifier.sessions import Session

FEATURE_FED = (DraftMethod.EAGLE3, DraftMethod.EAGLE)
"""Draft methods that look at target features; the others get tokens only."""


@dataclass(slots=True)
class _Sent:
    """How far a session was told on its link."""

    with_features: bool
    tokens: int = 0
    features: int = 0
    digest: int = EMPTY_DIGEST


class Handover:
    """Builds the messages of announced sessions."""

    def __init__(
        self, *, store: FeatureStore | None, dtype: TensorDtype, chunk_tokens: int
    ) -> None:
        self._store = store
        self._dtype = dtype
        self._chunk_tokens = chunk_tokens
        self._sent: dict[int, _Sent] = {}

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
        sent = self._sent[session.ticket] = _Sent(_with_features(session, link))
        yield SessionStart(
            session_id=session.session_id,
            epoch=session.spec.epoch,
            plan=session.plan,
            sampling=session.spec.sampling,
            max_len=session.max_len,
            prompt_len=session.spec.prompt_len,
        )
        yield from self._replay(session, sent)

    def can_catch_up(self, session: Session) -> bool:
        """Whether what the drafter was not told meanwhile is still held."""
        sent = self._sent.get(session.ticket)
        if sent is None or not sent.with_features:
            return sent is not None
        return self._store is not None and self._store.complete(session.session_id)

    def catch_up(self, session: Session) -> Iterator[VerifierMessage]:
        """All that an announced session committed since its drafter was last told, in chunks."""
        return self._replay(session, self._sent[session.ticket])

    def _replay(self, session: Session, sent: _Sent) -> Iterator[VerifierMessage]:
        written = session.kv.len
        for start in range(sent.features, written, self._chunk_tokens):
            stop = min(start + self._chunk_tokens, written)
            features = None
            if sent.with_features:
                assert self._store is not None
                features = self._store.read(session.session_id, start, stop)
            upto = session.length if stop == written and not session.prefill_left else stop
            whole = upto == session.length and not session.prefill_left
            yield self._verdict(
                session, sent, upto=upto, written=stop, features=features, whole=whole
            )

    def advance(
        self,
        session: Session,
        features: NDArray[np.generic] | None,
        *,
        accepted_nodes: tuple[int, ...] = (),
        proposal_digest: int = 0,
    ) -> Verdict:
        """The verdict on what a round committed; `features` [m, H] are the round's own."""
        sent = self._sent[session.ticket]
        if not sent.with_features:
            features = None
        written, whole = session.kv.len, not session.prefill_left
        return self._verdict(
            session,
            sent,
            upto=session.length if whole else written,
            written=written,
            features=features,
            whole=whole,
            accepted_nodes=accepted_nodes,
            proposal_digest=proposal_digest,
        )

    def forget(self, session: Session) -> None:
        """The session is no longer announced."""
        self._sent.pop(session.ticket, None)

    def _verdict(
        self,
        session: Session,
        sent: _Sent,
        *,
        upto: int,
        written: int,
        features: NDArray[np.generic] | None,
        whole: bool,
        accepted_nodes: tuple[int, ...] = (),
        proposal_digest: int = 0,
    ) -> Verdict:
        """`whole`: whether this tells all of a session that decodes."""
        start, feature_start = sent.tokens, sent.features
        tokens = session.tokens[start:upto]
        digest = session.digest if whole else extend_digest(sent.digest, tokens.tolist())
        sent.tokens, sent.features, sent.digest = upto, written, digest
        wire = None if features is None else WireTensor(dtype=self._dtype, data=features)
        assert features is None or len(features) == written - feature_start
        return Verdict(
            session_id=session.session_id,
            epoch=session.spec.epoch,
            round_id=session.round_id,
            start=start,
            tokens=tokens,
            prefix_digest=digest,
            feature_start=feature_start,
            features=wire,
            draft_wanted=whole and session.draft_wanted,
            accepted_nodes=accepted_nodes,
            proposal_digest=proposal_digest,
        )


def _with_features(session: Session, link: Link) -> bool:
    wanted = link.feature_layout is FeatureLayout.PROJECTED
    return wanted and session.plan.method in FEATURE_FED
