"""One client's forms that compile slowly do not hold up those of others."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from outrider_router.requests.grammar_check import GrammarChecker

from outrider.errors import InvalidRequestError, ResourceExhaustedError
from outrider.grammar.limits import MAX_FIRST_TRY_WALL_S, CompileLimits
from outrider.spec.structured_output import StructuredKind, StructuredOutput
from tests.unit.grammar import attacks


@pytest.fixture
def forms(tiny_target: Path, request: pytest.FixtureRequest) -> Iterator[GrammarChecker]:
    limits = getattr(request, "param", CompileLimits())
    found = GrammarChecker(tiny_target / "tokenizer.json", vocab_size=384, limits=limits)
    found.prepare()
    yield found
    found.close()


def regex(text: str) -> StructuredOutput:
    return StructuredOutput(StructuredKind.REGEX, text)


def begin_slow(forms: GrammarChecker, count: int) -> list[asyncio.Task[None]]:
    slow = [attacks.large_multiple(99999989 - 2 * n) for n in range(count)]
    return [asyncio.create_task(forms.check_grammar(form, tenant="slow")) for form in slow]


async def leave(tasks: list[asyncio.Task[None]]) -> list[BaseException | None]:
    for task in tasks:
        task.cancel()
    return await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize("tenant", ["slow", "other"])
async def test_a_simple_form_is_compiled_while_slow_ones_wait(
    forms: GrammarChecker, tenant: str
) -> None:
    await forms.check_grammar(regex("warm"), tenant="slow")
    slow = begin_slow(forms, 20)
    await asyncio.sleep(0)
    began = time.monotonic()
    await forms.check_grammar(regex("yes|no"), tenant=tenant)
    waits = 20 if tenant == "slow" else 2
    # A try takes `MAX_FIRST_TRY_S` where a core is free.
    assert time.monotonic() - began < 2.0 + waits * MAX_FIRST_TRY_WALL_S
    await leave(slow)


@pytest.mark.parametrize("tenant", ["slow", "other"])
async def test_a_flood_of_slow_forms_refuses_no_simple_one(
    forms: GrammarChecker, tenant: str
) -> None:
    await forms.check_grammar(regex("warm"), tenant="slow")
    slow = begin_slow(forms, 67)
    await asyncio.sleep(0)
    simple = asyncio.create_task(forms.check_grammar(regex("yes|no"), tenant=tenant))
    if tenant == "slow":
        # It comes last of its own tenant: that its turn comes is the other test's.
        await asyncio.sleep(1.0)
        assert not simple.done()
        await leave([simple])
    else:
        await asyncio.wait_for(simple, 4.0)
    ends = await leave(slow)
    assert sum(isinstance(end, ResourceExhaustedError) for end in ends) >= 1


@pytest.mark.parametrize("forms", [CompileLimits(timeout_s=2.0)], indirect=True)
async def test_a_form_that_is_slow_is_compiled_with_the_full_limit(forms: GrammarChecker) -> None:
    (structured,) = [attacks.large_multiple()]
    with pytest.raises(InvalidRequestError, match="longer than 2 s"):
        await forms.check_grammar(structured, tenant="a")


@pytest.mark.parametrize(
    "forms", [CompileLimits(timeout_s=60.0, processes=1)], indirect=True, ids=["one process"]
)
async def test_a_form_beyond_the_first_try_is_served(forms: GrammarChecker) -> None:
    await forms.check_grammar(attacks.large_multiple(200_003), tenant="a")
