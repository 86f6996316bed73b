"""Session streams to the verifiers: one each, opened for its first session."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from outrider.ids import DrafterId, VerifierId
from outrider.transport.session_stream import SessionStream
from outrider_router.base.metrics import RouterMetrics
from outrider_router.fleet.peers import VerifierPeer
from outrider_router.fleet.registry import PeerRegistry
from outrider_router.requests.drafter_rebalancer import DrafterRebalancer
from outrider_router.requests.resumption.log_records import EmittedRow
from outrider_router.requests.session_output import EventDispatcher, SessionFeed
from outrider_router.requests.wakeup_pacer import WakeupPacer


class VerifierStreams:
    """Session streams of one router; they report the state of peers to registry and rebalancer."""

    def __init__(
        self,
        metrics: RouterMetrics,
        *,
        registry: PeerRegistry,
        rebalancer: DrafterRebalancer,
        clock: Callable[[], float],
        on_emitted: Callable[[list[EmittedRow]], None],
        on_draining: Callable[[VerifierPeer, float], None],
    ) -> None:
        """`on_emitted` logs what was emitted before it is told; `on_draining` hears which verifier
        stops in how many seconds."""
        self.pacer = WakeupPacer(clock)
        """When messages to clients leave, of all streams."""
        self._metrics = metrics
        self._registry = registry
        self._rebalancer = rebalancer
        self._clock = clock
        self._on_emitted = on_emitted
        self._on_draining = on_draining
        self._streams: dict[VerifierPeer, SessionStream[SessionFeed]] = {}
        """Not by address: another verifier may come to the address of one that is gone."""

    async def close(self) -> None:
        """Close all of them."""
        for stream in self._streams.values():
            await stream.close()

    def drop_verifier(self, verifier_id: VerifierId) -> None:
        """A verifier is gone: its sessions are, too."""
        for peer, stream in self._streams.items():
            if peer.info is not None and peer.info.verifier_id == verifier_id:
                stream.close_in_background()

    def get_stream(self, peer: VerifierPeer) -> SessionStream[SessionFeed]:
        """The stream to a verifier."""
        stream = self._streams.get(peer)
        if stream is None:
            known = self._registry.verifiers
            for gone in [other for other in self._streams if known.get(other.address) is not other]:
                # It was lost before it was forgotten: nothing is open there.
                del self._streams[gone]
            stream = self._streams[peer] = self._make(peer)
        return stream

    def _make(self, peer: VerifierPeer) -> SessionStream[SessionFeed]:
        assert peer.control is not None, peer.address
        sink = EventDispatcher(
            self._metrics,
            self.pacer,
            self._clock,
            on_events=lambda: self._registry.record_heartbeat(peer),
            on_drafter_lost=partial(self._drafter_lost, peer),
            on_emitted=self._on_emitted,
        )
        return SessionStream(
            peer.control.sessions,
            sink.deliver_events,
            on_lost=lambda error: self._registry.mark_verifier_lost(peer, error.message),
            on_draining=lambda seconds: self._on_draining(peer, seconds),
        )

    def _drafter_lost(self, peer: VerifierPeer, drafter_id: DrafterId) -> None:
        self._registry.mark_drafter_detached(peer, drafter_id)
        self._rebalancer.wake_up()
