"""List of what is wrong with a router and its fleet, in words, with what to do about it. Pure.

Thresholds are those of the alerts in `deploy/monitoring/rules`, without their waiting times.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from outrider.wire.inference import DrafterLink, DrafterSummary, ServerInfo, VerifierSummary
from outrider_router.api.status_page.figures import Interval
from outrider_router.base.reasons import QuarantineReason
from outrider_router.base.slow_readers import SLOW_READER
from outrider_router.fleet.compatibility import PeerState
from outrider_router.fleet.peers import DrafterPeer, PeerStatus, VerifierPeer

MAX_QUEUE_SHARE: Final = 0.8
MAX_FIRST_TOKEN_S: Final = 5.0
MAX_TOKEN_S: Final = 0.2
MAX_FAILED_SHARE: Final = 0.05
MAX_KV_SHARE: Final = 0.95
MAX_PREEMPTIONS_PER_S: Final = 1.0
MAX_FALLBACK_SHARE: Final = 0.3
MIN_ACCEPTANCE: Final = 0.1
MIN_ROUNDS: Final = 100.0
"""Smallest number of rounds of which shares are judged."""
MAX_DETAIL_LEN: Final = 300
"""Length in characters at which messages of other processes are cut."""


class Severity(StrEnum):
    """How urgent a problem is."""

    CRITICAL = "critical"
    """Clients get errors now, or are about to."""
    WARNING = "warning"
    """Clients wait longer than necessary, or capacity is missing."""
    NOTICE = "notice"
    """Something is not as usual, and may be intended."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong."""

    severity: Severity
    title: str
    detail: str
    """What it means for clients, or what the router observed."""
    advice: str
    """What to do about it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterState:
    """State of a router in which problems are looked for."""

    info: ServerInfo
    verifiers: Sequence[VerifierPeer]
    """In the order of `info.verifiers`."""
    drafters: Sequence[DrafterPeer]
    """In the order of `info.drafters`."""
    desired_verifiers: int
    desired_drafters: int
    recent: Interval
    """Growth of the metrics in the last minutes."""
    is_draining: bool = False
    is_journal_failing: bool = False
    are_keys_failing: bool = False


_ORDER: Final = list(Severity)


def find_problems(state: RouterState) -> list[Problem]:
    """Return what is wrong, the most urgent first."""
    problems = [
        *_router_problems(state),
        *_verifier_problems(state),
        *_drafter_problems(state),
        *_load_problems(state),
    ]
    problems += _speculation_problems(state)
    return sorted(problems, key=lambda each: _ORDER.index(each.severity))


# ---- router -------------------------------------------------------------------------------------


def _router_problems(state: RouterState) -> Iterator[Problem]:
    if state.is_draining:
        yield Problem(
            Severity.WARNING,
            "This router is shutting down",
            f"It refuses new requests, and finishes {_count(state.info.running, 'request')}.",
            "Send new requests to another router, or start this one again.",
        )
    if state.is_journal_failing:
        yield Problem(
            Severity.CRITICAL,
            "The router cannot write its journal",
            "Requests are served, but a restart now would lose those that clients can resume.",
            "Free disk space or restore access to the disk. Do not restart the router before.",
        )
    if state.are_keys_failing:
        yield Problem(
            Severity.WARNING,
            "The file of API keys is invalid",
            "The last valid keys apply, so changes of the file have no effect.",
            "Correct the file; the router's log names the error.",
        )
    if not any(verifier.healthy for verifier in state.info.verifiers):
        yield Problem(
            Severity.CRITICAL,
            "No verifier is ready",
            "New requests are refused, and running ones wait for a verifier and then fail.",
            "Start a verifier, or wait if one is loading its model.",
        )


# ---- verifiers and drafters ---------------------------------------------------------------------


def _verifier_problems(state: RouterState) -> Iterator[Problem]:
    for summary, peer in zip(state.info.verifiers, state.verifiers, strict=True):
        name = f"Verifier {summary.verifier_id}"
        if not summary.healthy:
            yield _unavailable_problem(
                name, peer, "Its requests continue on other verifiers if there are any."
            )
            continue
        yield from _serving_verifier_problems(name, summary)
        preemptions = state.recent.preemptions(summary.address)
        if preemptions > MAX_PREEMPTIONS_PER_S * max(state.recent.seconds, 1.0):
            yield Problem(
                Severity.WARNING,
                f"{name} interrupts requests for lack of memory",
                f"It did so {preemptions} times in the last {_minutes(state.recent)}, and computes "
                "or copies their KV again.",
                "Add verifiers, or give the KV cache more memory where some is free.",
            )
    missing = state.desired_verifiers - len(state.verifiers)
    if missing > 0:
        yield _missing_problem("verifier", missing, "There is less capacity than before.")


def _serving_verifier_problems(name: str, summary: VerifierSummary) -> Iterator[Problem]:
    if summary.draining:
        yield Problem(
            Severity.NOTICE,
            f"{name} is draining",
            "It takes no new requests, and finishes or hands over the "
            f"{_count(summary.sessions, 'request')} that it serves.",
            "Nothing, if it is being replaced or scaled down.",
        )
    if summary.simulated_acceptance:
        yield Problem(
            Severity.WARNING,
            f"{name} accepts drafts by chance",
            "This is a setting for benchmarks. The text is not the model's.",
            "Restart the verifier without simulated_acceptance before you serve users.",
        )
    total = summary.kv_total_blocks
    if summary.waiting_sessions and total and total - summary.kv_free_blocks > MAX_KV_SHARE * total:
        yield Problem(
            Severity.WARNING,
            f"{name} has no memory for more requests",
            f"{_count(summary.waiting_sessions, 'request')} on it cannot go on until others end.",
            "Add verifiers, give the KV cache more memory, or limit the length of requests.",
        )


def _drafter_problems(state: RouterState) -> Iterator[Problem]:
    for summary, peer in zip(state.info.drafters, state.drafters, strict=True):
        name = f"Drafter {summary.drafter_id}"
        if peer.state is not PeerState.HEALTHY:
            yield _unavailable_problem(
                name, peer, "Texts stay the same, but tokens may come more slowly."
            )
            continue
        yield from _serving_drafter_problems(name, summary, peer, state)
        for link in summary.links:
            if link.quarantine:
                yield _quarantine_problem(name, link)
    has_usable = any(drafter.healthy for drafter in state.info.drafters)
    missing = state.desired_drafters - len(state.drafters)
    if missing > 0:
        yield _missing_problem("drafter", missing, "Tokens may come more slowly.")
    if state.desired_drafters and not has_usable:
        yield Problem(
            Severity.WARNING,
            "No drafter is usable",
            "Requests are served without speculation: texts stay the same, but tokens come more "
            "slowly.",
            "Start a drafter, or see below why those that run are not used.",
        )


def _serving_drafter_problems(
    name: str, summary: DrafterSummary, peer: DrafterPeer, state: RouterState
) -> Iterator[Problem]:
    if summary.draining:
        yield Problem(
            Severity.NOTICE,
            f"{name} is draining",
            "It gets no new requests, and those that it drafts for move to other drafters.",
            "Nothing, if it is being replaced or scaled down.",
        )
    elif peer.misfits:
        yield Problem(
            Severity.WARNING,
            f"{name} does not fit {_count(len(peer.misfits), 'verifier')}",
            f"Its vocabulary or features differ: {', '.join(sorted(peer.misfits)[:3])}.",
            "Start it with the draft head that was trained for the verifiers' model.",
        )
    elif not summary.healthy and any(verifier.healthy for verifier in state.info.verifiers):
        yield Problem(
            Severity.WARNING,
            f"{name} is connected to no verifier",
            "It runs, but drafts for nobody.",
            "See in its log whether it reaches the verifiers, and check addresses, network policy "
            "and certificates.",
        )
    if summary.handicap:
        yield Problem(
            Severity.NOTICE,
            f"{name} is slowed down on purpose",
            f"This is a setting for benchmarks: {_cut(summary.handicap)}.",
            "Restart the drafter without it before you serve users.",
        )


_FAULTS: Final = {
    QuarantineReason.SLOW: (
        "Its drafts arrive too late",
        "See what else runs on its device, and how fast the network between the two is.",
    ),
    QuarantineReason.SILENT: ("It sends no drafts", "See its log: it may hang."),
    QuarantineReason.WRONG: (
        "It sends invalid messages",
        "Compare its version and its model files with those of the verifier.",
    ),
}


def _quarantine_problem(name: str, link: DrafterLink) -> Problem:
    fault, advice = _FAULTS[QuarantineReason(link.quarantine)]
    again = f"in {link.probe_in_s:.0f} s" if link.probe_in_s >= 1.0 else "now"
    return Problem(
        Severity.WARNING,
        f"{name} is avoided by verifier {link.verifier_id}",
        f"{fault}. It is tried again {again}, with one request.",
        advice,
    )


def _unavailable_problem(name: str, peer: PeerStatus, effect: str) -> Problem:
    attempt = f" The router's last attempt: {_cut(peer.problem)}." if peer.problem else ""
    if peer.state is PeerState.REFUSED:
        return Problem(
            Severity.WARNING,
            f"{name} cannot be used",
            f"It answers, but: {_cut(peer.problem)}.",
            "Start it with the same version, model and tokenizer as the router.",
        )
    if peer.state is PeerState.UNKNOWN:
        return Problem(
            Severity.WARNING,
            f"{name} has not answered yet",
            f"It may be loading its model: it answers once it is ready.{attempt}",
            "If it takes longer than usual, see its log, and check address, network policy and "
            "certificates.",
        )
    return Problem(
        Severity.WARNING,
        f"{name} no longer answers",
        f"{effect}{attempt}",
        "See its log and its exit status, and restart it if nothing else does.",
    )


def _missing_problem(kind: str, count: int, effect: str) -> Problem:
    return Problem(
        Severity.WARNING,
        f"{_count(count, kind)} vanished",
        f"DNS no longer has the address, and there was no drain before. {effect}",
        "Start as many as are missing. If fewer are intended, restart the router: it counts anew.",
    )


# ---- load and speculation -----------------------------------------------------------------------

_OVERLOAD: Final = "Add verifiers, or limit what clients send."
_REFUSALS: Final = {
    "QUEUE_FULL": (Severity.CRITICAL, "because the queue was full", _OVERLOAD),
    "DISPLACED": (
        Severity.CRITICAL,
        "from the full queue, in favour of more urgent ones",
        _OVERLOAD,
    ),
    "RATE_LIMITED": (
        Severity.NOTICE,
        "because their tenant sent more than its limit",
        "Raise the tenant's limit if there is capacity.",
    ),
    "KEY_RATE_LIMITED": (
        Severity.NOTICE,
        "because their API key sent more than its limit",
        "Raise the key's limit if there is capacity.",
    ),
    "KEY_BUSY": (
        Severity.NOTICE,
        "because their API key had too many in progress",
        "Raise the key's limit if there is capacity.",
    ),
    SLOW_READER: (
        Severity.NOTICE,
        "because the client did not read its answer",
        "See what the client or a proxy before it waits for.",
    ),
}


def _load_problems(state: RouterState) -> Iterator[Problem]:
    info, recent, minutes = state.info, state.recent, _minutes(state.recent)
    if info.queued > MAX_QUEUE_SHARE * info.queue_bound:
        yield Problem(
            Severity.WARNING,
            "The queue is nearly full",
            f"{info.queued} of at most {info.queue_bound} requests wait. When it is full, requests "
            "are refused.",
            _OVERLOAD,
        )
    for reason, count in recent.refusals().items():
        severity, why, advice = _REFUSALS.get(
            reason, (Severity.WARNING, f"for the reason {reason}", _OVERLOAD)
        )
        title = f"{_count(count, 'request')} refused in the last {minutes}"
        yield Problem(severity, title, f"The router turned them away {why}.", advice)
    if denied := round(recent.growth("access_refusals")):
        yield Problem(
            Severity.NOTICE,
            f"{_count(denied, 'call')} refused for lack of rights in the last {minutes}",
            "They had no valid API key or certificate.",
            "Give the clients a key, or find out who calls.",
        )
    failed = recent.share("failed_requests", "requests") or 0.0
    if failed:
        count = round(recent.growth("failed_requests"))
        yield Problem(
            Severity.CRITICAL if failed > MAX_FAILED_SHARE else Severity.WARNING,
            f"{_count(count, 'request')} failed in the last {minutes}",
            f"That is {100 * failed:.1f} % of all. Cancelled and invalid requests do not count.",
            "The router's log names each request and its error.",
        )
    if moved := round(recent.growth("failovers")):
        yield Problem(
            Severity.WARNING,
            f"{_count(moved, 'request')} moved to another verifier in the last {minutes}",
            "Their verifier was lost or stopped, so their tokens paused for a moment.",
            "If no verifier was replaced, see the logs of the verifiers for crashes.",
        )
    first_s = recent.percentile_s("time_to_first_token", 0.95) or 0.0
    if first_s > MAX_FIRST_TOKEN_S:
        yield Problem(
            Severity.WARNING,
            "First tokens come late",
            f"One request in twenty waits more than {first_s:.1f} s.",
            f"If requests wait in the queue: {_OVERLOAD[0].lower()}{_OVERLOAD[1:]} If not, prompts "
            "are long: they are computed before the first token.",
        )
    token_s = recent.percentile_s("inter_token_latency", 0.95) or 0.0
    if token_s > MAX_TOKEN_S:
        yield Problem(
            Severity.WARNING,
            "Tokens come slowly",
            f"One token in twenty takes more than {1000 * token_s:.0f} ms.",
            "See below whether a verifier's rounds are long, or whether drafts are late.",
        )


def _speculation_problems(state: RouterState) -> Iterator[Problem]:
    recent = state.recent
    rounds = recent.growth("rounds")
    if rounds < MIN_ROUNDS:
        return
    late = (recent.growth("fallback_rounds") - recent.growth("undrafted_rounds")) / rounds
    if late > MAX_FALLBACK_SHARE:
        yield Problem(
            Severity.WARNING,
            f"Drafts are missing in {100 * late:.0f} % of the rounds",
            "The drafters do not answer, or too late, so these rounds make one token each.",
            "See what else runs on the drafters' devices, and how fast the network to them is.",
        )
    acceptance = recent.share("accepted_tokens", "draft_tokens")
    if acceptance is not None and acceptance < MIN_ACCEPTANCE:
        yield Problem(
            Severity.WARNING,
            f"Only {100 * acceptance:.0f} % of the draft tokens are accepted",
            "The drafts do not fit the requests or the target model. Where they do not pay, "
            "speculation is paused.",
            "Use a draft head that was trained for this model and for such requests.",
        )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _minutes(interval: Interval) -> str:
    minutes = round(interval.seconds / 60.0)
    return "minute" if minutes <= 1 else f"{minutes} minutes"


def _cut(text: str) -> str:
    text = text.rstrip(".")
    return text if len(text) <= MAX_DETAIL_LEN else text[: MAX_DETAIL_LEN - 1] + "…"
