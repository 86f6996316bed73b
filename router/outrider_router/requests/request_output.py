"""Output of a request: its tokens, their text up to a stop string, and its speculation counters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from outrider.text.detokenizer import Detokenizer
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
    """Mutable `SpecStats`: adding a round allocates no object."""

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
        """What the planner had in force for the newest round."""
        self._by_accepted: list[int] = []
        """Rounds by the number of draft nodes that they accepted."""

    def add_round(self, *, emitted: int, flags: int, proposed: int, accepted: int) -> None:
        """Count one round; `flags` as in `SessionEvents`."""
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
        """The counters now."""
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


class OutputAssembler:
    """Detokenizes one session and cuts its text at the first stop string.

    The text is the same however many ids are pushed at once. Ids behind the one that completes a
    stop string must not be pushed: `StopChecker` finds that id.
    """

    def __init__(
        self,
        pieces: TokenByteTable,
        stops: Sequence[str],
        *,
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        """`include_stop`: whether what ends the text, string or id, is part of it; `min_tokens`:
        stop strings that the first so many ids complete do not end the text."""
        self._detokenizer = Detokenizer(pieces)
        self._stops = StopStringFilter(stops, include=include_stop)
        self._include_stop = include_stop
        self._min_tokens = min_tokens if stops else 0
        self.num_tokens = 0
        """Ids passed on so far."""

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text, if one did."""
        return self._stops.matched

    def push_tokens(self, token_ids: Sequence[int], *, last_is_stop: bool = False) -> str:
        """Add ids; the text that can be shown now.

        The id that stops a session (`last_is_stop`) contributes no text, unless it is included.
        """
        silent = last_is_stop and not self._include_stop
        spoken = token_ids[:-1] if silent else token_ids
        early = max(0, self._min_tokens - self.num_tokens)
        self.num_tokens += len(token_ids)
        text = ""
        if early:
            text = self._stops.push_text(
                self._detokenizer.push_tokens(spoken[:early]), may_end=False
            )
            spoken = spoken[early:]
        return text + self._stops.push_text(self._detokenizer.push_tokens(spoken))

    def flush(self) -> str:
        """Text that was held back, at the end of a session that no stop string ended."""
        if self._stops.matched is not None:
            return ""
        text = self._stops.push_text(self._detokenizer.flush())
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
        """Ids of the output that were passed on."""
        self.ended = False
        """Whether the client has received the end of the answer."""

    def catch_up(self, reason: FinishReason | None) -> list[Delta | FinishInfo]:
        """Messages for all ids that were not passed on; `reason` if they are the last ones."""
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
                prompt_tokens=self._prompt_tokens, completion_tokens=self._assembler.num_tokens
            ),
            stats=self._output.counters.to_stats(),
            stop_string=self._assembler.stop_string,
            stop_token_id=self._output.token_ids[self.told - 1] if stopped else None,
        )


class StopChecker:
    """Finds the id that completes a stop string of one request.

    A verifier knows no stop strings and emits whole rounds. The ids behind the stop are dropped
    before anything counts, stores or logs them, so that every count ends there as it ends at an
    end-of-turn id.
    """

    def __init__(self, assembler: OutputAssembler) -> None:
        """`assembler` makes the same text as the one that writes for the client, and belongs to the
        checker alone."""
        self._assembler = assembler

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string is complete."""
        return self._assembler.stop_string is not None

    def count_tokens(self, token_ids: Sequence[int], *, last_is_stop: bool = False) -> int:
        """Take the next ids; how many of them belong to the answer.

        `last_is_stop`: whether the last one is an id that stops the session.
        """
        last = len(token_ids) - 1
        for index, token_id in enumerate(token_ids):
            self._assembler.push_tokens((token_id,), last_is_stop=last_is_stop and index == last)
            if self.is_stopped:
                return index + 1
        return len(token_ids)
