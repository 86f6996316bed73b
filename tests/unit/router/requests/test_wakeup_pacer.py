"""Readers are woken at once while the router keeps up, and together when it does not."""

from __future__ import annotations

import asyncio
import time

from outrider_router.requests.session_output import MAX_DELAY_S, WakeupPacer


class Client:
    """Counts its wake-ups; waits whenever it is told to."""

    def __init__(self) -> None:
        self.woken = 0
        self.waiting = True

    def wake_reader(self) -> bool:
        self.woken += 1
        was, self.waiting = self.waiting, False
        return was


def come_back(pacer: WakeupPacer, client: Client) -> None:
    client.waiting = True
    pacer.record_reader_return(client)


async def test_a_round_is_passed_on_at_once_while_nobody_is_busy() -> None:
    pacer, clients = WakeupPacer(time.monotonic), [Client(), Client()]
    pacer.wake_readers(clients)
    assert [client.woken for client in clients] == [1, 1]


async def test_rounds_that_arrive_while_clients_are_busy_are_passed_on_together() -> None:
    pacer, clients = WakeupPacer(time.monotonic), [Client(), Client()]
    for _ in range(3):
        pacer.wake_readers(clients)
    assert [client.woken for client in clients] == [1, 1]
    for client in clients:
        come_back(pacer, client)
    await asyncio.sleep(MAX_DELAY_S)
    assert [client.woken for client in clients] == [2, 2]


async def test_a_slow_client_holds_up_the_others_for_a_bounded_time() -> None:
    pacer, slow, quick = WakeupPacer(time.monotonic), Client(), Client()
    pacer.wake_readers([slow, quick])
    come_back(pacer, quick)
    pacer.wake_readers([slow, quick])
    assert quick.woken == 1
    await asyncio.sleep(2 * MAX_DELAY_S)
    assert quick.woken == 2
    # It is not waited for any more: it was not there when the second round was passed on.
    come_back(pacer, quick)
    pacer.wake_readers([quick])
    await asyncio.sleep(MAX_DELAY_S / 2)
    assert quick.woken == 3


async def test_one_slow_client_in_eight_holds_up_nobody() -> None:
    pacer, clients = WakeupPacer(time.monotonic), [Client() for _ in range(8)]
    pacer.wake_readers(clients)
    for client in clients[1:]:
        come_back(pacer, client)
    pacer.wake_readers(clients[1:])
    await asyncio.sleep(MAX_DELAY_S / 2)
    assert [client.woken for client in clients[1:]] == [2] * 7


async def test_what_came_while_a_client_was_busy_waits_for_its_turn() -> None:
    pacer, clients = WakeupPacer(time.monotonic), [Client() for _ in range(2)]
    pacer.wake_readers(clients)
    first, second = clients
    # More has come for the first, but the second's message has not left.
    first.waiting = True
    pacer.record_reader_return(first, more=True)
    assert first.woken == 1
    come_back(pacer, second)
    await asyncio.sleep(MAX_DELAY_S / 2)
    assert (first.woken, second.woken) == (2, 1)
