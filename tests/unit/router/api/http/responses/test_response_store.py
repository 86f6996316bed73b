"""The store of responses is bounded in every way, and each tenant sees only its own."""

from __future__ import annotations

import pytest
from outrider_router.api.http.responses.input_items import Item
from outrider_router.api.http.responses.store import ResponseStore, StoredResponse, Turn

from outrider.ids import TenantId

ALICE, BOB = TenantId("alice"), TenantId("bob")


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def item(item_id: str, text: str = "") -> Item:
    return {"type": "message", "id": item_id, "content": [{"type": "input_text", "text": text}]}


def response(
    name: str, *turns: Turn, tenant: TenantId = ALICE, body: bytes = b"{}"
) -> StoredResponse:
    return StoredResponse(
        response_id=name,
        tenant=tenant,
        body=body,
        status="completed",
        is_background=False,
        turns=turns or (Turn((item(f"in-{name}"),)), Turn((item(f"out-{name}"),))),
    )


def make_store(
    max_responses: int = 3, max_bytes: int = 1 << 20, clock: Clock | None = None
) -> ResponseStore:
    return ResponseStore(
        max_responses=max_responses, max_bytes=max_bytes, ttl_s=10.0, clock=clock or Clock()
    )


def test_a_response_is_found_until_it_is_deleted() -> None:
    store = make_store()
    store.add_response(response("a"))
    found = store.get_response(ALICE, "a")
    assert found is not None and [i["id"] for i in found.input_items] == ["in-a"]
    assert store.get_item(ALICE, "out-a") == item("out-a")
    assert store.delete_response(ALICE, "a") and not store.delete_response(ALICE, "a")
    assert store.get_response(ALICE, "a") is None and store.get_item(ALICE, "out-a") is None
    assert (len(store), store.num_bytes) == (0, 0)


def test_other_tenants_find_nothing() -> None:
    store = make_store()
    store.add_response(response("a"))
    assert store.get_response(BOB, "a") is None
    assert store.get_item(BOB, "in-a") is None
    assert not store.delete_response(BOB, "a")
    assert store.get_response(ALICE, "a") is not None


def test_the_least_recently_used_response_is_dropped() -> None:
    store = make_store()
    for name in "abc":
        store.add_response(response(name))
    store.get_response(ALICE, "a")
    # A look by another tenant is no use.
    store.get_response(BOB, "b")
    store.add_response(response("d"))
    assert [name for name in "abcd" if store.get_response(ALICE, name)] == ["a", "c", "d"]


def test_responses_take_at_most_so_many_bytes() -> None:
    one = response("x", body=b"0" * 1000).num_bytes
    store = make_store(max_responses=1000, max_bytes=5 * one)
    for number in range(100):
        store.add_response(response(f"{number:03}", body=b"0" * 1000))
        assert store.num_bytes <= 5 * one
    assert len(store) in (4, 5)
    # One that is too large leaves the others alone.
    store.add_response(response("huge", body=b"0" * 6 * one))
    assert store.get_response(ALICE, "huge") is None and len(store) in (4, 5)


def test_a_tenant_pushes_out_only_its_own_responses() -> None:
    store = make_store(max_responses=10)
    for number in range(3):
        store.add_response(response(f"b{number}", tenant=BOB))
    for number in range(100):
        store.add_response(response(f"a{number}"))
    assert all(store.get_response(BOB, f"b{number}") for number in range(3))
    assert [n for n in range(100) if store.get_response(ALICE, f"a{n}")] == [*range(93, 100)]
    # Tenants that need more get an equal share.
    for number in range(3, 100):
        store.add_response(response(f"b{number}", tenant=BOB))
    assert [n for n in range(100) if store.get_response(ALICE, f"a{n}")] == [*range(95, 100)]


def test_a_tenant_with_large_responses_pushes_out_only_its_own() -> None:
    one = response("x", body=b"0" * 1000).num_bytes
    store = make_store(max_responses=1000, max_bytes=10 * one)
    for number in range(5):
        store.add_response(response(f"b{number}", tenant=BOB, body=b"0" * 100))
    for number in range(100):
        store.add_response(response(f"a{number}", body=b"0" * 1000))
        assert store.num_bytes <= 10 * one
    assert all(store.get_response(BOB, f"b{number}") for number in range(5))
    # A single large response of a tenant with few is no reason to drop small ones of others.
    store.add_response(response("huge", tenant=BOB, body=b"0" * 8 * one))
    assert store.get_response(BOB, "huge") is None and store.get_response(ALICE, "a99")


def test_among_equal_tenants_the_one_that_was_idle_longest_loses_a_response() -> None:
    store = make_store(max_responses=2)
    store.add_response(response("a"))
    store.add_response(response("b", tenant=BOB))
    store.get_response(ALICE, "a")
    store.add_response(response("c", tenant=TenantId("carol")))
    assert store.get_response(BOB, "b") is None
    assert store.get_response(ALICE, "a") and store.get_response(TenantId("carol"), "c")
    assert len(store) == 2


def test_a_conversation_counts_its_turns_once() -> None:
    store = make_store(max_responses=100)
    turns: tuple[Turn, ...] = ()
    for number in range(50):
        turns = (*turns, Turn((item(f"{number}", "a" * 1000),)), Turn(()))
        store.add_response(response(f"r{number}", *turns))
    assert 50_000 < store.num_bytes < 100_000
    for number in range(50):
        assert store.delete_response(ALICE, f"r{number}")
        # A turn is there as long as a response has it.
        assert (store.get_item(ALICE, "0") is not None) == (number < 49)
    assert (len(store), store.num_bytes) == (0, 0)


def test_responses_are_dropped_by_age() -> None:
    clock = Clock()
    store = make_store(clock=clock)
    store.add_response(response("a"))
    clock.now = 5.0
    store.add_response(response("b"))
    clock.now = 9.9
    assert store.get_response(ALICE, "a") is not None
    clock.now = 10.0
    assert store.get_response(ALICE, "a") is None and store.get_item(ALICE, "in-a") is None
    assert store.get_response(ALICE, "b") is not None
    clock.now = 100.0
    assert store.get_item(ALICE, "in-b") is None
    assert (len(store), store.num_bytes) == (0, 0)


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_the_newest_item_of_an_id_is_found(order: str) -> None:
    """Clients may choose ids of items, and may refer to one item in several responses."""
    store = make_store()
    first, second = item("same", "old"), item("same", "new")
    store.add_response(response("a", Turn((first,)), Turn(())))
    store.add_response(response("b", Turn((second,)), Turn(())))
    assert store.get_item(ALICE, "same") is second
    for name in order:
        store.delete_response(ALICE, name)
        if name == "a" and order == "ab":
            assert store.get_item(ALICE, "same") is second
    assert store.get_item(ALICE, "same") is None
