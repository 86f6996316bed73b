"""Sentences that tell how a fleet speculates, and why, for readers who do not know the program.
Pure.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Final

from outrider.spec.decoding_mode import DecodingModeReason
from outrider.spec.speculation_summary import (
    IN_PROCESS_DRAFTS,
    SpeculationChoice,
    parse_choices,
)
from outrider.wire.inference import ServerInfo, VerifierSummary
from outrider.wire.stats import SpecStats
from outrider_router.api.status_page.figures import Interval, ratio

MAX_CHOICES: Final = 8
"""Largest number of choices of one verifier that are described."""


def describe_fleet(info: ServerInfo, recent: Interval) -> list[str]:
    """Return sentences about the drafts of all requests in an interval."""
    rounds, drafts = recent.growth("rounds"), recent.growth("drafts")
    if not rounds:
        return ["No tokens were generated in the last minutes."]
    tokens_per_round = recent.growth("round_tokens") / rounds
    if not drafts:
        return [
            "Requests are decoded without drafts: each round makes one token.",
            *_why_without_drafts(info),
        ]
    drafted = recent.growth("draft_tokens") / drafts
    accepted = recent.growth("accepted_tokens") / drafts
    sentences = [
        f"Drafts have {drafted:.1f} tokens on average: {accepted:.1f} of them are accepted.",
        f"A round makes {tokens_per_round:.2f} tokens. Without speculation it makes 1.",
    ]
    without = 1.0 - drafts / rounds
    if without >= 0.005:
        sentences.append(f"{100 * without:.0f} % of the rounds had no draft.")
    return sentences


def _why_without_drafts(info: ServerInfo) -> Iterator[str]:
    drafts_itself = any(verifier.in_process_methods for verifier in info.verifiers)
    if not (info.drafters or drafts_itself):
        yield "No drafter is configured."
    elif not drafts_itself and not any(drafter.healthy for drafter in info.drafters):
        yield "No drafter is usable: see what is wrong."


def describe_verifier(summary: VerifierSummary, stats: SpecStats) -> list[str]:
    """Return sentences about the present choices of a verifier's speculation controller, and about
    its drafts. `stats` are its counters over the last minutes.
    """
    choices = parse_choices(summary.planner)[:MAX_CHOICES]
    sentences = [_choice(choice, len(choices) > 1) for choice in choices]
    if stats.drafted_rounds:
        drafted = stats.proposed / stats.drafted_rounds
        accepted = stats.accepted / stats.drafted_rounds
        sentences.append(
            f"Drafts had {drafted:.1f} tokens in the last minutes: {accepted:.1f} of them were "
            "accepted."
        )
    if (paused := ratio(stats.paused_rounds, stats.rounds)) and paused >= 0.005:
        sentences.append(f"Speculation was paused in {100 * paused:.0f} % of the rounds.")
    return sentences


def _choice(choice: SpeculationChoice, is_one_of_several: bool) -> str:
    drafts = _drafts(choice)
    match choice.reason:
        case DecodingModeReason.FASTER if choice.draft_tokens:
            text = f"{drafts}{_faster(choice.gain)}."
        case DecodingModeReason.FASTER:
            text = "speculation is paused, because tokens come faster without drafts."
            text += _slower(choice.gain)
        case DecodingModeReason.PROBE:
            text = f"{drafts} for a few rounds, to see whether that is faster."
        case DecodingModeReason.MEASURING:
            text = f"{drafts}; too few rounds were measured yet to tell whether drafts pay."
    if is_one_of_several:
        return f"{_sessions(choice.sessions)}: {text}"
    return text[0].upper() + text[1:]


def _drafts(choice: SpeculationChoice) -> str:
    if not choice.draft_tokens:
        return "decodes without drafts"
    tree = "a tree of " if choice.is_tree else ""
    tokens = f"{choice.draft_tokens} token{'s' * (choice.draft_tokens > 1)}"
    ahead = ", while the previous draft is still being checked" if choice.is_look_ahead else ""
    return f"drafts {tree}{tokens} per round{ahead}"


def _faster(gain: float) -> str:
    if math.isnan(gain):
        return ", because that is faster than no drafts"
    return f", and tokens come {gain:.1f} times as fast as without drafts"


def _slower(gain: float) -> str:
    if math.isnan(gain) or gain > 0.995:
        return ""
    return f" With drafts they would come {100 * (1.0 - gain):.0f} % more slowly."


def _sessions(text: str) -> str:
    """Return the difference between the requests of one choice and those of others."""
    parts = []
    if temperature := re.search(r"\bT (\d+\.\d)", text):
        parts.append(f"temperature {float(temperature[1]):g}")
    if re.search(r"\bgrammar\b", text):
        parts.append("structured output")
    if text.startswith(IN_PROCESS_DRAFTS):
        parts.append("drafts by the verifier itself")
    return f"Requests with {', '.join(parts)}" if parts else "Other requests"
