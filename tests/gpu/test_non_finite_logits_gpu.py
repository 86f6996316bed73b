"""Rows without a finite logit on a GPU: found, and fatal to their own session only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.engine.acceptance import accept_drafts
from outrider.engine.kernels.acceptance.matching import accept_matching
from outrider.engine.kernels.acceptance.randomized import accept_sampled
from outrider.engine.kernels.finite import find_finite_rows, find_finite_rows_torch
from outrider.engine.kernels.sampling import choose_tokens
from outrider.spec.sampling import Rule
from tests.reference.damaged_target import damage_embedding
from tests.reference.device_rounds import (
    device_law,
    invalid_outputs,
    mixed_batch,
    without_finite_logits,
)
from tests.unit.verifier.device_serving import OWN, PROMPTS, SAMPLINGS, plain_texts, serving
from tests.unit.verifier.model_runner.test_non_finite_logits import (
    PLAIN,
    RULES,
    assert_failed_at,
    assert_invalid,
    read_all,
    token_of_one_text,
)

pytestmark = pytest.mark.gpu
CUDA = "cuda:0"
MATCHING = (Rule.GREEDY, Rule.COUPLED)


@pytest.fixture(scope="module")
def texts(tiny_target: Path) -> dict[str, list[list[int]]]:
    """See `plain_texts`."""
    return plain_texts(tiny_target)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [100, 1024, 8193, 128_256, 151_936])
def test_rows_are_those_of_the_reference(
    vocab: int, dtype: torch.dtype, device: torch.device
) -> None:
    """A finite logit may be the last one of a row, and padding holds one that does not count."""
    rows = torch.full((9, vocab + 64), 1.0, dtype=dtype)
    for row, value in enumerate((torch.nan, torch.inf, -torch.inf, 0.0)):
        rows[row, :vocab] = value
        rows[4 + row, :vocab] = value
        rows[4 + row, vocab - 1 - row] = -3.0
    rows[8, :vocab] = torch.nan
    rows[8, 1:vocab:2] = torch.inf
    found = find_finite_rows(rows.to(device)[:, :vocab])
    assert found.tolist() == [0, 0, 0, 1, 1, 1, 1, 1, 0]
    assert found.tolist() == find_finite_rows_torch(rows[:, :vocab]).tolist()


@pytest.mark.parametrize("matching", [True, False])
@pytest.mark.parametrize("widths", [[], [1, 1, 1, 1], [3, 2]])
def test_outcomes_are_the_hosts(widths: list[int], matching: bool, device: torch.device) -> None:
    rules = MATCHING if matching else tuple(Rule)
    batch = without_finite_logits(mixed_batch(96, 500, widths, seed=5, rules=rules), seed=5)
    expected = accept_drafts(batch.logits, batch.rows)
    here, logits = batch.device.to(device), batch.logits.to(device)
    common: dict[str, Any] = {
        "num_nodes": here.num_nodes,
        "state": here.state,
        "slots": here.slots,
        "positions": here.positions,
    }
    chosen = choose_tokens(
        logits, here.state, here.slots, here.positions, rows_per_slot=here.num_nodes,
        side="target", finite=find_finite_rows(logits),
    )  # fmt: skip
    if matching:
        found = accept_matching(chosen, here.tokens, here.parents, **common)
    else:
        distribution = device_law([row.distribution for row in batch.rows], here.num_nodes)
        distribution = type(distribution)(*(t.to(device) for t in distribution))
        found = accept_sampled(
            logits, chosen, here.tokens, here.parents, distribution=distribution, **common
        )
    assert invalid_outputs(found) == [e.invalid_output for e in expected]
    assert any(invalid_outputs(found)) and not all(invalid_outputs(found))
    # Of healthy sessions a random draw next to its probability may fall on the other side.
    for index, one in enumerate(expected):
        if one.invalid_output:
            count = int(found.counts[index])
            assert tuple(found.tokens[index, :count].tolist()) == one.tokens


@pytest.mark.parametrize("cuda_graphs", [True, False])
@pytest.mark.parametrize("name", [*RULES, "penalties", "truncated"])
async def test_a_prompt_that_gives_nan_fails_alone(
    name: str, cuda_graphs: bool, tiny_target: Path, tmp_path: Path
) -> None:
    sampling = RULES.get(name) or SAMPLINGS[name]
    options = {"plan": PLAIN, "drafter": None, "sampling": sampling}
    async with serving(tiny_target, device=CUDA, cuda_graphs=cuda_graphs) as service:
        wanted = await read_all(service, PROMPTS, **options)
    used = {token for tokens, _ in wanted for token in tokens} | {t for p in PROMPTS for t in p}
    bad = next(token for token in range(383, 0, -1) if token not in used)
    damaged = damage_embedding(tiny_target, tmp_path / "damaged", [bad])
    async with serving(damaged, device=CUDA, cuda_graphs=cuda_graphs) as service:
        found = await read_all(service, (*PROMPTS, (5, 6, bad)), **options)
        assert service.core.counters["invalid_outputs"] == 1
    assert found[:3] == wanted
    assert found[3][0] == []
    assert_invalid(found[3][1])


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
    async with serving(damaged, tiny_head, device=CUDA, placement=placement) as service:
        found = await read_all(
            service, PROMPTS, plan=OWN, drafter=None, sampling=SAMPLINGS["coupled"]
        )
    assert_failed_at(bad, found, wanted)
