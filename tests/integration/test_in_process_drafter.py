"""A router and a verifier that drafts itself, as real processes without any drafter."""

from __future__ import annotations

import concurrent.futures

import pytest

from outrider.client import Client, DraftMethod, user
from tests.integration.stack import StackOptions
from tests.waiting import wait_until

PROMPT = [user("Count: 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5")]
OWN_LENGTH = 2


@pytest.fixture(scope="module", params=["colocated", "fused"])
def stack_options(request: pytest.FixtureRequest) -> StackOptions:
    flags = ["--placement", request.param, "--draft-length", str(OWN_LENGTH)]
    return {"verifier": [*flags, "--kv-tokens", "8192"], "with_drafter": False}


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "seed": 11}])
def test_own_drafts_are_verified_and_change_no_text(
    client: Client, sampling: dict[str, float]
) -> None:
    plain = client.generate(PROMPT, max_tokens=40, ignore_eos=True, drafter="none", **sampling)  # type: ignore[arg-type]
    drafted = client.generate(PROMPT, max_tokens=40, ignore_eos=True, **sampling)  # type: ignore[arg-type]
    assert drafted.token_ids == plain.token_ids
    assert plain.finish.stats.proposed == 0
    stats = drafted.finish.stats
    assert stats.proposed == OWN_LENGTH * stats.rounds
    assert stats.emitted == 39
    assert stats.fallback_rounds == 0


def test_many_sessions_come_and_go_and_everything_is_given_back(client: Client) -> None:
    def one(index: int) -> tuple[int, ...]:
        return client.generate(
            PROMPT, max_tokens=8 + index % 5, ignore_eos=True, temperature=0.7, seed=index
        ).token_ids

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        first = list(pool.map(one, range(12)))
    assert [one(index) for index in range(12)] == first
    stream = client.stream(PROMPT, max_tokens=400, ignore_eos=True)
    next(iter(stream))
    stream.close()

    def idle() -> bool:
        (verifier,) = client.server_info().verifiers
        return verifier.sessions == 0 and verifier.kv_free_blocks == verifier.kv_total_blocks

    wait_until(idle, what="an idle verifier")
    (verifier,) = client.server_info().verifiers
    assert verifier.in_process_methods == (DraftMethod.EAGLE3,)
