"""A row's outcome is its own: not its neighbours', not the batch's order, not the round's."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from outrider.engine.acceptance import AcceptanceResult, AcceptRow, accept_drafts
from outrider.engine.draft_sampling import propose_children
from outrider.engine.logits_processor import TokenHistory
from outrider.spec.draft_distribution import DistributionEntries, make_distribution
from outrider.spec.sampling import Rule, SamplingParams
from outrider.spec.tree import DraftTree
from tests.reference.host_rounds import tree_shape

WIDTHS: list[list[int]] = [[], [1], [1, 1, 1, 1], [2, 2], [3, 1, 1]]


SETTINGS = (
    SamplingParams(),
    SamplingParams(top_p=0.9),
    SamplingParams(top_k=9, min_p=0.01),
    SamplingParams(presence_penalty=0.7),
)


def _session(index: int, vocab: int) -> tuple[SamplingParams, list[int]]:
    """Settings of the index-th session; all rules, shapes and logits processor settings come by."""
    params = replace(
        SETTINGS[index // 4 % 4],
        temperature=0.0 if index % 11 == 0 else 0.6 + 0.1 * (index % 5),
        rule=list(Rule)[index % 4],
        seed=900 + index,
        banned_ids=(index % vocab,),
    )
    return params, WIDTHS[index % len(WIDTHS)]


def _make(index: int, vocab: int, *, has_distribution: bool = True) -> tuple[Tensor, AcceptRow]:
    """Verify logits and the row of one session, drafted with `propose_children`."""
    params, widths = _session(index, vocab)
    generator = torch.Generator().manual_seed(index)
    parents = tree_shape(widths)
    logits = torch.randn(1 + len(parents), vocab, generator=generator) * 2.0
    guesses = logits + 0.4 * torch.randn(logits.shape, generator=generator)
    tokens, slots = np.zeros(len(parents), np.int32), dict[int, DistributionEntries]()
    position = 50 + index
    output = np.arange(index % 7, dtype=np.int32)
    for node in sorted(set(parents.tolist())):
        path, up = [], node
        while up >= 0:
            path.append(int(tokens[up]))
            up = int(parents[up])
        children = np.flatnonzero(parents == node)
        found = propose_children(
            guesses[node + 1][None],
            None,
            [params],
            [position + len(path)],
            len(children),
            [TokenHistory(output_ids=output, path_ids=tuple(path[::-1]))],
        )
        tokens[children] = found.tokens[0].numpy()
        if found.distributions[0] is not None:
            slots[node + 1] = found.distributions[0]
    distribution = make_distribution(len(parents), slots) if slots and has_distribution else None
    tree = DraftTree(tokens, parents, np.zeros(len(parents), np.float32)) if widths else None
    row = AcceptRow(
        logits_start=0,
        tree=tree,
        distribution=distribution,
        sampling=params,
        position=position,
        output_ids=output,
    )
    return logits, row


def _together(parts: list[tuple[Tensor, AcceptRow]]) -> list[AcceptanceResult]:
    starts = np.cumsum([0, *(len(logits) for logits, _ in parts)])
    rows = [
        replace(row, logits_start=int(start))
        for start, (_, row) in zip(starts, parts, strict=False)
    ]
    return accept_drafts(torch.cat([logits for logits, _ in parts]), rows)


@pytest.mark.parametrize(("vocab", "sessions"), [(37, 220), (5000, 44)])
def test_a_ragged_mixed_batch_equals_each_row_alone(vocab: int, sessions: int) -> None:
    parts = [_make(i, vocab, has_distribution=i % 8 != 2) for i in range(sessions)]
    alone = [accept_drafts(logits, [row])[0] for logits, row in parts]
    assert _together(parts) == alone
    assert any(a.used_target_only_fallback for a in alone)
    assert {len(a.accepted_nodes) for a in alone} >= {0, 1, 2}


def test_the_order_of_a_batch_changes_nothing() -> None:
    parts = [_make(i, 37) for i in range(120)]
    expected = _together(parts)
    order = np.random.default_rng(0).permutation(len(parts))
    shuffled = _together([parts[i] for i in order])
    assert [shuffled[place] for place in np.argsort(order)] == expected


def test_a_draft_law_follows_its_session_across_skipped_rounds_and_a_preemption() -> None:
    """Drafted in one batch, judged later in other batches: the distribution travels with the
    proposal."""
    parts = [_make(i, 37) for i in range(60)]
    expected = _together(parts)
    cached = dict(enumerate(parts))
    seen: dict[int, AcceptanceResult] = {}
    for members in (
        [7, 3, 59, 20],
        [0],
        [i for i in range(59, -1, -1) if i not in (7, 3, 59, 20, 0)],
    ):
        for index, result in zip(members, _together([cached[i] for i in members]), strict=True):
            seen[index] = result
    assert [seen[i] for i in range(60)] == expected
    assert sum(row.distribution is not None for _, row in parts) >= 10


def test_twenty_repetitions_give_one_result() -> None:
    parts = [_make(i, 300) for i in range(40)]
    first = _together(parts)
    assert all(_together(parts) == first for _ in range(20))


def _lists(
    distributions: tuple[DistributionEntries | None, ...],
) -> list[tuple[list[int], list[int]] | None]:
    return [None if law is None else (law[0].tolist(), law[1].tolist()) for law in distributions]


@pytest.mark.parametrize(("vocab", "top_k"), [(37, 1), (37, 3), (5000, 1), (5000, 4)])
def test_drafts_of_a_mixed_batch_equal_each_row_alone(vocab: int, top_k: int) -> None:
    params = [_session(i, vocab)[0] for i in range(44)]
    logits = torch.randn(44, vocab, generator=torch.Generator().manual_seed(1)) * 2.0
    target_ids = torch.arange(vocab) * 2 + 1
    positions = list(range(44))
    together = propose_children(logits, target_ids, params, positions, top_k)
    alone = [
        propose_children(logits[i : i + 1], target_ids, params[i : i + 1], [i], top_k)
        for i in range(44)
    ]
    assert torch.equal(together.tokens, torch.cat([one.tokens for one in alone]))
    assert torch.equal(together.draft_ids, torch.cat([one.draft_ids for one in alone]))
    assert torch.equal(together.logprobs, torch.cat([one.logprobs for one in alone]))
    assert _lists(together.distributions) == [
        law for one in alone for law in _lists(one.distributions)
    ]
