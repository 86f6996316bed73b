"""A drafter behind a slow link, for benchmarks: its dialer and its shared-memory channels go
through a relay."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import threading

from outrider.errors import InvalidMessageError, UnavailableError
from outrider.transport.interface import (
    Dialer,
    DrafterConnection,
    DrafterControl,
    VerifierControl,
)
from outrider.transport.shm import ShmChannel, join_channel
from outrider.wire.messages import ShmOffer

_STOP_S = 2.0


class SlowDialer:
    """A dialer whose exchanges, and their shared-memory channels, are held by `delay_ms` each way;
    control is not.

    The relay (`outrider_drafter.relay`) is a process that ends with this dialer, or with this
    process. Exchanges by addresses HOST:PORT only.
    """

    def __init__(self, dialer: Dialer, delay_ms: float) -> None:
        """Starts the relay, which takes a moment that nobody waits for."""
        self._dialer = dialer
        self._detours: dict[str, str] = {}
        """By address of the verifier: where its relay listens."""
        self._asking = threading.Lock()
        self._relay = subprocess.Popen(
            [sys.executable, "-m", "outrider_drafter.relay", str(delay_ms)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )

    async def exchange(self, verifier_address: str) -> DrafterConnection:
        """Open an exchange connection to a verifier. Raises UnavailableError."""
        detour = self._detours.get(verifier_address)
        if detour is None:
            detour = await asyncio.to_thread(self._ask, f"dial {verifier_address}")
            self._detours[verifier_address] = detour
        return await self._dialer.exchange(detour)

    def join_shm_channel(self, offer: ShmOffer) -> ShmChannel:
        """Join the shared-memory channel that a peer offers, through the relay; blocks for a
        moment. Raises UnavailableError, or InvalidMessageError for memory that is no good."""
        name, _, token = self._ask(f"lane {offer.name} {offer.token.hex()}").partition(" ")
        return join_channel(ShmOffer(name=name, token=bytes.fromhex(token)))

    async def verifier(self, address: str) -> VerifierControl:
        """A control client of the verifier at `address`."""
        return await self._dialer.verifier(address)

    async def drafter(self, address: str) -> DrafterControl:
        """A control client of the drafter at `address`."""
        return await self._dialer.drafter(address)

    async def close(self) -> None:
        """Close every channel and end the relay; idempotent."""
        await self._dialer.close()
        await asyncio.to_thread(self._stop)

    def _ask(self, order: str) -> str:
        """The relay's answer; blocks. Raises UnavailableError."""
        if "\n" in order:
            raise InvalidMessageError("an address of several lines", reason="INVALID_ADDRESS")
        assert self._relay.stdin is not None and self._relay.stdout is not None
        try:
            with self._asking:
                self._relay.stdin.write(f"{order}\n")
                answer = self._relay.stdout.readline().strip()
        except (OSError, ValueError) as error:
            raise UnavailableError(f"the relay is gone: {error}", reason="NO_RELAY") from None
        if not answer or answer.startswith("error "):
            why = answer.removeprefix("error ") or "it is gone"
            raise UnavailableError(f"the relay: {why}", reason="NO_RELAY")
        return answer

    def _stop(self) -> None:
        for pipe in (self._relay.stdin, self._relay.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        try:
            self._relay.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._relay.kill()
            self._relay.wait()
