"""A drafter behind a slow link: its access to verifiers leads through a relay."""

from __future__ import annotations

import pytest
from outrider_bench.hooks.slow_link import SlowDialer, install
from outrider_drafter.hooks import DrafterHooks, VerifierAccess

from outrider.errors import InvalidRequestError, UnavailableError
from outrider.transport.in_process import InprocNetwork
from outrider.wire.messages import ShmOffer


async def test_the_hook_puts_a_relay_before_verifiers_and_says_so() -> None:
    hooks = DrafterHooks()
    install(hooks, delay_ms=0.5)
    assert hooks.handicap == "exchange held by 0.5 ms each way"
    access = hooks.wrap_access(VerifierAccess(InprocNetwork().dialer()))
    assert isinstance(access.dialer, SlowDialer)
    try:
        # The relay has answered: it knows the command, and no such channel.
        with pytest.raises(UnavailableError, match="the relay: (?!.*no such command)"):
            access.join(ShmOffer(name="nowhere", token=bytes(16)))
    finally:
        await access.dialer.close()
    with pytest.raises(UnavailableError, match="gone"):
        access.join(ShmOffer(name="nowhere", token=bytes(16)))


@pytest.mark.parametrize("delay_ms", [0.0, -1.0, 500.0])
def test_a_delay_out_of_range_is_refused(delay_ms: float) -> None:
    with pytest.raises(InvalidRequestError, match=r"delay_ms must be in \(0, 400\]"):
        install(DrafterHooks(), delay_ms=delay_ms)
