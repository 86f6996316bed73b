"""Parts of a session: its prefill progress, its preemptions, and its drafter's failures."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class PrefillProgress:
    """Number of tokens that a session has to prefill, and how many of them were submitted in
    rounds."""

    target: int
    """Number of tokens to prefill: the prompt, or after a preemption the whole prefix."""
    sent: int = 0
    """Number of these tokens that were submitted in rounds. Their KV is written when the rounds
    have ended."""

    @property
    def left(self) -> int:
        """Number of these tokens that were not yet submitted in a round."""
        return self.target - self.sent


@dataclass(slots=True, kw_only=True)
class PreemptionRecord:
    """Preemptions of a session, and the time that it has waited for KV blocks. Times are seconds of
    the engine's clock."""

    waiting_since: float
    """Time at which the session's present or last wait began."""
    total_wait_s: float = 0.0
    """Total duration of all waits that have ended."""
    count: int = 0
    """Number of preemptions."""
    resumed_at: float = 0.0
    """Time at which the session last received KV blocks after a preemption or to prefill again; 0
    if it never has."""
    resumed_len: int = 0
    """Length of the session at `resumed_at`, in tokens."""

    def end_wait(self, now: float) -> None:
        """Add the wait that ends at time `now` to the total."""
        self.total_wait_s += now - self.waiting_since

    def record_resume(self, now: float, length: int) -> None:
        """Record that the session continues at time `now`, when its length is `length` tokens."""
        self.resumed_at, self.resumed_len = now, length


@dataclass(slots=True)
class DrafterRecord:
    """Failures of a session's drafter, and whether the session's in-process drafts were dropped."""

    losses: int = 0
    """Number of times that the drafter reported the session as lost."""
    undrafted_rounds: int = 0
    """Number of consecutive rounds, up to `last_undrafted_round`, for which the drafter on another
    GPU had no draft."""
    last_undrafted_round: int = -1
    has_dropped_drafts: bool = False
    """Whether the session's in-process drafts were dropped. They are never used again, because the
    session's draft KV is no longer extended."""

    def record_loss(self) -> int:
        """Count a loss of the session by its drafter, and return the number of losses so far."""
        self.losses += 1
        return self.losses

    def reset_losses(self) -> None:
        """Set the number of losses to 0, because the session has another drafter."""
        self.losses = 0

    def record_undrafted_round(self, round_id: int) -> int:
        """Record that round number `round_id` of the session had no draft. Return the number of
        such rounds in a row."""
        follows = round_id == self.last_undrafted_round + 1
        self.undrafted_rounds = self.undrafted_rounds + 1 if follows else 1
        self.last_undrafted_round = round_id
        return self.undrafted_rounds

    def record_dropped_drafts(self) -> None:
        """Record that the session's in-process drafts were dropped."""
        self.has_dropped_drafts = True

    def reset_undrafted_rounds(self) -> None:
        """Set the number of consecutive rounds without a draft to 0."""
        self.undrafted_rounds = 0
