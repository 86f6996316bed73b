"""Output of a request: its tokens, their text up to a stop string, and its speculation counters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from outrider.text.detokenizer import Detokenizer
from outrider.text.output_parsers.reasoning_span import ReasoningSpan
from outrider.text.stop_strings import StopStringFilter
from outrider.text.token_bytes import TokenByteTable
from outrider.wire.inference import Delta, FinishInfo, Usage
from outrider.wire.logprobs import TokenLogprobs
from outrider.wire.messages import (
    FALLBACK,
    LOOK_AHEAD_HIT,
    LOOKED_AHEAD,
    PAUSED,
    PLANNED,
    TARGET_ONLY,
    FinishReason,
    SpecStats,
)
from outrider.wire.spec_stats_accumulator import describe_decision


class SpecCounters:
    """Speculation counters of one request, which `to_stats` converts to `SpecStats`. Adding a round
    allocates no object.
    """

    __slots__ = (
        "_by_accepted",
        "emitted",
        "fallback_rounds",
        "fresh_accepted",
        "fresh_rounds",
        "hit_accepted",
        "hit_rounds",
        "look_ahead_rounds",
        "paused_rounds",
        "planned",
        "proposed",
        "rounds",
        "target_only",
    )

    def __init__(self) -> None:
        self.rounds = 0
        self.emitted = 0
        self.proposed = 0
        self.fallback_rounds = 0
        self.target_only = 0
        self.paused_rounds = 0
        self.look_ahead_rounds = 0
        self.hit_rounds = self.hit_accepted = 0
        self.fresh_rounds = self.fresh_accepted = 0
        self.planned = 0
        """Planner decision of the newest round, as bits of `SessionEvents.flags`."""
        self._by_accepted: list[int] = []
        """Element n is the number of drafted rounds that accepted n draft nodes."""

    def add_round(self, *, emitted: int, flags: int, proposed: int, accepted: int) -> None:
        """Count one round. It emitted `emitted` tokens, and accepted `accepted` of `proposed` draft
        nodes. `flags` are bits as in `SessionEvents`.
        """
        self.rounds += 1
        self.emitted += emitted
        if flags & FALLBACK:
            self.fallback_rounds += 1
        if flags & TARGET_ONLY:
            self.target_only += 1
        if flags & PAUSED:
            self.paused_rounds += 1
        if flags & LOOKED_AHEAD:
            self._add_ahead(flags, accepted)
        self.planned = flags & PLANNED
        if proposed:
            self.proposed += proposed
            missing = accepted + 1 - len(self._by_accepted)
            if missing > 0:
                self._by_accepted += [0] * missing
            self._by_accepted[accepted] += 1

    def _add_ahead(self, flags: int, accepted: int) -> None:
        self.look_ahead_rounds += 1
        if flags & LOOK_AHEAD_HIT:
            self.hit_rounds += 1
            self.hit_accepted += accepted
        elif not flags & FALLBACK:
            self.fresh_rounds += 1
            self.fresh_accepted += accepted

    def to_stats(self) -> SpecStats:
        """Return the current values of the counters."""
        # A round that accepted d nodes accepted one at each depth up to d.
        reached = list(accumulate(reversed(self._by_accepted[1:])))
        per_depth = tuple(reversed(reached))
        return SpecStats(
            rounds=self.rounds,
            emitted=self.emitted,
            proposed=self.proposed,
            accepted=sum(per_depth),
            fallback_rounds=self.fallback_rounds,
            target_only_rounds=self.target_only,
            paused_rounds=self.paused_rounds,
            decision=describe_decision(self.planned),
            accepted_per_depth=per_depth,
            look_ahead_rounds=self.look_ahead_rounds,
            hit_rounds=self.hit_rounds,
            hit_accepted=self.hit_accepted,
            fresh_rounds=self.fresh_rounds,
            fresh_accepted=self.fresh_accepted,
            drafted_rounds=sum(self._by_accepted),
        )


@dataclass(slots=True, kw_only=True, eq=False)
class RequestOutput:
    """Output of one request over all of its sessions. After a failover, the next session continues
    from these tokens.
    """

    token_ids: list[int] = field(default_factory=list)
    """Token ids that the verifier committed, in order. New ids are appended as they arrive."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Log-probabilities of each of `token_ids`; empty if the request did not ask for them."""
    first_token_at: float | None = None
    """Clock time of the first token in seconds; None before it."""
    last_token_at: float = 0.0
    """Clock time of the newest token in seconds."""
    cached_tokens: int = 0
    """Number of prompt tokens whose KV was in the prefix cache of the verifier of the first session
    that emitted tokens.
    """
    log_number: int = 0
    """Number of the request in the durable log; 0 if it is not logged."""
    counters: SpecCounters = field(default_factory=SpecCounters)
    """Speculation counters."""

    def add_tokens(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs],
        now: float,
        cached_tokens: int = 0,
    ) -> float | None:
        """Append tokens that arrived at the clock time `now`. Return the seconds since the previous
        tokens, or None if these are the first. `cached_tokens` is what the verifier sent with them;
        it is ignored unless these are the first, so that a failover does not change the number.
        """
        self.token_ids += token_ids
        self.logprobs += logprobs
        previous_at, self.last_token_at = self.last_token_at, now
        if self.first_token_at is None:
            self.first_token_at = now
            self.cached_tokens = cached_tokens
            return None
        return now - previous_at

    def truncate_tokens(self, count: int) -> None:
        """Keep only the first `count` tokens, because the output ended there."""
        del self.token_ids[count:], self.logprobs[count:]

    def record_logged(self, number: int) -> None:
        """Set the number of the request in the durable log."""
        assert self.log_number == 0, "a request is logged once"
        self.log_number = number


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputLimits:
    """Limits of the output of a session. They are checked whenever output arrives."""

    max_new_tokens: int
    """Maximum number of tokens that the request may emit in all of its sessions."""
    vocab_size: int
    """Vocabulary size of the verifier; all token ids must be smaller."""
    top_logprobs: int | None
    """Number of most probable ids that the verifier must send with each token. If it is None, the
    verifier must not send log-probabilities.
    """
    prompt_tokens: int
    """Number of tokens of the prompt; no more can have been found in a prefix cache."""

    def accepts(
        self,
        num_emitted: int,
        ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs],
        cached_tokens: int = 0,
    ) -> bool:
        """Return whether these token ids and log-probabilities may follow `num_emitted` tokens.
        They may if they are within the length limit and the vocabulary, if the log-probabilities
        are those that were requested, and if the prompt has at least `cached_tokens` tokens.
        """
        if cached_tokens > self.prompt_tokens:
            return False
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


class OutputAssembler:
    """Detokenizes the output of one request and ends its text at the first stop string.

    The text does not depend on how many ids are pushed at once. Ids after the one that completes a
    stop string must not be pushed; `StopChecker` finds that id.
    """

    def __init__(
        self,
        pieces: TokenByteTable,
        stops: Sequence[str],
        *,
        include_stop: bool = False,
        min_tokens: int = 0,
        reasoning: ReasoningSpan | None = None,
    ) -> None:
        """Create an assembler without text. With `include_stop`, the text includes the stop string
        or stop token that ended it. Stop strings that are complete within the first `min_tokens`
        ids do not end the text, nor do those in `reasoning`, the reasoning that may begin the text.
        """
        self._detokenizer = Detokenizer(pieces)
        self._stops = StopStringFilter(stops, include=include_stop)
        self._include_stop = include_stop
        self._min_tokens = min_tokens if stops else 0
        self._reasoning = reasoning
        self.num_tokens = 0
        """Number of ids that were pushed."""
        self.num_reasoning_tokens = 0
        """Number of ids of the reasoning; 0 if there is none."""
        self._num_undecided = 0
        """Number of ids since it was last known whether the text is reasoning."""

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text; None if none did."""
        return self._stops.matched

    def push_tokens(self, token_ids: Sequence[int], *, last_is_stop: bool = False) -> str:
        """Add token ids and return the text that can be sent now.

        With `last_is_stop`, the last id is a stop token. Its text is omitted unless the assembler
        was created with `include_stop`.
        """
        silent = last_is_stop and not self._include_stop
        spoken = token_ids[:-1] if silent else token_ids
        text = ""
        num_unspoken = len(token_ids) - len(spoken)
        if self._reasoning is not None and not self._reasoning.has_ended:
            for position, token_id in enumerate(spoken):
                text += self._push_reasoning(token_id)
                if self._reasoning.has_ended:
                    spoken = spoken[position + 1 :]
                    break
            else:
                spoken = ()
        early = max(0, self._min_tokens - self.num_tokens)
        self.num_tokens += len(spoken) + num_unspoken
        if early:
            text += self._stops.push_text(
                self._detokenizer.push_tokens(spoken[:early]), may_end=False
            )
            spoken = spoken[early:]
        return text + self._stops.push_text(self._detokenizer.push_tokens(spoken))

    def _push_reasoning(self, token_id: int) -> str:
        """Add an id that may belong to the reasoning and return the text that can be sent now."""
        assert self._reasoning is not None, "there may be reasoning"
        self.num_tokens += 1
        parts = self._reasoning.push_text(self._detokenizer.push_tokens((token_id,)))
        self._num_undecided += 1
        if self._reasoning.is_reasoning or any(is_reasoning for _, is_reasoning in parts):
            self.num_reasoning_tokens += self._num_undecided
        if self._reasoning.is_reasoning or parts:
            self._num_undecided = 0
        may_end = self.num_tokens > self._min_tokens
        return "".join(
            self._stops.push_text(part, may_end=may_end and not is_reasoning)
            for part, is_reasoning in parts
        )

    def flush(self) -> str:
        """Return the text that was held back because it could have been the beginning of a stop
        string or of a character of several tokens. Called at the end of the output. Returns "" if a
        stop string ended the output.
        """
        if self._stops.matched is not None:
            return ""
        text = ""
        if self._reasoning is not None:
            held, is_reasoning = self._reasoning.flush()
            text = self._stops.push_text(held, may_end=not is_reasoning)
        if self._stops.matched is None:
            text += self._stops.push_text(self._detokenizer.flush())
        return text + (self._stops.flush() if self._stops.matched is None else "")


class ClientReply:
    """Text stream to the client of one request, continued over all of its sessions."""

    def __init__(
        self, output: RequestOutput, assembler: OutputAssembler, *, prompt_tokens: int
    ) -> None:
        self._output = output
        self._assembler = assembler
        self._prompt_tokens = prompt_tokens
        self.told = 0
        """Number of the output's token ids that were sent to the client."""
        self.ended = False
        """Whether the last message was sent to the client."""

    def catch_up(self, reason: FinishReason | None) -> list[Delta | FinishInfo]:
        """Return the messages for all token ids that were not sent yet. If `reason` is not None,
        these are the last ids and the finish message follows.
        """
        ids = self._output.token_ids[self.told :]
        logprobs = self._output.logprobs[self.told :]
        self.told += len(ids)
        return self._messages(ids, logprobs, reason)

    def _messages(
        self, ids: list[int], logprobs: list[TokenLogprobs], reason: FinishReason | None
    ) -> list[Delta | FinishInfo]:
        assembler, messages = self._assembler, list[Delta | FinishInfo]()
        text = assembler.push_tokens(
            ids, last_is_stop=bool(ids) and reason is FinishReason.STOP_TOKEN
        )
        if reason is not None:
            text += assembler.flush()
        if assembler.stop_string is not None:
            reason = FinishReason.STOP_STRING
        if text or ids:
            messages.append(Delta(text=text, token_ids=tuple(ids), logprobs=tuple(logprobs)))
        if reason is not None:
            self.ended = True
            messages.append(self._finish(reason))
        return messages

    def _finish(self, reason: FinishReason) -> FinishInfo:
        stopped = reason is FinishReason.STOP_TOKEN and self.told > 0
        return FinishInfo(
            reason=reason,
            usage=Usage(
                prompt_tokens=self._prompt_tokens,
                completion_tokens=self._assembler.num_tokens,
                reasoning_tokens=self._assembler.num_reasoning_tokens,
                cached_tokens=self._output.cached_tokens,
            ),
            stats=self._output.counters.to_stats(),
            stop_string=self._assembler.stop_string,
            stop_token_id=self._output.token_ids[self.told - 1] if stopped else None,
        )


class StopChecker:
    """Finds the token id that completes a stop string of one request.

    Verifiers do not check stop strings and emit whole rounds. The ids after the stop are dropped
    before they are counted, stored or logged.
    """

    def __init__(self, assembler: OutputAssembler) -> None:
        """Create a checker. `assembler` must be a separate one with the same options as the
        assembler of the client's text.
        """
        self._assembler = assembler

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string is complete."""
        return self._assembler.stop_string is not None

    def count_tokens(self, token_ids: Sequence[int], *, last_is_stop: bool = False) -> int:
        """Add token ids and return how many of them belong to the output: all of them, or those up
        to the one that completes a stop string.

        With `last_is_stop`, the last id is a stop token of the session.
        """
        last = len(token_ids) - 1
        for index, token_id in enumerate(token_ids):
            self._assembler.push_tokens((token_id,), last_is_stop=last_is_stop and index == last)
            if self.is_stopped:
                return index + 1
        return len(token_ids)
