"""What the status page says of the speculation controller."""

from __future__ import annotations

import math

import pytest
from outrider_router.api.status_page.figures import Interval
from outrider_router.api.status_page.speculation_text import describe_fleet, describe_verifier
from outrider_router.base.metrics import RouterMetrics
from outrider_router.base.metrics_history import make_sample

from outrider.ids import VerifierId
from outrider.spec.decoding_mode import DecodingModeReason
from outrider.spec.speculation_summary import SEPARATOR, SpeculationChoice, parse_choices
from outrider.wire.inference import ServerInfo, VerifierSummary
from outrider.wire.messages import SpecStats

REASON = DecodingModeReason
GREEDY, SAMPLED = "eagle3 chain of 4, greedy, T 0.0", "eagle3 chain of 4, coupled, T 0.7, grammar"


def choice(
    tokens: int, reason: DecodingModeReason, gain: float = math.nan, **changes: object
) -> SpeculationChoice:
    settings: dict[str, object] = {"sessions": GREEDY} | changes
    return SpeculationChoice(draft_tokens=tokens, reason=reason, gain=gain, **settings)  # type: ignore[arg-type]


def verifier(planner: str) -> VerifierSummary:
    return VerifierSummary(
        verifier_id=VerifierId("v"),
        address="v",
        healthy=True,
        model="m",
        sessions=0,
        max_sessions=1,
        kv_free_blocks=1,
        kv_total_blocks=1,
        planner=planner,
    )


@pytest.mark.parametrize(
    "told",
    [
        choice(4, REASON.FASTER, 1.9),
        choice(4, REASON.PROBE),
        choice(16, REASON.FASTER, 2.25, is_tree=True, is_look_ahead=True),
        choice(0, REASON.FASTER, 0.82, sessions=SAMPLED),
        choice(3, REASON.MEASURING, sessions="in-process drafts, 3 classes"),
    ],
)
def test_choices_are_read_as_they_were_written(told: SpeculationChoice) -> None:
    text = SEPARATOR.join([str(told), str(told)])
    assert str(parse_choices(text)) == str((told, told))
    assert len(parse_choices(text[:-1])) == 1


@pytest.mark.parametrize(
    "text", ["", ";", "x", "a: chain of 99999 (faster)", "a: plain (faster, 1x)", "a" * 4096]
)
def test_what_is_no_choice_is_left_out(text: str) -> None:
    assert parse_choices(text) == ()


@pytest.mark.parametrize(
    ("told", "words"),
    [
        (
            choice(4, REASON.FASTER, 1.9),
            "Drafts 4 tokens per round, and tokens come 1.9 times as fast as without drafts.",
        ),
        (
            choice(16, REASON.FASTER, is_tree=True),
            "Drafts a tree of 16 tokens per round, because that is faster than no drafts.",
        ),
        (
            choice(0, REASON.FASTER, 0.8),
            "Speculation is paused, because tokens come faster without drafts. "
            "With drafts they would come 20 % more slowly.",
        ),
        (
            choice(0, REASON.PROBE),
            "Decodes without drafts for a few rounds, to see whether that is faster.",
        ),
        (
            choice(1, REASON.MEASURING),
            "Drafts 1 token per round; too few rounds were measured yet to tell whether drafts "
            "pay.",
        ),
    ],
)
def test_a_choice_is_told_in_words(told: SpeculationChoice, words: str) -> None:
    assert describe_verifier(verifier(str(told)), SpecStats()) == [words]


def test_several_choices_say_for_which_requests_they_are() -> None:
    told = SEPARATOR.join(
        map(
            str,
            (
                choice(4, REASON.FASTER, 1.5),
                choice(0, REASON.FASTER, sessions=SAMPLED),
                choice(3, REASON.PROBE, sessions="in-process drafts, 2 classes"),
            ),
        )
    )
    stats = SpecStats(rounds=100, drafted_rounds=50, proposed=200, accepted=155, paused_rounds=40)
    sentences = describe_verifier(verifier(told), stats)
    assert [text.split(":")[0] for text in sentences[:3]] == [
        "Requests with temperature 0",
        "Requests with temperature 0.7, structured output",
        "Requests with drafts by the verifier itself",
    ]
    assert sentences[3:] == [
        "Drafts had 4.0 tokens in the last minutes: 3.1 of them were accepted.",
        "Speculation was paused in 40 % of the rounds.",
    ]


def test_internal_names_are_not_shown() -> None:
    told = SEPARATOR.join(map(str, (choice(4, REASON.FASTER, 1.5), choice(0, REASON.PROBE))))
    text = " ".join(describe_verifier(verifier(told), SpecStats()))
    for name in ("eagle3", "greedy", "coupled", "chain", "plain", "probe", "planner"):
        assert name not in text


def test_the_fleet_says_how_many_draft_tokens_are_accepted() -> None:
    metrics = RouterMetrics()
    before = make_sample(metrics, time_s=0.0, running=0, waiting=0, verifiers={})
    info = ServerInfo(
        version="1",
        protocol_version=1,
        queued=0,
        queue_bound=1,
        running=0,
        verifiers=(verifier(""),),
        drafters=(),
    )

    def told() -> list[str]:
        after = make_sample(metrics, time_s=9.0, running=0, waiting=0, verifiers={})
        return describe_fleet(info, Interval(before, after))

    assert told() == ["No tokens were generated in the last minutes."]
    metrics.rounds.inc(100)
    metrics.round_tokens.inc(100)
    assert told()[-1] == "No drafter is configured."
    metrics.round_tokens.inc(279)
    metrics.drafts.inc(90)
    metrics.draft_tokens.inc(360)
    metrics.accepted_tokens.inc(279)
    assert told() == [
        "Drafts have 4.0 tokens on average: 3.1 of them are accepted.",
        "A round makes 3.79 tokens. Without speculation it makes 1.",
        "10 % of the rounds had no draft.",
    ]
