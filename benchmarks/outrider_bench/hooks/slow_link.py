"""Hook of a drafter that puts it behind a slow link.

    --hook outrider_bench.hooks.slow_link:delay_ms=5

All messages exchanged with verifiers, over connections and shared-memory channels, pass through a
relay that delays them by `delay_ms` in each direction. Control messages are not delayed.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import threading
from typing import Final

from outrider_drafter.hooks import DrafterHooks, VerifierAccess

from outrider.errors import InvalidMessageError, InvalidRequestError, UnavailableError
from outrider.transport.interface import Dialer, DrafterConnection, DrafterControl, VerifierControl
from outrider.transport.shm import ShmChannel
from outrider.wire.messages import ShmOffer

MAX_DELAY_MS: Final = 400.0
"""Maximum delay in each direction, in milliseconds. Twice this delay is much shorter than the
timeout of heartbeats."""
_STOP_S: Final = 2.0


def install(hooks: DrafterHooks, *, delay_ms: float) -> None:
    """Delay the exchange by `delay_ms` in each direction. Raises InvalidRequestError for a delay
    that is out of range."""
    if not 0.0 < delay_ms <= MAX_DELAY_MS:
        raise InvalidRequestError(
            f"delay_ms must be in (0, {MAX_DELAY_MS:g}], got {delay_ms:g}", reason="INVALID_DELAY"
        )

    def wrap(access: VerifierAccess) -> VerifierAccess:
        dialer = SlowDialer(access, delay_ms)
        return VerifierAccess(dialer, dialer.join_shm_channel)

    hooks.access_wrappers.append(wrap)
    hooks.handicaps.append(f"exchange held by {delay_ms:g} ms each way")


class SlowDialer:
    """Dialer that delays exchanges by `delay_ms` in each direction, on connections and
    shared-memory channels. Control messages are not delayed.

    The relay (`outrider_bench.hooks.relay`) is a process that ends with this dialer, or with this
    process. It reaches verifiers by addresses HOST:PORT only.
    """

    def __init__(self, access: VerifierAccess, delay_ms: float) -> None:
        """Start the relay without waiting until it is ready. `access` is the way to verifiers
        without the relay."""
        self._dialer: Dialer = access.dialer
        self._join = access.join
        self._detours: dict[str, str] = {}
        """Address at which the relay listens for connections to a verifier, by the verifier's
        address."""
        self._asking = threading.Lock()
        self._relay = subprocess.Popen(
            [sys.executable, "-m", "outrider_bench.hooks.relay", str(delay_ms)],
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
        """Join the shared-memory channel that a peer offers, through the relay. Blocks briefly.
        Raises UnavailableError, or InvalidMessageError for invalid memory."""
        name, _, token = self._ask(f"shm {offer.name} {offer.token.hex()}").partition(" ")
        return self._join(ShmOffer(name=name, token=bytes.fromhex(token)))

    async def verifier(self, address: str) -> VerifierControl:
        """Return a control client of the verifier at `address`."""
        return await self._dialer.verifier(address)

    async def drafter(self, address: str) -> DrafterControl:
        """Return a control client of the drafter at `address`."""
        return await self._dialer.drafter(address)

    async def close_channel(self, address: str) -> None:
        """Close the channel to the process at `address`, which has ended, if there is a channel."""
        await self._dialer.close_channel(address)

    async def close(self) -> None:
        """Close every channel and end the relay; idempotent."""
        await self._dialer.close()
        await asyncio.to_thread(self._stop)

    def _ask(self, command: str) -> str:
        """Send a command to the relay and return its answer. Blocks. Raises UnavailableError if the
        relay cannot execute it, and InvalidMessageError for a command of several lines."""
        if "\n" in command:
            raise InvalidMessageError("an address of several lines", reason="INVALID_ADDRESS")
        assert self._relay.stdin is not None and self._relay.stdout is not None
        try:
            with self._asking:
                self._relay.stdin.write(f"{command}\n")
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
