"""What the router makes of a structured output before a verifier hears of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from outrider_router.requests import grammar_check
from outrider_router.requests.service import RouterService

from outrider.errors import FailedPreconditionError, InvalidRequestError
from outrider.spec.structured_output import StructuredKind, StructuredOutput
from outrider.wire.inference import GenerateRequest, StoppingOptions
from tests.fakes.router import running_router
from tests.fakes.tokenizer import EOS_ID
from tests.fakes.verifier import FakeVerifier
from tests.unit.router.helpers import assert_all_freed, text_request

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


async def test_without_the_library_a_form_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_check.GrammarCompiler, "load", lambda *_, **__: None)
    async with running_router(tmp_path, {"v": FakeVerifier()}) as router:
        with pytest.raises(FailedPreconditionError, match="llguidance"):
            await router.generate(asked())
