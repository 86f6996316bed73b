"""A row without a finite logit ends its own session by a typed error, on both engines."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest
from outrider_verifier.server.service import VerifierService

from outrider.errors import InternalError, OutriderError
from outrider.spec.plan import DraftMethod, SpeculationPlan
from outrider.spec.sampling import Rule, SamplingParams
from outrider.spec.structured_output import StructuredKind, StructuredOutput
from tests.reference.damaged_target import damage_embedding
from tests.unit.verifier.device_serving import (
    OWN,
    PROMPTS,
    SAMPLINGS,
    attached,
    follow,
    plain_texts,
    serving,
)
from tests.unit.verifier.harness import CHAIN, DRAFTER, TREE, make_spec

PLAIN = SpeculationPlan(method=DraftMethod.NONE)
ENGINES = pytest.mark.parametrize("device", [None, "cpu"], ids=["host", "device"])
RULES = {str(rule): SamplingParams(temperature=0.9, seed=4, rule=rule) for rule in Rule}
Read = tuple[list[int], OutriderError | None]


async def read(
    service: VerifierService, name: str, prompt: tuple[int, ...], **options: Any
) -> Read:
    """Read a session to its end: its tokens, and the error that ended it."""
    spec = make_spec(name, prompt=prompt, **({"max_new_tokens": 24} | options))
    tokens: list[int] = []
    try:
        async for event in service.open_session(spec):
            tokens += event.tokens
    except OutriderError as error:
        return tokens, error
    return tokens, None


async def read_all(
    service: VerifierService, prompts: tuple[tuple[int, ...], ...], **options: Any
) -> list[Read]:
    """Read sessions at once."""
    reads = [read(service, f"s{i}", prompt, **options) for i, prompt in enumerate(prompts)]
    return list(await asyncio.gather(*reads))


def assert_invalid(error: OutriderError | None) -> None:
    """The error is the model's."""
    assert isinstance(error, InternalError) and error.reason == "MODEL_OUTPUT_INVALID"
    assert "no finite logit" in error.message


@pytest.fixture(scope="module")
def texts(tiny_target: Path) -> dict[str, list[list[int]]]:
    """See `plain_texts`."""
    return plain_texts(tiny_target)


@ENGINES
@pytest.mark.parametrize("name", [*RULES, "penalties", "truncated"])
async def test_a_prompt_that_gives_nan_fails_alone(
    name: str,
    device: str | None,
    tiny_target: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    sampling = RULES.get(name) or SAMPLINGS[name]
    options = {"plan": PLAIN, "drafter": None, "sampling": sampling}
    async with serving(tiny_target, device=device) as service:
        wanted = await read_all(service, PROMPTS, **options)
    used = {token for tokens, _ in wanted for token in tokens} | {t for p in PROMPTS for t in p}
    bad = next(token for token in range(383, 0, -1) if token not in used)
    damaged = damage_embedding(tiny_target, tmp_path / "damaged", [bad])
    prompts = (*PROMPTS, (5, 6, bad), (bad, *range(40, 60)))
    with caplog.at_level(logging.ERROR):
        async with serving(damaged, device=device) as service:
            found = await read_all(service, prompts, **options)
            counters = service.core.counters
    assert found[:3] == wanted
    for tokens, error in found[3:]:
        assert tokens == []
        assert_invalid(error)
    assert (counters["invalid_outputs"], counters["failed"], counters["failed_rounds"]) == (2, 2, 0)
    assert sum("no finite logit" in record.message for record in caplog.records) == 1


def token_of_one_text(texts: list[list[int]]) -> int:
    """A token that the first text has in its middle, and no other text or prompt has."""
    others = {token for text in texts[1:] for token in text} | {t for p in PROMPTS for t in p}
    first = texts[0]
    return next(t for i, t in enumerate(first) if 4 < i < 20 and t not in {*others, *first[:i]})


@ENGINES
@pytest.mark.parametrize("plan", [PLAIN, CHAIN, TREE], ids=["plain", "chain", "tree"])
@pytest.mark.parametrize("name", ["greedy", "coupled"])
async def test_a_text_that_runs_into_nan_ends_there_and_others_go_on(
    name: str,
    plan: SpeculationPlan,
    device: str | None,
    tiny_target: Path,
    tiny_head: Path,
    texts: dict[str, list[list[int]]],
    tmp_path: Path,
) -> None:
    wanted = texts[name]
    bad = token_of_one_text(wanted)
    damaged = damage_embedding(tiny_target, tmp_path / "damaged", [bad])
    known = dict(zip(PROMPTS, wanted, strict=True))
    options = {"plan": plan, "sampling": SAMPLINGS[name]}
    async with serving(damaged, tiny_head, device=device) as service:
        if plan.is_speculative:
            async with attached(service, follow(known, plan)):
                found = await read_all(service, PROMPTS, drafter=DRAFTER, **options)
        else:
            found = await read_all(service, PROMPTS, drafter=None, **options)
        counters = service.core.counters
    assert_failed_at(bad, found, wanted)
    assert (counters["invalid_outputs"], counters["failed_rounds"]) == (1, 0)


@pytest.mark.parametrize("placement", ["fused", "colocated"])
async def test_own_drafts_run_into_nan_and_others_go_on(
    placement: str,
    tiny_target: Path,
    tiny_head: Path,
    texts: dict[str, list[list[int]]],
    tmp_path: Path,
) -> None:
    wanted = texts["coupled"]
    bad = token_of_one_text(wanted)
    damaged = damage_embedding(tiny_target, tmp_path / "damaged", [bad])
    async with serving(damaged, tiny_head, placement=placement) as service:
        found = await read_all(
            service, PROMPTS, plan=OWN, drafter=None, sampling=SAMPLINGS["coupled"]
        )
    assert_failed_at(bad, found, wanted)


def assert_failed_at(bad: int, found: list[Read], wanted: list[list[int]]) -> None:
    """The first text ended behind `bad` or in the round of it, the others are whole."""
    tokens, error = found[0]
    assert_invalid(error)
    assert tokens == wanted[0][: len(tokens)]
    assert len(tokens) <= wanted[0].index(bad) + 1
    assert found[1:] == [(text[:24], None) for text in wanted[1:]]


@pytest.mark.parametrize("engine", ["host", "device", "own drafts"])
async def test_a_session_in_a_grammar_fails_likewise(
    engine: str, tiny_target: Path, tiny_head: Path, tmp_path: Path
) -> None:
    """A grammar leaves a column in every row, so it would hide that the model gave nothing."""
    damaged = damage_embedding(tiny_target, tmp_path / "damaged", [300])
    form = StructuredOutput(StructuredKind.REGEX, "[a-z]+")
    own = engine == "own drafts"
    options = {"plan": OWN if own else PLAIN, "drafter": None, "structured_output": form}
    place: dict[str, Any] = {"placement": "fused"} if own else {}
    device = None if engine == "host" else "cpu"
    prompts = ((5, 6, 300), (5, 6, 7))
    async with serving(damaged, tiny_head if own else None, device=device, **place) as service:
        found = await read_all(service, prompts, stop_token_ids=(2,), **options)
    assert found[0][0] == []
    assert_invalid(found[0][1])
    assert found[1][0] and found[1][1] is None
