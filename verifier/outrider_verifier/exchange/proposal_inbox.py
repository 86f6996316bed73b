"""ProposalInbox: bounded store of proposals by session and prefix digest. Pure.

A session holds one proposal for its current prefix, and up to M for prefixes that may come next. A
message has tens of entries and a round mostly one session or a few, so everything is done entry by
entry in plain integers: one numpy call takes as long as three entries. `MessagePool` keeps the
received messages, for their single entries, within a memory budget.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from enum import StrEnum
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.wire.messages import Proposal, Proposals


class PooledEntry:
    """A draft that is held, or was."""

    __slots__ = ("digest", "entry", "handle", "length", "message", "nodes", "place")

    def __init__(
        self, message: PooledMessage, entry: int, handle: int, digest: int, length: int, nodes: int
    ) -> None:
        """An entry of a message, for a prefix of so many tokens."""
        self.message, self.entry, self.nodes = message, entry, nodes
        self.handle, self.digest, self.length = handle, digest, length
        self.place = -1
        """Which of its session's places for later it has; -1: none, it is for the current prefix.
        """

    @property
    def expected_tokens(self) -> float:
        """Tokens that its round is expected to emit; see `expected_accepted_tokens`."""
        return self.message.expected_tokens(self.entry)


class PooledMessage:
    """Proposals with those of their entries that are held."""

    __slots__ = ("_promises", "held", "nbytes", "proposals")

    def __init__(self, proposals: Proposals) -> None:
        self.proposals = proposals
        self.held: dict[int, PooledEntry] = {}
        """By entry."""
        self.nbytes = 0
        """What keeping it takes; 0 until it is kept."""
        self._promises: NDArray[np.float64] | None = None

    def expected_tokens(self, entry: int) -> float:
        """See `expected_accepted_tokens`; computed once for all entries."""
        known = self._promises
        if known is None:
            known = self._promises = expected_accepted_tokens(self.proposals)
        return float(known[entry])

    def compact(self) -> None:
        """Be of nothing but the entries that are held."""
        held = list(self.held.values())
        self.proposals = self.proposals.select(np.array([kept.entry for kept in held]))
        self._promises = None
        for entry, kept in enumerate(held):
            kept.entry = entry
        self.held = dict(enumerate(held))


class MessagePool:
    """Held messages; each is freed with its last entry, the oldest one when all take too much."""

    def __init__(self, *, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._by_age: dict[PooledMessage, None] = {}
        """Oldest first."""
        self.nbytes = 0
        """What all of them take."""

    def add_message(self, message: PooledMessage) -> None:
        """Keep a message for its entries that are held: whole, or, where less than half of it is,
        as these."""
        if not message.held:
            return
        if 2 * len(message.held) < len(message.proposals):
            message.compact()
        message.nbytes = message.proposals.nbytes
        self._by_age[message] = None
        self.nbytes += message.nbytes

    def drop_entries(self, gone: Sequence[PooledEntry]) -> None:
        """These entries are held no more."""
        for kept in gone:
            message = kept.message
            held = message.held
            del held[kept.entry]
            if not held and message in self._by_age:
                del self._by_age[message]
                self.nbytes -= message.nbytes

    @property
    def oldest_excess(self) -> PooledMessage | None:
        """The message to forget next because all take too much; None: they do not. The newest one
        stays, whatever it takes."""
        if self.nbytes <= self._budget_bytes or len(self._by_age) < 2:
            return None
        return next(iter(self._by_age))


def expected_accepted_tokens(message: Proposals) -> NDArray[np.float64]:
    """[S]: draft tokens that the drafter expects to stand, the sum of the path probabilities; NaN
    for an entry with a draft distribution. A tree sampled from its distribution must not be chosen
    by its tokens' probabilities, for the choice would change the distribution: NaN is neither more
    nor less."""
    owners = np.arange(len(message)).repeat(message.node_counts)
    weights = np.exp(message.logprobs, dtype=np.float64)
    result = np.bincount(owners, weights, minlength=len(message)).astype(np.float64)
    if message.distributions is not None:
        result[message.distributions.has_distribution] = np.nan
    return result


Handles = NDArray[np.int64]
_Entry = tuple[int, int, int, int]
"""Handle, digest, length of the prefix, nodes."""
_NONE: Final = -1
_NEVER: Final = 1 << 62
"""Length of a prefix that no draft continues."""


class OfferResult(StrEnum):
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


class HeldProposal(NamedTuple):
    """A proposal where it lies."""

    proposals: Proposals
    entry: int
    nodes: int
    is_hit: bool = False
    """Whether it was there before its prefix became the session's: a hit."""

    @property
    def proposal(self) -> Proposal:
        """The proposal alone."""
        return self.proposals.get_proposal(self.entry)


class OfferResults(NamedTuple):
    """What became of the entries of a message, by their places in it."""

    current: list[int]
    """Entries for their session's current prefix."""
    stale: list[int]
    """Entries that are of no use any more."""
    late: list[int]
    """Those of `stale` for the prefix that their session last did without."""
    results: Counter[OfferResult]


class _SessionEntries:
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
        self.usable: PooledEntry | None = None
        """The draft for it."""
        self.ahead = False
        """Whether that was there before its prefix was."""
        self.stepped = False
        """Whether what is stale is still to be dropped."""
        self.later: dict[int, PooledEntry] = {}
        """By the digests of prefixes that may be next."""
        self.ring: list[PooledEntry | None] = [None] * per_session
        """The same by place."""
        self.next = 0
        """Which place was written longest ago."""
        self.missed: tuple[int, int] = (0, 0)
        """Digest and length of the prefix that it last did without a draft for; 0: none."""


class ProposalInbox:
    """At most one proposal for each session's current prefix, and the newest M for later ones."""

    def __init__(
        self, *, max_sessions: int, per_session: int, reach: int, budget_bytes: int
    ) -> None:
        """`per_session`: M. `reach`: tokens that one round may commit of a session. `budget_bytes`:
        memory of the messages that are kept, but that the newest is kept in any case."""
        self._per_session = per_session
        self._reach = reach
        self._device_slots = [_SessionEntries(per_session) for _ in range(max_sessions)]
        self._messages = MessagePool(budget_bytes=budget_bytes)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def nbytes(self) -> int:
        """About the memory of the messages that are kept."""
        return self._messages.nbytes

    # ---- sessions ------------------------------------------------------------------------------

    def open_session(self, handle: int) -> None:
        """A session begins; no draft continues an unfinished prompt."""
        self.drop_session(handle)
        self._device_slots[handle].length = _NEVER

    def advance_sessions(
        self, handles: Handles, digests: NDArray[np.uint64], lengths: Handles
    ) -> int:
        """Sessions [n], all different, have these prefixes now; returns how many proposals that
        made stale."""
        before = self._count
        columns = handles.tolist(), digests.tolist(), lengths.tolist()
        for handle, digest, length in zip(*columns, strict=True):
            device_slot = self._device_slots[handle]
            if device_slot.usable is None and not device_slot.later:
                # Nothing is held of most: without a call.
                device_slot.digest, device_slot.length, device_slot.stepped = digest, length, False
            else:
                self._move(handle, digest, length)
        return before - self._count

    def advance_session(self, handle: int, digest: int, length: int) -> bool:
        """A session has this prefix now; whether a draft for it was there before, which can be
        taken. `move` is to follow, with the same prefix, and drops what is stale."""
        device_slot = self._device_slots[handle]
        if device_slot.usable is not None:
            self._forget(device_slot.usable)
        device_slot.digest, device_slot.length, device_slot.ahead, device_slot.stepped = (
            digest,
            length,
            False,
            True,
        )
        hit = device_slot.later.get(digest)
        if hit is None or hit.length != length:
            return False
        del device_slot.later[digest]
        device_slot.ring[hit.place] = None
        device_slot.usable, device_slot.ahead, hit.place = hit, True, _NONE
        return True

    def drop_session(self, handle: int) -> None:
        """Forget everything of a session."""
        device_slot = self._device_slots[handle]
        for kept in (device_slot.usable, *device_slot.later.values()):
            if kept is not None:
                self._forget(kept)
        device_slot.next = 0
        device_slot.missed = (0, 0)
        device_slot.stepped = False

    def record_miss(self, handle: int) -> None:
        """The session's round did without a draft that was waited for."""
        device_slot = self._device_slots[handle]
        device_slot.missed = (device_slot.digest, device_slot.length)

    # ---- proposals -----------------------------------------------------------------------------

    def store_proposals(self, proposals: Proposals, places: Sequence[int]) -> OfferResults:
        """Store the entries at `places`, whose handles are known and may repeat."""
        offers = OfferResults([], [], [], Counter())
        message = PooledMessage(proposals)
        columns = proposals.handles, proposals.digests, proposals.prefix_lens, proposals.node_counts
        entries = list(zip(*(column.tolist() for column in columns), strict=True))
        if self._took_all(message, entries, places):
            offers.current.extend(places)
            offers.results[OfferResult.STORED] = len(places)
            self._keep(message)
            return offers
        fresh: list[PooledEntry] = []
        for kept in self._best(message, entries, places, offers):
            device_slot = self._device_slots[kept.handle]
            held = (
                device_slot.usable
                if kept.digest == device_slot.digest
                else device_slot.later.get(kept.digest)
            )
            if held is None:
                fresh.append(kept)
            elif kept.expected_tokens > held.expected_tokens:
                self._put(kept, held.place)
                offers.results[OfferResult.REPLACED] += 1
            else:
                offers.results[OfferResult.DUPLICATE] += 1
        for kept in fresh:
            self._put(kept, self._slot_of(kept))
        if offers.stale:
            offers.results[OfferResult.STALE] = len(offers.stale)
        if fresh:
            offers.results[OfferResult.STORED] = len(fresh)
        self._keep(message)
        return offers

    def _took_all(
        self, message: PooledMessage, entries: Sequence[_Entry], places: Sequence[int]
    ) -> bool:
        """Store the entries at `places` if each is for the current prefix of another session, of
        which no draft is held for it, as in lock-step: nothing is to be weighed."""
        device_slots = self._device_slots
        found: list[tuple[_SessionEntries, PooledEntry]] = []
        for place in places:
            handle, digest, length, nodes = entries[place]
            device_slot = device_slots[handle]
            if (
                device_slot.digest != digest
                or device_slot.length != length
                or device_slot.usable is not None
            ):
                return False
            found.append((device_slot, PooledEntry(message, place, handle, digest, length, nodes)))
        if not found or len(found) != len({kept.handle for _, kept in found}):
            return False
        for device_slot, kept in found:
            device_slot.usable, device_slot.ahead = kept, False
            message.held[kept.entry] = kept
        self._count += len(found)
        return True

    def _keep(self, message: PooledMessage) -> None:
        """Keep a message for its entries that are held, and forget the oldest where all take too
        much."""
        self._messages.add_message(message)
        while (oldest := self._messages.oldest_excess) is not None:
            for kept in list(oldest.held.values()):
                self._forget(kept)

    def num_nodes(self, handles: Sequence[int]) -> list[int]:
        """Nodes of the drafts that `take` would return; -1 where there is none."""
        usable = [self._device_slots[handle].usable for handle in handles]
        return [_NONE if kept is None else kept.nodes for kept in usable]

    def take_proposals(self, handles: Sequence[int]) -> list[HeldProposal]:
        """Remove and return the proposals for these sessions' current prefixes; all must have one.
        Proposals without draft distributions are returned as entries of one common message."""
        device_slots = [self._device_slots[handle] for handle in handles]
        taken = [
            device_slot.usable for device_slot in device_slots if device_slot.usable is not None
        ]
        # Before anything is changed: who plans with what is not there loses nothing.
        assert len(set(taken)) == len(handles), handles
        result: list[HeldProposal] = []
        for device_slot, kept in zip(device_slots, taken, strict=True):
            device_slot.usable = None
            result.append(
                HeldProposal(kept.message.proposals, kept.entry, kept.nodes, device_slot.ahead)
            )
        self._count -= len(taken)
        self._messages.drop_entries(taken)
        return result if len(result) < 2 else _collected(result)

    def _best(
        self,
        message: PooledMessage,
        entries: Sequence[_Entry],
        places: Sequence[int],
        offers: OfferResults,
    ) -> list[PooledEntry]:
        """Of the entries at `places` that are of use the best for each prefix of each session, in
        order. Where the first one has a draft distribution it stands, and one with a distribution
        never takes another's place; notes in `offers` what becomes of the others."""
        reach, device_slots = self._reach, self._device_slots
        chosen: dict[tuple[int, int], PooledEntry] = {}
        later: dict[int, int] = {}
        for place in places:
            handle, digest, length, nodes = entries[place]
            device_slot = device_slots[handle]
            further = length - device_slot.length
            if digest == device_slot.digest and further == 0:
                offers.current.append(place)
            elif digest == device_slot.digest or not 0 < further <= reach:
                offers.stale.append(place)
                if (digest, length) == device_slot.missed:
                    offers.late.append(place)
                continue
            else:
                rank = later.get(handle, 0)
                if rank == self._per_session:
                    offers.results[OfferResult.FULL] += 1
                    continue
                later[handle] = rank + 1
            kept = PooledEntry(message, place, handle, digest, length, nodes)
            rival = chosen.get((handle, digest))
            if rival is not None:
                offers.results[OfferResult.DUPLICATE] += 1
                if not kept.expected_tokens > rival.expected_tokens:
                    continue
                # It comes where it stands in the message, not where the worse one stood.
                del chosen[handle, digest]
            chosen[handle, digest] = kept
        return list(chosen.values())

    def _slot_of(self, kept: PooledEntry) -> int:
        """The place for a new draft: of those for later the one that was written longest ago."""
        device_slot = self._device_slots[kept.handle]
        if kept.digest == device_slot.digest:
            return _NONE
        place = device_slot.next
        device_slot.next = (place + 1) % self._per_session
        return place

    def _put(self, kept: PooledEntry, place: int) -> None:
        """A draft goes to a place; what is there goes."""
        device_slot = self._device_slots[kept.handle]
        old = device_slot.usable if place < 0 else device_slot.ring[place]
        if old is not None:
            self._forget(old)
        kept.place = place
        kept.message.held[kept.entry] = kept
        self._count += 1
        if place < 0:
            device_slot.usable, device_slot.ahead = kept, False
        else:
            device_slot.ring[place] = device_slot.later[kept.digest] = kept

    def _move(self, handle: int, digest: int, length: int) -> None:
        """Another prefix, unless `step` was there before: sorts out what was kept for later."""
        device_slot = self._device_slots[handle]
        if not device_slot.stepped or (digest, length) != (device_slot.digest, device_slot.length):
            self.advance_session(handle, digest, length)
        device_slot.stepped = False
        if not device_slot.later:
            return
        gone = [k for k in device_slot.later.values() if k.length <= length or k.digest == digest]
        for kept in gone:
            del device_slot.later[kept.digest]
            device_slot.ring[kept.place] = None
        self._count -= len(gone)
        self._messages.drop_entries(gone)

    def _forget(self, kept: PooledEntry) -> None:
        """A draft is held no more."""
        device_slot = self._device_slots[kept.handle]
        if kept.place < 0:
            device_slot.usable = None
        else:
            device_slot.ring[kept.place] = None
            del device_slot.later[kept.digest]
        self._count -= 1
        self._messages.drop_entries([kept])


def _collected(found: list[HeldProposal]) -> list[HeldProposal]:
    """Entries [n] of one message each as entries of one message for all, unless one has
    distributions."""
    distinct = {id(held.proposals): held.proposals for held in found}
    if len(distinct) < 2 or any(message.distributions is not None for message in distinct.values()):
        return found
    owners = [id(held.proposals) for held in found]
    parts: list[Proposals] = []
    entries = [0] * len(found)
    begin = 0
    for name, message in distinct.items():
        mine = [place for place, owner in enumerate(owners) if owner == name]
        parts.append(message.select(np.array([found[place].entry for place in mine])))
        for entry, place in enumerate(mine, begin):
            entries[place] = entry
        begin += len(mine)
    joined = Proposals.concatenate(parts)
    # `_replace` takes four times as long.
    return [
        HeldProposal(joined, entry, held.nodes, held.is_hit)
        for held, entry in zip(found, entries, strict=True)
    ]
