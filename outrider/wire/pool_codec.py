"""Codec of the messages of `PoolService`: adding and removing drafters."""

from __future__ import annotations

from typing import NamedTuple

from outrider.wire.checks import check_text
from outrider.wire.limits import MAX_ADDRESS_BYTES
from outrider.wire.v1 import pool_pb2 as pb


class RemovedDrafter(NamedTuple):
    """Counts of the sessions that a drafter had when it was removed."""

    num_moved: int
    """Number of sessions that moved to other drafters."""
    num_remaining: int
    """Number of sessions that no other drafter could take; they decode without speculation."""


def add_drafter_to_pb(address: str) -> pb.AddDrafterRequest:
    """Encode a request to add the drafter at an address."""
    return pb.AddDrafterRequest(address=address)


def remove_drafter_to_pb(address: str) -> pb.RemoveDrafterRequest:
    """Encode a request to remove the drafter at an address."""
    return pb.RemoveDrafterRequest(address=address)


def address_from_pb(message: pb.AddDrafterRequest | pb.RemoveDrafterRequest) -> str:
    """Decode the drafter's address in a request to add or remove the drafter."""
    return check_text(message.address, "address", limit=MAX_ADDRESS_BYTES)


def removed_to_pb(removed: RemovedDrafter) -> pb.RemoveDrafterResponse:
    """Encode the response to the removal of a drafter."""
    return pb.RemoveDrafterResponse(moved=removed.num_moved, left=removed.num_remaining)


def removed_from_pb(message: pb.RemoveDrafterResponse) -> RemovedDrafter:
    """Decode the response to the removal of a drafter."""
    return RemovedDrafter(message.moved, message.left)
