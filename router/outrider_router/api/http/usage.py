"""Token usage and speculation statistics of an answer, in OpenAI's and vLLM's fields. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from outrider.wire.inference import FinishInfo, Usage
from outrider.wire.stats import SpecStats


def usage_body(
    prompt_tokens: int,
    completion_tokens: int,
    stats: SpecStats | None = None,
    reasoning_tokens: int = 0,
    cached_tokens: int = 0,
) -> dict[str, object]:
    """Return OpenAI's `usage` object. If `stats` are given, it includes the number of prompt tokens
    found in a prefix cache, the numbers of accepted and rejected draft tokens (as
    `accepted_prediction_tokens` and `rejected_prediction_tokens`) and the number of reasoning
    tokens. vLLM leaves these details out of usage that comes before the end of an answer, too.
    """
    told: dict[str, object] = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
    if stats is not None:
        told["prompt_tokens_details"] = {"cached_tokens": cached_tokens}
        told["completion_tokens_details"] = {
            "accepted_prediction_tokens": stats.accepted,
            "rejected_prediction_tokens": stats.proposed - stats.accepted,
            "reasoning_tokens": reasoning_tokens,
        }
    return told


def response_usage_body(usage: Usage) -> dict[str, object]:
    """Return OpenAI's `usage` object of a response (POST /v1/responses). `cache_write_tokens` is 0,
    because tokens that a prefix cache stores cost nothing extra.
    """
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            "cache_write_tokens": 0,
        },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def total_usage_body(finishes: Sequence[FinishInfo], n: int) -> dict[str, object]:
    """Return one `usage` object for all choices of a response. Each `n` adjacent choices share a
    prompt, which counts once; its cached tokens are those of the first of these choices.
    """
    return usage_body(
        sum(finish.usage.prompt_tokens for finish in finishes[::n]),
        sum(finish.usage.completion_tokens for finish in finishes),
        sum_stats([finish.stats for finish in finishes]),
        sum(finish.usage.reasoning_tokens for finish in finishes),
        sum(finish.usage.cached_tokens for finish in finishes[::n]),
    )


def sum_stats(stats: Sequence[SpecStats]) -> SpecStats:
    """Return the sums of the counters of several sessions."""
    depths = zip_longest(*(each.accepted_per_depth for each in stats), fillvalue=0)
    return SpecStats(
        rounds=sum(each.rounds for each in stats),
        emitted=sum(each.emitted for each in stats),
        proposed=sum(each.proposed for each in stats),
        accepted=sum(each.accepted for each in stats),
        drafted_rounds=sum(each.drafted_rounds for each in stats),
        fallback_rounds=sum(each.fallback_rounds for each in stats),
        paused_rounds=sum(each.paused_rounds for each in stats),
        accepted_per_depth=tuple(map(sum, depths)),
    )


def metrics_body(stats: SpecStats) -> dict[str, object]:
    """Return the `metrics` object of a response. Counters have vLLM's names where the meaning is
    the same; the others exist only in Outrider.

    `num_spec_steps` is the number of rounds with a proposal. `mean_acceptance_length` is the mean
    number of tokens that such a round emits: its accepted tokens plus one, as in vLLM.
    `acceptance_histogram[n]` is the number of such rounds that accepted exactly n draft tokens.
    `tokens_per_round` is the mean over all rounds.
    """
    drafted = stats.drafted_rounds
    length = 1.0 + stats.accepted / drafted if drafted else 1.0
    return {
        "speculative_decoding": {
            "mean_acceptance_length": round(length, 4),
            "draft_acceptance_rate": _share(stats.accepted, stats.proposed),
            "num_spec_steps": drafted,
            "num_draft_tokens": stats.proposed,
            "num_accepted_draft_tokens": stats.accepted,
            "acceptance_histogram": list(stats.acceptance_histogram),
            "accepted_per_position": list(stats.accepted_per_depth),
            "rounds": stats.rounds,
            "tokens_per_round": _share(stats.emitted, stats.rounds),
            "fallback_rounds": stats.fallback_rounds,
            "paused_rounds": stats.paused_rounds,
        }
    }


def _share(part: int, whole: int) -> float:
    return round(part / whole, 4) if whole else 0.0
