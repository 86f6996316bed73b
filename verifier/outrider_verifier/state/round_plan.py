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
    """Prompt tokens of all sessions in one round."""
    chunk_tokens: int = 1
    """Prompt tokens that a round takes at a time: what a session leaves of a piece free counts as
    taken."""
    decode_tokens: int
    """Roots and nodes of all sessions in one round; one row always fits."""
    batch_wait_s: float
    """Time that the first ready row waits for rows whose proposals may still come, s."""
    batch_wait_rounds: float = 0.0
    """The same in rounds, as a minimum, if the drafter usually answers within them. Where the
    drafter computes on the target's cores, a round that starts at once makes both slower, and the
    rows that wait miss it all the same."""
    yield_s: float = 0.05
    """How long a ready row stays out of rounds with prompts of a higher priority, which are the
    shorter for it."""


class RoundEstimates(NamedTuple):
    """What is known of how long things take, seconds; 0: nothing."""

    answer_s: float = 0.0
    """From a round's end to the drafts for what it emitted."""
    round_s: float = 0.0
    """A round."""


class RowState(NamedTuple):
    """What the schedule must know about one session."""

    session_id: SessionId
    prefill_left: int
    """Tokens to prefill that no round was submitted with; 0 once the session can decode."""
    nodes: int | None
    """Nodes of the usable proposal, None if there is none."""
    root_known_at: float
    """When the session's root became known (a prefilling one: when it was opened)."""
    proposal_at: float = 0.0
    """When the usable proposal arrived."""
    in_process_nodes: int = 0
    """Nodes that this process drafted for it."""
    awaits_proposal: bool = False
    """Whether there is none and one is expected: speculative plan, live drafter that is not
    suspect."""
    proposal_timeout_s: float = 0.0
    """How long the row waits for a proposal, from `since`."""
    runs_ahead: bool = False
    """Whether its next round needs nothing that the one in flight tells the host."""
    tokens_left: int = 2
    """Tokens it may still emit, those of a round in flight not counted off."""
    priority: int = 0
    """Prompts of greater ones go first."""


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
    """Whether the row goes without a proposal because its proposal timeout is over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundPlan:
    """A round to run now, or (no rows at all) nothing before `wait_until`."""

    prefill: tuple[PrefillChunk, ...] = ()
    decode: tuple[DecodeRow, ...] = ()
    wait_until: float | None = None
    """Look again at this time; None: nothing will happen without a new command."""
    is_self_contained: bool = False
    """Whether none of its sessions needs anything from outside this process, for this round or the
    one after it."""

    @property
    def session_ids(self) -> list[SessionId]:
        """The sessions of the round, prompts first."""
        return [row.session_id for row in self.prefill] + [row.session_id for row in self.decode]

    def __contains__(self, session_id: object) -> bool:
        """Whether the session is in the round; of many, `session_ids` is to be asked."""
        return session_id in self.session_ids

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to run now."""
        return not self.prefill and not self.decode

    def wake_by(self, at: float | None) -> RoundPlan:
        """This one, looked at again at `at` at the latest, if that is a time."""
        if at is None or (self.wait_until is not None and self.wait_until <= at):
            return self
        return replace(self, wait_until=at)
