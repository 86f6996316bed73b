"""Commits the results of a round to its sessions, and collects what accounting and verdicts need.

`VerdictInputs` holds the session state from which a round's verdicts are computed, as arrays with
one entry for each session. In shapes, n is the number of decode rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from outrider.spec.digest import extend_digest
from outrider.wire.messages import FinishReason
from outrider_verifier.exchange.proposal_inbox import ProposalInbox
from outrider_verifier.exchange.verdict_builder import VerdictBatch
from outrider_verifier.model_runner.batch import PrefillRow, VerifyRow, truncate_emission
from outrider_verifier.model_runner.interface import DecodeOutput, RowOutput
from outrider_verifier.state.session import Session
from outrider_verifier.state.session_phase import ENDED


@dataclass(slots=True, eq=False)
class RowResult:
    """Result of one session in a round, after its tokens were committed to the session. Statistics
    and client events are made from it."""

    session: Session
    result: RowOutput
    tokens: tuple[int, ...] = ()
    reason: FinishReason | None = None
    verify_row: VerifyRow | None = None
    missed_proposal: bool = False
    """Whether the session wanted a proposal for this round and had none."""
    new_positions: int = 0
    """Number of prompt positions whose KV was written for the first time."""

    @classmethod
    def of_plain(cls, session: Session) -> RowResult:
        """Return the result of a decode row without a draft, whose only token was already
        committed."""
        return cls(session, RowOutput((session.root,), None), (session.root,))

    @property
    def ends(self) -> bool:
        """Whether the session ends with this round, because its output is complete or the model
        returned invalid logits."""
        return self.reason is not None or self.result.invalid_output

    @property
    def accepted(self) -> int:
        """Number of accepted draft nodes. Nodes whose tokens were cut from the output, after a stop
        token or beyond the token budget, count too."""
        return len(self.result.tokens) - 1

    @property
    def nodes(self) -> int:
        """Number of verified draft nodes that do not come from the in-process drafter."""
        return 0 if self.verify_row is None else self.verify_row.nodes

    @property
    def is_hit(self) -> bool:
        """Whether the verified proposal was a hit: look-ahead had drafted it before its prefix was
        committed."""
        verified = self.verify_row
        return verified is not None and verified.held is not None and verified.held.is_hit


@dataclass(slots=True, eq=False)
class PlainRows:
    """Results of decode rows with nothing to report but their tokens: the sessions continue and
    receive no drafts from other processes. With in-process drafts nearly all rows are of this kind,
    so they are stored as lists with one entry for each row."""

    sessions: list[Session]
    counts: Sequence[int]
    """Number of tokens of each row, [n]."""
    tokens: Sequence[int]
    """Tokens of all rows, concatenated."""
    draft_nodes: Sequence[int]
    """Number of in-process draft nodes that each row verified, [n]."""
    numbers: Sequence[int]
    """Index of each row in the round, [n]."""

    @classmethod
    def of_rows(
        cls,
        verify: Sequence[VerifyRow],
        numbers: Sequence[int],
        counts: Sequence[int],
        tokens: Sequence[int],
        drafted: Sequence[int],
    ) -> PlainRows:
        """Return those decode rows of a round whose indices are in `numbers`. `counts`, `tokens`
        and `drafted` are the results of all rows in `verify`: tokens per row, concatenated tokens,
        and in-process draft nodes per row."""
        sessions = [row.session for row in verify]
        if len(numbers) == len(sessions):
            return cls(sessions, counts, tokens, drafted, numbers)
        ends = list(itertools.accumulate(counts))
        return cls(
            [sessions[number] for number in numbers],
            [counts[number] for number in numbers],
            [t for number in numbers for t in tokens[ends[number] - counts[number] : ends[number]]],
            [drafted[number] for number in numbers],
            numbers,
        )

    def __len__(self) -> int:
        return len(self.sessions)


NO_ROWS: Final = PlainRows([], [], [], [], [])


@dataclass(slots=True, eq=False)
class CommittedRows:
    """Committed decode rows of a round. Rows of sessions that had already ended are left out."""

    plain: PlainRows
    special: list[RowResult]
    """Rows that are not in `plain`."""


@dataclass(slots=True, eq=False)
class VerdictInputs:
    """Session state from which the verdicts of a round are computed. It is collected while the
    device computes the round."""

    sessions: list[Session]
    """Sessions of all decode rows."""
    handles: NDArray[np.int64]
    lengths: NDArray[np.int64]
    """Length of each session before the round, in tokens, [n]."""
    max_tokens: NDArray[np.int64]
    """Number of tokens that each session may still emit before the round, [n]."""
    has_drafter: NDArray[np.bool_]
    """Whether a drafter receives the session's verdicts, [n]."""
    wants_draft: NDArray[np.bool_]
    """Whether the session can use a draft, if its token budget is ignored, [n]."""
    stop_ids: frozenset[int]
    """Union of the stop token ids of all sessions."""
    digests: list[int] | None = None
    """Digest of each session's prefix before the round, [n]; None if the digest of some session is
    not up to date."""

    @classmethod
    def of_sessions(cls, sessions: list[Session]) -> VerdictInputs | None:
        """Return the inputs for a round of these sessions whose results are not committed yet; None
        if no drafter receives a verdict."""
        if not any(map(has_drafter_link, sessions)):
            return None
        columns = np.array([_columns(session) for session in sessions], dtype=np.int64)
        handles, lengths, most, told, wishes = np.ascontiguousarray(columns.T)
        stop_ids = frozenset[int]().union(*{session.stop_ids for session in sessions})
        return cls(sessions, handles, lengths, most, told != 0, wishes != 0, stop_ids)

    def make_batch(self, decoded: DecodeOutput) -> VerdictBatch | None:
        """Return the verdicts for those sessions that have a drafter and continue after the round;
        None if there are none."""
        counts = decoded.counts
        going = self.has_drafter & (counts < self.max_tokens)
        if decoded.invalid is not None:
            going &= ~decoded.invalid
        if self.stop_ids and not self.stop_ids.isdisjoint(decoded.tokens.tolist()):
            going &= ~self._stopped(decoded)
        if not going.any():
            return None
        told = VerdictBatch(
            sessions=self.sessions,
            handles=self.handles,
            prefix_lens=self.lengths,
            counts=counts,
            tokens=decoded.tokens,
            # The last token is the root, whose KV the next round writes.
            written_positions=self.lengths + counts - 1,
            is_prompt_done=np.ones(len(counts), dtype=np.bool_),
            # One token beyond the draft is emitted.
            draft_wanted=self.wants_draft & (counts + 1 < self.max_tokens),
            features=decoded.shm_features or decoded.features(),
        )
        return told if going.all() else told.select(going)

    def advance_inbox(self, decoded: DecodeOutput, inbox: ProposalInbox) -> int:
        """Set the new prefixes of the sessions in `inbox`, and return the number of prefixes for
        which a proposal is already there. Called before the rest of the round is processed. The
        method loops over rows, which is faster than array operations for few rows."""
        if not self.digests or decoded.invalid is not None:
            # A session that failed must not be in the next round.
            return 0
        tokens, end, hits = decoded.tokens.tolist(), 0, 0
        for session, length, digest, most, told, count in zip(
            self.sessions,
            self.lengths.tolist(),
            self.digests,
            self.max_tokens.tolist(),
            self.has_drafter.tolist(),
            decoded.counts.tolist(),
            strict=True,
        ):
            mine = tokens[end : end + count]
            end += count
            if told and count < most and session.stop_ids.isdisjoint(mine):
                now = extend_digest(digest, mine)
                hits += inbox.advance_session(session.handle, now, length + count)
        return hits

    def _stopped(self, decoded: DecodeOutput) -> NDArray[np.bool_]:
        """Return whether each row emitted a stop token of its session, bool [n]."""
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


def commit_rows(verify: Sequence[VerifyRow], decoded: DecodeOutput, now: float) -> CommittedRows:
    """Commit the emitted tokens of the decode rows whose sessions have not ended. Drafters and
    clients are not informed. `now` is the time at which the new roots became known."""
    going, others, end = list[int](), list[int](), 0
    tokens, unlike = decoded.tokens.tolist(), decoded.special_rows()
    counts, drafted = decoded.counts.tolist(), decoded.draft_nodes()
    for number, (row, count, own) in enumerate(zip(verify, counts, drafted, strict=True)):
        session, start, end = row.session, end, end + count
        if session.phase is ENDED:
            continue
        emitted = tokens[start:end]
        if (
            number in unlike
            or row.drafted
            or own != row.in_process_depth
            or session.constraint is not None
            or session.wants_outside_drafts
            or count >= session.spec.max_new_tokens - session.emitted
            or not session.stop_ids.isdisjoint(emitted)
        ):
            others.append(number)
            continue
        going.append(number)
        session.commit_tokens(emitted, now, 1)
    alike = PlainRows.of_rows(verify, going, counts, tokens, drafted)
    results = decoded.row_outputs(others) if others else ()
    apart = [
        _commit(verify[number].session, result, now, verify[number])
        for number, result in zip(others, results, strict=True)
    ]
    return CommittedRows(alike, apart)


def commit_prompts(
    prefill: Sequence[PrefillRow], results: Sequence[RowOutput], now: float
) -> list[RowResult]:
    """Commit the prefilled tokens, and the first output tokens of the prompts that are complete.
    `now` is the time at which the results became known. Sessions that have ended are left out."""
    return [
        _commit_prompt(row, result, now)
        for row, result in zip(prefill, results, strict=True)
        if row.session.phase is not ENDED
    ]


def _commit_prompt(row: PrefillRow, result: RowOutput, now: float) -> RowResult:
    fresh = row.session.mark_prefilled(row.end, now)
    if fresh < row.num_tokens and result.features is not None:
        # What a preempted session had before is kept, and told, once.
        features = result.features[row.num_tokens - fresh :] if fresh else None
        result = result._replace(features=features)
    settled = _commit(row.session, result, now) if row.last else RowResult(row.session, result)
    settled.new_positions = fresh
    return settled


def _commit(
    session: Session, result: RowOutput, now: float, row: VerifyRow | None = None
) -> RowResult:
    tokens, reason, missed = result.tokens, None, False
    if result.invalid_output:
        return RowResult(session, result, verify_row=row)
    remaining = session.spec.max_new_tokens - session.emitted
    if len(tokens) >= remaining or not session.stop_ids.isdisjoint(tokens):
        tokens, reason = truncate_emission(tokens, stop_ids=session.stop_ids, remaining=remaining)
    if (
        row is not None
        and row.held is None
        and not (session.in_process_draft_length or session.is_speculation_off)
    ):
        # Wanted, whether or not there was anybody to make one.
        missed = session.plan.is_speculative and session.max_draft_depth > 0
    session.commit_tokens(tokens, now, int(row is not None))
    return RowResult(session, result, tokens, reason, row, missed)


def _columns(session: Session) -> tuple[int, int, int, bool, bool]:
    return (
        session.handle,
        session.length,
        session.remaining,
        has_drafter_link(session),
        session.wants_outside_drafts and session.draft_limit > 0,
    )


def has_drafter_link(session: Session) -> bool:
    """Return whether a drafter receives this session's committed tokens as messages. False for
    ended sessions, because another session may already have their handle."""
    return session.spec.drafter_id is not None and not (
        session.is_speculation_off or session.phase is ENDED or session.in_process_draft_length
    )
