"""The page on the API names every field that is taken and every one that is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from outrider_router.api.http.request_models import ChatCompletionRequest, CompletionRequest
from outrider_router.api.http.unsupported_fields import CHAT, COMPLETION, MESSAGE, STRUCTURE

PAGE = (Path(__file__).parents[5] / "docs" / "openai-api.md").read_text()
MODELS = (CompletionRequest, ChatCompletionRequest)
TAKEN = {name for model in MODELS for name in model.model_fields}
REFUSED = {name for fields in (COMPLETION, CHAT, MESSAGE, STRUCTURE) for name in fields}


@pytest.mark.parametrize("name", sorted(TAKEN | REFUSED))
def test_a_field_is_on_the_page(name: str) -> None:
    refused, taken = PAGE.index("### Refused fields"), PAGE.index("## Fields")
    ignored = PAGE.index("### Ignored fields")
    part = PAGE[taken:refused] if name in TAKEN else PAGE[refused:ignored]
    assert f"`{name}`" in part


@pytest.mark.parametrize("model", MODELS)
def test_what_is_taken_is_not_refused(model: type[CompletionRequest]) -> None:
    fields = COMPLETION if model is CompletionRequest else CHAT
    assert not set(model.model_fields) & set(fields)
