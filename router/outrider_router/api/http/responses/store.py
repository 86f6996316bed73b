"""Store of responses: bounded in number, in bytes and in age, in the memory of one router.

Responses that continue a conversation share its earlier turns, which count once.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from outrider.ids import TenantId
from outrider_router.api.http.responses.input_items import Item, item_bytes

_ITEM_OVERHEAD_BYTES: Final = 256
"""Memory in bytes that the store needs for each item beyond the item itself."""
_ItemKey = tuple[TenantId, str]


class Turn:
    """Items of a conversation that were added together: the input or the output of a response."""

    __slots__ = ("items", "num_bytes")

    def __init__(self, items: tuple[Item, ...]) -> None:
        self.items = items
        self.num_bytes = sum(item_bytes(item) + _ITEM_OVERHEAD_BYTES for item in items)
        """Memory that the items take, in bytes."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StoredResponse:
    """A response that can be retrieved, and continued if it has ended well."""

    response_id: str
    tenant: TenantId
    """Tenant of the client that made it. It does not exist for others."""
    body: bytes
    """The response as JSON."""
    status: str
    is_background: bool
    turns: tuple[Turn, ...]
    """The whole conversation: the items of earlier responses, the input, and last the output."""

    @property
    def input_items(self) -> tuple[Item, ...]:
        """The items that the response answers."""
        return tuple(_items(self.turns[:-1]))

    @property
    def num_bytes(self) -> int:
        """Memory in bytes that the response takes if it shares no turns."""
        return len(self.body) + sum(turn.num_bytes for turn in self.turns)


def _items(turns: tuple[Turn, ...]) -> Iterator[Item]:
    for turn in turns:
        yield from turn.items


class _TenantResponses:
    """Responses of one tenant."""

    __slots__ = ("num_bytes", "responses")

    def __init__(self) -> None:
        self.responses: OrderedDict[str, StoredResponse] = OrderedDict()
        """Responses by their ids, the least recently used first."""
        self.num_bytes = 0
        """Memory in bytes that they take. Tenants share no turns."""


class ResponseStore:
    """Responses of all tenants. At each limit, a response is dropped of the tenant that has the
    most, in number or in bytes, so that no tenant pushes out those of others: the one that was used
    least recently. Of tenants that have equally many, the one that was idle longest loses one."""

    def __init__(
        self, *, max_responses: int, max_bytes: int, ttl_s: float, clock: Callable[[], float]
    ) -> None:
        """Create an empty store. Responses are dropped `ttl_s` seconds after they were added;
        `clock` returns monotonic seconds."""
        self._max_responses, self._max_bytes = max_responses, max_bytes
        self._ttl_s, self._clock = ttl_s, clock
        self._tenants: OrderedDict[TenantId, _TenantResponses] = OrderedDict()
        """Tenants that have responses, the least recently active first."""
        self._responses: dict[str, StoredResponse] = {}
        """Responses of all tenants by their ids."""
        self._added_at: dict[str, float] = {}
        """Clock times at which responses were added, the oldest first."""
        self._turns: Counter[Turn] = Counter()
        """Number of responses that share each turn."""
        self._items: dict[_ItemKey, tuple[Turn, Item]] = {}
        """The newest item of each id, and its turn."""
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._responses)

    @property
    def num_bytes(self) -> int:
        """Memory in bytes that all responses take."""
        return self._num_bytes

    def add_response(self, response: StoredResponse) -> None:
        """Add a response with a new id. A response that is larger than the store is dropped."""
        self._drop_expired()
        if response.num_bytes > self._max_bytes:
            return
        self._responses[response.response_id] = response
        self._added_at[response.response_id] = self._clock()
        tenant = self._tenants.setdefault(response.tenant, _TenantResponses())
        tenant.responses[response.response_id] = response
        self._tenants.move_to_end(response.tenant)
        num_bytes = len(response.body)
        for turn in response.turns:
            if not self._turns[turn]:
                num_bytes += turn.num_bytes
                for item in turn.items:
                    self._items[response.tenant, item["id"]] = turn, item
            self._turns[turn] += 1
        tenant.num_bytes += num_bytes
        self._num_bytes += num_bytes
        while len(self._responses) > self._max_responses:
            self._drop_one(max(self._tenants.values(), key=lambda each: len(each.responses)))
        while self._num_bytes > self._max_bytes:
            self._drop_one(max(self._tenants.values(), key=lambda each: each.num_bytes))

    def get_response(self, tenant: TenantId, response_id: str) -> StoredResponse | None:
        """Return a response of a tenant, which counts as a use; None if there is none."""
        self._drop_expired()
        found = self._responses.get(response_id)
        if found is None or found.tenant != tenant:
            return None
        self._tenants[tenant].responses.move_to_end(response_id)
        self._tenants.move_to_end(tenant)
        return found

    def get_item(self, tenant: TenantId, item_id: str) -> Item | None:
        """Return an item of a tenant's responses; None if there is none."""
        self._drop_expired()
        found = self._items.get((tenant, item_id))
        return None if found is None else found[1]

    def delete_response(self, tenant: TenantId, response_id: str) -> bool:
        """Drop a response of a tenant. Return whether there was one."""
        if self.get_response(tenant, response_id) is None:
            return False
        self._drop(response_id)
        return True

    def _drop_expired(self) -> None:
        now = self._clock()
        while self._added_at:
            response_id, added_at = next(iter(self._added_at.items()))
            if now < added_at + self._ttl_s:
                return
            self._drop(response_id)

    def _drop_one(self, tenant: _TenantResponses) -> None:
        self._drop(next(iter(tenant.responses)))

    def _drop(self, response_id: str) -> None:
        response = self._responses.pop(response_id)
        del self._added_at[response_id]
        num_bytes = len(response.body)
        for turn in response.turns:
            self._turns[turn] -= 1
            if self._turns[turn]:
                continue
            del self._turns[turn]
            num_bytes += turn.num_bytes
            for item in turn.items:
                key = response.tenant, item["id"]
                newest = self._items.get(key)
                # A later turn may have an item of the same id.
                if newest is not None and newest[0] is turn:
                    del self._items[key]
        tenant = self._tenants[response.tenant]
        del tenant.responses[response_id]
        tenant.num_bytes -= num_bytes
        self._num_bytes -= num_bytes
        if not tenant.responses:
            del self._tenants[response.tenant]
