"""A session's events pumped into a mailbox, for transports that hand them on piecewise."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from outrider.transport.base import VerifierEndpoint
from outrider.transport.mailbox import Mailbox
from outrider.transport.status import typed
from outrider.wire.messages import SessionEvent, SessionSpec

SESSION_EVENTS = 64
"""Events of a session that wait for a slow reader before its verifier has to."""

SessionMailbox = Mailbox[SessionEvent | None]
"""Events in order, then None."""


def session_mailbox() -> SessionMailbox:
    """An empty mailbox for one session."""
    return Mailbox(max_items=SESSION_EVENTS)


async def pump_events(
    endpoint: VerifierEndpoint, spec: SessionSpec, mailbox: SessionMailbox
) -> None:
    """Serve the session until it ends; cancelling this closes the session."""
    try:
        events = endpoint.open_session(spec)
        if isinstance(events, AsyncGenerator):
            async with aclosing(events):
                async for event in events:
                    await mailbox.put(event)
        else:
            async for event in events:
                await mailbox.put(event)
        await mailbox.put(None)
    except Exception as error:
        mailbox.close(typed(error))
