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
    """Bounds of one round."""

    prefill_tokens: int
    """Maximum number of prompt tokens of all sessions in one round."""
    chunk_tokens: int = 1
    """Granularity of prefill chunks in prompt tokens. A partly filled unit counts as full."""
    decode_tokens: int
    """Maximum number of roots and draft nodes of all sessions in one round; one row always fits."""
    batch_wait_s: float
    """Seconds that the first ready row waits for rows whose proposals may still arrive."""
    batch_wait_rounds: float = 0.0
    """Waiting time in rounds, used instead of `batch_wait_s` if it is longer and proposals usually
    arrive within it. If the drafter computes on the target's CPU cores, a round that starts at once
    slows both down, and the awaited rows miss it anyway."""
    yield_s: float = 0.05
    """Seconds that a ready row stays out of rounds with prompts of a higher priority, to keep those
    rounds short."""


class RoundEstimates(NamedTuple):
    """Estimated durations in seconds, 0 if unknown."""

    answer_s: float = 0.0
    """Time from the end of a round to the arrival of the drafts for the tokens it emitted."""
    round_s: float = 0.0
    """Time of a round."""


class RowState(NamedTuple):
    """Input of the scheduler about one session."""

    session_id: SessionId
    prefill_left: int
    """Number of prefill tokens not yet submitted in a round; 0 once the session can decode."""
    nodes: int | None
    """Number of nodes of the usable proposal, None without a usable proposal."""
    root_known_at: float
    """Time when the session's root became known; for a prefilling session, when it was opened."""
    proposal_at: float = 0.0
    """Arrival time of the usable proposal."""
    in_process_nodes: int = 0
    """Number of draft nodes from the in-process drafter."""
    awaits_proposal: bool = False
    """Whether a proposal is missing and expected: the plan is speculative, and the drafter is live
    and not stalled."""
    proposal_timeout_s: float = 0.0
    """Seconds that the row waits for a proposal, counted from `root_known_at`."""
    runs_ahead: bool = False
    """Whether the next round of the session needs no result of the in-flight round on the host."""
    tokens_left: int = 2
    """Number of tokens the session may still emit; tokens of an in-flight round are included."""
    priority: int = 0
    """Priority of the session; prompts of higher priority are prefilled first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillChunk:
    """The next `num_tokens` prompt tokens of a session."""

    session_id: SessionId
    num_tokens: int


class DecodeRow(NamedTuple):
    """A session's root, with its proposal if it has one."""

    session_id: SessionId
    has_proposal: bool = False
    """Whether there is a usable proposal."""
    is_timed_out: bool = False
    """Whether the row has no proposal because its proposal timeout has passed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundPlan:
    """Round to run now. A plan without rows means that nothing runs before `wait_until`."""

    prefill: tuple[PrefillChunk, ...] = ()
    decode: tuple[DecodeRow, ...] = ()
    wait_until: float | None = None
    """Time at which to schedule again; None if only a new command can change the plan."""
    is_self_contained: bool = False
    """Whether no session of the round needs input from outside this process, for this round or the
    next one."""

    @property
    def session_ids(self) -> list[SessionId]:
        """Ids of the sessions of the round, prefilling sessions first."""
        return [row.session_id for row in self.prefill] + [row.session_id for row in self.decode]

    def __contains__(self, session_id: object) -> bool:
        """Return whether the session is in the round. To check many sessions, use `session_ids`."""
        return session_id in self.session_ids

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to run now."""
        return not self.prefill and not self.decode

    def wake_by(self, at: float | None) -> RoundPlan:
        """Return this plan with `wait_until` at most `at`; return it unchanged if `at` is None."""
        if at is None or (self.wait_until is not None and self.wait_until <= at):
            return self
        return replace(self, wait_until=at)
