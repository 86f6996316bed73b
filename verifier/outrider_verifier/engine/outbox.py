"""Outbox collects the effects that the engine thread posts, until they are passed on. Used on the
engine thread only."""

from __future__ import annotations

from collections.abc import Callable

from outrider import timeline
from outrider_verifier.exchange.shm_channels import DrafterShmChannels
from outrider_verifier.state.effects import Effect, EventBatch, SendMessage, messages_by_link


class Outbox:
    """Collects effects and passes them on together.

    Messages to drafters with a shared-memory channel are written to it; all other effects go to the
    asyncio thread.
    """

    def __init__(
        self, shm_channels: DrafterShmChannels, send: Callable[[list[Effect]], None]
    ) -> None:
        """Create an empty outbox. `send` passes effects to the asyncio thread. It raises
        RuntimeError if the event loop of that thread is closed."""
        self._shm_channels, self._send = shm_channels, send
        self.effects: list[Effect] = []
        """Effects in the order in which they were posted."""
        self._events: EventBatch | None = None
        """The batch to which the next event is added; None if no batch is open."""
        self.is_held = False
        """Whether the effects are held back until the next round is submitted."""
        self.is_closed = False
        """Whether the asyncio thread no longer accepts effects."""

    def post_effect(self, effect: Effect) -> None:
        """Add an effect, to be passed on by the next `flush`."""
        self.effects.append(effect)

    def pending_events(self) -> EventBatch:
        """Return the batch of events to send next. Events may be added until the next `flush`."""
        if self._events is None:
            self._events = EventBatch()
            self.post_effect(self._events)
        return self._events

    def take_effects(self) -> list[Effect]:
        """Remove and return all effects. Later events go to a new batch."""
        effects, self.effects, self._events = self.effects, [], None
        return effects

    def flush(self) -> bool:
        """Pass on all effects. Return True if some of them were for the asyncio thread."""
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
            # The asyncio thread has ended, so no command will come either.
            self.is_closed = True
        return True

    def flush_unless_held(self) -> None:
        """Pass on all effects, unless they are held back until the next round is submitted."""
        if not self.is_held:
            self.flush()

    def _send_by_shm(self, effects: list[Effect]) -> list[Effect]:
        """Write messages to the shared-memory channels of their drafters. Return the remaining
        effects."""
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
