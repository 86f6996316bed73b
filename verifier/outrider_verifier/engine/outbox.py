"""Outbox: effects that the engine thread has posted and not yet handed over; engine thread only."""

from __future__ import annotations

from collections.abc import Callable

from outrider import timeline
from outrider_verifier.exchange.shm_channels import DrafterShmChannels
from outrider_verifier.state.effects import Effect, EventBatch, SendMessage, messages_by_link


class Outbox:
    """Collects effects and hands them over together.

    Messages to drafters with a shared-memory channel are written to it; all other effects go to the
    asyncio thread.
    """

    def __init__(
        self, shm_channels: DrafterShmChannels, send: Callable[[list[Effect]], None]
    ) -> None:
        """`send`: gives effects to the asyncio thread; raises RuntimeError if its event loop is
        closed."""
        self._shm_channels, self._send = shm_channels, send
        self.effects: list[Effect] = []
        """Effects in the order in which they were posted."""
        self._events: EventBatch | None = None
        """The batch that the next event joins; None: none is open."""
        self.is_held = False
        """Whether the effects wait until the next round was submitted."""
        self.is_closed = False
        """Whether the asyncio thread takes no effects any more."""

    def post_effect(self, effect: Effect) -> None:
        """Add an effect."""
        self.effects.append(effect)

    def pending_events(self) -> EventBatch:
        """The events that leave next; more may be added until the effects are handed over."""
        if self._events is None:
            self._events = EventBatch()
            self.post_effect(self._events)
        return self._events

    def take_effects(self) -> list[Effect]:
        """Remove and return all effects; no event may join their batch any more."""
        effects, self.effects, self._events = self.effects, [], None
        return effects

    def flush(self) -> bool:
        """Hand over all effects; True if the asyncio thread gets some of them."""
        self.is_held = False
        if not self.effects:
            return False
        began, effects = timeline.now(), self.take_effects()
        others = self._send_by_shm(effects)
        timeline.mark_span("tell", began, len(effects))
        if not others:
            return False
        try:
            self._send(others)
        except RuntimeError:
            # Nobody is left to tell, and no command will come.
            self.is_closed = True
        return True

    def flush_unless_held(self) -> None:
        """Hand over all effects, unless they wait for the next round."""
        if not self.is_held:
            self.flush()

    def _send_by_shm(self, effects: list[Effect]) -> list[Effect]:
        """Write to the shared-memory channels; returns the other effects."""
        mine: list[Effect] = []
        others: list[Effect] = []
        for effect in effects:
            if not isinstance(effect, SendMessage):
                others.append(effect)
            elif self._shm_channels.has_channel(effect.link_id):
                mine.append(effect)
            else:
                others.append(effect.owned())
        for link_id, messages in messages_by_link(mine).items():
            self._shm_channels.send_messages(link_id, messages)
        return others
