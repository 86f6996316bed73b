"""`outrider status`: prints the state of a router and its fleet."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator

from outrider.client.flags import add_connecting_arguments, tls_of
from outrider.client.retry import RetryPolicy
from outrider.client.sync_client import Client
from outrider.wire.inference import DrafterLink, DrafterSummary, ServerInfo, VerifierSummary
from outrider.wire.messages import DeviceExchangeInfo, MemoryKind

DEFAULT_ROUTER = "127.0.0.1:50050"
ROUTER_HELP = f"Address of the router's gRPC API (default: {DEFAULT_ROUTER})."
_MEMORY = {
    MemoryKind.DEVICE: "device memory",
    MemoryKind.HOST: "pinned memory of the host",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags to a parser."""
    add = parser.add_argument
    add("--router", metavar="HOST:PORT", default=DEFAULT_ROUTER, help=ROUTER_HELP)
    add_connecting_arguments(parser)
    add("--json", action="store_true", help="Print one JSON object instead of text.")


def run(args: argparse.Namespace) -> int:
    """Run the command and return the exit status. Raises OutriderError."""
    retry = RetryPolicy(max_attempts=1)
    with Client(args.router, retry=retry, tls=tls_of(args)) as client:
        info = client.server_info()
    if args.json:
        sys.stdout.write(json.dumps(dataclasses.asdict(info)) + "\n")
    else:
        sys.stdout.write("".join(f"{line}\n" for line in describe_server(info)))
    return 0


def describe_server(info: ServerInfo) -> Iterator[str]:
    """Yield one line of text about the router, and one about each verifier and drafter."""
    yield (
        f"router {info.version}: {info.running} running, "
        f"{info.queued} of at most {info.queue_bound} waiting"
    )
    yield from (_verifier(verifier) for verifier in info.verifiers)
    yield from (_drafter(drafter) for drafter in info.drafters)


def simulation_note(info: ServerInfo) -> str:
    """Return a note that results from these verifiers are simulated, for display beside the
    results; "" if nothing is simulated."""
    rates = sorted({v.simulated_acceptance for v in info.verifiers if v.simulated_acceptance})
    return f"SIMULATED ACCEPTANCE {'; '.join(rates)}" if rates else ""


def _verifier(verifier: VerifierSummary) -> str:
    parts = [
        f"verifier {verifier.verifier_id} at {verifier.address}: {_health(verifier)}",
        verifier.model,
        f"{verifier.sessions} of {verifier.max_sessions} sessions",
        f"{verifier.kv_free_blocks} of {verifier.kv_total_blocks} KV blocks free",
    ]
    if verifier.draining:
        parts.append("about to stop")
    if verifier.waiting_sessions:
        parts.append(f"{verifier.waiting_sessions} sessions wait for KV blocks")
    if verifier.preemptions_swap or verifier.preemptions_recompute:
        parts.append(
            f"preempted {verifier.preemptions_swap} times by swap, "
            f"{verifier.preemptions_recompute} by recompute"
        )
    if verifier.prefix_cache_hit_tokens:
        share = verifier.prefix_cache_hit_tokens / verifier.prefix_cache_query_tokens
        parts.append(f"{share:.0%} of prompt tokens were there")
    if verifier.in_process_methods:
        parts.append(f"drafts itself ({', '.join(verifier.in_process_methods)})")
    elif verifier.healthy:
        parts.append(_device_exchange(verifier.device_exchange))
    if verifier.simulated_acceptance:
        parts.append(f"SIMULATED ACCEPTANCE {verifier.simulated_acceptance}")
    if verifier.planner:
        parts.append(f"speculation: {verifier.planner}")
    if verifier.stats.look_ahead_rounds:
        parts.append(_look_ahead(verifier))
    return ", ".join(part for part in parts if part)


def _device_exchange(exchange: DeviceExchangeInfo | None) -> str:
    if exchange is None:
        return "device exchange off"
    if exchange.drafter_id is None or exchange.memory is None:
        return "device exchange not open: drafts pass by messages (shared memory or gRPC)"
    parts = [
        f"device exchange with {exchange.drafter_id} in {_MEMORY[exchange.memory]}",
        f"chains of {exchange.draft_length} draft tokens",
    ]
    if exchange.idle_rows:
        sessions = "1 session" if exchange.idle_rows == 1 else f"{exchange.idle_rows} sessions"
        parts.append(f"GPU idle {exchange.idle_us_p50:.0f} us before a round of {sessions}")
    return ", ".join(parts)


def _look_ahead(verifier: VerifierSummary) -> str:
    stats = verifier.stats
    return (
        f"look-ahead: {stats.hit_rate:.0%} of rounds are hits, {stats.accepted_per_hit:.2f} draft "
        f"tokens accepted in a hit, {stats.accepted_per_fresh_round:.2f} in a fresh round, "
        f"{verifier.hit_idle_us_p50:.0f} us between rounds of hits"
    )


def _drafter(drafter: DrafterSummary) -> str:
    parts = [
        f"drafter {drafter.drafter_id} at {drafter.address}: {_health(drafter)}",
        ", ".join(drafter.methods) or "no methods",
        f"{drafter.sessions} sessions",
    ]
    for link in drafter.links:
        answers = f", answers in {link.answer_ms:.2f} ms" if link.answer_ms else ""
        parts.append(f"{link.verifier_id} ({link.sessions} sessions{answers}{_quarantine(link)})")
    if drafter.draining:
        parts.append("leaving")
    if drafter.handicap:
        parts.append(f"SLOWED DOWN: {drafter.handicap}")
    return ", ".join(parts)


def _quarantine(link: DrafterLink) -> str:
    if not link.quarantine:
        return ""
    then = f"probed in {link.probe_in_s:.1f} s" if link.probe_in_s else "being probed"
    return f", in quarantine ({link.quarantine}, {then})"


def _health(peer: VerifierSummary | DrafterSummary) -> str:
    if peer.healthy:
        return "healthy"
    return f"NOT HEALTHY ({peer.problem})" if peer.problem else "NOT HEALTHY"
