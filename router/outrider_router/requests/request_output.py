"""Output of a request: the tokens that verifiers have emitted for it, and when."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.wire.logprobs import TokenLogprobs
from outrider_router.requests.spec_counters import SpecCounters


@dataclass(slots=True, kw_only=True, eq=False)
class RequestOutput:
    """Tokens of one request over all of its sessions. A failover resumes from them."""

    token_ids: list[int] = field(default_factory=list)
    """Token ids that the verifier committed, in order; appended to as they arrive."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Log-probabilities of each of `token_ids`, if the request asked for them."""
    first_token_at: float | None = None
    """Clock time of the first token, in seconds."""
    last_token_at: float = 0.0
    """Clock time of the newest token, in seconds."""
    log_number: int = 0
    """Number of the request in the durable log; 0: it is not logged."""
    counters: SpecCounters = field(default_factory=SpecCounters)
    """Speculation counters."""

    def add_tokens(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], now: float
    ) -> float | None:
        """Append tokens that arrived at `now`; return the seconds since the tokens before, or None
        if these are the first ones."""
        self.token_ids += token_ids
        self.logprobs += logprobs
        previous_at, self.last_token_at = self.last_token_at, now
        if self.first_token_at is None:
            self.first_token_at = now
            return None
        return now - previous_at

    def truncate_tokens(self, count: int) -> None:
        """Keep the first `count` tokens, for an answer that ended before the others."""
        del self.token_ids[count:], self.logprobs[count:]

    def record_logged(self, number: int) -> None:
        """Note the number that the durable log gave to the request."""
        assert self.log_number == 0, "a request is logged once"
        self.log_number = number


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputLimits:
    """Limits that every row of a session's output must keep."""

    max_new_tokens: int
    """Maximum number of tokens that the request may emit in all of its sessions."""
    vocab_size: int
    """Vocabulary size of the verifier: all token ids are below this."""
    top_logprobs: int | None
    """Number of most probable ids that come with each token; None: no log-probabilities come."""

    def accepts(
        self, num_emitted: int, ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
    ) -> bool:
        """Return whether these are valid next tokens behind `num_emitted` ones: not too many,
        inside the vocabulary, and with the log-probabilities that were asked for."""
        count, top, vocab_size = len(ids), self.top_logprobs, self.vocab_size
        if count:
            if num_emitted + count > self.max_new_tokens:
                return False
            if max(ids) >= vocab_size or min(ids) < 0:
                return False
        if top is None:
            return not logprobs
        return len(logprobs) == count and all(
            len(entry.top) == top and all(0 <= token < vocab_size for token, _ in entry.top)
            for entry in logprobs
        )
