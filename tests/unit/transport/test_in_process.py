from __future__ import annotations

import pytest

from outrider.errors import AlreadyExistsError, UnavailableError
from outrider.transport.in_process import InprocNetwork
from outrider.transport.interface import VerifierConnection
from outrider.wire.messages import DrafterMessage, Proposals, Verdicts
from tests.integration.fake_endpoints import FakeDrafter, FakeVerifier, proposal
from tests.waiting import soon, until


class Recorder(FakeVerifier):
    """Keeps the very objects that arrive."""

    def __init__(self, *, together: bool = False) -> None:
        super().__init__()
        self._together = together
        self.messages: list[DrafterMessage] = []

    async def exchange(self, connection: VerifierConnection) -> None:
        self.messages.append(await connection.receive())
        if self._together:
            self.messages += connection.receive_ready()


@pytest.mark.parametrize("encoded", [True, False])
async def test_unencoded_messages_are_handed_over_as_they_are(encoded: bool) -> None:
    network, recorder = InprocNetwork(encoded=encoded), Recorder()
    network.serve_verifier("v", recorder)
    connection = await network.dialer().exchange("v")
    sent = proposal(3)
    await connection.send(sent)
    await until(lambda: recorder.messages)
    (arrived,) = recorder.messages
    assert isinstance(arrived, Proposals) and arrived.digests.tolist() == [3]
    assert (arrived is sent) is not encoded
    await connection.close()
    await network.remove("v")


async def test_an_unencoded_exchange_answers() -> None:
    network = InprocNetwork(encoded=False)
    network.serve_verifier("v", FakeVerifier())
    connection = await network.dialer().exchange("v")
    await connection.send(proposal(5))
    verdict = await soon(connection.receive())
    assert isinstance(verdict, Verdicts) and verdict.digests.tolist() == [5]
    await connection.close()
    await network.remove("v")


async def test_an_address_serves_one_endpoint_of_a_kind() -> None:
    network = InprocNetwork()
    network.serve_verifier("a", FakeVerifier())
    network.serve_drafter("a", FakeDrafter())
    with pytest.raises(AlreadyExistsError):
        network.serve_verifier("a", FakeVerifier())
    with pytest.raises(AlreadyExistsError):
        network.serve_drafter("a", FakeDrafter())


async def test_a_withdrawn_address_is_unreachable_and_may_be_reused() -> None:
    network = InprocNetwork()
    network.serve_drafter("d", FakeDrafter())
    drafter = await network.dialer().drafter("d")
    await drafter.info()
    await network.remove("d")
    with pytest.raises(UnavailableError):
        await drafter.info()
    network.serve_drafter("d", FakeDrafter())
    await drafter.info()


@pytest.mark.parametrize("encoded", [True, False])
async def test_messages_offered_together_are_ready_together(encoded: bool) -> None:
    network, recorder = InprocNetwork(encoded=encoded), Recorder(together=True)
    network.serve_verifier("v", recorder)
    connection = await network.dialer().exchange("v")
    assert connection.try_send(*map(proposal, range(5)))
    await until(lambda: len(recorder.messages) == 5)
    assert [m.digests[0] for m in recorder.messages if isinstance(m, Proposals)] == list(range(5))
    await connection.close()
    await network.remove("v")
