"""Inputs of the scheduler (limits, estimates, row states) and its output, `RoundPlan`. Pure.

Times are seconds of one clock.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from outrider.ids import SessionId

TIME_EMA_WEIGHT: Final = 1.0 / 8.0
"""Weight of a new measurement in the moving averages of the times of rounds and prompts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundLimits:
    """Limits for the size of a round and for the time that rows wait for it."""

    prefill_tokens: int
    """Maximum number of prompt tokens of all sessions in one round."""
    chunk_tokens: int = 1
    """Granularity of prefill in tokens: a prefill chunk that is not full counts as full."""
    decode_tokens: int
    """Maximum number of roots and draft nodes of all sessions in one round. One row is always
    allowed."""
    batch_wait_s: float
    """Time, in seconds, that the first ready row waits for other rows whose proposals may still
    arrive."""
    batch_wait_rounds: float = 0.0
    """Waiting time as a number of rounds. It replaces `batch_wait_s` if it is longer and proposals
    usually arrive within it. The longer wait pays if the drafter computes on the target's CPU
    cores: a round that starts earlier slows both down, and the other rows miss it anyway."""
    yield_s: float = 0.05
    """Maximum time, in seconds, for which a ready row is left out of rounds that prefill prompts of
    a higher priority. Without these rows the rounds are shorter."""


class RoundEstimates(NamedTuple):
    """Estimated durations in seconds; 0 if unknown."""

    answer_s: float = 0.0
    """Time from the end of a round to the arrival of the next proposals."""
    round_s: float = 0.0
    """Duration of a round."""


class RowState(NamedTuple):
    """State of one session from which the scheduler decides."""

    session_id: SessionId
    prefill_left: int
    """Number of tokens to prefill that were not yet submitted in a round; 0 if the session can
    decode."""
    nodes: int | None
    """Number of draft nodes of the proposal for the session's prefix; None if there is no such
    proposal."""
    root_known_at: float
    """Time at which the session's root became known. For a prefilling session it is the time at
    which the session was opened."""
    proposal_at: float = 0.0
    """Time at which the usable proposal arrived."""
    in_process_nodes: int = 0
    """Number of draft nodes from the in-process drafter."""
    awaits_proposal: bool = False
    """Whether the session should wait for a proposal: its plan speculates, there is no proposal
    yet, and its drafter is connected and not stalled."""
    proposal_timeout_s: float = 0.0
    """Maximum time, in seconds, that the session waits for its proposal, counted from
    `root_known_at`."""
    runs_ahead: bool = False
    """Whether the session's next round can be submitted before the host has the result of the round
    in flight."""
    tokens_left: int = 2
    """Number of tokens that the session may still emit, including those of a round in flight."""
    priority: int = 0
    """Priority of the session. Prompts of higher priority are prefilled first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillChunk:
    """Prefill chunk of a session: its next `num_tokens` prompt tokens."""

    session_id: SessionId
    num_tokens: int


class DecodeRow(NamedTuple):
    """Decode row of a session: the root, and the draft nodes of its proposal if there is one."""

    session_id: SessionId
    has_proposal: bool = False
    """Whether the row verifies a proposal."""
    is_timed_out: bool = False
    """Whether the row has no proposal because the proposal timeout has passed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundPlan:
    """The next round. A plan without rows means that no round runs before `wait_until`."""

    prefill: tuple[PrefillChunk, ...] = ()
    decode: tuple[DecodeRow, ...] = ()
    wait_until: float | None = None
    """Time at which to schedule again; None if only a new command can change the plan."""
    is_self_contained: bool = False
    """Whether this round and the next one need no input from other processes for any session of
    this round."""

    @property
    def session_ids(self) -> list[SessionId]:
        """Ids of the sessions in the round; prefilling sessions come first."""
        return [row.session_id for row in self.prefill] + [row.session_id for row in self.decode]

    def __contains__(self, session_id: object) -> bool:
        """Return whether the session is in the round. To check many sessions, use `session_ids`."""
        return session_id in self.session_ids

    @property
    def is_empty(self) -> bool:
        """Whether the plan has no rows."""
        return not self.prefill and not self.decode

    def wake_by(self, at: float | None) -> RoundPlan:
        """Return this plan with `wait_until` limited to at most `at`. If `at` is None, return the
        plan unchanged."""
        if at is None or (self.wait_until is not None and self.wait_until <= at):
            return self
        return replace(self, wait_until=at)
