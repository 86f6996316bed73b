"""Sessions of all routers by ticket, with their routers and handles in columns."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from outrider.ids import SessionId

NO_ROUTER: Final = -1
_PLACES: Final = 1 << 24
"""Tickets are that far apart; between them lies the place in the columns."""
_FIRST_PLACES: Final = 64


@dataclass(frozen=True, slots=True)
class ServedSession:
    """Whose session it is."""

    router: int
    """The number of the router's connection, at least 0."""
    handle: int
    session_id: SessionId


class SessionRegistry:
    """Sessions that are served or being opened, by ticket."""

    def __init__(self) -> None:
        self._served: dict[int, ServedSession] = {}
        self._numbers = itertools.count(1)
        self._free: list[int] = []
        """Places that nobody has."""
        self._tickets = np.empty(0, np.int64)
        """[places] whose they are; of those that are free, nobody's."""
        self._routers = np.empty(0, np.int64)
        self._handles = np.empty(0, np.uint32)

    def __len__(self) -> int:
        return len(self._served)

    def items(self) -> list[tuple[int, ServedSession]]:
        """All of them, by ticket."""
        return list(self._served.items())

    def __getitem__(self, ticket: int) -> ServedSession:
        return self._served[ticket]

    def get(self, ticket: int) -> ServedSession | None:
        """The session with this ticket, if there is one."""
        return self._served.get(ticket)

    def add(self, served: ServedSession) -> int:
        """A ticket for a session, which no other has had."""
        if not self._free:
            self._grow()
        place = self._free.pop()
        ticket = next(self._numbers) * _PLACES + place
        self._tickets[place], self._routers[place] = ticket, served.router
        self._handles[place] = served.handle
        self._served[ticket] = served
        return ticket

    def pop(self, ticket: int) -> ServedSession | None:
        """Forget a session; idempotent."""
        served = self._served.pop(ticket, None)
        if served is not None:
            place = ticket % _PLACES
            self._tickets[place] = NO_ROUTER
            self._free.append(place)
        return served

    def owners(self, tickets: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.uint32]]:
        """[n] the number of each session's router, NOBODY where it is not served any more; [n]
        their handles. All `tickets` are of `add`."""
        places = tickets % _PLACES
        there = self._tickets[places] == tickets
        return np.where(there, self._routers[places], NO_ROUTER), self._handles[places]

    def _grow(self) -> None:
        held = len(self._tickets)
        more = max(_FIRST_PLACES, held)
        self._tickets = np.concatenate([self._tickets, np.full(more, NO_ROUTER, np.int64)])
        self._routers = np.concatenate([self._routers, np.zeros(more, np.int64)])
        self._handles = np.concatenate([self._handles, np.zeros(more, np.uint32)])
        self._free.extend(reversed(range(held, held + more)))
