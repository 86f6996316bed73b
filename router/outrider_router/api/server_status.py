"""Server info and model list, built from the state of the router and its fleet."""

from __future__ import annotations

import outrider
from outrider.ids import DrafterId, VerifierId
from outrider.wire.inference import (
    DrafterLink,
    DrafterSummary,
    ModelInfo,
    ServerInfo,
    VerifierSummary,
)
from outrider.wire.limits import MAX_PROBLEM_BYTES
from outrider.wire.messages import PROTOCOL_VERSION, AttachedDrafter, DrafterInfo, SpecStats
from outrider_router.fleet.compatibility import PeerState
from outrider_router.fleet.drafter_assignment import is_attached
from outrider_router.fleet.peers import DrafterPeer, PeerStatus, VerifierPeer
from outrider_router.requests.request import max_session_len, served_model_name
from outrider_router.requests.service import RouterService


def make_server_info(service: RouterService) -> ServerInfo:
    """Return the state of the router and its fleet. Peers that were never reached have their
    address as id.
    """
    return ServerInfo(
        version=outrider.__version__,
        protocol_version=PROTOCOL_VERSION,
        queued=service.admission.num_waiting,
        queue_bound=service.config.queue_limit,
        running=service.admission.num_running,
        verifiers=tuple(_verifier(v, service) for v in list(service.registry.verifiers.values())),
        drafters=tuple(_drafter(d, service) for d in list(service.registry.drafters.values())),
    )


def make_model_list(service: RouterService) -> tuple[ModelInfo, ...]:
    """Return the served model, or an empty tuple while no verifier is healthy."""
    info = service.registry.any_verifier_info()
    if info is None:
        return ()
    return (
        ModelInfo(
            name=served_model_name(service.config, info),
            vocab_size=info.vocab_size,
            max_context_len=max_session_len(service.config, info),
            tokenizer_hash=service.tokenizer.hash,
        ),
    )


def _verifier(peer: VerifierPeer, service: RouterService) -> VerifierSummary:
    info = peer.info
    return VerifierSummary(
        verifier_id=info.verifier_id if info is not None else VerifierId(peer.address),
        address=peer.address,
        healthy=peer.state is PeerState.HEALTHY,
        model=served_model_name(service.config, info) if info is not None else "",
        sessions=info.sessions if info is not None else 0,
        max_sessions=info.max_sessions if info is not None else 0,
        kv_free_blocks=info.kv_free_blocks if info is not None else 0,
        kv_total_blocks=info.kv_total_blocks if info is not None else 0,
        in_process_methods=info.in_process_methods if info is not None else (),
        simulated_acceptance=info.simulated_acceptance if info is not None else "",
        planner=info.planner if info is not None else "",
        stats=info.stats if info is not None else SpecStats(),
        hit_idle_us_p50=info.hit_idle_us_p50 if info is not None else 0.0,
        draining=info is not None and info.draining,
        waiting_sessions=info.waiting_sessions if info is not None else 0,
        preemptions_swap=info.preemptions_swap if info is not None else 0,
        preemptions_recompute=info.preemptions_recompute if info is not None else 0,
        prefix_cache_query_tokens=info.prefix_cache_query_tokens if info is not None else 0,
        prefix_cache_hit_tokens=info.prefix_cache_hit_tokens if info is not None else 0,
        device_exchange=info.device_exchange if info is not None else None,
        problem=_problem(peer, healthy=peer.state is PeerState.HEALTHY),
    )


def _drafter(peer: DrafterPeer, service: RouterService) -> DrafterSummary:
    info = peer.info
    return DrafterSummary(
        drafter_id=info.drafter_id if info is not None else DrafterId(peer.address),
        address=peer.address,
        healthy=peer.is_serving,
        methods=info.methods if info is not None else (),
        sessions=info.sessions if info is not None else 0,
        handicap=info.handicap if info is not None else "",
        draining=peer.is_leaving,
        links=_links(info, service) if info is not None else (),
        problem=_problem(peer, healthy=peer.is_serving),
    )


def _problem(peer: PeerStatus, *, healthy: bool) -> str:
    """Return why a peer is not used; "" if it is healthy. Part of the text comes from the peer, so
    its length is limited.
    """
    if healthy:
        return ""
    return peer.problem.encode()[:MAX_PROBLEM_BYTES].decode(errors="ignore")


def _links(drafter: DrafterInfo, service: RouterService) -> tuple[DrafterLink, ...]:
    # Copied, because threads of the metrics port call this too.
    peers = list(service.registry.verifiers.values())
    infos = [peer.info for peer in peers if peer.state is PeerState.HEALTHY]
    return tuple(
        _link(info.verifier_id, link, service)
        for info in infos
        if info is not None and is_attached(drafter, info)
        for link in info.drafters
        if link.drafter_id == drafter.drafter_id
    )


def _link(verifier_id: VerifierId, link: AttachedDrafter, service: RouterService) -> DrafterLink:
    reason, probe_in_s = service.registry.judge.quarantine_status(verifier_id, link.drafter_id)
    return DrafterLink(
        verifier_id=verifier_id,
        sessions=link.sessions,
        answer_ms=link.answer_ms,
        quarantine=reason,
        probe_in_s=probe_in_s,
    )
