"""Verifier and drafter that can be killed and restarted inside one process."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from outrider_drafter.config import DrafterConfig, ReconnectConfig
from outrider_drafter.hooks import VerifierAccess
from outrider_drafter.server.build import build_service as build_drafter
from outrider_drafter.server.service import DrafterService
from outrider_verifier.config import VerifierConfig
from outrider_verifier.server.service import VerifierService
from outrider_verifier.server.service_builder import build_service as build_verifier

from outrider.chaos.network import ChaosNetwork
from outrider.chaos.schedule import FleetShape
from outrider.spec.plan import DraftMethod
from outrider.text.tokenizer import Tokenizer

DRAIN_S = 1.0
"""Maximum seconds that a process may drain after it was told to end."""
_IDLE_GAUGES = (
    "sessions_running",
    "sessions_waiting",
    "swapped_bytes",
    "pending_proposals",
    "feature_bytes",
)
"""Metrics of a verifier that must be 0 when it has no sessions."""
GRACE_S = 10.0
"""Seconds for which a resumable request continues without its client."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosModels:
    """Models that all runs of this process serve."""

    target: Path
    head: Path
    tokenizer: Tokenizer
    slowness: float = 1.0
    """Factor by which all time limits are longer than for a tiny model."""

    @classmethod
    def load(cls, target: Path, head: Path, slowness: float = 1.0) -> ChaosModels:
        """Load the tokenizer, and return the paths of the models with it."""
        tokenizer = Tokenizer.load(target)
        return cls(target=target, head=head, tokenizer=tokenizer, slowness=slowness)


class KillableProcess(Protocol):
    """Interface of a process of a fleet that is simulated inside this process."""

    name: str

    @property
    def alive(self) -> bool:
        """Whether the simulated process runs."""
        ...

    async def start(self) -> None:
        """Start the process, also after it has ended."""
        ...

    async def kill(self) -> None:
        """End the process immediately. Its connections end without a message to its peers, as after
        SIGKILL."""
        ...

    async def terminate(self) -> None:
        """Drain and end the process, as after SIGTERM."""
        ...

    async def held(self) -> list[str]:
        """Return descriptions of the resources that the process still holds. Call this while there
        are no requests."""
        ...


class KillableVerifier:
    """Verifier that can be killed, drained and restarted, and whose device can fail."""

    def __init__(
        self, name: str, shape: FleetShape, models: ChaosModels, network: ChaosNetwork
    ) -> None:
        self.name = name
        self.service: VerifierService | None = None
        self._network = network
        self._config = VerifierConfig(
            model=str(models.target),
            verifier_id=name,
            feature_head=str(models.head),
            threads=1,
            kv_tokens=shape.kv_tokens,
            max_sessions=16,
            max_tree_nodes=16,
            prefill_tokens_per_round=32,
            planner=shape.planner,
            preemption=shape.preemption,
            shared_memory=shape.shm_channels,
            handshake_timeout_s=models.slowness,
            drain_timeout_s=DRAIN_S,
        )

    @property
    def alive(self) -> bool:
        return self.service is not None

    async def start(self) -> None:
        service = await asyncio.to_thread(build_verifier, self._config)
        service.start()
        self._network.serve_process(self.name, service)
        self.service = service

    async def kill(self) -> None:
        service, self.service = self.service, None
        self._network.kill(self.name)
        if service is not None:
            await service.stop()

    async def terminate(self) -> None:
        service = self.service
        if service is None:
            return
        await service.drain(DRAIN_S)
        if self.service is service:
            await self.kill()

    def lose_device(self) -> None:
        """Make every following round fail, as if the device were lost. The caller must then kill
        the verifier."""
        if self.service is not None:
            _break(self.service.core.runner, "collect_round")

    async def lost(self) -> None:
        """Wait until the verifier has noticed that its device is lost."""
        if self.service is not None:
            await self.service.lost.wait()

    @property
    def preempted(self) -> bool:
        """Whether a preempted session waits for KV cache."""
        return any(session.preemption.count > 0 for session in self._num_sessions("waiting"))

    @property
    def swapped(self) -> bool:
        """Whether KV cache of a session is swapped to host memory."""
        return self.service is not None and self.service.core.block_manager.swapped_bytes > 0

    @property
    def reads_prompts(self) -> bool:
        """Whether a running session has prompt tokens that are not prefilled yet."""
        return any(session.prefill_left > 0 for session in self._num_sessions("running"))

    @property
    def decodes(self) -> bool:
        """Whether a running session has emitted a token."""
        return any(session.emitted > 0 for session in self._num_sessions("running"))

    def _num_sessions(self, which: str) -> list[Any]:
        """Return the sessions that are "running" or "waiting", as the engine thread has them at
        this moment."""
        if self.service is None:
            return []
        with contextlib.suppress(RuntimeError):  # the engine thread changed them meanwhile
            return list(getattr(self.service.core.block_manager, which).values())
        return []

    @property
    def preemptions(self) -> int:
        """Number of preemptions since the verifier was started."""
        if self.service is None:
            return 0
        counters = self.service.core.counters
        return counters["preemptions_swap"] + counters["preemptions_recompute"]

    async def held(self) -> list[str]:
        if self.service is None:
            return [f"{self.name} is not running"]
        info = await self.service.info()
        counts = {
            "sessions": info.sessions,
            "KV blocks": info.kv_total_blocks - info.kv_free_blocks,
            "waiting sessions": info.waiting_sessions,
            "followed sessions": self.service.router_streams.num_sessions,
        }
        gauges = self.service._gauges()
        counts |= {name: int(gauges[name]) for name in _IDLE_GAUGES}
        return [f"{self.name} holds {count} {what}" for what, count in counts.items() if count]


class DrafterPart:
    """Drafter that can be killed, drained and restarted, and whose device can fail."""

    def __init__(
        self, name: str, shape: FleetShape, models: ChaosModels, network: ChaosNetwork
    ) -> None:
        self.name = name
        self.service: DrafterService | None = None
        self._network = network
        self._config = DrafterConfig(
            model=str(models.target),
            head=str(models.head),
            methods=(DraftMethod.EAGLE3, DraftMethod.NGRAM, DraftMethod.MODEL),
            # The best drafts there are: the target's own.
            draft_model=str(models.target),
            drafter_id=name,
            threads=1,
            shared_memory=shape.shm_channels,
            reconnect=ReconnectConfig(
                min_backoff_s=0.02, max_backoff_s=0.2, handshake_timeout_s=0.5, attach_wait_s=0.2
            ),
        )

    @property
    def alive(self) -> bool:
        return self.service is not None

    async def start(self) -> None:
        access = VerifierAccess(self._network.dialer(self.name))
        self.service = await asyncio.to_thread(build_drafter, self._config, access)
        self._network.serve_process(self.name, self.service)

    async def kill(self) -> None:
        service, self.service = self.service, None
        self._network.kill(self.name)
        if service is not None:
            await service.close()

    async def terminate(self) -> None:
        service = self.service
        if service is None:
            return
        await service.hand_over(DRAIN_S)
        if self.service is service:
            await self.kill()

    def lose_device(self) -> None:
        """Make every following draft of the EAGLE head fail, as if the device were lost. The caller
        must then kill the drafter."""
        if self.service is not None:
            _break(self.service._worker._engine._proposers[DraftMethod.EAGLE3], "draft_sessions")

    async def lost(self) -> None:
        """Wait until the drafter has noticed that its device is lost."""
        if self.service is not None:
            await self.service.lost.wait()

    async def held(self) -> list[str]:
        if self.service is None:
            return [f"{self.name} is not running"]
        sessions = self.service.num_sessions
        return [f"{self.name} holds {sessions} sessions"] if sessions else []


def _break(device: Any, method: str) -> None:
    """Make a method of one object, and of no other object of its class, fail as if its device were
    lost."""

    def broken(*_: object) -> Any:
        raise RuntimeError("an illegal memory access was encountered")

    kind = type(device)
    device.__class__ = type(kind.__name__, (kind,), {method: broken, "is_usable": False})


async def wait_until(
    condition: Callable[[], bool], *, timeout_s: float, poll_s: float = 0.002
) -> bool:
    """Poll until the condition is true, every `poll_s` seconds. Return False if it is not true
    within `timeout_s`."""
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end:
            return False
        await asyncio.sleep(poll_s)
    return True
