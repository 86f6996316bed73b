"""Shared-memory negotiation in call metadata: both ends of a session stream agree on a channel.

The client opens a listener and offers a shared-memory channel in the call's metadata. The server
joins the channel before it answers, and confirms this in its initial metadata. Both ends therefore
know, before the first frame, whether frames use the channel. A server on another host does not find
the listener; the frames then go through the call itself.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from typing import Final

from outrider.errors import OutriderError
from outrider.transport.grpc.draining_channel import Metadata
from outrider.transport.shm import ShmChannel, join_channel_async
from outrider.wire.messages import ShmOffer

logger = logging.getLogger(__name__)

_KEY: Final = "outrider-shm"
_OFFER: Final = re.compile(r"([0-9a-f]{32}):([0-9a-f]{32})")
_JOINED: Final = "joined"


def offer_metadata(offer: ShmOffer) -> Metadata:
    """Return the metadata of a call that offers a shared-memory channel."""
    return ((_KEY, f"{offer.name}:{offer.token.hex()}"),)


def answer_metadata(shm_channel: ShmChannel | None) -> Metadata:
    """Return the initial metadata with which a server confirms that it has joined `shm_channel`.
    They are empty if `shm_channel` is None."""
    return () if shm_channel is None else ((_KEY, _JOINED),)


def is_joined(metadata: Iterable[tuple[str, str | bytes]]) -> bool:
    """Return whether a server's initial metadata say that it has joined the shared-memory
    channel."""
    return any([(key, value) == (_KEY, _JOINED) for key, value in metadata])


async def join_offered_channel(metadata: Iterable[tuple[str, str | bytes]]) -> ShmChannel | None:
    """Join the shared-memory channel that a call offers and return it. Returns None if the call
    offers none or the channel cannot be joined. The frames then go through the call."""
    offered = next((value for key, value in metadata if key == _KEY), None)
    found = _OFFER.fullmatch(offered) if isinstance(offered, str) else None
    if found is None:
        return None
    offer = ShmOffer(name=found[1], token=bytes.fromhex(found[2]))
    try:
        return await join_channel_async(offer)
    except OutriderError as error:
        logger.debug("no shared-memory channel: %s", error.message)
        return None
