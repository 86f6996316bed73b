"""Registry of verifiers and drafters: polls them, attaches drafters and reports lost peers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial

from outrider.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    OutriderError,
    ResourceExhaustedError,
    UnavailableError,
)
from outrider.ids import DrafterId, VerifierId
from outrider.transport.interface import Dialer
from outrider.wire.limits import MAX_PEERS
from outrider.wire.messages import DrafterInfo, VerifierInfo
from outrider_router.base.dns_names import split_addresses
from outrider_router.base.metrics import RouterMetrics
from outrider_router.config import RouterConfig
from outrider_router.fleet import drafter_commands
from outrider_router.fleet.compatibility import (
    PeerState,
    TokenizerIdentity,
    can_serve,
    check_drafter_fits,
    check_no_simulation,
    check_verifier_fits,
    state_after_failure,
)
from outrider_router.fleet.drafter_assignment import (
    DrafterCandidate,
    drafter_candidates,
    is_attached,
    missing_attachments,
)
from outrider_router.fleet.peers import (
    DesiredPeers,
    DrafterPeer,
    PeerStatus,
    VerifierPeer,
    VerifierProgress,
    poll_peer,
    wait_next_poll,
)
from outrider_router.fleet.quarantine import QuarantineManager

logger = logging.getLogger(__name__)


class PeerRegistry:
    """Verifiers and drafters of one router. Callbacks run on the event loop and must not block."""

    def __init__(
        self,
        config: RouterConfig,
        tokenizer: TokenizerIdentity,
        dialer: Dialer,
        metrics: RouterMetrics,
        *,
        clock: Callable[[], float],
        placed: Callable[[], Mapping[DrafterId, int]],
        on_verifier_up: Callable[[VerifierInfo], None],
        on_verifier_lost: Callable[[VerifierId], None],
        on_drafters_changed: Callable[[], None] = lambda: None,
    ) -> None:
        """Create a registry of the addresses in `config` that are not DNS names. `placed` returns
        the number of this router's sessions of each drafter, and `on_drafters_changed` is called
        when sessions should be moved.
        """
        self._dialer = dialer
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._clock = clock
        self._requires_keys = config.api_keys is not None
        self._interval_s = config.poll_interval_s
        self._silence_s = config.peer_timeout_s
        self._stall_s = config.verifier_stall_s
        self._placed = placed
        self._on_verifier_up = on_verifier_up
        self._on_verifier_lost = on_verifier_lost
        self._on_drafters_changed = on_drafters_changed
        self.judge = QuarantineManager(metrics, clock=clock, on_change=on_drafters_changed)
        verifiers, drafters = (
            split_addresses(config.verifiers)[0],
            split_addresses(config.drafters)[0],
        )
        self.verifiers = {address: VerifierPeer(address=address) for address in verifiers}
        self.drafters = {address: DrafterPeer(address=address) for address in drafters}
        self._desired_verifiers, self._desired_drafters = DesiredPeers(), DesiredPeers()
        self._polls: dict[PeerStatus, asyncio.Task[None]] = {}

    @property
    def desired_verifiers(self) -> int:
        """Number of verifiers that should be healthy."""
        return self._desired_verifiers.count(len(self.verifiers))

    @property
    def desired_drafters(self) -> int:
        """Number of drafters that should serve."""
        return self._desired_drafters.count(len(self.drafters))

    def start(self) -> None:
        """Start polling. Each peer has its own task, so that a slow peer does not delay the
        others.
        """
        for verifier in self.verifiers.values():
            self._start(verifier, partial(self._look_at_verifier, verifier))
        for drafter in self.drafters.values():
            self._start(drafter, partial(self._look_at_drafter, drafter))

    async def stop(self) -> None:
        """Stop polling."""
        polls, self._polls = self._polls, {}
        for task in polls.values():
            task.cancel()
        await asyncio.gather(*polls.values(), return_exceptions=True)

    def add_verifier(self, address: str) -> None:
        """Start polling one more verifier. Idempotent. Raises ResourceExhaustedError if there are
        too many verifiers.
        """
        if address not in self.verifiers:
            _check_capacity("verifiers", len(self.verifiers))
            peer = self.verifiers[address] = VerifierPeer(address=address)
            self._start(peer, partial(self._look_at_verifier, peer))
            logger.info("verifier added", extra={"address": address})

    async def forget_verifier(self, peer: VerifierPeer) -> None:
        """Stop polling a verifier that was removed, and ask the drafters to disconnect from it."""
        await self._stop(peer)
        if peer.state is PeerState.HEALTHY and peer.info is not None:
            self._lose_verifier(peer, peer.info, "it was removed")
        for drafter in list(self.drafters.values()):
            if drafter.control is not None and drafter.state is PeerState.HEALTHY:
                gone = (peer.address,)
                await drafter_commands.detach_drafter(
                    drafter.control, drafter.address, gone, self._silence_s
                )
        self.verifiers.pop(peer.address, None)
        logger.info("verifier removed", extra={"address": peer.address})

    def add_drafter(self, address: str, *, recall: bool = True) -> None:
        """Start polling one more drafter. Idempotent.

        With `recall` the drafter is told to cancel a drain that it announced. Raises
        ResourceExhaustedError if there are too many drafters, and FailedPreconditionError while the
        drafter is being removed.
        """
        peer = self.drafters.get(address)
        if peer is not None and peer.is_draining:
            raise FailedPreconditionError(
                f"the drafter at {address} is being removed", reason="DRAFTER_LEAVING"
            )
        if peer is not None:
            # Somebody else may have removed it.
            peer.is_recalled = peer.is_recalled or recall
            return
        _check_capacity("drafters", len(self.drafters))
        peer = self.drafters[address] = DrafterPeer(address=address, is_recalled=recall)
        self._start(peer, partial(self._look_at_drafter, peer))
        logger.info("drafter added", extra={"address": address})

    async def drain_drafter(self, peer: DrafterPeer) -> None:
        """Assign no more sessions to a drafter, and ask it to announce to other routers that it
        will stop.
        """
        peer.is_draining, peer.is_recalled = True, False
        if peer.control is not None:
            await drafter_commands.announce_drain(peer.control, peer.address, self._silence_s)

    async def forget_drafter(self, peer: DrafterPeer) -> None:
        """Stop polling a drafter, and ask it to disconnect from all verifiers."""
        await self._stop(peer)
        if peer.control is not None:
            # The drafter stays in `drafters` until it has detached, so that it is not added again.
            await drafter_commands.detach_drafter(
                peer.control, peer.address, self.verifiers, self._silence_s
            )
        self.drafters.pop(peer.address, None)
        if peer.is_serving and peer.is_leaving:
            self._desired_drafters.record_intended_end()
        if peer.info is not None:
            self.judge.forget_drafter(peer.info.drafter_id)
            self._metrics.drafter_up.labels(peer.info.drafter_id).set(0)
        logger.info("drafter removed", extra={"address": peer.address})

    def healthy_verifier(self, verifier_id: VerifierId) -> VerifierPeer | None:
        """Return the healthy verifier with this id, or None if there is none."""
        return next((v for v, info in self._healthy() if info.verifier_id == verifier_id), None)

    def any_verifier_info(self) -> VerifierInfo | None:
        """Return the info of a healthy verifier that accepts sessions, or None if there is none."""
        return next((info for _, info in self._healthy() if not info.draining), None)

    def record_heartbeat(self, peer: VerifierPeer) -> None:
        """Record that a verifier is alive and makes progress, because one of its sessions sent an
        event.
        """
        peer.silent_s = peer.stalled_s = 0.0

    def mark_verifier_lost(self, peer: VerifierPeer, why: str) -> None:
        """Mark a verifier whose streams broke as lost, and poll it at once. It stays lost until it
        answers.
        """
        if peer.state is PeerState.HEALTHY and peer.info is not None:
            self._lose_verifier(peer, peer.info, why)
        peer.woken.set()

    def mark_verifier_draining(self, peer: VerifierPeer) -> None:
        """Mark a verifier that accepts no more sessions."""
        if peer.state is PeerState.HEALTHY and peer.info is not None:
            peer.info = replace(peer.info, draining=True)
            self._on_verifier_up(peer.info)

    def mark_drafter_detached(self, peer: VerifierPeer, drafter_id: DrafterId) -> None:
        """Mark a drafter that a session reported lost. The drafter gets no sessions of this
        verifier until the verifier's next poll.
        """
        peer.detached.add(drafter_id)
        self._note_drafters()

    def candidates_for(self, peer: VerifierPeer) -> tuple[DrafterCandidate, ...]:
        """Return the drafters that the sessions of this verifier can have now."""
        assert peer.info is not None
        able = [d for d in self.drafters.values() if d.state is PeerState.HEALTHY]
        return drafter_candidates(
            peer.info,
            [drafter.info for drafter in able if drafter.info is not None],
            detached=peer.detached,
            draining={d.info.drafter_id for d in able if d.is_draining and d.info is not None},
            rooms=self.judge.session_limits(peer.info),
        )

    def candidates(self) -> dict[VerifierId, tuple[DrafterCandidate, ...]]:
        """Return, for each healthy verifier, the drafters that its sessions can have now."""
        return {info.verifier_id: self.candidates_for(peer) for peer, info in self._healthy()}

    @property
    def other_router_sessions(self) -> dict[DrafterId, int]:
        """Number of other routers' sessions of each drafter."""
        peers = self.drafters.values()
        return {
            peer.info.drafter_id: peer.other_router_sessions
            for peer in peers
            if peer.info is not None
        }

    def _healthy(self) -> list[tuple[VerifierPeer, VerifierInfo]]:
        peers = self.verifiers.values()
        return [
            (peer, peer.info)
            for peer in peers
            if peer.state is PeerState.HEALTHY and peer.info is not None
        ]

    def _start(self, peer: PeerStatus, look: Callable[[], Awaitable[None]]) -> None:
        self._polls[peer] = asyncio.create_task(self._poll(peer, look))

    async def _stop(self, peer: PeerStatus) -> None:
        poll = self._polls.pop(peer, None)
        if poll is not None:
            poll.cancel()
            await asyncio.gather(poll, return_exceptions=True)

    async def _poll(self, peer: PeerStatus, look: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await poll_peer(peer, look, self._silence_s)
            except FailedPreconditionError as error:
                self._refuse(peer, error)
            except (OutriderError, TimeoutError) as error:
                self._failed(peer, error)
            except Exception:
                logger.exception("peer poll failed", extra={"address": peer.address})
            self._note_drafters()
            await wait_next_poll(peer, self._interval_s)

    async def _look_at_verifier(self, peer: VerifierPeer) -> None:
        if peer.control is None:
            peer.control = await self._dialer.verifier(peer.address)
        losses = peer.losses
        info = await peer.control.info()
        if losses != peer.losses:
            # The answer may be from before the loss.
            peer.woken.set()
            return
        before = peer.info
        peer.detached.clear()
        try:
            check_verifier_fits(info, self._tokenizer)
            if self._requires_keys:
                check_no_simulation(info)
            self._check_name(peer, info)
        except FailedPreconditionError as error:
            # `peer.info` still has the id under which the lost sessions began.
            self._refuse(peer, error)
            raise
        finally:
            peer.info = info
        restarted = before is not None and before.incarnation != info.incarnation
        if restarted and before is not None and peer.state is PeerState.HEALTHY:
            self._lose_verifier(peer, before, "it was restarted")
        self._check_progress(peer, before, info)
        came_up = self._seen(peer)
        if came_up:
            self._metrics.verifier_up.labels(info.verifier_id).set(1)
            self._metrics.verifier_losses.labels(info.verifier_id)
            self._desired_verifiers.record_healthy(len(self._healthy()))
        self._on_verifier_up(info)
        self.judge.update(info, {d.info.drafter_id for d in self.drafters.values() if d.info})

    def _check_progress(
        self, peer: VerifierPeer, before: VerifierInfo | None, info: VerifierInfo
    ) -> None:
        """Mark a verifier lost if its sessions have made no progress for `verifier_stall_s`. Raises
        UnavailableError until it makes progress again.
        """
        standing = VerifierProgress.of(info)
        if before is None or standing != VerifierProgress.of(before):
            peer.stalled_s, peer.stalled_at = 0.0, None
            return
        if peer.stalled_at is None and 0 < self._stall_s <= peer.stalled_s:
            peer.stalled_at = standing
            why = f"its sessions made no progress for {peer.stalled_s:.1f} s"
            self._lose_verifier(peer, info, why)
        if peer.stalled_at == standing:
            raise UnavailableError(
                "the verifier answers but makes no progress", reason="VERIFIER_STALLED"
            )

    def _check_name(self, peer: VerifierPeer, info: VerifierInfo) -> None:
        """Raise FailedPreconditionError if another healthy verifier has the same id, because
        sessions and losses are recorded by id.
        """
        namesake = self.healthy_verifier(info.verifier_id)
        if namesake is not None and namesake is not peer:
            raise FailedPreconditionError(
                f"the verifier id {info.verifier_id} is already used by {namesake.address}",
                reason="NAME_TAKEN",
            )

    async def _look_at_drafter(self, peer: DrafterPeer) -> None:
        if peer.control is None:
            peer.control = await self._dialer.drafter(peer.address)
        info = await peer.control.info()
        before, peer.info = peer.info, info
        check_drafter_fits(info, self._tokenizer)
        if before is not None and before.incarnation != info.incarnation:
            # The evidence against the previous process does not apply to the new one.
            self.judge.forget_drafter(before.drafter_id)
            if peer.is_serving and not before.draining:
                self._drafter_lost(peer, "it was restarted")
        if info.draining and not (before is not None and before.draining):
            logger.info("drafter drain started", extra={"drafter_id": info.drafter_id})
            self._on_drafters_changed()
        self._seen(peer)
        placed = self._placed().get(info.drafter_id, 0)
        peer.recent_other_sessions = peer.recent_other_sessions[1], max(0, info.sessions - placed)
        if peer.is_recalled:
            peer.is_recalled = False
            await peer.control.set_draining(False)
        if peer.is_leaving:
            return
        known = {verifier.address: info for verifier, info in self._healthy()}
        for address in missing_attachments(info, known):
            await drafter_commands.attach_drafter(peer.control, peer.address, address)
        self._note_misfits(peer, info, known)

    def _note_misfits(
        self, peer: DrafterPeer, info: DrafterInfo, known: dict[str, VerifierInfo]
    ) -> None:
        misfits = {address for address, verifier in known.items() if not can_serve(info, verifier)}
        for address in misfits - peer.misfits:
            logger.warning(
                "drafter does not match verifier: vocabulary or features differ",
                extra={"drafter_id": info.drafter_id, "verifier": address},
            )
        peer.misfits = misfits

    def _seen(self, peer: PeerStatus) -> bool:
        """Record a sign of life, and return whether the peer was not healthy before."""
        peer.silent_s, peer.failures, peer.problem = 0.0, 0, ""
        if peer.state is PeerState.HEALTHY:
            return False
        peer.state = PeerState.HEALTHY
        logger.info("peer became healthy", extra={"address": peer.address})
        return True

    def _refuse(self, peer: PeerStatus, error: OutriderError) -> None:
        self._complain(peer, "peer refused", error.message)
        self._leave(peer, PeerState.REFUSED, error.message)

    def _failed(self, peer: PeerStatus, error: OutriderError | TimeoutError) -> None:
        message = str(error) or "no answer in time"
        self._complain(peer, "peer did not answer", message)
        if not isinstance(error, (TimeoutError, DeadlineExceededError)):
            peer.failures += 1
        state = state_after_failure(
            peer.state, failures=peer.failures, silence_s=peer.silent_s, bound_s=self._silence_s
        )
        self._leave(peer, state, message)

    def _complain(self, peer: PeerStatus, event: str, message: str) -> None:
        if message != peer.problem:
            peer.problem = message
            logger.warning(event, extra={"address": peer.address, "problem": message})

    def _leave(self, peer: PeerStatus, state: PeerState, why: str) -> None:
        was, peer.state = peer.state, state
        if was is not PeerState.HEALTHY or state is PeerState.HEALTHY:
            return
        if isinstance(peer, VerifierPeer) and peer.info is not None:
            self._lose_verifier(peer, peer.info, why)

    def _lose_verifier(self, peer: VerifierPeer, info: VerifierInfo, why: str) -> None:
        facts = {"verifier_id": info.verifier_id, "address": peer.address, "problem": why}
        if info.draining:
            logger.info("verifier stopped", extra=facts)
            self._desired_verifiers.record_intended_end()
        else:
            logger.error("verifier lost", extra=facts)
            self._metrics.verifier_losses.labels(info.verifier_id).inc()
        peer.state = PeerState.LOST
        peer.losses += 1
        self._metrics.verifier_up.labels(info.verifier_id).set(0)
        self._on_verifier_lost(info.verifier_id)

    def _note_drafters(self) -> None:
        """Update which drafters serve, and count those lost since the last update."""
        for peer in self.drafters.values():
            if peer.info is None:
                continue
            serving = self._is_serving(peer, peer.info)
            if peer.is_serving and not serving and self._healthy() and not peer.is_leaving:
                self._drafter_lost(peer, peer.problem or "its verifier lost the connection")
            if peer.is_serving and not serving and peer.is_leaving:
                self._desired_drafters.record_intended_end()
            if serving and not peer.is_serving:
                logger.info("drafter connected", extra={"drafter_id": peer.info.drafter_id})
            peer.is_serving = serving
            self._metrics.drafter_losses.labels(peer.info.drafter_id)
            self._metrics.drafter_up.labels(peer.info.drafter_id).set(serving)
        self._desired_drafters.record_healthy(
            sum(peer.is_serving for peer in self.drafters.values())
        )

    def _is_serving(self, peer: DrafterPeer, info: DrafterInfo) -> bool:
        return peer.state is PeerState.HEALTHY and any(
            is_attached(info, verifier_info) and info.drafter_id not in verifier.detached
            for verifier, verifier_info in self._healthy()
        )

    def _drafter_lost(self, peer: DrafterPeer, why: str) -> None:
        assert peer.info is not None
        peer.is_serving = False
        self._metrics.drafter_losses.labels(peer.info.drafter_id).inc()
        logger.warning(
            "drafter lost",
            extra={
                "drafter_id": peer.info.drafter_id,
                "address": peer.address,
                "problem": why,
            },
        )


def _check_capacity(kind: str, count: int) -> None:
    if count >= MAX_PEERS:
        raise ResourceExhaustedError(
            f"the router already has the maximum of {MAX_PEERS} {kind}", reason="TOO_MANY_PEERS"
        )
