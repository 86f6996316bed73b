"""Handshake with a verifier: hello, welcome, and a shared-memory channel on the same host."""

from __future__ import annotations

import asyncio
import logging

from outrider.errors import OutriderError, UnavailableError
from outrider.transport.interface import DrafterConnection
from outrider.transport.shm import ShmChannel, ShmChannelJoiner
from outrider.wire.messages import Hello, ShmAnswer, ShmOffer, Welcome
from outrider.wire.protocol_check import check_protocol

logger = logging.getLogger(__name__)


async def connect_to_verifier(
    connection: DrafterConnection, hello: Hello, *, timeout_s: float, join: ShmChannelJoiner
) -> ShmChannel | None:
    """Send Hello to the verifier and check its answer. Return the shared-memory channel, or None if
    the verifier offers none or joining fails. `join` runs on a thread of its own.

    Raises UnavailableError if the verifier does not answer with Welcome within `timeout_s` seconds,
    and FailedPreconditionError if the protocol versions differ.
    """
    await connection.send(hello)
    try:
        async with asyncio.timeout(timeout_s):
            answer = await connection.receive()
    except TimeoutError:
        raise UnavailableError("the verifier did not answer Hello in time") from None
    if not isinstance(answer, Welcome):
        raise UnavailableError(f"the verifier began with {type(answer).__name__}, not Welcome")
    check_protocol(
        f"verifier {answer.verifier_id}",
        protocol_version=answer.protocol_version,
        version=answer.version,
    )
    if answer.shm_offer is None:
        return None
    shm_channel = await _joined(answer.shm_offer, join)
    try:
        await connection.send(ShmAnswer(is_joined=shm_channel is not None))
    except BaseException:
        if shm_channel is not None:
            shm_channel.close()
        raise
    return shm_channel


async def _joined(offer: ShmOffer, join: ShmChannelJoiner) -> ShmChannel | None:
    try:
        return await asyncio.to_thread(join, offer)
    except OutriderError as error:
        logger.info("no shared-memory channel: %s", error.message)
        return None
