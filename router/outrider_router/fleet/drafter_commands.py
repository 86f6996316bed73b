"""Control calls from the router to drafters: attach, detach, drain.

Failed calls are logged and not raised, because without their effect requests lose only speculation.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from outrider.errors import OutriderError
from outrider.transport.interface import DrafterControl

logger = logging.getLogger(__name__)


async def attach_drafter(control: DrafterControl, address: str, verifier: str) -> None:
    """Ask the drafter at `address` to connect to a verifier."""
    facts = {"address": address, "verifier": verifier}
    try:
        await control.attach(verifier)
    except OutriderError as error:
        # The drafter answers, so it is not lost; the next poll tries again.
        logger.warning("drafter attach failed", extra=facts | {"problem": error.message})
    else:
        logger.info("drafter attach requested", extra=facts)


async def detach_drafter(
    control: DrafterControl, address: str, verifiers: Iterable[str], timeout_s: float
) -> None:
    """Ask a drafter to disconnect from the verifiers at these addresses."""
    try:
        async with asyncio.timeout(timeout_s):
            for verifier in verifiers:
                await control.detach(verifier)
    except (OutriderError, TimeoutError) as error:
        # The drafter does not answer; its verifiers detect this themselves.
        logger.info("drafter not detached: %s", error, extra={"address": address})


async def announce_drain(control: DrafterControl, address: str, timeout_s: float) -> None:
    """Ask a drafter to announce to all routers that it will stop."""
    try:
        async with asyncio.timeout(timeout_s):
            await control.set_draining(True)
    except (OutriderError, TimeoutError) as error:
        # The drafter does not answer; other routers detect this themselves.
        logger.info("drafter not drained: %s", error, extra={"address": address})
