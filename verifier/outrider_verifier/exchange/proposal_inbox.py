"""The inbox: proposals waiting for their prefix to become a session's current one (pure).

Of each session one for its current prefix, and up to M for prefixes that may come about next, by
digest. A message has tens of entries and a round mostly one session or a few, so all is done entry
by entry, in plain numbers: a call of numpy takes as long as three entries do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from enum import StrEnum
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.wire.messages import Proposal, Proposals
from outrider_verifier.exchange.message_pool import Kept, KeptMessages, Message

Handles = NDArray[np.int64]
_Entry = tuple[int, int, int, int]
"""Handle, digest, length of the prefix, nodes."""
_NONE: Final = -1
_NEVER: Final = 1 << 62
"""Length of a prefix that no draft continues."""


class Offer(StrEnum):
    """What became of an offered proposal."""

    STORED = "stored"
    REPLACED = "replaced"
    """A less promising proposal for the same prefix made room."""
    DUPLICATE = "duplicate"
    """One at least as promising is held for the same prefix, or came with it."""
    STALE = "stale"
    """Its prefix is not the session's, and cannot become it with the next round."""
    FULL = "full"
    """Its message has more for the session than is kept of one."""


class Held(NamedTuple):
    """A proposal where it lies."""

    proposals: Proposals
    entry: int
    nodes: int
    ahead: bool = False
    """Whether it was there before its prefix became the session's: a hit."""

    @property
    def proposal(self) -> Proposal:
        """The proposal alone."""
        return self.proposals.entry(self.entry)


class Offers(NamedTuple):
    """What became of the entries of a message, by their places in it."""

    current: list[int]
    """Entries for their session's current prefix."""
    stale: list[int]
    """Entries that are of no use any more."""
    late: list[int]
    """Those of `stale` for the prefix that their session last did without."""
    results: Counter[Offer]


class _Seat:
    """What is held of a session."""

    __slots__ = (
        "ahead",
        "digest",
        "later",
        "length",
        "missed",
        "next",
        "ring",
        "stepped",
        "usable",
    )

    def __init__(self, per_session: int) -> None:
        self.digest, self.length = 0, _NEVER
        """The current prefix."""
        self.usable: Kept | None = None
        """The draft for it."""
        self.ahead = False
        """Whether that was there before its prefix was."""
        self.stepped = False
        """Whether what is stale is still to be dropped."""
        self.later: dict[int, Kept] = {}
        """By the digests of prefixes that may be next."""
        self.ring: list[Kept | None] = [None] * per_session
        """The same by place."""
        self.next = 0
        """Which place was written longest ago."""
        self.missed: tuple[int, int] = (0, 0)
        """Digest and length of the prefix that it last did without a draft for; 0: none."""


class Inbox:
    """At most one proposal for each session's current prefix, and M for later ones, the newest."""

    def __init__(
        self, *, max_sessions: int, per_session: int, reach: int, budget_bytes: int
    ) -> None:
        """`per_session`: M. `reach`: tokens that one round may commit of a session. `budget_bytes`:
        memory of the messages that are kept, but that the newest is kept in any case."""
        self._per_session = per_session
        self._reach = reach
        self._seats = [_Seat(per_session) for _ in range(max_sessions)]
        self._messages = KeptMessages(budget_bytes=budget_bytes)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def nbytes(self) -> int:
        """About the memory of the messages that are kept."""
        return self._messages.nbytes

    # ---- sessions ------------------------------------------------------------------------------

    def open(self, handle: int) -> None:
        """A session begins; no draft continues an unfinished prompt."""
        self.drop(handle)
        self._seats[handle].length = _NEVER

    def move(self, handles: Handles, digests: NDArray[np.uint64], lengths: Handles) -> int:
        """Sessions [n], all different, have these prefixes now; returns how many proposals that
        made stale."""
        before = self._count
        columns = handles.tolist(), digests.tolist(), lengths.tolist()
        for handle, digest, length in zip(*columns, strict=True):
            seat = self._seats[handle]
            if seat.usable is None and not seat.later:
                # Nothing is held of most: without a call.
                seat.digest, seat.length, seat.stepped = digest, length, False
            else:
                self._move(handle, digest, length)
        return before - self._count

    def step(self, handle: int, digest: int, length: int) -> bool:
        """A session has this prefix now; whether a draft for it was there before, which can be
        taken. `move` is to follow, with the same prefix, and drops what is stale."""
        seat = self._seats[handle]
        if seat.usable is not None:
            self._forget(seat.usable)
        seat.digest, seat.length, seat.ahead, seat.stepped = digest, length, False, True
        hit = seat.later.get(digest)
        if hit is None or hit.length != length:
            return False
        del seat.later[digest]
        seat.ring[hit.place] = None
        seat.usable, seat.ahead, hit.place = hit, True, _NONE
        return True

    def drop(self, handle: int) -> None:
        """Forget everything of a session."""
        seat = self._seats[handle]
        for kept in (seat.usable, *seat.later.values()):
            if kept is not None:
                self._forget(kept)
        seat.next = 0
        seat.missed = (0, 0)
        seat.stepped = False

    def missed(self, handle: int) -> None:
        """The session's round did without a draft that was waited for."""
        seat = self._seats[handle]
        seat.missed = (seat.digest, seat.length)

    # ---- proposals -----------------------------------------------------------------------------

    def offer(self, proposals: Proposals, places: Sequence[int]) -> Offers:
        """Store the entries at `places`, whose handles are known and may repeat."""
        offers = Offers([], [], [], Counter())
        message = Message(proposals)
        columns = proposals.handles, proposals.digests, proposals.prefix_lens, proposals.node_counts
        entries = list(zip(*(column.tolist() for column in columns), strict=True))
        if self._took_all(message, entries, places):
            offers.current.extend(places)
            offers.results[Offer.STORED] = len(places)
            self._keep(message)
            return offers
        fresh: list[Kept] = []
        for kept in self._best(message, entries, places, offers):
            seat = self._seats[kept.handle]
            held = seat.usable if kept.digest == seat.digest else seat.later.get(kept.digest)
            if held is None:
                fresh.append(kept)
            elif kept.promise > held.promise:
                self._put(kept, held.place)
                offers.results[Offer.REPLACED] += 1
            else:
                offers.results[Offer.DUPLICATE] += 1
        for kept in fresh:
            self._put(kept, self._place_of(kept))
        if offers.stale:
            offers.results[Offer.STALE] = len(offers.stale)
        if fresh:
            offers.results[Offer.STORED] = len(fresh)
        self._keep(message)
        return offers

    def _took_all(self, message: Message, entries: Sequence[_Entry], places: Sequence[int]) -> bool:
        """Store the entries at `places` if each is for the current prefix of another session, of
        which no draft is held for it, as in lock-step: nothing is to be weighed."""
        seats = self._seats
        found: list[tuple[_Seat, Kept]] = []
        for place in places:
            handle, digest, length, nodes = entries[place]
            seat = seats[handle]
            if seat.digest != digest or seat.length != length or seat.usable is not None:
                return False
            found.append((seat, Kept(message, place, handle, digest, length, nodes)))
        if not found or len(found) != len({kept.handle for _, kept in found}):
            return False
        for seat, kept in found:
            seat.usable, seat.ahead = kept, False
            message.held[kept.entry] = kept
        self._count += len(found)
        return True

    def _keep(self, message: Message) -> None:
        """Keep a message for its entries that are held, and forget the oldest where all take too
        much."""
        self._messages.add(message)
        while (oldest := self._messages.excess) is not None:
            for kept in list(oldest.held.values()):
                self._forget(kept)

    def nodes(self, handles: Sequence[int]) -> list[int]:
        """Nodes of the drafts that `take` would return; -1 where there is none."""
        usable = [self._seats[handle].usable for handle in handles]
        return [_NONE if kept is None else kept.nodes for kept in usable]

    def take(self, handles: Sequence[int]) -> list[Held]:
        """Remove and return the proposals for these sessions' current prefixes; all must have
        one. Those without laws are entries of one message."""
        seats = [self._seats[handle] for handle in handles]
        taken = [seat.usable for seat in seats if seat.usable is not None]
        # Before anything is changed: who plans with what is not there loses nothing.
        assert len(set(taken)) == len(handles), handles
        result: list[Held] = []
        for seat, kept in zip(seats, taken, strict=True):
            seat.usable = None
            result.append(Held(kept.message.proposals, kept.entry, kept.nodes, seat.ahead))
        self._count -= len(taken)
        self._messages.drop_all(taken)
        return result if len(result) < 2 else _collected(result)

    def _best(
        self, message: Message, entries: Sequence[_Entry], places: Sequence[int], offers: Offers
    ) -> list[Kept]:
        """Of the entries at `places` that are of use the best for each prefix of each session, in
        order. Where the first one has a draft law it stands, and one with a law never takes
        another's place; notes in `offers` what becomes of the others."""
        reach, seats = self._reach, self._seats
        chosen: dict[tuple[int, int], Kept] = {}
        later: dict[int, int] = {}
        for place in places:
            handle, digest, length, nodes = entries[place]
            seat = seats[handle]
            further = length - seat.length
            if digest == seat.digest and further == 0:
                offers.current.append(place)
            elif digest == seat.digest or not 0 < further <= reach:
                offers.stale.append(place)
                if (digest, length) == seat.missed:
                    offers.late.append(place)
                continue
            else:
                rank = later.get(handle, 0)
                if rank == self._per_session:
                    offers.results[Offer.FULL] += 1
                    continue
                later[handle] = rank + 1
            kept = Kept(message, place, handle, digest, length, nodes)
            rival = chosen.get((handle, digest))
            if rival is not None:
                offers.results[Offer.DUPLICATE] += 1
                if not kept.promise > rival.promise:
                    continue
                # It comes where it stands in the message, not where the worse one stood.
                del chosen[handle, digest]
            chosen[handle, digest] = kept
        return list(chosen.values())

    def _place_of(self, kept: Kept) -> int:
        """The place for a new draft: of those for later the one that was written longest ago."""
        seat = self._seats[kept.handle]
        if kept.digest == seat.digest:
            return _NONE
        place = seat.next
        seat.next = (place + 1) % self._per_session
        return place

    def _put(self, kept: Kept, place: int) -> None:
        """A draft goes to a place; what is there goes."""
        seat = self._seats[kept.handle]
        old = seat.usable if place < 0 else seat.ring[place]
        if old is not None:
            self._forget(old)
        kept.place = place
        kept.message.held[kept.entry] = kept
        self._count += 1
        if place < 0:
            seat.usable, seat.ahead = kept, False
        else:
            seat.ring[place] = seat.later[kept.digest] = kept

    def _move(self, handle: int, digest: int, length: int) -> None:
        """Another prefix, unless `step` was there before: sorts out what was kept for later."""
        seat = self._seats[handle]
        if not seat.stepped or (digest, length) != (seat.digest, seat.length):
            self.step(handle, digest, length)
        seat.stepped = False
        if not seat.later:
            return
        gone = [k for k in seat.later.values() if k.length <= length or k.digest == digest]
        for kept in gone:
            del seat.later[kept.digest]
            seat.ring[kept.place] = None
        self._count -= len(gone)
        self._messages.drop_all(gone)

    def _forget(self, kept: Kept) -> None:
        """A draft is held no more."""
        seat = self._seats[kept.handle]
        if kept.place < 0:
            seat.usable = None
        else:
            seat.ring[kept.place] = None
            del seat.later[kept.digest]
        self._count -= 1
        self._messages.drop_all([kept])


def _collected(found: list[Held]) -> list[Held]:
    """Entries [n] of one message each as entries of one message for all, unless one has laws."""
    distinct = {id(held.proposals): held.proposals for held in found}
    if len(distinct) < 2 or any(message.laws is not None for message in distinct.values()):
        return found
    owners = [id(held.proposals) for held in found]
    parts: list[Proposals] = []
    entries = [0] * len(found)
    begin = 0
    for name, message in distinct.items():
        mine = [place for place, owner in enumerate(owners) if owner == name]
        parts.append(message.only(np.array([found[place].entry for place in mine])))
        for entry, place in enumerate(mine, begin):
            entries[place] = entry
        begin += len(mine)
    joined = Proposals.joined(parts)
    # `_replace` takes four times as long.
    return [
        Held(joined, entry, held.nodes, held.ahead)
        for held, entry in zip(found, entries, strict=True)
    ]
