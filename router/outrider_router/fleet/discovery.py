"""DNS discovery of peers: `dns:///HOST:PORT` stands for every address that HOST resolves to.

The name of a headless Kubernetes Service resolves to the pods behind it. Addresses that it lists
are polled; an address that it no longer lists is forgotten once its peer does not answer either.
So a peer that drains is kept for as long as it serves, and a failing resolver removes nobody.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import TypeVar

from outrider.errors import OutriderError
from outrider_router.base.dns_names import ResolvedName, split_addresses
from outrider_router.config import RouterConfig
from outrider_router.fleet.compatibility import PeerState
from outrider_router.fleet.peers import DrafterPeer, VerifierPeer
from outrider_router.fleet.registry import PeerRegistry

logger = logging.getLogger(__name__)

RESOLVE_TIMEOUT_S = 10.0
"""Longest wait for an answer of the resolver."""

Resolve = Callable[[str, int], Awaitable[frozenset[str]]]
"""All addresses (HOST:PORT) of a host. Raises OSError, and UnicodeError for what is no name."""
PeerT = TypeVar("PeerT", VerifierPeer, DrafterPeer)


async def resolve(host: str, port: int) -> frozenset[str]:
    """Ask the system's resolver. Raises OSError, and UnicodeError for what is no name."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(RESOLVE_TIMEOUT_S):
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    hosts = [str(address[0]) for *_, address in found]
    return frozenset(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host in hosts)


class PeerDiscovery:
    """Follows the DNS names among the configured addresses; a task for each."""

    def __init__(
        self,
        config: RouterConfig,
        registry: PeerRegistry,
        *,
        resolve: Resolve = resolve,
    ) -> None:
        """Raises InvalidRequestError for names that cannot be any."""
        self._registry = registry
        self._interval_s = config.discovery_interval_s
        self._resolve = resolve
        self._names = [
            *((*name, self._verifiers) for name in split_addresses(config.verifiers)[1]),
            *((*name, self._drafters) for name in split_addresses(config.drafters)[1]),
        ]
        self._tasks: list[asyncio.Task[None]] = []
        self.on_forgotten: Callable[[str], Awaitable[None]] = _nothing
        """Hears of each address that is looked at no more."""

    def start(self) -> None:
        """Begin to look."""
        self._tasks = [asyncio.create_task(self._follow(*name)) for name in self._names]

    async def stop(self) -> None:
        """Look no more; the peers stay."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(
        self,
        host: str,
        port: int,
        update: Callable[[ResolvedName, frozenset[str]], Awaitable[None]],
    ) -> None:
        named, problem = ResolvedName(), ""
        while True:
            try:
                joined = named.update_addresses(await self._resolve(host, port))
                problem = ""
            except (OSError, UnicodeError) as error:
                # No answer is not the answer that nobody is there.
                joined = frozenset()
                if str(error) != problem:
                    problem = str(error) or "no answer in time"
                    facts = {"host": host, "problem": problem}
                    logger.warning("a name of peers is not resolved", extra=facts)
            try:
                await update(named, joined)
            except Exception:
                logger.exception("following a name of peers failed", extra={"host": host})
            await asyncio.sleep(self._interval_s)

    async def _verifiers(self, named: ResolvedName, joined: frozenset[str]) -> None:
        registry = self._registry
        _add(named, joined, registry.add_verifier)
        await self._forget(named, registry.verifiers, registry.forget_verifier)

    async def _drafters(self, named: ResolvedName, joined: frozenset[str]) -> None:
        registry = self._registry
        _add(named, joined, partial(registry.add_drafter, recall=False))
        await self._forget(named, registry.drafters, registry.forget_drafter)

    async def _forget(
        self,
        named: ResolvedName,
        peers: Mapping[str, PeerT],
        forget: Callable[[PeerT], Awaitable[None]],
    ) -> None:
        for address in sorted(named.removed_addresses):
            peer = peers.get(address)
            if peer is not None and peer.state is PeerState.HEALTHY:
                # It serves, or drains; when it has ended it is forgotten.
                continue
            if peer is not None:
                await forget(peer)
                await self.on_forgotten(address)
            named.removed_addresses.discard(address)


def _add(named: ResolvedName, joined: frozenset[str], add: Callable[[str], None]) -> None:
    for address in sorted(joined):
        try:
            add(address)
        except OutriderError as error:
            logger.warning(
                "a peer is not added", extra={"address": address, "problem": error.message}
            )
            # Tried again at the next look.
            named.addresses -= {address}


async def _nothing(_address: str) -> None:
    """Nobody wants to know."""
