"""DNS discovery of peers: `dns:///HOST:PORT` stands for every address that HOST resolves to.

The name of a headless Kubernetes Service resolves to the pods behind it. Every address that the
name of verifiers or drafters resolves to is added to the peer registry. An address that the name no
longer resolves to is removed once its peer is not healthy. So a draining peer is kept while it
serves, and a DNS failure removes no peer. Routers are not polled: their addresses are those of the
last DNS answer.
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
from outrider_router.config import MAX_ROUTERS, RouterConfig
from outrider_router.fleet.compatibility import PeerState
from outrider_router.fleet.peers import DrafterPeer, VerifierPeer
from outrider_router.fleet.registry import PeerRegistry

logger = logging.getLogger(__name__)

RESOLVE_TIMEOUT_S = 10.0
"""Timeout of one DNS query."""

Resolve = Callable[[str, int], Awaitable[frozenset[str]]]
"""Function that resolves a host and a port to a set of addresses (HOST:PORT). Raises OSError if DNS
fails and UnicodeError for an invalid host name.
"""
UpdatePeers = Callable[[ResolvedName, frozenset[str]], Awaitable[None]]
"""Function that is called after each DNS query, with the addresses of the last answer and those of
them that are new.
"""
PeerT = TypeVar("PeerT", VerifierPeer, DrafterPeer)


async def resolve(host: str, port: int) -> frozenset[str]:
    """Resolve a host with the system's resolver and return its addresses (HOST:PORT).

    Raises OSError if DNS fails and UnicodeError for an invalid host name.
    """
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(RESOLVE_TIMEOUT_S):
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    hosts = [str(address[0]) for *_, address in found]
    return frozenset(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host in hosts)


class PeerDiscovery:
    """Polls the DNS names among the configured addresses, one task for each name."""

    def __init__(
        self,
        config: RouterConfig,
        registry: PeerRegistry,
        *,
        close_channel: Callable[[str], Awaitable[None]],
        resolve: Resolve = resolve,
    ) -> None:
        """Parse the configured addresses. `close_channel` is called with the address of each peer
        that was removed from the registry. Raises InvalidRequestError for an invalid address.
        """
        self._registry = registry
        self._close_channel = close_channel
        self._interval_s = config.discovery_interval_s
        self._resolve = resolve
        plain, names = split_addresses(config.routers)
        self._routers = {"": frozenset(plain)}
        """Addresses of routers by the name that resolved to them; "" for configured addresses."""
        self._names: list[tuple[str, int, UpdatePeers]] = [
            *((*name, self._update_verifiers) for name in split_addresses(config.verifiers)[1]),
            *((*name, self._update_drafters) for name in split_addresses(config.drafters)[1]),
            *(
                (host, port, partial(self._update_routers, f"{host}:{port}"))
                for host, port in names
            ),
        ]
        self._tasks: list[asyncio.Task[None]] = []

    def router_addresses(self) -> frozenset[str]:
        """Return the addresses of the fleet's routers, at most `MAX_ROUTERS`."""
        addresses = sorted(frozenset[str]().union(*self._routers.values()))
        return frozenset(addresses[:MAX_ROUTERS])

    def start(self) -> None:
        """Start polling DNS."""
        self._tasks = [asyncio.create_task(self._follow(*name)) for name in self._names]

    async def stop(self) -> None:
        """Stop polling DNS. Peers that were found stay in the registry."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(
        self,
        host: str,
        port: int,
        update: UpdatePeers,
    ) -> None:
        resolved, problem = ResolvedName(), ""
        while True:
            try:
                joined = resolved.update_addresses(await self._resolve(host, port))
                problem = ""
            except (OSError, UnicodeError) as error:
                # A failed query does not mean that the name has no addresses: keep the peers.
                joined = frozenset()
                if str(error) != problem:
                    problem = str(error) or "no answer in time"
                    facts = {"host": host, "problem": problem}
                    logger.warning("peer name not resolved", extra=facts)
            try:
                await update(resolved, joined)
            except Exception:
                logger.exception("peer name update failed", extra={"host": host})
            await asyncio.sleep(self._interval_s)

    async def _update_verifiers(self, resolved: ResolvedName, joined: frozenset[str]) -> None:
        registry = self._registry
        _add(resolved, joined, registry.add_verifier)
        await self._forget(resolved, registry.verifiers, registry.forget_verifier)

    async def _update_routers(
        self, name: str, resolved: ResolvedName, _joined: frozenset[str]
    ) -> None:
        self._routers[name] = resolved.addresses

    async def _update_drafters(self, resolved: ResolvedName, joined: frozenset[str]) -> None:
        registry = self._registry
        _add(resolved, joined, partial(registry.add_drafter, recall=False))
        await self._forget(resolved, registry.drafters, registry.forget_drafter)

    async def _forget(
        self,
        resolved: ResolvedName,
        peers: Mapping[str, PeerT],
        forget: Callable[[PeerT], Awaitable[None]],
    ) -> None:
        for address in sorted(resolved.removed_addresses):
            peer = peers.get(address)
            if peer is not None and peer.state is PeerState.HEALTHY:
                # It still serves, or drains. It is removed once it is not healthy any more.
                continue
            if peer is not None:
                await forget(peer)
                await self._close_channel(address)
            resolved.removed_addresses.discard(address)


def _add(resolved: ResolvedName, joined: frozenset[str], add: Callable[[str], None]) -> None:
    for address in sorted(joined):
        try:
            add(address)
        except OutriderError as error:
            logger.warning("peer not added", extra={"address": address, "problem": error.message})
            # The next poll tries again.
            resolved.addresses -= {address}
