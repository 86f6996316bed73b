"""What the status page lists as wrong, and in which words."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from outrider_router.api.server_status import make_server_info
from outrider_router.api.status_page import make_snapshot
from outrider_router.api.status_page import problems as status_problems
from outrider_router.api.status_page.figures import Interval
from outrider_router.api.status_page.problems import (
    MAX_DETAIL_LEN,
    Problem,
    RouterState,
    Severity,
    find_problems,
)
from outrider_router.base.metrics import RouterMetrics
from outrider_router.base.metrics_history import make_sample
from outrider_router.fleet.compatibility import PeerState
from outrider_router.fleet.peers import DrafterPeer, VerifierPeer

from outrider.ids import DrafterId, VerifierId
from outrider.wire.inference import DrafterLink, DrafterSummary, ServerInfo, VerifierSummary
from tests.fakes.router import running_router
from tests.fakes.verifier import FakeVerifier
from tests.waiting import until

VERIFIER = VerifierSummary(
    verifier_id=VerifierId("v0"),
    address="v",
    healthy=True,
    model="m",
    sessions=1,
    max_sessions=8,
    kv_free_blocks=50,
    kv_total_blocks=100,
)
DRAFTER = DrafterSummary(
    drafter_id=DrafterId("d0"), address="d", healthy=True, methods=(), sessions=1
)
INFO = ServerInfo(
    version="1",
    protocol_version=1,
    queued=0,
    queue_bound=100,
    running=3,
    verifiers=(VERIFIER,),
    drafters=(DRAFTER,),
)


def state_of(
    verifier: VerifierSummary = VERIFIER,
    drafter: DrafterSummary = DRAFTER,
    *,
    peers: tuple[PeerState, PeerState] = (PeerState.HEALTHY, PeerState.HEALTHY),
    problem: str = "",
    happens: Callable[[RouterMetrics], object] = lambda metrics: None,
    **changes: object,
) -> RouterState:
    """A fleet of one verifier and one drafter, in which something happened for 300 s."""
    metrics = RouterMetrics()
    before = make_sample(metrics, time_s=0.0, running=0, waiting=0, verifiers={})
    happens(metrics)
    after = make_sample(metrics, time_s=300.0, running=0, waiting=0, verifiers={})
    settings: dict[str, object] = {
        "info": replace(INFO, verifiers=(verifier,), drafters=(drafter,)),
        "verifiers": [VerifierPeer(address="v", state=peers[0], problem=problem)],
        "drafters": [DrafterPeer(address="d", state=peers[1], problem=problem)],
        "desired_verifiers": 1,
        "desired_drafters": 1,
        "recent": Interval(before, after),
    }
    return RouterState(**(settings | changes))  # type: ignore[arg-type]


def refuse(metrics: RouterMetrics) -> None:
    metrics.refusals.labels("QUEUE_FULL").inc(12)


def fail(metrics: RouterMetrics) -> None:
    for outcome in ("unavailable", "length"):
        metrics.record_request_end(outcome, None, 0.0, 0, 0.1)


def miss_drafts(metrics: RouterMetrics) -> None:
    metrics.rounds.inc(1000)
    metrics.fallback_rounds.inc(500)
    metrics.undrafted_rounds.inc(50)


def reject_drafts(metrics: RouterMetrics) -> None:
    metrics.rounds.inc(1000)
    metrics.draft_tokens.inc(1000)
    metrics.accepted_tokens.inc(20)


def be_slow(metrics: RouterMetrics) -> None:
    metrics.time_to_first_token.observe_values(20.0)
    metrics.inter_token_latency.observe_values(0.9)


AWAY = replace(VERIFIER, healthy=False)
IDLE = replace(DRAFTER, healthy=False)
LINK = DrafterLink(
    verifier_id=VerifierId("v0"), sessions=0, answer_ms=1.0, quarantine="slow", probe_in_s=4.0
)
LOST, UNKNOWN, REFUSED = PeerState.LOST, PeerState.UNKNOWN, PeerState.REFUSED
HEALTHY = PeerState.HEALTHY


@pytest.mark.parametrize(
    ("state", "severity", "words"),
    [
        (state_of(is_draining=True), "warning", "shutting down"),
        (state_of(is_journal_failing=True), "critical", "journal"),
        (state_of(are_keys_failing=True), "warning", "API keys is invalid"),
        (state_of(AWAY, peers=(LOST, HEALTHY)), "critical", "No verifier is ready"),
        (state_of(AWAY, peers=(LOST, HEALTHY)), "warning", "v0 no longer answers"),
        (state_of(AWAY, peers=(UNKNOWN, HEALTHY)), "warning", "v0 has not answered yet"),
        (state_of(AWAY, peers=(REFUSED, HEALTHY)), "warning", "v0 cannot be used"),
        (state_of(replace(VERIFIER, draining=True)), "notice", "v0 is draining"),
        (state_of(replace(VERIFIER, simulated_acceptance="0.7")), "warning", "by chance"),
        (
            state_of(replace(VERIFIER, kv_free_blocks=1, waiting_sessions=2)),
            "warning",
            "v0 has no memory",
        ),
        (state_of(desired_verifiers=3), "warning", "2 verifiers vanished"),
        (state_of(drafter=IDLE, peers=(HEALTHY, LOST)), "warning", "d0 no longer answers"),
        (state_of(drafter=IDLE, peers=(HEALTHY, UNKNOWN)), "warning", "No drafter is usable"),
        (state_of(drafter=IDLE), "warning", "d0 is connected to no verifier"),
        (state_of(drafter=replace(DRAFTER, draining=True)), "notice", "d0 is draining"),
        (state_of(drafter=replace(DRAFTER, handicap="2x")), "notice", "slowed down"),
        (
            state_of(drafter=replace(DRAFTER, links=(LINK,))),
            "warning",
            "d0 is avoided by verifier v0",
        ),
        (state_of(desired_drafters=2), "warning", "1 drafter vanished"),
        (state_of(info=replace(INFO, queued=90)), "warning", "queue is nearly full"),
        (state_of(happens=refuse), "critical", "12 requests refused in the last 5 minutes"),
        (state_of(happens=fail), "critical", "1 request failed"),
        (state_of(happens=lambda m: m.failovers.inc(2)), "warning", "2 requests moved"),
        (
            state_of(happens=lambda m: m.access_refusals.labels("NO_KEY").inc()),
            "notice",
            "1 call refused",
        ),
        (state_of(happens=miss_drafts), "warning", "missing in 45 % of the rounds"),
        (state_of(happens=reject_drafts), "warning", "Only 2 % of the draft tokens"),
        (state_of(happens=be_slow), "warning", "First tokens come late"),
        (state_of(happens=be_slow), "warning", "Tokens come slowly"),
    ],
)
def test_it_says_what_is_wrong_and_what_to_do(
    state: RouterState, severity: str, words: str
) -> None:
    problems = find_problems(state)
    (found,) = [each for each in problems if words in each.title]
    assert found.severity == severity
    for text in (found.title, found.detail, found.advice):
        assert text and ".." not in text and "_" not in text.replace("simulated_acceptance", "")


def test_nothing_is_wrong_with_a_healthy_fleet_under_load() -> None:
    def work(metrics: RouterMetrics) -> None:
        metrics.record_request_end("length", 0.1, 0.5, 40, 0.6)
        metrics.rounds.inc(1000)
        metrics.draft_tokens.inc(4000)
        metrics.accepted_tokens.inc(2500)
        metrics.fallback_rounds.inc(10)

    assert find_problems(state_of(happens=work)) == []


def test_the_most_urgent_comes_first() -> None:
    state = state_of(replace(VERIFIER, draining=True), happens=refuse, desired_verifiers=2)
    order = [problem.severity for problem in find_problems(state)]
    assert order == [Severity.CRITICAL, Severity.WARNING, Severity.NOTICE]


def test_messages_of_other_processes_are_cut() -> None:
    state = state_of(AWAY, peers=(REFUSED, HEALTHY), problem="x" * 9000)
    details = [problem.detail for problem in find_problems(state)]
    assert max(map(len, details)) < MAX_DETAIL_LEN + 100


def test_a_drafter_that_fits_no_verifier_is_told_apart_from_one_that_is_lost() -> None:
    peer = DrafterPeer(address="d", state=HEALTHY, misfits={"v"})
    titles = [p.title for p in find_problems(state_of(drafter=IDLE, drafters=[peer]))]
    assert "Drafter d0 does not fit 1 verifier" in titles


async def test_a_running_router_names_the_verifier_that_it_lost(tmp_path: Path) -> None:
    fleet = {"v": FakeVerifier(), "w": FakeVerifier()}
    fleet["w"].change_info(verifier_id=VerifierId("v1"))
    async with running_router(tmp_path, fleet) as service:
        await until(lambda: all(v.healthy for v in make_server_info(service).verifiers))
        assert make_snapshot(service)["problems"] == []
        fleet["w"].lost.set()
        await until(lambda: bool(make_snapshot(service)["problems"]))
        (problem,) = make_snapshot(service)["problems"]
    assert Problem(**problem).title == "Verifier v1 no longer answers"


@pytest.mark.parametrize(
    ("alert", "name"),
    [
        ("OutriderQueueFilling", "MAX_QUEUE_SHARE"),
        ("OutriderSlowFirstToken", "MAX_FIRST_TOKEN_S"),
        ("OutriderSlowTokens", "MAX_TOKEN_S"),
        ("OutriderErrors", "MAX_FAILED_SHARE"),
        ("OutriderKvCacheFull", "MAX_KV_SHARE"),
        ("OutriderPreemptionStorm", "MAX_PREEMPTIONS_PER_S"),
        ("OutriderFallbackRounds", "MAX_FALLBACK_SHARE"),
        ("OutriderAcceptanceCollapsed", "MIN_ACCEPTANCE"),
    ],
)
def test_limits_are_those_of_the_alerts(alert: str, name: str) -> None:
    file = Path(__file__).resolve().parents[4] / "deploy/monitoring/rules/outrider.alerts.yml"
    groups = yaml.safe_load(file.read_text("utf-8"))["groups"]
    rules = {rule["alert"]: rule["expr"] for group in groups for rule in group["rules"]}
    limit = re.search(r"[<>] ([0-9.]+)", rules[alert])
    assert limit is not None and float(limit[1]) == getattr(status_problems, name)
