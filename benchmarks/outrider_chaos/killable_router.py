"""Router that can be killed and restarted inside one process."""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import time
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from outrider_router.api.inference_grpc import inference_service
from outrider_router.base.metrics import RouterMetrics
from outrider_router.config import OverloadConfig, RouterConfig, SpeculationDefaults
from outrider_router.requests.resumption.resumable_answers import EventWriter
from outrider_router.requests.service import RouterService

from outrider.chaos.network import ChaosNetwork
from outrider.transport.grpc import GrpcServer
from outrider.wire.inference import StreamEvent
from outrider_chaos.killable_parts import DRAIN_S, GRACE_S, ChaosModels

T = TypeVar("T")


class KillableRouter:
    """Wraps a `RouterService`, so that its clients receive nothing more once it is killed.

    The tasks of a killed router continue until its server has stopped. Without this class they
    would write tokens to clients that the journal does not contain. A process that is really killed
    cannot do that.
    """

    def __init__(self, service: RouterService) -> None:
        self._service = service
        self._alive = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._service, name)

    def die(self) -> None:
        """Send nothing to clients from now on. Their calls wait until their connections are cut."""
        self._alive = False

    async def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Serve a call as `RouterService.generate` does, as long as the router is not killed."""
        return await self._report_end(self._service.generate(*args, **kwargs))

    async def serve_request(self, request: Any, write: EventWriter, **kwargs: Any) -> None:
        """Serve a call as `RouterService.serve_request` does, as long as the router is not
        killed."""
        await self._report_end(self._service.serve_request(request, self._living(write), **kwargs))

    async def resume_stream(
        self, position: Any, write: EventWriter, caller: Any, **kwargs: Any
    ) -> None:
        """Serve a call as `RouterService.resume_stream` does, as long as the router is not
        killed."""
        await self._report_end(
            self._service.resume_stream(position, self._living(write), caller, **kwargs)
        )

    def _living(self, write: EventWriter) -> EventWriter:
        async def written(event: StreamEvent) -> None:
            await self._living_only()
            await write(event)

        return written

    async def _report_end(self, call: Awaitable[T]) -> T:
        """Wait for the call and pass on its result or its error, unless the router is killed."""
        try:
            result = await call
        except Exception:
            await self._living_only()
            raise
        await self._living_only()
        return result

    async def _living_only(self) -> None:
        """Return immediately, or never if the router is killed."""
        if not self._alive:
            await asyncio.get_running_loop().create_future()


class RouterPart:
    """Router with its gRPC port that can be killed, drained and restarted."""

    def __init__(
        self,
        name: str,
        models: ChaosModels,
        network: ChaosNetwork,
        folder: Path,
        *,
        verifiers: tuple[str, ...],
        drafters: tuple[str, ...],
    ) -> None:
        self.name = name
        self.service: RouterService | None = None
        self.address = ""
        self._server: GrpcServer | None = None
        self._front: KillableRouter | None = None
        self._models, self._network = models, network
        self._journals = (folder / f"journal-{number}" for number in itertools.count(1))
        self._journal = folder / "journal-0"
        self._ending = asyncio.Lock()
        """Held until a router that was told to end has ended, because the next router needs its
        journal."""
        self._config = RouterConfig(
            model=models.target,
            verifiers=verifiers,
            drafters=drafters,
            poll_interval_s=0.03,
            peer_timeout_s=0.4 * models.slowness,
            session_slack_tokens=16,
            drain_timeout_s=DRAIN_S,
            resume_grace_s=GRACE_S * models.slowness,
            failover_timeout_s=15.0 * models.slowness,
            # More than fits, so that verifiers have to preempt.
            overload=OverloadConfig(kv_overcommit=4.0, prior_answer_tokens=8),
            speculation=SpeculationDefaults(proposal_timeout_ms=round(60 * models.slowness)),
        )

    @property
    def alive(self) -> bool:
        return self.service is not None

    async def start(self) -> None:
        async with self._ending:
            await self._start()

    async def _start(self) -> None:
        service = RouterService(
            config=replace(self._config, journal=self._journal),
            tokenizer=self._models.tokenizer,
            dialer=self._network.dialer(self.name),
            metrics=RouterMetrics(),
            clock=time.monotonic,
        )
        service.restore_journal()
        front: Any = KillableRouter(service)
        self._server = GrpcServer("127.0.0.1:0", [inference_service(front)])
        self.address = await self._server.start()
        await service.start()
        self.service, self._front = service, front

    async def kill(self) -> None:
        service, self.service = self.service, None
        server, self._server = self._server, None
        self._network.kill(self.name)
        if self._front is not None:
            self._front.die()
        if service is not None and self._journal.exists():
            # What is left of it here goes on to write; the next one has the file of this moment.
            self._journal = Path(shutil.copyfile(self._journal, next(self._journals)))
        if server is not None:
            await server.stop(0.0)
        if service is not None:
            await service.close()

    async def terminate(self) -> None:
        service, server = self.service, self._server
        if service is None or server is None:
            return
        await service.drain(DRAIN_S)
        if self.service is service:
            self.service = self._server = None
            async with self._ending:
                await service.close()
                await server.stop(0.2)
                self._network.kill(self.name)

    @contextmanager
    def disk_full(self) -> Iterator[None]:
        """Context in which the router can write neither to its journal nor to a new one."""
        log = None if self.service is None else self.service.resumables._log
        if log is None:
            yield
            return
        os.symlink("/dev/full", log._new_path)
        full = os.open("/dev/full", os.O_WRONLY | os.O_CLOEXEC)
        os.dup2(full, log._fd, inheritable=False)
        os.close(full)
        try:
            yield
        finally:
            log._new_path.unlink(missing_ok=True)

    def ready(self) -> bool:
        """Return whether the router sees all verifiers and drafters healthy, and all drafters
        serve."""
        if self.service is None:
            return False
        registry = self.service.registry
        peers = (*registry.verifiers.values(), *registry.drafters.values())
        serving = all(peer.is_serving for peer in registry.drafters.values())
        return serving and all(peer.state.value == "healthy" for peer in peers)

    async def held(self) -> list[str]:
        service = self.service
        if service is None:
            return [f"{self.name} is not running"]
        counts = {
            "requests": len(service.running_requests),
            "running": service.admission.num_running,
            "waiting": service.admission.num_waiting,
            "reserved tokens": service.admission.reserved_tokens,
        }
        return [f"{self.name} holds {count} {what}" for what, count in counts.items() if count]
