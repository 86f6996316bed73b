"""A verifier service on the device engine (or the host's) over the tiny target."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch
from outrider_verifier.config import VerifierConfig
from outrider_verifier.model_runner.gpu_runner.runner import GpuModelRunner
from outrider_verifier.server.service import VerifierService

from outrider.engine.heads import load_feature_projection, load_head
from outrider.engine.linear import PlainLinear
from outrider.engine.model_loader import load_target
from outrider.grammar.grammar_cache import GrammarCache
from outrider.spec.plan import DraftMethod, SpeculationPlan
from outrider.spec.sampling import SamplingParams
from outrider.transport.in_process import InprocNetwork
from outrider.wire.messages import SpecStats
from tests.fakes.scripted_drafter import Draft, Followed, ProposeFn, ScriptedDrafter, make_tree
from tests.mask_limits import LONG_MASKS
from tests.unit.verifier.harness import ADDRESS, DRAFTER, beside_wrong_siblings, make_spec
from tests.waiting import until

PROMPTS = (tuple(range(40, 61)), (7, 8, 9), tuple(range(100, 150)))
SAMPLINGS = {
    "greedy": SamplingParams(),
    "coupled": SamplingParams(temperature=0.8, seed=11),
    "truncated": SamplingParams(temperature=0.9, top_p=0.8, top_k=20, seed=3),
    "penalties": SamplingParams(repetition_penalty=1.4, banned_ids=(5,)),
    "counted": SamplingParams(
        temperature=0.9, presence_penalty=1.5, frequency_penalty=-0.4, top_p=0.95, seed=5
    ),
    "biased": SamplingParams(
        temperature=1.1, min_p=0.02, logit_bias=((7, 3.5), (300, -100.0)), seed=8
    ),
    "biased mode": SamplingParams(logit_bias=((7, 2.5), (40, -50.0)), frequency_penalty=0.7),
}
OWN = SpeculationPlan(method=DraftMethod.EAGLE3, draft_tokens=3)


@asynccontextmanager
async def serving(
    target_dir: Path,
    head_dir: Path | None = None,
    *,
    device: str | None = "cpu",
    weights: torch.dtype = torch.float32,
    kv_tokens: int = 4096,
    **settings: Any,
) -> AsyncIterator[VerifierService]:
    """A service over the tiny target: on the device engine, or (None) on the host's."""
    place = device or "cpu"
    # The CPU engine keeps the bits of rows only if its weights are packed.
    invariant_host = device is None and bool(settings.get("batch_invariant"))
    target = load_target(
        target_dir,
        kv_tokens=kv_tokens,
        packed=invariant_host,
        device=place,
        dtype=weights,
        batch_invariant=invariant_host,
    )
    projection = head = None
    if head_dir is not None:
        projection = load_feature_projection(
            head_dir, num_target_layers=6, device=place, dtype=weights
        )
        if "placement" in settings:
            head = load_head(
                head_dir,
                embedding=target.embedding,
                num_target_layers=6,
                dtype=weights,
                device=place,
                make_linear=PlainLinear,
            )
            settings["feature_head"] = str(head_dir)
    defaults: dict[str, Any] = {
        "max_tree_nodes": 16,
        "prefill_tokens_per_round": 16,
        "planner": "fixed",
        # On a GPU all of it is pinned at the start, and tests run side by side.
        "swap_space_gb": 0.05,
    }
    config = VerifierConfig(model="tiny", max_sessions=8, device=place, **(defaults | settings))
    runner = GpuModelRunner.build(config, target, projection, head) if device else None
    held = target.pool.free_blocks
    service = VerifierService(
        config,
        target,
        projection,
        runner=runner,
        pool=target.pool,
        max_context_len=target.config.max_position_embeddings,
        grammars=GrammarCache.from_tokenizer_file(
            target_dir / "tokenizer.json", vocab_size=target.vocab_size, masks=LONG_MASKS
        ),
    )
    try:
        yield service
        await until(lambda: target.pool.free_blocks == held)
    finally:
        await service.stop()


async def run_all(
    service: VerifierService,
    plan: SpeculationPlan,
    sampling: SamplingParams,
    drafter: Any = None,
    prompts: tuple[tuple[int, ...], ...] = PROMPTS,
    **other: Any,
) -> list[tuple[list[int], SpecStats]]:
    """Serve all prompts at once; their texts and statistics. `other`: of the specs."""

    async def one(index: int) -> tuple[list[int], SpecStats]:
        spec = make_spec(
            f"s{index}",
            prompt=prompts[index],
            **({"max_new_tokens": 24 + index} | other),
            plan=plan,
            sampling=sampling,
            drafter=drafter,
        )
        tokens: list[int] = []
        stats = SpecStats()
        async for event in service.open_session(spec):
            tokens += event.tokens
            stats = event.stats
        return tokens, stats

    return list(await asyncio.gather(*(one(index) for index in range(len(prompts)))))


def texts_of(results: list[tuple[list[int], SpecStats]]) -> list[list[int]]:
    """The tokens of each result of `run_all`."""
    return [tokens for tokens, _ in results]


def plain_texts(target_dir: Path) -> dict[str, list[list[int]]]:
    """Plain text by sampling, from the host's engine on the CPU, in float32."""

    async def collect() -> dict[str, list[list[int]]]:
        found = {}
        async with serving(target_dir, device=None) as service:
            for name, sampling in SAMPLINGS.items():
                found[name] = texts_of(await run_all(service, SpeculationPlan(), sampling))
        return found

    return asyncio.run(collect())


def follow(text: dict[tuple[int, ...], list[int]], plan: SpeculationPlan) -> ProposeFn:
    """A chain, or a tree with wrong siblings, along a known text."""

    def propose(followed: Followed) -> Draft:
        prompt = next(p for p in PROMPTS if tuple(followed.tokens[: len(p)]) == p)
        done = len(followed.tokens) - len(prompt)
        right = text[prompt][done : done + 3]
        right = [t if i < done % 4 else (t + 1) % 384 for i, t in enumerate(right)]
        return make_tree(right) if plan.top_k == 1 else beside_wrong_siblings(right)

    return propose


async def run_drafted(
    service: VerifierService,
    known: dict[tuple[int, ...], list[int]],
    plan: SpeculationPlan,
    sampling: SamplingParams,
    **other: Any,
) -> list[tuple[list[int], SpecStats]]:
    """Serve all prompts with a drafter that follows the known texts. `other`: of the specs."""
    return await run_proposed(service, follow(known, plan), plan, sampling, **other)


async def run_proposed(
    service: VerifierService,
    propose: ProposeFn,
    plan: SpeculationPlan,
    sampling: SamplingParams,
    **other: Any,
) -> list[tuple[list[int], SpecStats]]:
    """Serve all prompts with a drafter that proposes so."""
    async with attached(service, propose):
        return await run_all(service, plan, sampling, DRAFTER, **other)


@asynccontextmanager
async def attached(service: VerifierService, propose: ProposeFn) -> AsyncIterator[None]:
    """A service with a drafter that proposes so."""
    network = InprocNetwork()
    network.serve_verifier(ADDRESS, service)
    service.start()
    info = await service.info()
    drafter = ScriptedDrafter(
        network.dialer(),
        ADDRESS,
        propose,
        vocab_size=384,
        fingerprint=info.feature_fingerprint,
    )
    await drafter.attach()
    await until(lambda: service.core.counters["attached"] > 0)
    yield
    await drafter.detach()
    await network.remove(ADDRESS)
