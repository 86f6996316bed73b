"""Public entry point of `outrider.wire`: every internal message to bytes and back.

    encode_X(message) -> bytes        never fails on a valid dataclass; the same bytes every time
    decode_X(bytes) -> message        InvalidMessageError for anything else than a valid message
    encode_verdicts(verdicts)         their bytes in pieces, features without a copy
    encode_Xs(messages) -> frames     several exchange messages a frame
    decode_Xs(frame) -> messages      the InvalidMessageError in a malformed one's place

Decoding bounds every size and checks every field that means the same to all receivers. The reader
checks the entries of a round (`valid_proposals` for a verifier).
"""

from __future__ import annotations

from outrider.wire.control_codec import (
    decode_attach,
    decode_close_session,
    decode_detach,
    decode_drafter_info,
    decode_drain,
    decode_set_plan,
    decode_verifier_info,
    encode_close_session,
    encode_drafter_info,
    encode_drain,
    encode_set_plan,
    encode_verifier_address,
    encode_verifier_info,
)
from outrider.wire.exchange_codec import (
    decode_drafter_message,
    decode_drafter_messages,
    decode_verifier_message,
    decode_verifier_messages,
    encode_drafter_message,
    encode_drafter_messages,
    encode_verifier_message,
    encode_verifier_messages,
)
from outrider.wire.round_codec import encode_verdicts
from outrider.wire.session_codec import (
    decode_sessions_message,
    decode_sessions_request,
    encode_sessions_message,
    encode_sessions_request,
)

__all__ = [
    "decode_close_session",
    "decode_drafter_info",
    "decode_drafter_message",
    "decode_drafter_messages",
    "decode_sessions_message",
    "decode_sessions_request",
    "decode_set_plan",
    "decode_drain",
    "decode_attach",
    "decode_detach",
    "decode_verifier_info",
    "decode_verifier_message",
    "decode_verifier_messages",
    "encode_close_session",
    "encode_drafter_info",
    "encode_drafter_message",
    "encode_drafter_messages",
    "encode_sessions_message",
    "encode_sessions_request",
    "encode_set_plan",
    "encode_drain",
    "encode_verdicts",
    "encode_verifier_address",
    "encode_verifier_info",
    "encode_verifier_message",
    "encode_verifier_messages",
]
