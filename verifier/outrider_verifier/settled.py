"""A row of a round that was settled, as rounds and the planner see it; and the sheet on which a
round's verdicts are worked out in columns, n rows that decode. Committing is here, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider.wire.messages import FinishReason
from outrider_verifier.handover import Told
from outrider_verifier.packing import PrefillRow, VerifyRow
from outrider_verifier.rows import cut_emission
from outrider_verifier.runner import Decoded, RowOutcome
from outrider_verifier.sessions import Session


@dataclass(slots=True, eq=False)
class Settled:
    """A row whose tokens are committed and whose drafter is told; the rest is to be done."""

    session: Session
    result: RowOutcome
    tokens: tuple[int, ...] = ()
    reason: FinishReason | None = None
    verified: VerifyRow | None = None
    missed: bool = False
    """Whether a proposal was wanted and none was there."""
    fresh: int = 0
    """Of a prompt: positions whose K/V was written for the first time."""

    @property
    def nodes(self) -> int:
        """Nodes of the draft from outside that the row verified."""
        return 0 if self.verified is None else self.verified.nodes

    @property
    def hit(self) -> bool:
        """Whether that draft was there before its prefix was."""
        verified = self.verified
        return verified is not None and verified.held is not None and verified.held.ahead


@dataclass(slots=True, eq=False)
class Sheet:
    """What of the sessions decides over the verdicts, written down while the device works."""

    sessions: list[Session]
    handles: NDArray[np.int64]
    lengths: NDArray[np.int64]
    """Tokens before the round."""
    most: NDArray[np.int64]
    """Tokens of the round that are emitted at most: the budget; 0 of a session that has ended."""
    told: NDArray[np.bool_]
    """Whether a drafter hears of it."""
    wishes: NDArray[np.bool_]
    """Whether a draft could help, but for the budget."""
    stop_ids: frozenset[int]
    """Of all sessions."""

    @classmethod
    def of(cls, sessions: list[Session]) -> Sheet:
        """The sheet of a round that is not settled."""
        columns = np.array([_columns(session) for session in sessions], dtype=np.int64)
        handles, lengths, most, told, wishes = np.ascontiguousarray(columns.reshape(-1, 5).T)
        stop_ids = frozenset[int]().union(*{session.stop_ids for session in sessions})
        return cls(sessions, handles, lengths, most, told != 0, wishes != 0, stop_ids)

    def verdicts(self, decoded: Decoded) -> Told:
        """What the round told of those sessions that go on, and that a drafter follows."""
        counts = decoded.counts
        going = self.told & (counts < self.most)
        if self.stop_ids and not self.stop_ids.isdisjoint(decoded.tokens.tolist()):
            going &= ~self._stopped(decoded)
        told = Told(
            sessions=self.sessions,
            handles=self.handles,
            lengths=self.lengths,
            counts=counts,
            tokens=decoded.tokens,
            # The last token is the root, whose K/V the next round writes.
            written=self.lengths + counts - 1,
            whole=np.ones(len(counts), dtype=np.bool_),
            # One token beyond the draft is emitted.
            wanted=self.wishes & (counts + 1 < self.most),
            features=decoded.features,
        )
        return told if going.all() else told.only(going)

    def _stopped(self, decoded: Decoded) -> NDArray[np.bool_]:
        """[n]: which rows hold a token at which their session stops."""
        ends = np.cumsum(decoded.counts).tolist()
        tokens = decoded.tokens.tolist()
        return np.array(
            [
                not session.stop_ids.isdisjoint(tokens[end - count : end])
                for session, end, count in zip(
                    self.sessions, ends, decoded.counts.tolist(), strict=True
                )
            ]
        )


def commit_rows(verify: Sequence[VerifyRow], decoded: Decoded, now: float) -> list[Settled]:
    """Commit what stands of the rows that decoded, where sessions go on; nobody is told. `now`:
    when their roots became known."""
    rows = zip(verify, decoded.rows(), strict=True)
    return [_commit(row.session, result, now, row) for row, result in rows if not row.session.ended]


def commit_prompts(
    prefill: Sequence[PrefillRow], results: Sequence[RowOutcome], now: float
) -> list[Settled]:
    """Commit the first tokens of the prompts that are complete."""
    return [
        _commit_prompt(row, result, now)
        for row, result in zip(prefill, results, strict=True)
        if not row.session.ended
    ]


def _commit_prompt(row: PrefillRow, result: RowOutcome, now: float) -> Settled:
    fresh = row.session.saw_filled(row.end, now)
    if fresh < row.num_tokens and result.features is not None:
        # What a preempted session had before is kept, and told, once.
        features = result.features[row.num_tokens - fresh :] if fresh else None
        result = result._replace(features=features)
    settled = _commit(row.session, result, now) if row.last else Settled(row.session, result)
    settled.fresh = fresh
    return settled


def _commit(
    session: Session, result: RowOutcome, now: float, row: VerifyRow | None = None
) -> Settled:
    assert result.acceptance is not None
    tokens, reason = cut_emission(
        result.acceptance.tokens, stop_ids=session.stop_ids, remaining=session.remaining
    )
    missed = row is not None and row.held is None and session.draft_wanted
    session.append(tokens, now)
    session.round_id += int(row is not None)
    return Settled(session, result, tokens, reason, row, missed)


def _columns(session: Session) -> tuple[int, int, int, bool, bool]:
    return (
        session.handle,
        session.length,
        0 if session.ended else session.remaining,
        is_told(session),
        session.wishes_drafts and session.draft_limit > 0,
    )


def is_told(session: Session) -> bool:
    """Whether a drafter hears of what the session commits."""
    return session.spec.drafter_id is not None and not session.paused
