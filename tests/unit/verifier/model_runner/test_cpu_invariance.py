"""With `batch_invariant`, texts of a verifier on a CPU depend neither on drafts nor on other
sessions nor on the chunks of prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.engine.linear import can_pack
from outrider.spec.plan import SpeculationPlan
from tests.unit.verifier.device_serving import PROMPTS, SAMPLINGS, run_all, run_drafted, serving
from tests.unit.verifier.harness import CHAIN, TREE

PLAIN = SpeculationPlan()
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@pytest.mark.parametrize("sampling", ["greedy", "coupled", "truncated", "penalties"])
@pytest.mark.parametrize("dtype", DTYPES)
async def test_texts_do_not_depend_on_drafts(
    dtype: str, sampling: str, tiny_target: Path, tiny_head: Path
) -> None:
    if not can_pack(DTYPES[dtype], torch.device("cpu")):
        pytest.skip(f"this CPU cannot pack {dtype}")
    chosen = SAMPLINGS[sampling]
    settings: dict[str, Any] = {
        "device": None,
        "weights": DTYPES[dtype],
        "dtype": dtype,
        "batch_invariant": True,
    }
    known: dict[tuple[int, ...], list[int]] = {}
    async with serving(tiny_target, prefill_tokens_per_round=64, **settings) as service:
        for prompt in PROMPTS:
            ((tokens, _),) = await run_all(
                service, PLAIN, chosen, prompts=(prompt,), max_new_tokens=26
            )
            known[prompt] = tokens
    async with serving(tiny_target, **settings) as service:
        together = await run_all(service, PLAIN, chosen, max_new_tokens=26)
    assert [tokens for tokens, _ in together] == list(known.values())
    for plan in (CHAIN, TREE):
        async with serving(tiny_target, tiny_head, **settings) as service:
            drafted = await run_drafted(service, known, plan, chosen, max_new_tokens=26)
        assert [tokens for tokens, _ in drafted] == list(known.values())
        assert sum(stats.accepted for _, stats in drafted) > 0
