"""Codec of the session stream between router and verifier.

The events of a round are encoded as a few columns. Encoding and checking them therefore costs the
same for one session as for hundreds, except for copying their bytes.
"""

from __future__ import annotations

from typing import cast

import numpy as np
from numpy.typing import NDArray

from outrider.errors import InvalidMessageError
from outrider.ids import DrafterId, SessionId
from outrider.spec.thinking_budget import (
    MAX_TAG_BYTES,
    MAX_TAG_TOKENS,
    MAX_THINKING_TOKENS,
    ThinkingBudget,
)
from outrider.wire.checks import (
    check_finite,
    check_number,
    check_text,
    check_token_ids,
    check_traceparent,
    convert_validation_errors,
    parse_message,
    raise_invalid,
)
from outrider.wire.common_codec import (
    FINISH_REASONS_FROM_PB,
    plan_from_pb,
    plan_to_pb,
    sampling_to_pb,
    structured_from_pb,
    structured_to_pb,
    token_limits_from_pb,
    token_limits_to_pb,
    verifier_sampling_from_pb,
)
from outrider.wire.limits import (
    LOWEST_LOGPROB,
    MAX_ERROR_BYTES,
    MAX_EVENT_LOGPROBS,
    MAX_EVENT_ROWS,
    MAX_NODES,
    MAX_PRIORITY,
    MAX_SEQUENCE_LEN,
    MAX_STOP_TOKEN_IDS,
    MAX_TOP_LOGPROBS,
    MAX_VOCAB_SIZE,
)
from outrider.wire.messages import (
    MALFORMED_ROW,
    EventLogprobs,
    Heartbeat,
    MalformedOpen,
    SessionEvents,
    SessionFailure,
    SessionLeave,
    SessionMove,
    SessionMoved,
    SessionOpen,
    SessionsDraining,
    SessionsMessage,
    SessionSpec,
    SessionsRequest,
)
from outrider.wire.tensors import FLOAT32, INT32, UINT8, UINT16, UINT32, pack, unpack
from outrider.wire.v1 import common_pb2
from outrider.wire.v1 import control_pb2 as pb

_KNOWN_REASONS = np.zeros(256, dtype=np.bool_)
_KNOWN_REASONS[[0, *FINISH_REASONS_FROM_PB]] = True


def encode_sessions_request(message: SessionsRequest) -> bytes:
    """Encode one message of a router."""
    match message:
        case SessionOpen():
            opening = pb.SessionOpen(handle=message.handle, spec=_spec_to_pb(message.spec))
            frame = pb.SessionsRequest(open=opening)
        case SessionLeave():
            frame = pb.SessionsRequest(leave=pb.SessionLeave(handle=message.handle))
        case SessionMove():
            move = pb.SessionMove(handle=message.handle, drafter_id=message.drafter_id)
            frame = pb.SessionsRequest(move=move)
        case Heartbeat():
            frame = pb.SessionsRequest(heartbeat=common_pb2.Heartbeat(sequence=message.sequence))
    return frame.SerializeToString(deterministic=True)


def decode_sessions_request(data: bytes | memoryview) -> SessionsRequest | MalformedOpen:
    """Decode one message of a router. Raises InvalidMessageError for invalid data. A `SessionOpen`
    with an invalid specification is returned as `MalformedOpen`, so that only its session fails.
    """
    frame = parse_message(pb.SessionsRequest, data)
    match frame.WhichOneof("message"):
        case "open":
            try:
                return SessionOpen(frame.open.handle, _spec_from_pb(frame.open.spec))
            except InvalidMessageError as error:
                return MalformedOpen(frame.open.handle, error)
        case "leave":
            return SessionLeave(frame.leave.handle)
        case "move":
            return SessionMove(frame.move.handle, _drafter_id(frame.move))
        case "heartbeat":
            return Heartbeat(frame.heartbeat.sequence)
        case _:
            raise_invalid("a router's message must hold open, leave, move or heartbeat")


def encode_sessions_message(message: SessionsMessage) -> bytes:
    """Encode one message of a verifier."""
    match message:
        case SessionEvents():
            frame = pb.SessionsResponse(events=_events_to_pb(message))
        case SessionFailure():
            frame = pb.SessionsResponse(
                failure=pb.SessionFailure(
                    handle=message.handle,
                    code=message.code,
                    kind=message.kind,
                    message=message.message,
                    reason=message.reason,
                    retry_after_s=message.retry_after_s,
                )
            )
        case SessionMoved():
            moved = pb.SessionMoved(handle=message.handle, drafter_id=message.drafter_id)
            frame = pb.SessionsResponse(moved=moved)
        case SessionsDraining():
            draining = pb.SessionsDraining(seconds=message.seconds)
            frame = pb.SessionsResponse(draining=draining)
        case Heartbeat():
            frame = pb.SessionsResponse(heartbeat=common_pb2.Heartbeat(sequence=message.sequence))
    return frame.SerializeToString(deterministic=True)


def decode_sessions_message(data: bytes | memoryview) -> SessionsMessage:
    """Decode one message of a verifier. Raises InvalidMessageError for invalid data, and for events
    whose columns have different lengths. An invalid row of events gets the finish reason
    MALFORMED_ROW, so that only its session fails.
    """
    frame = parse_message(pb.SessionsResponse, data)
    match frame.WhichOneof("message"):
        case "events":
            return _events_from_pb(frame.events)
        case "failure":
            return _failure_from_pb(frame.failure)
        case "moved":
            return SessionMoved(frame.moved.handle, _drafter_id(frame.moved))
        case "draining":
            return SessionsDraining(check_finite(frame.draining.seconds, "seconds"))
        case "heartbeat":
            return Heartbeat(frame.heartbeat.sequence)
        case _:
            raise_invalid(
                "a verifier's message must hold events, failure, moved, draining or heartbeat"
            )


def _events_to_pb(events: SessionEvents) -> pb.SessionEvents:
    message = pb.SessionEvents(
        handles=pack(events.handles, UINT32),
        round_ids=pack(events.round_ids, UINT32),
        counts=pack(events.counts, UINT32),
        tokens=pack(events.tokens, INT32),
        finish_reasons=pack(events.finish_reasons, UINT8),
        flags=pack(events.flags, UINT8),
        proposed=pack(events.proposed, UINT16),
        accepted=pack(events.accepted, UINT16),
    )
    if events.logprobs is not None:
        message.logprob_widths = pack(events.logprobs.widths, UINT8)
        message.logprobs = pack(events.logprobs.values, FLOAT32)
        message.top_ids = pack(events.logprobs.top_ids, INT32)
    if events.cached_tokens is not None:
        message.cached_tokens = pack(events.cached_tokens, UINT32)
    return message


def _events_from_pb(message: pb.SessionEvents) -> SessionEvents:
    def column(name: str, dtype: np.dtype[np.generic]) -> NDArray[np.generic]:
        return unpack(getattr(message, name), dtype, name, max_len=MAX_EVENT_ROWS)

    events = SessionEvents(
        handles=cast("NDArray[np.uint32]", column("handles", UINT32)),
        round_ids=cast("NDArray[np.uint32]", column("round_ids", UINT32)),
        counts=cast("NDArray[np.uint32]", column("counts", UINT32)),
        tokens=cast(
            "NDArray[np.int32]", unpack(message.tokens, INT32, "tokens", max_len=MAX_SEQUENCE_LEN)
        ),
        finish_reasons=cast("NDArray[np.uint8]", column("finish_reasons", UINT8)),
        flags=cast("NDArray[np.uint8]", column("flags", UINT8)),
        proposed=cast("NDArray[np.uint16]", column("proposed", UINT16)),
        accepted=cast("NDArray[np.uint16]", column("accepted", UINT16)),
        logprobs=_logprobs_from_pb(message),
        cached_tokens=(
            cast("NDArray[np.uint32]", column("cached_tokens", UINT32))
            if message.cached_tokens
            else None
        ),
    )
    rows = len(events.handles)
    names = ["round_ids", "counts", "finish_reasons", "flags", "proposed", "accepted"]
    if events.cached_tokens is not None:
        names.append("cached_tokens")
    for name in names:
        if len(getattr(events, name)) != rows:
            raise_invalid(f"{name} must have {rows} rows, got {len(getattr(events, name))}")
    total = int(events.counts.sum(dtype=np.int64))
    if total != len(events.tokens):
        raise_invalid(f"counts say {total} tokens, got {len(events.tokens)}")
    if events.logprobs is not None:
        _check_logprobs(events.logprobs, events.counts)
    _mark_malformed(events)
    return events


def _logprobs_from_pb(message: pb.SessionEvents) -> EventLogprobs | None:
    if not (message.logprob_widths or message.logprobs or message.top_ids):
        return None

    def column(name: str, dtype: np.dtype[np.generic], high: int) -> NDArray[np.generic]:
        return unpack(getattr(message, name), dtype, name, max_len=high)

    widths = column("logprob_widths", UINT8, MAX_EVENT_ROWS)
    values = column("logprobs", FLOAT32, MAX_EVENT_LOGPROBS)
    return EventLogprobs(
        widths=cast("NDArray[np.uint8]", widths),
        values=cast("NDArray[np.float32]", values),
        top_ids=cast("NDArray[np.int32]", column("top_ids", INT32, MAX_EVENT_LOGPROBS)),
    )


def _check_logprobs(logprobs: EventLogprobs, counts: NDArray[np.uint32]) -> None:
    """Raise InvalidMessageError if the sizes of the columns do not match."""
    if len(logprobs.widths) != len(counts):
        raise_invalid(f"logprob_widths must have {len(counts)} rows, got {len(logprobs.widths)}")
    widths = logprobs.widths.astype(np.int64)
    if len(widths) and widths.max() > MAX_TOP_LOGPROBS + 1:
        raise_invalid(f"logprob_widths must be at most {MAX_TOP_LOGPROBS + 1}, got {widths.max()}")
    values = int((counts * widths).sum())
    top_ids = values - int(counts[widths > 0].sum(dtype=np.int64))
    for name, got, wanted in (
        ("logprobs", len(logprobs.values), values),
        ("top_ids", len(logprobs.top_ids), top_ids),
    ):
        if got != wanted:
            raise_invalid(f"{name} must have {wanted} entries, got {got}")


def _mark_malformed(events: SessionEvents) -> None:
    """Set the finish reason of invalid rows to MALFORMED_ROW, in place."""
    bad = ~_KNOWN_REASONS[events.finish_reasons]
    bad |= (events.proposed > MAX_NODES) | (events.accepted > events.proposed)
    if events.cached_tokens is not None:
        bad |= events.cached_tokens > MAX_SEQUENCE_LEN
    wrong = (events.tokens < 0) | (events.tokens >= MAX_VOCAB_SIZE)
    if wrong.any():
        owners = np.repeat(np.arange(len(events.handles)), events.counts)
        bad[owners[wrong]] = True
    if events.logprobs is not None:
        bad |= _senseless_logprobs(events.logprobs, events.counts)
    if bad.any():
        events.finish_reasons[bad] = MALFORMED_ROW


def _senseless_logprobs(logprobs: EventLogprobs, counts: NDArray[np.uint32]) -> NDArray[np.bool_]:
    """Return a mask [n] of the rows that have an invalid log-probability or token id."""
    bad = np.zeros(len(counts), dtype=np.bool_)
    rows = np.arange(len(counts))
    widths = logprobs.widths.astype(np.int64)
    sound = (logprobs.values >= LOWEST_LOGPROB) & (logprobs.values <= 0.0)  # NaN is neither
    if not sound.all():
        bad[np.repeat(rows, counts * widths)[~sound]] = True
    wrong = (logprobs.top_ids < 0) | (logprobs.top_ids >= MAX_VOCAB_SIZE)
    if wrong.any():
        bad[np.repeat(rows, counts * np.maximum(widths - 1, 0))[wrong]] = True
    return bad


def _failure_from_pb(message: pb.SessionFailure) -> SessionFailure:
    after_s = message.retry_after_s if message.HasField("retry_after_s") else None
    return SessionFailure(
        handle=message.handle,
        code=check_text(message.code, "code", empty=True),
        kind=check_text(message.kind, "kind", empty=True),
        message=check_text(message.message, "message", limit=MAX_ERROR_BYTES, empty=True),
        reason=check_text(message.reason, "reason", empty=True),
        retry_after_s=None if after_s is None else check_finite(after_s, "retry_after_s"),
    )


def _spec_to_pb(spec: SessionSpec) -> pb.SessionSpec:
    return pb.SessionSpec(
        session_id=spec.session_id,
        epoch=spec.epoch,
        token_ids=spec.token_ids,
        prompt_len=spec.prompt_len,
        max_new_tokens=spec.max_new_tokens,
        stop_token_ids=spec.stop_token_ids,
        min_new_tokens=spec.min_new_tokens,
        sampling=sampling_to_pb(spec.sampling),
        plan=plan_to_pb(spec.plan),
        drafter_id=spec.drafter_id,
        priority=spec.priority,
        top_logprobs=spec.top_logprobs,
        structured_output=structured_to_pb(spec.structured_output),
        token_limits=token_limits_to_pb(spec.token_limits),
        thinking_budget=_budget_to_pb(spec.thinking_budget),
        traceparent=spec.traceparent,
    )


def _budget_to_pb(budget: ThinkingBudget | None) -> pb.ThinkingBudget | None:
    if budget is None:
        return None
    return pb.ThinkingBudget(
        max_tokens=budget.max_tokens,
        open_tag=budget.open_tag,
        open_ids=budget.open_ids,
        close_tag=budget.close_tag,
        close_ids=budget.close_ids,
    )


def _budget_from_pb(message: pb.SessionSpec) -> ThinkingBudget | None:
    if not message.HasField("thinking_budget"):
        return None
    budget = message.thinking_budget
    where = "thinking_budget"
    max_tokens = check_number(budget.max_tokens, f"{where}.max_tokens", high=MAX_THINKING_TOKENS)
    open_tag = check_text(budget.open_tag, f"{where}.open_tag", limit=MAX_TAG_BYTES, empty=True)
    close_tag = check_text(budget.close_tag, f"{where}.close_tag", limit=MAX_TAG_BYTES)
    with convert_validation_errors(where):
        return ThinkingBudget(
            max_tokens=max_tokens,
            open_tag=open_tag,
            open_ids=check_token_ids(budget.open_ids, f"{where}.open_ids", high=MAX_TAG_TOKENS),
            close_tag=close_tag,
            close_ids=check_token_ids(budget.close_ids, f"{where}.close_ids", high=MAX_TAG_TOKENS),
        )


def _drafter_id(message: pb.SessionSpec | pb.SessionMove | pb.SessionMoved) -> DrafterId | None:
    if not message.HasField("drafter_id"):
        return None
    return DrafterId(check_text(message.drafter_id, "drafter_id"))


def _spec_from_pb(message: pb.SessionSpec) -> SessionSpec:
    ids = check_token_ids(message.token_ids, "token_ids", high=MAX_SEQUENCE_LEN)
    if not ids:
        raise_invalid("token_ids must not be empty")
    asked = message.top_logprobs if message.HasField("top_logprobs") else None
    return SessionSpec(
        session_id=SessionId(check_text(message.session_id, "session_id")),
        epoch=message.epoch,
        token_ids=ids,
        prompt_len=check_number(message.prompt_len, "prompt_len", high=len(ids)),
        max_new_tokens=check_number(
            message.max_new_tokens, "max_new_tokens", low=1, high=MAX_SEQUENCE_LEN
        ),
        stop_token_ids=check_token_ids(
            message.stop_token_ids, "stop_token_ids", high=MAX_STOP_TOKEN_IDS
        ),
        min_new_tokens=check_number(
            message.min_new_tokens, "min_new_tokens", high=MAX_SEQUENCE_LEN
        ),
        sampling=verifier_sampling_from_pb(message.sampling),
        plan=plan_from_pb(message.plan),
        drafter_id=_drafter_id(message),
        priority=check_number(message.priority, "priority", low=-MAX_PRIORITY, high=MAX_PRIORITY),
        top_logprobs=(
            None if asked is None else check_number(asked, "top_logprobs", high=MAX_TOP_LOGPROBS)
        ),
        structured_output=structured_from_pb(message),
        token_limits=token_limits_from_pb(message),
        thinking_budget=_budget_from_pb(message),
        traceparent=check_traceparent(message.traceparent),
    )
