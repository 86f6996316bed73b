"""Every message type with its strategy and its two directions, and a way to compare messages."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from hypothesis import strategies as st

from outrider.errors import InvalidMessageError
from outrider.ids import RequestId
from outrider.wire import (
    codec,
    inference_codec,
    inference_response_codec,
    pool_codec,
    server_info_codec,
)
from outrider.wire.arrays import FeatureRows
from outrider.wire.v1 import inference_pb2, pool_pb2
from tests.wire.inference_strategies import (
    EVENTS,
    MODELS,
    POSITIONS,
    REQUESTS,
    RESULTS,
    SERVER_INFOS,
)
from tests.wire.strategies import (
    DRAFTER_INFOS,
    DRAFTER_MESSAGES,
    NAMES,
    PLANS,
    REMOVED,
    SESSION_IDS,
    SESSIONS_MESSAGES,
    SESSIONS_REQUESTS,
    VERIFIER_INFOS,
    VERIFIER_MESSAGES,
)


@dataclass(frozen=True)
class Kind:
    """A message type with its strategy and its two directions."""

    name: str
    strategy: st.SearchStrategy[Any]
    encode: Callable[[Any], bytes]
    decode: Callable[[bytes], Any]


def _through(
    name: str,
    strategy: st.SearchStrategy[Any],
    kind: Any,
    to_pb: Callable[[Any], Any],
    from_pb: Callable[[Any], Any],
) -> Kind:
    def decode(data: bytes) -> Any:
        try:
            message = kind.FromString(data)
        except DecodeError as error:  # what the server's interceptor does
            raise InvalidMessageError("not protobuf") from error
        return from_pb(message)

    return Kind(name, strategy, lambda value: to_pb(value).SerializeToString(), decode)


def _bundle(
    name: str,
    strategy: st.SearchStrategy[Any],
    encode: Callable[[Sequence[Any]], list[bytes]],
    decode: Callable[[bytes], Sequence[Any]],
) -> Kind:
    def encode_as_one(messages: Sequence[Any]) -> bytes:
        (frame,) = encode(messages)
        return frame

    def decode_all(data: bytes) -> tuple[Any, ...]:
        messages = decode(data)
        for message in messages:
            if isinstance(message, InvalidMessageError):
                raise message
        return tuple(messages)

    several = st.lists(strategy, min_size=2, max_size=4).map(tuple)
    return Kind(name, several, encode_as_one, decode_all)


KINDS = [
    Kind("drafter", DRAFTER_MESSAGES, codec.encode_drafter_message, codec.decode_drafter_message),
    Kind(
        "verifier", VERIFIER_MESSAGES, codec.encode_verifier_message, codec.decode_verifier_message
    ),
    _bundle(
        "drafter_bundle",
        DRAFTER_MESSAGES,
        codec.encode_drafter_messages,
        codec.decode_drafter_messages,
    ),
    _bundle(
        "verifier_bundle",
        VERIFIER_MESSAGES,
        codec.encode_verifier_messages,
        codec.decode_verifier_messages,
    ),
    Kind(
        "sessions_request",
        SESSIONS_REQUESTS,
        codec.encode_sessions_request,
        codec.decode_sessions_request,
    ),
    Kind(
        "sessions_message",
        SESSIONS_MESSAGES,
        codec.encode_sessions_message,
        codec.decode_sessions_message,
    ),
    Kind(
        "set_plan",
        st.tuples(SESSION_IDS, PLANS),
        lambda pair: codec.encode_set_plan(*pair),
        codec.decode_set_plan,
    ),
    Kind("close_session", SESSION_IDS, codec.encode_close_session, codec.decode_close_session),
    Kind("drain", st.booleans(), codec.encode_drain, codec.decode_drain),
    Kind("address", NAMES, codec.encode_verifier_address, codec.decode_attach),
    Kind("detach", NAMES, codec.encode_verifier_address, codec.decode_detach),
    Kind("verifier_info", VERIFIER_INFOS, codec.encode_verifier_info, codec.decode_verifier_info),
    Kind("drafter_info", DRAFTER_INFOS, codec.encode_drafter_info, codec.decode_drafter_info),
    _through(
        "request",
        REQUESTS,
        inference_pb2.GenerateRequest,
        inference_codec.request_to_pb,
        inference_codec.request_from_pb,
    ),
    _through(
        "stream_request",
        REQUESTS,
        inference_pb2.GenerateStreamRequest,
        inference_codec.stream_request_to_pb,
        inference_codec.stream_request_from_pb,
    ),
    _through(
        "event",
        EVENTS,
        inference_pb2.GenerateStreamResponse,
        inference_response_codec.event_to_pb,
        inference_response_codec.event_from_pb,
    ),
    _through(
        "result",
        RESULTS,
        inference_pb2.GenerateResponse,
        inference_response_codec.result_to_pb,
        inference_response_codec.result_from_pb,
    ),
    _through(
        "resume",
        POSITIONS,
        inference_pb2.ResumeStreamRequest,
        inference_codec.position_to_pb,
        inference_codec.position_from_pb,
    ),
    _through(
        "resumed_event",
        EVENTS,
        inference_pb2.ResumeStreamResponse,
        inference_response_codec.resumed_event_to_pb,
        inference_response_codec.resumed_event_from_pb,
    ),
    _through(
        "abort",
        st.lists(NAMES.map(RequestId), max_size=4).map(tuple),
        inference_pb2.AbortRequest,
        server_info_codec.abort_request_to_pb,
        server_info_codec.abort_request_from_pb,
    ),
    _through(
        "aborted",
        st.lists(NAMES.map(RequestId), max_size=4).map(tuple),
        inference_pb2.AbortResponse,
        server_info_codec.abort_response_to_pb,
        server_info_codec.abort_response_from_pb,
    ),
    _through(
        "server_info",
        SERVER_INFOS,
        inference_pb2.GetServerInfoResponse,
        server_info_codec.server_info_to_pb,
        server_info_codec.server_info_from_pb,
    ),
    _through(
        "models",
        MODELS,
        inference_pb2.ListModelsResponse,
        server_info_codec.models_to_pb,
        server_info_codec.models_from_pb,
    ),
    _through(
        "add_drafter",
        NAMES,
        pool_pb2.AddDrafterRequest,
        pool_codec.add_drafter_to_pb,
        pool_codec.address_from_pb,
    ),
    _through(
        "remove_drafter",
        NAMES,
        pool_pb2.RemoveDrafterRequest,
        pool_codec.remove_drafter_to_pb,
        pool_codec.address_from_pb,
    ),
    _through(
        "removed",
        REMOVED,
        pool_pb2.RemoveDrafterResponse,
        pool_codec.removed_to_pb,
        pool_codec.removed_from_pb,
    ),
]


def plain(value: Any) -> Any:
    """A message as nested tuples of builtins, comparable with ==."""
    if isinstance(value, FeatureRows):
        # How many pieces there are is a matter of who holds them.
        return (value.dtype, plain(value.joined()))
    if dataclasses.is_dataclass(value):
        fields = tuple(plain(getattr(value, f.name)) for f in dataclasses.fields(value))
        return (type(value).__name__, *fields)
    if isinstance(value, np.ndarray):
        return (value.dtype.str, value.shape, value.tobytes())
    if isinstance(value, tuple):
        return tuple(plain(item) for item in value)
    if isinstance(value, float):
        return repr(value)  # NaN equals NaN, and the sign of zero counts
    return value
