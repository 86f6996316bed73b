"""Several messages in one frame: what is bad costs itself, and nothing hostile costs much."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.errors import InvalidMessageError
from outrider.wire import codec, exchange_codec
from outrider.wire.bundles import join_messages, split_frame
from outrider.wire.limits import MAX_BUNDLE_BYTES, MAX_BUNDLE_MESSAGES, MAX_MESSAGE_BYTES
from outrider.wire.messages import Heartbeat
from outrider.wire.v1 import exchange_pb2 as pb
from tests.wire.message_types import plain
from tests.wire.samples import SAMPLES

VERDICT = SAMPLES["verdicts"][1]
GOOD = codec.encode_verifier_message(VERDICT)
BEAT = codec.encode_verifier_message(Heartbeat(1))


def bundle(*members: bytes) -> bytes:
    """A frame with a bundle of any bytes, also of one."""
    parts = [b"\x7a" + _varint(len(member)) + member for member in members]
    return b"".join(parts)


def _varint(value: int) -> bytes:
    head = b""
    while value > 127:
        head, value = head + bytes([value & 127 | 128]), value >> 7
    return head + bytes([value])


def only_error(frame: bytes) -> str:
    (error,) = codec.decode_verifier_messages(frame)
    assert isinstance(error, InvalidMessageError)
    return error.message


@given(st.lists(st.binary(max_size=300), max_size=12), st.integers(0, 400))
def test_joined_messages_are_split_into_the_same(messages: list[bytes], max_bytes: int) -> None:
    # A message that is sent alone is not looked at; so that it may be anything, it is none here.
    frames = join_messages(messages, max_bytes=max_bytes)
    found = [
        bytes(member)
        for frame in frames
        for member in (split_frame(frame) if frame not in messages else [frame])
    ]
    assert found == messages
    assert all(len(frame) <= max_bytes for frame in frames if frame not in messages)


def test_a_bundle_is_what_protobuf_makes_of_the_messages() -> None:
    frame = pb.ExchangeResponse(
        bundle=[pb.ExchangeResponse.FromString(GOOD), pb.ExchangeResponse.FromString(BEAT)]
    )
    (joined,) = join_messages([GOOD, BEAT])
    assert joined == frame.SerializeToString()


def test_messages_of_a_round_are_what_protobuf_makes_of_them() -> None:
    assert pb.ExchangeResponse.FromString(GOOD).SerializeToString(deterministic=True) == GOOD
    drafts = codec.encode_drafter_message(SAMPLES["proposals"][1])
    assert pb.ExchangeRequest.FromString(drafts).SerializeToString(deterministic=True) == drafts


def test_a_message_beside_another_is_refused() -> None:
    for frame in (GOOD + BEAT, BEAT + GOOD, GOOD + GOOD):
        assert "exactly one message" in only_error(frame)


def test_a_message_alone_is_its_own_frame() -> None:
    assert codec.encode_verifier_messages([VERDICT]) == [GOOD]
    assert codec.encode_verifier_messages([]) == []


def test_frames_keep_their_size_and_a_larger_message_goes_alone() -> None:
    large = bytes(MAX_BUNDLE_BYTES + 1)
    part = bytes(MAX_BUNDLE_BYTES // 3)
    frames = join_messages([BEAT, large, part, part, part, BEAT])
    assert frames[:2] == [BEAT, large]
    assert [len(split_frame(frame)) for frame in frames[2:]] == [2, 2]
    assert all(len(frame) <= MAX_BUNDLE_BYTES for frame in frames[2:])
    assert [len(split_frame(f)) for f in join_messages([BEAT] * (MAX_BUNDLE_MESSAGES + 2))] == [
        MAX_BUNDLE_MESSAGES,
        2,
    ]


@pytest.mark.parametrize(
    "bad",
    [b"\xff\xffgarbage", b"", b"\x1a\x7f", bundle(GOOD), bundle(GOOD, GOOD)],
    ids=["garbage", "empty", "cut", "bundle of one", "bundle"],
)
def test_a_malformed_member_costs_only_itself(bad: bytes) -> None:
    found: list[Any] = list(codec.decode_verifier_messages(bundle(GOOD, bad, BEAT)))
    assert plain(found[0]) == plain(VERDICT)
    assert isinstance(found[1], InvalidMessageError) and found[1].message
    assert found[2:] == [Heartbeat(1)]


def test_a_member_whose_content_is_bad_costs_only_itself() -> None:
    short = pb.ExchangeResponse.FromString(GOOD)
    short.verdicts.tokens = b""
    first, second = codec.decode_verifier_messages(bundle(short.SerializeToString(), GOOD))
    assert isinstance(first, InvalidMessageError) and "must have 5 entries" in first.message
    assert plain(second) == plain(VERDICT)


def test_bundles_do_not_nest() -> None:
    assert "must not hold bundles" in only_error(bundle(bundle(GOOD)))
    for decode in (codec.decode_verifier_message, codec.decode_drafter_message):
        with pytest.raises(InvalidMessageError, match="must not hold bundles"):
            decode(bundle(GOOD))


def test_depth_is_not_followed() -> None:
    nested = GOOD
    for _ in range(5000):
        nested = bundle(nested)
    assert "must not hold bundles" in only_error(nested)


def test_an_empty_frame_and_an_empty_member_hold_nothing() -> None:
    assert "must hold" in only_error(b"")
    assert "must hold" in only_error(bundle(b""))


@pytest.mark.parametrize("frame", [GOOD + bundle(BEAT), bundle(BEAT) + GOOD])
def test_a_message_beside_a_bundle_is_refused(frame: bytes) -> None:
    assert "not both" in only_error(frame)


def test_what_newer_peers_add_beside_a_bundle_is_ignored() -> None:
    others = [b"\xa0\x38\x01", b"\xa1\x38" + bytes(8), b"\xa2\x38\x02ab", b"\xa5\x38" + bytes(4)]
    frame = b"".join(others) + bundle(BEAT) + b"".join(others) + bundle(BEAT)
    assert codec.decode_verifier_messages(frame) == [Heartbeat(1)] * 2


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (bundle(BEAT) + b"\x7a\x05abcd", "not a sequence of fields"),
        (bundle(BEAT) + b"\x7a", "cut short"),
        (bundle(BEAT) + b"\xff" * 11, "cut short"),
        (bundle(BEAT) + b"\x7a" + b"\xff" * 9 + b"\x01", "not a sequence of fields"),
        (bundle(BEAT) + b"\x78\x01", "must hold messages"),
        (bundle(BEAT) + b"\x00\x01", "not a sequence of fields"),
        (bundle(BEAT) + b"\xa3\x38", "wire type 3"),
        (bundle(BEAT) + b"\xa0\x38\x01" * 65, "at most 64 fields"),
        (bundle(*[BEAT] * (MAX_BUNDLE_MESSAGES + 1)), "at most 1024 messages"),
        (bytes(MAX_MESSAGE_BYTES + 1), "are allowed"),
    ],
)
def test_a_frame_that_cannot_be_told_into_messages_is_one_malformed_message(
    frame: bytes, reason: str
) -> None:
    assert reason in only_error(frame)


@pytest.mark.parametrize("prefix", [b"", b"\xa0\x38\x01", b"\x32\x02\x08\x01"])
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_frame_of_millions_of_empty_bundles_builds_none_of_them(
    prefix: bytes, wrapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange_codec, "parse_message", None)
    frame = prefix + b"\x7a\x00" * (4 << 20)
    assert "at most 1024 messages" in only_error(bundle(frame) if wrapped else frame)


@settings(max_examples=300)
@given(st.lists(st.sampled_from([GOOD, BEAT, b"", b"\x7a\x00", b"\x7a", b"\x0a\xff"]), max_size=6))
def test_any_mixture_gives_messages_and_errors_in_place(members: list[bytes]) -> None:
    found = codec.decode_verifier_messages(bundle(*members))
    if not members:
        members = [b""]
    assert len(found) == len(members)
    for message, member in zip(found, members, strict=True):
        assert isinstance(message, InvalidMessageError) == (member not in (GOOD, BEAT))
