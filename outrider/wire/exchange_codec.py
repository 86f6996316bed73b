"""Codec of exchange messages (verifier and drafter); decoding validates every field.

Decoding does not check the single entries of verdicts and proposals. Their receivers do
(`valid_proposals` at a verifier, the sessions at a drafter), because they know the vocabulary and
the session that an invalid entry belongs to.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TypeVar

from outrider.errors import InvalidMessageError
from outrider.ids import DrafterId, SessionId, VerifierId
from outrider.wire.bundles import Encoded as EncodedFrame
from outrider.wire.bundles import join_messages, refuse_bundle, split_frame
from outrider.wire.checks import (
    check_number,
    check_text,
    check_token_ids,
    check_traceparent,
    parse_message,
    raise_invalid,
)
from outrider.wire.common_codec import (
    LAYOUTS,
    LAYOUTS_FROM_PB,
    METHODS,
    drafter_sampling_from_pb,
    methods_from_pb,
    plan_from_pb,
    plan_to_pb,
    require_member,
    sampling_to_pb,
    structured_from_pb,
    structured_to_pb,
    token_limits_from_pb,
    token_limits_to_pb,
)
from outrider.wire.device_exchange_codec import (
    replica_answer_to_pb,
    replica_blocks_added_from_pb,
    replica_command_to_pb,
    replica_offer_from_pb,
    replica_ready_from_pb,
    replica_refused_from_pb,
    replica_round_from_pb,
    replica_session_begin_from_pb,
    replica_session_end_from_pb,
)
from outrider.wire.limits import (
    MAX_BUNDLE_BYTES,
    MAX_HANDLES,
    MAX_ROUND_SESSIONS,
    MAX_SEQUENCE_LEN,
    MAX_STOP_TOKEN_IDS,
    MAX_VOCAB_SIZE,
)
from outrider.wire.messages import (
    DrafterMessage,
    EncodedMessage,
    Heartbeat,
    Hello,
    PlanChange,
    Proposals,
    ReplicaBlocksAdded,
    ReplicaOffer,
    ReplicaReady,
    ReplicaRefused,
    ReplicaRoundLaunched,
    ReplicaSessionBegin,
    ReplicaSessionEnd,
    SessionEnd,
    SessionsLost,
    SessionStart,
    ShmAnswer,
    ShmOffer,
    Verdicts,
    VerifierMessage,
    Welcome,
)
from outrider.wire.round_codec import (
    PROPOSALS_FIELD,
    VERDICTS_FIELD,
    decode_proposals,
    decode_verdicts,
    encode_proposals,
    encode_verdicts,
    only_member,
    sole_content,
)
from outrider.wire.v1 import common_pb2
from outrider.wire.v1 import exchange_pb2 as pb

MessageT = TypeVar("MessageT")

_SHM_NAME = re.compile("[0-9a-f]{32}")


def encode_drafter_message(message: DrafterMessage) -> bytes:
    """Encode a message of a drafter."""
    match message:
        case EncodedMessage():
            return message.data
        case Proposals():
            return encode_proposals(message)
        case SessionsLost():
            frame = pb.ExchangeRequest(sessions_lost=pb.SessionsLost(handles=message.handles))
        case Heartbeat():
            frame = pb.ExchangeRequest(heartbeat=common_pb2.Heartbeat(sequence=message.sequence))
        case ShmAnswer():
            frame = pb.ExchangeRequest(shm_answer=pb.ShmAnswer(joined=message.is_joined))
        case ReplicaReady() | ReplicaRefused():
            frame = replica_answer_to_pb(message)
        case Hello():
            frame = pb.ExchangeRequest(hello=_hello_to_pb(message))
    return frame.SerializeToString(deterministic=True)


def encode_drafter_messages(
    messages: Sequence[DrafterMessage], *, max_bytes: int = MAX_BUNDLE_BYTES
) -> list[bytes]:
    """Encode messages of a drafter as frames of at most `max_bytes`. A larger message gets a frame
    of its own.
    """
    return join_messages(
        [encode_drafter_message(message) for message in messages], max_bytes=max_bytes
    )


def decode_drafter_messages(frame: EncodedFrame) -> list[DrafterMessage | InvalidMessageError]:
    """Decode the messages of a drafter in a frame, in order. Each malformed message is replaced by
    an InvalidMessageError. A frame that cannot be split counts as one malformed message.
    """
    return _decode_all(frame, _drafter_message, PROPOSALS_FIELD, decode_proposals)


def decode_drafter_message(data: EncodedFrame) -> DrafterMessage:
    """Decode one message of a drafter. Raises InvalidMessageError for invalid data and for a
    bundle.
    """
    refuse_bundle(data)
    return _drafter_message(data)


def _decode_all(
    frame: EncodedFrame,
    decode: Callable[[EncodedFrame], MessageT],
    round_field: int,
    decode_round: Callable[[memoryview], MessageT],
) -> list[MessageT | InvalidMessageError]:
    """Decode all messages of a frame. `decode_round` decodes, without a copy, a frame whose only
    content is the field `round_field`. Every other frame is copied, and `decode` decodes its
    messages.
    """
    try:
        content = sole_content(frame, round_field)
        if content is not None:
            return [decode_round(content)]
        frame = bytes(frame)
        members = split_frame(frame)
    except InvalidMessageError as error:
        return [error]
    messages: list[MessageT | InvalidMessageError] = []
    for member in members:
        try:
            if member is not frame:
                refuse_bundle(member)
            messages.append(decode(member))
        except InvalidMessageError as error:
            messages.append(error)
    return messages


def _drafter_message(data: EncodedFrame) -> DrafterMessage:
    if (drafts := only_member(data, PROPOSALS_FIELD)) is not None:
        return decode_proposals(drafts)
    frame = parse_message(pb.ExchangeRequest, data)
    match frame.WhichOneof("message"):
        case "heartbeat":
            return Heartbeat(frame.heartbeat.sequence)
        case "sessions_lost":
            return SessionsLost(_handles(frame.sessions_lost))
        case "shm_answer":
            return ShmAnswer(frame.shm_answer.joined)
        case "replica_ready":
            return replica_ready_from_pb(frame.replica_ready)
        case "replica_refused":
            return replica_refused_from_pb(frame.replica_refused)
        case "hello":
            return _hello_from_pb(frame.hello)
        case _:
            raise_invalid(
                "a drafter's message must hold hello, shm answer, proposals, losses, replica "
                "answer or heartbeat"
            )


def encode_verifier_message(message: VerifierMessage) -> bytes:
    """Encode a message of a verifier."""
    match message:
        case EncodedMessage():
            return message.data
        case Verdicts():
            return b"".join(encode_verdicts(message))
        case Heartbeat():
            frame = pb.ExchangeResponse(heartbeat=common_pb2.Heartbeat(sequence=message.sequence))
        case SessionStart():
            frame = pb.ExchangeResponse(session_start=_session_start_to_pb(message))
        case SessionEnd():
            frame = pb.ExchangeResponse(session_end=pb.SessionEnd(handle=message.handle))
        case PlanChange():
            frame = pb.ExchangeResponse(
                plan_change=pb.PlanChange(handle=message.handle, plan=plan_to_pb(message.plan))
            )
        case (
            ReplicaOffer()
            | ReplicaSessionBegin()
            | ReplicaBlocksAdded()
            | ReplicaSessionEnd()
            | ReplicaRoundLaunched()
        ):
            frame = replica_command_to_pb(message)
        case Welcome():
            frame = pb.ExchangeResponse(
                welcome=pb.Welcome(
                    protocol_version=message.protocol_version,
                    verifier_id=message.verifier_id,
                    incarnation=message.incarnation,
                    shm_offer=_shm_channel_to_pb(message.shm_offer),
                    version=message.version,
                )
            )
    return frame.SerializeToString(deterministic=True)


def encode_verifier_messages(
    messages: Sequence[VerifierMessage], *, max_bytes: int = MAX_BUNDLE_BYTES
) -> list[bytes]:
    """Encode messages of a verifier as frames of at most `max_bytes`. A larger message gets a frame
    of its own.
    """
    return join_messages(
        [encode_verifier_message(message) for message in messages], max_bytes=max_bytes
    )


def decode_verifier_messages(frame: EncodedFrame) -> list[VerifierMessage | InvalidMessageError]:
    """Decode the messages of a verifier in a frame, in order. Each malformed message is replaced by
    an InvalidMessageError. A frame that cannot be split counts as one malformed message.
    """
    return _decode_all(frame, _verifier_message, VERDICTS_FIELD, decode_verdicts)


def decode_verifier_message(data: EncodedFrame) -> VerifierMessage:
    """Decode one message of a verifier. Raises InvalidMessageError for invalid data and for a
    bundle.
    """
    refuse_bundle(data)
    return _verifier_message(data)


def _verifier_message(data: EncodedFrame) -> VerifierMessage:
    if (told := only_member(data, VERDICTS_FIELD)) is not None:
        return decode_verdicts(told)
    frame = parse_message(pb.ExchangeResponse, data)
    match frame.WhichOneof("message"):
        case "heartbeat":
            return Heartbeat(frame.heartbeat.sequence)
        case "session_start":
            return _session_start_from_pb(frame.session_start)
        case "session_end":
            return SessionEnd(handle=_handle(frame.session_end.handle))
        case "plan_change":
            return PlanChange(
                handle=_handle(frame.plan_change.handle),
                plan=plan_from_pb(frame.plan_change.plan),
            )
        case "replica_round_launched":
            return replica_round_from_pb(frame.replica_round_launched)
        case "replica_blocks_added":
            return replica_blocks_added_from_pb(frame.replica_blocks_added)
        case "replica_session_begin":
            return replica_session_begin_from_pb(frame.replica_session_begin)
        case "replica_session_end":
            return replica_session_end_from_pb(frame.replica_session_end)
        case "replica_offer":
            return replica_offer_from_pb(frame.replica_offer)
        case "welcome":
            return Welcome(
                protocol_version=frame.welcome.protocol_version,
                verifier_id=VerifierId(check_text(frame.welcome.verifier_id, "verifier_id")),
                incarnation=check_text(frame.welcome.incarnation, "incarnation", empty=True),
                shm_offer=_shm_channel_from_pb(frame.welcome),
                version=check_text(frame.welcome.version, "version", empty=True),
            )
        case _:
            raise_invalid("a verifier's message must hold exactly one message")


def _handle(value: int) -> int:
    return check_number(value, "handle", high=MAX_HANDLES - 1)


def _handles(message: pb.SessionsLost) -> tuple[int, ...]:
    check_number(len(message.handles), "lost sessions", low=1, high=MAX_ROUND_SESSIONS)
    handles = tuple(message.handles)
    _handle(max(handles))
    return handles


def _hello_to_pb(hello: Hello) -> pb.Hello:
    return pb.Hello(
        protocol_version=hello.protocol_version,
        drafter_id=hello.drafter_id,
        incarnation=hello.incarnation,
        vocab_size=hello.vocab_size,
        tokenizer_hash=hello.tokenizer_hash,
        methods=[METHODS[method] for method in hello.methods],
        feature_layout=LAYOUTS[hello.feature_layout],
        feature_fingerprint=hello.feature_fingerprint,
        supports_shm=hello.supports_shm,
        feature_offsets=hello.feature_offsets,
        version=hello.version,
    )


def _hello_from_pb(message: pb.Hello) -> Hello:
    return Hello(
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
        supports_shm=message.supports_shm,
        feature_offsets=message.feature_offsets,
        version=check_text(message.version, "version", empty=True),
    )


def _shm_channel_to_pb(shm_channel: ShmOffer | None) -> pb.ShmOffer | None:
    return (
        None if shm_channel is None else pb.ShmOffer(name=shm_channel.name, token=shm_channel.token)
    )


def _shm_channel_from_pb(welcome: pb.Welcome) -> ShmOffer | None:
    if not welcome.HasField("shm_offer"):
        return None
    shm_channel = welcome.shm_offer
    if not _SHM_NAME.fullmatch(shm_channel.name):
        raise_invalid("a shared-memory channel's name must be 32 hexadecimal digits")
    check_number(
        len(shm_channel.token), "bytes of a shared-memory channel's token", low=16, high=16
    )
    return ShmOffer(name=shm_channel.name, token=shm_channel.token)


def _session_start_to_pb(start: SessionStart) -> pb.SessionStart:
    return pb.SessionStart(
        handle=start.handle,
        session_id=start.session_id,
        epoch=start.epoch,
        plan=plan_to_pb(start.plan),
        sampling=sampling_to_pb(start.sampling.for_drafter()),
        max_len=start.max_len,
        prompt_len=start.prompt_len,
        structured_output=structured_to_pb(start.structured_output),
        token_limits=token_limits_to_pb(start.token_limits),
        stop_token_ids=start.stop_token_ids,
        traceparent=start.traceparent,
    )


def _session_start_from_pb(message: pb.SessionStart) -> SessionStart:
    return SessionStart(
        handle=_handle(message.handle),
        session_id=SessionId(check_text(message.session_id, "session_id")),
        epoch=message.epoch,
        plan=plan_from_pb(message.plan),
        sampling=drafter_sampling_from_pb(message.sampling),
        max_len=check_number(message.max_len, "max_len", high=MAX_SEQUENCE_LEN),
        prompt_len=check_number(message.prompt_len, "prompt_len", high=MAX_SEQUENCE_LEN),
        structured_output=structured_from_pb(message),
        token_limits=token_limits_from_pb(message),
        stop_token_ids=check_token_ids(
            message.stop_token_ids, "stop_token_ids", high=MAX_STOP_TOKEN_IDS
        ),
        traceparent=check_traceparent(message.traceparent),
    )
