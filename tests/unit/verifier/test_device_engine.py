"""The device engine, on the torch twins of its kernels: the text is that of the host's engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from outrider_verifier.handover import Told

from outrider.engine.device.own_head import OwnHead
from outrider.spec.plan import Plan
from outrider.spec.sampling import Rule, SamplingParams
from outrider.wire.messages import TensorDtype, Verdicts, WireTensor
from tests.unit.verifier.device_serving import (
    OWN,
    PROMPTS,
    SAMPLINGS,
    plain_texts,
    run_all,
    run_drafted,
    serving,
)
from tests.unit.verifier.harness import CHAIN, TREE, make_spec


@pytest.fixture(scope="module")
def texts(tiny_target: Path) -> dict[str, list[list[int]]]:
    """See `plain_texts`."""
    return plain_texts(tiny_target)


@pytest.mark.parametrize("name", SAMPLINGS)
async def test_plain_text_is_the_hosts(
    name: str, tiny_target: Path, texts: dict[str, list[list[int]]]
) -> None:
    async with serving(tiny_target) as service:
        results = await run_all(service, Plan(), SAMPLINGS[name])
    assert [tokens for tokens, _ in results] == texts[name]


@pytest.mark.parametrize("placement", ["colocated", "fused"])
@pytest.mark.parametrize("name", SAMPLINGS)
async def test_own_drafts_change_no_text(
    name: str,
    placement: str,
    tiny_target: Path,
    tiny_head: Path,
    texts: dict[str, list[list[int]]],
) -> None:
    async with serving(tiny_target, tiny_head, placement=placement) as service:
        results = await run_all(service, OWN, SAMPLINGS[name])
    assert [tokens for tokens, _ in results] == texts[name]
    assert all(stats.proposed > 0 for _, stats in results)


@pytest.mark.parametrize("rule", [Rule.REJECTION, Rule.TARGET_ONLY])
async def test_own_drafts_serve_the_sampled_rules(
    rule: Rule, tiny_target: Path, tiny_head: Path
) -> None:
    sampling = SamplingParams(temperature=1.0, seed=4, rule=rule)
    async with serving(tiny_target, tiny_head, placement="fused") as service:
        results = await run_all(service, OWN, sampling)
        again = await run_all(service, OWN, sampling)
    assert [tokens for tokens, _ in results] == [tokens for tokens, _ in again]
    assert [len(tokens) for tokens, _ in results] == [24, 25, 26]
    assert all(stats.proposed > 0 for _, stats in results)


async def test_laws_follow_drafts_through_rounds_that_the_host_judges(
    tiny_target: Path, tiny_head: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stale law would be trusted as soon as the device judges the session again."""
    with_law: list[bool] = []
    draft = OwnHead.draft

    def spy(self: OwnHead, *args: Any, **options: Any) -> None:
        with_law.append(options["with_law"])
        draft(self, *args, **options)

    monkeypatch.setattr(OwnHead, "draft", spy)
    sampling = SamplingParams(temperature=1.0, seed=4, rule=Rule.REJECTION)
    async with serving(tiny_target, tiny_head, placement="fused") as service:
        spec = make_spec(
            prompt=PROMPTS[0],
            max_new_tokens=24,
            plan=OWN,
            sampling=sampling,
            drafter=None,
            stop_token_ids=(383,),
            min_new_tokens=9,
        )
        async for _ in service.open_session(spec):
            pass
    assert len(with_law) > 5
    assert all(with_law)


@pytest.mark.parametrize("plan", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("name", SAMPLINGS)
async def test_drafts_from_outside_change_no_text(
    name: str,
    plan: Plan,
    tiny_target: Path,
    tiny_head: Path,
    texts: dict[str, list[list[int]]],
) -> None:
    known = dict(zip(PROMPTS, texts[name], strict=True))
    async with serving(tiny_target, tiny_head) as service:
        results = await run_drafted(service, known, plan, SAMPLINGS[name])
    assert [tokens for tokens, _ in results] == texts[name]
    assert all(stats.accepted > 0 for _, stats in results)


async def told_features(
    target_dir: Path, head_dir: Path, known: list[list[int]], plan: Plan, **options: Any
) -> dict[str, list[WireTensor]]:
    """The features of each session's verdicts after its prompt, on a drafted run."""
    told: dict[str, list[WireTensor]] = {}
    async with serving(target_dir, head_dir, **options) as service:
        advance = service._core.handover.advance

        def spy(rows: Sequence[Told]) -> list[tuple[int, Verdicts]]:
            result = advance(rows)
            by_handle = {row.session.handle: row.session for row in rows}
            for _, verdicts in result:
                for verdict in verdicts.entries():
                    assert verdict.features is not None
                    session = by_handle[verdict.handle]
                    if session.round_id > 0:
                        told.setdefault(session.session_id, []).append(verdict.features)
            return result

        service._core.handover.advance = spy  # type: ignore[method-assign, assignment]
        # Wrong now and then, so that there are many rounds, of all lengths.
        drafted = [[t if i % 3 else (t + 1) % 384 for i, t in enumerate(text)] for text in known]
        texts = dict(zip(PROMPTS, drafted, strict=True))
        results = await run_drafted(service, texts, plan, SAMPLINGS["greedy"])
    assert [tokens for tokens, _ in results] == known
    return told


@pytest.mark.parametrize("plan", [CHAIN, TREE], ids=["chain", "tree"])
async def test_features_are_the_hosts(
    plan: Plan, tiny_target: Path, tiny_head: Path, texts: dict[str, list[list[int]]]
) -> None:
    """Also once their memory on the way from the device was used again."""
    known = texts["greedy"]
    found = await told_features(tiny_target, tiny_head, known, plan)
    expected = await told_features(tiny_target, tiny_head, known, plan, device=None)
    assert len(expected) == len(PROMPTS)
    for name, features in expected.items():
        assert len(features) > 8
        wanted = np.concatenate([wire.data for wire in features])
        given = np.concatenate([wire.data for wire in found[name]])
        np.testing.assert_allclose(given, wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", [TensorDtype.FLOAT32, TensorDtype.BFLOAT16])
async def test_features_cross_in_the_type_that_the_wire_asks_for(
    dtype: TensorDtype, tiny_target: Path, tiny_head: Path, texts: dict[str, list[list[int]]]
) -> None:
    """The models here are float32 either way."""
    told = await told_features(tiny_target, tiny_head, texts["greedy"], CHAIN, dtype=dtype.value)
    assert len(told) == len(PROMPTS)
    for wire in (wire for features in told.values() for wire in features):
        assert wire.dtype is dtype
        assert wire.data.dtype == ("uint16" if dtype is TensorDtype.BFLOAT16 else "float32")
