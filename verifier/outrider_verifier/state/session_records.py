"""Parts of a session: its prefill progress, its preemptions, and its drafter's failures."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class PrefillProgress:
    """Number of tokens that a session has to prefill, and how many were submitted in rounds."""

    target: int
    """Number of tokens to prefill: the prompt, or all tokens whose KV a preemption discarded."""
    sent: int = 0
    """Number of tokens submitted in rounds. Their KV is written once their round has finished."""

    @property
    def left(self) -> int:
        """Number of tokens not yet submitted in a round."""
        return self.target - self.sent


@dataclass(slots=True, kw_only=True)
class PreemptionRecord:
    """Preemptions of a session, and how long it has waited for KV blocks. Times are seconds of the
    engine's clock."""

    waiting_since: float
    """Start of the session's last wait."""
    total_wait_s: float = 0.0
    """Length of all waits that are over."""
    count: int = 0
    """Number of preemptions."""
    resumed_at: float = 0.0
    """Last time at which the session got blocks to resume or to prefill again, 0 if never."""
    resumed_len: int = 0
    """Length of the session at `resumed_at`."""

    def end_wait(self, now: float) -> None:
        """Add the wait that ends now to the total."""
        self.total_wait_s += now - self.waiting_since

    def record_resume(self, now: float, length: int) -> None:
        """Record that the session resumes at time `now` with a length of `length` tokens."""
        self.resumed_at, self.resumed_len = now, length


@dataclass(slots=True)
class DrafterRecord:
    """Failures of a session's drafter: how often it lost the session or had no draft for it, and
    whether the session's in-process drafts were dropped."""

    losses: int = 0
    """Number of times that the drafter lost the session."""
    undrafted_rounds: int = 0
    """Rounds in a row, up to `last_undrafted_round`, for which the drafter on another device had no
    draft."""
    last_undrafted_round: int = -1
    has_dropped_drafts: bool = False
    """Whether the session's in-process drafts were dropped. They never resume, because the
    session's draft KV is no longer extended."""

    def record_loss(self) -> int:
        """Count a loss, and return the number of losses so far."""
        self.losses += 1
        return self.losses

    def reset_losses(self) -> None:
        """Forget the losses: the session has another drafter."""
        self.losses = 0

    def record_undrafted_round(self, round_id: int) -> int:
        """Count a round without a draft, and return the number of such rounds in a row."""
        follows = round_id == self.last_undrafted_round + 1
        self.undrafted_rounds = self.undrafted_rounds + 1 if follows else 1
        self.last_undrafted_round = round_id
        return self.undrafted_rounds

    def record_dropped_drafts(self) -> None:
        """Record that the session from now on decodes without in-process drafts."""
        self.has_dropped_drafts = True

    def reset_undrafted_rounds(self) -> None:
        """Set the number of consecutive rounds without a draft to 0."""
        self.undrafted_rounds = 0
