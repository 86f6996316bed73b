"""Public entry point of `outrider.wire`: converts internal messages to bytes and back.

    encode_X(message) -> bytes        is deterministic and never fails for a valid dataclass
    decode_X(bytes) -> message        raises InvalidMessageError if the message is not valid
    encode_verdicts(verdicts)         returns the bytes in pieces and does not copy features
    encode_Xs(messages) -> frames     joins several exchange messages into a frame
    decode_Xs(frame) -> messages      returns an InvalidMessageError for each malformed message

Decoding limits every size and checks every field whose valid values are the same for all receivers.
Receivers check the single verdicts or proposals of a message themselves (a verifier by
`valid_proposals`).
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
