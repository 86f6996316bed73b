"""ProposalInbox is a bounded store of proposals, indexed by session and prefix digest.

For each session the inbox holds at most one proposal for the current prefix, and up to
`per_session` proposals for prefixes that may follow. Each entry of a message is a proposal. A
message has tens of entries, and most rounds have few sessions. So the code handles entries one by
one as Python integers: one numpy call takes as long as three entries. `MessagePool` keeps the
received messages within a memory budget.
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
    """One proposal of a message. The inbox stores it now, or stored it earlier."""

    __slots__ = ("digest", "entry", "handle", "length", "message", "nodes", "place")

    def __init__(
        self, message: PooledMessage, entry: int, handle: int, digest: int, length: int, nodes: int
    ) -> None:
        """Describe entry number `entry` of a message: a proposal with `nodes` nodes for the session
        `handle`. It continues the prefix that has `length` tokens and this digest."""
        self.message, self.entry, self.nodes = message, entry, nodes
        self.handle, self.digest, self.length = handle, digest, length
        self.place = -1
        """Index in the session's ring buffer of proposals for later prefixes; -1 if the proposal is
        for the session's current prefix."""

    @property
    def expected_tokens(self) -> float:
        """Number of draft tokens that are expected to be accepted; see
        `expected_accepted_tokens`."""
        return self.message.expected_tokens(self.entry)


class PooledMessage:
    """A message of proposals, and its entries that are stored in the inbox."""

    __slots__ = ("_promises", "held", "nbytes", "proposals")

    def __init__(self, proposals: Proposals) -> None:
        self.proposals = proposals
        self.held: dict[int, PooledEntry] = {}
        """Stored entries, by their index in the message."""
        self.nbytes = 0
        """Memory of the stored message in bytes; 0 until the message is stored."""
        self._promises: NDArray[np.float64] | None = None

    def expected_tokens(self, entry: int) -> float:
        """Return the expected number of accepted draft tokens of an entry. The numbers of all
        entries are computed on the first call; see `expected_accepted_tokens`."""
        known = self._promises
        if known is None:
            known = self._promises = expected_accepted_tokens(self.proposals)
        return float(known[entry])

    def compact(self) -> None:
        """Remove from the message all entries that are not stored in the inbox, to save memory."""
        held = list(self.held.values())
        self.proposals = self.proposals.select(np.array([kept.entry for kept in held]))
        self._promises = None
        for entry, kept in enumerate(held):
            kept.entry = entry
        self.held = dict(enumerate(held))


class MessagePool:
    """The messages whose entries are stored in the inbox. A message is freed when its last entry is
    dropped. If the messages together exceed the memory budget, `oldest_excess` returns the one to
    free next."""

    def __init__(self, *, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._by_age: dict[PooledMessage, None] = {}
        """Stored messages, oldest first."""
        self.nbytes = 0
        """Memory of all stored messages in bytes."""

    def add_message(self, message: PooledMessage) -> None:
        """Store a message if any of its entries is stored in the inbox. If fewer than half of its
        entries are stored there, first remove the others from the message."""
        if not message.held:
            return
        if 2 * len(message.held) < len(message.proposals):
            message.compact()
        message.nbytes = message.proposals.nbytes
        self._by_age[message] = None
        self.nbytes += message.nbytes

    def drop_entries(self, gone: Sequence[PooledEntry]) -> None:
        """Remove entries that the inbox no longer stores. Free each message that has no entries
        left."""
        for kept in gone:
            message = kept.message
            held = message.held
            del held[kept.entry]
            if not held and message in self._by_age:
                del self._by_age[message]
                self.nbytes -= message.nbytes

    @property
    def oldest_excess(self) -> PooledMessage | None:
        """The oldest message, if the messages together exceed the memory budget; None if they do
        not, or if there is only one message."""
        if self.nbytes <= self._budget_bytes or len(self._by_age) < 2:
            return None
        return next(iter(self._by_age))


def expected_accepted_tokens(message: Proposals) -> NDArray[np.float64]:
    """Return the number of draft tokens that the drafter expects to be accepted, for each entry of
    the message: float64 [entries].

    This is the sum of the path probabilities. It is NaN for an entry with a draft distribution:
    choosing between sampled drafts by the probabilities of their tokens would change the
    distribution of the output. Comparisons with NaN are false, so such an entry never replaces
    another one.
    """
    owners = np.arange(len(message)).repeat(message.node_counts)
    weights = np.exp(message.logprobs, dtype=np.float64)
    result = np.bincount(owners, weights, minlength=len(message)).astype(np.float64)
    if message.distributions is not None:
        result[message.distributions.has_distribution] = np.nan
    return result


Handles = NDArray[np.int64]
_Entry = tuple[int, int, int, int]
"""Handle, prefix digest, prefix length in tokens, and number of nodes."""
_NONE: Final = -1
_NEVER: Final = 1 << 62
"""Prefix length that no proposal has."""


class OfferResult(StrEnum):
    """Result of passing one proposal to the inbox."""

    STORED = "stored"
    REPLACED = "replaced"
    """The proposal replaced one for the same prefix that had fewer expected tokens."""
    DUPLICATE = "duplicate"
    """Another proposal for the same prefix is stored or came in the same message, and this proposal
    does not have more expected tokens."""
    STALE = "stale"
    """The proposal's prefix is not the session's current prefix, and cannot become it with the next
    round."""
    FULL = "full"
    """The message contains more proposals for the session than may be stored from one message."""


class HeldProposal(NamedTuple):
    """A proposal that was taken out of the inbox: entry number `entry` of the message
    `proposals`."""

    proposals: Proposals
    entry: int
    nodes: int
    is_hit: bool = False
    """Whether the proposal was stored before its prefix became the session's current prefix (a
    hit)."""

    @property
    def proposal(self) -> Proposal:
        """The proposal without the other entries of the message."""
        return self.proposals.get_proposal(self.entry)


class OfferResults(NamedTuple):
    """Results of storing the entries of a message. The lists contain indices of entries in the
    message."""

    current: list[int]
    """Entries for the current prefix of their session."""
    stale: list[int]
    """Entries that can no longer be used."""
    late: list[int]
    """Entries of `stale` whose prefix is the one for which their session last waited in vain; see
    `record_miss`."""
    results: Counter[OfferResult]
    """Number of entries by result."""


class _SessionEntries:
    """The proposals of a session."""

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
        """Digest and length of the current prefix."""
        self.usable: PooledEntry | None = None
        """The proposal for the current prefix."""
        self.ahead = False
        """Whether `usable` was stored before its prefix became the current one."""
        self.stepped = False
        """Whether stale proposals are still to be removed, because `advance_session` was called."""
        self.later: dict[int, PooledEntry] = {}
        """Proposals for later prefixes, by prefix digest."""
        self.ring: list[PooledEntry | None] = [None] * per_session
        """Proposals for later prefixes, as a ring buffer."""
        self.next = 0
        """Index in `ring` that was written longest ago."""
        self.missed: tuple[int, int] = (0, 0)
        """Digest and length of the prefix for which a proposal was last missing; zeros if there is
        none."""


class ProposalInbox:
    """Bounded store of proposals: at most one for each session's current prefix, and the newest
    `per_session` for later prefixes."""

    def __init__(
        self, *, max_sessions: int, per_session: int, reach: int, budget_bytes: int
    ) -> None:
        """Create an empty inbox. `per_session` is the maximum number of proposals for later
        prefixes of a session. `reach` is the maximum number of tokens that one round commits for a
        session. `budget_bytes` is the maximum memory of the stored messages; the newest message is
        stored even if it alone exceeds this."""
        self._per_session = per_session
        self._reach = reach
        self._device_slots = [_SessionEntries(per_session) for _ in range(max_sessions)]
        self._messages = MessagePool(budget_bytes=budget_bytes)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def nbytes(self) -> int:
        """Approximate memory of the stored messages in bytes."""
        return self._messages.nbytes

    # ---- sessions ------------------------------------------------------------------------------

    def open_session(self, handle: int) -> None:
        """Prepare a handle for a new session. Proposals for it are accepted only after its first
        prefix was set by `advance_sessions`."""
        self.drop_session(handle)
        self._device_slots[handle].length = _NEVER

    def advance_sessions(
        self, handles: Handles, digests: NDArray[np.uint64], lengths: Handles
    ) -> int:
        """Set the current prefixes of sessions, and return the number of proposals that became
        stale. `handles`, `digests` and `lengths` have shape [number of sessions]; the handles are
        distinct."""
        before = self._count
        columns = handles.tolist(), digests.tolist(), lengths.tolist()
        for handle, digest, length in zip(*columns, strict=True):
            device_slot = self._device_slots[handle]
            if device_slot.usable is None and not device_slot.later:
                # Most sessions have no proposals: set the prefix without a call.
                device_slot.digest, device_slot.length, device_slot.stepped = digest, length, False
            else:
                self._move(handle, digest, length)
        return before - self._count

    def advance_session(self, handle: int, digest: int, length: int) -> bool:
        """Set the current prefix of a session. Return whether a proposal for this prefix was
        already stored; if so, `take_proposals` can return it. Stale proposals remain until
        `advance_sessions` is called with the same prefix."""
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
        """Remove all proposals of a session."""
        device_slot = self._device_slots[handle]
        for kept in (device_slot.usable, *device_slot.later.values()):
            if kept is not None:
                self._forget(kept)
        device_slot.next = 0
        device_slot.missed = (0, 0)
        device_slot.stepped = False

    def record_miss(self, handle: int) -> None:
        """Record that a session waited for a proposal for its current prefix, and none arrived in
        time."""
        device_slot = self._device_slots[handle]
        device_slot.missed = (device_slot.digest, device_slot.length)

    # ---- proposals -----------------------------------------------------------------------------

    def store_proposals(self, proposals: Proposals, places: Sequence[int]) -> OfferResults:
        """Store those entries of a message whose indices are in `places`. Their handles must be
        valid. Several entries may have the same handle."""
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
        """Store the entries with the indices `places` if each is for the current prefix of another
        session that has no proposal yet, as in lock-step. Otherwise do nothing. Return whether the
        entries were stored."""
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
        """Store a message if any of its entries is stored, and remove the oldest messages if all
        exceed the memory budget."""
        self._messages.add_message(message)
        while (oldest := self._messages.oldest_excess) is not None:
            for kept in list(oldest.held.values()):
                self._forget(kept)

    def num_nodes(self, handles: Sequence[int]) -> list[int]:
        """Return, for each session, the number of nodes of the proposal that `take_proposals` would
        return; -1 if there is none."""
        usable = [self._device_slots[handle].usable for handle in handles]
        return [_NONE if kept is None else kept.nodes for kept in usable]

    def take_proposals(self, handles: Sequence[int]) -> list[HeldProposal]:
        """Remove and return the proposals for the current prefixes of these sessions; each session
        must have one. Proposals without draft distributions are returned as entries of one common
        message."""
        device_slots = [self._device_slots[handle] for handle in handles]
        taken = [
            device_slot.usable for device_slot in device_slots if device_slot.usable is not None
        ]
        # Check before anything is changed, so that a wrong call loses no proposals.
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
        """Return the best usable entry for each prefix of each session, in the order of the
        message. An entry with a draft distribution is neither replaced by a later entry nor
        replaces an earlier one. The results of the other entries are recorded in `offers`."""
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
                # The better entry keeps its own position in the order.
                del chosen[handle, digest]
            chosen[handle, digest] = kept
        return list(chosen.values())

    def _slot_of(self, kept: PooledEntry) -> int:
        """Return the ring index for a new proposal: the one that was written longest ago, or -1 if
        the proposal is for the current prefix."""
        device_slot = self._device_slots[kept.handle]
        if kept.digest == device_slot.digest:
            return _NONE
        place = device_slot.next
        device_slot.next = (place + 1) % self._per_session
        return place

    def _put(self, kept: PooledEntry, place: int) -> None:
        """Store a proposal at a ring index (-1 for the current prefix) and remove the proposal
        stored there."""
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
        """Set the current prefix, unless `advance_session` has done so, and remove stale
        proposals."""
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
        """Remove a proposal."""
        device_slot = self._device_slots[kept.handle]
        if kept.place < 0:
            device_slot.usable = None
        else:
            device_slot.ring[kept.place] = None
            del device_slot.later[kept.digest]
        self._count -= 1
        self._messages.drop_entries([kept])


def _collected(found: list[HeldProposal]) -> list[HeldProposal]:
    """Return the proposals as entries of one common message, unless one of them has a draft
    distribution."""
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
