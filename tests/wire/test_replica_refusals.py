"""Messages about replicas are refused where a field is beyond its bounds, and accepted at them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from outrider.errors import InvalidMessageError
from outrider.wire import codec
from outrider.wire.messages import ReplicaSessionBegin
from outrider.wire.v1 import common_pb2
from outrider.wire.v1 import exchange_pb2 as pb
from tests.wire.samples import SAMPLES, SAMPLING

BOUNDS = [
    ("replica_offer", "num_slots", 2, 65537),
    ("replica_offer", "max_rows", 1, 65536),
    ("replica_offer", "draft_length", 1, 64),
    ("replica_offer", "max_chunks", 0, 1024),
    ("replica_offer", "chunk_tokens", 1, 1024),
    ("replica_offer", "feature_size", 1, 65536),
    ("replica_offer", "distribution_entries", 0, 4096),
    ("replica_offer", "depth", 1, 64),
    ("replica_offer", "num_blocks", 1, 2**24),
    ("replica_offer", "block_tokens", 1, 1024),
    ("replica_offer", "table_blocks", 1, 2**20),
    ("replica_offer", "vocab_size", 1, 2**24),
    ("replica_session_begin", "slot", 0, 65535),
    ("replica_session_begin", "num_rows", 0, 2**24),
    ("replica_blocks_added", "slot", 0, 65535),
    ("replica_blocks_added", "first", 0, 2**20),
    ("replica_session_end", "slot", 0, 65535),
    ("replica_round_launched", "rows", 0, 65536),
    ("replica_round_launched", "chunks", 0, 1024),
]
INTEGER_DTYPES = [
    common_pb2.TENSOR_DTYPE_INT32,
    common_pb2.TENSOR_DTYPE_INT64,
    common_pb2.TENSOR_DTYPE_UINT16,
]


def verifier_pb(name: str) -> pb.ExchangeResponse:
    """The sample of this name as protobuf has it."""
    return pb.ExchangeResponse.FromString(codec.encode_verifier_message(SAMPLES[name][1]))


def decode_with(name: str, field: str, value: object) -> Any:
    """Decode the verifier's sample of this name with another value in a field."""
    message = verifier_pb(name)
    setattr(getattr(message, name), field, value)
    return codec.decode_verifier_message(message.SerializeToString())


def int32(*values: int) -> bytes:
    return np.array(values, dtype="<i4").tobytes()


@pytest.mark.parametrize(("name", "field", "low", "high"), BOUNDS)
def test_a_number_is_refused_beyond_its_bounds(name: str, field: str, low: int, high: int) -> None:
    assert getattr(decode_with(name, field, low), field) == low
    assert getattr(decode_with(name, field, high), field) == high
    for value in {max(low - 1, 0), high + 1, 2**32 - 1} - {low}:
        with pytest.raises(
            InvalidMessageError, match=rf"{field} must be in \[{low}, {high}\], got {value}"
        ):
            decode_with(name, field, value)


@pytest.mark.parametrize("dtype", [0, *INTEGER_DTYPES, 99])
def test_features_of_an_offer_are_floating_point(dtype: int) -> None:
    with pytest.raises(InvalidMessageError, match=rf"feature_dtype must be one of .*got {dtype}"):
        decode_with("replica_offer", "feature_dtype", dtype)


@pytest.mark.parametrize("memory", [0, 3])
def test_memory_is_of_a_kind_that_the_contract_knows(memory: int) -> None:
    with pytest.raises(InvalidMessageError, match=r"memory must be one of \[1, 2\], got"):
        decode_with("replica_offer", "memory", memory)
    ready = pb.ExchangeRequest(replica_ready=pb.ReplicaReady())
    ready.replica_ready.memory = memory  # type: ignore[assignment]
    with pytest.raises(InvalidMessageError, match=r"memory must be one of \[1, 2\], got"):
        codec.decode_drafter_message(ready.SerializeToString())


@pytest.mark.parametrize("field", ["prompt_ids", "output_ids"])
def test_ids_are_refused_beyond_the_vocabularies_that_there_are(field: str) -> None:
    begin = decode_with("replica_session_begin", field, int32(0, 2**24 - 1))
    assert getattr(begin, field) == (0, 2**24 - 1)
    for ids in (int32(1, -1), int32(2**24)):
        with pytest.raises(InvalidMessageError, match=rf"{field} must be in \[0, 16777215\]"):
            decode_with("replica_session_begin", field, ids)


@pytest.mark.parametrize("name", ["replica_session_begin", "replica_blocks_added"])
def test_blocks_are_refused_beyond_their_bounds(name: str) -> None:
    assert decode_with(name, "blocks", b"").blocks == ()
    assert decode_with(name, "blocks", int32(0, 2**24 - 1)).blocks == (0, 2**24 - 1)
    assert len(decode_with(name, "blocks", bytes(4 << 20)).blocks) == 2**20
    for blocks, reason in (
        (b"\0" * 5, "blocks: 5 bytes are not a multiple of 4"),
        (bytes(4 * (2**20 + 1)), "blocks must have at most 1048576 entries, got 1048577"),
        (int32(1, -1), r"blocks must be in \[0, 16777215\], got -1"),
        (int32(2**24), r"blocks must be in \[0, 16777215\], got 16777216"),
    ):
        with pytest.raises(InvalidMessageError, match=reason):
            decode_with(name, "blocks", blocks)


def test_sampling_of_a_session_brings_a_key_and_never_the_seed() -> None:
    begin = ReplicaSessionBegin(slot=1, blocks=(), sampling=SAMPLING, num_rows=0)
    encoded = codec.encode_verifier_message(begin)
    decoded = codec.decode_verifier_message(encoded)
    assert isinstance(decoded, ReplicaSessionBegin)
    assert decoded.sampling == SAMPLING.for_drafter()
    message = pb.ExchangeResponse.FromString(encoded)
    assert message.replica_session_begin.sampling.seed == 0
    message.replica_session_begin.sampling.ClearField("draft_key")
    with pytest.raises(InvalidMessageError, match="must bring a drafter's key"):
        codec.decode_verifier_message(message.SerializeToString())


def test_a_refusal_says_why_within_the_bounds() -> None:
    for reason, why in (("", "reason must not be empty"), ("\u00e9" * 4097, "at most 8192 bytes")):
        message = pb.ExchangeRequest(replica_refused=pb.ReplicaRefused(reason=reason))
        with pytest.raises(InvalidMessageError, match=why):
            codec.decode_drafter_message(message.SerializeToString())
