"""Codec of control RPCs: GetInfo, SetPlan, CloseSession, Drain, and Attach and Detach of
drafters."""

from __future__ import annotations

from collections.abc import Collection

from outrider.ids import DrafterId, SessionId, VerifierId
from outrider.spec.plan import MAX_DRAFT_TOKENS, SpeculationPlan
from outrider.wire.checks import check_count, check_finite, check_number, check_text, parse_message
from outrider.wire.common_codec import (
    LAYOUTS,
    LAYOUTS_FROM_PB,
    METHODS,
    device_exchange_from_pb,
    device_exchange_to_pb,
    methods_from_pb,
    plan_from_pb,
    plan_to_pb,
    require_member,
    stats_from_pb,
    stats_to_pb,
)
from outrider.wire.limits import (
    MAX_ADDRESS_BYTES,
    MAX_PEERS,
    MAX_PLANNER_BYTES,
    MAX_SEQUENCE_LEN,
    MAX_VOCAB_SIZE,
)
from outrider.wire.messages import (
    AttachedDrafter,
    DrafterInfo,
    VerifierInfo,
)
from outrider.wire.v1 import control_pb2 as pb


def _session_id(value: str) -> SessionId:
    return SessionId(check_text(value, "session_id"))


def encode_set_plan(session_id: SessionId, plan: SpeculationPlan) -> bytes:
    """Encode a SetPlan request."""
    return pb.SetPlanRequest(session_id=session_id, plan=plan_to_pb(plan)).SerializeToString(
        deterministic=True
    )


def decode_set_plan(data: bytes | memoryview) -> tuple[SessionId, SpeculationPlan]:
    """Decode the session id and plan of a SetPlan request."""
    message = parse_message(pb.SetPlanRequest, data)
    return _session_id(message.session_id), plan_from_pb(message.plan)


def encode_close_session(session_id: SessionId) -> bytes:
    """Encode a CloseSession request."""
    return pb.CloseSessionRequest(session_id=session_id).SerializeToString(deterministic=True)


def decode_close_session(data: bytes | memoryview) -> SessionId:
    """Decode the session id of a CloseSession request."""
    return _session_id(parse_message(pb.CloseSessionRequest, data).session_id)


def encode_drain(draining: bool) -> bytes:
    """Encode a Drain request."""
    return pb.DrainRequest(draining=draining).SerializeToString(deterministic=True)


def decode_drain(data: bytes | memoryview) -> bool:
    """Decode a Drain request, and return whether the drafter must announce that it will stop."""
    return parse_message(pb.DrainRequest, data).draining


def encode_verifier_address(address: str) -> bytes:
    """Encode an Attach or Detach request; the two have the same fields."""
    return pb.AttachRequest(verifier_address=address).SerializeToString(deterministic=True)


def decode_attach(data: bytes | memoryview) -> str:
    """Decode the verifier address of an Attach request."""
    address = parse_message(pb.AttachRequest, data).verifier_address
    return check_text(address, "verifier_address", limit=MAX_ADDRESS_BYTES)


def decode_detach(data: bytes | memoryview) -> str:
    """Decode the verifier address of a Detach request."""
    address = parse_message(pb.DetachRequest, data).verifier_address
    return check_text(address, "verifier_address", limit=MAX_ADDRESS_BYTES)


def encode_verifier_info(info: VerifierInfo) -> bytes:
    """Encode the info of a verifier."""
    return pb.VerifierServiceGetInfoResponse(
        protocol_version=info.protocol_version,
        verifier_id=info.verifier_id,
        incarnation=info.incarnation,
        model_name=info.model_name,
        vocab_size=info.vocab_size,
        tokenizer_hash=info.tokenizer_hash,
        max_context_len=info.max_context_len,
        kv_block_tokens=info.kv_block_tokens,
        kv_total_blocks=info.kv_total_blocks,
        kv_free_blocks=info.kv_free_blocks,
        sessions=info.sessions,
        max_sessions=info.max_sessions,
        drafters=[
            pb.AttachedDrafter(
                drafter_id=drafter.drafter_id,
                incarnation=drafter.incarnation,
                methods=[METHODS[method] for method in drafter.methods],
                sessions=drafter.sessions,
                answer_ms=drafter.answer_ms,
                same_host=drafter.same_host,
                answers=drafter.answers,
                proposal_timeouts=drafter.proposal_timeouts,
                invalid=drafter.invalid,
                silent_ms=drafter.silent_ms,
            )
            for drafter in info.drafters
        ],
        feature_fingerprint=info.feature_fingerprint,
        rounds_total=info.rounds_total,
        tokens_total=info.tokens_total,
        dtype=info.dtype,
        round_ms_p50=info.round_ms_p50,
        forward_ms_p50=info.forward_ms_p50,
        overhead_ms_p50=info.overhead_ms_p50,
        in_process_methods=[METHODS[method] for method in info.in_process_methods],
        in_process_draft_length=info.in_process_draft_length,
        simulated_acceptance=info.simulated_acceptance,
        planner=info.planner,
        stats=stats_to_pb(info.stats),
        hit_idle_us_p50=info.hit_idle_us_p50,
        draining=info.draining,
        waiting_sessions=info.waiting_sessions,
        preemptions_swap=info.preemptions_swap,
        preemptions_recompute=info.preemptions_recompute,
        prefix_cache_query_tokens=info.prefix_cache_query_tokens,
        prefix_cache_hit_tokens=info.prefix_cache_hit_tokens,
        engine_steps=info.engine_steps,
        device_exchange=device_exchange_to_pb(info.device_exchange),
        version=info.version,
    ).SerializeToString(deterministic=True)


def _attached_drafters(
    messages: Collection[pb.AttachedDrafter],
) -> tuple[AttachedDrafter, ...]:
    check_count(messages, "drafters", high=MAX_PEERS)
    return tuple(
        AttachedDrafter(
            drafter_id=DrafterId(check_text(drafter.drafter_id, "drafter_id")),
            incarnation=check_text(drafter.incarnation, "incarnation", empty=True),
            methods=methods_from_pb(drafter.methods),
            sessions=drafter.sessions,
            answer_ms=check_finite(drafter.answer_ms, "answer_ms"),
            same_host=drafter.same_host,
            answers=drafter.answers,
            proposal_timeouts=drafter.proposal_timeouts,
            invalid=drafter.invalid,
            silent_ms=check_finite(drafter.silent_ms, "silent_ms"),
        )
        for drafter in messages
    )


def decode_verifier_info(data: bytes | memoryview) -> VerifierInfo:
    """Decode the info of a verifier. Raises InvalidMessageError for invalid data."""
    message = parse_message(pb.VerifierServiceGetInfoResponse, data)
    return VerifierInfo(
        protocol_version=message.protocol_version,
        verifier_id=VerifierId(check_text(message.verifier_id, "verifier_id")),
        incarnation=check_text(message.incarnation, "incarnation", empty=True),
        model_name=check_text(message.model_name, "model_name", empty=True),
        vocab_size=check_number(message.vocab_size, "vocab_size", low=1, high=MAX_VOCAB_SIZE),
        tokenizer_hash=check_text(message.tokenizer_hash, "tokenizer_hash", empty=True),
        max_context_len=check_number(
            message.max_context_len, "max_context_len", high=MAX_SEQUENCE_LEN
        ),
        kv_block_tokens=message.kv_block_tokens,
        kv_total_blocks=message.kv_total_blocks,
        kv_free_blocks=message.kv_free_blocks,
        sessions=message.sessions,
        max_sessions=message.max_sessions,
        drafters=_attached_drafters(message.drafters),
        feature_fingerprint=check_text(
            message.feature_fingerprint, "feature_fingerprint", empty=True
        ),
        rounds_total=message.rounds_total,
        tokens_total=message.tokens_total,
        dtype=check_text(message.dtype, "dtype", empty=True),
        round_ms_p50=check_finite(message.round_ms_p50, "round_ms_p50"),
        forward_ms_p50=check_finite(message.forward_ms_p50, "forward_ms_p50"),
        overhead_ms_p50=check_finite(message.overhead_ms_p50, "overhead_ms_p50"),
        in_process_methods=methods_from_pb(message.in_process_methods),
        in_process_draft_length=check_number(
            message.in_process_draft_length, "in_process_draft_length", high=MAX_DRAFT_TOKENS
        ),
        simulated_acceptance=check_text(
            message.simulated_acceptance, "simulated_acceptance", empty=True
        ),
        planner=check_text(message.planner, "planner", limit=MAX_PLANNER_BYTES, empty=True),
        stats=stats_from_pb(message.stats),
        hit_idle_us_p50=check_finite(message.hit_idle_us_p50, "hit_idle_us_p50"),
        draining=message.draining,
        waiting_sessions=message.waiting_sessions,
        preemptions_swap=message.preemptions_swap,
        preemptions_recompute=message.preemptions_recompute,
        prefix_cache_query_tokens=message.prefix_cache_query_tokens,
        prefix_cache_hit_tokens=message.prefix_cache_hit_tokens,
        engine_steps=message.engine_steps,
        device_exchange=device_exchange_from_pb(message.device_exchange)
        if message.HasField("device_exchange")
        else None,
        version=check_text(message.version, "version", empty=True),
    )


def encode_drafter_info(info: DrafterInfo) -> bytes:
    """Encode the info of a drafter."""
    return pb.DrafterServiceGetInfoResponse(
        protocol_version=info.protocol_version,
        drafter_id=info.drafter_id,
        incarnation=info.incarnation,
        vocab_size=info.vocab_size,
        tokenizer_hash=info.tokenizer_hash,
        methods=[METHODS[method] for method in info.methods],
        feature_layout=LAYOUTS[info.feature_layout],
        feature_fingerprint=info.feature_fingerprint,
        sessions=info.sessions,
        verifiers=info.verifiers,
        draft_ms_p50=info.draft_ms_p50,
        handicap=info.handicap,
        draining=info.draining,
        max_sessions=info.max_sessions,
        version=info.version,
    ).SerializeToString(deterministic=True)


def decode_drafter_info(data: bytes | memoryview) -> DrafterInfo:
    """Decode the info of a drafter. Raises InvalidMessageError for invalid data."""
    message = parse_message(pb.DrafterServiceGetInfoResponse, data)
    check_count(message.verifiers, "verifiers", high=MAX_PEERS)
    return DrafterInfo(
        protocol_version=message.protocol_version,
        drafter_id=DrafterId(check_text(message.drafter_id, "drafter_id")),
        incarnation=check_text(message.incarnation, "incarnation", empty=True),
        vocab_size=check_number(message.vocab_size, "vocab_size", low=1, high=MAX_VOCAB_SIZE),
        tokenizer_hash=check_text(message.tokenizer_hash, "tokenizer_hash", empty=True),
        methods=methods_from_pb(message.methods),
        feature_layout=require_member(LAYOUTS_FROM_PB, message.feature_layout, "feature_layout"),
        feature_fingerprint=check_text(
            message.feature_fingerprint, "feature_fingerprint", empty=True
        ),
        sessions=message.sessions,
        verifiers=tuple(
            check_text(address, "verifier address", limit=MAX_ADDRESS_BYTES)
            for address in message.verifiers
        ),
        draft_ms_p50=check_finite(message.draft_ms_p50, "draft_ms_p50"),
        handicap=check_text(message.handicap, "handicap", empty=True),
        draining=message.draining,
        max_sessions=message.max_sessions,
        version=check_text(message.version, "version", empty=True),
    )
