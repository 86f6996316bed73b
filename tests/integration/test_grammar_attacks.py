"""Grammars that stopped or killed the router or the verifier: each is refused for its own request,
while other clients' streams, grammars and `/health` go on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import pytest

from outrider.client import Client, InvalidRequestError, RetryPolicy
from outrider.spec.structured_output import StructuredKind, StructuredOutput
from outrider.transport.grpc.dialer import GrpcDialer
from outrider.wire.messages import SessionSpec
from tests.integration.fake_endpoints import spec
from tests.integration.gap_meter import GapMeter, Gaps, measure_calm
from tests.integration.stack import Stack, StackOptions, metric
from tests.unit.grammar import attacks

TIMEOUT_S = 1.5
AMBIGUOUS = 's: s s | s s s | "a" |'


@pytest.fixture(scope="module")
def stack_options() -> StackOptions:
    return {
        "router": ["--http", "127.0.0.1:0", "--metrics-port", "0"],
        "with_drafter": False,
    }


@pytest.fixture(scope="module", autouse=True)
def short_time_limit() -> Iterator[None]:
    """The processes of the stack have short time limits."""
    with pytest.MonkeyPatch.context() as patch:
        for process in ("ROUTER", "VERIFIER"):
            patch.setenv(f"OUTRIDER_{process}_GRAMMAR_COMPILE__TIMEOUT_S", str(TIMEOUT_S))
        patch.setenv("OUTRIDER_VERIFIER_GRAMMAR_MASKS__SESSION_S", "1.0")
        yield


@pytest.fixture(scope="module")
def calm(short_time_limit: None, survivor: Stack) -> Gaps:
    return measure_calm(*addresses(survivor), seconds=2.0)


def addresses(stack: Stack) -> tuple[str, str]:
    return stack.router.address, str(stack.router.ready["http"])


def refused_by_sdk(stack: Stack, form: StructuredOutput) -> str:
    """The reason with which the SDK, which may try again, ends a request with this form."""
    option = "grammar" if form.kind is StructuredKind.GRAMMAR else "json_schema"
    options: dict[str, str] = {option: form.text}
    with Client(stack.router.address, timeout_s=30.0, retry=RetryPolicy(max_attempts=5)) as client:
        try:
            client.generate("x", max_tokens=4, **options)  # type: ignore[arg-type]
        except InvalidRequestError as error:
            return error.reason
    return ""


def test_no_grammar_stops_or_kills_the_router(survivor: Stack, calm: Gaps) -> None:
    slow = [
        attacks.large_multiple(),
        attacks.large_multiple(99999971),
        attacks.optional_properties(),
        attacks.intersected_expressions(),
    ]
    pids = survivor.router.pid, survivor.verifier.pid
    with GapMeter(*addresses(survivor)) as meter, ThreadPoolExecutor(8) as pool:
        found: list[Future[str]] = [pool.submit(refused_by_sdk, survivor, each) for each in slow]
        with Client(survivor.router.address, timeout_s=30.0) as client:
            for form in (attacks.chained_rules(), attacks.chained_references()):
                # What only needs stack is served.
                assert refused_by_sdk(survivor, form) == ""
            assert client.generate("x", regex="yes|no", max_tokens=8).text in ("yes", "no")
        assert [each.result() for each in found] == ["INVALID_STRUCTURE"] * len(slow)
    meter.gaps.assert_close_to(calm)
    assert (survivor.router.pid, survivor.verifier.pid) == pids
    assert survivor.router.alive and survivor.verifier.alive


def requests_so_far(stack: Stack) -> float:
    """Requests that have ended, once those that others have left are counted, too."""
    while True:
        before = metric(stack.router, "outrider_requests_total")
        time.sleep(0.5)
        if metric(stack.router, "outrider_requests_total") == before:
            return before


def test_the_sdk_does_not_send_a_refused_form_again(survivor: Stack) -> None:
    before = requests_so_far(survivor)
    assert refused_by_sdk(survivor, attacks.large_multiple(99999941)) == "INVALID_STRUCTURE"
    assert metric(survivor.router, "outrider_requests_total") == before + 1


async def outcome(address: str, asked: SessionSpec) -> tuple[int, str]:
    """Tokens that a session emits that is opened on the verifier directly, and its error."""
    dialer, tokens = GrpcDialer(), 0
    try:
        async for event in (await dialer.verifier(address)).open_session(asked):
            tokens += len(event.tokens)
    except InvalidRequestError as error:
        return tokens, error.reason
    finally:
        await dialer.close()
    return tokens, ""


def session(name: str, form: StructuredOutput, tokens: int = 4) -> SessionSpec:
    return replace(spec(name, tokens), structured_output=form)


def test_no_grammar_stops_or_kills_a_verifier_that_is_asked_directly(
    survivor: Stack, calm: Gaps
) -> None:
    forms = {
        "multiple": attacks.large_multiple(99999959),
        "properties": attacks.optional_properties(11_001),
        "rules": attacks.chained_rules(15_000),
        "references": attacks.chained_references(900),
    }

    async def attack() -> dict[str, tuple[int, str]]:
        found = [outcome(survivor.verifier.address, session(*each)) for each in forms.items()]
        return dict(zip(forms, await asyncio.gather(*found), strict=True))

    with GapMeter(*addresses(survivor)) as meter:
        found = asyncio.run(attack())
    assert found.pop("references")[1] == ""
    assert set(found.values()) == {(0, "INVALID_STRUCTURE")}
    meter.gaps.assert_close_to(calm)
    assert survivor.verifier.alive


def test_an_ambiguous_grammar_ends_its_own_session_and_holds_nobody_up(
    survivor: Stack, calm: Gaps
) -> None:
    def ask(number: int) -> str:
        with Client(survivor.router.address, timeout_s=60.0) as client:
            try:
                client.generate(
                    f"{number}", grammar=f"start: s\n{AMBIGUOUS}", max_tokens=400, min_tokens=400
                )
            except InvalidRequestError as error:
                return error.reason
        return ""

    with GapMeter(*addresses(survivor)) as meter, ThreadPoolExecutor(2) as pool:
        assert list(pool.map(ask, range(2))) == ["STRUCTURE_FAILED"] * 2
    meter.gaps.assert_close_to(calm)


def test_an_ambiguous_output_that_was_emitted_elsewhere_holds_nobody_up(
    survivor: Stack, calm: Gaps
) -> None:
    with Client(survivor.router.address) as client:
        (letter,) = client.generate("x", regex="a", max_tokens=4).token_ids[:1]
    form = attacks.ambiguous()
    asked = session("resumed", form, 400)
    asked = replace(asked, token_ids=(*asked.token_ids, *[letter] * 300))
    with GapMeter(*addresses(survivor)) as meter:
        tokens, reason = asyncio.run(outcome(survivor.verifier.address, asked))
    assert (tokens, reason) == (0, "STRUCTURE_FAILED")
    meter.gaps.assert_close_to(calm)
