"""The device engine, on the torch twins of its kernels: the text is that of the host's engine."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from outrider_verifier.exchange.verdict_builder import AdvancedBatch
from outrider_verifier.model_runner.gpu_runner.runner import GpuModelRunner
from outrider_verifier.server.service import VerifierService
from torch import Tensor

from outrider.engine.device.drafting.in_process_drafter import InProcessDrafter
from outrider.engine.device.graphs.shape_family import ShapeFamily
from outrider.engine.device.graphs.shapes import CHUNK_TOKENS
from outrider.engine.kernels.logits_processor.process import process_draft_logits
from outrider.spec.plan import DraftMethod, SpeculationPlan
from outrider.spec.sampling import Rule, SamplingParams
from outrider.wire.messages import TensorDtype, Verdicts, WireTensor
from tests.grids import thorough
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
        results = await run_all(service, SpeculationPlan(), SAMPLINGS[name])
    assert [tokens for tokens, _ in results] == texts[name]


# Where the head runs and how a row is processed by the logits processor do not know of each other.
BESIDE = ("greedy", "coupled", "counted")


@pytest.mark.parametrize(
    ("placement", "name"),
    [
        *(("fused", name) for name in SAMPLINGS),
        *(("colocated", name) for name in BESIDE),
        *(thorough("colocated", name) for name in SAMPLINGS if name not in BESIDE),
    ],
)
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


@pytest.mark.parametrize(
    ("placement", "name"),
    [
        ("colocated", "coupled"),
        ("fused", "greedy"),
        thorough("colocated", "greedy"),
        thorough("fused", "coupled"),
    ],
)
async def test_own_trees_change_no_text(
    name: str,
    placement: str,
    tiny_target: Path,
    tiny_head: Path,
    texts: dict[str, list[list[int]]],
) -> None:
    nodes = 32
    async with serving(
        tiny_target,
        tiny_head,
        placement=placement,
        max_tree_nodes=nodes,
        draft_length=nodes,
        draft_top_k=16,
    ) as service:
        plan = SpeculationPlan(method=DraftMethod.EAGLE3, draft_tokens=nodes)
        results = await run_all(service, plan, SAMPLINGS[name])
    assert [tokens for tokens, _ in results] == texts[name]
    stats = [stats for _, stats in results]
    assert all(s.proposed >= nodes * (s.rounds - 1) for s in stats)
    # The head is a random one: among so many of 384 ids some stand.
    assert sum(s.accepted for s in stats) > 0


# Chains have distributions that are judged by, trees none.
@pytest.mark.parametrize(
    ("rule", "topk"),
    [
        (Rule.REJECTION, 1),
        (Rule.TARGET_ONLY, 3),
        thorough(Rule.REJECTION, 3),
        thorough(Rule.TARGET_ONLY, 1),
    ],
)
async def test_own_drafts_serve_the_sampled_rules(
    rule: Rule, topk: int, tiny_target: Path, tiny_head: Path
) -> None:
    sampling = SamplingParams(temperature=1.0, seed=4, rule=rule)
    async with serving(tiny_target, tiny_head, placement="fused", draft_top_k=topk) as service:
        results = await run_all(service, OWN, sampling)
        again = await run_all(service, OWN, sampling)
    assert [tokens for tokens, _ in results] == [tokens for tokens, _ in again]
    assert [len(tokens) for tokens, _ in results] == [24, 25, 26]
    assert all(stats.proposed > 0 for _, stats in results)


async def stopped_text(
    service: VerifierService, stops: tuple[int, ...], plan: SpeculationPlan
) -> list[int]:
    """An answer that may stop at these ids from its tenth token on."""
    spec = make_spec(
        prompt=PROMPTS[0],
        max_new_tokens=24,
        plan=plan,
        sampling=SAMPLINGS["coupled"],
        drafter=None,
        stop_token_ids=stops,
        min_new_tokens=9,
    )
    return [token async for event in service.open_session(spec) for token in event.tokens]


async def test_a_minimum_length_ends_inside_a_round(
    tiny_target: Path, tiny_head: Path, texts: dict[str, list[list[int]]]
) -> None:
    """Stop ids are banned by position; a round goes on past the last one where they are."""
    plain = texts["coupled"][0]
    stops = (plain[2], plain[5], plain[14])
    async with serving(tiny_target, device=None) as service:
        expected = await stopped_text(service, stops, SpeculationPlan())
    assert len(expected) >= 9 and not set(stops) & set(expected[:9])
    for placement in ("colocated", "fused"):
        async with serving(tiny_target, tiny_head, placement=placement) as service:
            assert await stopped_text(service, stops, OWN) == expected


@pytest.mark.parametrize("name", ["penalties", "counted", "biased mode"])
async def test_the_heads_drafts_are_warped_too(
    name: str, tiny_target: Path, tiny_head: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the same history as the target's, in columns of their own."""
    changed = 0
    draft = InProcessDrafter.draft_round

    def spy(logits: Tensor, *args: Any) -> Tensor:
        nonlocal changed
        before = logits.float().clone()
        found = process_draft_logits(logits, *args)
        changed += int((found != before).any(dim=-1).sum())
        return found

    def compare(self: InProcessDrafter, *args: Any, **options: Any) -> None:
        ids = self.weights.target_ids
        assert torch.equal(self.logits_slots.state.counts, self.slots.warp.state.counts[:, ids])
        draft(self, *args, **options)

    monkeypatch.setattr("outrider.engine.device.drafting.draft_program.process_draft_logits", spy)
    monkeypatch.setattr(InProcessDrafter, "draft_round", compare)
    async with serving(tiny_target, tiny_head, placement="fused") as service:
        await run_all(service, OWN, SAMPLINGS[name])
    assert changed > 20


@pytest.mark.parametrize("plan", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("name", SAMPLINGS)
async def test_drafts_from_outside_change_no_text(
    name: str,
    plan: SpeculationPlan,
    tiny_target: Path,
    tiny_head: Path,
    texts: dict[str, list[list[int]]],
) -> None:
    known = dict(zip(PROMPTS, texts[name], strict=True))
    async with serving(tiny_target, tiny_head) as service:
        results = await run_drafted(service, known, plan, SAMPLINGS[name])
    assert [tokens for tokens, _ in results] == texts[name]
    assert all(stats.accepted > 0 for _, stats in results)


@pytest.mark.parametrize("plan", [CHAIN, TREE], ids=["chain", "tree"])
async def test_a_round_of_many_launches_keeps_them_apart(
    plan: SpeculationPlan,
    tiny_target: Path,
    tiny_head: Path,
    texts: dict[str, list[list[int]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """More launches than a ring has places, of one shape: each session its own outcome."""
    monkeypatch.setattr(ShapeFamily, "max_rows", lambda family, nodes: 1)
    monkeypatch.setattr("outrider.engine.device.transfer.buffers.NUM_STAGING_BUFFERS", 1)
    prompts = (*PROMPTS, *PROMPTS)
    most: list[int] = []
    submit = GpuModelRunner.submit_round

    def noted(engine: Any, *rows: Any) -> Any:
        flight = submit(engine, *rows)
        most.append(len(flight.groups))
        return flight

    monkeypatch.setattr(GpuModelRunner, "submit_round", noted)
    known = dict(zip(PROMPTS, texts["greedy"], strict=True))
    async with serving(tiny_target, tiny_head, batch_wait_ms=200.0) as service:
        results = await run_drafted(
            service, known, plan, SAMPLINGS["greedy"], prompts=prompts, max_new_tokens=20
        )
    assert max(most) > 1
    assert [tokens for tokens, _ in results] == [known[prompt][:20] for prompt in prompts]


LONG = (tuple(range(5, 155)), (9, 9, 9), tuple(range(300, 171, -1)), tuple(range(7, 71)))
"""Of five pieces, of one that is hardly used, of four and a bit, of two that are full."""


@pytest.fixture(scope="module")
def long_texts(tiny_target: Path) -> list[list[int]]:
    """Plain coupled text of the long prompts, from the host's engine."""

    async def collect() -> list[list[int]]:
        async with serving(tiny_target, device=None) as service:
            results = await run_all(service, SpeculationPlan(), SAMPLINGS["coupled"], prompts=LONG)
        return [tokens for tokens, _ in results]

    return asyncio.run(collect())


# Prompts of a colocated head go as those of a fused one.
@pytest.mark.parametrize("placement", ["separate", thorough("colocated"), "fused"])
async def test_prompts_of_many_pieces_give_the_hosts_text(
    placement: str, tiny_target: Path, tiny_head: Path, long_texts: list[list[int]]
) -> None:
    head = {} if placement == "separate" else {"placement": placement}
    accepted = []
    for chunk in (7, CHUNK_TOKENS, 1024):  # less than a piece, one, and all of them at once
        async with serving(
            tiny_target, tiny_head, prefill_tokens_per_round=chunk, **head
        ) as service:
            results = await run_all(service, OWN, SAMPLINGS["coupled"], prompts=LONG)
        assert [tokens for tokens, _ in results] == long_texts
        accepted.append([stats.accepted for _, stats in results])
    # The head's drafts follow from the features of the whole prompt, however it was cut.
    assert accepted == [accepted[0]] * 3
    assert (sum(accepted[0]) > 0) == bool(head)


@pytest.mark.parametrize("placement", ["colocated", "fused"])
async def test_a_bucket_of_pieces_that_is_not_full_harms_nothing(
    placement: str,
    tiny_target: Path,
    tiny_head: Path,
    texts: dict[str, list[list[int]]],
) -> None:
    async with serving(
        tiny_target, tiny_head, placement=placement, prefill_tokens_per_round=1024
    ) as service:
        # Seven prompts at once: nine pieces in a bucket of twelve, in some round.
        prompts = (*PROMPTS, *PROMPTS, PROMPTS[1])
        results = await run_all(service, OWN, SAMPLINGS["greedy"], prompts=prompts)
    known = texts["greedy"]
    wanted = [text[:20] for text in (*known, *known, known[1])]
    assert [tokens[:20] for tokens, _ in results] == wanted


async def told_features(
    target_dir: Path, head_dir: Path, known: list[list[int]], plan: SpeculationPlan, **options: Any
) -> dict[str, list[WireTensor]]:
    """The features of each session's verdicts after its prompt, on a drafted run."""
    told: dict[str, list[WireTensor]] = {}
    async with serving(target_dir, head_dir, **options) as service:
        made = service.core.verdict_builder.build_verdicts

        def spy(followed: AdvancedBatch) -> list[tuple[int, Verdicts]]:
            result = made(followed)
            by_handle = {session.handle: session for session in followed.batch.sessions}
            for _, verdicts in result:
                for verdict in verdicts.iter_verdicts():
                    assert verdict.features is not None
                    session = by_handle[verdict.handle]
                    if verdict.start >= session.spec.prompt_len + 1:
                        # What is told is encoded at once: the memory belongs to later rounds.
                        rows_ = verdict.features.data.copy()
                        features = replace(verdict.features, data=rows_)
                        told.setdefault(session.session_id, []).append(features)
            return result

        service.core.verdict_builder.build_verdicts = spy  # type: ignore[method-assign]
        # Wrong now and then, so that there are many rounds, of all lengths.
        drafted = [[t if i % 3 else (t + 1) % 384 for i, t in enumerate(text)] for text in known]
        texts = dict(zip(PROMPTS, drafted, strict=True))
        results = await run_drafted(service, texts, plan, SAMPLINGS["greedy"])
    assert [tokens for tokens, _ in results] == known
    return told


@pytest.mark.parametrize("plan", [CHAIN, TREE], ids=["chain", "tree"])
async def test_features_are_the_hosts(
    plan: SpeculationPlan, tiny_target: Path, tiny_head: Path, texts: dict[str, list[list[int]]]
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
