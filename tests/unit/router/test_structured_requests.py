"""What the router makes of a structured output before a verifier hears of it."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

import pytest
from outrider_router import forms
from outrider_router.service import RouterService

from outrider.errors import FailedPreconditionError, InvalidRequestError, ResourceExhaustedError
from outrider.spec.structured import StructuredKind, StructuredOutput
from outrider.wire.inference import GenerateRequest, StoppingOptions
from tests.fakes.tokenizer import EOS_ID
from tests.fakes.verifier import FakeVerifier
from tests.unit.router.helpers import assert_all_freed, text_request
from tests.waiting import until

FORM = StructuredOutput(StructuredKind.REGEX, "[abc]{2,9}")


def asked(form: StructuredOutput = FORM, **stopping: object) -> GenerateRequest:
    options = StoppingOptions(max_tokens=6, **stopping)  # type: ignore[arg-type]
    return replace(text_request(), structured_output=form, stopping=options)


async def test_a_verifier_is_told_of_the_form_and_of_its_end(
    router: RouterService, verifier: FakeVerifier
) -> None:
    await router.generate(asked(ignore_eos=True, stop_token_ids=(7,)))
    (spec,) = verifier.specs[-1:]
    assert spec.structured_output == FORM
    assert spec.stop_token_ids == (EOS_ID, 7), "a form ends by the model's own ids in any case"
    await assert_all_freed(router, verifier)


async def test_a_form_that_cannot_be_compiled_reaches_no_verifier(
    router: RouterService, verifier: FakeVerifier
) -> None:
    before = len(verifier.specs)
    with pytest.raises(InvalidRequestError, match="unclosed group"):
        await router.generate(asked(StructuredOutput(StructuredKind.REGEX, "(")))
    assert len(verifier.specs) == before
    await assert_all_freed(router, verifier)


async def test_too_many_forms_at_once_are_turned_away(
    router: RouterService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forms, "MOST_COMPILING", 0)
    with pytest.raises(ResourceExhaustedError) as refused:
        await router.generate(asked())
    assert refused.value.retry_after_s == forms.RETRY_S


async def test_all_that_wait_for_one_form_share_its_compiling(
    router: RouterService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forms, "MOST_COMPILING", 2)
    compiled: list[str] = []
    go_on = threading.Event()

    def compile_slowly(_self: forms.Forms, form: StructuredOutput) -> None:
        compiled.append(form.text)
        assert go_on.wait(30.0)
        if form.text == "bad":
            raise InvalidRequestError("no good", reason="INVALID_STRUCTURE")

    monkeypatch.setattr(forms.Forms, "_compile", compile_slowly)
    check = router._intake._forms.check
    good, bad, other = (StructuredOutput(StructuredKind.REGEX, text) for text in ("a", "bad", "c"))
    first, *more = [asyncio.create_task(check(good)) for _ in range(10)]
    refused = [asyncio.create_task(check(bad)) for _ in range(10)]
    await until(lambda: compiled == ["a"], 30.0)
    with pytest.raises(ResourceExhaustedError):
        await check(other)
    first.cancel()
    await asyncio.wait([first])
    go_on.set()
    await asyncio.gather(*more)
    errors = await asyncio.gather(*refused, return_exceptions=True)
    assert all(isinstance(error, InvalidRequestError) for error in errors)
    assert len(set(map(id, errors))) == 10, "an error that is raised twice chains tracebacks"
    assert compiled == ["a", "bad"]
    await check(other)
    assert compiled == ["a", "bad", "c"]


async def test_a_form_that_nobody_waits_for_makes_room(
    router: RouterService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forms, "MOST_COMPILING", 1)
    compiled: list[str] = []
    go_on = threading.Event()

    def compile_slowly(_self: forms.Forms, form: StructuredOutput) -> None:
        compiled.append(form.text)
        assert go_on.wait(30.0)

    monkeypatch.setattr(forms.Forms, "_compile", compile_slowly)
    check = router._intake._forms.check
    left = asyncio.create_task(check(StructuredOutput(StructuredKind.REGEX, "left")))
    await until(lambda: compiled == ["left"], 30.0)
    left.cancel()
    await asyncio.wait([left])
    stays = asyncio.create_task(check(FORM))
    await asyncio.sleep(0)
    go_on.set()
    await stays
    assert compiled == ["left", FORM.text]


async def test_without_the_library_a_form_is_refused(
    router: RouterService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forms.Grammars, "load", lambda *_, **__: None)
    router._intake._forms._grammars = None
    with pytest.raises(FailedPreconditionError, match="llguidance"):
        await router.generate(asked())
