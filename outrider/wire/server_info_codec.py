"""Codec of abort requests, server info and the model list of the public API."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from outrider.ids import DrafterId, RequestId, VerifierId
from outrider.wire.checks import check_count, check_finite, check_text
from outrider.wire.common_codec import (
    METHODS,
    device_exchange_from_pb,
    device_exchange_to_pb,
    methods_from_pb,
    stats_from_pb,
    stats_to_pb,
)
from outrider.wire.inference import (
    MAX_ABORT_IDS,
    DrafterLink,
    DrafterSummary,
    ModelInfo,
    ServerInfo,
    VerifierSummary,
)
from outrider.wire.limits import (
    MAX_ADDRESS_BYTES,
    MAX_PEERS,
    MAX_PLANNER_BYTES,
    MAX_PROBLEM_BYTES,
)
from outrider.wire.v1 import inference_pb2 as pb


def _request_ids(values: Collection[str]) -> tuple[RequestId, ...]:
    check_count(values, "request_ids", high=MAX_ABORT_IDS)
    return tuple(RequestId(check_text(value, "request_id")) for value in values)


def abort_request_to_pb(request_ids: Iterable[RequestId]) -> pb.AbortRequest:
    """Encode a request to cancel the requests with these ids."""
    return pb.AbortRequest(request_ids=request_ids)


def abort_request_from_pb(message: pb.AbortRequest) -> tuple[RequestId, ...]:
    """Decode the ids of the requests to cancel."""
    return _request_ids(message.request_ids)


def abort_response_to_pb(aborted: Iterable[RequestId]) -> pb.AbortResponse:
    """Encode the ids of the requests that were cancelled."""
    return pb.AbortResponse(aborted_request_ids=aborted)


def abort_response_from_pb(message: pb.AbortResponse) -> tuple[RequestId, ...]:
    """Decode the ids of the requests that were cancelled."""
    return _request_ids(message.aborted_request_ids)


def server_info_to_pb(info: ServerInfo) -> pb.GetServerInfoResponse:
    """Encode the router's state."""
    return pb.GetServerInfoResponse(
        version=info.version,
        protocol_version=info.protocol_version,
        queued=info.queued,
        queue_bound=info.queue_bound,
        running=info.running,
        verifiers=[
            pb.VerifierSummary(
                verifier_id=verifier.verifier_id,
                address=verifier.address,
                healthy=verifier.healthy,
                model=verifier.model,
                sessions=verifier.sessions,
                max_sessions=verifier.max_sessions,
                kv_free_blocks=verifier.kv_free_blocks,
                kv_total_blocks=verifier.kv_total_blocks,
                in_process_methods=[METHODS[method] for method in verifier.in_process_methods],
                simulated_acceptance=verifier.simulated_acceptance,
                planner=verifier.planner,
                stats=stats_to_pb(verifier.stats),
                hit_idle_us_p50=verifier.hit_idle_us_p50,
                draining=verifier.draining,
                waiting_sessions=verifier.waiting_sessions,
                preemptions_swap=verifier.preemptions_swap,
                preemptions_recompute=verifier.preemptions_recompute,
                prefix_cache_query_tokens=verifier.prefix_cache_query_tokens,
                prefix_cache_hit_tokens=verifier.prefix_cache_hit_tokens,
                device_exchange=device_exchange_to_pb(verifier.device_exchange),
                problem=verifier.problem,
            )
            for verifier in info.verifiers
        ],
        drafters=[
            pb.DrafterSummary(
                drafter_id=drafter.drafter_id,
                address=drafter.address,
                healthy=drafter.healthy,
                methods=[METHODS[method] for method in drafter.methods],
                sessions=drafter.sessions,
                handicap=drafter.handicap,
                draining=drafter.draining,
                links=[
                    pb.DrafterLink(
                        verifier_id=link.verifier_id,
                        sessions=link.sessions,
                        answer_ms=link.answer_ms,
                        quarantine=link.quarantine,
                        probe_in_s=link.probe_in_s,
                    )
                    for link in drafter.links
                ],
                problem=drafter.problem,
            )
            for drafter in info.drafters
        ],
    )


def server_info_from_pb(message: pb.GetServerInfoResponse) -> ServerInfo:
    """Decode the router's state."""
    check_count(message.verifiers, "verifiers", high=MAX_PEERS)
    check_count(message.drafters, "drafters", high=MAX_PEERS)
    return ServerInfo(
        version=check_text(message.version, "version", empty=True),
        protocol_version=message.protocol_version,
        queued=message.queued,
        queue_bound=message.queue_bound,
        running=message.running,
        verifiers=tuple(
            VerifierSummary(
                verifier_id=VerifierId(check_text(verifier.verifier_id, "verifier_id", empty=True)),
                address=check_text(
                    verifier.address, "address", limit=MAX_ADDRESS_BYTES, empty=True
                ),
                healthy=verifier.healthy,
                model=check_text(verifier.model, "model", empty=True),
                sessions=verifier.sessions,
                max_sessions=verifier.max_sessions,
                kv_free_blocks=verifier.kv_free_blocks,
                kv_total_blocks=verifier.kv_total_blocks,
                in_process_methods=methods_from_pb(verifier.in_process_methods),
                simulated_acceptance=check_text(
                    verifier.simulated_acceptance, "simulated_acceptance", empty=True
                ),
                planner=check_text(
                    verifier.planner, "planner", limit=MAX_PLANNER_BYTES, empty=True
                ),
                stats=stats_from_pb(verifier.stats),
                hit_idle_us_p50=check_finite(verifier.hit_idle_us_p50, "hit_idle_us_p50"),
                draining=verifier.draining,
                waiting_sessions=verifier.waiting_sessions,
                preemptions_swap=verifier.preemptions_swap,
                preemptions_recompute=verifier.preemptions_recompute,
                prefix_cache_query_tokens=verifier.prefix_cache_query_tokens,
                prefix_cache_hit_tokens=verifier.prefix_cache_hit_tokens,
                device_exchange=device_exchange_from_pb(verifier.device_exchange)
                if verifier.HasField("device_exchange")
                else None,
                problem=check_text(
                    verifier.problem, "problem", limit=MAX_PROBLEM_BYTES, empty=True
                ),
            )
            for verifier in message.verifiers
        ),
        drafters=tuple(
            DrafterSummary(
                drafter_id=DrafterId(check_text(drafter.drafter_id, "drafter_id", empty=True)),
                address=check_text(drafter.address, "address", limit=MAX_ADDRESS_BYTES, empty=True),
                healthy=drafter.healthy,
                methods=methods_from_pb(drafter.methods),
                sessions=drafter.sessions,
                handicap=check_text(drafter.handicap, "handicap", empty=True),
                draining=drafter.draining,
                links=_links(drafter.links),
                problem=check_text(drafter.problem, "problem", limit=MAX_PROBLEM_BYTES, empty=True),
            )
            for drafter in message.drafters
        ),
    )


def _links(messages: Collection[pb.DrafterLink]) -> tuple[DrafterLink, ...]:
    check_count(messages, "links", high=MAX_PEERS)
    return tuple(
        DrafterLink(
            verifier_id=VerifierId(check_text(link.verifier_id, "verifier_id")),
            sessions=link.sessions,
            answer_ms=check_finite(link.answer_ms, "answer_ms"),
            quarantine=check_text(link.quarantine, "quarantine", empty=True),
            probe_in_s=check_finite(link.probe_in_s, "probe_in_s"),
        )
        for link in messages
    )


def models_to_pb(models: Iterable[ModelInfo]) -> pb.ListModelsResponse:
    """Encode the served models."""
    return pb.ListModelsResponse(
        models=[
            pb.ModelInfo(
                name=model.name,
                vocab_size=model.vocab_size,
                max_context_len=model.max_context_len,
                tokenizer_hash=model.tokenizer_hash,
            )
            for model in models
        ]
    )


def models_from_pb(message: pb.ListModelsResponse) -> tuple[ModelInfo, ...]:
    """Decode the served models."""
    check_count(message.models, "models", high=MAX_PEERS)
    return tuple(
        ModelInfo(
            name=check_text(model.name, "name"),
            vocab_size=model.vocab_size,
            max_context_len=model.max_context_len,
            tokenizer_hash=check_text(model.tokenizer_hash, "tokenizer_hash", empty=True),
        )
        for model in message.models
    )
