"""Every message survives encoding, and nothing but a valid message survives decoding."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outrider.errors import InvalidMessageError
from outrider.wire.messages import MalformedOpen
from tests.wire.message_types import KINDS, Kind, plain

BY_NAME = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
QUICK = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@BY_NAME
@QUICK
@given(data=st.data())
def test_a_message_survives_the_round_trip(kind: Kind, data: st.DataObject) -> None:
    message = data.draw(kind.strategy)
    encoded = kind.encode(message)
    decoded = kind.decode(encoded)
    assert plain(decoded) == plain(message)
    assert kind.encode(decoded) == encoded


@BY_NAME
@QUICK
@given(garbage=st.binary(max_size=200))
def test_random_bytes_are_a_message_or_invalid(kind: Kind, garbage: bytes) -> None:
    decode_or_refuse(kind, garbage)


@BY_NAME
@settings(QUICK, max_examples=80)
@given(data=st.data())
def test_a_damaged_message_is_a_message_or_invalid(kind: Kind, data: st.DataObject) -> None:
    damaged = bytearray(kind.encode(data.draw(kind.strategy)))
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(damaged)))
        match data.draw(st.sampled_from(["flip", "cut", "insert", "repeat"])):
            case "flip" if position < len(damaged):
                damaged[position] ^= data.draw(st.integers(1, 255))
            case "cut":
                del damaged[position : position + data.draw(st.integers(1, 8))]
            case "insert":
                damaged[position:position] = data.draw(st.binary(min_size=1, max_size=8))
            case _:
                damaged += damaged[position:]
    decode_or_refuse(kind, bytes(damaged))


def decode_or_refuse(kind: Kind, data: bytes) -> None:
    try:
        decoded = kind.decode(data)
    except InvalidMessageError as error:
        assert error.message
        return
    if isinstance(decoded, MalformedOpen):
        assert decoded.error.message
    else:
        # What was taken for a message must be one: it survives its own round trip.
        assert plain(kind.decode(kind.encode(decoded))) == plain(decoded)
