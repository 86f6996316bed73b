"""Metrics of a wave, which is one batch of benchmark requests: tokens/s, latencies, acceptance.

Times are seconds of the monotonic clock that all processes of a machine share. Latencies in the
results are in milliseconds.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from outrider_bench.report import percentiles

OK: Final = "OK"
OPEN_WARM_SHARE: Final = 0.2
"""Share of an open loop's requests that arrive before the steady state begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaveAnswer:
    """Answer to one request as its client observed it."""

    due: float
    """Time at which the request was to be sent. Latencies count from this time, even if the client
    was late."""
    opened: float
    arrivals: tuple[tuple[float, int], ...] = ()
    """Arrival time and number of tokens of each message that contained tokens."""
    code: str = OK
    """"OK", or the code of the error that ended the request."""
    rounds: int = 0
    emitted: int = 0
    proposed: int = 0
    accepted: int = 0
    fallback_rounds: int = 0
    look_ahead_rounds: int = 0
    hit_rounds: int = 0
    hit_accepted: int = 0
    fresh_rounds: int = 0
    fresh_accepted: int = 0
    loops: bool = False
    """Whether the answer repeats itself (see `prompts.is_loop`)."""

    @property
    def tokens(self) -> int:
        """Number of tokens that arrived."""
        return sum(count for _, count in self.arrivals)

    @property
    def round_ms(self) -> float | None:
        """Mean milliseconds of a round; None without rounds. The token that prefill emits does not
        count."""
        if not self.rounds or len(self.arrivals) < 2:
            return None
        return (self.arrivals[-1][0] - self.arrivals[0][0]) * 1000.0 / self.rounds


@dataclass(frozen=True, slots=True)
class RequestWave:
    """All answers of a wave: a closed loop of `sessions` concurrent requests, or an open loop."""

    answers: tuple[WaveAnswer, ...]
    sessions: int | None
    """Number of concurrent requests. None in an open loop."""
    busiest_client: float = 0.0
    """Largest share of a core that a client process used."""

    @property
    def heard(self) -> list[WaveAnswer]:
        """Answers that have at least one token."""
        return [answer for answer in self.answers if answer.arrivals]

    @property
    def seconds(self) -> float:
        """Seconds from the time when the first request was due to the last token; NaN without
        tokens."""
        heard = self.heard
        if not heard:
            return math.nan
        return max(a.arrivals[-1][0] for a in heard) - min(a.due for a in self.answers)

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second over the whole wave. This includes its end, when fewer requests run."""
        return sum(answer.tokens for answer in self.answers) / self.seconds

    @property
    def steady(self) -> tuple[float, float] | None:
        """Start and end of the steady state; None if there is none.

        In a closed loop it begins when `sessions` answers have begun. It ends when the last request
        starts or, if all requests start at the beginning, when the first answer ends. In an open
        loop it begins when a fifth of the requests have arrived, and ends when the last one
        arrives.
        """
        heard = self.heard
        if not heard or (self.sessions is not None and len(heard) < self.sessions):
            return None
        due = sorted(answer.due for answer in self.answers)
        if self.sessions is None:
            start, end = due[int(OPEN_WARM_SHARE * len(due))], due[-1]
        else:
            start = sorted(answer.arrivals[0][0] for answer in heard)[self.sessions - 1]
            refilled = len(self.answers) > self.sessions
            end = due[-1] if refilled else min(answer.arrivals[-1][0] for answer in heard)
        return (start, end) if end > start else None

    @property
    def steady_tokens_per_s(self) -> float | None:
        """Tokens per second in the steady state; None if there is none."""
        window = self.steady
        if window is None:
            return None
        start, end = window
        tokens = sum(n for a in self.heard for at, n in a.arrivals if start < at <= end)
        return tokens / (end - start)

    @property
    def emitted_per_round(self) -> float | None:
        """Mean number of tokens that a session emits per round; None without rounds."""
        rounds = sum(answer.rounds for answer in self.answers)
        return sum(answer.emitted for answer in self.answers) / rounds if rounds else None

    @property
    def round_ms(self) -> float | None:
        """Median over the answers of their mean milliseconds per round; None without rounds."""
        means = [mean for answer in self.heard if (mean := answer.round_ms) is not None]
        return median(means) if means else None

    def figures(self) -> dict[str, object]:
        """Return the figures of the wave by name. A figure that is not available is None."""
        heard, rounds = self.heard, sum(answer.rounds for answer in self.answers)
        each = [
            (a.arrivals[-1][0] - a.arrivals[0][0]) * 1000.0 / (a.tokens - 1)
            for a in heard
            if a.tokens > 1
        ]
        proposed = sum(answer.proposed for answer in self.answers)
        return {
            "requests": len(self.answers),
            "failed": dict(Counter(a.code for a in self.answers if a.code != OK)),
            "tokens": sum(answer.tokens for answer in self.answers),
            "tokens_per_s": rounded(self.tokens_per_s, 2),
            "steady_tokens_per_s": rounded(self.steady_tokens_per_s, 2),
            "requests_per_s": rounded(len(heard) / self.seconds, 4),
            "emitted_per_round": rounded(self.emitted_per_round, 4),
            "proposed_per_round": rounded(proposed / rounds if rounds else None, 4),
            "fallback_share": rounded(_share(self.answers), 4),
            **_ahead(self.answers),
            "round_ms": rounded(self.round_ms, 4),
            "ttft_ms": percentiles([(a.arrivals[0][0] - a.due) * 1000.0 for a in heard]),
            "itl_ms": percentiles([gap * 1000.0 for gap in _gaps(heard)]),
            "per_token_ms": percentiles(each),
            "answers_that_loop": sum(answer.loops for answer in self.answers),
            "busiest_client": rounded(self.busiest_client, 3),
        }


def rounded(value: float | None, digits: int) -> float | None:
    """Return the value rounded to `digits` decimals; None if it is None or not finite."""
    return None if value is None or not math.isfinite(value) else round(value, digits)


def _share(answers: Sequence[WaveAnswer]) -> float | None:
    """Return the share of rounds in which a speculating session had no proposal; None without
    rounds."""
    rounds = sum(answer.rounds for answer in answers)
    return sum(answer.fallback_rounds for answer in answers) / rounds if rounds else None


def _ahead(answers: Sequence[WaveAnswer]) -> dict[str, float | None]:
    """Return three figures by name, None without data: the share of rounds with look-ahead, the
    share of hits among them, and the tokens per round of hits divided by those of fresh drafts."""
    every = sum(answer.rounds for answer in answers)
    rounds, hits, accepted, fresh, fresh_accepted = (
        sum(getattr(answer, name) for answer in answers)
        for name in (
            "look_ahead_rounds",
            *("hit_rounds", "hit_accepted", "fresh_rounds", "fresh_accepted"),
        )
    )
    both = hits and fresh
    ratio = (1.0 + accepted / hits) / (1.0 + fresh_accepted / fresh) if both else None
    return {
        "look_ahead_share": rounded(rounds / every if every else None, 4),
        "hit_rate": rounded(hits / rounds if rounds else None, 4),
        "hit_over_fresh": rounded(ratio, 4),
    }


def _gaps(answers: Sequence[WaveAnswer]) -> Iterator[float]:
    """Yield the seconds between consecutive messages of each answer."""
    for answer in answers:
        times = [at for at, _ in answer.arrivals]
        yield from (later - earlier for earlier, later in itertools.pairwise(times))
