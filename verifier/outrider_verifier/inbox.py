"""The inbox: proposals waiting for their prefix to become a session's current one (pure).

X session handles, W = 1 + M places of each: the first is for the session's current prefix, the
others are for prefixes that may come about next. A message of proposals is stored by columns, and a
round's verdicts are compared with all that is held at once: nothing here is done entry by entry.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from enum import StrEnum
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.wire.messages import Proposal, Proposals
from outrider.wire.rounds import last_of_each
from outrider_verifier.kept import KeptMessages, promises

Handles = NDArray[np.int64]
_NONE: Final = -1
_NEVER: Final = np.iinfo(np.int64).max
"""Length of a prefix that no draft continues."""
_ODD: Final = np.uint64(0x9E3779B97F4A7C15)


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
    """What became of n entries."""

    current: NDArray[np.bool_]
    """[n]: whether an entry is for its session's current prefix."""
    stale: NDArray[np.bool_]
    """[n]: whether it is of no use any more."""
    late: NDArray[np.bool_]
    """[n]: whether it is for the prefix that the session last did without."""
    results: Counter[Offer]


class Inbox:
    """At most one proposal for each session's current prefix, and M for later ones, the newest."""

    def __init__(
        self, *, max_sessions: int, per_session: int, reach: int, budget_bytes: int
    ) -> None:
        """`per_session`: M. `reach`: tokens that one round may commit of a session. `budget_bytes`:
        memory of the messages that are kept, but that the newest is kept in any case."""
        self._per_session = per_session
        self._reach = reach
        shape = (max_sessions, 1 + per_session)
        self._digests = np.zeros(shape, dtype=np.uint64)
        """[X, W] of the prefixes; that of the current one is there with or without a draft."""
        self._lengths = np.full(shape, _NEVER, dtype=np.int64)
        """[X, W] in tokens."""
        self._numbers = np.full(shape, _NONE, dtype=np.int64)
        """[X, W]: the kept message that the draft is an entry of; -1: there is none."""
        self._entries = np.zeros(shape, dtype=np.int64)
        """[X, W]: which entry."""
        self._nodes = np.zeros(shape, dtype=np.int64)
        """[X, W]: nodes of the draft."""
        self._ahead = np.zeros(max_sessions, dtype=np.bool_)
        """[X]: whether the draft for the current prefix was there before that."""
        self._next = np.zeros(max_sessions, dtype=np.int64)
        """[X]: which of the M places was written longest ago."""
        self._missed_digests = np.zeros(max_sessions, dtype=np.uint64)
        self._missed_lengths = np.zeros(max_sessions, dtype=np.int64)
        """[X]: the prefix that the session last did without a draft for; 0: none."""
        self._later = 0
        """Drafts held for later prefixes."""
        slots = max_sessions * (1 + per_session) + 1
        self._messages = KeptMessages(slots=slots, budget_bytes=budget_bytes)

    def __len__(self) -> int:
        return int(np.count_nonzero(self._numbers >= 0))

    @property
    def nbytes(self) -> int:
        """About the memory of the messages that are kept."""
        return self._messages.nbytes

    # ---- sessions ------------------------------------------------------------------------------

    def open(self, handle: int) -> None:
        """A session begins; no draft continues an unfinished prompt."""
        self.drop(handle)
        self._lengths[handle, 0] = _NEVER

    def move(self, handles: Handles, digests: NDArray[np.uint64], lengths: Handles) -> int:
        """Sessions [n], all different, have these prefixes now; returns how many proposals that
        made stale."""
        stale = self._forget(handles, 0)
        self._digests[handles, 0] = digests
        self._lengths[handles, 0] = lengths
        self._ahead[handles] = False
        return stale + self._mature(handles) if self._later else stale

    def drop(self, handle: int) -> None:
        """Forget everything of a session."""
        self._forget(np.full(1 + self._per_session, handle), np.arange(1 + self._per_session))
        self._missed_lengths[handle] = 0

    def missed(self, handle: int) -> None:
        """The session's round did without a draft that was waited for."""
        self._missed_digests[handle] = self._digests[handle, 0]
        self._missed_lengths[handle] = self._lengths[handle, 0]

    # ---- proposals -----------------------------------------------------------------------------

    def offer(self, proposals: Proposals, places: NDArray[np.int64]) -> Offers:
        """Store the entries at `places` [n], whose handles are known and may repeat."""
        handles, digests = proposals.handles[places], proposals.digests[places]
        same = digests == self._digests[handles, 0]
        further = proposals.prefix_lens[places] - self._lengths[handles, 0]
        current = same & (further == 0)
        free = bool((self._numbers[handles, 0] < 0).all())
        if free and bool(current.all()) and bool(last_of_each(handles).all()):
            self._put(proposals, places, handles, np.zeros_like(handles))
            none = np.zeros_like(current)
            return Offers(current, none, none, Counter({Offer.STORED: len(places)}))
        stale = ~current & (same | (further <= 0) | (further > self._reach))
        late = stale & (digests == self._missed_digests[handles])
        late &= proposals.prefix_lens[places] == self._missed_lengths[handles]
        results = Counter({Offer.STALE: int(stale.sum())})
        wanted = ~stale
        if wanted.any():
            self._store(proposals, places[wanted], current[wanted], results)
        return Offers(current, stale, late, results)

    def hits(self, handles: Handles) -> bool:
        """Whether any of these sessions has a draft that was there before its prefix; handles
        below 0 are of none."""
        places = handles[handles >= 0]
        return bool((self._ahead[places] & (self._numbers[places, 0] >= 0)).any())

    def nodes(self, handles: Sequence[int]) -> list[int]:
        """Nodes of the drafts that `take` would return; -1 where there is none."""
        places = _places(handles)
        found = np.where(self._numbers[places, 0] >= 0, self._nodes[places, 0], _NONE)
        result: list[int] = found.tolist()
        return result

    def take(self, handles: Sequence[int]) -> list[Held]:
        """Remove and return the proposals for these sessions' current prefixes; all must have
        one. Those without laws are entries of one message."""
        places = _places(handles)
        numbers, entries = self._numbers[places, 0], self._entries[places, 0]
        columns = (self._nodes[places, 0], self._ahead[places])
        found = _collected([self._messages[number] for number in numbers.tolist()], entries)
        self._forget(places, 0)
        return list(map(Held, *found, *[column.tolist() for column in columns]))

    def _store(
        self,
        proposals: Proposals,
        places: NDArray[np.int64],
        current: NDArray[np.bool_],
        results: Counter[Offer],
    ) -> None:
        """Keep the best of the entries at `places` [n], none of which is stale."""
        count = len(places)
        handles = proposals.handles[places]
        fits = current | (_ranks(handles, ~current) < self._per_session)
        places, current = places[fits], current[fits]
        results[Offer.FULL] = count - len(places)
        chosen, value = _best(proposals, places)
        results[Offer.DUPLICATE] = len(places) - len(chosen)
        places, current = places[chosen], current[chosen]
        handles = proposals.handles[places]
        columns = self._found(handles, proposals.digests[places], current)
        again = columns >= 0
        if again.any():
            value = promises(proposals) if value is None else value
            worse = np.flatnonzero(again)
            worse = worse[~(value[places[worse]] > self._held_promises(handles, columns, worse))]
            kept = np.ones(len(places), dtype=np.bool_)
            kept[worse] = False
            results[Offer.DUPLICATE] += len(worse)
            places, handles, columns = places[kept], handles[kept], columns[kept]
            current, again = current[kept], again[kept]
        results[Offer.REPLACED] = int(again.sum())
        results[Offer.STORED] = len(places) - int(again.sum())
        columns[~again & current] = 0
        fresh = ~again & ~current
        if fresh.any():
            columns[fresh] = self._places_of(handles[fresh])
            # What gives way to a new one may be what was just found: the newest stays.
            given = handles[fresh] * (1 + self._per_session) + columns[fresh]
            lost = again & np.isin(handles * (1 + self._per_session) + columns, given)
            places, handles, columns = places[~lost], handles[~lost], columns[~lost]
        self._put(proposals, places, handles, columns)

    def _found(
        self, handles: Handles, digests: NDArray[np.uint64], current: NDArray[np.bool_]
    ) -> NDArray[np.int64]:
        """[n]: the column that holds a draft for the same prefix; -1: none does."""
        columns = np.where(current & (self._numbers[handles, 0] >= 0), 0, _NONE)
        if self._later:
            equal = (self._digests[handles, 1:] == digests[:, None]) & ~current[:, None]
            equal &= self._numbers[handles, 1:] >= 0
            rows, found = np.nonzero(equal)
            columns[rows] = 1 + found
        return columns

    def _held_promises(
        self, handles: Handles, columns: NDArray[np.int64], chosen: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """What the held drafts at some of these places promise."""
        numbers = self._numbers[handles[chosen], columns[chosen]]
        entries = self._entries[handles[chosen], columns[chosen]]
        result = np.empty(len(chosen), dtype=np.float64)
        for number in np.unique(numbers).tolist():
            mine = numbers == number
            result[mine] = self._messages.promises(number)[entries[mine]]
        return result

    def _places_of(self, handles: Handles) -> NDArray[np.int64]:
        """[n]: columns for new drafts, at most M of a session: those written longest ago."""
        columns = 1 + (self._next[handles] + _ranks(handles)) % self._per_session
        counts = np.bincount(handles, minlength=len(self._next))
        self._next = (self._next + counts) % self._per_session
        return columns

    def _put(
        self,
        proposals: Proposals,
        places: NDArray[np.int64],
        handles: Handles,
        columns: NDArray[np.int64],
    ) -> None:
        """Entries go to these places, all different; what is there goes."""
        if not len(places):
            return
        self._forget(handles, columns)
        entries = places
        if 2 * len(places) < len(proposals):
            proposals, entries = proposals.only(places), np.arange(len(places))
        number = self._messages.add(proposals, len(entries))
        self._numbers[handles, columns] = number
        self._entries[handles, columns] = entries
        self._nodes[handles, columns] = proposals.node_counts[entries]
        self._digests[handles, columns] = proposals.digests[entries]
        self._lengths[handles, columns] = proposals.prefix_lens[entries]
        self._ahead[handles[columns == 0]] = False
        self._later += int(np.count_nonzero(columns))
        while (oldest := self._messages.excess) is not None:
            self._forget(*np.nonzero(self._numbers == oldest))

    def _mature(self, handles: Handles) -> int:
        """Sort out what was kept for later, now that prefixes have moved; returns what went."""
        held = self._numbers[handles, 1:] >= 0
        same = self._digests[handles, 1:] == self._digests[handles, :1]
        further = self._lengths[handles, 1:] - self._lengths[handles, :1]
        over = held & (same | (further <= 0))
        rows, columns = np.nonzero(over & same & (further == 0))
        hits, columns = handles[rows], 1 + columns
        for table in (self._numbers, self._entries, self._nodes):
            table[hits, 0] = table[hits, columns]
        self._numbers[hits, columns] = _NONE
        self._ahead[hits] = True
        self._later -= len(hits)
        rows, columns = np.nonzero(over)
        return self._forget(handles[rows], 1 + columns)

    def _forget(self, handles: Handles, columns: NDArray[np.int64] | int) -> int:
        """Nothing is at these places any more; returns how many drafts that were."""
        numbers = self._numbers[handles, columns]
        held = numbers >= 0
        if not held.any():
            return 0
        self._numbers[handles, columns] = _NONE
        self._messages.drop(numbers[held])
        gone = int(np.count_nonzero(held))
        self._later -= int(np.count_nonzero(held & (np.asarray(columns) > 0)))
        return gone


def _places(handles: Sequence[int]) -> Handles:
    return np.array(handles, dtype=np.int64)


def _ranks(handles: Handles, counted: NDArray[np.bool_] | None = None) -> NDArray[np.int64]:
    """[n]: how many entries of the same session come before each; `counted` [n]: only those count,
    0 for the others."""
    if counted is not None:
        result = np.zeros(len(handles), dtype=np.int64)
        result[counted] = _ranks(handles[counted])
        return result
    order = np.argsort(handles, kind="stable")
    ascending = handles[order]
    first = np.ones(len(handles), dtype=np.bool_)
    first[1:] = ascending[1:] != ascending[:-1]
    places = np.arange(len(handles))
    ranks = np.empty(len(handles), dtype=np.int64)
    ranks[order] = places - np.maximum.accumulate(np.where(first, places, 0))
    return ranks


def _best(
    proposals: Proposals, places: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.float64] | None]:
    """Of the entries at `places` [n], indices of the best for each prefix of each session, in
    order; and what all entries promise, if that was asked for. Where the first one has a draft law
    it stands, and one with a law never takes another's place."""
    handles, digests = proposals.handles[places], proposals.digests[places]
    mixed = np.sort(digests ^ (handles.astype(np.uint64) * _ODD))
    if not bool((mixed[1:] == mixed[:-1]).any()):
        return np.arange(len(places)), None
    value = promises(proposals)
    order = np.lexsort((digests, handles))
    first = np.ones(len(places), dtype=np.bool_)
    first[1:] = np.diff(handles[order]) != 0
    first[1:] |= digests[order][1:] != digests[order][:-1]
    weight = value[places][order]
    weight[np.isnan(weight)] = np.where(first, np.inf, -np.inf)[np.isnan(weight)]
    groups = np.cumsum(first)
    # Stable: of equals the first one stands.
    ranked = np.lexsort((-weight, groups))
    return np.sort(order[ranked[first]]), value


def _collected(
    messages: Sequence[Proposals], entries: NDArray[np.int64]
) -> tuple[Sequence[Proposals], list[int]]:
    """Entries [n] of one message each as entries of one message for all, unless one has laws."""
    distinct = {id(message): message for message in messages}
    if len(distinct) < 2 or any(message.laws is not None for message in distinct.values()):
        return messages, entries.tolist()
    owners = np.array([id(message) for message in messages])
    parts: list[Proposals] = []
    found = np.empty(len(entries), dtype=np.int64)
    begin = 0
    for name, message in distinct.items():
        mine = np.flatnonzero(owners == name)
        parts.append(message.only(entries[mine]))
        found[mine] = np.arange(begin, begin + len(mine))
        begin += len(mine)
    return [Proposals.joined(parts)] * len(entries), found.tolist()
