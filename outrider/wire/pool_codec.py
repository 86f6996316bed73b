"""Codec of the messages of `PoolService`: adding and removing drafters."""

from __future__ import annotations

from typing import NamedTuple

from outrider.wire.checks import check_text
from outrider.wire.limits import MAX_ADDRESS_BYTES
from outrider.wire.v1 import pool_pb2 as pb


class RemovedDrafter(NamedTuple):
    """Result of a drafter's removal for its sessions."""

    num_moved: int
    """Other drafters took them over."""
    num_remaining: int
    """No other drafter could; they decode plainly."""


def add_drafter_to_pb(address: str) -> pb.AddDrafterRequest:
    """Encode where a drafter is that joins."""
    return pb.AddDrafterRequest(address=address)


def remove_drafter_to_pb(address: str) -> pb.RemoveDrafterRequest:
    """Encode where a drafter is that leaves."""
    return pb.RemoveDrafterRequest(address=address)


def address_from_pb(message: pb.AddDrafterRequest | pb.RemoveDrafterRequest) -> str:
    """Decode a drafter's address."""
    return check_text(message.address, "address", limit=MAX_ADDRESS_BYTES)


def removed_to_pb(removed: RemovedDrafter) -> pb.RemoveDrafterResponse:
    """Encode what became of a drafter's sessions."""
    return pb.RemoveDrafterResponse(moved=removed.num_moved, left=removed.num_remaining)


def removed_from_pb(message: pb.RemoveDrafterResponse) -> RemovedDrafter:
    """Decode what became of a drafter's sessions."""
    return RemovedDrafter(message.moved, message.left)
