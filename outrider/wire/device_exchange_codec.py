"""Codec of the messages about a replica; decoding validates every field.

Decoding does not compare slots and blocks with the sizes of the replica. The replica itself does
that.
"""

from __future__ import annotations

from typing import cast

import numpy as np
from numpy.typing import NDArray

from outrider.wire.checks import check_number, check_text, raise_invalid
from outrider.wire.common_codec import (
    MEMORY_KINDS,
    MEMORY_KINDS_FROM_PB,
    drafter_sampling_from_pb,
    require_member,
    sampling_to_pb,
)
from outrider.wire.device_exchange import (
    ReplicaAnswer,
    ReplicaBlocksAdded,
    ReplicaCommand,
    ReplicaOffer,
    ReplicaReady,
    ReplicaRefused,
    ReplicaRoundLaunched,
    ReplicaSessionBegin,
    ReplicaSessionEnd,
)
from outrider.wire.limits import (
    MAX_AHEAD_ROWS,
    MAX_BLOCK_TOKENS,
    MAX_CHUNK_TOKENS,
    MAX_DRAFT_LENGTH,
    MAX_ERROR_BYTES,
    MAX_EXCHANGE_DEPTH,
    MAX_FAN_OUT,
    MAX_FEATURE_WIDTH,
    MAX_GPU_BYTES,
    MAX_KV_BLOCKS,
    MAX_REPLICA_SLOTS,
    MAX_ROUND_CHUNKS,
    MAX_ROUND_ROWS,
    MAX_SEQUENCE_LEN,
    MAX_SLOT_ENTRIES,
    MAX_TABLE_BLOCKS,
    MAX_VOCAB_SIZE,
)
from outrider.wire.tensors import DTYPES_FROM_PB, DTYPES_TO_PB, FLOAT_DTYPES, INT32, unpack
from outrider.wire.v1 import exchange_pb2 as pb

_FEATURE_DTYPES_FROM_PB = {
    value: dtype for value, dtype in DTYPES_FROM_PB.items() if dtype in FLOAT_DTYPES
}


def replica_command_to_pb(message: ReplicaCommand) -> pb.ExchangeResponse:
    """Encode a verifier's message about a replica."""
    match message:
        case ReplicaOffer():
            return pb.ExchangeResponse(replica_offer=_offer_to_pb(message))
        case ReplicaSessionBegin():
            begin = pb.ReplicaSessionBegin(
                slot=message.slot,
                blocks=_pack_int32s(message.blocks),
                sampling=sampling_to_pb(message.sampling.for_drafter()),
                num_rows=message.num_rows,
                prompt_ids=_pack_int32s(message.prompt_ids),
                output_ids=_pack_int32s(message.output_ids),
            )
            return pb.ExchangeResponse(replica_session_begin=begin)
        case ReplicaBlocksAdded():
            added = pb.ReplicaBlocksAdded(
                slot=message.slot, first=message.first, blocks=_pack_int32s(message.blocks)
            )
            return pb.ExchangeResponse(replica_blocks_added=added)
        case ReplicaSessionEnd():
            return pb.ExchangeResponse(replica_session_end=pb.ReplicaSessionEnd(slot=message.slot))
        case ReplicaRoundLaunched():
            launched = pb.ReplicaRoundLaunched(
                rows=message.rows,
                chunks=message.chunks,
                sampled=message.is_sampled,
                ahead=message.is_ahead,
                rejection=message.has_rejection,
            )
            return pb.ExchangeResponse(replica_round_launched=launched)


def replica_offer_from_pb(message: pb.ReplicaOffer) -> ReplicaOffer:
    """Decode and validate a ReplicaOffer."""
    return ReplicaOffer(
        # One slot more than the sessions' slots, for padding.
        num_slots=check_number(message.num_slots, "num_slots", low=2, high=MAX_REPLICA_SLOTS + 1),
        max_rows=check_number(message.max_rows, "max_rows", low=1, high=MAX_ROUND_ROWS),
        draft_length=check_number(
            message.draft_length, "draft_length", low=1, high=MAX_DRAFT_LENGTH
        ),
        max_chunks=check_number(message.max_chunks, "max_chunks", high=MAX_ROUND_CHUNKS),
        chunk_tokens=check_number(
            message.chunk_tokens, "chunk_tokens", low=1, high=MAX_CHUNK_TOKENS
        ),
        feature_size=check_number(
            message.feature_size, "feature_size", low=1, high=MAX_FEATURE_WIDTH
        ),
        feature_dtype=require_member(
            _FEATURE_DTYPES_FROM_PB, message.feature_dtype, "feature_dtype"
        ),
        distribution_entries=check_number(
            message.distribution_entries, "distribution_entries", high=MAX_SLOT_ENTRIES
        ),
        depth=check_number(message.depth, "depth", low=1, high=MAX_EXCHANGE_DEPTH),
        num_blocks=check_number(message.num_blocks, "num_blocks", low=1, high=MAX_KV_BLOCKS),
        block_tokens=check_number(
            message.block_tokens, "block_tokens", low=1, high=MAX_BLOCK_TOKENS
        ),
        table_blocks=check_number(
            message.table_blocks, "table_blocks", low=1, high=MAX_TABLE_BLOCKS
        ),
        vocab_size=check_number(message.vocab_size, "vocab_size", low=1, high=MAX_VOCAB_SIZE),
        memory=require_member(MEMORY_KINDS_FROM_PB, message.memory, "memory"),
        fan_out=check_number(message.fan_out, "fan_out", high=MAX_FAN_OUT),
        ahead_rows=check_number(message.ahead_rows, "ahead_rows", high=MAX_AHEAD_ROWS),
        gpu=check_text(message.gpu, "gpu", limit=MAX_GPU_BYTES, empty=True),
    )


def replica_session_begin_from_pb(message: pb.ReplicaSessionBegin) -> ReplicaSessionBegin:
    """Decode and validate a ReplicaSessionBegin."""
    return ReplicaSessionBegin(
        slot=_check_slot(message.slot),
        blocks=_unpack_blocks(message.blocks),
        sampling=drafter_sampling_from_pb(message.sampling),
        num_rows=check_number(message.num_rows, "num_rows", high=MAX_SEQUENCE_LEN),
        prompt_ids=_unpack_ids(message.prompt_ids, "prompt_ids"),
        output_ids=_unpack_ids(message.output_ids, "output_ids"),
    )


def replica_blocks_added_from_pb(message: pb.ReplicaBlocksAdded) -> ReplicaBlocksAdded:
    """Decode and validate a ReplicaBlocksAdded."""
    return ReplicaBlocksAdded(
        slot=_check_slot(message.slot),
        first=check_number(message.first, "first", high=MAX_TABLE_BLOCKS),
        blocks=_unpack_blocks(message.blocks),
    )


def replica_session_end_from_pb(message: pb.ReplicaSessionEnd) -> ReplicaSessionEnd:
    """Decode and validate a ReplicaSessionEnd."""
    return ReplicaSessionEnd(slot=_check_slot(message.slot))


def replica_round_from_pb(message: pb.ReplicaRoundLaunched) -> ReplicaRoundLaunched:
    """Decode and validate a ReplicaRoundLaunched."""
    return ReplicaRoundLaunched(
        rows=check_number(message.rows, "rows", high=MAX_ROUND_ROWS),
        chunks=check_number(message.chunks, "chunks", high=MAX_ROUND_CHUNKS),
        is_sampled=message.sampled,
        is_ahead=message.ahead,
        has_rejection=message.rejection,
    )


def replica_answer_to_pb(message: ReplicaAnswer) -> pb.ExchangeRequest:
    """Encode a drafter's answer to a ReplicaOffer."""
    match message:
        case ReplicaReady():
            ready = pb.ReplicaReady(memory=MEMORY_KINDS[message.memory])
            return pb.ExchangeRequest(replica_ready=ready)
        case ReplicaRefused():
            return pb.ExchangeRequest(replica_refused=pb.ReplicaRefused(reason=message.reason))


def replica_ready_from_pb(message: pb.ReplicaReady) -> ReplicaReady:
    """Decode and validate a ReplicaReady."""
    return ReplicaReady(memory=require_member(MEMORY_KINDS_FROM_PB, message.memory, "memory"))


def replica_refused_from_pb(message: pb.ReplicaRefused) -> ReplicaRefused:
    """Decode and validate a ReplicaRefused."""
    return ReplicaRefused(reason=check_text(message.reason, "reason", limit=MAX_ERROR_BYTES))


def _offer_to_pb(offer: ReplicaOffer) -> pb.ReplicaOffer:
    return pb.ReplicaOffer(
        num_slots=offer.num_slots,
        max_rows=offer.max_rows,
        draft_length=offer.draft_length,
        max_chunks=offer.max_chunks,
        chunk_tokens=offer.chunk_tokens,
        feature_size=offer.feature_size,
        feature_dtype=DTYPES_TO_PB[offer.feature_dtype],
        distribution_entries=offer.distribution_entries,
        depth=offer.depth,
        num_blocks=offer.num_blocks,
        block_tokens=offer.block_tokens,
        table_blocks=offer.table_blocks,
        vocab_size=offer.vocab_size,
        memory=MEMORY_KINDS[offer.memory],
        fan_out=offer.fan_out,
        ahead_rows=offer.ahead_rows,
        gpu=offer.gpu,
    )


def _check_slot(value: int) -> int:
    return check_number(value, "slot", high=MAX_REPLICA_SLOTS - 1)


def _pack_int32s(values: tuple[int, ...]) -> bytes:
    return np.array(values, dtype=INT32).tobytes()


def _unpack_int32s(data: bytes, name: str, *, max_len: int, count: int) -> tuple[int, ...]:
    """Decode packed int32 numbers. Raises InvalidMessageError if there are more than `max_len` or
    one is not in [0, count)."""
    numbers = cast("NDArray[np.int32]", unpack(data, INT32, name, max_len=max_len))
    wrong = (numbers < 0) | (numbers >= count)
    if wrong.any():
        raise_invalid(f"{name} must be in [0, {count - 1}], got {numbers[wrong][0]}")
    return tuple(numbers.tolist())


def _unpack_ids(data: bytes, name: str) -> tuple[int, ...]:
    return _unpack_int32s(data, name, max_len=MAX_SEQUENCE_LEN, count=MAX_VOCAB_SIZE)


def _unpack_blocks(data: bytes) -> tuple[int, ...]:
    return _unpack_int32s(data, "blocks", max_len=MAX_TABLE_BLOCKS, count=MAX_KV_BLOCKS)
