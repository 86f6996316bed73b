"""The verifier with a real (tiny, random) Llama and a real feature projection."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from outrider_verifier.config import VerifierConfig
from outrider_verifier.server.service import VerifierService
from outrider_verifier.server.service_builder import build_service

from outrider.engine.heads import load_feature_projection
from outrider.engine.model_loader import load_target
from outrider.engine.target import ForwardBatch, Segment
from outrider.spec.plan import DraftMethod, SpeculationPlan
from outrider.spec.sampling import SamplingParams
from outrider.transport.in_process import InprocNetwork
from tests.factories import make_eagle3_head, make_target
from tests.fakes.scripted_drafter import (
    Draft,
    Followed,
    ProposeFn,
    ScriptedDrafter,
    make_tree,
)
from tests.unit.verifier.harness import ADDRESS, CHAIN, TREE, beside_wrong_siblings, make_spec

PROMPT = tuple(range(40, 61))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A random target and a head for it."""
    folder = tmp_path_factory.mktemp("checkpoints")
    return make_target(folder / "target"), make_eagle3_head(folder / "head")


@asynccontextmanager
async def serving(checkpoints: tuple[Path, Path]) -> AsyncIterator[VerifierService]:
    """A service built from files."""
    target, head = checkpoints
    config = VerifierConfig(
        model=str(target),
        feature_head=str(head),
        kv_tokens=4096,
        max_tree_nodes=16,
        prefill_tokens_per_round=8,
        planner="fixed",
    )
    service = build_service(config)
    try:
        yield service
    finally:
        await service.stop()


async def text_of(
    service: VerifierService, name: str, plan: SpeculationPlan, sampling: SamplingParams
) -> list[int]:
    """Serve a session of 40 tokens."""
    spec = make_spec(name, prompt=PROMPT, max_new_tokens=40, plan=plan, sampling=sampling)
    return [token async for event in service.open_session(spec) for token in event.tokens]


def drafts_from(text: list[int], plan: SpeculationPlan) -> ProposeFn:
    """A chain, or a tree with wrong siblings, that follows a known text."""

    def propose(followed: Followed) -> Draft:
        done = len(followed.tokens) - len(PROMPT)
        right = text[done : done + 4]
        return make_tree(right) if plan.top_k == 1 else beside_wrong_siblings(right)

    return propose


@pytest.mark.parametrize("plan", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
async def test_drafts_leave_the_text_of_a_real_model_alone(
    checkpoints: tuple[Path, Path], plan: SpeculationPlan, temperature: float
) -> None:
    sampling = SamplingParams(temperature=temperature, seed=7)
    async with serving(checkpoints) as service:
        plain = await text_of(service, "plain", SpeculationPlan(method=DraftMethod.NONE), sampling)
        network = InprocNetwork()
        network.serve_verifier(ADDRESS, service)
        info = await service.info()
        drafter = ScriptedDrafter(
            network.dialer(),
            ADDRESS,
            drafts_from(plain, plan),
            vocab_size=info.vocab_size,
            fingerprint=info.feature_fingerprint,
            tokenizer_hash=info.tokenizer_hash,
        )
        await drafter.attach()
        drafted = await text_of(service, "drafted", plan, sampling)
        assert drafted == plain
        assert service.core.counters["accepted_tokens"] >= 28
        info = await service.info()
        assert info.kv_free_blocks == info.kv_total_blocks
        await drafter.detach()
        await network.remove(ADDRESS)
        assert drafter.broken is None


async def test_features_are_those_of_one_forward_over_the_whole_text(
    checkpoints: tuple[Path, Path],
) -> None:
    followed: list[Followed] = []
    async with serving(checkpoints) as service:
        plain = await text_of(service, "plain", SpeculationPlan(), SamplingParams())
        network = InprocNetwork()
        network.serve_verifier(ADDRESS, service)
        info = await service.info()
        tree = drafts_from(plain, TREE)

        def propose(session: Followed) -> Draft:
            followed.append(session)
            return tree(session)

        drafter = ScriptedDrafter(
            network.dialer(),
            ADDRESS,
            propose,
            vocab_size=info.vocab_size,
            fingerprint=info.feature_fingerprint,
        )
        await drafter.attach()
        await text_of(service, "drafted", TREE, SamplingParams())
        await drafter.detach()
        await network.remove(ADDRESS)
    got = np.stack(followed[-1].features)
    tokens = torch.tensor(followed[-1].tokens[: len(got)])
    model = load_target(checkpoints[0], kv_tokens=256)
    projection = load_feature_projection(checkpoints[1], num_target_layers=6)
    segment = Segment(
        sequence=model.pool.allocate(200),
        num_rows=len(tokens),
        positions=torch.arange(len(tokens)),
    )
    batch = ForwardBatch(token_ids=tokens, segments=[segment])
    taps = model.forward(batch, tap_layers=projection.tap_layers).taps
    assert taps is not None
    assert np.allclose(got, projection(taps).numpy(), atol=2e-4)
